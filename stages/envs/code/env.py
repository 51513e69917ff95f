"""The environment `code`: write one function; hidden assertions on what it returns decide.

In order: the code in an answer, what a program returns, the environment.
"""

import ast
import hashlib
import random
import re
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import orjson

from composer_stages.envs.base import Grade, Observation, Split, Task, Work
from composer_stages.envs.bash import elide
from composer_stages.envs.code.assertions import (
    RETURNED,
    RETURNS,
    CallAssertion,
    canonical_text,
    make_comparisons,
    restore_value,
)
from composer_stages.envs.code.rows import INSTRUCTION, CodeProblem, CodeProblems, assertions, load
from composer_stages.envs.task_table import TooManyTasks
from composer_stages.errors import InfrastructureError, UsageError
from composer_stages.json_text import exact, restored
from composer_stages.messages import Message, answer_text
from composer_stages.runs import store
from composer_stages.sandbox import Answer, Answers, Call, Limits, judge
from composer_stages.terms import SAMPLING_UNITS, Ground
from composer_stages.words import Sentence

LIMITS = Limits(wall_s=12.0, cpu_s=4, memory_mb=512, processes=32, file_mb=1, disk_mb=8, output_bytes=1 << 22)
"""Of all calls of one program. Processor time is the tighter limit: it does not depend on how busy the machine is."""
MBPP = Path(__file__).parent / "mbpp.jsonl.gz"
"""All 974 problems as published (google-research/google-research, mbpp/mbpp.jsonl; Austin et al. 2021, CC BY 4.0)."""
LONGEST_VALUE = 200
"""Characters of a returned value in an observation."""
MOST_NAMED = 5
"""Problems that are left out and named."""
BLOCK = re.compile(r"```[ \t]*(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL | re.IGNORECASE)
FUTURE = re.compile(r"^from __future__ import .*$", re.MULTILINE)


def find_code(text: str, function: str) -> str | None:
    """Return the first code block of an answer that defines a function, else the text where it is such a program.

    The last block may lack its end. None where there is none.
    """
    text = answer_text(text)
    return next((code for code in [*BLOCK.findall(text), text] if _defines(code, function)), None)


def _defines(code: str, function: str) -> bool:
    # What the compiler refuses, with NULs and bottomless nesting, is no program.
    with warnings.catch_warnings(action="ignore"), suppress(SyntaxError, ValueError, RecursionError, MemoryError):
        for node in ast.parse(code).body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == function:
                return True
            if isinstance(node, ast.Assign) and any(getattr(target, "id", "") == function for target in node.targets):
                return True
    return False


def build_program(before: str, code: str, function: str) -> str:
    """Return the program to execute: the code that the task gives, the answer's code, and the conversion of results."""
    futures = "\n".join(FUTURE.findall(code))  # have to stand first
    return "\n".join([futures, before, FUTURE.sub("", code), RETURNS.format(function=function)])


@dataclass(frozen=True, eq=False)
class Tests:
    """The assertions of a problem: those that the agent can read, and all that decide."""

    visible: Sequence[CallAssertion]
    deciding: Sequence[CallAssertion]

    @property
    def arguments(self) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        """Return the arguments of every call, in order."""
        return [arguments for assertion in (*self.visible, *self.deciding) for arguments in assertion.arguments]


@dataclass(frozen=True)
class ProgramVerdict:
    """The verdict on a program: which visible and deciding assertions hold, and the first visible one that fails.

    failure: None where the visible ones hold.
    """

    visible: Sequence[bool]
    deciding: Sequence[bool]
    failure: str | None


@lru_cache(maxsize=4096)
def run_calls(kind: str, source: str, tests: Tests) -> Answers:
    """Run every call of the tests on the program in a sandbox; InfrastructureError where the sandbox fails."""
    return judge(kind, [Call(source.encode(errors="replace"), RETURNED, tests.arguments)], LIMITS)[0]


@lru_cache(maxsize=1024)
def load_tests(kind: str, data: bytes) -> Tests:
    """Return the tests of a problem, given as the JSON of its task's data.

    Where a solution gives the expected values, it runs here, in a sandbox of its own. Raises InfrastructureError where
    it fails.
    """
    problem = _problem_of(orjson.loads(data))
    deciding: Sequence[CallAssertion] = assertions(problem.test, problem.function)
    if problem.inputs:
        questions = make_comparisons(problem.function, problem.inputs, [None] * len(problem.inputs), problem.tolerance)
        source = build_program(problem.before, problem.solution, problem.function)
        results = run_calls(kind, source, Tests((), questions))
        for values, answer in zip(problem.inputs, results, strict=True):
            if answer.error is not None:
                raise InfrastructureError(
                    "envs.code.solution-fails",
                    problem_id=problem.problem_id,
                    error=answer.error,
                    arguments=values,
                )
        expected = [restore_value(answer.value) for answer in results]
        deciding = make_comparisons(problem.function, problem.inputs, expected, problem.tolerance)
    return Tests(assertions(problem.shown, problem.function), deciding)


def _problem_of(data: Mapping[str, Any]) -> CodeProblem:
    return CodeProblem(**{**data, "inputs": tuple(map(tuple, restored(data["inputs"])))}, task="")


def judge_answers(tests: Tests, answers: Sequence[Answer]) -> ProgramVerdict:
    """Decide every assertion from the results of its calls."""
    following, results, failure = iter(answers), [], None
    for number, assertion in enumerate((*tests.visible, *tests.deciding)):
        call_answers = [next(following) for _ in assertion.calls]
        results.append(assertion.holds(call_answers))
        if number < len(tests.visible) and failure is None and not results[-1]:
            failure = f"{assertion} fails: {'; '.join(map(_describe_answer, assertion.calls, call_answers))}."
    return ProgramVerdict(results[: len(tests.visible)], results[len(tests.visible) :], failure)


def _describe_answer(call: ast.Call, answer: Answer) -> str:
    """Return in words how a call ended."""
    ends = {None: "returns", "timeout": "takes too long", "crash": "ends the process"}
    value = elide(canonical_text(restore_value(answer.value)), LONGEST_VALUE)[0] if answer.error is None else ""
    return f"{ast.unparse(call)} {ends.get(answer.error, f'raises {answer.error}')} {value}".rstrip()


class CodeEnv:
    """Implements Environment, ComparesOutcomes, HasSolutions, HasSize and LeavesOut.

    `path`: a file of JSON lines, or a data set of the hub (`rows` lists the formats and the splits), by default MBPP;
    `eval_path`: another one for the split eval. `answers`: after a wrong answer that is not the last, the agent is told
    which shown assertion fails. An answer with which they hold ends the rollout.
    """

    name = "code"
    ground: Ground = "values"
    text_actions = True
    sampling_unit = SAMPLING_UNITS["code"]

    def __init__(self, sandbox: str = "bubblewrap", path: str = "", eval_path: str = "", answers: int = 1) -> None:
        if type(answers) is not int or answers < 1:
            raise UsageError("envs.code.answers-not-a-number", answers=answers)
        self.sandbox, self._path, self._eval_path, self.answers = sandbox, path or str(MBPP), eval_path, answers
        self._source: str | None = None

    @staticmethod
    def content(path: str = "", eval_path: str = "", **options: Any) -> str | None:
        """Return a digest of the files, which a run's fingerprint contains: edited ones are other problems."""
        del options
        names = [path or str(MBPP), *([eval_path] if eval_path else [])]
        files = [file for name in names if (file := Path(name).expanduser()).is_file()]
        return store.digest([store.file_sha256(file) for file in files]) if files else None

    def size(self, split: Split) -> int:
        """Return the number of problems of a split."""
        return len(self._problems(split).usable)

    def left_out(self, split: Split) -> str:
        """Return in a sentence how many problems of a split are left out, and why; an empty text for none."""
        left_out = self._problems(split).left_out
        if not left_out:
            return ""
        named = [f"{name} ({reason})" for name, reason in list(left_out.items())[:MOST_NAMED]]
        more = [f"{len(left_out) - MOST_NAMED:,} more"] if len(left_out) > MOST_NAMED else []
        return Sentence(
            "envs.code.problems-left-out",
            num_left_out=len(left_out),
            num_problems=self.size(split) + len(left_out),
            problems=[*named, *more],
        )

    def _problems(self, split: Split) -> CodeProblems:
        return load(split, self._path, self._eval_path)

    def tasks(self, split: Split, count: int, seed: int) -> list[Task]:
        """Return the first `count` problems of a split in an order drawn from the seed."""
        problems = sorted(self._problems(split).usable, key=lambda problem: problem.problem_id)
        if count > len(problems):
            raise TooManyTasks(
                "envs.code.too-many-problems",
                most=len(problems),
                path=self._path,
                split=split,
                count=count,
                left_out=self.left_out(split),
            )
        random.Random(f"{self.name}/{split}/{seed}").shuffle(problems)  # noqa: S311 - draws data, no secret
        return [self._task(problem, split) for problem in problems[:count]]

    def _task(self, problem: CodeProblem, split: Split) -> Task:
        data = asdict(problem) | {"inputs": exact([[*values] for values in problem.inputs])}
        task_id, prompt = f"{self.name}-{problem.problem_id}", f"{data.pop('task')}\n{INSTRUCTION}"
        return Task(task_id, self.name, split, problem.problem_id, prompt, data)

    def reset(self, task: Task) -> list[Message]:
        """Return the problem as the message of the user."""
        self._problem, self._data = _problem_of(task.data), orjson.dumps(dict(task.data))
        self._source, self._given, self._well_formed = None, 0, True
        return [{"role": "user", "content": task.prompt}]

    def step(self, text: str) -> Observation:
        """Execute an answer; the observation names the first visible assertion that fails, and no hidden one."""
        self._given += 1
        last = "answered" if self._given == self.answers else None
        code = find_code(text, self._problem.function)
        if code is None:
            self._source, self._well_formed = None, False
            error = Sentence("envs.code.no-function-in-answer", function=self._problem.function)
            return Observation(error, parse_error=error, stop=last)
        self._source = build_program(self._problem.before, code, self._problem.function)
        failure = self._verdict(self._source).failure
        return Observation(failure or "", stop="answered" if failure is None else last)

    def _verdict(self, source: str) -> ProgramVerdict:
        tests = load_tests(self.sandbox, self._data)
        return judge_answers(tests, run_calls(self.sandbox, source, tests))

    def grade(self) -> Grade:
        """Grade the last answer: 1 where all deciding assertions hold; null where the sandbox fails."""
        protocol_ok = self._well_formed and self._given > 0
        if self._source is None:
            return Grade(0.0, False, False if self._problem.shown else None, protocol_ok=False)
        try:
            verdict = self._verdict(self._source)
        except (InfrastructureError, OSError) as error:
            return Grade(reward=None, error_type=type(error).__name__, error=str(error))
        passed = all(verdict.deciding)
        metrics = {"assertions_passed": sum(verdict.deciding) / len(verdict.deciding)}
        visible = all(verdict.visible) if verdict.visible else None
        return Grade(float(passed), passed, visible, protocol_ok=protocol_ok, work=Work(metrics=metrics))

    def outcome(self, observation: Observation) -> str:
        """Digest the results of the last answer for every call: equal behaviour is an equal action."""
        tests = load_tests(self.sandbox, self._data)
        results = run_calls(self.sandbox, self._source, tests) if self._source is not None else ()
        facts = [observation.stop, *(answer.error or canonical_text(restore_value(answer.value)) for answer in results)]
        return hashlib.sha256(orjson.dumps(facts)).hexdigest()

    def solution(self) -> list[str]:
        """Return the solution of the problem's row in a code block."""
        if not self._problem.solution:
            raise InfrastructureError("envs.code.no-solution", problem_id=self._problem.problem_id)
        return [f"```python\n{self._problem.solution.strip()}\n```"]

    def close(self) -> None:
        """Forget the answer; the environment holds no resources."""
        self._source = None
