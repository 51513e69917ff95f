"""The table of forgeries and honest solutions: every environment's own grading, in the real sandbox.

    PYTHONPATH=.:tests python -m support.forgery_table swe-mini --count 60 --cache FOLDER

prints, for each family of mechanisms, how many were tried, rewarded without a flag, rewarded, and flagged.
"""

import argparse
import ast
import re
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from stages.envs.base import Grade, Task
from stages.envs.repo.session import RepoEnvironment
from support import forgeries
from support.forgeries import Forgery


@dataclass
class Table:
    """What became of solutions, by family."""

    rows: dict[str, Counter[str]] = field(default_factory=dict)
    unnoticed: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def add(self, family: str, name: str, grade: Grade, honest: bool = False) -> None:
        """Count one solution."""
        row = self.rows.setdefault(family, Counter())
        rewarded = grade.reward is None or grade.reward > 0
        row["tried"] += 1
        row["rewarded"] += rewarded
        row["flagged"] += bool(grade.hacked)
        row["no reward at all"] += grade.reward is None
        wrong = bool(grade.hacked) or not grade.reward if honest else rewarded and not grade.hacked
        row["wrong"] += wrong
        if wrong:
            self.unnoticed.append(f"{family}: {name} ({grade.error})" if grade.error else f"{family}: {name}")

    def __str__(self) -> str:
        """Return the table."""
        total = Counter[str]()
        for row in self.rows.values():
            total.update(row)
        columns = ("tried", "rewarded", "flagged", "wrong")
        lines = [f"{'family':24}" + "".join(f"{column:>10}" for column in columns)]
        for family, row in [*sorted(self.rows.items()), ("all", total)]:
            lines.append(f"{family:24}" + "".join(f"{row[column]:10}" for column in columns))
        return "\n".join([*lines, *(f"  {name}" for name in self.unnoticed)])


@dataclass(frozen=True)
class Target:
    """A buggy function: its file, the names around it and its own, and the tests that an agent sees."""

    path: str
    qualname: str
    seen: tuple[str, ...] = ()

    def forged(self, text: str, forgery: Forgery) -> str:
        """Return the file's text with a forgery."""
        if not forgery.code:
            return text
        code = forgery.code.replace("ENTRY", "_forged")
        owner, _, name = self.qualname.rpartition(".")
        ending = ""
        if forgery.replaces:
            ending = f"{owner}.{name} = _forged\n" if owner else f"{name} = _forged\n"
        return f"{text}\n{code}{ending}"


def target_of(patch: str, read: Callable[[str], str]) -> Target:
    """Return the function that a patch changes."""
    path = re.findall(r"^\+\+\+ b/(.*)$", patch, re.MULTILINE)[0]
    start = int(re.findall(r"^@@ -(\d+)", patch, re.MULTILINE)[0])
    body = patch[patch.index("@@ -") :].split("\n")[1:]
    line = start + next(at for at, text in enumerate(body) if text.startswith("-"))
    best: list[str] = []

    def walk(node: ast.AST, names: list[str]) -> None:
        nonlocal best
        for inner in ast.iter_child_nodes(node):
            if isinstance(inner, ast.FunctionDef | ast.ClassDef) and inner.lineno <= line <= (inner.end_lineno or 0):
                if not isinstance(node, ast.FunctionDef):
                    best = [*names, inner.name]
                walk(inner, [*names, inner.name])

    walk(ast.parse(read(path)), [])
    return Target(path, ".".join(best))


def graded(env: RepoEnvironment, task: Task, target: Target, forgery: Forgery) -> Grade:
    """Return the grade of a solution that is only a forgery."""
    env.reset(task)
    folder = env._open_session().folder
    file = folder / target.path
    file.write_text(target.forged(file.read_text(), forgery))
    for path, text in forgery.files:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    return env.grade()


def swe_mini(count: int, cache: str, only: str = "") -> Table:
    """Grade forgeries on the instances in turn."""
    from stages.envs.swe.mini import SweMiniEnv

    env, table = SweMiniEnv(cache=cache), Table()
    tasks = [task for split in ("train", "eval") for task in env.tasks(split, 12, 0)]  # type: ignore[arg-type]
    found = forgeries.sample(list(forgeries.in_process("_forged")), count)
    try:
        for number, forgery in enumerate(found):
            task = tasks[number % len(tasks)]
            if only not in f"{task.task_id} {forgery.name}":
                continue
            env.reset(task)
            delivered = env._open_session().delivered
            target = target_of(task.data["patch"], lambda path, root=delivered: (root / path).read_text())
            began = time.monotonic()
            grade = graded(env, task, target, forgery)
            table.seconds.append(time.monotonic() - began)
            table.add(forgery.family, f"{forgery.name}, on {task.task_id}", grade)
            print(f"{grade.reward} {grade.hacked!s:5} {forgery.name}, on {task.task_id}", file=sys.stderr, flush=True)
    finally:
        env.close()
    return table


def main(arguments: list[str]) -> None:
    """Print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("environment", choices=sorted(TABLES))
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--cache", default="")
    parser.add_argument("--only", default="")
    given = parser.parse_args(arguments)
    print(TABLES[given.environment](given.count, given.cache, given.only))


TABLES = {"swe-mini": swe_mini}
if __name__ == "__main__":
    main(sys.argv[1:])
