"""List every setting in which the arms of an evaluation differ.

A difference between two arms is that of everything that differs between them. The settings of a run are those of its
manifest that affect results, with what training chose where they leave it open (a learning rate, an adapter's rank),
the sets of pairs that were read, and the versions of the program. An arm's value is what all of its trainings share, or
each of their values.

Differences in `weights.*` are those of the channels, which is what arms are for. Settings of a channel that an arm does
not use (`pairs.beta` of an arm without pairs) are no setting of that arm.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from composer_stages.runs.run import Run
from composer_stages.runs.settings import dotted
from composer_stages.training.channels import CHANNELS

CHOSEN = {
    "learning_rate": "optimisation.learning_rate",
    "adapter_rank": "adapter.rank",
    "micro_batch": "optimisation.micro_batch",
    "gradient_checkpointing": "optimisation.gradient_checkpointing",
    "shared_prompts": "optimisation.shared_prompts",
}
"""Settings that training chooses where they are left open, by their name among the facts of a run's model."""
OWN = frozenset({"arm", "seed"})
"""What names a training, and what is averaged over."""
PAIR_SETS, VERSIONS = "pair sets", "program"
UNSET = "unset"
MIXED = "probe.mixed"
"""The one setting of the probe that a training without a direction uses."""

Settings = dict[str, str]


@dataclass(frozen=True)
class ArmDifference:
    """One setting that two or more arms do not share: its value in each arm, `unset` where an arm has none.

    channel: whether it is a channel's weight.
    """

    setting: str
    values: Mapping[str, str]
    channel: bool = False

    def between(self, arms: Iterable[str]) -> bool:
        """Return whether these arms differ in it."""
        return len({self.values[arm] for arm in arms if arm in self.values}) > 1

    def __str__(self) -> str:
        return f"{self.setting}: " + ", ".join(f"{arm} {value}" for arm, value in self.values.items())


def trained_differences(trained: Sequence[tuple[str, int, Run]]) -> tuple[ArmDifference, ...]:
    """Return the settings in which trained arms differ; trained: arm, seed and run of each training."""
    arms: dict[str, dict[int, Settings]] = {}
    for arm, seed, run in trained:
        arms.setdefault(arm, {})[seed] = training_settings(run)
    return settings_differences(arms)


def policy_differences(policies: Mapping[str, BaseModel]) -> tuple[ArmDifference, ...]:
    """Return the settings in which arms given as `policies.NAME` differ, other than the model and its address."""
    arms = {}
    for name, policy in policies.items():
        settings = flat(policy.model_dump(mode="json"))
        arms[name] = {0: {key: value for key, value in settings.items() if key not in ("model", "base_url")}}
    return settings_differences(arms)


def settings_differences(arms: Mapping[str, Mapping[int, Settings]]) -> tuple[ArmDifference, ...]:
    """Return every setting that is not the same in all arms; arms: the settings of each training, by seed."""
    names = sorted({key for trainings in arms.values() for settings in trainings.values() for key in settings})
    differing = []
    for name in names:
        using = {arm: trainings for arm, trainings in arms.items() if uses(trainings, name)}
        # A seed's set of pairs is compared with that of the same seed: several sets are one level of the experiment.
        by_seed = name == PAIR_SETS
        values = {arm: {seed if by_seed else 0: set[str]() for seed in trainings} for arm, trainings in using.items()}
        for arm, trainings in using.items():
            for seed, settings in trainings.items():
                values[arm][seed if by_seed else 0].add(settings.get(name, UNSET))
        if len({str(sorted((k, sorted(v)) for k, v in each.items())) for each in values.values()}) > 1:
            joined = {arm: " and ".join(sorted(set().union(*each.values()))) for arm, each in values.items()}
            differing.append(ArmDifference(name, joined, channel=name.startswith("weights.")))
    return tuple(sorted(differing, key=lambda difference: (not difference.channel, difference.setting)))


def uses(trainings: Mapping[int, Settings], name: str) -> bool:
    """Return whether an arm has a setting: those of a channel only where the channel has a weight."""
    group = "pairs" if name == PAIR_SETS else name.partition(".")[0]
    readers = [channel for channel, spec in CHANNELS.items() if group == channel or group in spec.needs]
    weights = next(iter(trainings.values()))
    return not readers or any(weights.get(f"weights.{channel}", "0") not in ("0", UNSET) for channel in readers)


def training_settings(run: Run) -> Settings:
    """Return the settings of one training, as text by dotted name."""
    manifest = run.manifest
    settings = {key: value for key, value in flat(manifest.identity).items() if key not in OWN}
    if "direction" not in manifest.inputs:  # nothing was projected out of this training, whatever the setting
        settings = {key: value for key, value in settings.items() if not key.startswith("probe.") or key == MIXED}
    settings.setdefault("weights.grpo", "1")  # absent from the identity where it is 1
    chosen = manifest.models.get("policy", {}).get("training", {})
    settings |= {name: text_of(chosen[key]) for key, name in CHOSEN.items() if key in chosen}
    if "processes" in chosen:
        settings["processes"] = text_of(chosen["processes"])
    for slot, refs in manifest.inputs.items():
        settings[PAIR_SETS if slot == "pairs" else slot] = " and ".join(ref.content[:12] for ref in refs)
    settings[f"{VERSIONS}.composer"] = manifest.composer
    settings[f"{VERSIONS}.commit"] = text_of((manifest.code.get("commit") or UNSET)[:12])
    settings |= {f"{VERSIONS}.{name}": version for name, version in manifest.packages.items()}
    return settings


def flat(settings: Mapping[str, Any]) -> Settings:
    """Return nested settings by their dotted names, values as text."""
    return {name: text_of(value) for name, value in dotted(settings).items()}


def text_of(value: Any) -> str:
    """Return a setting's value as it is printed: 0.0006 as 6e-04, null as unset."""
    if value is None:
        return UNSET
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    return str(value)
