"""Say of each test whether its pass rests on values or on a report, and which tests gave wrong values.

A test gives `values` where all that it asserts was asked: the values left the sandbox and were compared here, with
expected values that were never in a process with code of an agent. Any other test gives `report`: the process that ran
the code under test reported the pass itself.
"""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass

from stages.envs.repo import trees
from stages.envs.repo.forged_passes import RerunTests, answer_sheet, rewritten_run
from stages.envs.repo.grading import TestLists
from stages.envs.repo.rewritten_tests import TestFiles


@dataclass(frozen=True)
class Grounds:
    """What came of asking.

    `reasons`: test -> why it gives only `report`; a test of the lists that is not among them gives `values`. `wrong`:
    the tests that gave other values than expected, in each of two runs, whatever they reported.
    """

    reasons: Mapping[str, str]
    wrong: frozenset[str]


def ask(
    files: trees.Changes, lists: TestLists, rerun: RerunTests, *, task: Hashable, reference: bool, asks: bool
) -> Grounds:
    """Ask the tests of a solution that passed for their values.

    `files` are the original test files, `task` identifies the task in this process, `reference` says whether there is a
    reference solution, `asks` whether the tests run under the reporting plugin. Exceptions of `rerun` pass through.
    """
    del task
    names = (*lists.fail_to_pass, *lists.pass_to_pass)
    if not asks:
        return Grounds(dict.fromkeys(names, "the tests run without the plugin that asks"), frozenset())
    tests = TestFiles(files)
    sheet = answer_sheet(tests, lists, rerun, reference=reference)
    located = {name: one for name in names if (one := tests.locate(name))}
    reasons = {
        name: "not all that it asserts could be asked" for name in names if located.get(name) not in sheet.deciding
    }
    run = rewritten_run(tests, lists, {}, sheet)
    found = [run.contradictions(rerun(run.files, run.selected, "solution")) for _ in range(2)] if run.selected else []
    versions = set.intersection(*found) if found else set()
    wrong = (name for name, one in located.items() if one in run.asked and run.asked[one] in versions)
    return Grounds(reasons, frozenset(wrong))
