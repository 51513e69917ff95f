"""What one run tells: its manifest in words and values, the metrics it logged, its transcripts, rows of its tables.

`composer show`, `composer report` and `composer view` render these facts as text, as a file and as pages.
"""

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import islice
from pathlib import Path
from typing import Any

import orjson

from composer_cli.printing import age, aligned, duration, visible, visible_line
from composer_cli.show.runs import RunLine, find_input, name, references
from stages.errors import UsageError
from stages.messages import Message
from stages.rollouts.trace import pairs_with_states, rollout_units, states
from stages.runs.artifact import Run
from stages.runs.records import CHECKPOINT, KINDS, PAIR, STATE, Row


def described(run: Run) -> dict[str, str]:
    """Return the manifest in words, by label; labels without anything to tell are left out."""
    m = run.manifest
    inputs = inputs_in_words(run)
    # The checkpoint of a training is named as that training, and the training is not named a second time.
    models = {
        role: next((words for path, words in inputs.items() if model == f"{path}/checkpoint"), model)
        for role, model in ((role, str(about.get("model", "?"))) for role, about in m.models.items())
    }
    attempts = f"{m.attempts} attempt{'s' if m.attempts > 1 else ''}"
    perhaps = f", {m.possibly_usd:.4f} USD possibly paid" if m.possibly_usd else ""
    log = run.path / f"logs/attempt-{m.attempts}.log"
    labelled = {
        "status": f"{m.status}{f', {m.reason}' if m.reason else ''}",
        "began": f"{m.started_at}, {attempts}, {m.seconds:.0f} s, {m.cost_usd:.4f} USD{perhaps}",
        "models": ", ".join(f"{role} = {model}" for role, model in models.items()),
        "reads": ", ".join(one for one in inputs.values() if one not in models.values()),
        "holds": ", ".join(f"{out['rows']} {out['kind']}" for out in m.outputs.values()),
        "counts": ", ".join(f"{name} {number}" for name, number in m.counts.items()),
        "log": str(shown_path(log)) if log.exists() else "",
        "code": f"{(m.code.get('commit') or 'no commit')[:12]}{' with changes' if m.code.get('dirty_sha256') else ''}",
    }
    return {label: words for label, words in labelled.items() if words}


def inputs_in_words(run: Run) -> dict[str, str]:
    """Return each run that was read, by its recorded path: its name where it is beside this run, else that path."""
    root = run.path.resolve().parents[1]
    paths = [Path(ref.path) for ref in references(run.manifest)]
    return {
        str(path): name(path) if find_input(root, path).parents[1] == root else str(shown_path(path)) for path in paths
    }


def shown_path(path: Path) -> Path:
    """Return a path as it is printed: relative where it is below the current folder."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


def manifest_values(run: Run) -> dict[str, Any]:
    """Return what the manifest keeps of a run, JSON-able."""
    m = run.manifest
    return {
        "run": name(run.path),
        "stage": m.stage,
        "status": m.status,
        "began": m.started_at,
        "attempts": m.attempts,
        "seconds": m.seconds,
        "cost_usd": m.cost_usd,
        "seed": m.config.get("seed"),
        "counts": m.counts,
        "tokens": m.tokens,
        "models": m.models,
        "packages": m.packages,
        "python": m.python,
        "code": m.code,
        "fingerprint": m.fingerprint,
        "config": m.config,
    }


METRICS = {
    "reward": "reward",
    "loss": "loss, all channels",
    "kl": "KL from the reference, nats",
    "entropy": "entropy, nats",
    "completions/mean_length": "length of a rollout, tokens",
    "grad_norm": "gradient norm",
    "dpo/loss": "DPO loss",
    "dpo/accuracy": "DPO accuracy",
    "simpo/loss": "SimPO loss",
    "sft/loss": "imitation loss",
    "sdpo/loss": "self-distillation loss",
    "taid/loss": "TAID loss",
    "eopd/loss": "entropy-aware distillation loss",
}
"""The metrics of a training that are drawn, in this order, with their titles; losses of other channels follow."""


def metric_rows(run: Run, last: int = 0) -> list[dict[str, Any]]:
    """Return what a training logged, one row a step; `last` limits them to the newest."""
    return [orjson.loads(line) for line in (run.read_file("metrics.jsonl") or b"").splitlines()[-last:]]


def metric_titles(names: Iterable[str]) -> dict[str, str]:
    """Return the titles of those of these metrics that are drawn, in the order of drawing."""
    logged = set(names)
    others = {one: one.replace("/", " ") for one in sorted(logged) if one.endswith("/loss") and one not in METRICS}
    return {one: title for one, title in {**METRICS, **others}.items() if one in logged}


@dataclass(frozen=True, repr=False)
class Transcript:
    """The whole conversation of one rollout; `outcome` holds what is known of how it ended, `row` all its columns."""

    rollout_id: str
    outcome: dict[str, Any]
    messages: list[Message]
    row: Row

    @property
    def task_id(self) -> str:
        """Return the name of its task."""
        return str(self.row["task_id"])

    @property
    def reward(self) -> float | None:
        """Return its reward, 1.0 or 0.0 where an evaluation recorded whether it passed; None where it has none."""
        reward = self.row["reward"] if "reward" in self.row else self.row["passed"]
        return None if reward is None else float(reward)

    def __repr__(self) -> str:
        shown = ("arm", "reward", "passed", "hacked", "terminated_by", "error_type")
        outcome = (f"{label} {_plain(value)}" for label, value in self.outcome.items() if label in shown)
        facts = ", ".join([*outcome, f"{len(self.messages)} messages"])
        return f"<rollout {visible_line(f'{self.rollout_id}: {facts}')}>"


OUTCOME = ("arm", "reward", "passed", "gt_pass", "visible_pass", "hacked", "protocol_ok", "num_steps", "terminated_by")
"""Columns of a rollout or an evaluated item that make up its outcome, as far as they are there."""


def transcripts(run: Run) -> list[Transcript]:
    """Return the transcripts that a run holds, finished or not; none for stages that play no rollouts."""
    played: list[tuple[str, Row, list[Message]]] = []
    for unit in rollout_units(run.units()).values():
        steps, messages = unit["steps"], list[Message]()
        if steps:
            # The state before the last action holds all messages but that action and what was observed after it.
            action, observation = steps[-1]["action"], steps[-1]["observation"]
            messages = [*states(steps)[-1], {"role": "assistant", "content": action}]
            messages += [{"role": "user", "content": observation}] if observation else []
        played.append((unit["rollout"]["rollout_id"], unit["rollout"], messages))
    # An evaluation keeps each conversation as a text in its item, without steps.
    if run.manifest.stage == "evaluate":
        items = (unit["item"] for unit in run.units())
        played += [(item["item_id"], item, orjson.loads(item["transcript_json"])) for item in items]
    found = []
    for rollout_id, row, messages in played:
        outcome = {column: row[column] for column in OUTCOME if row.get(column) is not None}
        outcome |= {column: row[column] for column in ("error_type", "error") if row[column] is not None}
        found.append(Transcript(rollout_id, outcome, messages, row))
    return found


def choose_transcripts(run: Run, wanted: str | None, number: int) -> list[Transcript]:
    """Return the transcript of this id or part of one, or the first `number`; `UsageError` unless exactly one fits."""
    found = transcripts(run)
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


def first_rows(run: Run, number: int) -> dict[str, list[Row]]:
    """Return the first rows of every table of a run."""
    names = [out["kind"].partition("/")[0] for out in run.manifest.outputs.values()]
    kinds = [KINDS[name] for name in names if name in KINDS and name != CHECKPOINT.name]
    return {str(kind): list(islice(run.scan(kind).rows(), number)) for kind in kinds}


# The same facts as text, for `composer show`, `composer status` and `composer query`.

RED, GREEN, YELLOW, BLUE = 31, 32, 33, 34
COLOURS = {
    "complete": GREEN,
    "running": BLUE,
    "queued": BLUE,
    "cancelled": YELLOW,
    "lost": RED,
    "incomplete": YELLOW,
    "interrupted": YELLOW,
    "failed": RED,
    "unreadable": RED,
    "damaged": RED,
}
"""The colour of each status, by its number in a terminal."""


def status_tables(runs: Sequence[RunLine], jobs: Sequence[dict[str, Any]]) -> str:
    """Return runs and submitted jobs as a table each, where there are any: words to the left, numbers to the right."""
    cells = [
        (
            visible_line(line.run),
            line.status,
            age(line.age_s) if line.began else "",
            f"{line.done}/{line.planned}" if line.planned else "",
            f"{line.cost_usd:.2f}" if line.began else "",
            duration(line.seconds) if line.seconds else "",
            visible_line(line.device),
            visible_line(line.reason),
        )
        for line in runs
    ]
    sides = ("left", "left", "right", "right", "right", "right", "left", "left")
    titles = ("run", "status", "age", "units", "USD", "took", "device", "reason")
    tables = [aligned(cells, titles, sides)] if runs else []
    if jobs:
        rows = [(job["job"], job["on"], job["status"], age(job["age_s"]), visible_line(job["reason"])) for job in jobs]
        tables.append(aligned(rows, ("job", "on", "status", "age", "reason")))
    return "\n\n".join(tables)


def query_table(columns: Sequence[str], rows: Sequence[tuple[Any, ...]]) -> str:
    """Return the answer to a query as a table; columns of numbers to the right."""
    cells = [
        ["-" if v is None else visible_line(f"{v:.6g}" if isinstance(v, float) else str(v)) for v in row]
        for row in rows
    ]
    numeric = [bool(rows) and all(isinstance(row[i], (int, float)) for row in rows) for i in range(len(columns))]
    return aligned(cells, columns, ["right" if number else "left" for number in numeric] if rows else None)


def facts_page(run: Run) -> str:
    """Return the facts of a run's manifest as text."""
    return "\n".join([str(shown_path(run.path)), *(f"  {label:<8}{words}" for label, words in described(run).items())])


def run_page(run: Run, transcripts: Iterable[Transcript], number: int) -> str:
    """Return a run as text: facts, result, then these transcripts, or the first rows of its tables without any.

    An evaluation begins with its verdict, and with what that shows and does not show.
    """
    result = (run.read_file("report.txt") or b"").decode().strip()
    shown = []
    for transcript in transcripts:
        outcome = ", ".join(f"{label} {_plain(value)}" for label, value in transcript.outcome.items())
        messages = [f"\n{message['role']}\n{_indented(message['content'])}" for message in transcript.messages]
        shown.append("\n".join([f"{transcript.rollout_id}: {outcome}", *messages]))
    if not shown:
        tables = first_rows(run, number)
        if str(PAIR) in tables:  # each with the end of its state; the first states are not those of the first pairs
            tables.pop(str(STATE), None)
            pairs = islice(pairs_with_states(run), number)
            tables[str(PAIR)] = [{"messages_json": pair["messages_json"], **pair} for pair in pairs]
        shown = [f"{kind}\n{_row(row)}" for kind, rows in tables.items() for row in rows]
    return "\n\n".join(part for part in [verdict_text(run), facts_page(run), result, *shown] if part)


def verdict_text(run: Run) -> str:
    """Return the verdict of an evaluation as text, with what it shows and does not show; empty for other runs."""
    if run.manifest.stage != "evaluate":
        return ""
    from composer_cli.show.conclusions import conclusions, read_verdict  # 0.3 s of numpy and statistics

    if not (verdict := read_verdict(run)):
        return ""
    found = conclusions(verdict)
    lines = [": ".join(filter(None, (verdict["decision"], verdict.get("claim"))))]
    for label, sentences in (("shown", found.shown), ("not shown", found.not_shown)):
        for sentence in sentences:
            lines += textwrap.wrap(sentence, 100, initial_indent=f"  {label:<11}", subsequent_indent=" " * 13)
    return "\n".join(lines)


def _row(row: Row) -> str:
    """Return short values on one line each, long ones as a block, the last message of conversations; no token lists."""
    lines = []
    for column, value in row.items():
        if value is None or (isinstance(value, list) and value and isinstance(value[0], (int, float))):
            continue
        if column.endswith("messages_json") and (messages := orjson.loads(value)):
            lines.append(f"{column} (the last)\n{_indented(messages[-1]['content'])}")
            continue
        text = _plain(value)
        lines.append(f"{column}\n{_indented(text)}" if "\n" in text or len(text) > 90 else f"{column:<18}{text}")
    return "\n".join(lines)


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _indented(content: str) -> str:
    return "\n".join(f"    {line}" for line in visible(content).removesuffix("\n").split("\n"))
