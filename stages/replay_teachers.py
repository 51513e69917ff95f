"""replay-teachers: ask every teacher what it would have done in every recorded state.

Answers: is that affordable? Reads rollouts and a teacher table, writes `teacher_actions`. The unit is one answer: a
distinct state, a teacher, a sample. Equal states of several rollouts are asked once.
"""

from pydantic import Field, field_validator

from stages.errors import Incomplete
from stages.messages import Message
from stages.policy import Policy, PolicyConfig, Sample, Turn, open_policy
from stages.policy.spending import Spending, spending, table
from stages.rollouts.trace import by_rollout, states_by_digest
from stages.runs import store
from stages.runs.artifact import Out, Run, Slot
from stages.runs.config import StageConfig
from stages.runs.inputs import Inputs
from stages.runs.plan import Plan, work_through
from stages.runs.records import STEP, TEACHER_ACTION, Row

VERSION = 1
INPUTS = {"rollouts": Slot(STEP)}
OUTPUTS = {"teacher_actions": TEACHER_ACTION}


class TeacherConfig(PolicyConfig):
    """One teacher: a name and a policy. By default its most likely answer is asked for."""

    name: str
    temperature: float = Field(0.0, ge=0.0)


class Config(StageConfig):
    """Whom to ask, and how often."""

    teachers: list[TeacherConfig] = Field(
        [TeacherConfig(name=f"teacher-{x}", model=f"kata:teacher-{x}") for x in "abc"], min_length=1
    )
    """The teacher table."""
    samples: int = Field(1, gt=0)
    """Answers of every teacher to one state; more than one wants a temperature above 0."""
    max_usd_per_trace: float = Field(5.0, gt=0, json_schema_extra={"affects_results": False})
    """What a trace may cost for the verdict to say affordable."""
    max_p95_latency_s: float = Field(30.0, gt=0, json_schema_extra={"affects_results": False})
    """What the 95th percentile of a call's latency may be for the verdict to say affordable."""

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
    """One answer to be had: a state, the steps recorded in it, a teacher, a sample."""

    def __init__(
        self, teacher: TeacherConfig, messages: list[Message], steps: list[Row], sample_idx: int, seed: int
    ) -> None:
        self.teacher, self.messages, self.steps, self.sample_idx = teacher, messages, steps, sample_idx
        self.key = store.digest([teacher.name, teacher.identity(), steps[0]["state_sha256"], sample_idx, seed])[:24]
        self.seed = int(self.key[:15], 16)

    def row(self, sample: Sample) -> Row:
        """The `teacher_action/1` row of an answer."""
        first = self.steps[0]
        return {
            "unit_id": self.key,
            **{name: first[name] for name in ("state_sha256", "task_id", "rollout_id", "step")},
            "num_steps": len(self.steps),
            "teacher": self.teacher.name,
            "model": self.teacher.model,
            "sample_idx": self.sample_idx,
            "action": None if sample.error_type else sample.text,
            **{
                name: getattr(sample, name)
                for name in ("finish_reason", "prompt_tokens", "completion_tokens", "cost_usd", "error_type", "error")
            },
            "attempts": sample.attempts,
            "latency_s": sample.latency_s,
        }


def questions(rollouts: Run, config: Config) -> dict[str, list[Question]]:
    """What to ask each teacher, by its name, in the order in which states were first recorded."""
    recorded = states_by_digest(rollouts.rows(STEP)).values()
    return {
        teacher.name: [
            Question(teacher, state.messages, state.steps, index, config.seed)
            for state in recorded
            for index in range(config.samples)
        ]
        for teacher in config.teachers
    }


def plan(inputs: Inputs, config: Config) -> Plan:
    """The answers to be had, and at most what they cost."""
    asked = questions(inputs.one("rollouts"), config)
    count = sum(len(questions) for questions in asked.values())
    tokens = sum(len(asked[t.name]) * t.max_tokens for t in config.teachers)
    cost = sum(t.cost(_prompt_tokens(asked[t.name]), len(asked[t.name]) * t.max_tokens) for t in config.teachers)
    return Plan(units=count, what="answers", max_completion_tokens=tokens, max_cost_usd=cost)


def _prompt_tokens(asked: list[Question]) -> int:
    """A rough count, four characters a token."""
    return sum(len(message["content"]) for question in asked for message in question.messages) // 4


def run(inputs: Inputs, config: Config, out: Out) -> None:
    """Ask every teacher what it has not answered yet, then tabulate the answers and what they cost."""
    rollouts: Run = inputs.one("rollouts")
    asked = questions(rollouts, config)
    for teacher in config.teachers:
        policy = open_policy(teacher, cache=out.cache, budget=out.budget, listener=out.progress)
        out.model(teacher.name, **policy.facts())
        _ask(policy, asked[teacher.name], out)
    answers = {record["unit"]: record["answer"] for record in out.records()}
    rows = [answers[question.key] for questions in asked.values() for question in questions]
    out.table(TEACHER_ACTION, rows)
    _report(rows, spending(rows, num_traces=len(by_rollout(rollouts.rows(STEP)))), config, out)


def _ask(policy: Policy, asked: list[Question], out: Out) -> None:
    def answer(batch: list[Question]) -> list[tuple[str, Row, bool]]:
        samples = policy.sample([Turn(q.messages, q.seed) for q in batch])
        return [_unit(question, sample) for question, sample in zip(batch, samples, strict=True)]

    work_through(asked, lambda q: q.key, answer, policy=policy, out=out, what=f"answers of {asked[0].teacher.name}")


def _unit(question: Question, sample: Sample) -> tuple[str, Row, bool]:
    """A journal record.

    A request that the server rejects for good counts as done; any other failure is tried again on --resume.
    """
    return question.key, {"answer": question.row(sample)}, sample.error_type not in (None, "rejected")


def _report(rows: list[Row], spent: list[Spending], config: Config, out: Out) -> None:
    failed = [row for row in rows if row["error_type"] is not None]
    total = spent[-1]
    affordable = total.usd_per_trace <= config.max_usd_per_trace and total.p95_latency_s <= config.max_p95_latency_s
    verdict = "AFFORDABLE" if affordable else "TOO EXPENSIVE"
    out.count(planned=len(rows), done=len(rows) - len(failed), failed=len(failed))
    out.manifest.tokens.update(prompt=total.prompt_tokens, completion=total.completion_tokens)
    out.conclude(verdict=verdict, teachers=[line.as_dict() for line in spent])
    limits = f"at most {config.max_usd_per_trace:g} USD a trace and {config.max_p95_latency_s:g} s a call (p95)"
    cost = f"{total.usd_per_trace:.4f} USD a trace, p95 {total.p95_latency_s:.2f} s"
    out.text("report.txt", f"{table(spent)}\n\n{verdict}: {cost}; asked for {limits}\n")
    unfinished = [row for row in failed if row["error_type"] != "rejected"]
    if unfinished:
        first = unfinished[0]
        raise Incomplete(
            f"{len(unfinished)} of {len(rows)} answers failed, the first of {first['teacher']}: {first['error']}. "
            "All others are saved; ask for the rest with --resume."
        )
