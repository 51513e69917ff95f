"""The web application of `composer view`: access control, one method a page, the server on loopback, the list of runs.

Every answer is made anew from the files on disk. Only notes on rollouts are written, to files beside the runs, and only
at the request of a page of this server.
"""

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit

import orjson
import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import MutableHeaders
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from composer_cli.loopback import HOST, HOSTS, bound
from composer_cli.show import facts, rollout as rollouts, runs as run_folders, sections, verdicts
from composer_cli.show.facts import find_rollouts_of_pairs
from composer_cli.show.rollout import OUTCOME, RolloutColumn
from composer_cli.show.runs import lines_and_summaries
from composer_cli.view import page
from composer_cli.view.notes import Note, NoteChanged, Notes
from composer_cli.view.page import MarkedLine, difference
from composer_stages.errors import BadInput, ComposerError, UsageError
from composer_stages.layout import escape_control_characters
from composer_stages.messages import Message
from composer_stages.runs import catalog, index, queries
from composer_stages.runs.kinds import ORIGIN, Row
from composer_stages.runs.queries import PairFilter, PairPage, RolloutFilter, Side, TaskFilter
from composer_stages.runs.run import Run, RunFacts
from composer_stages.words import Sentence

HEADLINES = ("verdict", "by", "decision", "mean_reward", "pairs", "pairs_per_rollout", "arm", "cleaner")
"""The conclusions of a run that its line in the list shows."""
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
    """An ASGI application around another: admits requests with the token, and removes it from the address.

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


SIZE, CARDS, TABLE_ROWS = 50, 20, 20
"""Rollouts or tasks on a page, pairs, and rows of other tables."""
MOST_TRAININGS = 60
"""Trainings whose curves are drawn on top of each other."""
MOST_DIFFERING = 2
"""Settings by which trainings of one arm are told apart."""
MOST_BYTES = 64 * 1024
"""Length of a form that is read."""
PAGES = ("run", "rollout", "step", "matrix", "compare", "curves", "chain")
"""First parts of the addresses that `composer view PAGE` takes."""


SORTED = {
    "run": ("run", False),
    "status": ("status", False),
    "environment": ("environment", False),
    "models": ("models", False),
    "age": ("began", True),
    "units": ("done", True),
    "USD": ("cost_usd", True),
    "took": ("seconds", True),
}
"""Columns of the list of runs that sort it, and by which field; whether the largest is first."""


def build(root: Path, token: str) -> TokenGuard:
    """Return the application over the runs below `root`."""
    pages = Pages(root, f"/{token}")
    routes = [
        Route("/", pages.runs),
        Route("/run/{stage}/{folder}", pages.run),
        Route("/rollout/{stage}/{folder}", pages.rollout),
        Route("/step/{stage}/{folder}", pages.step),
        Route("/matrix/{stage}/{folder}", pages.matrix),
        Route("/compare/{stage}/{folder}", pages.compare),
        Route("/curves", pages.curves),
        Route("/chain/{stage}/{folder}", pages.chain),
        Route("/note/{stage}/{folder}", pages.note, methods=["POST"]),
        Route("/figure/{stage}/{folder}/{name}", pages.figure),
        Mount("/static", StaticFiles(directory=page.FOLDER / "static")),
    ]
    refusals: dict[Any, Any] = dict.fromkeys((404, 405, ComposerError, *queries.UNREADABLE), pages.refused)
    app = Starlette(routes=routes, exception_handlers=refusals)
    return TokenGuard(TrustedHostMiddleware(app, allowed_hosts=HOSTS, www_redirect=False), token)


class Pages:
    """One method a page. They are ordinary functions, which the server runs in threads."""

    def __init__(self, root: Path, base: str) -> None:
        self._root, self._base = root, base

    def runs(self, request: Request) -> Response:
        """Show all runs, or those that fit the search."""
        filters = {name: request.query_params.get(name, "") for name in ("text", "stage", "status", "sort")}
        key, descending = SORTED.get(filters["sort"], SORTED["age"])
        rows = [
            (line, line.run.partition("/")[0], {key: summary[key] for key in HEADLINES if summary.get(key) is not None})
            for line, summary in lines_and_summaries(self._root, versions=False)
        ]
        # The text may occur in a run's name, status, reason or headline; an empty word fits every run.
        fitting = [
            (line, headline)
            for line, stage, headline in sorted(rows, key=lambda row: getattr(row[0], key), reverse=descending)
            if filters["text"].lower()
            in f"{line.run} {line.status} {line.environment} {line.models} {line.reason} {headline}".lower()
            and filters["stage"] in ("", stage)
            and filters["status"] in ("", line.status)
        ]
        return self._page(
            "runs",
            title="Runs",
            filters=filters,
            listed=fitting,
            every=len(rows),
            stages=sorted({stage for _, stage, _ in rows}),
            statuses=sorted({line.status for line, _, _ in rows}),
            live=any(line.reason == "in progress" for line, _ in fitting),
        )

    def run(self, request: Request) -> Response:
        """Show one run: its verdict, curves, figures, and a page of its rollouts or pairs."""
        run = self._run(request)
        if damage := run_folders.damage(run):
            return self._damaged(run, damage)
        name = catalog.name(run.path)
        notes = Notes(self._root, name)
        rollout_filter, offset = _filter(request, notes)
        rollout_page = queries.page(run, rollout_filter, offset, SIZE)
        shown_pairs, pair_filter = None, PairFilter()
        if rollout_page is None:
            pair_filter = PairFilter(**{key: request.query_params.get(key, "") for key in PairFilter.__annotations__})
            shown_pairs = queries.pairs(run, pair_filter, offset, CARDS)
        about, columns, chosen_columns = sections.section(run), *_columns(request, bool(run.holds(ORIGIN)))
        reads = dict.fromkeys(catalog.name(Path(ref.path)) for ref in catalog.references(run.manifest))  # each once
        return self._page(
            "run",
            title=name,
            run=run,
            name=name,
            facts=facts.manifest_labels(run),
            summary=facts.summary(run, rollout_page),
            blocks=about.blocks if about else [],
            report=(run.read_file("report.txt") or b"").decode(errors="replace").strip(),
            inputs=[(source, (self._root / source / "manifest.json").is_file()) for source in reads],
            made=[catalog.name(reader.path) for reader in index.readers_of(self._root, run)],
            alike=_same_experiment(self._trainings(), name) if run.manifest.stage == "train" else [],
            found=rollout_page,
            filters={**_address_fields(request, rollout_filter), "col": chosen_columns},
            size=SIZE,
            columns=columns,
            listed=[column for column in OUTCOME if column.listed],
            notes=notes.of([row["id"] for row in rollout_page.rows]) if rollout_page else {},
            pairs=shown_pairs,
            pair_filter=pair_filter.__dict__,
            pair_size=CARDS,
            cards=cards(self._root, run, shown_pairs) if shown_pairs else [],
            tables=[] if rollout_page or shown_pairs else facts.row_tables(run, TABLE_ROWS),
            arms=verdicts.arms(run),
            live=run.manifest.status == "running",
        )

    def rollout(self, request: Request) -> Response:
        """Show one rollout, step by step."""
        run, rollout_id = self._intact(request), request.query_params.get("id", "")
        name = catalog.name(run.path)
        rollout = rollouts.read(run, rollout_id, root=self._root)
        if rollout is None:
            raise BadInput("cli.view-no-rollout", run=name, rollout_id=rollout_id)
        notes = Notes(self._root, name)
        chosen, _ = _filter(request, notes)
        return self._page(
            "rollout",
            title=rollout_id,
            name=name,
            rollout=rollout,
            note=notes.of([rollout_id]).get(rollout_id, Note()),
            position=queries.place(run, chosen, rollout_id),
            filters=_address_fields(request, chosen),
        )

    def step(self, request: Request) -> Response:
        """Show what the model was asked at one step and what came back: JSON, sent as plain text."""
        run, parameters = self._intact(request), request.query_params
        exchange = rollouts.exchange(run, parameters.get("id", ""), _number(request, "step"))
        if exchange is None:
            raise BadInput("cli.view-no-step", run=catalog.name(run.path))
        return PlainTextResponse(escape_control_characters(orjson.dumps(exchange, option=orjson.OPT_INDENT_2).decode()))

    def matrix(self, request: Request) -> Response:
        """Show tasks by arms: a mark for each rollout, by seed and sample."""
        run = self._intact(request)
        name = catalog.name(run.path)
        tasks = queries.matrix(run, _number(request, "offset"), SIZE)
        return self._page("matrix", title=f"Tasks of {name}", name=name, matrix=tasks, size=SIZE)

    async def note(self, request: Request) -> Response:
        """Save the note on a rollout that a form of this server's pages sent; refuse everything else."""
        if not _same_origin(request):
            return PlainTextResponse("Notes are taken from the pages of this server alone.\n", 403)
        if request.headers.get("content-type", "").partition(";")[0].strip() != "application/x-www-form-urlencoded":
            return PlainTextResponse("A note is sent as a form.\n", 415)
        body = b""
        async for chunk in request.stream():
            body += chunk
            if len(body) > MOST_BYTES:
                return PlainTextResponse(f"A note is at most {MOST_BYTES // 1024} KiB long.\n", 413)
        try:
            parsed = parse_qs(body.decode(errors="replace"), max_num_fields=10)
        except ValueError:
            return PlainTextResponse("A note has four fields.\n", 400)
        fields = {key: values[0] for key, values in parsed.items()}
        return await run_in_threadpool(self._save_note, request, fields)

    def _save_note(self, request: Request, fields: Mapping[str, str]) -> Response:
        run, rollout_id = self._run(request), fields.get("id", "")
        name = catalog.name(run.path)
        # Only for rollouts that there are: nobody fills the disk with notes on others.
        if not rollout_id or queries.rollout(run, rollout_id)[0] is None:
            raise BadInput("cli.view-no-rollout-for-note", run=name, rollout_id=rollout_id)
        note = Note.of_form(fields.get("text", ""), fields.get("tags", ""))
        try:
            Notes(self._root, name).save(rollout_id, note, fields.get("seen", ""))
        except OSError as error:
            sentence = Sentence("cli.note-not-written", error=error)
            return self._page("refused", title="Not saved", sentence=sentence, code=500)
        return RedirectResponse(f"{self._base}/rollout/{name}{page.query({'id': rollout_id})}#note", 303)

    def compare(self, request: Request) -> Response:
        """Show two arms side by side: the tasks on which they differ most, and the rollouts of one task."""
        run = self._intact(request)
        arms = verdicts.arms(run)
        if not arms:
            raise BadInput("cli.view-no-arms", run=catalog.name(run.path))
        first, second = _two_arms(run, arms, request.query_params)
        filters = {key: request.query_params.get(key, "") for key in ("task", "family", "text", "side")}
        side: Side = filters["side"] if filters["side"] in queries.SIDES else ""  # type: ignore[assignment]  # its keys
        tasks = queries.tasks(
            run, first, second, TaskFilter(side, filters["family"], filters["text"]), _number(request, "offset"), SIZE
        )
        if side and tasks.rows and not filters["task"]:
            filters["task"] = tasks.rows[0]["task_id"]  # one click from the verdict to a rollout
        items = {arm: queries.of_task(run, filters["task"], arm) for arm in (first, second)} if filters["task"] else {}
        opened = _opened(items.get(first, []), items.get(second, []))
        sides = [
            (arm, [(rollouts.of_row(row), row["item_id"] in opened) for row in rows]) for arm, rows in items.items()
        ]
        return self._page(
            "compare",
            title=f"{first} and {second}, task by task",
            name=catalog.name(run.path),
            arms=arms,
            first=first,
            second=second,
            tasks=tasks,
            size=SIZE,
            filters={"a": first, "b": second, **filters},
            sides=sides,
        )

    def curves(self, request: Request) -> Response:
        """Show the curves of several trainings on top of each other: arms by colour, seeds as thin lines."""
        trainings = self._trainings()
        requested = [name for name in request.query_params.getlist("run") if name in trainings]
        newest = sorted(trainings, key=lambda name: trainings[name].started_at)[-1:]
        chosen = requested or [name for last in newest for name in _same_experiment(trainings, last)] or newest
        runs = [Run(self._root / name) for name in chosen[-MOST_TRAININGS:]]
        drawn = [replace(sections.training(run), arm=arm) for run, arm in zip(runs, _told_apart(runs), strict=True)]
        facts_of = [
            (name, str(training.config.get("arm", "")), training.config.get("seed"), training.status)
            for name, training in sorted(trainings.items(), key=lambda item: item[1].started_at, reverse=True)
        ]
        return self._page(
            "curves",
            title="Curves",
            trainings=facts_of,
            chosen=chosen,
            trained=drawn,
            left_out=len(chosen) - len(drawn),
            live=any(training.status == "running" for training in drawn),
        )

    def chain(self, request: Request) -> Response:
        """Show a run with all that it was made from, as `composer report` saves it."""
        runs = run_folders.with_ancestors([self._run(request)])
        return HTMLResponse(page.report(runs, base=self._base, image=self._image)[0])

    def _trainings(self) -> dict[str, RunFacts]:
        """Return the trainings with metrics by name."""
        trainings = {
            catalog.name(folder): entry.facts
            for folder, entry in index.entries(self._root).items()
            if entry.facts.stage == "train"
        }
        return {name: run for name, run in trainings.items() if (self._root / name / "metrics.jsonl").is_file()}

    def figure(self, request: Request) -> Response:
        """Return a figure of the probe, one of those that its manifest names."""
        run, name = self._run(request), request.path_params["name"]
        # Only names that the manifest lists: any other could lead out of the run's folder.
        data = run.read_file(f"{name}.png") if name in run.manifest.summary.get("figures", []) else None
        if data is None:
            raise BadInput("cli.view-no-figure", run=catalog.name(run.path), name=name)
        return Response(data, media_type="image/png")

    def refused(self, request: Request, error: Exception) -> Response:
        """Show a sentence for an address that leads nowhere, or a run that cannot be read."""
        sentence = str(error) if isinstance(error, ComposerError) else "There is no such page."
        if isinstance(error, queries.UNREADABLE):
            run = self._run(request) if "folder" in request.path_params else None
            # A large table is compared with its digest only here, where reading it failed.
            if run and (damage := run.damage("tables")):
                return self._damaged(run, damage)
            sentence = Sentence("cli.view-file-unreadable", error=str(error).splitlines()[0])
        code = getattr(error, "status_code", 409 if isinstance(error, NoteChanged) else 404)
        if isinstance(error, UsageError) and request.method == "POST" and code == 404:
            code = 400
        return self._page("refused", title="Not here", sentence=sentence, code=code)

    def _damaged(self, run: Run, damage: str) -> Response:
        """Show the facts of the manifest, which is intact; rows may not be what the run wrote."""
        name = catalog.name(run.path)
        return self._page(
            "damaged",
            title=name,
            run=run,
            name=name,
            damage=f"{damage}. {run_folders.REPAIR}",
            facts=facts.manifest_labels(run),
        )

    def _run(self, request: Request) -> Run:
        """Return the run of an address; only folders that are listed are opened, whatever else a name may point to."""
        name = f"{request.path_params['stage']}/{request.path_params['folder']}"
        for path in catalog.folders(self._root):
            if catalog.name(path) == name:
                return Run(path)
        raise BadInput("cli.view-no-run", run=name)

    def _intact(self, request: Request) -> Run:
        """Return the run of an address; `BadInput` where its files are damaged."""
        run = self._run(request)
        if damage := run_folders.damage(run):
            raise BadInput("cli.run-damaged", run=catalog.name(run.path), damage=damage)
        return run

    def _page(self, template: str, /, *, code: int = 200, **values: Any) -> HTMLResponse:
        return HTMLResponse(page.render(template, base=self._base, image=self._image, **values), code)

    def _image(self, run: str, figure: str) -> str:
        """Return the address of a figure."""
        return f"{self._base}/figure/{run}/{quote(figure, safe='')}"


def _filter(request: Request, notes: Notes) -> tuple[RolloutFilter, int]:
    """Return the filters of an address and the offset of its page; numbers that are none count as 0."""
    parameters = request.query_params
    reward, tag = parameters.get("reward", ""), parameters.get("tag", "")
    ids = None
    if tag or "noted" in parameters:
        ids = tuple(key for key, note in notes.all().items() if not tag or tag in note.tags)
    # What an address asks for may be anything; an unknown reward or offset counts as none.
    rollout_filter = RolloutFilter(
        **{name: parameters.get(name, "") for name in ("text", "task", "family", "arm", "order")},
        reward=reward if reward in queries.REWARDS else "",  # type: ignore[arg-type]  # a key of a closed table
        hacked="hacked" in parameters,
        error="error" in parameters,
        ids=ids,
    )
    return rollout_filter, _number(request, "offset")


def _address_fields(request: Request, rollout_filter: RolloutFilter) -> dict[str, Any]:
    """Return the filters as an address holds them."""
    fields = {key: value for key, value in rollout_filter.__dict__.items() if key != "ids"}
    return fields | {key: request.query_params.get(key, "") for key in ("noted", "tag")}


def _number(request: Request, name: str) -> int:
    """Return a number of an address, such as the offset of its page; 0 for one that is none."""
    text = request.query_params.get(name, "0")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 12 else 0


def _columns(request: Request, imported: bool) -> tuple[list[RolloutColumn], list[str]]:
    """Return the columns to show, in the order of OUTCOME, and the names of those that the address asks for.

    imported: whether the ids are those of another program, which need not name task and sample.
    """
    requested = [column for column in OUTCOME if column.listed and column.name in request.query_params.getlist("col")]
    identity = ("task_id", "sample_idx") if imported else ()
    usual = [column for column in OUTCOME if column.usual or column.name in identity]
    return requested or usual, [column.name for column in requested]


def _same_origin(request: Request) -> bool:
    """Return whether a page of this server sent a request that writes.

    The token in the address is what protects; this holds even where it became known. Browsers name the sender's
    relation in Sec-Fetch-Site, and its origin in Origin ("null" here, since no page sends a referrer).
    """
    if site := request.headers.get("sec-fetch-site"):
        return site == "same-origin"
    return request.headers.get("origin") == f"http://{request.headers.get('host')}"


def _same_experiment(trainings: Mapping[str, RunFacts], name: str) -> list[str]:
    """Return the trainings of the same model in the same environment, this one too; empty if it is the only one."""
    this = _experiment(trainings[name]) if name in trainings else None
    names = [name for name, training in trainings.items() if _experiment(training) == this]
    return names[-MOST_TRAININGS:] if len(names) > 1 else []


def _experiment(training: RunFacts) -> tuple[str, str]:
    """Return model and environment of a training, by which its arms and seeds belong together."""
    env = training.config.get("env")
    return page.model_of(training), str(env.get("name") if isinstance(env, dict) else "")


def _told_apart(trainings: Sequence[Run]) -> list[str]:
    """Return the arm of each training; those of an arm that differ in more than the seed have what differs behind it.

    The model that a training starts from may be another for every seed.
    """
    flat = {training.path.name: dict(_flat(training.manifest.config)) for training in trainings}
    arms: dict[str, list[str]] = {}
    for name, config in flat.items():
        arms.setdefault(config.get("arm", ""), []).append(name)
    apart = {}
    for arm, names in arms.items():
        keys = dict.fromkeys(key for name in names for key in flat[name] if not key.startswith(("seed", "policy.")))
        differing = [key for key in keys if len({flat[name].get(key) for name in names}) > 1][:MOST_DIFFERING]
        seeds = [(*map(flat[name].get, differing), flat[name].get("seed")) for name in names]
        for name in names:
            words = [f"{key.rpartition('.')[2]} {flat[name].get(key, 'none')}" for key in differing]
            words += [name.rpartition("-")[2]] if len({*seeds}) < len(seeds) else []
            apart[name] = ", ".join([arm, *words])
    return [apart[name] for name in flat]


def _flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield each setting by its dotted key, as text."""
    for key, value in config.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", str(value)


# The arms of an evaluation.


def _two_arms(run: Run, arms: Sequence[str], parameters: Mapping[str, str]) -> tuple[str, str]:
    """Return the two arms that an address asks for: else baseline and treatment, else the first and the last."""
    config = run.manifest.config
    first = next((arm for arm in (parameters.get("a"), config.get("baseline")) if arm in arms), arms[0])
    second = next((arm for arm in (parameters.get("b"), config.get("treatment")) if arm in arms), arms[-1])
    return str(first), str(second)


def _opened(first: Sequence[Row], second: Sequence[Row]) -> set[str]:
    """Return the ids of the rollouts to open: one that passed beside one that failed, or else the first of each arm."""
    rows = (
        verdicts.find_contrasting(first, second)
        or verdicts.find_contrasting(second, first)
        or (*first[:1], *second[:1])
    )
    return {row["item_id"] for row in rows}


def page_of(link: str) -> str:
    """Return the page of a link, below the token: a path (`run/...`), or a full address of any server.

    Raises `UsageError` for anything else.
    """
    text = link.strip()
    parts = urlsplit(text)
    if parts.scheme:
        # The address of a server that may have ended long ago; its first part was that server's token.
        path = parts.path.lstrip("/").partition("/")[2]
        text = path + (f"?{parts.query}" if parts.query else "") + (f"#{parts.fragment}" if parts.fragment else "")
    text = text.lstrip("/")
    if text and text.partition("?")[0].partition("#")[0].partition("/")[0] not in PAGES:
        raise UsageError("cli.no-page", link=link)
    return quote(text, safe="/?&=#%+:@,;~!$()*'[]-._")


def serve(root: Path, port: int, notify: Callable[[str], None], link: str = "") -> None:
    """Serve the runs below `root` on loopback until interrupted; `notify` is called with the address once it answers.

    port: 0 for one that is free. link: as `page_of` returns it. Raises `UsageError` where the port is taken.
    """
    token = secrets.token_urlsafe(16)
    with bound(port) as listener:
        # Bound here and not by uvicorn: the address with the port that was free is told only once it accepts requests.
        listener.listen(128)
        config = uvicorn.Config(
            build(root, token), log_level="warning", access_log=False, server_header=False, lifespan="off"
        )
        notify(f"http://{HOST}:{listener.getsockname()[1]}/{token}/{link}")
        try:
            uvicorn.Server(config).run(sockets=[listener])
        except KeyboardInterrupt:
            return  # Ctrl-C is how one ends it


# Preference pairs as cards: what differs between both actions, in the state that they share.


@dataclass(frozen=True)
class PairCard:
    """A pair as its card shows it.

    `state` are the messages of the shared state, the last one first to read; `outcome` the rollout in which the state
    was reached, `played_by` its run; `continued` passed and graded continuations by action, chosen first.
    """

    row: Row
    difference: list[MarkedLine]
    state: list[Message]
    outcome: Row | None
    played_by: str
    continued: list[tuple[str, int, int]]


def cards(root: Path, run: Run, page: PairPage) -> list[PairCard]:
    """Return the cards of the pairs on a page."""
    states = queries.state_messages(run, page.rows) if page.rows else {}
    outcomes = find_rollouts_of_pairs(root, run, page.rows)
    continuations = queries.continuations(run, [row["state_sha256"] for row in page.rows])
    pair_cards = []
    for row in page.rows:
        outcome, played_by = outcomes.get(row["rollout_id"], (None, ""))
        continued = [
            (side, *continuations[key])
            for side in ("chosen", "rejected")
            if (key := (row["state_sha256"], row[side])) in continuations
        ]
        state = states.get(row["pair_id"], [])
        pair_cards.append(
            PairCard(row, difference(row["rejected"], row["chosen"]), state, outcome, played_by, continued)
        )
    return pair_cards
