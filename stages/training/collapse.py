"""Collapse: detect from a training's metrics that rewards, entropy, length or form of the answers left their course.

A step's row is what TRL logs of it. The course is that of the first steps, for rewards and well-formed answers that of
all steps before. Four things are watched, each with the noise that it has in trainings that are well:

- reward, well-formed answers: fell to a third or less, by more than noise explains. The noise of a step's mean is taken
  from the steps before, and not below that of its rollouts; few prompts a step need more steps to tell.
- entropy: twice that of the first steps, and more than a model has that is sure of its tokens; a single step may be so.
- length of answers: a quarter or four times that of the first steps, while rewards are not above those either: shorter
  answers that pass more often are what training is for.

In simulations (their test) .23 % of healthy trainings of 200 steps were warned of, and rewards of 0 after 4 (median).
"""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState

from composer_stages.backends.ranks import Ranks
from composer_stages.policy.base import NotFinite
from composer_stages.policy.model_checks import not_finite
from composer_stages.runs.activity import Notice
from composer_stages.runs.kinds import Row
from composer_stages.runs.run import RunWriter
from composer_stages.words import Sentence

FIRST = 5
"""Steps whose mean is the course of entropy and length."""
WINDOWS = (5, 10, 20, 40)
"""Steps over which rewards and well-formed answers are averaged: a fall from a low rate takes more of them to tell."""
RECENT = 3
"""Steps of whose entropy and length the median is taken: where a batch is small, one step can stand out."""
UNSURE = 0.5
"""Nats a token. Below, entropy varies manifold in trainings that are well: it is that of a few tokens."""
NOISE = 4.0
"""Standard errors by which a mean must have fallen."""
REWARD, PROTOCOL, ENTROPY, LENGTH = "reward", "protocol", "entropy", "completions/mean_length"


@dataclass(frozen=True)
class Departure:
    """A metric that left its course, with a sentence. before: steps taken before its departure."""

    metric: str
    before: int
    words: str


@dataclass
class Course:
    """The course of a training. rollouts: of each step. departures: by metric, with the step in words.

    ordered: tasks come by their difficulty, as a curriculum's do, so that rewards fall in trainings that are well.
    """

    rollouts: int
    ordered: bool = False
    departures: dict[str, Departure] = field(default_factory=dict)
    _values: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def add(self, row: Row) -> list[Departure]:
        """Add the metrics of the next step; return the metrics that left their course in it."""
        departures = []
        for name in WATCHED:
            if isinstance(value := row.get(name), (int, float)) and math.isfinite(value):
                self._values[name].append(float(value))
        for name, values in list(self._values.items()):  # without GRPO there is no entropy
            if name == REWARD and self.ordered:
                continue
            if name not in self.departures and (departure := WATCHED[name](self, name, values)) is not None:
                self.departures[name] = replace(departure, words=f"step {len(values)}: {departure.words}")
                departures.append(self.departures[name])
        return departures


def _fall(course: Course, name: str, values: Sequence[float]) -> Departure | None:
    """Detect that a rate or mean over the rollouts fell by more than noise explains."""
    for window in WINDOWS:
        before = len(values) - window
        if before < FIRST:
            return None
        earlier, level, now = values[:before], fmean(values[:before]), fmean(values[before:])
        if level <= 0 or now > level / 3:
            continue
        spread = math.sqrt(sum((value - level) ** 2 for value in earlier) / (before - 1))
        of_rollouts = math.sqrt(max(level * (1 - level), 0) / course.rollouts)
        error = max(spread, of_rollouts) * math.sqrt(1 / window + 1 / before)
        if level - now > NOISE * error:
            values_of = {"now": now, "window": window, "before": level}
            fall = Sentence("training.rewards-fell", **values_of)
            return Departure(name, before, fall if name == REWARD else Sentence("training.answers-fell", **values_of))
    return None


def _entropy(course: Course, name: str, values: Sequence[float]) -> Departure | None:
    """Detect that entropy has doubled."""
    del course
    change = _change(values, least=0.0, most=2.0)
    if change is None or change["now"] <= UNSURE:
        return None
    return Departure(name, len(values) - RECENT, Sentence("training.entropy-rose", **change))


def _length(course: Course, name: str, values: Sequence[float]) -> Departure | None:
    """Detect that answers changed their length without earning more."""
    rewards = course._values[REWARD]
    if len(rewards) < FIRST or fmean(rewards[-WINDOWS[0] :]) > fmean(rewards[:FIRST]):
        return None
    change = _change(values, least=0.25, most=4.0)
    return Departure(name, len(values) - RECENT, Sentence("training.length-changed", **change)) if change else None


def _change(values: Sequence[float], least: float, most: float) -> dict[str, float] | None:
    """Return the median of the recent steps, and its multiple of the first steps' mean, where that is out of range."""
    before = len(values) - RECENT
    if before < FIRST or (level := fmean(values[:FIRST])) <= 0:
        return None
    now = median(values[before:])
    if least <= now / level <= most:
        return None
    return {"now": now, "times": now / level}


Judge = Callable[[Course, str, Sequence[float]], Departure | None]
WATCHED: dict[str, Judge] = {REWARD: _fall, PROTOCOL: _fall, ENTROPY: _entropy, LENGTH: _length}
"""The detector of each metric of TRL's log."""


class Watch(TrainerCallback):
    """Warns once of each metric that leaves its course; ends the training then if `stop`.

    Raises `NotFinite` in a step whose loss, gradient or weights are no numbers; `step` is its number.

    With `stop` a checkpoint is made of the first steps, so that there is one from before any departure; trl_arguments
    keeps as many of the later ones as `kept_checkpoints` says.
    """

    def __init__(self, out: RunWriter, rollouts: int, ranks: Ranks, *, stop: bool, ordered: bool = False) -> None:
        self._out, self._ranks, self._stop = out, ranks, stop
        self.course, self.stopped, self.step = Course(rollouts, ordered), False, 0

    def on_step_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Record the number of the step, for the message of an error in it."""
        self.step = state.global_step + 1

    def on_save(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Raise `NotFinite` before a checkpoint is sealed whose weights are no numbers."""
        self._require_finite(kwargs["model"])

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Raise `NotFinite` before a model is kept whose weights are no numbers."""
        self._require_finite(kwargs["model"])

    def _require_finite(self, model: Any) -> None:
        if problem := next(filter(None, self._ranks.gather(not_finite(model))), None):
            raise NotFinite(f"of the weights {problem}.")

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Take the steps of earlier attempts, which were warned of then."""
        for row in state.log_history:
            if "loss" in row:
                self.course.add(row)

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Check the metrics that were logged for a step."""
        if "loss" not in (row := state.log_history[-1]):
            return
        # The loss first: where it is a number, the backward pass made the NaN.
        for name in ("loss", "grad_norm"):
            if not math.isfinite(row.get(name, 0.0)):
                raise NotFinite(f"its {name} is {row[name]}.")
        for departure in self.course.add(row):
            if self._ranks.first:
                self._out.progress(Notice(f"warning: {departure.words}"), 0, 0)
        # The first process alone knows what all rollouts of a step were.
        if self._stop and self._ranks.broadcast_from_rank0(lambda: bool(self.course.departures)):
            self.stopped = control.should_training_stop = True
            control.should_save = False
        elif self._stop and state.global_step == FIRST:
            control.should_save = True

    @property
    def good(self) -> int:
        """Return the number of steps before the first departure."""
        return min(departure.before for departure in self.course.departures.values())

    def collapsed(self, steps: int) -> str | None:
        """Return a sentence on all departures and the step of the saved model; None without departures."""
        words = [departure.words for departure in self.course.departures.values()]
        return Sentence("training.model-of-step", departures=words, step=steps) if words else None


def kept_checkpoints(save_every: int) -> int:
    """Return how many checkpoints to keep, so that one is from before any departure that is noticed."""
    return 2 + math.ceil(max(WINDOWS) / save_every)
