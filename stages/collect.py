"""collect: play a policy in an environment and keep every step.

Answers: is the trace stream clean? Reads an environment and a policy, writes `steps/*.jsonl.gz` (whole transcripts),
`tasks`, `rollouts` and `steps` as Parquet, and the collection gate. The unit is one rollout. A server's rollouts go on
independently of each other; those of a local model, whose arithmetic depends on the batch, in batches.
"""

from collections.abc import Iterator

from pydantic import Field

from stages.envs.base import Task
from stages.errors import Incomplete
from stages.policy import PolicyConfig, kind_of
from stages.policy.serving import Serving
from stages.rollouts import gate, trace
from stages.rollouts.agent_loop import Episode, PlayingConfig, play_missing
from stages.rollouts.gate import Account
from stages.runs import reporting, store
from stages.runs.artifact import Inputs, RunWriter
from stages.runs.records import ROLLOUT, STEP, TASK, Row
from stages.runs.stage import Plan, Stage


class Config(PlayingConfig):
    """What to collect."""

    policy: PolicyConfig = PolicyConfig()
    tasks: int = Field(25, gt=0, le=100_000)
    """Number of tasks of the split."""
    samples: int = Field(4, gt=0, le=10_000)
    """Rollouts of every task."""


def plan(inputs: Inputs, config: Config) -> Plan:
    """The rollouts to play."""
    del inputs
    reporting.check(config.report_to)
    rollouts = config.tasks * config.samples
    tokens = rollouts * config.max_steps * config.policy.max_tokens
    at_once = () if kind_of(config.policy) == "local" else config.in_flight.notes()
    return Plan(
        units=rollouts,
        what="rollouts",
        max_completion_tokens=tokens,
        max_cost_usd=config.policy.cost(0, tokens),
        notes=(*config.limits.notes(config.max_steps), f"history {config.history}", *at_once),
    )


def run(inputs: Inputs, config: Config, out: RunWriter) -> None:
    """Play what is not played yet, then tabulate and check everything."""
    del inputs
    reporting.check(config.report_to)
    with reporting.log_units(config.report_to, out, config.label()):
        tasks, episodes = _play(config, out)
    _finish(tasks, episodes, out)


def work(inputs: Inputs, config: Config, out: RunWriter) -> None:
    """Play what is not played yet."""
    del inputs
    _play(config, out)


def _play(config: Config, out: RunWriter) -> tuple[list[Task], list[Episode]]:
    make = config.opener()
    tasks = config.draw(make, config.tasks)
    episodes = [Episode(task, index, config.seed) for task in tasks for index in range(config.samples)]
    sandbox = make().sandbox
    with Serving(out, [config.policy]) as serving:
        policy = serving.open(config.policy)
        out.model("policy", **policy.facts())
        play_missing(
            make,
            policy,
            episodes,
            key=lambda episode: episode.rollout_id,
            payload=lambda episode: trace.payload(episode, policy, sandbox=sandbox),
            config=config,
            out=out,
            what="rollouts",
        )
    return tasks, episodes


def _finish(tasks: list[Task], episodes: list[Episode], out: RunWriter) -> None:
    """Tables in the order of the plan, whatever the order of completion, and the gate's verdict."""
    names = [episode.rollout_id for episode in episodes]
    checks, told = gate.Gate(), Account()

    def rollouts() -> Iterator[Row]:
        for unit in out.journal.read(names):
            told.add(unit["rollout"], len(unit["steps"]))
            checks.add(unit["rollout"], unit["steps"])
            yield unit["rollout"]

    out.table(TASK, map(task_row, tasks))
    out.table(ROLLOUT, rollouts())
    out.table(STEP, (step for unit in out.journal.read(names) for step in unit["steps"]))
    _report(told, checks.checks(len(episodes)), out)


def task_row(task: Task) -> Row:
    """One `task/1` row."""
    return {
        "task_id": task.task_id,
        "env": task.env,
        "split": task.split,
        "family": task.family,
        "prompt": task.prompt,
        "data_json": store.encode(dict(task.data)).decode(),
    }


def _report(told: Account, checks: list[gate.GateCheck], out: RunWriter) -> None:
    out.count(planned=told.rollouts, done=told.rollouts - told.failed, failed=told.failed, steps=told.steps)
    out.manifest.tokens.update(prompt=told.prompt_tokens, completion=told.completion_tokens)
    mean, strict, loose = told.rewards.value, told.strict.value, told.loose.value
    out.set_summary(
        ok=all(c.ok for c in checks),
        mean_reward=mean,
        strict_rate=strict,
        loose_rate=loose,
        gate={c.name: [c.total - c.failed, c.total] for c in checks},
        gate_failed=[c.name for c in checks if not c.ok],
    )
    shown = "nothing scored" if mean is None else f"mean reward {mean:.3f}"
    if strict is not None and loose is not None:
        shown += f", strict {100 * strict:.1f} %, loose {100 * loose:.1f} %"
    out.text(
        "report.txt",
        f"{told.rollouts} rollouts, {told.steps} steps, {told.failed} failed, {shown}\n\n{gate.table(checks)}\n"
        + gate.advice(checks),
    )
    if told.first_failure is not None:
        rest = (
            "The others are saved"
            if told.failed < told.rollouts
            else "There are no others, nothing is saved but these errors"
        )
        raise Incomplete(
            f"{told.failed} of {told.rollouts} rollouts failed, the first with {told.first_failure}. "
            f"{rest}; retry these with --resume."
        )


STAGE = Stage(
    name="collect",
    version=2,
    config=Config,
    outputs={"tasks": TASK, "rollouts": ROLLOUT, "steps": STEP},
    plan=plan,
    run=run,
    work=work,
    limit_setting="tasks",
    shows_progress=True,
)
