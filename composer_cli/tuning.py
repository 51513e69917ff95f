"""Tune one setting of every arm of a preset with equally many trials (`composer run --tune KEY=V1,V2,...`).

Arms that share a learning rate are not compared fairly when it suits one of them better, and arms whose rates were
chosen by hand were tuned unequally. So every arm is trained once with each value, the trials are evaluated on tuning
tasks, and each arm keeps the value with which most of these pass. Tuning tasks
are training tasks under a seed of their own: no evaluation of the preset uses them, and the trials are not trained on
them.

The trials are entries of a preset like all others, so they are resumed, found up to date, and shown by
`composer status`. What was chosen, and from what, is written to `tuning/` in the folder of artifacts.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from operator import itemgetter
from typing import Any, TypeVar

from composer_cli import chain
from composer_cli.call import Arguments
from composer_cli.console import Console
from composer_cli.preset import Preset, PresetEntry
from composer_stages.errors import InfrastructureError, UsageError
from composer_stages.evaluation.outcomes import PASSED, items_table, select_arm, task_mean, without_twins
from composer_stages.runs import settings, store
from composer_stages.runs.display import percent
from composer_stages.runs.kinds import EVAL_ITEM, Row
from composer_stages.runs.run import Run
from composer_stages.runs.settings import StageConfig

Config = TypeVar("Config", bound=StageConfig)
TRIAL_SEED, TASK_SEED = 1_000_003, 2_000_003
"""Seeds of the trials and of the tuning tasks, which no preset counts up to."""
EVALUATION = "tuning"
"""The title of the evaluation of all trials."""


@dataclass(frozen=True)
class Trial:
    """One training of an arm with one value; `name` is its arm in the evaluation of the trials."""

    arm: str
    value: Any
    name: str


@dataclass(frozen=True)
class TunedSetting:
    """What was tried, the share of tuning tasks that each trial passes, and what each arm keeps."""

    setting: str
    tasks: int
    rates: Mapping[str, Mapping[str, float | None]]
    """By arm, then by value as text; None where no rollout has an outcome."""
    chosen: Mapping[str, Any]
    evaluation: str
    """The run of the trials' evaluation."""

    def __str__(self) -> str:
        lines = [f"{self.setting}, one training a value, {PASSED.rate} on {self.tasks} tuning tasks:"]
        for arm, rates in self.rates.items():
            tried = ", ".join(f"{value} {percent(rate)}" for value, rate in rates.items())
            lines.append(f"  {arm}: {tried}; keeps {self.chosen[arm]}")
        return "\n".join(lines)


def tune(
    preset: Preset, configs: Mapping[str, StageConfig], text: str, arguments: Arguments, console: Console
) -> tuple[dict[str, StageConfig], TunedSetting]:
    """Run the trials and return the configurations with every arm's choice; `text` is `KEY=V1,V2,...`.

    Raises `UsageError` for a preset without arms or evaluation, for fewer than two values, and where a tuning task is
    one of an evaluation.
    """
    key, values = parse(text)
    trials, entries, of_trials = trial_entries(preset, configs, key, values)
    results = chain.run(entries, of_trials, arguments, console)
    run = Run(results[EVALUATION].path)
    choice = choose(key, trials, run.rows(EVAL_ITEM), run.path.name)
    store.write_json(arguments.artifacts / "tuning" / f"{run.path.name}.json", asdict(choice))
    for line in str(choice).splitlines():
        console.notify(line)
    trainings: dict[str, Any] = {entry.title: configs[entry.title] for entry in preset.stage if entry.stage == "train"}
    tuned = {title: with_value(config, key, choice.chosen[config.arm]) for title, config in trainings.items()}
    return {**configs, **tuned}, choice


def choose(key: str, trials: Sequence[Trial], items: Iterable[Row], evaluation: str) -> TunedSetting:
    """Return what each arm keeps: the value whose trial has the best pass rate.

    items: rows of kind `eval_item`. Of equal rates the first value given is kept. A trial without any outcome has no
    rate and is not kept; `InfrastructureError` for an arm without any rate.
    """
    possible = without_twins(items_table(items))
    rates: dict[str, dict[str, float | None]] = {}
    chosen: dict[str, Any] = {}
    for arm in dict.fromkeys(trial.arm for trial in trials):
        tried = [(trial.value, task_mean(select_arm(possible, trial.name))) for trial in trials if trial.arm == arm]
        measured = [(rate, value) for value, rate in tried if rate is not None]
        if not measured:
            raise InfrastructureError("cli.no-trial-outcome", arm=arm, evaluation=evaluation, key=key)
        rates[arm] = {str(value): rate for value, rate in tried}
        _, chosen[arm] = max(measured, key=itemgetter(0))
    return TunedSetting(key, len(set(possible["task_id"].to_pylist())), rates, chosen, evaluation)


def parse(argument: str) -> tuple[str, list[Any]]:
    """Return the setting and its values of `KEY=V1,V2,...`, each read as TOML."""
    key, equals, text = argument.partition("=")
    tree = settings.assignment(f"{key}=[{text}]") if equals and key.strip() else {}
    values: Any = tree
    for part in key.strip().split("."):
        values = values.get(part) if isinstance(values, dict) else None
    if not isinstance(values, list) or len(values) < 2 or len(set(map(str, values))) < len(values):
        raise UsageError("cli.tune-not-understood", argument=argument)
    return key.strip(), values


def trial_entries(
    preset: Preset, configs: Mapping[str, StageConfig], key: str, values: Sequence[Any]
) -> tuple[list[Trial], Preset, dict[str, StageConfig]]:
    """Return the trials, the preset that runs them after what they read, and its configurations."""
    arms: dict[str, PresetEntry] = {}
    for entry in (entry for entry in preset.stage if entry.stage == "train"):
        training: Any = configs[entry.title]
        arms.setdefault(training.arm, entry)  # the arm's first training stands for all of them
    evaluations = [configs[entry.title] for entry in preset.stage if entry.stage == "evaluate"]
    if not arms or not evaluations:
        raise UsageError("cli.tune-without-arms")
    needed = {name for entry in arms.values() for name in entry.reads}
    for entry in reversed(preset.stage):
        needed |= set(entry.reads) if entry.title in needed else set()
    before = [entry for entry in preset.stage if entry.title in needed]
    trials, trial_of, added = list[Trial](), dict[str, StageConfig](), list[PresetEntry]()
    for arm, entry in arms.items():
        for number, value in enumerate(values, start=1):
            trial = Trial(arm, value, f"{arm}.{number}")
            title = f"{EVALUATION}-{trial.name}"
            trial_config = with_value(configs[entry.title], key, value)
            trial_of[title] = trial_config.model_copy(update={"arm": trial.name, "seed": TRIAL_SEED})
            trials.append(trial)
            added.append(entry.model_copy(update={"name": title, "parallel": EVALUATION}))
    question: dict[str, Any] = {
        "baseline": trials[0].name,
        "treatment": trials[1].name,
        "control": None,
        "with_start": False,
    }
    question |= {"looks": 1, "seed": TASK_SEED}
    model: Any = evaluations[-1]
    evaluation = model.model_copy(update={**question, "env": model.env.model_copy(update={"split": "train"})})
    drawn = {task.task_id for task in evaluation.draw(evaluation.opener(), evaluation.tasks)}
    for config in evaluations:
        held_out: Any = config
        if shared := drawn & {task.task_id for task in held_out.draw(held_out.opener(), held_out.tasks)}:
            raise UsageError("cli.tuning-tasks-in-evaluation", tasks=len(shared), example=min(shared))
    reads = [entry.title for entry in added]
    # Workers for the evaluation alone, as in the preset; the trials run next to each other.
    of_preset = next(entry for entry in reversed(preset.stage) if entry.stage == "evaluate")
    last = of_preset.model_copy(update={"name": EVALUATION, "reads": reads, "parallel": ""})
    all_configs = {entry.title: configs[entry.title] for entry in before} | trial_of | {EVALUATION: evaluation}
    return trials, preset.model_copy(update={"stage": [*before, *added, last], "next": ""}), all_configs


def with_value(config: Config, key: str, value: Any) -> Config:
    """Return a configuration with one setting changed; raises `UsageError` for a setting that it cannot take."""
    return settings.build("train", type(config), [config.model_dump(exclude_unset=True), settings.nested(key, value)])
