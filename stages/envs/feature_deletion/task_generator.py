"""From candidates to accepted tasks: remove, test, restore, test again, look for leaks, contradict a test."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from stages.envs.base import Split
from stages.envs.feature_deletion import leaks, rows, selection
from stages.envs.feature_deletion.baseline import PATIENCE_S, Baseline, file_of, measure
from stages.envs.feature_deletion.contradicting import ContradictionSearch
from stages.envs.feature_deletion.package import Package
from stages.envs.feature_deletion.selection import Difficulty, Kind, Removal
from stages.envs.feature_deletion.worker import Job, TestReport, TestWorker
from stages.envs.repo import trees
from stages.envs.repo.grading import Lists
from stages.envs.repo.outcomes import by_name
from stages.envs.repo.protected_files import is_test
from stages.runs.records import Row

BATCH = 8
BATCH_S = 60.0
"""About so long may the first runs of a batch take: nothing is kept, and nothing said, before its end."""
TRIVIAL = ("return None", "return True", "return False", "return 0", "return ''", "return []", "return {first}")
NO_CONTRADICTION = "no test can be contradicted"
Scope = Literal["full", "covering"]


@dataclass(frozen=True)
class Made:
    """What became of one candidate: an accepted row, or the reason why not."""

    removal: Removal
    row: Row | None
    reason: str | None = None


class Candidate:
    """One removal on its way to a task: gives test jobs and takes their reports; `reason` says why it is no task.

    In order: `look_within`; `removed` and `learn`; `restored` and `confirm`; `contradict`, until it gives no job;
    `trivial` and `compare`; `finish`.
    """

    def __init__(self, generator: "TaskGenerator", removal: Removal, scope: Scope) -> None:
        self.generator, self.removal, self.scope, self.baseline = generator, removal, scope, generator.baseline
        self.writes = removal.writes(generator.texts)
        self.reason: str | None = None
        self.failing: list[str] = []
        self.hanging: frozenset[str] = frozenset()
        self.search: ContradictionSearch | None = None

    def look_within(self) -> None:
        """Reject it where the delivered tree still holds the removed code."""
        self._leak(self.generator.within(self.removal, self.writes))

    def look_around(self) -> None:
        """Reject it where the sandbox shows the removed code elsewhere. The first call searches, so it comes last."""
        self._leak(self.generator.survey.of(self.removal))

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
        self.search = ContradictionSearch(self.failing, names, self.generator.text, self.generator.tests)

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
        texts = self.generator.texts
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
        row = rows.build(
            self.generator.package, self.removal, self.writes, self._lists(), self.baseline, proven, hanging
        )
        return row, None


class TaskGenerator:
    """Makes tasks from one package in one sandbox; a context manager.

    `requirements`: the folder with what the package's tests import beside it. `baseline`: as another generator for the
    same package measured it. `BadInput` from `baseline`, and so from `candidates` and `make`, when no test of the
    package passes twice.
    """

    def __init__(
        self, package: Package, sandbox: str, requirements: Path | None = None, baseline: Baseline | None = None
    ) -> None:
        self._measured = baseline
        self.package, self.sandbox, self.requirements = package, sandbox, requirements
        with ExitStack() as stack:
            self.worker = stack.enter_context(TestWorker(sandbox, package.root, requirements))
            self._stack = stack.pop_all()
        self._files = {path: file for path in trees.walk(package.root) if (file := trees.read(package.root, path))}
        self.texts = selection.sources(self._files)
        self.tests = [path for path in self._files if path.endswith(".py") and is_test(path)]

    @cached_property
    def baseline(self) -> Baseline:
        """The tests before anything is removed."""
        return self._measured or measure(self.worker)

    @property
    def batch(self) -> int:
        """So many candidates are tried together."""
        return max(1, min(BATCH, int(BATCH_S / max(self.baseline.duration_s, 0.001))))

    @cached_property
    def survey(self) -> leaks.Survey:
        """Copies of the package's code around the task's tree."""
        return leaks.survey(self.sandbox, self.texts, self.requirements)

    @cached_property
    def _tree(self) -> leaks.Tree:
        return leaks.Tree(self._files)

    def candidates(
        self, seed: int, split: Split | None, kinds: Sequence[Kind], difficulties: Sequence[Difficulty]
    ) -> list[Removal]:
        """What to try, in order."""
        return selection.candidates(
            self.texts, self.baseline.lines, seed=seed, split=split, kinds=kinds, difficulties=difficulties
        )

    def make(self, candidates: Sequence[Removal], scope: Scope = "full") -> Iterator[Made]:
        """What became of each, in order. `scope` says which tests decide what still passes.

        full     - all of them, run with the code removed
        covering - those that execute a removed line are run; the others cannot notice and count as passing
        """
        for start in range(0, len(candidates), self.batch):
            chosen = candidates[start : start + self.batch]
            yield from self._batch([Candidate(self, removal, scope) for removal in chosen])

    def _batch(self, batch: Sequence[Candidate]) -> list[Made]:
        for candidate in batch:
            candidate.look_within()
        for job, learn in ((Candidate.removed, Candidate.learn), (Candidate.restored, Candidate.confirm)):
            left = _left(batch)
            for candidate, done in zip(left, self.worker.run([job(candidate) for candidate in left]), strict=True):
                learn(candidate, done)
        self._contradict(_left(batch))
        for candidate in _left(batch):
            candidate.compare(self.worker.run(candidate.trivial()))
        return [Made(candidate.removal, *candidate.finish()) for candidate in batch]

    def _contradict(self, batch: Sequence[Candidate]) -> None:
        """A way to contradict each in every round, until each has one that fails with the original code."""
        while trying := [(candidate, job) for candidate in batch if (job := candidate.contradict())]:
            for (candidate, _), done in zip(trying, self.worker.run([job for _, job in trying]), strict=True):
                candidate.contradicted(done)

    def text(self, path: str) -> str:
        """A file of the package as text."""
        return self._files[path].data.decode(errors="replace")

    def within(self, removal: Removal, writes: dict[str, str]) -> list[str]:
        """Where the delivered tree still holds removed code."""
        return self._tree.copies(removal, writes)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()


def _left(batch: Sequence[Candidate]) -> list[Candidate]:
    """Those that are not rejected yet."""
    return [candidate for candidate in batch if candidate.reason is None]
