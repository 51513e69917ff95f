"""One removal on its way to a task: which test runs it asks for, and what their reports make of it."""

from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

from stages.envs.feature_deletion import leaks, rows
from stages.envs.feature_deletion.baseline import PATIENCE_S, Baseline, file_of
from stages.envs.feature_deletion.contradicting import ContradictionSearch
from stages.envs.feature_deletion.package import Package
from stages.envs.feature_deletion.selection import Removal
from stages.envs.feature_deletion.worker import Job, TestReport
from stages.envs.repo.grading import Lists
from stages.envs.repo.outcomes import by_name
from stages.runs.records import Row

TRIVIAL = ("return None", "return True", "return False", "return 0", "return ''", "return []", "return {first}")
NO_CONTRADICTION = "no test can be contradicted"
Scope = Literal["full", "covering"]


class Origin(Protocol):
    """The package that a candidate is removed from; `texts`: its code, `tests`: its test files, by path."""

    package: Package
    texts: dict[str, str]
    tests: list[str]

    @property
    def baseline(self) -> Baseline:
        """The tests before anything is removed."""

    @property
    def survey(self) -> leaks.Survey:
        """Copies of the package's code around the task's tree."""

    def text(self, path: str) -> str:
        """A file of the package."""

    def within(self, removal: Removal, writes: dict[str, str]) -> list[str]:
        """Where the delivered tree still holds removed code."""


class Candidate:
    """One removal on its way to a task: gives test jobs and takes their reports; `reason` says why it is no task.

    In order: `look_within`; `removed` and `learn`; `restored` and `confirm`; `contradict`, until it gives no job;
    `trivial` and `compare`; `finish`.
    """

    def __init__(self, origin: Origin, removal: Removal, scope: Scope) -> None:
        self.origin, self.removal, self.scope, self.baseline = origin, removal, scope, origin.baseline
        self.writes = removal.writes(origin.texts)
        self.reason: str | None = None
        self.failing: list[str] = []
        self.hanging: frozenset[str] = frozenset()
        self.search: ContradictionSearch | None = None

    def look_within(self) -> None:
        """Reject it where the delivered tree still holds the removed code."""
        self._leak(self.origin.within(self.removal, self.writes))

    def look_around(self) -> None:
        """Reject it where the sandbox shows the removed code elsewhere. The first call searches, so it comes last."""
        self._leak(self.origin.survey.of(self.removal))

    def _leak(self, places: list[str]) -> None:
        if places:
            self.reason = f"leak: {places[0]} holds the removed code"

    def removed(self) -> Job:
        """The tests with the code removed."""
        return self.job(self._affected(), self.writes)

    def _affected(self) -> set[str]:
        return set(self.baseline.stable) if self.scope == "full" else self.removal.covering(self.baseline.lines)

    def job(self, node_ids: set[str], writes: Mapping[str, str], *options: str) -> Job:
        """A run of some tests, with further options of pytest."""
        files = sorted({file_of(node_id) for node_id in node_ids})
        return Job(
            (*self.baseline.options, *options, *files),
            writes,
            tuple(sorted(node_ids)),
            self.baseline.timeout_s,
            patience_s=PATIENCE_S,
            slow=self.baseline.patience,
        )

    def learn(self, done: TestReport) -> None:
        """Which tests fail without the code. Those that hang are set aside: neither list has them."""
        fresh = done.broken.keys() - self.baseline.broken.keys()
        self.hanging = done.hanging
        self.failing = sorted(self._affected() - done.passed - done.hanging)
        if done.timed_out or (done.hanging and not self.failing):
            self.reason = ": ".join(("without the code the tests hang", *sorted(done.hanging)[:1]))
        elif fresh or done.status < 0:
            self.reason = "without the code the tests cannot be collected"
        elif not self.failing:
            self.reason = "no test notices"
        elif not self._lists().pass_to_pass:
            self.reason = "every test fails"

    def _lists(self) -> Lists:
        stable = by_name(dict.fromkeys(self.baseline.stable - self.hanging, "passed"))
        failing = set(by_name(dict.fromkeys(self.failing, "failed")))
        return Lists(tuple(sorted(failing)), tuple(sorted(set(stable) - failing)))

    def restored(self) -> Job:
        """The failing tests with the original code."""
        return self.job(set(self.failing), {})

    def confirm(self, done: TestReport) -> None:
        """They must pass again."""
        if set(self.failing) - done.passed:
            self.reason = "the restored code fails"
            return
        names = [part.qualname.rpartition(".")[2].strip("_") for part in self.removal.parts]
        self.search = ContradictionSearch(self.failing, names, self.origin.text, self.origin.tests)

    def contradict(self) -> Job | None:
        """The next way to contradict its tests, on the original code; None when enough was found or nothing is left."""
        if self.search is None:
            return None
        tests, edits = self.search.next_round()
        return self.job(tests, edits) if tests else None

    def contradicted(self, done: TestReport) -> None:
        """What came of it."""
        if self.search is not None:
            self.search.learn(done)

    def trivial(self) -> list[Job]:
        """The failing tests with each trivial body, up to the first that fails."""
        if self.search is None or not self.search.proven:
            return []
        texts = self.origin.texts
        return [self.job(set(self.failing), self.removal.with_body(texts, body), "--maxfail=1") for body in TRIVIAL]

    def compare(self, done: Sequence[TestReport]) -> None:
        """A task that one of them solves is none."""
        for body, report in zip(TRIVIAL, done, strict=False):
            if not set(self.failing) - report.passed:
                self.reason = f"a trivial body solves it: {body.format(first='its first argument')}"
                return

    def finish(self) -> tuple[Row | None, str | None]:
        """The accepted row, or the reason why there is none."""
        proven = self.search.proven if self.search else []
        if self.reason is None and not proven:
            self.reason = NO_CONTRADICTION
        if self.reason is None:
            self.look_around()
        if self.reason is not None:
            return None, self.reason
        hanging = sorted(self.hanging)
        row = rows.build(self.origin.package, self.removal, self.writes, self._lists(), self.baseline, proven, hanging)
        return row, None
