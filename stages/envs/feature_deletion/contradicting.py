"""The search for tests of a candidate that can be contradicted: with a changed expectation the original code fails."""

from collections.abc import Callable

from stages.envs.feature_deletion import twins
from stages.envs.feature_deletion.definitions import without
from stages.envs.feature_deletion.twins import Contradiction, Proven
from stages.envs.feature_deletion.worker import TestReport
from stages.envs.repo.outcomes import by_name

MOST_ROUNDS = 8
MOST_TESTS_TO_CONTRADICT = 6


class ContradictionSearch:
    """Tries to contradict a few test functions, each in one way a round, until a round succeeds.

    `failing`: node ids of the tests that fail without the removed code. `names`: of the removed definitions; tests with
    one of them in their name come first. `text` reads a file of the package, `tests` are the paths of its test files.
    `proven` is what was found.
    """

    def __init__(self, failing: list[str], names: list[str], text: Callable[[str], str], tests: list[str]) -> None:
        self._failing, self._text, self._tests = failing, text, tests
        functions = list(dict.fromkeys(node_id.partition("[")[0] for node_id in failing))
        functions.sort(key=lambda function: not any(name.lower() in function.lower() for name in names))
        self._ways = {function: self._find(function) for function in functions[:MOST_TESTS_TO_CONTRADICT]}
        self._rounds = 0
        self._now: dict[str, Contradiction] = {}
        self.proven: list[Proven] = []

    def _find(self, function: str) -> list[Contradiction]:
        """Contradictions of a test where it is, or where it is inherited from."""
        own, *names = function.split("::")
        for path in (own, *(path for path in self._tests if path != own)):
            if found := twins.contradictions(path, self._text(path), tuple(names), inherited=path != own):
                return found
        return []

    def next_round(self) -> tuple[set[str], dict[str, str]]:
        """The node ids to run, and the files (path -> text) to run them with; none when there is nothing to try."""
        self._now = {}
        if self.proven or self._rounds >= MOST_ROUNDS:
            return set(), {}
        for function, ways in self._ways.items():
            if self._rounds < len(ways) and not any(
                twins.overlap(ways[self._rounds], other) for other in self._now.values()
            ):
                self._now[function] = ways[self._rounds]
        self._rounds += 1
        edits: dict[str, list[Contradiction]] = {}
        for contradiction in self._now.values():
            edits.setdefault(contradiction.path, []).append(contradiction)
        writes = {path: without(self._text(path), [c.edit for c in within]) for path, within in edits.items()}
        return {name for name in self._failing if name.partition("[")[0] in self._now}, writes

    def learn(self, done: TestReport) -> None:
        """A contradiction is proven when its test still runs, and fails with the original code."""
        if done.timed_out or done.broken:
            return
        for function, contradiction in self._now.items():
            outcomes = {name: outcome for name, outcome in done.outcomes.items() if name.partition("[")[0] == function}
            failed = sorted(name for name, outcome in by_name(outcomes).items() if outcome == "failed")
            if failed:
                self.proven.append(Proven(contradiction, tuple(failed)))
