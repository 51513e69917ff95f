"""Problems and recorded rollouts, read from a folder of the user; nothing of it ships with the program.

The folder's layout (all files gzipped JSON lines, source: github.com/wassname/vGROUT_pub @ c067218, data/):
teacher_pool/prompt_NNNN.jsonl.gz - rollouts with their prompt and labels
leetcode_problems*.jsonl.gz - reference solutions and real tests of some of these problems: rows of LeetCodeDataset,
    each with a `problem_id`; may be missing
leetcode_test_medhard.jsonl.gz - other problems, with real tests; may be missing while only the pool is used
substrate/prompt_NNNN.jsonl.gz - rollouts under several loopholes, without their prompt; may be missing
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from stages.envs.leetcode_rh import grading
from stages.envs.leetcode_rh.grading import Assertion
from stages.envs.task_table import read_rows
from stages.errors import BadInput
from stages.runs.records import Row

METHOD = re.compile(r"method of the class Solution called (\w+)")
EVALUATOR = re.compile(r"calling a function called (\w+)\(\)")
STARTER = re.compile(r"```python\n(.*?)```", re.DOTALL)
DEFAULT_EVALUATOR = "run_tests"


@dataclass(frozen=True)
class Problem:
    """A problem: its prompt, the method that solves it, and, where known, real tests and a solution that is right."""

    problem_id: int
    system: str
    prompt: str
    method: str
    tests: tuple[str, ...] = ()
    reference: str | None = None

    @cached_property
    def assertions(self) -> list[Assertion] | None:
        """The real tests as data; None where there are none, none that can be read, or the prompt contradicts one."""
        return grading.read(self.tests, self.parameters)

    @property
    def parameters(self) -> tuple[str, ...] | None:
        """The parameters of the signature that the prompt gives; None where it gives none, or one that varies."""
        for block in STARTER.findall(self.prompt):
            found = _parameters(block, self.method)
            if found is not None:
                return found
        return None


@dataclass(frozen=True)
class Rollout:
    """One recorded answer with its labels. `mode` names the loophole; a field is None where the row does not tell."""

    problem_id: int
    sample: int
    completion: str | None
    mode: str
    hacked: bool | None
    gt_pass: bool | None
    reward: float | None

    @property
    def name(self) -> str:
        """Problem and sample, by which a reader finds the row."""
        return f"problem {self.problem_id} sample {self.sample}"


def pool_problems(folder: Path) -> dict[int, Problem]:
    """The problems of the teacher pool by id, joined with their real tests where there are any."""
    known = {
        row["problem_id"]: row for path in sorted(folder.glob("leetcode_problems*.jsonl.gz")) for row in read_rows(path)
    }
    rows = (read_rows(path)[0] for path in _pool_files(folder))
    return {row["problem_id"]: _pool_problem(row, known.get(row["problem_id"])) for row in rows}


def medhard_problems(folder: Path) -> dict[int, Problem]:
    """The problems of leetcode_test_medhard by id."""
    return {row["id"]: _medhard_problem(row) for row in read_rows(folder / "leetcode_test_medhard.jsonl.gz")}


def rollouts(folder: Path) -> list[Rollout]:
    """Every recorded rollout, those of the substrate last."""
    others = sorted((folder / "substrate").glob("prompt_*.jsonl.gz"))
    return [rollout for path in [*_pool_files(folder), *others] for rollout in _rollouts(path)]


def _pool_files(folder: Path) -> list[Path]:
    files = sorted((folder / "teacher_pool").glob("prompt_*.jsonl.gz"))
    if not files:
        raise BadInput(
            f"{folder} holds no teacher_pool/prompt_*.jsonl.gz. Name the folder with --set env.options.path=FOLDER."
        )
    return files


def _rollouts(path: Path) -> Iterator[Rollout]:
    for index, row in enumerate(read_rows(path)):
        yield Rollout(
            row["problem_id"],
            row.get("sample_id", index),
            row.get("completion"),
            row.get("env_mode", DEFAULT_EVALUATOR),
            row.get("hacked"),
            row.get("gt_pass"),
            row.get("reward"),
        )


def _pool_problem(row: Row, known: Row | None) -> Problem:
    system, prompt = _messages(row["problem_messages"])
    tests, reference = ((known["test"],), known["completion"]) if known else ((), None)
    return Problem(row["problem_id"], system, prompt, _method(prompt, row["problem_id"]), tests, reference)


def _medhard_problem(row: Row) -> Problem:
    system, prompt = _messages(row["prompt"])
    method = row["func_name"].rpartition(".")[2]
    return Problem(row["id"], system, prompt, method, tuple(row["gt_answer"]), row["canonical_solution"])


def _messages(messages: list[Row]) -> tuple[str, str]:
    content = {message["role"]: message["content"] for message in messages}
    return content["system"], content["user"]


def _parameters(code: str, method: str) -> tuple[str, ...] | None:
    """Those of a method in starter code, whose bodies hold only a comment or nothing."""
    header = re.search(rf"def {re.escape(method)}\(.*?\)[^\n]*:[ \t]*$", code, re.DOTALL | re.MULTILINE)
    try:
        parsed = ast.parse(f"{header[0]} pass").body if header else []
    except (SyntaxError, ValueError):
        return None
    given = parsed[0].args if parsed and isinstance(parsed[0], ast.FunctionDef) else None
    if given is None or given.vararg or given.kwarg or given.defaults or given.kwonlyargs:
        return None
    return tuple(argument.arg for argument in (*given.posonlyargs, *given.args) if argument.arg != "self")


def _method(prompt: str, problem_id: int) -> str:
    found = METHOD.search(prompt)
    if found is None:
        raise BadInput(
            f"The prompt of problem {problem_id} does not say which method of the class Solution is to be written."
        )
    return found[1]
