"""What environments declare and evaluations read: their table, sampling units, impossible twins, the ground of a pass.

It is apart from the environments, so that recorded rollouts are compared without importing what played them.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Literal

from composer_stages.errors import UsageError
from composer_stages.registry import Registry

Ground = Literal["values", "report"]
"""What a pass follows from. `values`: from values that left the sandbox of the agent's code and were compared outside
of it; no process there was given what is expected (docs/rewards.md). `report`: from what a process that ran the agent's
code reported, which it can forge, or from results that the task shows."""
PASS_GROUNDS = {"values": "by values", "report": "by report", "": "on an unknown ground"}


def grounds_in_words(passes: Mapping[str, int]) -> str:
    """Return the share of passes on each ground: "passes: 80.0 % by values, 20.0 % by report".

    `passes`: numbers by ground, "" for an unknown one; an empty text where none is known.
    """
    if not passes.keys() - {""}:
        return ""
    total = sum(passes.values())
    shares = (
        f"{100 * passes[ground] / total:.1f} % {words}" for ground, words in PASS_GROUNDS.items() if passes.get(ground)
    )
    return f"passes: {', '.join(shares)}"


TWIN = "~twin"
"""The suffix of the id of an impossible variant: its tests contradict its description, so any pass of it is a hack."""


@dataclass(frozen=True)
class SamplingUnit:
    """The unit in which tasks are sampled independently; a comparison generalises to further units.

    noun: singular. of_family: the unit of a task's family; tasks of one unit succeed and fail together. fixed: the
    units are all there are, as a benchmark's repositories are; otherwise they are a sample of possible ones.
    """

    noun: str = "family"
    of_family: Callable[[str], str] = str
    fixed: bool = False

    def of(self, task_id: str, family: str | None) -> str:
        """Return the unit of a task: the task itself where it has no family."""
        return self.of_family(family) if family else task_id


SWE_BENCH = "swe-bench"
"""The environment name that importers write for benchmarks of SWE-bench's family."""
TERMINAL_BENCH = "terminal-bench"
BENCHMARK_NAMES = {SWE_BENCH: re.compile(r"swe-?bench"), TERMINAL_BENCH: re.compile(r"terminal-?bench")}
"""How the names of a benchmark's data sets begin: `terminal-bench@2.0`, `swebench-verified`."""
REPOSITORY = SamplingUnit("repository", fixed=True)


@dataclass(frozen=True)
class Registered:
    """The parts of a registered environment as import strings: nothing is imported before it is used.

    environment: "module:Class" of an `Environment`. models: a module with `recipe_fingerprint(name)` and `ensure(name,
    progress)`, which makes `--policy ENVIRONMENT:name` a model (`composer_stages.policy.base`). hack_pairs:
    "module:function" of (count, seed), which returns hack/clean pairs for the gradient probe. hint, system:
    "module:attribute" of the sentence that gives the loophole away in a prompt, and of the system message; the class of
    an installed package may have `hack_pairs`, `hint` and `system` as attributes instead. argument:
    the option that a word behind the name sets: `reasoning-gym:letter_counting`. makes_tasks: whether tasks are made or
    fetched as they are drawn, so that no more are drawn than are played. unit: in which its tasks are sampled, without
    one families, or what the class of an installed package declares as `sampling_unit`.
    """

    environment: str
    models: str | None = None
    hack_pairs: str | None = None
    hint: str | None = None
    system: str | None = None
    argument: str | None = None
    makes_tasks: bool = False
    unit: SamplingUnit | None = None


ENVIRONMENTS = Registry[Registered](
    "composer.environments",
    {
        "code": Registered("composer_stages.envs.code.env:CodeEnv", unit=SamplingUnit("problem")),
        "gsm8k": Registered("composer_stages.envs.gsm8k.env:Gsm8kEnv"),
        "leetcode-rh": Registered("composer_stages.envs.leetcode_rh.env:LeetcodeRhEnv"),
        "kata": Registered(
            "composer_stages.envs.kata.env:KataEnv",
            models="composer_stages.envs.kata.checkpoints",
            hack_pairs="composer_stages.envs.kata.transcripts:hack_clean_pairs",
            hint="composer_stages.envs.kata.transcripts:HINT",
            system="composer_stages.envs.kata.tasks:SYSTEM",
            unit=SamplingUnit("operation", lambda family: family.partition("/")[0]),
        ),
        "harbor": Registered("composer_stages.envs.harbor.env:HarborEnv"),
        "feature-deletion": Registered(
            "composer_stages.envs.feature_deletion.env:FeatureDeletionEnv", makes_tasks=True
        ),
        "reasoning-gym": Registered("composer_stages.envs.skills.reasoning_gym:ReasoningGymEnv", argument="task"),
        "skills": Registered(
            "composer_stages.envs.skills.env:SkillsEnv",
            hack_pairs="composer_stages.envs.skills.env:hack_clean_pairs",
            hint="composer_stages.envs.skills.env:HINT",
            system="composer_stages.envs.skills.drawing:SYSTEM",
        ),
        "tasks": Registered("composer_stages.envs.tasks.env:TasksEnv"),
        "swe-lite": Registered("composer_stages.envs.swe.env:SweEnv", unit=REPOSITORY),
        "swe-mini": Registered("composer_stages.envs.swe.mini:SweMiniEnv", makes_tasks=True, unit=REPOSITORY),
    },
    lambda point: Registered(point.value),
)
"""The one table of environments. An entry point of `composer.environments` is a class; `register` adds one by hand."""


def benchmark_of(env: str) -> str:
    """Return the benchmark that a data set is of, as its own programs name it; another name as it is.

    Of `terminal-bench/terminal-bench-2`, the name of a package, the last part counts.
    """
    name = env.rpartition("/")[2].casefold().replace("_", "-")
    return next((benchmark for benchmark, form in BENCHMARK_NAMES.items() if form.match(name)), env)


def sampling_unit_of(env: str) -> SamplingUnit:
    """Return the sampling unit of an environment's tasks; of an environment that is not known, families."""
    entry = ENVIRONMENTS.get(env)
    if entry is None:
        return REPOSITORY if benchmark_of(env) == SWE_BENCH else SamplingUnit()
    if entry.unit or ENVIRONMENTS.ships(env):
        return entry.unit or SamplingUnit()
    module, _, word = entry.environment.partition(":")
    try:
        return declared_unit(env, getattr(import_module(module), word))
    except ImportError as error:
        raise UsageError("envs.import-failed", name=env, kind="", error=error) from error


def declared_unit(name: str, environment: Callable[..., object]) -> SamplingUnit:
    """Return the sampling unit that the class of an environment declares; families, as a sample, by default."""
    unit = getattr(environment, "sampling_unit", SamplingUnit())
    if not isinstance(unit, SamplingUnit):
        raise UsageError("envs.not-a-sampling-unit", name=name, unit=unit)
    return unit


ROUNDING = 1e-6
"""By which the sum of a reward's shares may differ from 1."""


def whole_reward(reward: float) -> float:
    """Return 1 for the sum of shares that add up to 1 (0.7 + 0.2 + 0.1 is less), and any other reward as it is."""
    return 1.0 if abs(reward - 1) <= ROUNDING else reward
