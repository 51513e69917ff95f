"""Addresses and what answers them. Every answer is made anew from what lies on disk, and nothing is ever written."""

from functools import cache
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from composer_cli.show import show
from composer_cli.view import transcript
from composer_cli.view.catalog import Catalog
from composer_cli.view.curves import curves
from composer_cli.view.guard import HOSTS, Guard
from composer_cli.view.page_parts import FILTERS, query
from composer_cli.visible import visible
from stages.errors import BadInput, ComposerError
from stages.runs import search
from stages.runs.artifact import Run
from stages.runs.outcome_records import EVAL_ITEM
from stages.runs.search import Wanted

FOLDER = Path(__file__).parent
SIZE = 50
"""Rollouts on a page."""


def build(root: Path, token: str) -> Guard:
    """The application over the runs below `root`, for whoever knows the token."""
    pages = Pages(Catalog(root), f"/{token}")
    routes = [
        Route("/", pages.runs),
        Route("/run/{stage}/{folder}", pages.run),
        Route("/rollout/{stage}/{folder}", pages.rollout),
        Route("/compare/{stage}/{folder}", pages.compare),
        Route("/figure/{stage}/{folder}/{name}", pages.figure),
        Mount("/static", StaticFiles(directory=FOLDER / "static")),
    ]
    refusals: dict[Any, Any] = {404: pages.refused, 405: pages.refused, ComposerError: pages.refused}
    app = Starlette(routes=routes, exception_handlers=refusals)
    return Guard(TrustedHostMiddleware(app, allowed_hosts=HOSTS, www_redirect=False), token)


class Pages:
    """One method a page. They are ordinary functions, which the server runs in threads."""

    def __init__(self, catalog: Catalog, base: str) -> None:
        self._catalog, self._base = catalog, base

    def runs(self, request: Request) -> Response:
        """All runs, or those that fit."""
        wanted = {name: request.query_params.get(name, "") for name in ("text", "stage", "status")}
        listed, every = self._catalog.listed(**wanted), self._catalog.listed()
        return self._page(
            "runs",
            title="Runs",
            wanted=wanted,
            listed=listed,
            every=len(every),
            stages=sorted({one.stage for one in every}),
            statuses=sorted({one.line.status for one in every}),
            live=any(one.line.reason == "in progress" for one in listed),
        )

    def run(self, request: Request) -> Response:
        """One run: facts, curves, figures, and a page of its rollouts."""
        run = self._run(request)
        wanted, offset = _wanted(request)
        found = search.page(run, wanted, offset, SIZE) if search.holds_rollouts(run) else None
        name = _name(run)
        return self._page(
            "run",
            title=name,
            run=run,
            name=name,
            facts=show.facts(run).splitlines()[1:],
            report=(run.beside("report.txt") or b"").decode(errors="replace").strip(),
            inputs=self._catalog.inputs(run),
            made=[_name(one) for one in self._catalog.made_from(run)],
            curves=curves(run),
            figures=run.manifest.summary.get("figures", []),
            found=found,
            wanted=wanted.__dict__,
            size=SIZE,
            tables={} if found else search.first_rows(run, 5),
            arms=_arms(run),
            live=run.manifest.status == "running",
        )

    def rollout(self, request: Request) -> Response:
        """One rollout, step by step."""
        run, wanted = self._run(request), request.query_params.get("id", "")
        seen = transcript.transcript(self._catalog, run, wanted)
        if seen is None:
            raise BadInput(f"{_name(run)} has no rollout {wanted!r}. Its page lists those that it has.")
        return self._page("rollout", title=wanted, name=_name(run), seen=seen)

    def compare(self, request: Request) -> Response:
        """Two arms side by side: the tasks on which they part, and the rollouts of one task."""
        run, arms = self._run(request), _arms(self._run(request))
        first = request.query_params.get("a") or run.manifest.config.get("baseline") or next(iter(arms), "")
        second = request.query_params.get("b") or run.manifest.config.get("treatment") or next(reversed(arms), "")
        tasks, task = search.tasks(run), request.query_params.get("task", "")
        sides = [(arm, [transcript.item(row) for row in search.of_task(run, task, arm)]) for arm in (first, second)]
        shown = {"task": task, "a": first, "b": second}
        title = f"{first} beside {second}"
        return self._page(
            "compare", title=title, name=_name(run), arms=arms, tasks=tasks, wanted=shown, sides=sides if task else []
        )

    def figure(self, request: Request) -> Response:
        """A figure of the probe, one of those that the run says it drew."""
        run, name = self._run(request), request.path_params["name"]
        data = run.beside(f"{name}.png") if name in run.manifest.summary.get("figures", []) else None
        if data is None:
            raise BadInput(f"{_name(run)} has no figure {name!r}. Its page shows those that it has.")
        return Response(data, media_type="image/png")

    def refused(self, request: Request, error: Exception) -> Response:
        """A sentence for an address that leads nowhere, or a run that cannot be read."""
        sentence = str(error) if isinstance(error, ComposerError) else "There is no such page."
        code = getattr(error, "status_code", 404)
        return self._page("refused", title="Not here", sentence=sentence, code=code)

    def _run(self, request: Request) -> Run:
        stage, folder = request.path_params["stage"], request.path_params["folder"]
        run = self._catalog.run(stage, folder)
        if run is None:
            raise BadInput(f"There is no run {stage}/{folder}. The first page lists those that there are.")
        return run

    def _page(self, template: str, /, *, code: int = 200, **values: Any) -> HTMLResponse:
        page = _templates().get_template(f"{template}.html.j2").render(base=self._base, query=query, **values)
        return HTMLResponse(visible(page).encode(errors="replace"), code)


@cache
def _templates() -> Any:
    import jinja2

    loader = jinja2.FileSystemLoader(FOLDER / "pages")
    environment = jinja2.Environment(autoescape=True, loader=loader, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= FILTERS
    return environment


def _name(run: Run) -> str:
    return f"{run.path.parent.name}/{run.path.name}"


def _arms(run: Run) -> list[str]:
    """The arms of an evaluation, in order of their names."""
    if not run.holds(EVAL_ITEM):
        return []
    return sorted({role.rpartition("/")[0] for role in run.manifest.models})


def _wanted(request: Request) -> tuple[Wanted, int]:
    """What the address asks for; numbers that are none count as 0."""
    asked = request.query_params
    offset = asked.get("offset", "0")
    reward = asked.get("reward", "")
    wanted = Wanted(
        text=asked.get("text", ""),
        task=asked.get("task", ""),
        arm=asked.get("arm", ""),
        reward=reward if reward in search.REWARDS else "",  # type: ignore[arg-type]  # a key of a closed table
        hacked="hacked" in asked,
        error="error" in asked,
        order=asked.get("order", ""),
    )
    return wanted, int(offset) if offset.isascii() and offset.isdigit() and len(offset) < 12 else 0
