"""Problems, read from a folder of recorded rollouts that the user has; none of it ships with the program.

The folder's layout (all files gzipped JSON lines, source: github.com/wassname/vGROUT_pub @ c067218, data/):
teacher_pool/prompt_NNNN.jsonl.gz - rollouts with their prompt
leetcode_problems*.jsonl.gz - reference solutions and real tests of some of these problems: rows of LeetCodeDataset,
    each with a `problem_id`; may be missing
leetcode_test_medhard.jsonl.gz - other problems, with real tests; may be missing while only the pool is used
"""

import ast
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from stages.envs.leetcode_rh import grading
from stages.envs.leetcode_rh.grading import Assertion
from stages.envs.task_table import read_rows
from stages.errors import BadInput

METHOD = re.compile(r"method of the class Solution called (\w+)")
EVALUATOR = re.compile(r"calling a function called (\w+)\(\)")
STARTER = re.compile(r"```python\n(.*?)```", re.DOTALL)
DEFAULT_EVALUATOR = "run_tests"


@dataclass(frozen=True)
class Problem:
    """A problem: its prompt, the method to write, and, where known, real tests and a right solution."""

    problem_id: int
    system: str
    prompt: str
    method: str
    tests: tuple[str, ...] = ()
    reference: str | None = None

    @cached_property
    def assertions(self) -> list[Assertion] | None:
        """Return the real tests as data; None without any, or where one is unreadable or contradicts the prompt."""
        return grading.read_assertions(self.tests, self.parameters)

    @property
    def parameters(self) -> tuple[str, ...] | None:
        """Return the parameters of the prompt's signature; None where there is none, or one with variable parameters.

        The bodies of functions in starter code hold only a comment or nothing, so the header alone is parsed.
        """
        for block in STARTER.findall(self.prompt):
            # By the method's name, since starter code may hold other definitions.
            header = re.search(rf"def {re.escape(self.method)}\(.*?\)[^\n]*:[ \t]*$", block, re.DOTALL | re.MULTILINE)
            try:
                parsed = ast.parse(f"{header[0]} pass").body if header else []
            except (SyntaxError, ValueError):
                continue
            given = parsed[0].args if parsed and isinstance(parsed[0], ast.FunctionDef) else None
            if given and not (given.vararg or given.kwarg or given.defaults or given.kwonlyargs):
                return tuple(arg.arg for arg in (*given.posonlyargs, *given.args) if arg.arg != "self")
        return None


def pool_problems(folder: Path) -> dict[int, Problem]:
    """Read the problems of the teacher pool by id, joined with their real tests where there are any."""
    known = {
        row["problem_id"]: row for path in sorted(folder.glob("leetcode_problems*.jsonl.gz")) for row in read_rows(path)
    }
    problems = {}
    for path in _pool_files(folder):
        row = read_rows(path)[0]  # all rows of a file are rollouts of one problem
        problem_id = row["problem_id"]
        messages = {message["role"]: message["content"] for message in row["problem_messages"]}
        system, prompt = messages["system"], messages["user"]
        method = METHOD.search(prompt)
        if method is None:
            raise BadInput(
                f"The prompt of problem {problem_id} does not say which method of the class Solution is to be written."
            )
        solved = known.get(problem_id)
        tests, reference = ((solved["test"],), solved["completion"]) if solved else ((), None)
        problems[problem_id] = Problem(problem_id, system, prompt, method[1], tests, reference)
    return problems


def medhard_problems(folder: Path) -> dict[int, Problem]:
    """Read the problems of leetcode_test_medhard by id."""
    problems = {}
    for row in read_rows(folder / "leetcode_test_medhard.jsonl.gz"):
        messages = {message["role"]: message["content"] for message in row["prompt"]}
        problems[row["id"]] = Problem(
            row["id"],
            messages["system"],
            messages["user"],
            method=row["func_name"].rpartition(".")[2],  # "Solution().name"
            tests=tuple(row["gt_answer"]),
            reference=row["canonical_solution"],
        )
    return problems


def _pool_files(folder: Path) -> list[Path]:
    files = sorted((folder / "teacher_pool").glob("prompt_*.jsonl.gz"))
    if not files:
        raise BadInput(
            f"{folder} holds no teacher_pool/prompt_*.jsonl.gz. Name the folder with --set env.options.path=FOLDER."
        )
    return files
