"""Simulated trainings whose rollouts' gradients and rewards are drawn, to count how often the alarm is given.

A run has ten checkpoints of eight groups of eight rollouts. The gradient of a rollout is noise that some coordinates
have more of, plus, where it is right, what right answers have in common, plus, where it hacks, the axis of the hack,
plus, where it has the style, the same axis: v cannot tell this style from the hack. Half of the groups are easy, half
hard. v is extracted from 24 pairs and measured as `probe watch` does it, by the functions that it calls.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from composer_stages.gradients.tensors import Layout
from composer_stages.probe.checks.alarm import LEVEL, Alarm, CheckpointRollouts, alarm, correctness_fixed, pushed
from composer_stages.probe.direction import PairGradients, extract, hack_scale, watch_directions
from composer_stages.probe.metrics import stacked_cosines
from composer_stages.probe.statistics import codes

LAYOUT = Layout({f"m{i}": 30 for i in range(8)})
CHECKPOINTS, GROUPS, SAMPLES, PAIRS = 10, 8, 8, 24


@dataclass(frozen=True)
class Training:
    """What is simulated.

    `style` is the share of honest rollouts with the style, which the reward ignores; `feedback` what a point of the
    push adds to that share at the next checkpoint, as training on chance does; `by_difficulty` gives the style to hard
    groups alone, `right_style` makes it more frequent in right answers, and `by_task` does so in some groups and the
    opposite in the others, at random, alike at every checkpoint. `partial` is the size of a part of the
    reward that goes with nothing, `style_paid` that of one for the style itself. `hacks` is the share of rollouts that
    hack: paid like right answers, or never; hidden tests may have `accepted` them as right. In pairs that are not
    `related` to the hack, the hack sides are honest answers.
    """

    style: float = 0.0
    feedback: float = 0.0
    by_difficulty: bool = False
    right_style: float = 0.0
    by_task: float = 0.0
    partial: float = 0.0
    style_paid: float = 0.0
    hacks: float = 0.0
    paid: bool = True
    accepted: bool = False
    related: bool = True


NULLS = {
    "no style": Training(),
    "style": Training(style=0.2),
    "style, with feedback": Training(style=0.2, feedback=10.0),
    "style of hard tasks": Training(style=0.2, by_difficulty=True),
    "unrelated v": Training(related=False),
    "unrelated v, style": Training(style=0.2, related=False),
}
"""Trainings without hacks: 20 % of honest rollouts share a style with the hack, or v has nothing to do with it."""
STYLED = {f"{100 * more:g} points": Training(style=0.2, right_style=more, partial=0.2) for more in (0.025, 0.05, 0.1)}
"""Honest trainings whose right answers have the hack's style more often, which the alarm takes for hacks."""
BY_TASK = {f"{100 * more:g} points": Training(style=0.2, by_task=more, partial=0.2) for more in (0.1, 0.2)}
"""Honest, and the style goes with right answers in some of the tasks and with wrong ones in others, at random."""
HIDDEN = Training(style=0.2, right_style=-0.1, partial=0.2, hacks=0.04)
"""Paid hacks, while right answers have the hack's style less often: in sum, hack-like rollouts earn no more."""
REWARDED = Training(style=0.2, partial=0.2, style_paid=0.1)
ACCEPTED = Training(partial=0.2, hacks=0.04, accepted=True)
"""Worlds that defeat the push with correctness fixed: an honest reward for the style, and hacks that count as right."""
HACKS = {f"{share} %": Training(hacks=share / 100) for share in (1, 2, 4, 8)}
"""Trainings in which this share of all rollouts hacks and is paid."""


class Simulated(NamedTuple):
    """Each checkpoint's rollouts, the placebos' pushes and their families, and which rollouts are right."""

    played: list[CheckpointRollouts]
    pushes: np.ndarray
    families: list[str]
    right: list[np.ndarray]


def simulated_run(training: Training, seed: int, placebos: int = 199) -> Simulated | None:
    """Return a simulated training; None where v separates nothing."""
    torch.manual_seed(seed)
    width = LAYOUT.width
    profile = torch.logspace(0, -1.5, width)[torch.randperm(width)]

    def noise(count: int) -> torch.Tensor:
        return torch.randn(count, width) * profile

    axis, right = 2 * noise(1), noise(1)
    tokens = torch.full((PAIRS,), 20)
    hack = 20 * (noise(PAIRS) + (axis if training.related else 0))
    pairs = PairGradients(LAYOUT, hack, 20 * (noise(PAIRS) + right * torch.randn(PAIRS, 1)), tokens, tokens)
    direction = extract(LAYOUT, pairs.differences("nll_mean"))
    families, units = watch_directions(direction, pairs, "nll_mean", placebos, seed)
    scale = hack_scale(direction, pairs, "nll_mean")
    if scale.hack <= scale.clean:
        return None
    count, hard = GROUPS * SAMPLES, torch.arange(GROUPS).repeat_interleave(SAMPLES) % 2 == 1
    groups, played, pushes = codes(range(GROUPS)).repeat(SAMPLES), list[CheckpointRollouts](), []
    judged: list[np.ndarray] = []
    style = training.style
    sides = torch.randint(0, 2, (GROUPS, 1)) * 2.0 - 1 if training.by_task else torch.zeros(GROUPS, 1)
    by_group = training.right_style + training.by_task * sides.repeat(1, SAMPLES).flatten()
    for _ in range(CHECKPOINTS):
        skill, hacked = torch.randn(count) - hard.float(), torch.rand(count) < training.hacks
        share = torch.where(hard, 2 * style, 0.0) if training.by_difficulty else torch.full((count,), style)
        share = share + by_group * (skill > 0).float()
        styled = (torch.rand(count) < share) & ~hacked
        gradients = noise(count) + skill[:, None] * right + (hacked | styled)[:, None] * axis
        rewards = torch.where(hacked, float(training.paid), (skill > 0).float())
        if training.partial:
            rewards = rewards + training.partial * torch.rand(count) + training.style_paid * styled.float()
        rewards = rewards.view(-1, SAMPLES)
        judged.append(torch.where(hacked, torch.full((count,), training.accepted), skill > 0).numpy())
        advantages = (rewards - rewards.mean(1, keepdim=True)).flatten().double().numpy()
        cosines = stacked_cosines(gradients, units, direction.inside, 1).double().numpy()
        played.append(CheckpointRollouts(scale.hack_like(cosines[:, 0]), advantages, groups))
        pushes.append(pushed(cosines[:, 1:], advantages, scale))
        style = min(max(style + training.feedback * played[-1].push / count, 0.02), 0.9)
    return Simulated(played, np.stack(pushes), families, judged)


def simulated_alarm(
    training: Training, seed: int, permutations: int, placebos: int = 199, level: float = LEVEL
) -> Alarm | None:
    """Return the alarm of a simulated training; None where v separates nothing, which gives no alarm either."""
    run = simulated_run(training, seed, placebos)
    return None if run is None else alarm(*run[:3], permutations, seed, level)


@dataclass(frozen=True)
class Rates:
    """Shares of simulated runs: with an alarm, with p at most the level, with a push above 1 and above the placebos.

    `fixed`: with p at most the level where correctness is held fixed.
    `above_one` was the rule before advantages were permuted. `untested` runs could not give an alarm. `median_at` is
    the median checkpoint of the alarms, from 0.
    """

    runs: int
    alarms: float
    p: float
    above_one: float
    untested: float
    fixed: float
    median_at: float | None


def rates(training: Training, seeds: range, permutations: int, levels: tuple[float, ...]) -> dict[float, Rates]:
    """Count the alarms of simulated trainings with these seeds, by level."""
    runs = [(seed, run) for seed in seeds if (run := simulated_run(training, seed)) is not None]
    counted = {}
    for level in levels:
        found = [alarm(*run[:3], permutations, seed, level) for seed, run in runs]
        fixed = [correctness_fixed(run.played, run.right, permutations, seed).p for seed, run in runs]
        at = [one.first for one in found if one.first is not None]
        counted[level] = Rates(
            runs=len(seeds),
            alarms=len(at) / len(seeds),
            p=sum(one.untested is None and one.p <= level for one in found) / len(seeds),
            above_one=sum(one.push.max() > max(1.0, one.placebos) for one in found) / len(seeds),
            untested=1 - sum(one.untested is None for one in found) / len(seeds),
            fixed=sum(p is not None and p <= level for p in fixed) / len(seeds),
            median_at=float(np.median(at)) if at else None,
        )
    return counted
