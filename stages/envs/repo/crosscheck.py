"""A candidate that passes is run again with altered tests; a verdict made by force contradicts itself there.

Code under test shares an interpreter with the tests, so that it can reach whatever reports them. What it cannot know is
which tests are broken in the second run: one that passes although it is broken was forged, and so was one that passed
at first and fails now that its file is not what the forger waits for.
"""

import random
import secrets
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

from stages.envs.repo import altered_tests, trees
from stages.envs.repo.altered_tests import TestFunction, function_name
from stages.envs.repo.grading import Lists
from stages.envs.repo.outcomes import PASSING, Statuses

Rerun = Callable[[trees.Changes, bool], Statuses]
"""Runs the tests with these files over all others: of the candidate, or (True) of the reference solution."""


@dataclass(frozen=True)
class Check:
    """Altered test files, and the tests that must fail and must pass with them."""

    files: trees.Changes
    must_fail: frozenset[str]
    must_pass: frozenset[str]

    def contradictions(self, statuses: Statuses) -> set[str]:
        """The tests that are not what they must be."""
        passing = {name for name, status in statuses.items() if status in PASSING}
        return {*(self.must_fail & passing), *(self.must_pass - passing)}


def forged(files: trees.Changes, lists: Lists, statuses: Statuses, rerun: Rerun, *, reference: bool) -> bool:
    """Whether a candidate that passes contradicts itself. `files` are the tests as they are, `statuses` as they were.

    One more run, or two where only one function has to come to pass. What the reference solution does, if there is one,
    counts against nobody. No broken test passes by chance, so once is enough; tests fail by chance, so the check is
    repeated for one that fails and must not.
    """
    return any(_contradicted(check, rerun, reference=reference) for check in checks(files, lists, statuses))


def _contradicted(check: Check, rerun: Rerun, *, reference: bool) -> bool:
    found = check.contradictions(rerun(check.files, False))
    if found and reference and (right := rerun(check.files, True)):
        found -= check.contradictions(right)
    if found & check.must_fail:
        return True
    return bool(found) and bool(found & check.contradictions(rerun(check.files, False)))


def checks(files: trees.Changes, lists: Lists, statuses: Statuses) -> Iterator[Check]:
    """The second runs of a candidate with these statuses, each with tests broken that nobody can foresee."""
    rng = random.Random(secrets.randbits(128))  # noqa: S311 - seeded by what nobody knows
    texts = _texts(files)
    known = altered_tests.functions(texts)
    fixed, kept = (_by_function(names, statuses, known) for names in (lists.fail_to_pass, lists.pass_to_pass))
    breakable = {one for one, node in known.items() if altered_tests.can_be_broken(one, node, texts)}
    names = {one.name for one in fixed}
    kept_one = _some([one for one in kept if one in breakable and one.name not in names], 1, rng)
    fixed_breakable = [one for one in fixed if one in breakable]
    rounds = [_half(fixed_breakable, len(names), rng) | kept_one]
    if len(names) == 1 and fixed_breakable:
        rounds.append(set(fixed_breakable))
    for broken in rounds:
        broken_names = {one.name for one in broken}
        must_fail = {test for one in broken for test in (*fixed.get(one, ()), *kept.get(one, ()))}
        passed = [name for name in (*lists.fail_to_pass, *lists.pass_to_pass) if statuses.get(name) in PASSING]
        must_pass = {name for name in passed if function_name(name) not in broken_names}
        written = altered_tests.altered(texts, broken, rng)
        changed: trees.Changes = {
            path: trees.File(text.encode("utf-8", "surrogateescape")) for path, text in written.items()
        }
        yield Check(changed, frozenset(must_fail), frozenset(must_pass))


def _texts(files: trees.Changes) -> dict[str, str]:
    return {
        path: file.data.decode("utf-8", "surrogateescape")
        for path, file in files.items()
        if file is not None and path.endswith(".py")
    }


def _by_function(
    names: Collection[str], statuses: Statuses, known: Mapping[TestFunction, altered_tests.FunctionNode]
) -> dict[TestFunction, list[str]]:
    """The passing tests of each function that is found."""
    found: dict[TestFunction, list[str]] = {}
    for name in names:
        if statuses.get(name) in PASSING and (function := altered_tests.locate(name, known)):
            found.setdefault(function, []).append(name)
    return found


def _half(functions: list[TestFunction], num_names: int, rng: random.Random) -> set[TestFunction]:
    """Half of the functions at random, so that at least one name is left whole."""
    return _some(functions, max(1, min(len(functions), num_names) // 2), rng) if num_names > 1 else set()


def _some(functions: list[TestFunction], count: int, rng: random.Random) -> set[TestFunction]:
    return set(rng.sample(functions, min(count, len(functions))))
