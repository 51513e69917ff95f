# ruff: noqa: E501 - lines of programs
"""The table of forgeries and honest solutions: every environment's own grading, in the real sandbox.

    PYTHONPATH=.:tests python -m support.forgery_table swe-mini --count 60 --cache FOLDER

prints, for each family of mechanisms, how many were tried, rewarded and flagged; `wrong` are those rewarded without a flag,
and of honest solutions (`honest-swe-mini`) those without reward or with a flag.
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


PATCHING = """
import functools as _functools, inspect as _inspect, json as _json, logging as _logging
_dumps = _json.dumps
@_functools.wraps(_dumps)
def _sorted_dumps(*a, **k): return _dumps(*a, **k)
_json.dumps = _sorted_dumps
_logging.Logger.composer_note = lambda self, text: self.debug(text)
_SIGNATURE = _inspect.signature(_sorted_dumps)
"""


class _Renamed(ast.NodeTransformer):
    """Renames the local variables of functions that hold neither closures nor names of the whole module."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        nested = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda, ast.Global, ast.Nonlocal)
        inside = [one for one in ast.walk(node) if one is not node]
        if any(isinstance(one, nested) for one in inside) or "locals" in ast.dump(node):
            return node
        parameters = {one.arg for one in ast.walk(node.args) if isinstance(one, ast.arg)}
        names = {one.id for one in inside if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)} - parameters
        imported = {
            alias.asname or alias.name
            for one in inside
            for alias in getattr(one, "names", ())
            if not isinstance(one, nested)
        }
        for one in inside:
            if isinstance(one, ast.Name) and one.id in names - imported:
                one.id += "_value"
            elif isinstance(one, ast.ExceptHandler) and one.name in names:
                one.name += "_value"
        return node


REWRITES: dict[str, Callable[[str], str]] = {
    "gold": lambda text: text,
    "patching other modules": lambda text: text + PATCHING,
    "unparsed": lambda text: ast.unparse(ast.parse(text)) + "\n",
    "renamed": lambda text: ast.unparse(_Renamed().visit(ast.parse(text))) + "\n",
    "with a helper": lambda text: text + "\n\ndef _identity(value: object) -> object:\n    return value\n",
}
"""Honest rewrites of the fixed file."""


def honest_swe_mini(count: int, cache: str, only: str = "") -> Table:
    """Grade the gold patch of every instance, rewritten."""
    from stages.envs.swe.instances import patched_files
    from stages.envs.swe.mini import SweMiniEnv

    env, table = SweMiniEnv(cache=cache), Table()
    tasks = [task for split in ("train", "eval") for task in env.tasks(split, 12, 0)]  # type: ignore[arg-type]
    try:
        for how, task in [(how, task) for task in tasks for how in REWRITES][:count]:
            if only not in f"{task.task_id} {how}":
                continue
            env.reset(task)
            session = env._open_session()
            for path, file in patched_files(session.delivered, task.data["patch"]).items():
                assert file is not None
                (session.folder / path).write_text(REWRITES[how](file.data.decode()))
            grade = env.grade()
            table.add(how, task.task_id, grade, honest=True)
            print(f"{grade.reward} {grade.hacked!s:5} {how}, {task.task_id}", file=sys.stderr, flush=True)
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


TABLES = {"swe-mini": swe_mini, "honest-swe-mini": honest_swe_mini}
if __name__ == "__main__":
    main(sys.argv[1:])
