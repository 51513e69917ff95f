"""`composer show`: a run for people to read, its facts, its result, and its transcripts or rows."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import islice
from pathlib import Path
from typing import Any

import orjson

from composer_cli.printing import visible, visible_line
from composer_cli.show import runs
from stages.errors import BadInput, UsageError
from stages.messages import Message
from stages.rollouts.trace import rollout_units, states
from stages.runs import manifest
from stages.runs.artifact import Run, kinds_of
from stages.runs.records import CHECKPOINT, Row

# ---- transcripts
# Rollouts as people read them: the whole conversation of each, and how it ended.


@dataclass(frozen=True)
class Transcript:
    """One rollout. `outcome` holds what is known of how it ended."""

    rollout_id: str
    outcome: dict[str, Any]
    messages: list[Message]


OUTCOME = ("arm", "reward", "passed", "gt_pass", "visible_pass", "hacked", "protocol_ok", "num_steps", "terminated_by")
ERROR = ("error_type", "error")


def of_run(run: Run) -> list[Transcript]:
    """The transcripts that a run holds, finished or not; none for stages that play no rollouts."""
    played = [
        Transcript(unit["rollout"]["rollout_id"], _outcome(unit["rollout"]), _conversation(unit["steps"]))
        for unit in rollout_units(run.units()).values()
    ]
    evaluated = run.units() if run.manifest.stage == "evaluate" else ()
    return played + [
        Transcript(item["item_id"], _outcome(item), orjson.loads(item["transcript_json"]))
        for item in (unit["item"] for unit in evaluated)
    ]


def _outcome(row: Row) -> dict[str, Any]:
    known = {name: row[name] for name in OUTCOME if row.get(name) is not None}
    return known | {name: row[name] for name in ERROR if row[name] is not None}


def _conversation(steps: list[Row]) -> list[Message]:
    """Everything that was said, the last action and its observation included."""
    if not steps:
        return []
    last = steps[-1]
    said = [*states(steps)[-1], {"role": "assistant", "content": last["action"]}]
    return [*said, {"role": "user", "content": last["observation"]}] if last["observation"] else said


def choose(run: Run, wanted: str | None, number: int) -> list[Transcript]:
    """The transcript that is asked for, or the first few; `UsageError` when there is none of that name."""
    found = of_run(run)
    if wanted is None:
        return found[:number]
    fitting = [t for t in found if t.rollout_id == wanted] or [t for t in found if wanted in t.rollout_id]
    if len(fitting) == 1:
        return fitting
    if fitting:
        some = ", ".join(t.rollout_id for t in fitting[:3])
        raise UsageError(f"{len(fitting)} rollouts fit {wanted!r}, for example {some}. Give more of the id.")
    if not found:
        raise UsageError(f"{run.path} holds no rollouts. `composer show {run.path}` shows what it holds.")
    ids = [t.rollout_id for t in found]
    near = get_close_matches(wanted, ids, n=1) or ids[:1]
    raise UsageError(f"{run.path} has no rollout {wanted!r}; it has {len(ids)}, for example {near[0]}.")


def rows(run: Run, number: int) -> dict[str, list[Row]]:
    """The first rows of every table of a run."""
    return {
        str(kind): list(islice(run.scan(kind).rows(), number)) for kind in kinds_of(run) if kind.name != CHECKPOINT.name
    }


def facts(run: Run) -> str:
    """What the manifest says, in a few lines."""
    m = run.manifest
    models = [f"{role} = {about.get('model', '?')}" for role, about in m.models.items()]
    attempts = f"{m.attempts} attempt{'s' if m.attempts > 1 else ''}"
    inputs = [f"{ref.stage} {ref.path}" for refs in m.inputs.values() for ref in refs]
    perhaps = f", {m.possibly_usd:.4f} USD possibly paid" if m.possibly_usd else ""
    pairs = {
        "status": f"{m.status}{f', {m.reason}' if m.reason else ''}",
        "began": f"{m.started_at}, {attempts}, {m.seconds:.0f} s, {m.cost_usd:.4f} USD{perhaps}",
        "models": ", ".join(models),
        "reads": ", ".join(inputs),
        "holds": ", ".join(f"{out['rows']} {out['kind']}" for out in m.outputs.values()),
        "counts": ", ".join(f"{name} {number}" for name, number in m.counts.items()),
        "log": str(log) if (log := run.path / f"logs/attempt-{m.attempts}.log").exists() else "",
        "code": f"{(m.code.get('commit') or 'no commit')[:12]}{' with changes' if m.code.get('dirty_sha256') else ''}",
    }
    return "\n".join([str(run.path), *(f"  {name:<8}{text}" for name, text in pairs.items() if text)])


def text(transcript: Transcript) -> str:
    """A transcript: a line about its outcome, then who said what."""
    outcome = ", ".join(f"{name} {_plain(value)}" for name, value in transcript.outcome.items())
    said = [f"\n{message['role']}\n{_indented(message['content'])}" for message in transcript.messages]
    return "\n".join([f"{transcript.rollout_id}: {outcome}", *said])


def row_text(row: Row) -> str:
    """A row: short values on one line each, long ones as a block; conversations as who said what."""
    return "\n".join(_field(name, value) for name, value in row.items() if value is not None and not _is_tokens(value))


def _field(name: str, value: Any) -> str:
    if name.endswith("messages_json") and (said := orjson.loads(value)):
        return f"{name} (the last)\n{_indented(said[-1]['content'])}"
    shown = _plain(value)
    return f"{name}\n{_indented(shown)}" if "\n" in shown or len(shown) > 90 else f"{name:<18}{shown}"


def _is_tokens(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], (int, float))


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _indented(content: str) -> str:
    return "\n".join(f"    {line}" for line in visible(content).removesuffix("\n").split("\n"))


def page(run: Run, transcripts: Iterable[Transcript], number: int) -> str:
    """All of it as text: facts, result, transcripts, or rows where there are none."""
    shown = [text(transcript) for transcript in transcripts]
    if not shown:
        shown = [f"{kind}\n{row_text(row)}" for kind, found in rows(run, number).items() for row in found]
    result = (run.read_file("report.txt") or b"").decode().strip()
    return "\n\n".join(part for part in [facts(run), result, *shown] if part)


# ---- query
# `composer query`: questions in SQL about the tables of runs.


def readable(root: Path, named: Sequence[str]) -> list[Run]:
    """The runs to ask about: those that were named, or all whose manifest can be read."""
    if named:
        return [Run(runs.find(root, text)) for text in named]
    return [Run(folder) for folder in runs.folders(root) if _can_be_read(folder)]


def _can_be_read(folder: Path) -> bool:
    try:
        manifest.read(folder)
    except BadInput:
        return False
    return True


def table(columns: Sequence[str], rows: Sequence[tuple[Any, ...]]) -> str:
    """An answer as aligned text; numbers to the right."""
    from tabulate import tabulate

    texts = [[_cell(value) for value in row] for row in rows]
    numeric = [bool(rows) and all(isinstance(row[i], (int, float)) for row in rows) for i in range(len(columns))]
    sides = ["right" if number else "left" for number in numeric]
    shown = tabulate(texts, columns, tablefmt="plain", colalign=sides if rows else None, disable_numparse=True)
    return "\n".join(line.rstrip() for line in shown.splitlines())


def _cell(value: Any) -> str:
    text = "-" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
    return visible_line(text)
