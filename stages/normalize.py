"""normalize: keep the rollouts that a Data-Juicer recipe keeps, collected here or imported, with its judgement of each.

Reads one run of rollouts, writes `rollouts`, `steps`, `tasks` and `origins` as they were without those that the
recipe drops, `selections` with every rollout, kept or not, its statistics or which operator dropped it, and the
collection checks of what is left. Texts stay as they are, whatever the recipe does to its own copy. A rollout without
steps has nothing to judge and stays.

Data-Juicer installs the packages that an operator lacks while it runs, gigabytes of CUDA among them, so it must not be
in this program's own environment, and here it may install nothing. Its own texts and messages of a rollout are
discarded, tool-call arguments included: only keep, drop and statistics are read, joined by id. The reason for a drop is
read from Data-Juicer's tracer, which is on for the operators that drop. Its trace files are read as py-data-juicer
1.6.1 writes them, `core/tracer/tracer.py`.
"""

import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar

import orjson

from composer_stages.data_files import load_template
from composer_stages.envs import task_table
from composer_stages.errors import BadInput, ComposerError, Incomplete, UsageError
from composer_stages.layout import aligned
from composer_stages.messages import Message
from composer_stages.rollouts import collection_checks
from composer_stages.rollouts.collection_checks import Account
from composer_stages.rollouts.trace import conversation, inherited, rollout_rows
from composer_stages.runs import store
from composer_stages.runs.kinds import ORIGIN, ROLLOUT, SELECTION, STEP, TASK, Row
from composer_stages.runs.run import Inputs, RunWriter, Slot
from composer_stages.runs.settings import Option, Settings, StageConfig
from composer_stages.runs.stage import Plan, Stage

SHOWN = 20
"""Dropped rollouts that the report names."""
STATS = "__dj__stats__"
OFFLINE = {
    "UV_OFFLINE": "1",
    "UV_NO_CACHE": "1",
    "PIP_NO_INDEX": "1",
    "PIP_NO_CACHE_DIR": "1",
    "CUDA_VISIBLE_DEVICES": "",
}
"""Environment variables that keep Data-Juicer from installing anything."""
AT_MOST_S = 3600.0
DROPPING = re.compile(rb"\b\w+_(?:filter|deduplicator|selector)\b")
"""Names of operators that drop; mappers change texts, which are not read back."""


class JuicerConfig(Settings):
    """A Data-Juicer recipe to run over rollouts."""

    text_sets: ClassVar[str | None] = "recipe"

    recipe: str | None = None
    """The recipe, a YAML file; rollouts that it drops are dropped."""
    command: str = "dj-process"
    """Data-Juicer's program, in an environment of its own."""

    def identity(self) -> dict[str, Any]:
        """Replace the path of the recipe by its content; the program's path does not count."""
        if self.recipe is None:
            return {"recipe": None}
        return {"recipe": store.digest(_read_recipe(self.recipe).decode("utf-8", "replace"))}


class Config(StageConfig):
    """The recipe, and the program that runs it."""

    dj: Annotated[JuicerConfig, Option("RECIPE")] = JuicerConfig()

    def identity(self) -> dict[str, Any]:
        """Replace the path of the recipe by its content."""
        return {"dj": self.dj.identity()}

    def check(self) -> list[str]:
        """Return a line about the program that will run the recipe; `UsageError` without a recipe."""
        _require_recipe(self)
        return [f"{program(self.dj.command)} will run {self.dj.recipe}"]


@dataclass
class JudgedRollouts:
    """The counts of kept and of dropped rollouts for the report, with the names of the first dropped ones."""

    retained: Account = field(default_factory=Account)
    dropped: Account = field(default_factory=Account)
    tasks: Counter[str] = field(default_factory=Counter)
    """Kept rollouts by task; 0 for a task that lost all of its rollouts."""
    names: list[str] = field(default_factory=list)


def plan(inputs: Inputs, config: Config) -> Plan:
    """Return the number of rollouts to judge."""
    _require_recipe(config)
    return Plan(units=len(inputs.one("rollouts").scan(ROLLOUT)), what="rollouts")


def run(inputs: Inputs, config: Config, out: RunWriter) -> None:
    """Let the recipe judge, then write what it keeps."""
    _require_recipe(config)
    source = inputs.one("rollouts")
    out.progress("Data-Juicer", 0, 1)
    conversations = ((row["rollout_id"], conversation(steps)) for row, steps in rollout_rows(source) if steps)
    verdict = run_recipe(conversations, config.dj, out.scratch("data-juicer"))
    out.progress("Data-Juicer", 1, 1)
    out.set_summary(**inherited([source]))
    judgements, checks = JudgedRollouts(), collection_checks.CollectionChecks()
    dropped = set[str]()

    def judged() -> Iterator[Row]:
        # Facts that the source of each rollout does not record, in the rollouts' order; none for our own rollouts.
        origins = source.scan(ORIGIN).rows(["missing"]) if source.holds(ORIGIN) else iter(())
        for rollout, steps in rollout_rows(source):
            name = rollout["rollout_id"]
            keep = name in verdict.statistics or not steps
            reason, lacks = None if keep else verdict.reasons.get(name), next(origins, {"missing": ()})["missing"]
            (judgements.retained if keep else judgements.dropped).add(rollout, len(steps))
            judgements.tasks[rollout["task_id"]] += keep
            if keep:
                checks.add(rollout, steps, lacks)
            else:
                dropped.add(name)
                if len(judgements.names) < SHOWN:
                    judgements.names.append(f"{name}  {reason or ''}".rstrip())
            stats = store.encode(verdict.statistics[name]).decode() if name in verdict.statistics else None
            about = {"kept": keep, "stats_json": stats, "reason": reason}
            yield {"rollout_id": name, "task_id": rollout["task_id"], **about}

    out.table(SELECTION, judged())  # fills `dropped`, which the other tables need
    for kind in (ROLLOUT, STEP, ORIGIN):
        if source.holds(kind):
            out.table(kind, (row for row in source.scan(kind).rows() if row["rollout_id"] not in dropped))
    if source.holds(TASK):
        out.table(TASK, source.scan(TASK).rows())
    _report(judgements, checks.checks(judgements.retained.rollouts), out)


def _require_recipe(config: Config) -> None:
    if config.dj.recipe is None:
        raise UsageError("recipe-not-named")


def _report(judgements: JudgedRollouts, checks: list[collection_checks.CollectionCheck], out: RunWriter) -> None:
    """Write the counts, the summary and the report; raise `Incomplete` when nothing is kept."""
    retained, dropped = judgements.retained, judgements.dropped
    bare = sorted(task for task, number in judgements.tasks.items() if not number)
    out.count(
        planned=retained.rollouts + dropped.rollouts,
        done=retained.rollouts,
        dropped=dropped.rollouts,
        steps=retained.steps,
    )
    out.set_summary(
        kept=retained.rollouts,
        dropped=dropped.rollouts,
        mean_reward_kept=retained.rewards.value,
        mean_reward_dropped=dropped.rewards.value,
        tasks_without_rollouts=len(bare),
        **collection_checks.summary(checks),
    )
    sides = []
    for name, account in (("kept", retained), ("dropped", dropped)):
        mean = "nothing scored" if account.rewards.value is None else f"{account.rewards.value:.3f}"
        sides.append((name, account.rollouts, account.steps, account.rewards.number, mean))
    report = load_template(__package__, "normalize_report.jinja").render(
        sides=aligned(sides, ("", "rollouts", "steps", "scored", "mean reward")),
        named=judgements.names,
        num_unnamed=dropped.rollouts - len(judgements.names),
        bare=bare,
        checks=collection_checks.table(checks),
    )
    out.write_file("report.txt", report)
    if not retained.rollouts:
        raise Incomplete("recipe-keeps-nothing", num_rollouts=dropped.rollouts)


# Data-Juicer, in an environment of its own


@dataclass(frozen=True)
class RecipeResult:
    """The result of a recipe, by rollout id: the statistics of those it keeps, the reasons of those it drops.

    A rollout in neither was dropped without a reason that Data-Juicer traces, such as the third of equal ones.
    """

    statistics: dict[str, Any]
    reasons: dict[str, str]


def run_recipe(rollouts: Iterable[tuple[str, list[Message]]], config: JuicerConfig, folder: Path) -> RecipeResult:
    """Run the recipe over rollouts (id, messages); its files stay in `folder`, in which the program runs."""
    folder = folder.absolute()
    dataset, result, ids = folder / "rollouts.jsonl", folder / "kept" / "kept.jsonl", set[str]()

    def samples() -> Iterator[Row]:
        for name, messages in rollouts:
            ids.add(name)
            text = "\n\n".join(f"{message['role']}: {message['content']}" for message in messages)
            yield {"id": name, "text": text, "messages": messages}

    with store.sealing(dataset) as file:
        store.write_lines(file, samples())
    # An interrupted attempt may have left a result and traces, which would be read as those of this one.
    shutil.rmtree(result.parent, ignore_errors=True)
    recipe = Path(config.recipe or "").expanduser().absolute()
    words = ["--config", str(recipe), "--dataset_path", str(dataset)]
    words += ["--export_path", str(result), "--np", "1", "--keep_stats_in_res_ds", "true"]
    operators = sorted({match.decode() for match in DROPPING.findall(_read_recipe(config.recipe or ""))})
    if operators:
        # Without a limit: by default the tracer keeps the first 10 samples of each operator.
        words += ["--open_tracer", "true", "--trace_num", str(sys.maxsize)]
        words += ["--op_list_to_trace", orjson.dumps(operators).decode()]
    _run([program(config.command), *words], folder)
    if not result.exists():
        raise ComposerError("juicer-without-result", result=result)
    results, reasons = _rows(result), dict[str, str]()
    _require_ids(results, ids)
    for path in sorted(result.parent.rglob("trace/*.jsonl")):
        kind, _, operator = path.stem.partition("-")
        traces = _rows(path)
        # A deduplicator traces pairs of equal samples (dup1 was kept), a filter the samples that it dropped.
        dropped = [trace.get("dup2") or {} for trace in traces] if kind == "duplicate" else traces
        _require_ids(dropped, ids)
        for row, trace in zip(dropped, traces, strict=True):
            if kind == "duplicate":
                reasons[row["id"]] = f"{operator}, like {(trace.get('dup1') or {}).get('id')}"
            else:
                statistics = (f"{name} {value}" for name, value in sorted((row.get(STATS) or {}).items()))
                reasons[row["id"]] = f"{operator} ({', '.join(statistics)})"
    return RecipeResult({row["id"]: row.get(STATS) or {} for row in results}, reasons)


def _rows(path: Path) -> list[Row]:
    """Return the rows of a file that Data-Juicer wrote; `ComposerError` where it is damaged."""
    try:
        return task_table.read_rows(path)
    except BadInput as error:
        raise ComposerError("juicer-file-damaged", error=error) from None


def _require_ids(rows: Iterable[Row], ids: Collection[str]) -> None:
    for strange in (row for row in rows if row.get("id") not in ids):
        raise ComposerError("juicer-without-ids", id=strange.get("id"), keys=[*strange])


def _read_recipe(path: str) -> bytes:
    try:
        return Path(path).expanduser().read_bytes()
    except OSError as error:
        raise UsageError("recipe-unreadable", path=path, error=error.strerror) from None


def program(command: str) -> str:
    """Return Data-Juicer's path; raise `UsageError` when it is absent, or in this program's own environment."""
    path = shutil.which(os.path.expanduser(command))
    if path is None:
        raise UsageError("juicer-missing", program=command)
    if Path(path).parent == Path(sys.executable).parent:
        raise UsageError("juicer-in-own-environment", path=path)
    return os.path.abspath(path)


def _run(words: list[str], folder: Path) -> None:
    # No other variable: neither the keys of this environment nor PYTHONPATH, which would mix the environments.
    variables = ("PATH", "HOME", "LANG", "TMPDIR")
    environment = {name: os.environ[name] for name in variables if name in os.environ} | OFFLINE
    try:
        process = subprocess.run(
            words, cwd=folder, env=environment, capture_output=True, text=True, errors="replace", timeout=AT_MOST_S
        )
    except subprocess.TimeoutExpired:
        raise ComposerError("juicer-too-slow", limit_s=AT_MOST_S) from None
    if process.returncode != 0:
        lines = [line for line in (process.stderr or process.stdout).splitlines() if line.strip()]
        last = " / ".join(lines[-3:])[:600]
        # The cause is for the runner, which finds a failed disk by its words.
        raise ComposerError("juicer-failed", returncode=process.returncode, error=last) from OSError(last)


STAGE = Stage(
    name="normalize",
    version=1,
    example="""\
>>> composer.normalize.settings()["dj.command"]
'dj-process'""",
    config=Config,
    inputs={"rollouts": Slot(STEP)},
    outputs={"tasks": TASK, "rollouts": ROLLOUT, "steps": STEP, "origins": ORIGIN, "selections": SELECTION},
    plan=plan,
    run=run,
)
