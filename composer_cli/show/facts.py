"""What one run tells: its manifest in words and values, how far it is, its metrics, transcripts, rows of its tables.

`composer show`, `composer report` and `composer view` render these facts as text, as a file and as pages.
"""

import textwrap
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any

import orjson

from composer_cli.printing import age, aligned, duration, visible, visible_line
from composer_cli.show.runs import RunLine, find_input, name, references
from composer_cli.show.runs import reason as reason_of
from stages import STAGES
from stages.errors import ComposerError
from stages.messages import Message
from stages.plurals import counted
from stages.rollouts.trace import item_steps, rollout_units, states
from stages.runs import queries
from stages.runs.kinds import CHECKPOINT, KINDS, PAIR, STATE, Row
from stages.runs.queries import PairFilter, RolloutPage
from stages.runs.run import Inputs, Run
from stages.runs.stage import load_stage


def described(run: Run) -> dict[str, str]:
    """Return the manifest in words, by label; labels without anything to tell are left out."""
    m = run.manifest
    inputs = inputs_in_words(run)
    # The checkpoint of a training is named as that training, and the training is not named a second time.
    models = {
        role: next((words for path, words in inputs.items() if model == f"{path}/checkpoint"), model)
        for role, model in ((role, str(about.get("model", "?"))) for role, about in m.models.items())
    }
    attempts = counted(m.attempts, "attempt")
    perhaps = f", {m.possibly_usd:.4f} USD possibly paid" if m.possibly_usd else ""
    log = run.path / f"logs/attempt-{m.attempts}.log"
    reason, took = m.reason, f"{attempts}, {duration(m.seconds)}"
    if m.status == "running":  # its manifest has neither a reason nor a duration until the attempt ends
        reason, took = reason_of(run.path, m), f"{_since(m.started_at)} ago, {attempts}"
    labelled = {
        "status": f"{m.status}{f', {reason}' if reason else ''}",
        "began": f"{m.started_at}, {took}, {m.cost_usd:.4f} USD{perhaps}",
        "models": ", ".join(f"{role} = {model}" for role, model in models.items()),
        "reads": ", ".join(one for one in inputs.values() if one not in models.values()),
        "holds": ", ".join(f"{out['rows']} {out['kind']}" for out in m.outputs.values()),
        "counts": ", ".join(f"{name} {number}" for name, number in m.counts.items()),
        "log": str(shown_path(log)) if log.exists() else "",
        "code": f"{(m.code.get('commit') or 'no commit')[:12]}{' with changes' if m.code.get('dirty_sha256') else ''}",
    }
    return {label: words for label, words in labelled.items() if words}


def _since(started_at: str) -> str:
    # In whole seconds, as the manifest has the start.
    return duration(round(max((datetime.now(UTC) - datetime.fromisoformat(started_at)).total_seconds(), 0.0)))


def progress(run: Run, done: int | None = None) -> str:
    """Return how much of the planned work of an unfinished run is done: "5 of 12 rollouts done".

    Empty for a complete run, and where the plan cannot be made again. done: as `facts_page` takes it.
    """
    m = run.manifest
    if m.status == "complete" or m.stage not in STAGES:
        return ""
    # The plan is made again: a run writes its manifest when it begins and when it ends, without what it planned.
    with suppress(ComposerError, OSError, ValueError):  # an input that was deleted, settings of another version
        stage, root = load_stage(m.stage), run.path.parents[1]
        inputs = {slot: [Run(find_input(root, Path(ref.path))) for ref in refs] for slot, refs in m.inputs.items()}
        plan = stage.plan(Inputs(inputs), stage.config(**m.config))
        if m.stage == "train":  # it plans steps, and its units are of steps with rollouts alone
            done = len(metric_rows(run))
        elif done is None:
            done = sum(not unit.get("failed") for unit in run.units())
        return f"{done:,} of {plan.units:,} {plan.what} done"
    return ""


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


NAMES = {
    "gt_pass": "hidden tests pass",
    "visible_pass": "visible tests pass",
    "protocol_ok": "followed the protocol",
    "num_steps": "steps",
    "terminated_by": "ended by",
    "test_log": "log of the tests",
    "submission": "submitted patch",
    "wall_s": "took",
}
"""Columns whose names do not say to a reader what they are."""
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
    """The conversation of one rollout; `outcome` holds what is known of how it ended, `row` all its columns.

    steps: the rows of its steps.
    """

    rollout_id: str
    outcome: dict[str, Any]
    messages: list[Message]
    row: Row
    steps: list[Row]


OUTCOME = ("arm", "reward", "passed", "gt_pass", "visible_pass", "hacked", "protocol_ok", "num_steps", "terminated_by")
"""Columns of a rollout or an evaluated item that make up its outcome, as far as they are there."""


def transcripts(run: Run) -> list[Transcript]:
    """Return the transcripts that a run holds, finished or not; none for stages that play no rollouts."""
    played: list[tuple[str, Row, list[Message], list[Row]]] = []
    for unit in rollout_units(run.units()).values():
        steps, messages = unit["steps"], list[Message]()
        if steps:
            # The state before the last action holds all messages but that action and what was observed after it.
            action, observation = steps[-1]["action"], steps[-1]["observation"]
            messages = [*states(steps)[-1], {"role": "assistant", "content": action}]
            messages += [{"role": "user", "content": observation}] if observation else []
        played.append((unit["rollout"]["rollout_id"], unit["rollout"], messages, steps))
    # An evaluation keeps each conversation as a text in its item.
    if run.manifest.stage == "evaluate":
        items = (unit["item"] for unit in run.units())
        played += [(item["item_id"], item, orjson.loads(item["transcript_json"]), item_steps(item)) for item in items]
    found = []
    for rollout_id, row, messages, steps in played:
        outcome = {column: row[column] for column in OUTCOME if row.get(column) is not None}
        outcome |= {column: row[column] for column in ("error_type", "error") if row[column] is not None}
        found.append(Transcript(rollout_id, outcome, messages, row, steps))
    return found


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


SHORT = ("status", "began", "models", "reads")
"""The facts of a run that begin the list of its rollouts."""


def facts_page(run: Run, labels: Collection[str] | None = None, done: int | None = None) -> str:
    """Return the facts of a run's manifest as text, all or those with these labels, and how far it is.

    done: the units that are finished, where that is known already.
    """
    found = {label: words for label, words in described(run).items() if labels is None or label in labels}
    if far := progress(run, done):
        found["status"] += f": {far}"
    if "in progress" in found["status"]:
        found["status"] += "; --follow watches it"
    if labels is not None and (run.path / "report.txt").exists():
        found["report"] = str(shown_path(run.path / "report.txt"))
    return "\n".join([str(shown_path(run.path)), *(f"  {label:<8}{words}" for label, words in found.items())])


def run_page(run: Run, listed: str, rollouts: int | None = None) -> str:
    """Return a run as text: its facts, its result, then what is listed of it.

    An evaluation begins with its verdict, and with what that shows and does not show. rollouts: how many there are, in
    a run with rollouts, of which the most important facts and results are enough.
    """
    if rollouts is None:
        facts, result = facts_page(run), (run.read_file("report.txt") or b"").decode(errors="replace").strip()
    else:
        facts, result = facts_page(run, SHORT, rollouts), short_result(run)
    return "\n\n".join(filter(None, [verdict_text(run), facts, result, listed]))


NEXT = {
    "collect": "replay-teachers",
    "import": "replay-teachers",
    "replay-teachers": "extract-pairs",
    "extract-pairs": "train",
    "train": "evaluate",
}
"""The stage that usually reads a run of a stage."""


def summary(run: Run, found: RolloutPage | None) -> dict[str, str]:
    """Return in words what is asked first about a run, by label; `found`: any page of its rollouts."""
    m, known = run.manifest, described(run)
    env = m.config.get("env")
    words = {
        "models": known.get("models", ""),
        "environment": f"{env['name']}, {env['split']} tasks" if isinstance(env, dict) and "split" in env else "",
    }
    if found is None:
        tables = [(out["rows"], KINDS.get(out["kind"].partition("/")[0])) for out in m.outputs.values()]
        words["holds"] = ", ".join(f"{rows:,} {kind.plural}" for rows, kind in tables if kind and kind != CHECKPOINT)
    else:
        ended = {what: sum(n for o, n in found.outcomes.items() if o.startswith(what)) for what in ("passed", "failed")}
        graded = sum(ended.values())
        words["rollouts"] = f"{sum(found.outcomes.values()):,}"
        # Of several arms together the share says nothing.
        if graded and m.stage != "evaluate":
            words["passed"] = f"{ended['passed']:,} of {graded:,}, {100 * ended['passed'] / graded:.1f} %"
    result = short_result(run).splitlines()
    gate = [line.removeprefix("gate: ") for line in result if line.startswith(("gate: ", "FAIL"))]
    words["collection gate"] = "\n".join(gate)
    words["cost"] = f"{m.cost_usd:.2f} USD"
    words["took"] = duration(m.seconds) if m.seconds else ""
    doubtful = m.outcome.exit_code != 0 or m.summary.get("verdict") == "TOO LITTLE DATA"
    if m.status == "complete" and not doubtful and m.stage in NEXT:
        words["next"] = f"composer {NEXT[m.stage]} --from {name(run.path)}"
    return {label: value for label, value in words.items() if value}


GATE = "\nCollection gate\n"
"""The title of the table of checks in a report."""


def short_result(run: Run) -> str:
    """Return the first paragraph of a run's report, and of its collection gate what failed."""
    report = (run.read_file("report.txt") or b"").decode(errors="replace").strip()
    head, gate, rest = report.partition(GATE)
    head = head.strip().partition("\n\n")[0]
    if not gate:
        return head
    table, _, advice = rest.partition("\n\n")
    checks = table.splitlines()
    failed = [line for line in checks if line.startswith("FAIL")]
    unrecorded = sum(line.startswith("-") for line in checks)
    some = f"{len(checks) - len(failed) - unrecorded} of {len(checks)}"
    passed = some if failed or unrecorded else f"all {len(checks)}"
    without = f", {unrecorded} are about what is not recorded" if unrecorded else ""
    lines = [head, f"gate: {passed} checks passed{without}", *failed]
    return "\n\n".join(filter(None, ["\n".join(lines), advice.strip()]))


def rows_text(run: Run, number: int) -> str:
    """Return the first rows of the tables of a run without rollouts; pairs each with the end of its state."""
    tables = first_rows(run, number)
    if str(PAIR) in tables:
        tables.pop(str(STATE), None)  # the first states are not those of the first pairs
        tables.pop(str(PAIR))
    of = {out["kind"].partition("/")[0]: out["rows"] for out in run.manifest.outputs.values()}
    shown = [
        f"{kind}, row {place:,} of {of[kind.partition('/')[0]]:,}\n{_row(row)}"
        for kind, rows in tables.items()
        for place, row in enumerate(rows, start=1)
    ]
    return "\n\n".join([*pairs_text(run, number), *shown])


def pairs_text(run: Run, number: int) -> list[str]:
    """Return the first pairs of a run as texts: the end of the state, the chosen and the rejected action, the votes."""
    page = queries.pairs(run, PairFilter(), size=number)
    if page is None:
        return []
    states = queries.state_messages(run, page.rows) if page.rows else {}
    texts = []
    for place, row in enumerate(page.rows, start=1):
        lines = [
            f"pair {place} of {page.total:,}: {row['pair_id']}",
            f"  state   step {row['step'] + 1} of {row['rollout_id']}" if row["step"] is not None else "",
            f"  rule    {row['rule']}{_votes(row)}",
        ]
        blocks = {}
        if state := states.get(row["pair_id"]):
            blocks[f"state, the last of {len(state)} messages, {state[-1]['role']}"] = state[-1]["content"]
        by = row["chosen_by"] or ()
        blocks["chosen" + (f", by {', '.join(by)}" if len(by) else "")] = row["chosen"]
        blocks["rejected" + (f", by {row['rejected_by']}" if row["rejected_by"] else "")] = row["rejected"]
        texts.append("\n\n".join(["\n".join(filter(None, lines)), *(f"{t}\n{indented(c)}" for t, c in blocks.items())]))
    if (more := page.total - len(page.rows)) > 0:
        texts.append(f"and {more:,} more pairs: -n {page.total}")
    return texts


def _votes(row: Row) -> str:
    if row["votes_chosen"] is None:
        return ""
    against = "" if row["votes_rejected"] is None else f" to {row['votes_rejected']:g}"
    return f", {row['votes_chosen']:g}{against} votes of {row['num_teachers']} teachers"


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


def readable_first(columns: Iterable[str]) -> list[str]:
    """Return columns of a table: first who did what or what was checked, last the ids of states and units."""

    def place(column: str) -> int:
        ids = column.endswith(("sha256", "unit_id", "_ids", "json"))
        return -1 if column in ("teacher", "action", "check", "status") else ids

    return sorted(columns, key=place)


def _row(row: Row) -> str:
    """Return short values on one line each, long ones as a block, the last message of conversations; no token lists."""
    lines = []
    for column in readable_first(row):
        value = row[column]
        if value is None or (isinstance(value, list) and value and isinstance(value[0], (int, float))):
            continue
        if column.endswith("messages_json") and (messages := orjson.loads(value)):
            lines.append(f"{column} (the last)\n{indented(messages[-1]['content'])}")
            continue
        text = duration(value) if column.endswith("_s") else plain(value)
        lines.append(f"{column}\n{indented(text)}" if "\n" in text or len(text) > 90 else f"{column:<18}{text}")
    return "\n".join(lines)


def plain(value: Any) -> str:
    """Return a value in a few characters: yes and no, numbers without trailing zeros."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)


def indented(content: str) -> str:
    """Return the lines of a text behind four spaces, so that none looks like a title."""
    return "\n".join(f"    {line}" for line in visible(content).removesuffix("\n").split("\n"))
