"""Ask the tests of a task for their values, and compare these with the expected values.

A task is decided by values if every test that must pass asks for all values that it asserts (questions.py): the values
leave the sandbox and are compared here (values.py) with expected values that no sandbox with an agent's code receives.
That sandbox holds the withheld versions of the tests, and no file that only expected values need. It still holds values
that these tests compute at run time, and names that reveal them (docs/rewards.md). Any other task is decided by a
report: the process that ran the code under test reports itself that its tests pass. So is a task if every test that
must come to pass was delivered to the agent, which may have copied the expected values.

The expected values come from runs on trees without an agent's code, made once for a task: the open versions on the
reference solution, and the withheld versions, which must give the expected values there. Without a reference solution
only the expected values are computed, on the delivered tree. Nothing then shows which other files tests read, so that a
test with an expected value from a file gives a report.
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

from composer_stages.envs.repo import trees, values
from composer_stages.envs.repo.grading import TestOutcomes
from composer_stages.envs.repo.guest.composer_rules import PASSING, is_selected_by
from composer_stages.envs.repo.guest.composer_values import MOST_ANSWERS
from composer_stages.envs.repo.known_values import GUESSED, module_text, value_texts
from composer_stages.envs.repo.parsed_tests import FunctionNode, TestFiles, TestLocation, stored_names, top_functions
from composer_stages.envs.repo.pruning import mentioned_names, prune_module
from composer_stages.envs.repo.questions import IMPORT, NotAskable, RewrittenTest, Sends, rewrite_test
from composer_stages.errors import InfrastructureError
from composer_stages.swebench.lists import TestLists
from composer_stages.words import Sentence

MAX_PASSING_BEFORE = 200
"""Functions of `pass_to_pass` that are asked."""
CACHED_TASKS = 64
RerunTree = Literal["solution", "reference", "delivered"]
RerunTests = Callable[[trees.Changes, Sequence[str], RerunTree], TestOutcomes]
"""Runs the tests with these node ids (all tests if the runner knows none) on a tree with these files written last."""
Answers = list[list[tuple[int, list[str]]]]
"""For each test of a function, in order: number of the question, the value, and the expected one if it was sent."""
RewrittenTests = Mapping[TestLocation, RewrittenTest]


@dataclass(frozen=True)
class AnswerSheet:
    """The expected answers of a task's tests: relations and expected values of each function that is asked.

    `files` are the withheld versions, None for files that only expected values need. `reasons`: function -> why it is
    not asked. `located`: test -> its functions. `written`: without a reference solution, which would show that `files`
    ask for what the tests assert, the same tests as they are written, without the rest of their files.
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
        """Return the tests with a wrong answer in a run of `files`, each with a reason."""
        faults = self.function_faults(outcomes)
        return {name: faults[f] for name, functions in self.located.items() for f in functions if f in faults}

    def function_faults(self, outcomes: TestOutcomes) -> dict[TestLocation, Sentence]:
        """Return the functions with a wrong answer in a run of `files`, each with a reason."""
        return {function: fault for function in self.expected if (fault := self._fault(function, outcomes))}

    def _fault(self, function: TestLocation, outcomes: TestOutcomes) -> Sentence | None:
        answers, expected = collect_answers(outcomes, function), self.expected[function]
        if not passes(outcomes, function):
            return Sentence("envs.repo.does-not-pass")
        if [[number for number, _ in test] for test in answers] != [
            [number for number, _ in test] for test in expected
        ]:
            return Sentence("envs.repo.answers-missing")
        fault = None
        pairs = (pair for tests in zip(answers, expected, strict=True) for pair in zip(*tests, strict=True))
        for (number, (value, *_)), (_, (*_, expected_value)) in pairs:
            relation = self.relations[function][number]
            try:
                if not values.holds(relation, value, expected_value):
                    got, expected_text = values.format_value(value), values.format_value(expected_value)
                    return Sentence("envs.repo.wrong-answer", got=got, relation=relation, expected=expected_text)
            except values.Incomparable as error:
                fault = Sentence("envs.repo.incomparable-answer", type=str(error))
        return fault


class TaskQuestions:
    """The questions to the tests of one task.

    `files` are the original test files, `hidden` the paths of all files that are written for grading alone, `delivered`
    the Python files that the agent got. `reference`: whether there is a reference solution. `reasons`: test -> why it
    gives only a report, from the texts of the tests, and once there is an answer sheet from its runs as well.
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
        located = (function for functions in self._located.values() for function in functions)
        passing = [*dict.fromkeys(function for function in located if function not in fixed)]
        # A solution may break what passed before and forge only that; it cannot know which is asked.
        sample = random.SystemRandom().sample(passing, min(len(passing), MAX_PASSING_BEFORE))
        self._rewritten, self._refused = rewrite_tests(self._tests, [*fixed, *sample])
        # What passed before needs no copied values.
        all_delivered = _are_delivered([self._tests.functions[function] for function in fixed], delivered)
        self._delivered_names = lists.fail_to_pass if all_delivered else ()
        self._lock = threading.Lock()
        self._sheet: AnswerSheet | None = None
        self.reasons = self._reasons(self._rewritten, self._refused)

    def sheet(self, rerun: RerunTests) -> AnswerSheet:
        """Return the expected answers, made once from runs on trees without an agent's code.

        Exceptions of `rerun` pass through, and nothing is made then; `InfrastructureError` if the same run was lost
        twice.
        """
        with self._lock:
            if self._sheet is None:
                sheet = self._answer_sheet(_retry_lost_run(rerun))
                self._sheet, self.reasons = sheet, self._reasons(sheet.expected, sheet.reasons)
            return self._sheet

    def deciding(self, rerun: RerunTests) -> AnswerSheet | None:
        """Return the answer sheet if it decides the task, None if a test gives only a report."""
        sheet = self.sheet(rerun) if self._located and not self.reasons else None
        return None if self.reasons else sheet

    def _answer_sheet(self, rerun: RerunTests) -> AnswerSheet:
        tests, rewritten, reasons = self._tests, self._rewritten, dict(self._refused)
        if not rewritten:
            return AnswerSheet({}, {}, {}, reasons, self._located)
        open_version: tuple[Sends, RerunTree] = ("open", "reference") if self._reference else ("expecting", "delivered")
        open_run = _run_version(tests, rewritten, rerun, *open_version)
        expected = {function: collect_answers(open_run, function) for function in rewritten}
        relations = {function: test.relations for function, test in rewritten.items()}
        reasons |= {f: reason for f in rewritten if (reason := _unusable_reason(open_run, f, expected[f]))}
        askable = {function: test for function, test in rewritten.items() if function not in reasons}
        # The text may hold the value of an expression though not its literals: 24 * 60 * 60 is 86400.
        text = module_text(_version_modules(tests, askable, "withheld"))
        revealed = Sentence("envs.repo.expected-value-revealed")
        reasons |= {function: revealed for function in askable if _are_revealed(expected[function], text)}
        askable = {function: test for function, test in askable.items() if function not in reasons}
        withheld = version_files(tests, askable)
        if not self._reference:
            from_file = Sentence("envs.repo.expects-file")
            reasons |= {function: from_file for function, test in askable.items() if test.reads_file}
            # No solution shows that the withheld versions are right: they must only be collected.
            collected = _run_version(tests, askable, rerun, "withheld", "delivered") if askable else open_run
            not_collected = Sentence("envs.repo.needs-expected-values")
            reasons |= {function: not_collected for function in askable if not _node_ids(collected, function)}
            usable = {function: expected[function] for function in askable if function not in reasons}
            modules = _version_modules(tests, askable, "withheld").values()
            named = {name for module in modules for name in mentioned_names(module)}
            hidden_tests = (path for path in tests.texts if path in self._hidden and _is_test(path))
            unused = {path for path in hidden_tests if PurePosixPath(path).stem not in named} - {*withheld}
            files: trees.Changes = {**dict.fromkeys(unused), **withheld}
            written = {**files, **version_files(tests, askable, "written")}
            return AnswerSheet(files, usable, relations, reasons, self._located, written)
        selected = [function.node_id for function in askable]
        first = rerun(withheld, selected, "reference") if askable else open_run
        needed = {path for _, path in first.opened}
        expecting = _opened_by_function(open_run) - _opened_by_function(first)
        # Once more without the files that hold expected values, which no test may need then.
        # Code is loaded by whichever test needs it first, so that it may be missing in the second run by chance.
        data = {path for _, path in expecting if not path.endswith(".py")}
        absent = dict.fromkeys(({*self._hidden} | data) - needed - {*withheld})
        absent_for = {test for test, path in expecting if path in absent}
        reasons |= {
            function: Sentence("envs.repo.expects-input-file")
            for function, test in askable.items()
            if test.reads_file and function.node_id not in absent_for
        }
        # Once more without the excluded tests, on whose side effects a later one may depend.
        last = first if not absent else None
        while True:
            usable = {function: expected[function] for function in askable if function not in reasons}
            sheet = AnswerSheet({**absent, **withheld}, usable, relations, reasons, self._located)
            if last is None or sheet.selected != selected:
                selected = sheet.selected
                last = rerun(sheet.files, selected, "reference") if selected else open_run
            faults = sheet.function_faults(last)
            if not faults:
                return sheet
            reasons |= dict.fromkeys(faults, Sentence("envs.repo.depends-on-expected-values"))

    def _reasons(self, usable: Collection[TestLocation], refused: Mapping[TestLocation, str]) -> dict[str, str]:
        reasons = {name: _report_reason(self._tests, usable, refused, name, fs) for name, fs in self._located.items()}
        reasons |= {name: reasons[name] or Sentence("envs.repo.test-delivered") for name in self._delivered_names}
        return {name: reason for name, reason in reasons.items() if reason}

    def are_forged(self, rerun: RerunTests) -> bool:
        """Return whether a passing solution gives wrong values for the same test in each of two runs.

        Without a reference solution only if that test passes as it is written, without the rest of its file, whose side
        effects it may need. Exceptions as those of `sheet`.
        """
        sheet, run = self.sheet(rerun), _retry_lost_run(rerun)

        def wrong() -> set[TestLocation]:
            faults = sheet.function_faults(run(sheet.files, sheet.selected, "solution"))
            return {function for function, fault in faults.items() if fault.code != "envs.repo.incomparable-answer"}

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
    """Return the questions of a task, from the cache of this process or from `make`."""
    # Outside of the lock, so that slow parsing blocks no other task; the first result counts.
    questions = _question_cache.get(task) or make()
    with _lock:
        questions = _question_cache.setdefault(task, questions)
        _question_cache.move_to_end(task)
        while len(_question_cache) > CACHED_TASKS:
            _question_cache.popitem(last=False)
    return questions


def _are_delivered(functions: Sequence[FunctionNode], delivered: trees.Changes) -> bool:
    """Return whether the delivered tree holds these functions, in any file and class."""
    heads = [f"def {function.name}(".encode() for function in functions]
    files: trees.Changes = {
        path: file for path, file in delivered.items() if file and any(head in file.data for head in heads)
    }
    dumps = {ast.dump(function) for function in TestFiles(files).functions.values()}
    return all(ast.dump(function) in dumps for function in functions)


def _retry_lost_run(rerun: RerunTests) -> RerunTests:
    """Return a runner that repeats a lost run once: a busy machine decides no grade."""

    def run(files: trees.Changes, selected: Sequence[str], tree: RerunTree) -> TestOutcomes:
        for _ in range(2):
            outcomes = rerun(files, selected, tree)
            if not outcomes.lost:
                return outcomes
        raise InfrastructureError("envs.repo.no-report-twice", timed_out=outcomes.timed_out, tree=tree)

    return run


def find_functions(tests: TestFiles, name: str) -> list[TestLocation]:
    """Return the functions that a test name selects: one test, or all of a file or class."""
    if function := tests.locate(name):
        return [function]
    test_id = (name.split() or [""])[0]
    functions = (function for function in tests.functions if function.name.startswith("test"))
    return [function for function in functions if is_selected_by(function.node_id, test_id)]


def _report_reason(
    tests: TestFiles,
    usable: Collection[TestLocation],
    refused: Mapping[TestLocation, str],
    name: str,
    functions: Sequence[TestLocation],
) -> str:
    """Return why a test name gives only a report, "" if all of its functions are asked."""
    if not functions:
        return Sentence("envs.repo.no-test-file")
    if tests.locate(name) is None and (dynamic := _dynamic_tests_reason(tests.modules[functions[0].path])):
        return dynamic
    function = next((function for function in functions if function not in usable), None)
    if function is None:
        return ""
    reason = refused.get(function) or Sentence("envs.repo.not-drawn")
    if len(functions) == 1:
        return reason
    return Sentence("envs.repo.function-gives-report", function=function.name, reason=reason)


def _dynamic_tests_reason(module: ast.Module) -> Sentence | None:
    """Return why a module may hold tests that are not written in it, None if it cannot."""
    for node in ast.walk(module):
        if isinstance(node, ast.ClassDef):
            bases = [ast.unparse(base).rpartition(".")[2] for base in node.bases]
            if any(base != "TestCase" and not hasattr(builtins, base) for base in bases):
                return Sentence("envs.repo.may-inherit-tests", name=node.name)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] not in sys.stdlib_module_names:
            if any(alias.name.lower().startswith(("test", "*")) for alias in node.names):
                return Sentence("envs.repo.may-import-tests")
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("exec", "globals", "setattr"):
            return Sentence("envs.repo.may-generate-tests")
    return None


def _opened_by_function(outcomes: TestOutcomes) -> set[tuple[str, str]]:
    """Return the files that tests opened, by the name of a test without its parameters."""
    return {(test.partition("[")[0], path) for test, path in outcomes.opened if test}


def _is_test(path: str) -> bool:
    name = PurePosixPath(path).name
    return name.startswith("test") or name.endswith("_test.py")


def _unusable_reason(open_run: TestOutcomes, function: TestLocation, expected: Answers) -> Sentence | None:
    """Return why the answers of a run without an agent's code give no expected values, None if they do."""
    if any(len(test) >= MOST_ANSWERS for test in expected):
        return Sentence("envs.repo.too-many-answers")
    if not passes(open_run, function):
        return Sentence("envs.repo.open-run-fails")
    for _, sent in (answer for test in expected for answer in test):
        for index, text in enumerate(sent):
            try:
                values.read(text, expected=index == len(sent) - 1)
            except values.Incomparable as error:
                return Sentence("envs.repo.compares-object-type", type=str(error))
    return None if any(expected) else Sentence("envs.repo.open-run-without-answers")


def _are_revealed(expected: Answers, text: str) -> bool:
    """Return whether a text reveals all expected values of a function, except guessed ones."""
    sent = [values.read(answer[-1], expected=True) for test in expected for _, answer in test]
    leaves = [leaf for value in sent for leaf in values.leaves(value) if leaf not in GUESSED]
    return bool(leaves) and all(any(revealing in text for revealing in value_texts(leaf)) for leaf in leaves)


def rewrite_tests(
    tests: TestFiles, functions: Sequence[TestLocation]
) -> tuple[dict[TestLocation, RewrittenTest], dict[TestLocation, Sentence]]:
    """Return the versions of the functions that can be asked, and why the others cannot."""
    rewritten: dict[TestLocation, RewrittenTest] = {}
    reasons: dict[TestLocation, Sentence] = {}
    test_modules = {PurePosixPath(path).stem: module for path, module in tests.modules.items()}
    conftests = {path: module for path, module in tests.modules.items() if PurePosixPath(path).name == "conftest.py"}
    for function in functions:
        fixtures = {
            name: node
            for path, module in conftests.items()
            if PurePosixPath(function.path).is_relative_to(PurePosixPath(path).parent)
            for name, node in top_functions(module).items()
        }
        module, owner, node = tests.modules[function.path], tests.owner(function), tests.functions[function]
        try:
            rewritten[function] = rewrite_test(module, owner, node, fixtures, test_modules)
        except NotAskable as error:
            reasons[function] = error.reason
    # A value that is withheld from one test may remain for another: as an argument, as in tests of a function and its
    # inverse, in a message or a name. Code that does not do its task can look it up there, however short it is; such
    # tests are excluded as well, until nothing changes.
    while True:
        modules = _version_modules(tests, rewritten, "withheld")
        stored, text = {path: {*stored_names(module)} for path, module in modules.items()}, module_text(modules)
        excluded = {
            function: Sentence("envs.repo.holds-expected-value", name=min(names))
            for function, test in rewritten.items()
            if (names := test.absent_names & stored[function.path])
        }
        if not excluded:
            revealed = Sentence("envs.repo.expected-value-revealed")
            excluded = {function: revealed for function, test in rewritten.items() if test.is_revealed_by(text)}
        if not excluded:
            return rewritten, reasons
        reasons |= excluded
        rewritten = {function: test for function, test in rewritten.items() if function not in excluded}


def _version_modules(
    tests: TestFiles, rewritten: RewrittenTests, version: Sends | Literal["written"]
) -> dict[str, ast.Module]:
    """Return the modules with one version of each function, and the statements that these need."""
    versions: dict[str, dict[tuple[str, ...], FunctionNode]] = {}
    for function, test in rewritten.items():
        node = tests.functions[function] if version == "written" else getattr(test, version)
        versions.setdefault(function.path, {})[(*function.classes, function.name)] = node
    modules = {path: prune_module(tests.modules[path], nodes) for path, nodes in versions.items()}
    names = {name for module in modules.values() for name in mentioned_names(module)}
    for path, module in tests.modules.items():
        if version in ("withheld", "written") and PurePosixPath(path).name == "conftest.py":
            modules[path] = prune_module(module, {}, names)
    return modules


def version_files(
    tests: TestFiles, rewritten: RewrittenTests, version: Sends | Literal["written"] = "withheld"
) -> trees.Changes:
    """Return the files with one version of each function."""
    files: trees.Changes = {}
    for path, module in _version_modules(tests, rewritten, version).items():
        futures = [node for node in module.body if isinstance(node, ast.ImportFrom) and node.module == "__future__"]
        body = [*module.body[: len(futures)], *ast.parse(IMPORT).body, *module.body[len(futures) :]]
        files[path] = trees.TreeFile(ast.unparse(ast.Module(body, [])).encode("utf-8", "surrogateescape"))
    return files


def _run_version(
    tests: TestFiles, rewritten: RewrittenTests, rerun: RerunTests, version: Sends, tree: RerunTree
) -> TestOutcomes:
    return rerun(version_files(tests, rewritten, version), [function.node_id for function in rewritten], tree)


def _node_ids(outcomes: TestOutcomes, function: TestLocation) -> list[str]:
    return [node_id for node_id in outcomes.nodes if node_id.partition("[")[0] == function.node_id]


def passes(outcomes: TestOutcomes, function: TestLocation) -> bool:
    """Return whether a function has tests and all of them pass."""
    node_ids = _node_ids(outcomes, function)
    return bool(node_ids) and all(outcomes.nodes[node_id] in PASSING for node_id in node_ids)


def collect_answers(outcomes: TestOutcomes, function: TestLocation) -> Answers:
    """Return the answers of the tests of a function, in the order in which they ran."""
    answers: dict[str, list[tuple[int, list[str]]]] = {node_id: [] for node_id in _node_ids(outcomes, function)}
    for node_id, number, sent in outcomes.answers:
        if node_id in answers and sent:
            answers[node_id].append((number, sent))
    return list(answers.values())
