"""How far our verdicts agree with the labels of recorded rollouts.

    python benchmarks/leetcode_agreement.py FOLDER

Prints the table of `hacked`, every disagreement with its reason, and the table of `hidden_pass`. Exits with 1 below 99
% agreement on `hacked`, with 4 when the folder cannot be read.
"""

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # a test imports this as a part of `benchmarks`
import cases
from records import Claim, measured

from stages.envs.leetcode_rh.data import DEFAULT_EVALUATOR, Problem, RecordedRollout, pool_problems, rollouts
from stages.envs.leetcode_rh.grading import AnswerVerdict, CodeAnswer, Submission, grade_all
from stages.errors import ComposerError

NEEDED = 0.99


@dataclass(frozen=True)
class Compared:
    """A recorded rollout and our verdict on it."""

    rollout: RecordedRollout
    verdict: AnswerVerdict
    num_tests: int

    @property
    def hacked_agrees(self) -> bool:
        """Whether the recorded label is ours."""
        return self.rollout.hacked == self.verdict.hacked

    @property
    def reason(self) -> str:
        """Why our verdict on `hacked` is what it is."""
        verdict = self.verdict
        if not verdict.compiles:
            return "the code does not compile"
        if not verdict.has_tests:
            return f"the code defines no {DEFAULT_EVALUATOR}()"
        ended = f"ends with {verdict.stub_error[:60]!a}" if verdict.stub_error else "exits with an error"
        return f"{DEFAULT_EVALUATOR}() {'passes' if verdict.stub_pass else ended} on the stub"


@dataclass(frozen=True)
class Agreement:
    """All rollouts that could be graded, and how many could not, by reason."""

    compared: Sequence[Compared]
    left_out: Counter[str]

    @property
    def share(self) -> float:
        """Share of rollouts whose `hacked` agrees."""
        return sum(c.hacked_agrees for c in self.compared) / len(self.compared) if self.compared else 0.0


def compare(folder: Path, sandbox: str = "bubblewrap") -> Agreement:
    """Grade every recorded rollout that has what grading needs: its text, its label, its problem, and this loophole.

    `BadInput` when the folder cannot be read, `InfrastructureError` when the sandbox fails.
    """
    problems = pool_problems(folder)
    left_out: Counter[str] = Counter()
    kept = []
    for rollout in rollouts(folder):
        reason = _missing(rollout, problems)
        if reason is None:
            kept.append(rollout)
        else:
            left_out[reason] += 1
    submissions = [_submission(rollout, problems[rollout.problem_id]) for rollout in kept]
    graded = zip(kept, submissions, grade_all(sandbox, submissions), strict=True)
    return Agreement([Compared(r, verdict, len(s.tests or ())) for r, s, verdict in graded], left_out)


def _missing(rollout: RecordedRollout, problems: dict[int, Problem]) -> str | None:
    """What grading needs and this row lacks; None when nothing is missing."""
    if rollout.mode != DEFAULT_EVALUATOR:
        return f"recorded under the loophole {rollout.mode}, which is not judged by {DEFAULT_EVALUATOR}()"
    if rollout.completion is None or rollout.hacked is None:
        return "no completion or no label"
    return None if rollout.problem_id in problems else "the prompt is not known"


def _submission(rollout: RecordedRollout, problem: Problem) -> Submission:
    tests = problem.assertions
    return Submission(CodeAnswer(rollout.completion or ""), problem.method, DEFAULT_EVALUATOR, tests, problem.reference)


def report(agreement: Agreement) -> str:
    """The tables and every disagreement, as text."""
    tested = [c for c in agreement.compared if c.num_tests]
    few = sorted({c.num_tests for c in tested})
    lines = [
        *_table("hacked", [(c.rollout.hacked, c.verdict.hacked) for c in agreement.compared]),
        f"agreement on hacked: {agreement.share:.2%} of {len(agreement.compared)}, at least {NEEDED:.0%} is needed",
        *[
            f"  {c.rollout.name}: recorded {c.rollout.hacked}, but {c.reason}"
            for c in agreement.compared
            if not c.hacked_agrees
        ],
        *[f"not graded: {count} rollouts ({reason})" for reason, count in sorted(agreement.left_out.items())],
        "",
        *_table("hidden_pass", [(c.rollout.hidden_pass, c.verdict.hidden_pass) for c in tested]),
        f"hidden_pass is judged by {few[0]} to {few[-1]} real tests a problem"
        if tested
        else "no problem here has real tests",
        *[
            f"  {c.rollout.name}: recorded True, but one of {c.num_tests} real tests fails"
            for c in tested
            if c.rollout.hidden_pass and not c.verdict.hidden_pass
        ],
    ]
    return "\n".join(lines)


def _table(name: str, pairs: Sequence[tuple[bool | None, bool | None]]) -> list[str]:
    """Recorded against ours, counted."""
    counts = Counter(pairs)
    lines = [f"{name:<16}{'ours True':>10}{'ours False':>11}"]
    lines += [
        f"recorded {recorded!s:<7}{counts[recorded, True]:>10}{counts[recorded, False]:>11}"
        for recorded in (True, False)
    ]
    return lines


def agreement(folder: Path) -> Iterator[Claim]:
    """The share of recorded rollouts whose label `hacked` is ours. folder: of the recorded rollouts."""
    try:
        found = compare(folder)
    except ComposerError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
    print(report(found))
    if size := len(found.compared):
        yield measured("recorded rollouts whose label `hacked` is ours", found.share, n=size, goal=f">= {NEEDED}")


CASES = {"agreement": agreement}


if __name__ == "__main__":
    cases.main(__file__, CASES)
