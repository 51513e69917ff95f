"""What environments declare and evaluations read: sampling units, impossible twins, and the ground of a pass.

It is apart from the environments, so that recorded rollouts are compared without importing what played them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

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
TERMINAL_BENCH = "terminal-bench"
"""The environment name that importers write for benchmarks of SWE-bench's family."""
REPOSITORY = SamplingUnit("repository", fixed=True)
FAMILY = SamplingUnit()
Declaration = SamplingUnit | Callable[[], SamplingUnit]
SAMPLING_UNITS = Registry[Declaration](
    "composer.environments",
    {
        **dict.fromkeys(("feature-deletion", "gsm8k", "harbor", "leetcode-rh"), FAMILY),
        **dict.fromkeys(("reasoning-gym", "skills", "tasks"), FAMILY),
        **dict.fromkeys((SWE_BENCH, "swe-lite", "swe-mini"), REPOSITORY),
        "code": SamplingUnit("problem"),
        "kata": SamplingUnit("operation", lambda family: family.partition("/")[0]),
    },
    lambda point: getattr(point.load(), "sampling_unit", FAMILY),
)
"""The sampling unit of each environment's tasks; `composer_stages.envs.register` adds how to find that of a new one."""


def sampling_unit_of(env: str) -> SamplingUnit:
    """Return the sampling unit of an environment's tasks; of an environment that is not known, families."""
    declared = SAMPLING_UNITS.get(env, FAMILY)
    return declared if isinstance(declared, SamplingUnit) else declared()
