"""collect: play a policy in an environment and keep every step.

Answers: are the rollouts clean? Reads an environment and a policy, of the settings or of a training; writes
`steps/*.jsonl.gz` (full transcripts), `tasks`, `rollouts` and `steps` as Parquet, and the collection checks. The unit
is one rollout. Rollouts of a policy on a server advance independently of each other; those of a local model, whose
arithmetic depends on the batch, in batches. Teachers may play a share of the turns (`rollouts.mixed`).
"""

from collections import Counter
from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import Field, model_validator

from composer_stages.envs.base import Task
from composer_stages.errors import Incomplete
from composer_stages.layout import counted
from composer_stages.policy import available, kind_of, scripted
from composer_stages.policy.base import BasicPolicy, PolicyConfig
from composer_stages.policy.served import answered_by, policy_notes
from composer_stages.policy.serving import Serving
from composer_stages.rollouts import collection_checks, recording
from composer_stages.rollouts.agent_loop import LiveRollout, play_missing
from composer_stages.rollouts.collection_checks import Account
from composer_stages.rollouts.config import PlayingConfig
from composer_stages.rollouts.trace import played_by
from composer_stages.runs import reporting, store
from composer_stages.runs.kinds import CHECKPOINT, ROLLOUT, STEP, TASK, Row
from composer_stages.runs.run import Inputs, RunWriter, Slot
from composer_stages.runs.settings import BASIC
from composer_stages.runs.stage import Plan, Stage
from composer_stages.teachers.config import TeacherConfig, Teachers, check_names
from composer_stages.teachers.mixing import Mixing, mixed
from composer_stages.terms import grounds_in_words
from composer_stages.words import Sentence


class Config(PlayingConfig):
    """Settings of what to collect."""

    policy: BasicPolicy = PolicyConfig()
    tasks: Annotated[int, BASIC] = Field(default=25, gt=0, le=100_000)
    """Number of tasks of the split."""
    samples: Annotated[int, BASIC] = Field(default=4, gt=0, le=10_000)
    """Rollouts of every task."""
    rollouts: Mixing = Mixing()
    teachers: Teachers = Field(default=[])
    """The teachers that play turns, as `replay-teachers` takes them; each turn of theirs is one teacher's, drawn."""

    @model_validator(mode="after")
    def _check_teachers(self) -> "Config":
        check_names(self.teachers)
        self.rollouts.require_players(self.policy, self.teachers)
        return self

    def identity(self) -> dict[str, Any]:
        """Return the settings; without those of teachers where none plays, so that earlier runs stay what they are."""
        settings = super().identity()
        return settings if self.players() else {k: v for k, v in settings.items() if k not in ("rollouts", "teachers")}

    def players(self) -> list[TeacherConfig]:
        """Return the teachers that play turns."""
        return self.teachers if self.rollouts.mixed else []


def _with_student(inputs: Inputs, config: Config) -> Config:
    """Return the settings with the model of the training whose rollouts are collected, where one is given."""
    if (student := inputs.optional("student")) is None:
        return config
    return config.model_copy(update={"policy": config.policy.with_model(student.folder(CHECKPOINT))})


def plan(inputs: Inputs, config: Config) -> Plan:
    """Return the number of rollouts to play, and their largest cost."""
    config = _with_student(inputs, config)
    reporting.check(config.report_to)
    scripted.check(config.policy, config.env.name)
    rollouts = config.tasks * config.samples
    steps = config.most_steps()
    turns = rollouts * steps
    players = [(player, available.longest_answer(player)) for player in (config.policy, *config.players())]
    at_once = () if kind_of(config.policy) in ("local", "scripted") else config.in_flight.notes()
    return Plan(
        units=rollouts,
        what="rollouts",
        max_completion_tokens=turns * max(longest for _, longest in players),
        max_cost_usd=turns * max(player.cost(0, longest) for player, longest in players),
        notes=(
            *config.limits.notes(steps),
            *(note for player, _ in players for note in available.notes(player)),
            f"history {config.history}",
            *at_once,
            *([Sentence("teachers.mixed-is-zero")] if config.teachers and not config.players() else []),
        ),
        up_to=config.counts_by_default(),
    )


def run(inputs: Inputs, config: Config, out: RunWriter) -> None:
    """Play the missing rollouts, then write the tables and the report with the collection checks."""
    from composer_stages.evaluation import task_rates

    config = _with_student(inputs, config)
    reporting.check(config.report_to)
    with reporting.log_units(config.report_to, out, config.label()):
        tasks, rollouts = _play(config, out)
    # Tables are in the order of the plan, whatever the order of completion.
    names = [rollout.rollout_id for rollout in rollouts]
    counted_checks, account, endings = collection_checks.CollectionChecks(), Account(), Counter[str | None]()

    def rows() -> Iterator[Row]:
        for unit in out.journal.read(names):
            account.add(unit["rollout"], len(unit["steps"]))
            counted_checks.add(unit["rollout"], unit["steps"])
            endings.update(map(played_by, unit["steps"]))
            yield unit["rollout"]

    out.table(TASK, map(task_row, tasks))
    out.table(ROLLOUT, rows())
    # A second pass over the journal, because the steps of all rollouts may not fit into memory.
    out.table(STEP, (step for unit in out.journal.read(names) for step in unit["steps"]))
    checks, num, failed = counted_checks.checks(len(rollouts)), account.rollouts, account.failed
    mean = account.rewards.value
    hidden_pass, visible_pass = account.hidden_pass.value, account.visible_pass.value
    out.count(planned=num, done=num - failed, failed=failed, steps=account.steps)
    out.manifest.tokens.update(prompt=account.prompt_tokens, completion=account.completion_tokens)
    checked = collection_checks.summary(checks)
    out.set_summary(
        ok=not checked["failed_checks"],
        mean_reward=mean,
        hidden_pass_rate=hidden_pass,
        visible_pass_rate=visible_pass,
        passes=dict(account.passes),
        **checked,
    )
    if config.players():
        turns = {teacher.name: endings[teacher.name] for teacher in config.players()}
        out.set_summary(turns_of_teachers=turns)
    outcome = "nothing scored" if mean is None else f"mean reward {mean:.3f}"
    if hidden_pass is not None and visible_pass is not None:
        outcome += f", hidden tests pass {100 * hidden_pass:.1f} %, visible tests pass {100 * visible_pass:.1f} %"
    if grounds := grounds_in_words(account.passes):
        outcome += f"; {grounds}"
    if account.out_of_steps:
        outcome += f"; {account.out_of_steps} of {num} ended by max_steps={config.max_steps}"
    if config.players():
        outcome += f"; of the turns teachers played {', '.join(f'{name} {turns[name]}' for name in turns)}"
    counts = (counted(num, "rollout"), counted(account.steps, "step"), counted(failed, "error"))
    head = ", ".join([*counts, outcome])
    scored = [
        task_rates.TaskCount(task.task_id, task.family, *account.by_task.get(task.task_id, (0, 0))) for task in tasks
    ]
    table, advice = collection_checks.table(checks), collection_checks.advice(checked["failed_checks"])
    notes = [
        *answered_by(counted_checks.served, config.policy.model),
        *policy_notes(
            out.manifest.models["policy"] | ({"cut_prompts": cut} if (cut := counted_checks.cut_prompts) else {})
        ),
    ]
    rates = [f"{rates}\n"] if (rates := task_rates.table(scored)) else []
    out.write_file("report.txt", "\n".join([f"{head}\n", *rates, table, *notes, advice]))
    if account.first_failure is not None:
        raise Incomplete("rollouts-failed", failed=failed, number=num, error=account.first_failure)


def work(inputs: Inputs, config: Config, out: RunWriter) -> None:
    """Play the missing rollouts."""
    _play(_with_student(inputs, config), out)


def _play(config: Config, out: RunWriter) -> tuple[list[Task], list[LiveRollout]]:
    """Play the missing rollouts; return all tasks and all rollouts, in the order of the plan."""
    make = config.opener()
    tasks = config.draw(make, config.tasks, out)
    rollouts = [LiveRollout(task, index, config.seed) for task in tasks for index in range(config.samples)]
    config.tell_of_fewer(tasks, len(rollouts), out)
    sandbox = make().sandbox
    with Serving(out, [config.policy, *config.players()], rollout_usd=config.limits.cost_usd) as serving:
        student = serving.open(config.policy)
        teachers = {teacher.name: (teacher, serving.open(teacher)) for teacher in config.players()}
        by_name = {**{name: teacher for name, (_, teacher) in teachers.items()}, "policy": student}
        for name, player in by_name.items():
            out.model(name, **player.facts())
        with mixed(config.rollouts, config, student, teachers) as policy:
            play_missing(
                make,
                policy,
                rollouts,
                key=lambda rollout: rollout.rollout_id,
                payload=lambda rollout: recording.payload(rollout, policy, sandbox=sandbox),
                config=config,
                out=out,
                noun="rollouts",
            )
        for name, player in by_name.items():
            out.model(name, **player.facts())  # what was found while asking
    return tasks, rollouts


def task_row(task: Task) -> Row:
    """Return one `task/1` row."""
    return {
        "task_id": task.task_id,
        "env": task.env,
        "split": task.split,
        "family": task.family,
        "prompt": task.prompt,
        "data_json": store.encode(dict(task.data)).decode(),
    }


STAGE = Stage(
    name="collect",
    version=8,
    example="""\
>>> rollouts = composer.collect(policy="reference", tasks=2, samples=1, quiet=True)
>>> rollouts.manifest.summary["mean_reward"]
1.0""",
    config=Config,
    inputs={"student": Slot(CHECKPOINT, optional=True)},
    outputs={"tasks": TASK, "rollouts": ROLLOUT, "steps": STEP},
    plan=plan,
    run=run,
    work=work,
    limit_setting="tasks",
    shows_progress=True,
)
