"""Ask the tests of a task for their values, and compare these with what is expected.

A task is decided by values where every test that has to pass is asked for all that it asserts (questions.py): the
values leave the sandbox and are compared here (values.py) with expected values that are not sent into one with an
agent's code. It holds the withheld versions of the tests, and no file that only expected values need. Values that these
tests make at run time, and names that tell them, are there all the same (docs/rewards.md). Any
other task is decided by a report: the process that ran the code under test says itself that its tests pass. So is one
whose every test that has to come to pass was shown to the agent, which may have copied the expected values.

What is expected is known from runs on trees without an agent's code, made once for a task: the open versions on the
reference solution, and the withheld ones, which must give the expected values there. Without a reference solution the
expected values alone are made, on the delivered tree; then nothing shows which files tests read besides, so that a test
whose expected value comes from a file gives a report.
"""

import ast
import builtins
import random
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Literal

from stages.envs.repo import trees, values
from stages.envs.repo.grading import TestOutcomes
from stages.envs.repo.guest.composer_rules import PASSING, is_selected_by
from stages.envs.repo.guest.composer_values import MOST_ANSWERS
from stages.envs.repo.known_values import GUESSED, module_text, value_texts
from stages.envs.repo.parsed_tests import FunctionNode, TestFiles, TestLocation
from stages.envs.repo.pruning import mentioned_names, prune_module
from stages.envs.repo.questions import IMPORT, NotAskable, RewrittenTest, Sends, rewrite_test
from stages.errors import InfrastructureError
from stages.swebench.lists import TestLists

MAX_PASSING_BEFORE = 200
"""Functions asked of those that passed before."""
CACHED_TASKS = 64
"""Tasks whose expected values are kept in this process."""
RerunTree = Literal["solution", "reference", "delivered"]
RerunTests = Callable[[trees.Changes, Sequence[str], RerunTree], TestOutcomes]
"""Run the tests with these node ids (all tests where the runner knows none) on a tree with these files written last."""
Answers = list[list[tuple[int, list[str]]]]
"""Of each test of a function, in order: number of the question, the value, and the expected one where it was sent."""


@dataclass(frozen=True)
class AnswerSheet:
    """What the tests of a task must answer: the relations and expected values of each function that is asked.

    `files` hold the withheld versions, and are absent where only expected values need them. `reasons`: function -> why
    it is not asked. `located`: test -> its functions. `written`: where no reference solution has shown that `files` ask
    for what the tests assert, the same tests as they are written, and nothing else of their files.
    """

    files: trees.Changes
    expected: Mapping[TestLocation, Answers]
    relations: Mapping[TestLocation, tuple[str, ...]]
    reasons: Mapping[TestLocation, str]
    located: Mapping[str, Sequence[TestLocation]]
    written: trees.Changes = field(default_factory=dict)

    @property
    def selected(self) -> list[str]:
        """Return the node ids of the tests that are asked."""
        return [function.node_id for function in self.expected]

    def faults(self, outcomes: TestOutcomes) -> dict[str, str]:
        """Return the tests whose answers are not right in a run of `files`, each with a reason."""
        wrong = self.wrong(outcomes)
        return {
            name: wrong[function]
            for name, functions in self.located.items()
            for function in functions
            if function in wrong
        }

    def wrong(self, outcomes: TestOutcomes) -> dict[TestLocation, str]:
        """Return the functions whose answers are not right in a run of `files`, each with a reason."""
        return {function: fault for function in self.expected if (fault := self._fault(function, outcomes))}

    def _fault(self, function: TestLocation, outcomes: TestOutcomes) -> str:
        node_answers, expected_answers = collect_answers(outcomes, function), self.expected[function]
        relations, fault = self.relations[function], ""
        if not passes(outcomes, function):
            return "it does not pass"
        if [[number for number, _ in node] for node in node_answers] != [
            [number for number, _ in node] for node in expected_answers
        ]:
            return "it does not come to the values that are asked for"
        for node, expected_node in zip(node_answers, expected_answers, strict=True):
            for (number, mine), (_, right) in zip(node, expected_node, strict=True):
                try:
                    if not values.holds(relations[number], mine[0], right[-1]):
                        relation = "" if relations[number] == "==" else f"{relations[number]} "
                        return (
                            f"got {values.format_value(mine[0])}, expected {relation}{values.format_value(right[-1])}"
                        )
                except values.Incomparable as error:
                    fault = f"{UNKNOWN} {error}"
        return fault


UNKNOWN = "what came cannot be compared, an object of type"
REVEALED = "expects only what stands in the tests that are left"
DELIVERED = "is shown to the agent, as all tests that have to pass: the expected values may have been copied"


class TaskQuestions:
    """The questions to the tests of one task.

    `files` are the original test files, `hidden` the paths of all files that are written for grading alone, `delivered`
    the Python files that the agent got. `reference`: whether there is a reference solution. `reasons`: test -> why it
    gives only a report, by the texts of the tests, and from the answer sheet on by its runs as well.
    """

    def __init__(
        self,
        files: trees.Changes,
        lists: TestLists,
        hidden: Collection[str],
        delivered: trees.Changes,
        *,
        reference: bool,
    ) -> None:
        self._tests, self._hidden, self._reference = TestFiles(files), hidden, reference
        names = dict.fromkeys((*lists.fail_to_pass, *lists.pass_to_pass))
        # By the files of the task, not by what a run reports: code under test may keep a test from being run.
        self._located = {name: find_functions(self._tests, name) for name in names}
        fixed = dict.fromkeys(function for name in lists.fail_to_pass for function in self._located[name])
        passing_before = dict.fromkeys(
            function for functions in self._located.values() for function in functions if function not in fixed
        )
        # A solution may break what passed before and forge only that; it cannot know which is asked.
        functions = [
            *fixed,
            *random.SystemRandom().sample([*passing_before], min(len(passing_before), MAX_PASSING_BEFORE)),
        ]
        self._rewritten, self._refused = rewrite_tests(self._tests, functions, fixed)
        # What passed before needs no copied values.
        self._delivered_names = (
            lists.fail_to_pass
            if _are_delivered([self._tests.functions[function] for function in fixed], delivered)
            else ()
        )
        self._lock = threading.Lock()
        self._sheet: AnswerSheet | None = None
        self.reasons = self._reasons(self._rewritten, self._refused)

    def sheet(self, rerun: RerunTests) -> AnswerSheet:
        """Return what the tests must answer, from runs on trees without an agent's code; it is made once.

        Exceptions of `rerun` pass through, and nothing is made then; `InfrastructureError` where two runs of the same
        came without a report.
        """
        with self._lock:
            if self._sheet is None:
                sheet = self._answer_sheet(_retry_lost_run(rerun))
                self._sheet, self.reasons = sheet, self._reasons(sheet.expected, sheet.reasons)
            return self._sheet

    def deciding(self, rerun: RerunTests) -> AnswerSheet | None:
        """Return the answer sheet where it decides the task, None where a test gives only a report."""
        sheet = self.sheet(rerun) if self._located and not self.reasons else None
        return None if self.reasons else sheet

    def _answer_sheet(self, rerun: RerunTests) -> AnswerSheet:
        tests, rewritten, reasons = self._tests, self._rewritten, dict(self._refused)
        if not rewritten:
            return AnswerSheet({}, {}, {}, reasons, self._located)
        run_kind: tuple[Sends, RerunTree] = ("open", "reference") if self._reference else ("expecting", "delivered")
        open_run = _run_version(tests, rewritten, rerun, *run_kind)
        expected, relations = {}, {}
        for function, made in rewritten.items():
            reason = "" if passes(open_run, function) else "does not pass in the run that tells what is expected"
            expected[function], relations[function] = collect_answers(open_run, function), made.relations
            for _, sent in (answer for node in expected[function] for answer in node):
                reason = reason or _incomparable_reason(sent)
            if not reason and not any(expected[function]):
                reason = "asks nothing in the run that tells what is expected"
            if any(len(node) >= MOST_ANSWERS for node in expected[function]):
                reason = "asks for more values than are sent"
            if reason:
                reasons[function] = reason
        askable = {function: test for function, test in rewritten.items() if function not in reasons}
        # What an expression comes to may stand there where its literals do not: 24 * 60 * 60 is 86400.
        remaining_text = module_text(_version_modules(tests, askable, "withheld"))
        reasons |= {function: REVEALED for function in askable if _are_revealed(expected[function], remaining_text)}
        askable = {function: test for function, test in askable.items() if function not in reasons}
        withheld = version_files(tests, askable)
        if not self._reference:
            reasons |= {function: "expects what is in a file" for function, test in askable.items() if test.reads_file}
            # No solution shows that the withheld versions are right: they must only be found.
            tried = _run_version(tests, askable, rerun, "withheld", "delivered") if askable else open_run
            reasons |= {
                function: "cannot run without its expected values"
                for function in askable
                if not _node_ids(tried, function)
            }
            expected_kept = {function: expected[function] for function in askable if function not in reasons}
            named = {
                name
                for module in _version_modules(tests, askable, "withheld").values()
                for name in mentioned_names(module)
            }
            other_paths = {
                path
                for path in tests.texts
                if path in self._hidden and _is_test(path) and PurePosixPath(path).stem not in named
            }
            files: trees.Changes = {**dict.fromkeys(other_paths - {*withheld}), **withheld}
            written = {**files, **version_files(tests, askable, "written")}
            return AnswerSheet(files, expected_kept, relations, reasons, self._located, written)
        selected = [function.node_id for function in askable]
        first = rerun(withheld, selected, "reference") if askable else open_run
        needed = {path for _, path in first.opened}
        expecting = opened_by_function(open_run) - opened_by_function(first)
        # Once more without the files that hold expected values, which no test may need then.
        # Code is loaded by whichever test needs it first, so that it may be missing in the second run by chance.
        data = {path for _, path in expecting if not path.endswith(".py")}
        absent = dict.fromkeys(({*self._hidden} | data) - needed - {*withheld})
        absent_for = {test for test, path in expecting if path in absent}
        reasons |= {
            function: "expects what is in a file that is read as input as well"
            for function, test in askable.items()
            if test.reads_file and function.node_id not in absent_for
        }
        # Once more without the tests that are left out, which may have set what a later one finds.
        last = first if not absent else None
        while True:
            expected_kept = {function: expected[function] for function in askable if function not in reasons}
            sheet = AnswerSheet({**absent, **withheld}, expected_kept, relations, reasons, self._located)
            if last is None or sheet.selected != selected:
                selected = sheet.selected
                last = rerun(sheet.files, selected, "reference") if selected else open_run
            odd = sheet.wrong(last)
            if not odd:
                return sheet
            reasons |= dict.fromkeys(odd, "gives other values, or cannot run, without its expected values")

    def _reasons(self, functions: Collection[TestLocation], unasked: Mapping[TestLocation, str]) -> dict[str, str]:
        reasons = {
            name: _report_reason(self._tests, functions, unasked, name, functions)
            for name, functions in self._located.items()
        }
        reasons |= {name: reasons[name] or DELIVERED for name in self._delivered_names}
        return {name: reason for name, reason in reasons.items() if reason}

    def are_forged(self, rerun: RerunTests) -> bool:
        """Return whether a solution that passes gives wrong values: for the same test, in each of two runs.

        Without a reference solution only if that test passes as it is written, where nothing else of its file runs: it
        may need what another test or another line has set. Exceptions as those of `sheet`.
        """
        sheet, run = self.sheet(rerun), _retry_lost_run(rerun)

        def wrong() -> set[TestLocation]:
            faults = sheet.wrong(run(sheet.files, sheet.selected, "solution"))
            return {function for function, fault in faults.items() if not fault.startswith(UNKNOWN)}

        forged = wrong() if sheet.selected else set[TestLocation]()
        if forged:  # a second time, since tests fail by chance
            forged &= wrong()
        if forged and not self._reference:
            alone = run(sheet.written, sheet.selected, "solution")
            forged = {function for function in forged if alone.tampered or passes(alone, function)}
        return bool(forged)


_question_cache: OrderedDict[Hashable, TaskQuestions] = OrderedDict()
_lock = threading.Lock()


def cached_questions(task: Hashable, make: Callable[[], TaskQuestions]) -> TaskQuestions:
    """Return the questions of a task, made where this process has not graded it lately."""
    # Outside of the lock, so that tests that are long to read block no other task; what was made first counts.
    questions = _question_cache.get(task) or make()
    with _lock:
        questions = _question_cache.setdefault(task, questions)
        _question_cache.move_to_end(task)
        while len(_question_cache) > CACHED_TASKS:
            _question_cache.popitem(last=False)
    return questions


def _are_delivered(functions: Sequence[FunctionNode], delivered: trees.Changes) -> bool:
    """Return whether the tree that the agent got holds these functions, in whichever files and classes."""
    heads = [f"def {function.name}(".encode() for function in functions]
    files: trees.Changes = {
        path: file for path, file in delivered.items() if file and any(head in file.data for head in heads)
    }
    dumps = {ast.dump(function) for function in TestFiles(files).functions.values()}
    return all(ast.dump(function) in dumps for function in functions)


def _retry_lost_run(rerun: RerunTests) -> RerunTests:
    """Return what runs tests again, once, where a run came without a report: a busy machine decides no grade."""

    def run(files: trees.Changes, selected: Sequence[str], tree: RerunTree) -> TestOutcomes:
        for _ in range(2):
            outcomes = rerun(files, selected, tree)
            if not outcomes.lost:
                return outcomes
        why = "ran out of time" if outcomes.timed_out else "ended without a report"
        raise InfrastructureError(
            f"The tests that are asked for their values {why}, twice, on the {tree} tree. Give them more time, or play "
            "fewer tasks at once."
        )

    return run


def find_functions(tests: TestFiles, name: str) -> list[TestLocation]:
    """Return the functions that a name stands for: one test, or all of a file or class."""
    function = tests.locate(name)
    test_id = (name.split() or [""])[0]
    return (
        [function]
        if function
        else [
            function
            for function in tests.functions
            if function.name.startswith("test") and is_selected_by(function.node_id, test_id)
        ]
    )


def _report_reason(
    tests: TestFiles,
    rewritten: Collection[TestLocation],
    unasked: Mapping[TestLocation, str],
    name: str,
    functions: Sequence[TestLocation],
) -> str:
    """Return why the pass of a name gives only a report, "" where all of its functions are asked."""
    if not functions:
        return "is in no test file that can be read"
    if tests.locate(name) is None and (more := _dynamic_tests_reason(tests.modules[functions[0].path])):
        return more
    refused = next((function for function in functions if function not in rewritten), None)
    reason = unasked.get(refused, "is not among those drawn") if refused else ""
    return f"{refused.name}: {reason}" if refused and len(functions) > 1 else reason


def _dynamic_tests_reason(module: ast.Module) -> str:
    """Return why a module may hold tests that are not written in it, "" where it cannot."""
    for node in ast.walk(module):
        if isinstance(node, ast.ClassDef):
            bases = [ast.unparse(base).rpartition(".")[2] for base in node.bases]
            if any(base != "TestCase" and not hasattr(builtins, base) for base in bases):
                return f"{node.name} may inherit tests"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] not in sys.stdlib_module_names:
            if any(alias.name.lower().startswith(("test", "*")) for alias in node.names):
                return "may import tests"
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("exec", "globals", "setattr"):
            return "may make tests"
    return ""


def opened_by_function(outcomes: TestOutcomes) -> set[tuple[str, str]]:
    """Return the files that tests opened, by the name of a test without its parameters."""
    return {(test.partition("[")[0], path) for test, path in outcomes.opened if test}


def _is_test(path: str) -> bool:
    name = PurePosixPath(path).name
    return name.startswith("test") or name.endswith("_test.py")


def _are_revealed(expected: Answers, text: str) -> bool:
    """Return whether a text tells all values that the answers of a function expect, but for the guessed."""
    sent = [answer[-1] for of_test in expected for _, answer in of_test]
    leaves = [part for text in sent for part in values.leaves(values.read(text, expected=True)) if part not in GUESSED]
    return bool(leaves) and all(any(reveal in text for reveal in value_texts(part)) for part in leaves)


def _incomparable_reason(sent: Sequence[str]) -> str:
    """Return why the values of one answer cannot be compared, "" where they can."""
    for index, text in enumerate(sent):
        try:
            values.read(text, expected=index == len(sent) - 1)
        except values.Incomparable as error:
            return f"compares an object of type {error}"
    return ""


def rewrite_tests(
    tests: TestFiles, functions: Sequence[TestLocation], fixed: Collection[TestLocation]
) -> tuple[dict[TestLocation, RewrittenTest], dict[TestLocation, str]]:
    """Return the versions of the functions that can be asked, and why others cannot; `fixed` have to come to pass."""
    rewritten: dict[TestLocation, RewrittenTest] = {}
    reasons: dict[TestLocation, str] = {}
    beside = {PurePosixPath(path).stem: module for path, module in tests.modules.items()}
    for function in functions:
        fixtures = {
            node.name: node
            for path, module in tests.modules.items()
            if PurePosixPath(path).name == "conftest.py"
            and PurePosixPath(function.path).is_relative_to(PurePosixPath(path).parent)
            for node in module.body
            if isinstance(node, FunctionNode)
        }
        try:
            rewritten[function] = rewrite_test(
                tests.modules[function.path], tests.owner(function), tests.functions[function], fixtures, beside
            )
        except NotAskable as error:
            reasons[function] = str(error)
    # What a test must not find may be kept for another one, or stand in what is left: as an argument, as in tests of a
    # function and its inverse, in a message or a name. Code that does not do its task can look it up there, however
    # short it is; such tests are left out as well, until nothing changes.
    while True:
        modules = _version_modules(tests, rewritten, "withheld")
        stored, remaining_text = {path: _stored_names(module) for path, module in modules.items()}, module_text(modules)
        unable = {
            function: f"holds the expected value in {min(names)}"
            for function, test in rewritten.items()
            if (names := test.absent_names & stored[function.path])
        } or {function: REVEALED for function, test in rewritten.items() if test.is_revealed_by(remaining_text)}
        if not unable:
            return rewritten, reasons
        reasons |= unable
        rewritten = {function: test for function, test in rewritten.items() if function not in unable}


def _stored_names(module: ast.Module) -> set[str]:
    return {
        node.id
        for statement in module.body
        for node in ast.walk(statement)
        if isinstance(node, ast.Name)
        if isinstance(node.ctx, ast.Store)
    }


def _version_modules(
    tests: TestFiles, rewritten: Mapping[TestLocation, RewrittenTest], version: Sends | Literal["written"]
) -> dict[str, ast.Module]:
    """Return the modules that hold one version of each function, and what that needs."""
    modules: dict[str, ast.Module] = {}
    for path in dict.fromkeys(function.path for function in rewritten):
        versions = {
            (*function.classes, function.name): tests.functions[function]
            if version == "written"
            else getattr(test, version)
            for function, test in rewritten.items()
            if function.path == path
        }
        modules[path] = prune_module(tests.modules[path], versions)
    names = {name for module in modules.values() for name in mentioned_names(module)}
    for path, module in tests.modules.items():
        if version in ("withheld", "written") and PurePosixPath(path).name == "conftest.py":
            modules[path] = prune_module(module, {}, names)
    return modules


def version_files(
    tests: TestFiles, rewritten: Mapping[TestLocation, RewrittenTest], version: Sends | Literal["written"] = "withheld"
) -> trees.Changes:
    """Return the files with one version of each function."""
    files: trees.Changes = {}
    for path, module in _version_modules(tests, rewritten, version).items():
        later = sum(
            isinstance(statement, ast.ImportFrom) and statement.module == "__future__" for statement in module.body
        )
        body = [*module.body[:later], *ast.parse(IMPORT).body, *module.body[later:]]
        files[path] = trees.TreeFile(ast.unparse(ast.Module(body, [])).encode("utf-8", "surrogateescape"))
    return files


def _run_version(
    tests: TestFiles, rewritten: Mapping[TestLocation, RewrittenTest], rerun: RerunTests, sends: Sends, tree: RerunTree
) -> TestOutcomes:
    return rerun(version_files(tests, rewritten, sends), [function.node_id for function in rewritten], tree)


def _node_ids(outcomes: TestOutcomes, function: TestLocation) -> list[str]:
    name = function.node_id
    return [node for node in outcomes.nodes if node.partition("[")[0] == name]


def passes(outcomes: TestOutcomes, function: TestLocation) -> bool:
    """Return whether there are tests of a function and all pass."""
    nodes = _node_ids(outcomes, function)
    return bool(nodes) and all(outcomes.nodes[node] in PASSING for node in nodes)


def collect_answers(outcomes: TestOutcomes, function: TestLocation) -> Answers:
    """Return the answers of the tests of a function, in the order in which they ran."""
    answers: dict[str, list[tuple[int, list[str]]]] = {node: [] for node in _node_ids(outcomes, function)}
    for node, number, sent in outcomes.answers:
        if node in answers and sent:
            answers[node].append((number, sent))
    return list(answers.values())
