"""From candidates to accepted tasks: remove, test, restore, test again, look for leaks, contradict a test."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Self

from stages.envs.base import Split
from stages.envs.feature_deletion import leaks, selection
from stages.envs.feature_deletion.baseline import Baseline, measure
from stages.envs.feature_deletion.candidate import Candidate, Scope
from stages.envs.feature_deletion.package import Package
from stages.envs.feature_deletion.selection import Difficulty, Kind, Removal
from stages.envs.feature_deletion.worker import TestWorker
from stages.envs.repo import trees
from stages.envs.repo.protected_files import is_test
from stages.runs.records import Row

BATCH = 8
BATCH_S = 60.0
"""About so long may the first runs of a batch take: nothing is kept, and nothing said, before its end."""


@dataclass(frozen=True)
class Made:
    """What became of one candidate: an accepted row, or the reason why not."""

    removal: Removal
    row: Row | None
    reason: str | None = None


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
