"""Asking a model which features of a package to delete, one question after another.

Every answer is a unit of the run, so that it is paid for once however often the run is resumed.
"""

from collections import Counter

from stages.envs.feature_deletion.selection import Proposals, Removal
from stages.errors import Incomplete
from stages.plurals import counted
from stages.policy import Policy, PolicyConfig, Turn, ask_all
from stages.policy.serving import Serving
from stages.runs import store
from stages.runs.kinds import Row
from stages.runs.run import RunWriter
from stages.teachers.asking import FINAL

KEPT = ("text", "finish_reason", "prompt_tokens", "completion_tokens", "cost_usd", "error_type", "error")


class FeatureProposer:
    """At most `questions` questions to a model about one package.

    `more` raises `Incomplete` where the model fails in a way that another attempt may not.
    """

    def __init__(
        self, proposals: Proposals, config: PolicyConfig, questions: int, seed: int, serving: Serving, out: RunWriter
    ) -> None:
        self.proposals, self.questions, self.asked = proposals, questions, 0
        self._config, self._seed, self._serving, self._out = config, seed, serving, out
        self._policy: Policy | None = None

    @property
    def over(self) -> bool:
        """Return whether no question is left."""
        return self.asked >= self.questions or not self.proposals.question()

    def more(self) -> list[Removal]:
        """Ask until a new removal is proposed or no question is left; return all removals so far."""
        before = len(self.proposals.removals)
        while not self.over and len(self.proposals.removals) == before:
            self._out.raise_if_stopped()
            self.proposals.take(self._answer())
            self.asked += 1
        return self.proposals.removals

    def report(self, refused: Counter[str]) -> list[str]:
        """Return the result of the questions as lines of a report."""
        tried = counted(len(self.proposals.removals), "feature")
        lines = [
            "",
            f"{counted(self.asked, 'question')} to {self._config.model}: {tried} to try, {refused.total()} refused",
        ]
        return lines + [f"{number:>6}  {reason}" for reason, number in refused.most_common()]

    def _answer(self) -> str:
        """Return the text of the next answer; empty for an error that asking again would not change."""
        unit = f"question-{self.asked:04d}"
        if not self._out.finished(unit):
            self._out.progress("questions about features", self.asked, self.questions)
            # The seed depends on the question's number, so that a resumed run would ask the same.
            seed = int(store.digest([self._seed, unit])[:15], 16)
            # Opened with the first question: a resumed run whose answers are all there needs no server.
            if self._policy is None:
                self._policy = self._serving.open(self._config)
                self._out.model("proposer", **self._policy.facts())
            sample = ask_all(self._policy, [Turn(self.proposals.question(), seed)])[0]
            failed = sample.error_type not in FINAL
            answer: Row = {name: getattr(sample, name) for name in KEPT}
            self._out.write(unit, {"answer": answer}, failed=failed)
            if failed:
                raise Incomplete(
                    f"{self._config.model} did not say which features to delete: {sample.error}. What was made is "
                    "saved; go on with --resume."
                )
        found = self._out.journal.get(unit)
        return str(found["answer"]["text"]) if found else ""
