"""`composer show`: a run for people to read, its facts, its result, and its transcripts or rows."""

from collections.abc import Iterable
from difflib import get_close_matches
from itertools import islice
from typing import Any

import orjson

from composer_cli.show.transcripts import Transcript, of_run
from composer_cli.visible import visible
from stages.errors import UsageError
from stages.runs.artifact import Run
from stages.runs.inputs import kinds_of
from stages.runs.outcome_records import CHECKPOINT
from stages.runs.records import Row


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
    result = (run.beside("report.txt") or b"").decode().strip()
    return "\n\n".join(part for part in [facts(run), result, *shown] if part)
