"""The web application of `composer view`: who may ask, the pages, the server on loopback, the list and the curves.

Every answer is made anew from the files on disk, and nothing is ever written.
"""

import math
import secrets
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from composer_cli.printing import age, duration, visible
from composer_cli.report.charts import ticks
from composer_cli.show import facts
from composer_cli.show import runs as run_folders
from composer_cli.show.facts import METRICS, metric_rows
from composer_cli.show.runs import RunLine, lines
from composer_cli.view import transcript
from stages.errors import BadInput, ComposerError, UsageError
from stages.runs import queries
from stages.runs.artifact import Run
from stages.runs.queries import RolloutFilter
from stages.runs.records import EVAL_ITEM

HEADLINES = ("verdict", "decision", "mean_reward", "pairs", "pairs_per_trace", "arm", "cleaner")
"""The conclusions of a run that its line in the list shows."""
WIDTH, HEIGHT, LEFT, BOTTOM = 320.0, 150.0, 44.0, 22.0
MOST = 12
"""Curves on a page."""
HOST = "127.0.0.1"
HOSTS = [HOST, "localhost"]
POLICY = (
    "default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self'; connect-src 'self'; form-action 'self'; "
    "base-uri 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
REFUSED = "This address lacks the token that `composer view` printed. Open the whole address from there.\n"


class TokenGuard:
    """An ASGI application around another: whoever knows the token may ask, and the other sees addresses without it.

    The token is the first part of every address. A page of another site does not know it, and cannot learn it: names
    that were bound to this machine anew (DNS rebinding) are refused by the host header, and no address leaves a page
    as a referrer.
    """

    def __init__(self, app: Any, token: str) -> None:
        self._app, self._prefix = app, f"/{token}"

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """Answer, or refuse with 403 before any other part of the address is read."""

        async def send_with_headers(message: Any) -> None:
            # Here rather than in the pages, so that static files and refusals carry the headers too.
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        # Neither WebSockets nor lifespan events: the pages need none.
        if scope["type"] != "http":
            return
        # Compared in constant time, so that the time of an answer tells nothing about the token.
        if not secrets.compare_digest(scope["path"][: len(self._prefix) + 1].encode(), f"{self._prefix}/".encode()):
            await PlainTextResponse(REFUSED, 403, headers=HEADERS)(scope, receive, send)
            return
        await self._app({**scope, "root_path": self._prefix}, receive, send_with_headers)


def plain(value: Any) -> str:
    """Return a value for people: yes and no, four digits, a dash for what is not known."""
    if value is None:
        return "\u2013"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(plain, value))
    return str(value)


def query(wanted: Mapping[str, Any], **changed: Any) -> str:
    """Return the query string of an address, with some of it changed and what is empty left out."""
    kept = {name: value for name, value in {**wanted, **changed}.items() if value not in ("", None, False, 0)}
    return "?" + urlencode({name: "on" if value is True else value for name, value in kept.items()}) if kept else "?"


FILTERS: dict[str, Callable[..., str]] = {
    "plain": plain,
    "words": lambda name: name.replace("_", " "),
    "duration": duration,
    "age": age,
    "counted": lambda number: f"{number:,}",
    "part": lambda text: quote(text, safe=""),
}
"""Filters of the templates."""
FOLDER = Path(__file__).parent
SIZE = 50
"""Rollouts on a page."""


def build(root: Path, token: str) -> TokenGuard:
    """Return the application over the runs below `root`."""
    pages = Pages(root, f"/{token}")
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
    return TokenGuard(TrustedHostMiddleware(app, allowed_hosts=HOSTS, www_redirect=False), token)


class Pages:
    """One method a page. They are ordinary functions, which the server runs in threads."""

    def __init__(self, root: Path, base: str) -> None:
        import jinja2

        self._root, self._base = root, base
        loader = jinja2.FileSystemLoader(FOLDER / "pages")
        self._templates = jinja2.Environment(autoescape=True, loader=loader, trim_blocks=True, lstrip_blocks=True)
        self._templates.filters |= FILTERS

    def runs(self, request: Request) -> Response:
        """Show all runs, or those that fit the search."""
        wanted = {name: request.query_params.get(name, "") for name in ("text", "stage", "status")}
        every = listed(self._root)
        found = [one for one in every if fits(one, **wanted)]
        return self._page(
            "runs",
            title="Runs",
            wanted=wanted,
            listed=found,
            every=len(every),
            stages=sorted({one.stage for one in every}),
            statuses=sorted({one.line.status for one in every}),
            live=any(one.line.reason == "in progress" for one in found),
        )

    def run(self, request: Request) -> Response:
        """Show one run: facts, curves, figures, and a page of its rollouts."""
        run = self._run(request)
        wanted, offset = _wanted(request)
        found = queries.page(run, wanted, offset, SIZE)
        name = run_folders.name(run.path)
        inputs = [run_folders.name(Path(ref.path)) for ref in run_folders.references(run.manifest)]
        return self._page(
            "run",
            title=name,
            run=run,
            name=name,
            facts="\n".join(f"{label:<8}{words}" for label, words in facts.described(run).items()).splitlines(),
            report=(run.read_file("report.txt") or b"").decode(errors="replace").strip(),
            inputs=[(one, (self._root / one / "manifest.json").is_file()) for one in inputs],
            made=[run_folders.name(one.path) for one in run_folders.made_from(self._root, run)],
            curves=curves(run),
            figures=run.manifest.summary.get("figures", []),
            found=found,
            wanted=wanted.__dict__,
            size=SIZE,
            tables={} if found else queries.first_rows(run, 5),
            arms=_arms(run),
            live=run.manifest.status == "running",
        )

    def rollout(self, request: Request) -> Response:
        """Show one rollout, step by step."""
        run, wanted = self._run(request), request.query_params.get("id", "")
        seen = transcript.transcript(self._root, run, wanted)
        if seen is None:
            raise BadInput(f"{run_folders.name(run.path)} has no rollout {wanted!r}. Its page lists those that it has.")
        return self._page("rollout", title=wanted, name=run_folders.name(run.path), seen=seen)

    def compare(self, request: Request) -> Response:
        """Show two arms side by side: the tasks on which they part, and the rollouts of one task."""
        run, arms = self._run(request), _arms(self._run(request))
        first = request.query_params.get("a") or run.manifest.config.get("baseline") or next(iter(arms), "")
        second = request.query_params.get("b") or run.manifest.config.get("treatment") or next(reversed(arms), "")
        tasks, task = queries.tasks(run), request.query_params.get("task", "")
        sides = [(arm, [transcript.item(row) for row in queries.of_task(run, task, arm)]) for arm in (first, second)]
        shown = {"task": task, "a": first, "b": second}
        title = f"{first} beside {second}"
        return self._page(
            "compare",
            title=title,
            name=run_folders.name(run.path),
            arms=arms,
            tasks=tasks,
            wanted=shown,
            sides=sides if task else [],
        )

    def figure(self, request: Request) -> Response:
        """Return a figure of the probe, one of those that its manifest names."""
        run, name = self._run(request), request.path_params["name"]
        # Only names that the manifest lists: any other could lead out of the run's folder.
        data = run.read_file(f"{name}.png") if name in run.manifest.summary.get("figures", []) else None
        if data is None:
            raise BadInput(f"{run_folders.name(run.path)} has no figure {name!r}. Its page shows those that it has.")
        return Response(data, media_type="image/png")

    def refused(self, request: Request, error: Exception) -> Response:
        """Show a sentence for an address that leads nowhere, or a run that cannot be read."""
        sentence = str(error) if isinstance(error, ComposerError) else "There is no such page."
        code = getattr(error, "status_code", 404)
        return self._page("refused", title="Not here", sentence=sentence, code=code)

    def _run(self, request: Request) -> Run:
        """Return the run of an address; only folders that are listed are opened, whatever else a name may point to."""
        wanted = f"{request.path_params['stage']}/{request.path_params['folder']}"
        for path in run_folders.folders(self._root):
            if run_folders.name(path) == wanted:
                return Run(path)
        raise BadInput(f"There is no run {wanted}. The first page lists those that there are.")

    def _page(self, template: str, /, *, code: int = 200, **values: Any) -> HTMLResponse:
        page = self._templates.get_template(f"{template}.html.j2").render(base=self._base, query=query, **values)
        return HTMLResponse(visible(page).encode(errors="replace"), code)


def _arms(run: Run) -> list[str]:
    """Return the arms of an evaluation, in order of their names."""
    if not run.holds(EVAL_ITEM):
        return []
    return sorted({role.rpartition("/")[0] for role in run.manifest.models})


def _wanted(request: Request) -> tuple[RolloutFilter, int]:
    """Return the filters of an address and the offset of its page; numbers that are none count as 0."""
    asked = request.query_params
    offset = asked.get("offset", "0")
    reward = asked.get("reward", "")
    # What an address asks for may be anything; an unknown reward or offset counts as none.
    wanted = RolloutFilter(
        text=asked.get("text", ""),
        task=asked.get("task", ""),
        arm=asked.get("arm", ""),
        reward=reward if reward in queries.REWARDS else "",  # type: ignore[arg-type]  # a key of a closed table
        hacked="hacked" in asked,
        error="error" in asked,
        order=asked.get("order", ""),
    )
    return wanted, int(offset) if offset.isascii() and offset.isdigit() and len(offset) < 12 else 0


def serve(root: Path, port: int, tell: Callable[[str], None]) -> None:
    """Serve the runs below `root` on loopback until interrupted; `tell` is called with the address once it answers.

    port: 0 for one that is free. Raises `UsageError` where the port is taken.
    """
    token = secrets.token_urlsafe(16)
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((HOST, port))
        except (OSError, OverflowError) as error:
            raise UsageError(
                f"Port {port} cannot be used ({error}). Choose another with --port, or leave it out."
            ) from None
        # Bound here and not by uvicorn: the address with the port that was free is told only once it accepts requests.
        listener.listen(128)
        config = uvicorn.Config(
            build(root, token), log_level="warning", access_log=False, server_header=False, lifespan="off"
        )
        tell(f"http://{HOST}:{listener.getsockname()[1]}/{token}/")
        try:
            uvicorn.Server(config).run(sockets=[listener])
        except KeyboardInterrupt:
            return  # Ctrl-C is how one ends it


# The list of runs with its search, and the curves of a training.


@dataclass(frozen=True)
class ListedRun:
    """One line of the list."""

    line: RunLine
    stage: str
    headline: dict[str, Any]


def listed(root: Path) -> list[ListedRun]:
    """Return all runs with their headlines, newest first."""
    found = []
    for line in lines(root, versions=False):
        summary = {} if line.status == "unreadable" else Run(root / line.run).manifest.summary
        headline = {name: summary[name] for name in HEADLINES if summary.get(name) is not None}
        found.append(ListedRun(line, line.run.partition("/")[0], headline))
    return sorted(found, key=lambda one: one.line.began, reverse=True)


def fits(one: ListedRun, text: str, stage: str, status: str) -> bool:
    """Whether a run is of this stage and status, and the text occurs in its name, status, reason or headline.

    An empty word fits every run.
    """
    searched = f"{one.line.run} {one.line.status} {one.line.reason} {one.headline}".lower()
    return text.lower() in searched and stage in ("", one.stage) and status in ("", one.line.status)


@dataclass(frozen=True)
class MetricCurve:
    """One metric as an SVG path without styles, so that a page's colours hold in light and dark.

    Places are in units of the drawing, WIDTH by HEIGHT; marks of both axes are pairs (place, label).
    """

    title: str
    last: float
    path: str
    marks_x: list[tuple[float, str]]
    marks_y: list[tuple[float, str]]


def curves(run: Run) -> list[MetricCurve]:
    """Return curves of the metrics logged so far, the report's first; other metrics that are constant are left out."""
    rows = metric_rows(run)
    series: dict[str, list[tuple[float, float]]] = {}
    for name in dict.fromkeys([*METRICS, *(name for row in rows for name in row)]):
        points = [
            (float(row.get("step", i)), float(value))
            for i, row in enumerate(rows)
            if isinstance(value := row.get(name), (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        ]
        if name in METRICS or (name not in ("step", "epoch", "num_tokens") and len({y for _, y in points}) > 1):
            series[name] = points
    return [_curve(METRICS.get(name, name), points) for name, points in series.items() if len(points) > 1][:MOST]


def _curve(title: str, points: Sequence[tuple[float, float]]) -> MetricCurve:
    axes = []
    for values, wanted in (([x for x, _ in points], 4), ([y for _, y in points], 3)):
        low, high = min(values), max(values)
        # A constant metric still needs an axis of some width.
        axes.append(ticks(low, high, wanted) if high > low else ticks(low - 0.5, high + 0.5, wanted))
    across, up = axes

    def place(x: float, y: float) -> tuple[float, float]:
        """Return a point's place in the drawing; SVG counts down from the top."""
        return (
            round(LEFT + (x - across[0]) / (across[-1] - across[0]) * (WIDTH - LEFT - 8), 1),
            round(6 + (1 - (y - up[0]) / (up[-1] - up[0])) * (HEIGHT - BOTTOM - 6), 1),
        )

    path = "M" + " L".join("{},{}".format(*place(x, y)) for x, y in points)
    marks_x = [(place(mark, up[0])[0], f"{mark:g}") for mark in across if mark == int(mark)]
    marks_y = [(place(across[0], mark)[1], f"{mark:.4g}") for mark in up]
    return MetricCurve(title, points[-1][1], path, marks_x, marks_y)
