"""Whether hints make a teacher: before a training on hints, the model passes more often behind them than without.

Self-distillation learns from the model's own answers behind a hint, and a hint that makes these worse teaches to fail.
Behind "(Answer: X)" SmolLM2-135M-Instruct gives 56 % of dates right instead of 23 %, and 3 % of reversed words instead
of 20 % (benchmarks/hint_check.py). So the same tasks are answered twice with equal seeds, without and with the hint of
the moment before an answer (`composer_stages.envs.base.HintsAnswers`).

A training is stopped by an exact one-sided sign test on the tasks that were solved in one way alone (McNemar,
Psychometrika 1947) at `LEVEL`: equal rates are stopped with a probability of at most .1, whatever they are and however
few the answers (.06 at rates of .3 and 32 answers each way). To stop wherever the hinted rate is below the other would
end nearly every second training whose hints change nothing. Hints that take .20 to .02 are stopped with a probability
of .76 by 32 answers each way and of .98 by 64; from .25 to .23, by any such number, hardly ever: both rates are then
shown with a warning. All of these are computed for answers that are independent of each other.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import cycle, islice
from math import comb
from typing import TYPE_CHECKING

from composer_stages.envs.base import Environment, HintsAnswers, Task
from composer_stages.errors import Incomplete
from composer_stages.evaluation.inference import wilson
from composer_stages.layout import counted, rate_with_interval
from composer_stages.policy.base import Policy
from composer_stages.rollouts.agent_loop import LiveRollout, Rules, play
from composer_stages.runs.activity import Notice, activity
from composer_stages.runs.run import RunWriter
from composer_stages.training.channels.hints import spread, with_hint
from composer_stages.training.config import Config
from composer_stages.training.rollouts import planned
from composer_stages.words import Sentence

if TYPE_CHECKING:
    from composer_stages.training.distributed import Student

LEVEL = 0.1
"""Probability at most of stopping a training whose hints change nothing."""
BEFORE_TRAINING = -1
"""The step whose seeds the answers have, so that no step of the training plays them again."""


@dataclass(frozen=True)
class HintCheck:
    """Tasks answered without and with a hint, by which answer passed. ungraded: pairs with an answer without a grade.

    tokens: sampled for all answers.
    """

    both: int
    plain_only: int
    hinted_only: int
    neither: int
    ungraded: int
    tokens: int

    @property
    def graded(self) -> int:
        """Return the pairs of answers of which both were graded."""
        return self.both + self.plain_only + self.hinted_only + self.neither

    @property
    def plain(self) -> float:
        """The rate of answers that passed without a hint, among graded pairs."""
        return (self.both + self.plain_only) / self.graded

    @property
    def hinted(self) -> float:
        """The rate of answers that passed behind a hint, among graded pairs."""
        return (self.both + self.hinted_only) / self.graded

    @property
    def harmful(self) -> bool:
        """Whether hinted answers pass less often, by more than chance explains at `LEVEL`."""
        differ = self.plain_only + self.hinted_only
        return sum(comb(differ, gained) for gained in range(self.hinted_only + 1)) <= LEVEL * 2**differ

    def __str__(self) -> str:
        """Return both rates with their 95 % intervals, as the subject of a sentence."""
        rates = [rate_with_interval(rate, *wilson(rate, self.graded)) for rate in (self.hinted, self.plain)]
        return Sentence("arms.hint-check", hinted=rates[0], plain=rates[1], answers=self.graded, ungraded=self.ungraded)


def obstacle(config: Config, environment: Environment) -> str | None:
    """Return why hints cannot be checked before the training, as a clause; None where they can."""
    if config.hints.source == "rollout":
        return Sentence("arms.hints-from-passes")
    if config.hints.source == "llm":
        return Sentence("arms.hints-from-mistakes")
    if not isinstance(environment, HintsAnswers):
        return Sentence("arms.hints-of-environment", environment=environment.name)
    if config.diloco.store is not None:
        return Sentence("arms.hints-decided-by-replicas")
    return None


def measure(
    make: Callable[[], Environment],
    policy: Policy,
    tasks: Sequence[Task],
    *,
    seed: int,
    max_steps: int,
    before_turn: Callable[[], None] = lambda: None,
) -> HintCheck:
    """Answer each task of the list without and with its hint; environments are `HintsAnswers`.

    A task that comes again is answered again.
    """
    plain, hinted = planned(tasks, seed, BEFORE_TRAINING), planned(tasks, seed, BEFORE_TRAINING)
    for rollout in hinted:
        rollout.prelude = _show_hint
    for rollouts in (plain, hinted):
        play(make, policy, rollouts, max_steps=max_steps, before_turn=before_turn)
    # An answer that the machinery could not grade is no failure, and its pair tells nothing.
    passed = Counter(
        pair if None not in (pair := (_passed(plain_answer), _passed(hinted_answer))) else None
        for plain_answer, hinted_answer in zip(plain, hinted, strict=True)
    )
    sampled = sum(step.sample.completion_tokens for rollout in (*plain, *hinted) for step in rollout.steps)
    return HintCheck(
        both=passed[True, True],
        plain_only=passed[True, False],
        hinted_only=passed[False, True],
        neither=passed[False, False],
        ungraded=passed[None],
        tokens=sampled,
    )


def _show_hint(rollout: LiveRollout, environment: Environment, rules: Rules) -> None:
    """Put the hint where the training puts it: at the end of the message that is answered."""
    del rules
    if isinstance(environment, HintsAnswers):
        rollout.messages = with_hint(rollout.messages, environment.answer_hint(rollout.task))


def _passed(rollout: LiveRollout) -> bool | None:
    return None if rollout.error is not None else rollout.grade.passed


def check_hints(config: Config, student: "Student", tasks: Sequence[Task], out: RunWriter) -> str | None:
    """Measure on tasks of the training whether hints help, once in a run; return the result as a clause.

    None where no channel learns from hints, or hints.check_answers is 0. All processes must call it; the first one
    answers. Raises Incomplete where the hints do harm.
    """
    number, ranks, make = config.answers_to_check_hints(), student.ranks, config.opener()
    if not number:
        return None
    if reason := obstacle(config, make()):
        return _tell(Sentence("arms.hints-not-checked", reason=reason), student, out)
    unit = f"hint-check-{number}"  # another number of answers is another measurement

    def measured() -> HintCheck:
        if out.finished(unit):
            return HintCheck(**next(out.journal.read([unit]))["hint_check"])
        # From all tasks, since a short training has fewer prompts than answers are needed to tell.
        questions = list(islice(cycle(spread(tasks, number)), number))
        with activity(f"answering {counted(number, 'task')} without and with hints"), student.autocast():
            result = measure(
                make,
                student.policy,
                questions,
                seed=config.seed,
                max_steps=config.max_steps,
                before_turn=out.raise_if_stopped,
            )
        if result.graded:  # otherwise a resumed run tries again
            out.write(unit, {"hint_check": asdict(result), "task_ids": [task.task_id for task in questions]})
        return result

    student.gather()
    result = ranks.broadcast_from_rank0(measured)
    if not result.graded:
        reason = Sentence("arms.ungraded-pairs", pairs=number)
        return _tell(Sentence("arms.hints-not-checked", reason=reason), student, out)
    out.set_summary(hint_check={"hinted": result.hinted, "plain": result.plain, "answers": result.graded})
    if result.harmful:
        raise Incomplete("arms.hints-do-harm", result=str(result))
    if result.hinted > result.plain:
        return _tell(str(result), student, out)
    return _tell(Sentence("arms.hints-do-not-help", result=str(result)), student, out, warning=True)


def _tell(clause: str, student: "Student", out: RunWriter, *, warning: bool = False) -> str:
    if student.ranks.first:
        out.progress(Notice(f"warning: {clause}" if warning else clause), 0, 0)
    return clause
