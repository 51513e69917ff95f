"""Pages as HTML, and a report: the sections of a chain of runs, saved as one file that needs no other.

A saved report forbids scripts and requests by a policy of its own, as it is opened from disk, where no header does.
"""

import base64
import shlex
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode

import orjson

from composer_cli.printing import escape_control_characters
from composer_cli.show import runs
from composer_cli.show.blocks import (
    Findings,
    Intervals,
    Section,
    Training,
    as_json,
    colours,
    hue,
    kind,
    position,
)
from composer_cli.show.facts import manifest_values
from composer_cli.show.rollout import title_of
from composer_cli.show.sections import SECTIONS, losses, section
from composer_cli.view import curves
from composer_cli.view.lines import difference, markdown, marked
from stages import STAGES, command_words, stages_of
from stages.envs.base import grounds_in_words
from stages.errors import BadInput
from stages.layout import age, counted, duration
from stages.runs import catalog, store
from stages.runs.display import cell, plain
from stages.runs.run import Run, RunFacts
from stages.runs.settings import assignment, default_of, known, nested
from stages.runs.stage import load_stage

if TYPE_CHECKING:
    import jinja2

FOLDER = Path(__file__).parent
PROBE_ENDS = ("probe-uat", "probe-compare", "probe-plot")
"""Stages of the gradient probe whose runs no other stage reads."""


def query(filters: Mapping[str, Any], **changed: Any) -> str:
    """Return the query string of an address, with some of it changed and what is empty left out."""
    kept = {name: value for name, value in {**filters, **changed}.items() if value not in ("", None, False, 0, [], ())}
    values = {name: "on" if value is True else value for name, value in kept.items()}
    return "?" + urlencode(values, doseq=True) if kept else "?"


def breakable(run: str) -> list[str]:
    """Return the name of a run in the parts between which a line may break."""
    stage, slash, folder = run.partition("/")
    began, letter, rest = folder.partition("Z-")
    return [part for part in (f"{stage}{slash}", f"{began}{letter}" if letter else "", rest or folder) if part]


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
    "markdown": markdown,
    "marked": marked,
    "part": lambda text: quote(text, safe=""),
    "plain": plain,
    "position": position,
    "words": title_of,
}
"""Filters of the templates."""
FUNCTIONS = {
    "query": query,
    "drawn": curves.charts,
    "legend": curves.legend,
    "timeline": curves.timeline,
    "hues": lambda blocks: colours(_arms(blocks)),
}
"""Functions of the templates."""


@cache
def templates() -> "jinja2.Environment":
    """Return the templates of the pages; they escape everything that is not marked as safe."""
    import jinja2

    loader = jinja2.FileSystemLoader(FOLDER / "pages")
    found = jinja2.Environment(autoescape=True, loader=loader, trim_blocks=True, lstrip_blocks=True)
    found.filters |= FILTERS
    found.globals |= FUNCTIONS
    found.tests["block"] = lambda block, name: kind(block) == name
    return found


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
    there = {stage: path for stage, path in latest.items() if path is not None}
    if not there:
        raise BadInput(f"There is no finished run in {root} to report on. `composer run --preset demo` makes some.")
    last = [stage for stage in stages_of("pipeline") if stage in there][-1:]
    ends = [*last, *(stage for stage in PROBE_ENDS if stage in there)]
    return runs.with_ancestors([Run(there[stage]) for stage in ends])


def sections(chain: Sequence[Run]) -> list[Section]:
    """Return the sections of a chain, verdicts first."""
    places = {stage: place for place, stage in enumerate(SECTIONS)}
    # sorted keeps the order of runs of one stage
    ordered = sorted(chain, key=lambda run: places.get(run.manifest.stage, len(places)))
    return [found for run in ordered if (found := section(run)) and found.blocks]


def report_document(chain: Sequence[Run], found: Sequence[Section]) -> dict[str, Any]:
    """Return the report on a chain as JSON: what was compared, its sections block by block, and its runs."""
    last = chain[-1]
    return {
        "name": f"{last.manifest.stage}-{last.path.name}",
        "compared": compared(chain),
        "evaluated": any(run.manifest.stage == "evaluate" for run in chain),
        "sections": [{**vars(one), "blocks": list(map(as_json, one.blocks))} for one in found],
        "runs": [manifest_values(run) for run in chain],
        "cost_usd": sum(run.manifest.cost_usd for run in chain),
        "seconds": sum(run.manifest.seconds for run in chain),
    }


def report(chain: Sequence[Run], **values: Any) -> tuple[bytes, dict[str, Any]]:
    """Return the page about a chain, and its JSON."""
    found = sections(chain)
    document = report_document(chain, found)
    first = next((block for one in found for block in one.blocks if isinstance(block, Findings)), None)
    title = document["name"] if first is None else first.title
    page = render("chain", title=title, about=document, sections=found, first=first, **values)
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
    found = {
        "model": ", ".join(dict.fromkeys(models)),
        "environment": f"{environments[0]['name']}, {environments[0]['split']} tasks" if environments else "",
        "arms": arms,
        "date": last.manifest.started_at[:10],
        "command": command(last),
    }
    return {name: fact for name, fact in found.items() if fact}


def model_of(record: RunFacts) -> str:
    """Return the model that a run starts from: the run that made it, where one was given, or that of the settings."""
    if given := record.inputs.get("start"):
        return catalog.name(Path(given[0].path))
    policy = record.config.get("policy")
    return str(policy.get("model", "")) if isinstance(policy, dict) else ""


def command(run: Run) -> str:
    """Return the command that asks for this run again: its inputs, and the settings that are not the defaults."""
    stage = run.manifest.stage
    if stage not in STAGES:
        return ""
    reads = [f"--from {catalog.name(Path(ref.path))}" for ref in catalog.references(run.manifest)]
    changed: dict[str, Any] = {}
    for key, field in known(load_stage(stage).config):
        # a default as the manifest would hold it; a list of groups is given as one value
        default = orjson.loads(orjson.dumps(default_of(field), default=lambda other: other.model_dump(mode="json")))
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
        inside = (f"{orjson.dumps(name).decode()} = {_toml(one)}" for name, one in value.items() if one is not None)
        return f"{{ {', '.join(inside)} }}"
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    return orjson.dumps(value).decode()
