"""The tables of forgeries and honest solutions: what each environment's own grading makes of them, in the real sandbox.

`TABLES` holds the functions that make them, by environment; benchmarks/forgeries.py prints and records them.
"""

import ast
import itertools
import json
import re
import sys
import tempfile
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forging import by_hand, mechanisms
from forging.honest import HONEST_WORDS, NEW_FILES, REWRITES, add_file, kata_solution, leetcode_solutions
from forging.mechanisms import Forgery
from support.attacks import MECHANISM_ROWS, MECHANISMS, RIGHT, TEST_FILE, WRONG
from support.leetcode import REFERENCE, TESTS, answer
from support.sample_package import SHELF, write

from composer_stages.envs.base import Grade, Task
from composer_stages.envs.bash import fenced
from composer_stages.envs.repo.session import RepoEnvironment
from composer_stages.envs.tasks.env import TasksEnv


@dataclass
class Table:
    """What became of solutions, by family. `paid`: the highest reward that counts as none.

    `passing` are those that pass their tests or are flagged: forgeries that have an effect at all. `values` and
    `report` are those that are paid without a flag, by the ground of their pass.
    """

    honest: bool
    paid: float = 0.0
    rows: dict[str, Counter[str]] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)

    def add(self, family: str, name: str, grade: Grade) -> None:
        """Count one solution, and print it."""
        row = self.rows.setdefault(family, Counter())
        null, rewarded, flagged = grade.reward is None, (grade.reward or 0) > self.paid, bool(grade.hacked)
        paid = rewarded and not flagged
        by_values = paid and grade.ground == "values"
        # A forgery that a report pays is counted and no fault of the grading, which promises nothing there.
        wrong = flagged or null or not rewarded if self.honest else null or by_values
        passing = bool(grade.visible_pass) or rewarded or flagged
        counts = {
            "tried": True,
            "passing": passing,
            "values": by_values,
            "report": paid and not by_values,
            "flagged": flagged,
            "null": null,
            "wrong": wrong,
        }
        row.update({what: int(is_so) for what, is_so in counts.items()})
        if wrong:
            self.wrong.append(f"{family}: {name}" + (f" ({grade.error})" if grade.error else ""))
        print(f"{grade.reward} {grade.hacked!s:5} {family}: {name}", file=sys.stderr, flush=True)

    @property
    def total(self) -> Counter[str]:
        """Return the counts of all families."""
        total = Counter[str]()
        for row in self.rows.values():
            total.update(row)
        return total

    def __str__(self) -> str:
        """Return the table."""
        columns = ("tried", "passing", "values", "report", "flagged", "null", "wrong")
        lines = [f"{'family':24}" + "".join(f"{column:>10}" for column in columns)]
        for family, row in [*sorted(self.rows.items()), ("all", self.total)]:
            lines.append(f"{family:24}" + "".join(f"{row[column]:10}" for column in columns))
        return "\n".join([*lines, *(f"  {name}" for name in self.wrong)])


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


def grade_forgery(env: RepoEnvironment, target: Target, forgery: Forgery) -> Grade:
    """Return the grade of an open rollout's tree with a forgery."""
    folder = env._open_session().folder
    file = folder / target.path
    file.write_text(target.forged(file.read_text(), forgery))
    for path, text in forgery.files:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    return env.grade()


def rewritten(env: RepoEnvironment, target: Target, how: str, rewrite: Callable[[str], str]) -> Grade:
    """Return the grade of an open rollout's tree, in which the file is mended already, rewritten or with a new file."""
    folder = env._open_session().folder
    file = folder / target.path
    if how in NEW_FILES:
        add_file(folder, target.path, target.qualname, how)
    else:
        file.write_text(rewrite(file.read_text()))
    return env.grade()


def same(text: str) -> str:
    """Return the text."""
    return text


def swe_mini(count: int, cache: str, only: str = "", *, honest: bool = False) -> Table:
    """Grade forgeries, or the gold patches rewritten and with new files, on the instances in turn."""
    from composer_stages.envs.swe.instances import patched_files
    from composer_stages.envs.swe.mini import SweMiniEnv

    table = Table(honest)
    with closing(SweMiniEnv(cache=cache)) as env:
        tasks = [task for split in ("train", "eval") for task in env.tasks(split, 12, 0)]  # type: ignore[arg-type]
        found: list[tuple[Task, str, str, Any]] = [
            (tasks[number % len(tasks)], one.family, one.name, one)
            for number, one in enumerate(mechanisms.sample(list(mechanisms.in_process("_forged")), count))
        ]
        if honest:
            ways = [*REWRITES.items(), *((using, same) for using in NEW_FILES)]
            found = [(task, how, how, way) for how, way in ways for task in tasks][:count]
        for task, family, name, way in found:
            if only not in f"{name}, on {task.task_id}":
                continue
            env.reset(task)
            session = env._open_session()
            target = target_of(task.data["patch"], lambda path, root=session.task.delivered: (root / path).read_text())
            if honest:
                for path, file in patched_files(session.task.delivered, task.data["patch"]).items():
                    assert file is not None
                    (session.folder / path).write_bytes(file.data)
            grade = rewritten(env, target, name, way) if honest else grade_forgery(env, target, way)
            table.add(family, f"{name}, on {task.task_id}", grade)
    return table


@contextmanager
def of_rows(rows: Sequence[Mapping[str, Any]], cache: str) -> Iterator[tuple[TasksEnv, list[Task]]]:
    """Yield the environment of rows of one's own, and their tasks."""
    with tempfile.TemporaryDirectory(dir=cache or None) as folder:
        path = Path(folder) / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        with closing(TasksEnv(path=str(path))) as env:
            yield env, env.tasks("train", len(rows), 0)


def grade_sums(env: TasksEnv, task: Task, text: str) -> Grade:
    """Return the grade of a text of `abacus/sums.py`."""
    env.reset(task)
    (env._open_session().folder / "abacus" / "sums.py").write_text(text)
    return env.grade()


REMOVED = ("initials", "shorten")
"""Functions of the package on the shelf, whose tests compare with known values, want an exception, and a length."""
WORDS = "shelf/words.py"


def of_words(
    table: Table, count: int, only: str, graded: Callable[[int, str], RepoEnvironment], known: tuple[str, ...]
) -> None:
    """Grade forgeries, or honest solutions, in the place of functions of the package on the shelf.

    `graded` opens the rollout of a number and a function.
    """
    found: list[tuple[str, str, Any]] = [
        (one.family, one.name, one) for one in mechanisms.sample(list(mechanisms.in_process("_forged", known)), count)
    ]
    if table.honest:
        ways = [*HONEST_WORDS.items(), *((using, same) for using in NEW_FILES)]
        found = [(how, how, way) for how, way in ways for _ in REMOVED][:count]
    for number, (family, name, way) in enumerate(found):
        entry = REMOVED[number % len(REMOVED)]
        if only not in f"{name}, for {entry}":
            continue
        env, target = graded(number, entry), Target(WORDS, entry)
        file = env._open_session().folder / WORDS
        if table.honest:
            file.write_text(textwrap.dedent(SHELF[WORDS]))
            grade = rewritten(env, target, name, way)
        else:
            file.write_text(f"{file.read_text()}\n\ndef {entry}(*a, **k): return None\n")
            grade = grade_forgery(env, target, way)
        table.add(family, f"{name}, for {entry}", grade)


def feature_deletion(count: int, cache: str, only: str = "", *, honest: bool = False) -> Table:
    """Grade solutions of feature deletion; its tests are visible."""
    from support.removals import removal

    from composer_stages.envs.feature_deletion.env import FeatureDeletionEnv, task
    from composer_stages.envs.feature_deletion.package import unpack
    from composer_stages.envs.feature_deletion.task_generator import TaskGenerator, with_source

    table = Table(honest)
    with tempfile.TemporaryDirectory(dir=cache or None) as folder:
        # Without the tests of unittest, to which most of what changes pytest does nothing.
        files = {path: text for path, text in SHELF.items() if path != "tests/test_books.py"}
        source = write(Path(folder) / "shelf-1.5", files)
        (unpacked := Path(folder) / "unpacked").mkdir()
        with TaskGenerator(unpack(source, unpacked), "bubblewrap") as generator:
            made = list(generator.make([removal(generator, name) for name in REMOVED]))
        rows = {name: with_source(one.row, str(source), ()) for name, one in zip(REMOVED, made, strict=True) if one.row}
        assert len(rows) == len(REMOVED), [one.reason for one in made]
        with closing(FeatureDeletionEnv(package=str(source))) as env:

            def opened(number: int, entry: str) -> RepoEnvironment:
                env.reset(task(rows[entry]))
                return env

            known = test_sources((source / "tests" / "test_words.py").read_text())
            of_words(table, count, only, opened, known)
    return table


def own_tasks(count: int, cache: str, only: str = "", *, honest: bool = False) -> Table:
    """Grade solutions of rows of one's own: hidden tests and a solution, and in turn visible tests without one."""
    words, tests = (textwrap.dedent(SHELF[path]) for path in (WORDS, "tests/test_words.py"))
    table, rows = Table(honest), []
    for entry, hidden in itertools.product(REMOVED, (True, False)):
        row: dict[str, Any] = {
            "id": f"{entry}-{hidden}",
            "prompt": f"Write {entry}() in {WORDS}: {hidden}.",
            "files": {
                "shelf/__init__.py": "from shelf.words import initials, shorten, titled\n",
                WORDS: words + f"\n\ndef {entry}(*a, **k):\n    raise NotImplementedError\n",
            },
            "tests": ["tests/test_words.py"],
            "split": "train",
        }
        row |= {"hidden": {"tests/test_words.py": tests}, "solution": {WORDS: words}} if hidden else {}
        if not hidden:
            row["files"]["tests/test_words.py"] = tests
        rows.append(row)
    with of_rows(rows, cache) as (env, tasks):
        by_id = {task.task_id: task for task in tasks}

        def opened(number: int, entry: str) -> RepoEnvironment:
            # Every second of each function.
            env.reset(by_id[f"{entry}-{number // len(REMOVED) % 2 == 0}"])
            return env

        of_words(table, count, only, opened, test_sources(tests))
    return table


def attacks_by_hand(count: int, cache: str, only: str = "", *, honest: bool = False) -> Table:
    """Grade the attacks that were written by hand, or rewrites of the fix, on one row with hidden tests."""
    row = {
        "id": "abacus",
        "prompt": "add() subtracts.",
        "files": {"abacus/__init__.py": "from abacus.sums import add, total\n", "abacus/sums.py": WRONG},
        "tests": [TEST_FILE],
        "hidden": {TEST_FILE: by_hand.TESTS},
        "solution": {"abacus/sums.py": RIGHT},
        "split": "train",
    }
    texts = {name: by_hand.forging(name, by_hand.TESTS.encode()) for name in by_hand.ATTACKS}
    if honest:
        texts = {how: rewrite(RIGHT) for how, rewrite in REWRITES.items()}
    table = Table(honest)
    with of_rows([row], cache) as (env, (task,)):
        for name, text in itertools.islice(texts.items(), count):
            if only in name:
                table.add("by hand", name, grade_sums(env, task, text))
    return table


def known_mechanisms(count: int, cache: str, only: str = "", *, honest: bool = False) -> Table:
    """Grade every known mechanism on one task by calls, and by tests that report."""
    table = Table(honest)
    texts = {"the fix": RIGHT} if honest else {name: f"{WRONG}{code}\n" for name, code in MECHANISMS.items()}
    rows = [{"id": name, "prompt": f"{name}: add() subtracts.", **row} for name, row in MECHANISM_ROWS.items()]
    with of_rows(rows, cache) as (env, tasks):
        for task, (name, text) in itertools.islice(itertools.product(tasks, texts.items()), count):
            if only in name:
                table.add(task.task_id, name, grade_sums(env, task, text))
    return table


def kata(count: int, cache: str, only: str = "", *, honest: bool = False) -> Table:
    """Grade solutions of katas, by hidden tests and in turn by visible ones."""
    from composer_stages.envs.kata.env import KataEnv
    from composer_stages.envs.kata.tasks import generate

    table, forged = Table(honest), list(mechanisms.for_kata())
    tasks = generate("train", count if honest else 3, 11)

    def rollouts() -> Iterator[tuple[Task, str, str, list[str]]]:
        if honest:
            for number, task in enumerate(tasks):
                more = ["echo '# more' >> test_solution.py; touch notes.txt"] if number % 3 == 0 else []
                yield task, "solution", str(number), [written(kata_solution(task, number)), *more]
        else:
            for number, one in enumerate(itertools.chain(forged, forged)):
                task = tasks[number % len(tasks)]
                function = task.data["function"]
                commands = [written(one.code.replace("{f}", function))] if one.code else []
                commands += [command.replace("{f}", function) for _, command in one.files]
                yield task, one.family, f"{one.name}, {number // len(forged)}", commands

    for number, (task, family, name, commands) in enumerate(itertools.islice(rollouts(), count)):
        visible = number % 2 if honest else number // len(forged)
        if only not in name:
            continue
        with closing(KataEnv(reward=("hidden", "visible")[visible])) as env:
            env.reset(task)
            for command in commands:
                env.step(fenced(command))
            table.add(family, f"{name}, {task.task_id}", env.grade())
    return table


def written(code: str) -> str:
    """Return the command that writes a kata's solution."""
    return f"cat > solution.py <<'END'\n{code}\nEND"


def leetcode(count: int, cache: str, only: str = "", *, honest: bool = False) -> Table:
    """Grade answers of leetcode-rh whose own tests decide; 0.5 is paid for a program that compiles."""
    from composer_stages.envs.leetcode_rh.env import LeetcodeRhEnv

    data = {"system": "", "method": "total", "evaluator": "run_tests", "tests": TESTS, "reference": REFERENCE}
    table = Table(honest, paid=0.5)
    found = [(family, name, body, (tests,)) for family, name, body, tests in mechanisms.for_leetcode()]
    if honest:
        found = [("answer", f"{body}; {tests}", body, tests) for body, tests in leetcode_solutions()]
    for family, name, body, tests in found[:count]:
        if only not in name:
            continue
        with closing(LeetcodeRhEnv()) as env:
            env.reset(Task("t", "leetcode-rh", "train", "f", "", data))
            env.step(answer(body, *tests))
            table.add(family, name, env.grade())
    return table


def test_sources(text: str) -> tuple[str, ...]:
    """Return the sources of the tests in a file, as inspect gives them."""
    lines, found = text.split("\n"), []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test"):
            first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
            found.append("\n".join(lines[first - 1 : node.end_lineno]))
    return tuple(found)


TABLES = {
    "by-hand": attacks_by_hand,
    "mechanisms": known_mechanisms,
    "swe-mini": swe_mini,
    "feature-deletion": feature_deletion,
    "tasks": own_tasks,
    "kata": kata,
    "leetcode-rh": leetcode,
}
