"""Facts of one run: its manifest in words and values, its progress, its metrics, first rows of its tables.

`composer show`, `composer report` and `composer view` render these facts as text, as a file and as pages.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import orjson

from composer_cli.show.runs import reason as reason_of
from composer_stages import STAGES
from composer_stages.errors import BadInput
from composer_stages.layout import counted, duration
from composer_stages.runs import queries
from composer_stages.runs.catalog import find_input, name, references
from composer_stages.runs.display import Table, plain
from composer_stages.runs.kinds import EVAL_ITEM, KINDS, ROLLOUT, Row
from composer_stages.runs.queries import RolloutFilter, RolloutPage
from composer_stages.runs.run import Run
from composer_stages.training.channels import CHANNELS

LONGEST_CELL = 200
"""Characters of a value in a table of first rows."""


def manifest_labels(run: Run) -> dict[str, str]:
    """Return the fields of the manifest as text, by label; empty ones are left out."""
    m = run.manifest
    inputs = describe_inputs(run)
    # The checkpoint of a training is named as that training, and the training is not named a second time.
    models = {
        role: next((words for path, words in inputs.items() if model == f"{path}/checkpoint"), model)
        for role, model in ((role, str(about.get("model", "?"))) for role, about in m.models.items())
    }
    if m.stage == "evaluate":  # its roles are ARM/SEED
        arms = Counter(role.rpartition("/")[0] for role in models)
        split = {role: role.rpartition("/") for role in models}
        models = {
            arm if arms[arm] == 1 else f"{arm} (seed {seed})": models[role] for role, (arm, _, seed) in split.items()
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
        "models": ", ".join(
            [f"{role} = {model}" for role, model in models.items()] or m.outcome.summary.get("models", ())
        ),
        "reads": ", ".join(words for words in inputs.values() if words not in models.values()),
        "holds": holdings(run),
        "counts": ", ".join(f"{name} {number}" for name, number in m.counts.items()),
        "log": str(display_path(log)) if log.exists() else "",
        "code": f"{(m.code.get('commit') or 'no commit')[:12]}{' with changes' if m.code.get('dirty_sha256') else ''}",
    }
    return {label: words for label, words in labelled.items() if words}


def holdings(run: Run) -> str:
    """Return the rows of the tables of a run: "16 rollouts, 72 steps"; without empty tables and folders."""
    tables = [(out["rows"], KINDS.get(out["kind"].partition("/")[0])) for out in run.manifest.outputs.values()]
    return ", ".join(counted(n, kind.name.replace("_", " ")) for n, kind in tables if n and kind and kind.columns)


def _since(started_at: str) -> str:
    # In whole seconds, as the manifest has the start.
    return duration(round(max((datetime.now(UTC) - datetime.fromisoformat(started_at)).total_seconds(), 0.0)))


def describe_inputs(run: Run) -> dict[str, str]:
    """Return each run that was read, by its recorded path: its name where it is beside this run, else that path."""
    root = run.path.resolve().parents[1]
    paths = [Path(ref.path) for ref in references(run.manifest)]
    return {
        str(path): name(path) if find_input(root, path).parents[1] == root else str(display_path(path))
        for path in paths
    }


def display_path(path: Path) -> Path:
    """Return a path as it is printed: relative where it is below the current folder."""
    folder = Path.cwd()
    return path.relative_to(folder) if path.is_relative_to(folder) else path


def manifest_values(run: Run) -> dict[str, Any]:
    """Return what the manifest keeps of a run, JSON-able."""
    m = run.manifest
    return {
        "run": name(run.path),
        "began": m.started_at,
        "seed": m.config.get("seed"),
        "stage": m.stage,
        "status": m.status,
        "attempts": m.attempts,
        "seconds": m.seconds,
        "cost_usd": m.cost_usd,
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
    "tokens_per_s": "tokens a second, prompts and answers",
    "memory_gib": "peak memory of the first process, GiB",
    "loss": "loss, all channels",
    "kl": "KL from the reference, nats",
    "entropy": "entropy, nats",
    "completions/mean_length": "length of a rollout, tokens",
    "grad_norm": "gradient norm",
    **{f"{name}/loss": f"{name} loss" for name in CHANNELS},
    **{f"{name}/{column}": f"{name} {column}" for name, channel in CHANNELS.items() for column in channel.columns},
}
"""The metrics of a training that are drawn first, with their titles; others that vary follow by their names."""


def metric_rows(run: Run, last: int = 0) -> list[dict[str, Any]]:
    """Return what a training logged, one row a step, with its tokens a second; `last` limits them to the newest."""
    lines = (run.read_file("metrics.jsonl") or b"").splitlines()
    rows = [orjson.loads(line) for line in lines[-last - 1 if last else 0 :]]
    for before, row in pairwise([{"num_tokens": 0}, *rows]):  # a total since the training began
        if row.get("step_time") and "num_tokens" in row and "num_tokens" in before:
            row["tokens_per_s"] = (row["num_tokens"] - before["num_tokens"]) / row["step_time"]
    return rows[-last:]


def first_rows(run: Run, number: int) -> dict[str, list[Row]]:
    """Return the first rows of every table of a run."""
    names = [out["kind"].partition("/")[0] for out in run.manifest.outputs.values()]
    kinds = [KINDS[name] for name in names if name in KINDS and KINDS[name].columns]
    return {str(kind): list(islice(run.scan(kind).rows(), number)) for kind in kinds}


def readable_first(columns: Iterable[str]) -> list[str]:
    """Return columns of a table: first who did what or what was checked, last the ids of states and units."""

    def place(column: str) -> int:
        ids = column.endswith(("sha256", "unit_id", "_ids", "json"))
        return -1 if column in ("teacher", "action", "check", "status") else ids

    return sorted(columns, key=place)


def row_tables(run: Run, number: int) -> list[Table]:
    """Return the first rows of every table of a run that has any, with what a reader can read first."""
    tables = []
    for table, rows in queries.first_rows(run, number).items():
        if rows:
            columns, total = readable_first(rows[0]), run.manifest.outputs[table]["rows"]
            cells = [[plain(row[column])[:LONGEST_CELL] for column in columns] for row in rows]
            more = f"the first {len(rows)} of {total:,}; `composer query` reads the rest"
            note = more if total > len(rows) else f"all {total:,}"
            title = table.removesuffix(".parquet").replace("_", " ").capitalize()
            tables.append(Table([column.replace("_", " ") for column in columns], cells, title=title, note=note))
    return tables


def summary(run: Run, page: RolloutPage | None) -> dict[str, str]:
    """Return the most important facts of a run in words, by label; `page`: any page of its rollouts."""
    m, labels = run.manifest, manifest_labels(run)
    env = m.config.get("env")
    words = {
        "models": labels.get("models", ""),
        "environment": f"{env['name']}, {env['split']} tasks" if isinstance(env, dict) and "split" in env else "",
    }
    if page is None:
        words["holds"] = holdings(run)
    else:
        ended = {
            outcome: sum(n for o, n in page.outcomes.items() if o.startswith(outcome))
            for outcome in ("passed", "failed")
        }
        graded = sum(ended.values())
        words["rollouts"] = f"{sum(page.outcomes.values()):,}"
        # Of several arms together the share says nothing.
        if graded and m.stage != "evaluate":
            words["passed"] = f"{ended['passed']:,} of {graded:,}, {100 * ended['passed'] / graded:.1f} %"
    words["cost"] = f"{m.cost_usd:.2f} USD"
    words["took"] = duration(m.seconds) if m.seconds else ""
    reader = STAGES[m.stage].read_by if m.stage in STAGES else ""
    if m.status == "complete" and m.outcome.exit_code == 0 and reader:
        words["next"] = f"composer {reader} --from {name(run.path)}"
    return {label: value for label, value in words.items() if value}


def find_rollouts_of_pairs(root: Path, run: Run, rows: Sequence[Row]) -> dict[str, tuple[Row, str]]:
    """Return the rollouts that these pairs were made from, each with its run, as far as they are still there."""
    ids = tuple({row["rollout_id"] for row in rows if row["rollout_id"]})
    rollouts: dict[str, tuple[Row, str]] = {}
    for ref in references(run.manifest):
        try:
            source = Run(find_input(root, Path(ref.path)))
            holds = source.holds(ROLLOUT) or source.holds(EVAL_ITEM)
        except BadInput:  # deleted, or unreadable: its pairs are shown without outcomes
            continue
        page = queries.page(source, RolloutFilter(ids=ids), 0, max(len(ids), 1)) if holds else None
        for row in page.rows if page else ():
            rollouts.setdefault(row["id"], (row, name(source.path)))
    return rollouts
