"""Runs and chains with what they hold as Python objects: rollouts with messages, pairs, differences of an evaluation.

A chain that was submitted elsewhere (`composer.run(..., on="slurm")`) is a `Job`, with its state, log and end.

`verdict.json` holds every number of an evaluation; a `Difference` has the ones that most scripts need, by the names
that they have there.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from composer_cli.executors import jobs
from composer_cli.show import rollout as shown_rollouts, text
from composer_cli.show.rollout import of_row, read_rows
from composer_cli.show.verdicts import describe_earlier_verdict
from composer_post_training.words import PYTHON, errors_in_python
from composer_stages.errors import BadInput, UsageError
from composer_stages.evaluation.difference import Difference as Difference
from composer_stages.evaluation.document import read_differences
from composer_stages.layout import escape_control_characters, escape_line
from composer_stages.messages import Message
from composer_stages.rollouts.trace import pairs_with_states, states
from composer_stages.runs import store
from composer_stages.runs.display import Column, Table, plain
from composer_stages.runs.kinds import EVAL_ITEM, ROLLOUT, Row
from composer_stages.runs.run import Run
from composer_stages.words import in_interface

if TYPE_CHECKING:
    import pandas

    from composer_stages.runs.tables import ArrowTable

# One rollout. Models and environments wrote what is shown: it is escaped in HTML, and characters that steer a terminal
# or the direction of writing are spelt out.

OPEN_LINES, OPEN_CHARACTERS = 15, 1500
"""Length up to which a text of a conversation is shown at once in a notebook; one click opens longer ones."""
BORDER = "border-left: 3px solid rgba(128, 128, 128, 0.5)"
ACTION_BORDER = "border-left: 3px solid rgba(64, 128, 255, 0.8)"


@dataclass(frozen=True, repr=False)
class Rollout:
    """One rollout: a policy's attempt at a task. `print` shows a screen of its conversation, a notebook all of it.

    Its `repr` is one line.

    >>> rollout = composer.find("collect").rollouts()[0]
    >>> rollout.reward, rollout.messages[0]["role"], rollout.row["terminated_by"]
    (1.0, 'system', 'submitted')
    >>> print(rollout)
    kata-train-0-00000#0@0: passed, reward 1
    ...
    """

    rollout_id: str
    """Its name, unique in its run."""
    outcome: Mapping[str, Any]
    """What is known of how it ended: `reward`, `hacked`, `num_steps`, `terminated_by`, `error_type` and others."""
    messages: list[Message]
    """The conversation: dictionaries with `role` and `content`."""
    steps: list[Row]
    """The steps by the columns of the table `steps`, such as `action` and `observation`."""
    row: Row
    """All columns of its table by name."""
    folder: Path
    """The folder of its run."""

    @property
    def task_id(self) -> str:
        """Return the name of its task."""
        return str(self.row["task_id"])

    @property
    def reward(self) -> float | None:
        """Return its reward, 1.0 or 0.0 where an evaluation recorded whether it passed; None where it has none."""
        reward = self.row["reward"] if "reward" in self.row else self.row["passed"]
        return None if reward is None else float(reward)

    def _shown(self) -> shown_rollouts.ShownRollout:
        return shown_rollouts.of_row(self.row, self.steps)

    def __repr__(self) -> str:
        labels = ("arm", "reward", "passed", "hacked", "terminated_by", "error_type")
        outcome = (f"{label} {plain(value)}" for label, value in self.outcome.items() if label in labels)
        facts = ", ".join([*outcome, f"{len(self.messages)} messages"])
        return f"<rollout {escape_line(f'{self.rollout_id}: {facts}')}>"

    def __str__(self) -> str:
        return text.screen_text(self.folder, self._shown())

    def _repr_html_(self) -> str:
        """Return the conversation for a notebook, without scripts and without anything from elsewhere."""
        rollout = self._shown()
        parts = [
            f"<p><b>{escape(escape_control_characters(rollout.title))}</b></p>",
            _table(rollout.opening(self.folder)),
            *(_block(title, text) for title, text in rollout.blocks()),
            "<p><b>grading</b></p>",
            _table(rollout.grading() or {"": "not graded"}),
            *(_block(title, text) for title, text in rollout.logs()),
        ]
        return f"<div>{''.join(parts)}</div>"


def _table(facts: Mapping[str, str]) -> str:
    cells = (
        f"<tr><td>{escape(escape_control_characters(name))}</td><td>{escape(escape_control_characters(text))}</td></tr>"
        for name, text in facts.items()
    )
    return f"<table>{''.join(cells)}</table>"


def _block(title: str, text: str) -> str:
    """Return a text with its title; a long one is folded."""
    lines = text.count("\n") + 1
    border = ACTION_BORDER if title.startswith("assistant") else BORDER
    body = (
        f'<pre style="{border}; margin: 0.2em 0 0.8em; padding-left: 0.8em; white-space: pre-wrap; '
        f'overflow-wrap: anywhere">{escape(escape_control_characters(text))}</pre>'
    )
    head = f"<b>{escape(escape_control_characters(title))}</b>"
    if lines <= OPEN_LINES and len(text) <= OPEN_CHARACTERS:
        return f"<div>{head}{body}</div>"
    return f"<details><summary>{head}, {lines:,} lines</summary>{body}</details>"


# Runs and chains.


COLUMNS = (
    *("rate", "treatment", "baseline", "estimate", "low", "high", "p_value", "p_holm", "units", "num_tasks"),
    *("num_seeds", "verdict"),
)
"""The columns of differences as a pandas frame."""


class Differences(tuple[Difference, ...]):
    """The differences between the arms of an evaluation, a tuple; it shows itself as a table in points.

    >>> compared.differences.pandas()[["rate", "treatment", "baseline"]].values.tolist()[0]
    ['pass@1', 'B', 'A']
    """

    __slots__ = ()

    def table(self) -> Table:
        """Return a row for each difference, in points."""
        return Table.of(
            "",
            ({**vars(difference), "units": difference.units} for difference in self),
            Column("rate"),
            Column("difference", lambda gain: f"{gain['treatment']} - {gain['baseline']}"),
            Column("points", "estimate", "points"),
            Column("95 % interval", ("low", "high"), "interval"),
            Column("p", "p_value", "p"),
            Column("units"),
            Column("tasks", "num_tasks", "count"),
            Column("verdict"),
        )

    def pandas(self) -> "pandas.DataFrame":
        """Return a pandas frame with the numbers of each `Difference` as columns."""
        import pandas

        return pandas.DataFrame([[getattr(row, name) for name in COLUMNS] for row in self], columns=COLUMNS)

    def __repr__(self) -> str:
        return repr(self.table()) if self else "no differences: the arms could not be compared"

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()


class ReadableRun(Run):
    """The run of a stage, as its functions and `find` return it, read-only. It shows itself as a short table.

    >>> run = composer.find("extract-pairs")
    >>> sorted(run.tables())
    ['pairs', 'states']
    >>> run.scan("pairs").columns[:2], len(run.pairs()) == len(run.scan("pairs"))
    (['pair_id', 'rule'], True)
    """

    def rollouts(self) -> list[Rollout]:
        """Return the rollouts with their messages, in the order of their table; empty without any.

        An evaluated one has the reward 1.0 where it passed. Those of an unfinished run are in the order in which they
        ended. All are held in memory: `scan("steps").batches()` reads a larger run.
        """
        tables = [(kind, key) for kind, key in ((ROLLOUT, "rollout_id"), (EVAL_ITEM, "item_id")) if self.holds(kind)]
        with errors_in_python():
            ids = [row[key] for kind, key in tables for row in self.scan(kind).rows([key])]
            order = {name: number for number, name in enumerate(ids)}
            rollouts = [
                Rollout(rollout.rollout_id, rollout.outcome, _messages(row, steps), steps, row, self.path)
                for row, steps in read_rows(self)
                for rollout in [of_row(row, steps)]
            ]
        return sorted(rollouts, key=lambda rollout: order.get(rollout.rollout_id, len(order)))

    def pairs(self) -> list[Row]:
        """Return the preference pairs, each with the `messages` before its `chosen` and `rejected` action.

        Raises `BadInput` for a run without pairs.
        """
        with errors_in_python():
            rows = [dict(row) for row in pairs_with_states(self)]
        return [{"messages": orjson.loads(row.pop("messages_json")), **row} for row in rows]


class Evaluation(ReadableRun):
    """The run of an evaluation: a `ReadableRun` with its verdict, and the differences between its arms.

    >>> compared = composer.find("evaluate")
    >>> compared.verdict, compared.differences[0].num_tasks
    ('UNDERPOWERED', 2)
    """

    @cached_property
    def document(self) -> Mapping[str, Any]:
        """Return the content of `verdict.json`; empty where the evaluation has not ended."""
        path = self.path / "verdict.json"
        content: dict[str, Any] = store.read_json(path) if path.is_file() else {}
        return content

    @property
    def verdict(self) -> str | None:
        """Return the decision, such as "VALIDATED"; None where the evaluation has not ended."""
        return self.document.get("decision")

    @property
    def differences(self) -> Differences:
        """Return treatment - baseline, which the verdict rests on, treatment - control, then passes and conduct.

        Arms that agree in all tasks are left out, but for the first two. Empty where the arms could not be compared
        (INVALID-RUN), or the evaluation has not ended; `BadInput` where an earlier version wrote the verdict.
        """
        if self.document and "comparisons" not in self.document:
            raise BadInput("python.no-differences", run=self.path, reason=describe_earlier_verdict(self))
        return Differences(read_differences(self.document))

    def __repr__(self) -> str:
        tables = [repr(self.differences)] if self.document.get("comparisons") else []
        return "\n\n".join([super().__repr__(), *tables])

    def _repr_html_(self) -> str:
        return super()._repr_html_() + (self.differences._repr_html_() if self.document.get("comparisons") else "")


class ComparedLogs(ReadableRun):
    """The run of a comparison of logs: a `ReadableRun` with what it decided, of B and A where there are more.

    >>> logs = composer.compare("before.jsonl", "after.jsonl", quiet=True)
    >>> logs.decision, logs.difference
    ('better', 0.5)
    """

    @cached_property
    def document(self) -> Mapping[str, Any]:
        """Return the content of `comparison.json`: all sides, and the difference of each from the first."""
        content: dict[str, Any] = store.read_json(self.path / "comparison.json")
        return content

    @property
    def decision(self) -> str:
        """Return "better", "better by less" (than `min_gain`), "worse", "no gain", "no difference" or "undecided"."""
        return str(self.document["differences"][0]["decision"])

    @property
    def difference(self) -> float:
        """Return the mean score of B minus that of A, which is a gain where it is negative and lower is better."""
        return float(self.document["differences"][0]["estimate"])

    @property
    def interval(self) -> tuple[float, float]:
        """Return the limits of the difference, at 95 %, or at the level that the correction leaves it."""
        first = self.document["differences"][0]
        return first["low"], first["high"]

    @property
    def p(self) -> float:
        """Return the p-value of no difference, after the correction for several comparisons where there are some."""
        return float(self.document["differences"][0]["p_holm"])

    @property
    def items(self) -> "ArrowTable":
        """Return the compared tasks as an Arrow table: side, task_id, family, the baseline's score and the side's."""
        return self.scan("tasks.parquet").arrow()

    def __repr__(self) -> str:
        return (self.read_file("report.txt") or b"").decode()

    def _repr_html_(self) -> str:
        return (self.read_file("comparison.html") or b"").decode()


@dataclass(frozen=True, repr=False)
class Chain(Mapping[str, ReadableRun]):
    """The runs of a preset by the names of its entries, a mapping; it shows them as a table.

    >>> list(chain), chain["collect"].manifest.status
    (['collect'], 'complete')
    """

    runs: Mapping[str, ReadableRun]
    """The runs by the names of the entries."""

    def __getitem__(self, name: str) -> ReadableRun:
        return self.runs[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.runs)

    def __len__(self) -> int:
        return len(self.runs)

    @property
    def differences(self) -> Differences:
        """Return the differences of the last evaluation in the chain; `UsageError` where it has none."""
        evaluations = [run for run in self.runs.values() if isinstance(run, Evaluation)]
        if not evaluations:
            raise UsageError("python.no-evaluation", entries=list(self.runs))
        return evaluations[-1].differences

    def table(self) -> Table:
        """Return a row for each run."""
        records = [(name, run, run.manifest) for name, run in self.runs.items()]
        cells = [
            (name, manifest.stage, manifest.status, manifest.summary.get("verdict"), run.path)
            for name, run, manifest in records
        ]
        return Table(("entry", "stage", "status", "verdict", "folder"), cells)

    def __repr__(self) -> str:
        return repr(self.table())

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()


class Job:
    """A submitted chain, as `run(..., on="slurm")` and `job` return it. It shows itself as a short table."""

    def __init__(self, record: jobs.SubmittedJob) -> None:
        self._record = record

    @property
    def name(self) -> str:
        """Return its name in `runs()`."""
        return self._record.name

    @property
    def on(self) -> str:
        """Return the service that it was submitted to, such as "slurm"."""
        return self._record.executor

    @property
    def status(self) -> str:
        """Return its state, as the service reports it now.

        One of "queued", "running", "complete", "failed", "interrupted", "cancelled" and "lost".
        Raises `InfrastructureError` where the service does not answer.
        """
        with errors_in_python():
            self._record = jobs.refresh_job(self._record)
        return self._record.state.status

    def log(self) -> str:
        """Return what it has printed so far. Raises `InfrastructureError` where the service does not answer."""
        with errors_in_python():
            return "".join(f"{line}\n" for line in jobs.log(self._record, follow=False))

    def cancel(self) -> None:
        """Stop it; what it finished stays.

        Raises `UsageError` where it is over, `InfrastructureError` where the service does not answer.
        """
        with errors_in_python():
            self._record = jobs.cancel(Path(self._record.folder).parents[1], self.name)

    def _table(self) -> Table:
        status, record = self.status, self._record
        facts = {"on": self.on, "status": status, "reason": in_interface(record.state.detail, PYTHON)}
        facts |= {"submitted": record.submitted_at, "folder": record.folder}
        return Table(("job", self.name), [(label, value) for label, value in facts.items() if value])

    def __repr__(self) -> str:
        return repr(self._table())

    def _repr_html_(self) -> str:
        return self._table()._repr_html_()


OF_STAGE: Mapping[str, type[ReadableRun]] = {"evaluate": Evaluation, "compare": ComparedLogs}
"""The class of the runs of a stage, where it has one of its own."""


def opened(path: Path) -> ReadableRun:
    """Return the run of a folder, of the class of its stage."""
    run = ReadableRun(path)
    return OF_STAGE.get(run.manifest.stage, ReadableRun)(path)


def _messages(row: Row, steps: Sequence[Row]) -> list[Message]:
    """Return the conversation of a rollout as its policy was shown it, with its last action and observation."""
    if "transcript_json" in row:
        messages: list[Message] = orjson.loads(row["transcript_json"])
        return messages
    if not steps:
        return []
    # The state before the last action holds all messages but that action and what was observed after it.
    action, observation = steps[-1]["action"], steps[-1]["observation"]
    ended: list[Message] = [{"role": "assistant", "content": action}]
    return [*states(list(steps))[-1], *ended, *([{"role": "user", "content": observation}] if observation else [])]
