"""Pages as HTML, and a report: the sections of a chain of runs, saved as one file that needs no other.

In order: curves and timelines as SVG, texts (Markdown, code, marked lines), templates, a chain and what it is about.

A saved report forbids scripts and requests by a policy of its own, as it is opened from disk, where no header does.
"""

import base64
import json
import math
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher, unified_diff
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode

import orjson
from markdown_it import MarkdownIt
from markupsafe import Markup, escape
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_by_name

from composer_cli.show import runs
from composer_cli.show.blocks import (
    Findings,
    Intervals,
    Points,
    Section,
    Training,
    as_json,
    colours,
    hue,
    kind,
    position,
    ticks,
)
from composer_cli.show.facts import METRICS, manifest_values
from composer_cli.show.rollout import title_of
from composer_cli.show.sections import SECTIONS, losses, section
from composer_stages import STAGES, command_words, messages, stages_of
from composer_stages.errors import BadInput
from composer_stages.layout import age, counted, duration, escape_control_characters
from composer_stages.runs import catalog, store
from composer_stages.runs.display import cell, plain
from composer_stages.runs.kinds import Row
from composer_stages.runs.run import Run, RunFacts
from composer_stages.runs.settings import assignment, default_of, known, nested
from composer_stages.runs.stage import load_stage
from composer_stages.terms import grounds_in_words

if TYPE_CHECKING:
    import jinja2

# Training curves as SVG paths, and the timeline of a rollout. A colour is an arm's, a thin line a seed's, and a thick
# line the mean of an arm's seeds at the steps that all have.

WIDTH, HEIGHT, LEFT, BOTTOM = 320.0, 150.0, 44.0, 22.0
MOST_CHARTS = 12
"""Charts on a page."""
MOST_POINTS = 400
"""Points of a line: a drawing has fewer pixels."""
NOT_DRAWN = ("step", "epoch", "num_tokens", "rewards/", "completions/")
"""Beginnings of metrics without a title that count the training's progress, or vary with one that has a title."""
TITLES = METRICS | {
    "reward_std": "spread of rewards in a group",
    "frac_reward_zero_std": "groups of equal rewards, share",
    "completions/clipped_ratio": "rollouts cut off, share",
    "step_time": "seconds of a step",
}
"""The titles of metrics."""


@dataclass(frozen=True)
class CurveLine:
    """One line: the number of its arm's colour, an SVG path, its steps and values, whether it is thin (one seed)."""

    label: str
    number: int
    path: str
    points: str
    thin: bool = False


@dataclass(frozen=True)
class MetricChart:
    """One metric as SVG paths without styles, so that a page's colours hold in light and dark.

    Positions are in units of the drawing, WIDTH by HEIGHT; marks of both axes are pairs (position, label).
    `last` is the newest value of a single training.
    """

    title: str
    last: float | None
    lines: list[CurveLine]
    marks_x: list[tuple[float, str]]
    marks_y: list[tuple[float, str]]


def charts(trainings: Sequence[Training]) -> list[MetricChart]:
    """Return charts of the metrics, those with a title first; other metrics that are constant are left out."""
    numbers = colours(training.arm for training in trainings)
    drawn = []
    for name in dict.fromkeys([*METRICS, *(name for training in trainings for name in training.series)]):
        having = [training for training in trainings if len(training.series.get(name, ())) > 1]
        varies = len({value for training in having for _, value in training.series[name]}) > 1
        if having and (name in METRICS or (varies and (name in TITLES or not name.startswith(NOT_DRAWN)))):
            drawn.append(_metric_chart(TITLES.get(name, name), name, having, numbers))
    return drawn[:MOST_CHARTS]


def legend(trainings: Sequence[Training]) -> list[tuple[str, str, int, int]]:
    """Return name, losses, colour number and number of seeds of each arm."""
    arms: dict[tuple[str, str], set[str]] = {}
    for training in trainings:
        arms.setdefault((training.arm, training.losses), set()).add(training.seed)
    numbers = colours(arm for arm, _ in arms)
    return [(arm, losses, numbers[arm], len(seeds)) for (arm, losses), seeds in sorted(arms.items())]


def _metric_chart(title: str, name: str, trainings: Sequence[Training], numbers: dict[str, int]) -> MetricChart:
    all_points = [point for training in trainings for point in training.series[name]]
    axes = []
    for values, num_marks in (([x for x, _ in all_points], 4), ([y for _, y in all_points], 3)):
        low, high = min(values), max(values)
        # A constant metric still needs an axis of some width.
        axes.append(ticks(low, high, num_marks) if high > low else ticks(low - 0.5, high + 0.5, num_marks))
    across, up = axes

    def position(x: float, y: float) -> tuple[float, float]:
        """Return a point's position in the drawing; SVG counts down from the top."""
        return (
            round(LEFT + (x - across[0]) / (across[-1] - across[0]) * (WIDTH - LEFT - 8), 1),
            round(6 + (1 - (y - up[0]) / (up[-1] - up[0])) * (HEIGHT - BOTTOM - 6), 1),
        )

    def line(label: str, arm: str, points: Points, *, thin: bool = False) -> CurveLine:
        # Every n-th point and the last, which is the newest.
        drawn = points[:: math.ceil(len(points) / MOST_POINTS)]
        drawn = drawn if drawn[-1] == points[-1] else [*drawn, points[-1]]
        path = "M" + " L".join("{},{}".format(*position(x, y)) for x, y in drawn)
        return CurveLine(label, numbers[arm], path, " ".join(f"{x:g}:{y:.4g}" for x, y in drawn), thin)

    seeds = {
        arm: [training for training in trainings if training.arm == arm]
        for arm in dict.fromkeys(training.arm for training in trainings)
    }
    lines = [
        line(f"arm {training.arm}, seed {training.seed}", training.arm, training.series[name], thin=len(some) > 1)
        for some in seeds.values()
        for training in some
    ]
    for arm, some in seeds.items():
        if len(some) > 1 and len(mean := mean_of(training.series[name] for training in some)) > 1:
            lines.append(line(f"arm {arm}, mean of {len(some)} seeds", arm, mean))
    marks_x = [(position(mark, up[0])[0], f"{mark:g}") for mark in across if mark == int(mark)]
    marks_y = [(position(across[0], mark)[1], f"{mark:.4g}") for mark in up]
    last = trainings[0].series[name][-1][1] if len(trainings) == 1 else None
    return MetricChart(title, last, lines, marks_x, marks_y)


@dataclass(frozen=True)
class TimelineBar:
    """The time that a step waited for the model (`answer`) or a command, with its place and width in per cent."""

    step: int
    activity: str
    seconds: float
    x: float
    width: float


def timeline(steps: Sequence[Row]) -> list[TimelineBar]:
    """Return the answers and commands of a rollout one after the other; empty where no durations were recorded."""
    columns = {"answer": "latency_s", "command": "command_s"}
    parts = [(row["step"], activity, row[name]) for row in steps for activity, name in columns.items() if row.get(name)]
    total, before, bars = sum(seconds for *_, seconds in parts), 0.0, list[TimelineBar]()
    for step, activity, seconds in parts:
        bars.append(
            TimelineBar(step, activity, seconds, round(100 * before / total, 2), round(100 * seconds / total, 2))
        )
        before += seconds
    return bars


def mean_of(series: Iterable[Points]) -> Points:
    """Return the mean of several series at the steps that all of them have."""
    each = [dict(points) for points in series]
    steps = sorted(set.intersection(*(set(points) for points in each)))
    return [(step, sum(points[step] for points in each) / len(each)) for step in steps]


# Texts that models wrote. Everything is escaped, nothing in them becomes a link or an image, and what could keep a
# lexer busy (one long line of a diff took 272 s) stays plain.

BAD_LINE = re.compile(r"^(?:FAILED|FAIL|ERROR|E  |Traceback|\w*Error\b|\w*Exception\b)")
WORD = re.compile(r"\w+|\s+|[^\w\s]")
LONGEST_LINE = 2_000
"""Characters of a line in which single words are compared, and of the lines of a text that is highlighted."""
LONGEST_TEXT = 20_000
"""Characters of a text that is highlighted or rendered."""
DEEPEST = 15
"""Levels of quotes and lists that are rendered, less than the limit of the parser (20)."""
LEXERS = {"bash": "bash", "sh": "bash", "shell": "bash", "python": "python", "py": "python", "json": "json"}
"""The words after a fence that choose a lexer; none is guessed. Diffs have marks of our own."""
ARGUMENTS = {"command": "bash", "cmd": "bash", "code": "python"}
"""The languages of the arguments of tool calls, by their usual names."""
FORMATTER = HtmlFormatter(nowrap=True)
NO_MARKDOWN = ("link", "image", "autolink", "reference", "html_inline", "html_block", "entity", "escape", "lheading")
"""Rules that are off: what leads elsewhere, and what would hide characters that the model wrote."""


@dataclass(frozen=True)
class MarkedLine:
    """One line of a block and its kind: "", "add", "del", "hunk" in a diff, "bad" in the output of tests.

    parts: the line's text in parts, each with whether it differs from the line in whose place it stands; empty where
    words were not compared.
    """

    line: str
    kind: str = ""
    parts: list[tuple[str, bool]] = field(default_factory=list)


def marked(text: str) -> list[MarkedLine]:
    """Return the lines of a text; in a diff added and removed lines are marked, elsewhere reports of failures."""
    lines = text.split("\n")
    is_diff = any(line.startswith("@@ ") for line in lines)
    marked_lines = []
    for line in lines:
        if not is_diff:
            kind = "bad" if BAD_LINE.match(line) else ""
        elif line.startswith(("+++", "---", "diff ", "@@")):
            kind = "hunk"
        else:
            kind = {"+": "add", "-": "del"}.get(line[:1], "")
        marked_lines.append(MarkedLine(line, kind))
    return marked_lines


def markdown(text: str) -> Markup:
    """Return a message as HTML: Markdown without links, images and HTML, its code in colour; a long one as it is."""
    renderer = _renderer()
    tokens = [] if _is_long(text) else renderer.parse(text)
    # The parser leaves out what is nested deeper than its limit.
    if max((token.level for token in tokens), default=DEEPEST) >= DEEPEST:
        return Markup("<pre>{}</pre>").format(text)
    page = renderer.renderer.render(tokens, renderer.options, {})
    return Markup('<div class="md">{}</div>').format(Markup(page))  # noqa: S704 - html is off


@cache
def _renderer() -> MarkdownIt:
    options = {
        "html": False,
        "breaks": True,
        "highlight": lambda code, language, _: str(highlight_code(code, language)),
    }
    return MarkdownIt("commonmark", options).enable("table").disable(NO_MARKDOWN)


def arguments(call: messages.ToolCall) -> dict[str, Markup]:
    """Return the arguments of a tool call by name, as HTML, commands and code in colour; "" for what has no names."""
    values = json.loads(call.arguments) if messages.is_object(call.arguments) else {"": call.arguments}
    texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in values.items()}
    return {name: highlight_code(text, ARGUMENTS.get(name, "")) for name, text in texts.items()}


def highlight_code(code: str, language: str) -> Markup:
    """Return code as HTML with classes for its tokens; escaped alone where the language is unknown or it is long."""
    if _is_long(code):
        return escape(code)
    if language == "diff":
        tag = Markup('<span class="{}">{}</span>').format
        return Markup("\n").join(tag(line.kind, line.line) if line.kind else line.line for line in marked(code))
    if language not in LEXERS:
        return escape(code)
    lexer = get_lexer_by_name(LEXERS[language], stripnl=False, ensurenl=False)
    return Markup(highlight(code, lexer, FORMATTER))  # noqa: S704 - Pygments escapes what it puts into its spans


def _is_long(text: str) -> bool:
    return len(text) > LONGEST_TEXT or max(map(len, text.split("\n"))) > LONGEST_LINE


def difference(rejected: Any, chosen: Any) -> list[MarkedLine]:
    """Return what differs from the rejected to the chosen action, line by line, with the differing words of a line.

    Empty for equal texts.
    """
    # Without the two lines that name files.
    lines = list(unified_diff(str(rejected).splitlines(), str(chosen).splitlines(), lineterm="", n=3))[2:]
    marked = [MarkedLine(line, {"+": "add", "-": "del", "@": "hunk"}.get(line[:1], "")) for line in lines]
    for index, (removed, added) in enumerate(pairwise(marked)):
        around = [marked[at].kind if 0 <= at < len(marked) else "" for at in (index - 1, index + 2)]
        # Words are compared where one line took the place of one other.
        if (removed.kind, added.kind) == ("del", "add") and around[0] != "del" and around[1] != "add":
            marked[index : index + 2] = _words(removed, added)
    return marked


def _words(rejected: MarkedLine, chosen: MarkedLine) -> list[MarkedLine]:
    if max(len(rejected.line), len(chosen.line)) > LONGEST_LINE:
        return [rejected, chosen]
    before, after = (WORD.findall(line.line[1:]) for line in (rejected, chosen))
    parts: tuple[list[tuple[str, bool]], list[tuple[str, bool]]] = ([("-", False)], [("+", False)])
    for operation, a, b, c, d in SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
        for part, words in ((parts[0], before[a:b]), (parts[1], after[c:d])):
            if words:
                part.append(("".join(words), operation != "equal"))
    return [MarkedLine(rejected.line, "del", parts[0]), MarkedLine(chosen.line, "add", parts[1])]


# Templates.

FOLDER = Path(__file__).parent
PROBE_ENDS = ("probe-uat", "probe-compare", "probe-plot")
"""Stages of the gradient probe whose runs no other stage reads."""


def query(filters: Mapping[str, Any], **changed: Any) -> str:
    """Return the query string of an address, with some of it changed and what is empty left out."""
    filled = {
        name: value for name, value in {**filters, **changed}.items() if value not in ("", None, False, 0, [], ())
    }
    values = {name: "on" if value is True else value for name, value in filled.items()}
    return "?" + urlencode(values, doseq=True) if filled else "?"


def breakable(run: str) -> list[str]:
    """Return the name of a run in the parts between which a line may break."""
    stage, slash, folder = run.partition("/")
    began, letter, name = folder.partition("Z-")
    return [part for part in (f"{stage}{slash}", f"{began}{letter}" if letter else "", name or folder) if part]


FILTERS: dict[str, Callable[..., Any]] = {
    "age": age,
    "breakable": breakable,
    "grounds": grounds_in_words,
    "cell": cell,
    "counted": lambda number: f"{number:,}",
    "csv_link": lambda text: f"data:text/csv;base64,{base64.b64encode(text.encode()).decode()}",
    "difference": lambda pair: difference(pair["rejected"], pair["chosen"]),
    "duration": duration,
    "hue": hue,
    "kind": kind,
    "arguments": arguments,
    "markdown": markdown,
    "marked": marked,
    "parts": messages.read,
    "part": lambda text: quote(text, safe=""),
    "plain": plain,
    "position": position,
    "words": title_of,
}
"""Filters of the templates."""
FUNCTIONS = {
    "query": query,
    "drawn": charts,
    "legend": legend,
    "timeline": timeline,
    "hues": lambda blocks: colours(_arms(blocks)),
}
"""Functions of the templates."""


@cache
def templates() -> "jinja2.Environment":
    """Return the templates of the pages; they escape everything that is not marked as safe."""
    import jinja2

    loader = jinja2.FileSystemLoader(FOLDER / "pages")
    environment = jinja2.Environment(autoescape=True, loader=loader, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= FILTERS
    environment.globals |= FUNCTIONS
    environment.tests["block"] = lambda block, name: kind(block) == name
    return environment


def render(template: str, /, **values: Any) -> bytes:
    """Return a page. What models wrote may turn the direction of its text, or be no character that a file can hold."""
    page = templates().get_template(f"{template}.html.j2").render(**values)
    return escape_control_characters(page).encode(errors="replace")


def _arms(blocks: Sequence[Any]) -> list[str]:
    """Return the arms that some blocks draw, by which colours are given."""
    drawn = [row.arm for block in blocks if isinstance(block, Intervals) for row in block.rows]
    return [*drawn, *(block.arm for block in blocks if isinstance(block, Training))]


# A chain of runs.


def chain(root: Path, named: Sequence[str]) -> list[Run]:
    """Return the named runs with all that they were made from.

    Without names: the newest run of the last stage of the pipeline that has one, and those at the ends of the probe.
    """
    if named:
        return runs.with_ancestors([Run(catalog.find(root, text)) for text in named])
    latest = {stage: catalog.latest(root, stage) for stage in (*stages_of("pipeline"), *PROBE_ENDS)}
    finished = {stage: path for stage, path in latest.items() if path is not None}
    if not finished:
        raise BadInput("cli.no-finished-run", root=root)
    last = [stage for stage in stages_of("pipeline") if stage in finished][-1:]
    ends = [*last, *(stage for stage in PROBE_ENDS if stage in finished)]
    return runs.with_ancestors([Run(finished[stage]) for stage in ends])


def sections(chain: Sequence[Run]) -> list[Section]:
    """Return the sections of a chain, verdicts first."""
    places = {stage: number for number, stage in enumerate(SECTIONS)}
    # sorted keeps the order of runs of one stage
    ordered = sorted(chain, key=lambda run: places.get(run.manifest.stage, len(places)))
    return [about for run in ordered if (about := section(run)) and about.blocks]


def report_document(chain: Sequence[Run], shown_sections: Sequence[Section]) -> dict[str, Any]:
    """Return the report on a chain as JSON: what was compared, its sections block by block, and its runs."""
    last = chain[-1]
    return {
        "name": f"{last.manifest.stage}-{last.path.name}",
        "compared": compared(chain),
        "evaluated": any(run.manifest.stage == "evaluate" for run in chain),
        "sections": [{**vars(part), "blocks": list(map(as_json, part.blocks))} for part in shown_sections],
        "runs": [manifest_values(run) for run in chain],
        "cost_usd": sum(run.manifest.cost_usd for run in chain),
        "seconds": sum(run.manifest.seconds for run in chain),
    }


def report(chain: Sequence[Run], **values: Any) -> tuple[bytes, dict[str, Any]]:
    """Return the page about a chain, and its JSON."""
    shown_sections = sections(chain)
    document = report_document(chain, shown_sections)
    first = next((block for part in shown_sections for block in part.blocks if isinstance(block, Findings)), None)
    title = document["name"] if first is None else first.title
    page = render("chain", title=title, about=document, sections=shown_sections, first=first, **values)
    return page, document


def save(root: Path, chain: Sequence[Run]) -> Path:
    """Write the page about a chain and its JSON below `root/report`; returns the page's path."""
    figures = {
        (catalog.name(run.path), figure): base64.b64encode(run.read_file(f"{figure}.png") or b"").decode()
        for run in chain
        for figure in run.manifest.summary.get("figures", [])
    }

    def image(run: str, figure: str) -> str:
        return f"data:image/png;base64,{figures[run, figure]}"

    style = (FOLDER / "static" / "view.css").read_text()
    page, document = report(chain, base="", style=style, image=image)
    path = root / "report" / f"{document['name']}.html"
    store.write_json(path.with_suffix(".json"), document)
    store.write_sealed(path, page)
    return path


# What a report is about, for its first screen.


def compared(chain: Sequence[Run]) -> dict[str, Any]:
    """Return model, environment, arms in words, date and command of a chain; what no manifest holds is left out."""
    last = chain[-1]
    configs = [run.manifest.config for run in reversed(chain)]
    models = [model for run in reversed(chain) if (model := model_of(run.manifest))]
    environments = [config["env"] for config in configs if isinstance(config.get("env"), dict)]
    arms = {}
    for run in (run for run in chain if run.manifest.stage == "train"):
        config = run.manifest.config
        steps = config.get("optimisation", {}).get("steps")
        arms[config.get("arm", "")] = losses(config.get("weights", {})) + (
            f", {counted(steps, 'step')}" if steps else ""
        )
    facts = {
        "model": ", ".join(dict.fromkeys(models)),
        "environment": f"{environments[0]['name']}, {environments[0]['split']} tasks" if environments else "",
        "arms": arms,
        "date": last.manifest.started_at[:10],
        "command": command(last),
    }
    return {name: fact for name, fact in facts.items() if fact}


def model_of(record: RunFacts) -> str:
    """Return the model that a run starts from: the run that made it, where one was given, or that of the settings."""
    if start := record.inputs.get("start"):
        return catalog.name(Path(start[0].path))
    policy = record.config.get("policy")
    return str(policy.get("model", "")) if isinstance(policy, dict) else ""


def command(run: Run) -> str:
    """Return the command that asks for this run again: its inputs, and the settings that are not the defaults."""
    stage = run.manifest.stage
    if stage not in STAGES:
        return ""
    reads = [f"--from {catalog.name(Path(ref.path))}" for ref in catalog.references(run.manifest)]
    changed: dict[str, Any] = {}
    for key, setting in known(load_stage(stage).config):
        # a default as the manifest would hold it; a list of groups is given as one value
        default = orjson.loads(orjson.dumps(default_of(setting), default=lambda group: group.model_dump(mode="json")))
        parts = key.split(".")
        if "N" in parts:
            parts, default = parts[: parts.index("N")], []
        value: Any = run.manifest.config
        for part in parts:
            value = value.get(part) if isinstance(value, dict) else None
        if value is not None and value != default:
            changed[".".join(parts)] = value
    settings = []
    for key, value in changed.items():
        bare = f"{key}={value}"  # a text needs no quotation marks where it is read as that text
        is_read = isinstance(value, str) and value.strip() and assignment(bare) == nested(key, value)
        settings.append(f"-s {shlex.quote(bare if is_read else f'{key}={_toml(value)}')}")
    return " ".join([command_words(stage), *dict.fromkeys(reads), *settings])


def _toml(value: Any) -> str:
    """Return a value as `--set` reads it."""
    if isinstance(value, dict):
        inside = (
            f"{orjson.dumps(name).decode()} = {_toml(element)}"
            for name, element in value.items()
            if element is not None
        )
        return f"{{ {', '.join(inside)} }}"
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    return orjson.dumps(value).decode()
