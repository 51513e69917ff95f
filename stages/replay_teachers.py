"""replay-teachers: ask every teacher what it would have done in every recorded state.

Answers: is that affordable? Reads rollouts and a teacher table, writes `teacher_actions`. The unit is one answer: a
distinct state, a teacher, a sample. Equal states of several rollouts are asked once. Teachers behind servers are asked
side by side, each rollout's steps in their order; meanwhile local ones take their turns.
"""

from collections.abc import Sequence
from concurrent.futures import Future, wait
from itertools import groupby
from threading import Event
from typing import Any

from pydantic import Field, field_validator

from stages.errors import Incomplete
from stages.messages import Message
from stages.policy import Policy, PolicyConfig, Sample, Turn, background, open_policy
from stages.policy.base import prompt_bound
from stages.policy.scheduler import Chain, follow
from stages.policy.spending import spending, table, verdict
from stages.rollouts.trace import by_rollout, states_by_digest
from stages.runs import store
from stages.runs.artifact import Interrupted, Out, Run, Slot
from stages.runs.config import StageConfig
from stages.runs.inputs import Inputs
from stages.runs.plan import Plan, work_through
from stages.runs.records import STEP, TEACHER_ACTION, Row
from stages.runs.together import Together

VERSION = 2
INPUTS = {"rollouts": Slot(STEP)}
OUTPUTS = {"teacher_actions": TEACHER_ACTION}
FINAL = (None, "rejected", "no_text")
"""Outcomes that asking again would not change."""


class TeacherConfig(PolicyConfig):
    """One teacher: a name and a policy. By default its most likely answer is asked for; how long it may be is said."""

    name: str
    temperature: float = Field(0.0, ge=0.0)
    max_tokens: int = Field(gt=0)
    """Longest answer in tokens. There is no default: an answer that is cut off is paid for and of no use."""
    concurrency: int = Field(32, gt=0, json_schema_extra={"affects_results": False})
    """Most requests in flight at once to a server; how many it gets is found out."""


class Config(StageConfig):
    """Whom to ask, and how often."""

    teachers: list[TeacherConfig] = Field(
        [TeacherConfig(name=f"teacher-{x}", model=f"kata:teacher-{x}", max_tokens=64) for x in "abc"], min_length=1
    )
    """The teacher table."""
    samples: int = Field(1, gt=0)
    """Answers of every teacher to one state; more than one wants a temperature above 0."""
    min_answered: float = Field(0.8, ge=0.0, le=1.0, json_schema_extra={"affects_results": False})
    """Share of the questions that must be answered whole, or the run does not pass."""
    max_usd_per_trace: float = Field(5.0, gt=0, json_schema_extra={"affects_results": False})
    """What a trace may cost for the verdict to say affordable."""
    max_p95_latency_s: float = Field(30.0, gt=0, json_schema_extra={"affects_results": False})
    """What the 95th percentile of a step's seconds, those of its slowest teacher, may be for the same."""

    @field_validator("teachers")
    @classmethod
    def _named_apart(cls, teachers: list[TeacherConfig]) -> list[TeacherConfig]:
        names = [teacher.name for teacher in teachers]
        if len(set(names)) < len(names):
            raise ValueError(f"two teachers have the same name: {sorted(names)}")
        return teachers

    def label(self) -> str:
        """How many teachers."""
        return f"{len(self.teachers)}-teachers"


class Question:
    """One answer to be had: a state, the steps recorded in it, a teacher, a sample. `identity` is the teacher's."""

    def __init__(
        self,
        teacher: TeacherConfig,
        identity: dict[str, Any],
        messages: list[Message],
        steps: list[Row],
        sample_idx: int,
        seed: int,
    ) -> None:
        self.teacher, self.messages, self.steps, self.sample_idx = teacher, messages, steps, sample_idx
        self.key = store.digest([teacher.name, identity, steps[0]["state_sha256"], sample_idx, seed])[:24]
        self.seed = int(self.key[:15], 16)

    def row(self, sample: Sample) -> Row:
        """The `teacher_action/2` row of an answer."""
        first = self.steps[0]
        return {
            "unit_id": self.key,
            **{name: first[name] for name in ("state_sha256", "task_id", "rollout_id", "step")},
            "num_steps": len(self.steps),
            "teacher": self.teacher.name,
            "model": self.teacher.model,
            "sample_idx": self.sample_idx,
            "action": None if sample.error_type else sample.text,
            "cost_usd": sample.cost_usd if sample.price_known else None,
            **{name: getattr(sample, name) for name in AS_IT_CAME},
        }


AS_IT_CAME = (
    "served_model",
    "provider",
    "finish_reason",
    "prompt_tokens",
    "cached_tokens",
    "completion_tokens",
    "usage_by",
    "error_type",
    "error",
    "attempts",
    "latency_s",
)
"""Columns that are a sample's fields."""


def questions(rollouts: Run, config: Config) -> dict[str, list[Question]]:
    """What to ask each teacher, by its name, in the order in which states were first recorded."""
    recorded = states_by_digest(rollouts.rows(STEP)).values()
    asked = {}
    for teacher in config.teachers:
        identity = teacher.identity()  # of a local folder all bytes are read for it
        asked[teacher.name] = [
            Question(teacher, identity, state.messages, state.steps, index, config.seed)
            for state in recorded
            for index in range(config.samples)
        ]
    return asked


def plan(inputs: Inputs, config: Config) -> Plan:
    """The answers to be had, and at most what they cost."""
    asked = questions(inputs.one("rollouts"), config)
    count = sum(len(questions) for questions in asked.values())
    tokens = sum(len(asked[t.name]) * t.longest_answer() for t in config.teachers)
    cost = sum(
        t.cost(prompt_bound(len(store.encode(q.messages))), t.longest_answer())
        for t in config.teachers
        for q in asked[t.name]
    )
    unknown = [t.name for t in config.teachers if not t.priced]
    notes = (f"the price of {', '.join(unknown)} is not known",) if unknown else ()
    return Plan(units=count, what="answers", max_completion_tokens=tokens, max_cost_usd=cost, notes=notes)


def run(inputs: Inputs, config: Config, out: Out) -> None:
    """Ask every teacher what it has not answered yet, then tabulate the answers and what they cost."""
    rollouts: Run = inputs.one("rollouts")
    asked = questions(rollouts, config)
    policies = {
        t.name: open_policy(t, cache=out.cache, budget=out.budget, listener=out.progress) for t in config.teachers
    }
    for name, policy in policies.items():
        out.model(name, **policy.facts())
    _ask_all(asked, policies, out)
    answers = {record["unit"]: record["answer"] for record in out.records()}
    rows = [answers[question.key] for questions in asked.values() for question in questions]
    out.table(TEACHER_ACTION, rows)
    _report(rows, list(by_rollout(rollouts.rows(STEP))), config, out)


def _ask_all(asked: dict[str, list[Question]], policies: dict[str, Policy], out: Out) -> None:
    """Ask servers on their own thread and, beside them, local models one after another on this one."""
    halted = Event()
    servers = background.start(
        _ask_servers({n: q for n, q in asked.items() if _is_server(policies[n])}, policies, out, halted)
    )
    try:
        for name, policy in policies.items():
            if not _is_server(policy):
                _ask_here(policy, asked[name], out, servers)
        servers.result()
    except Exception:
        halted.set()
        wait([servers])  # what is in flight is paid, so it is waited for
        raise


def _is_server(policy: Policy) -> bool:
    return hasattr(policy, "ask")


def _ask_here(policy: Policy, asked: list[Question], out: Out, servers: Future[None]) -> None:
    def answer(batch: list[Question]) -> list[tuple[str, Row, bool]]:
        if servers.done():
            servers.result()  # raises what went wrong there
        samples = policy.sample([Turn(q.messages, q.seed) for q in batch])
        return [_unit(question, sample) for question, sample in zip(batch, samples, strict=True)]

    work_through(asked, lambda q: q.key, answer, policy=policy, out=out, what=f"answers of {asked[0].teacher.name}")


async def _ask_servers(asked: dict[str, list[Question]], policies: dict[str, Policy], out: Out, halted: Event) -> None:
    """Ask what is not answered yet, one chain a rollout and teacher."""
    missing = {name: [q for q in questions if not out.finished(q.key)] for name, questions in asked.items()}
    chains = [chain for name, questions in missing.items() for chain in _chains(policies[name], questions)]
    total = sum(map(len, asked.values()))
    done = total - sum(map(len, missing.values()))
    written = Together[tuple[str, Row, bool]](out.write_all)

    async def answered(question: Question, sample: Sample) -> None:
        nonlocal done
        await written(_unit(question, sample))
        done += 1
        out.progress("answers of servers", done, total)

    def check() -> None:
        out.stop_here()
        if halted.is_set():
            raise Interrupted

    if chains:
        await follow(chains, lambda question: Turn(question.messages, question.seed), answered, check)


def _chains(policy: Any, asked: Sequence[Question]) -> list[Chain[Question]]:
    """The questions of each rollout, its states in order, of each state all samples."""
    return [
        Chain(policy, [list(samples) for _, samples in groupby(rollout, lambda q: q.steps[0]["state_sha256"])])
        for _, rollout in groupby(asked, lambda q: q.steps[0]["rollout_id"])
    ]


def _unit(question: Question, sample: Sample) -> tuple[str, Row, bool]:
    """A journal record. What asking again would not change counts as done; a failure is tried again on --resume."""
    return question.key, {"answer": question.row(sample)}, sample.error_type not in FINAL


def _report(rows: list[Row], traces: list[str], config: Config, out: Out) -> None:
    spent = spending(rows, traces)
    total, unfinished = spent[-1], [row for row in rows if row["error_type"] not in FINAL]
    found = verdict(
        total,
        min_answered=config.min_answered,
        max_usd_per_trace=config.max_usd_per_trace,
        max_p95_latency_s=config.max_p95_latency_s,
    )
    out.count(
        planned=len(rows),
        done=len(rows) - total.failed,
        failed=total.failed,
        truncated=total.truncated,
    )
    out.manifest.tokens.update(
        prompt=total.prompt_tokens, cached=total.cached_tokens, completion=total.completion_tokens
    )
    out.conclude(
        ok=found.ok,
        exit_code=1 if found.ok is False else 0,
        verdict=found.word,
        why=found.why,
        teachers=[line.as_dict() for line in spent],
        possibly_usd=out.budget.possibly,
    )
    out.text("report.txt", f"{table(spent)}\n\n{found.word}: {found.why}\n{_notes(rows, spent, out)}")
    if unfinished:
        first = unfinished[0]
        rest = "All others are" if len(unfinished) < len(rows) else "There are no others, nothing is"
        raise Incomplete(
            f"{len(unfinished)} of {len(rows)} answers failed, the first of {first['teacher']}: {first['error']}. "
            f"{rest} saved; ask for the rest with --resume."
        )


def _notes(rows: list[Row], spent: list[Any], out: Out) -> str:
    """What a reader of the table has to know about its numbers."""
    bound = sum(row["usage_by"] == "bound" and row["error_type"] is None for row in rows)
    unpriced = [line.teacher for line in spent[:-1] if line.unpriced]
    notes = [
        (bound, f"{bound} answers came without usage: their tokens are upper bounds, and so is their price."),
        (unpriced, f"The price of {', '.join(unpriced)} is not known: it counts as nothing in these sums."),
        (out.budget.possibly, f"Another {out.budget.possibly:.4f} USD are possibly paid, for calls without a bill."),
    ]
    return "".join(f"{note}\n" for holds, note in notes if holds)
