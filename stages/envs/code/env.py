"""The environment `code`: write one function; hidden assertions on what it returns decide.

In order: the tests of a problem, what an agent is told, the environment.
"""

import hashlib
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import orjson

from composer_stages.envs.base import Grade, Observation, Split, Task, Work
from composer_stages.envs.bash import elide
from composer_stages.envs.code.rows import INSTRUCTION, MBPP, CodeProblem, CodeProblems, load
from composer_stages.envs.code.testing import (
    PROGRAMS,
    SLOW,
    AssertionOutcome,
    CannotAsk,
    Played,
    Tests,
    build_program,
    play,
    prepare,
)
from composer_stages.envs.programs import find_error, find_program
from composer_stages.envs.task_table import TooManyTasks
from composer_stages.errors import InfrastructureError, UsageError
from composer_stages.json_text import exact, restored
from composer_stages.messages import Message
from composer_stages.runs import store
from composer_stages.sandbox import Answer
from composer_stages.sandbox.equality import formatted
from composer_stages.sandbox.guest.values import decoded
from composer_stages.terms import ENVIRONMENTS, Ground
from composer_stages.words import Sentence

LONGEST_VALUE = 200
"""Characters of a returned value in an observation."""
MOST_NAMED = 5
"""Problems that are left out and named."""


@lru_cache(maxsize=1024)
def load_tests(kind: str, data: bytes) -> Tests:
    """Return the tests of a problem, given as the JSON of its task's data, with their calls.

    The solution, where there is one, runs here, in a sandbox of its own. Raises InfrastructureError where it fails.
    """
    problem = _problem_of(orjson.loads(data))
    tests = Tests(problem.before, problem.shown, problem.test, problem.function)
    try:
        if not problem.inputs:
            return prepare(kind, tests, problem.solution)
        of_inputs = replace(tests, deciding=PROGRAMS["evalplus"].format(function=problem.function), limits=SLOW)
        variables = {"inputs": problem.inputs, "results": [None] * len(problem.inputs), "atol": problem.tolerance}
        outcome = play(
            kind, build_program(problem.before, problem.solution, problem.function), replace(of_inputs, given=variables)
        )
        variables["results"] = [answer.value for answer in outcome.answers[1]]
        return prepare(kind, replace(of_inputs, given=variables), problem.solution)
    except CannotAsk as error:
        raise InfrastructureError("envs.code.solution-fails", problem_id=problem.problem_id, error=error) from None


_play = lru_cache(maxsize=1024)(play)


def _problem_of(data: Mapping[str, Any]) -> CodeProblem:
    return CodeProblem(**{**data, "inputs": tuple(map(tuple, restored(data["inputs"])))}, task="")


def describe_failure(function: str, outcomes: Sequence[AssertionOutcome]) -> str | None:
    """Return the first assertion that fails, and how its calls ended; None where all hold."""
    for outcome in outcomes:
        if not outcome.holds:
            calls = [f"{function}{_describe_call(*call)}" for call in outcome.calls]
            return f"{outcome.text} fails{': ' * bool(calls)}{'; '.join(calls)}."
    return None


def _describe_call(call: str, answer: Answer) -> str:
    """Return the arguments of a call, and in words how it ended."""
    positional, named = decoded(json.loads(call))
    arguments = [*map(formatted, positional), *(f"{name}={formatted(value)}" for name, value in named.items())]
    ends = {None: "returns", "timeout": "takes too long", "crash": "ends the process"}
    value = elide(canonical_text(answer.value), LONGEST_VALUE)[0] if answer.error is None else ""
    return f"({', '.join(arguments)}) {ends.get(answer.error, f'raises {answer.error}')} {value}".rstrip()


def canonical_text(value: Any) -> str:
    """Return a canonical text of a value: sets and dictionaries are sorted, so equal values are equal texts."""
    if isinstance(value, dict):
        return (
            f"{{{', '.join(sorted(f'{canonical_text(key)}: {canonical_text(item)}' for key, item in value.items()))}}}"
        )
    if isinstance(value, set | frozenset) and value:
        return f"{{{', '.join(sorted(map(canonical_text, value)))}}}"
    if type(value) in (list, tuple):
        items = ", ".join(map(canonical_text, value))
        return f"[{items}]" if type(value) is list else f"({items}{',' if len(value) == 1 else ''})"
    return formatted(value)


class CodeEnv:
    """Implements Environment, ComparesOutcomes, HasSolutions, HasSize and LeavesOut.

    `path`: a file of JSON lines or Parquet, or a data set of the hub (`rows` lists the formats and the splits), by
    default MBPP; `eval_path`: another one for the split eval. `answers`: after a wrong answer that is not the last, the
    agent is told which shown assertion fails. An answer with which they hold ends the rollout.
    """

    name = "code"
    ground: Ground = "values"
    text_actions = True
    sampling_unit = ENVIRONMENTS["code"].unit

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
        function = self._problem.function.partition("(")[0]  # the class of a method
        code = find_program(text, function)
        if code is None:
            self._source, self._well_formed = None, False
            if reason := find_error(text, function):
                error = Sentence("envs.code.code-not-python", function=function, reason=reason)
            else:
                error = Sentence("envs.code.no-function-in-answer", function=function)
            return Observation(error, parse_error=error, stop=last)
        self._source = build_program(self._problem.before, code, self._problem.function)
        failure = describe_failure(self._problem.function, self._played(self._source).shown)
        return Observation(failure or "", stop="answered" if failure is None else last)

    def _played(self, source: str) -> Played:
        return _play(self.sandbox, source, load_tests(self.sandbox, self._data))

    def grade(self) -> Grade:
        """Grade the last answer: 1 where all deciding assertions hold; null where the sandbox fails."""
        protocol_ok = self._well_formed and self._given > 0
        if self._source is None:
            return Grade(0.0, False, False if self._problem.shown else None, protocol_ok=False)
        try:
            test_outcome = self._played(self._source)
        except (InfrastructureError, OSError) as error:
            return Grade(reward=None, error_type=type(error).__name__, error=str(error))
        holds = [outcome.holds for outcome in test_outcome.deciding]
        visible = all(outcome.holds for outcome in test_outcome.shown) if test_outcome.shown else None
        passed = bool(holds) and all(holds)  # a loop over an empty result asserts nothing
        work = Work(metrics={"assertions_passed": sum(holds) / max(1, len(holds))})
        return Grade(float(passed), passed, visible, protocol_ok=protocol_ok, work=work)

    def outcome(self, observation: Observation) -> str:
        """Digest the results of the last answer for every call: equal behaviour is an equal action."""
        answers = self._played(self._source).answers if self._source is not None else ()
        facts = [
            observation.stop,
            *(answer.error or canonical_text(answer.value) for part in answers for answer in part),
        ]
        return hashlib.sha256(orjson.dumps(facts)).hexdigest()

    def solution(self) -> list[str]:
        """Return the solution of the problem's row in a code block."""
        if not self._problem.solution:
            raise InfrastructureError("envs.code.no-solution", problem_id=self._problem.problem_id)
        return [f"```python\n{self._problem.solution.strip()}\n```"]

    def close(self) -> None:
        """Forget the answer; the environment holds no resources."""
        self._source = None
