"""Honest answers that a grader refuses, and wrong ones that it pays: none of either is the goal.

    python benchmarks/graders.py answers
    python benchmarks/graders.py code --path MbppPlus-OriginFmt.jsonl.gz --count 0
    python benchmarks/graders.py bigcodebench BigCodeBench.jsonl.gz
    python benchmarks/graders.py puzzles
    python benchmarks/graders.py attacks

`answers`: phrasings (tests/support/phrasings.toml), beside what math-verify says of the whole text, and gold answers
of GSM8K. `code`: solutions of MBPP, and the same with every result changed. `--rows`, `--path`: files of your own copy
of GSM8K, HumanEval, MBPP+ or EvalPlus; the releases of github.com/evalplus hold those of EvalPlus. `bigcodebench`: its
rows that need the standard library alone. `puzzles`: draws of reasoning-gym. `attacks`: the tables of forgeries.py.
Rows that are refused, paid or left out are named.
"""

import ast
import gzip
import json
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import cases
from forging.tables import TABLES, of_rows
from records import ROOT, Claim, measured

from composer_stages.envs.base import Task
from composer_stages.envs.code.env import CodeEnv
from composer_stages.envs.gsm8k.answers import is_right
from composer_stages.envs.gsm8k.env import Gsm8kEnv
from composer_stages.envs.skills import reasoning_gym
from composer_stages.errors import InfrastructureError, UsageError

CHANGED = """

def _changed(result):
    if isinstance(result, bool):
        return not result
    if isinstance(result, (int, float, complex)):
        return result + 1
    if isinstance(result, str):
        return result + "!"
    if isinstance(result, (list, tuple)):
        return type(result)([*result, "!"])
    if isinstance(result, set):
        return result | {{"!"}}
    return {{**result, "!": 1}} if isinstance(result, dict) else 0


_honest = {function}


def {function}(*args, **kwargs):
    return _changed(_honest(*args, **kwargs))
"""
WRITINGS = ("#### {}", "The answer is {}.", "\\\\boxed{{{}}}", "**{}**", "#### {}.00", "So it is ${}$")


def answers(rows: Path = ROOT / "examples" / "gsm8k.jsonl") -> Iterator[Claim]:
    """Phrasings of final answers, and gold answers. rows: of GSM8K."""
    cases.needed("math_verify", by=cases.EXTRA.format("math"))
    from math_verify import parse, verify

    phrasings = tomllib.loads((ROOT / "tests" / "support" / "phrasings.toml").read_text("utf-8"))
    for name, right, words in (
        ("right", True, "right answers that get 0"),
        ("wrong", False, "wrong answers that are paid"),
    ):
        texts = [(text, answer) for answer, texts in phrasings[name].items() for text in texts]
        of_ours = sum(is_right(text, answer) is not right for text, answer in texts)
        of_theirs = sum(bool(verify(parse(answer), parse(text))) is not right for text, answer in texts)
        yield measured(f"phrasings: {words}", of_ours, n=len(texts), goal="= 0")
        yield measured(f"phrasings: {words}, by math-verify alone", of_theirs, n=len(texts))
    env = Gsm8kEnv(path=str(rows))
    golds = [task.data["answer"] for split in ("train", "eval") for task in env.tasks(split, env.size(split), 0)]
    written = [(writing.format(gold), gold) for gold in golds for writing in WRITINGS if "." not in gold]
    refused = sum(not is_right(text, gold) for text, gold in written)
    yield measured(
        "gold answers of GSM8K in six writings: right answers that get 0", refused, n=len(written), goal="= 0"
    )
    paid = sum(is_right(text.replace(gold, f"{gold}7", 1), gold) for text, gold in written)
    yield measured(
        "gold answers of GSM8K in six writings: wrong answers that are paid", paid, n=len(written), goal="= 0"
    )


def code(path: str = "", count: int = 200, threads: int = 2) -> Iterator[Claim]:
    """Solutions of functions, and the same with every result changed. path: by default MBPP; count: 0 for all."""
    env = CodeEnv(path=path)
    tasks = [task for split in ("train", "eval") for task in env.tasks(split, env.size(split), 0)]
    print(*filter(None, (env.left_out(split) for split in ("train", "eval"))), sep="\n")
    chosen = sorted(Random(0).sample(tasks, min(count or len(tasks), len(tasks))), key=lambda task: task.task_id)

    def play(task: Task, change: str) -> float | None:
        env = CodeEnv(path=path)
        env.reset(task)
        env.step(f"```python\n{task.data['solution']}{change}\n```")
        return env.grade().reward

    with ThreadPoolExecutor(threads) as pool:
        honest = pool.map(lambda task: _reward(task.task_id, lambda: play(task, "")), chosen)
        changed = {task.task_id: CHANGED.format(function=task.data["function"]) for task in chosen}
        wrong = pool.map(lambda task: _reward(task.task_id, lambda: play(task, changed[task.task_id])), chosen)
        name = Path(path).name.partition(".")[0] or "MBPP"
        yield from _counted(name, "solutions that get 0", chosen, honest, 1.0)
        yield from _counted(name, "solutions with changed results that are paid", chosen, wrong, 0.0)


def _reward(task_id: str, play: Callable[[], float | None]) -> float | None:
    """Return the reward of a play; None, with the reason printed, where it has none."""
    try:
        return play()
    except InfrastructureError as error:
        print(f"{task_id}: {error}", file=sys.stderr)
        return None


def _counted(
    name: str, words: str, tasks: Sequence[Task], rewards: Iterator[float | None], right: float
) -> Iterator[Claim]:
    """Yield how many rewards are not the right one, and of the solutions how many rows are refused by name."""
    played = {task.task_id: reward for task, reward in zip(tasks, rewards, strict=True)}
    wrong = [task_id for task_id, reward in played.items() if reward not in (right, None)]
    print(f"{name}, {words}: {', '.join(wrong) or 'none'}", file=sys.stderr)
    yield measured(f"{name}: {words}", len(wrong), n=len(played), goal="= 0")
    if right:
        named = [task_id for task_id, reward in played.items() if reward is None]
        yield measured(f"{name}: rows that are named as ones that cannot be played", len(named), n=len(played))


NEED_MORE = {"BigCodeBench/562": "pip", "BigCodeBench/1005": "a network", "BigCodeBench/314": "a network"}
"""Rows whose own solutions need what no sandbox has."""


def bigcodebench(path: str, count: int = 60) -> Iterator[Claim]:
    """Solutions of rows that need the standard library alone, and the same without a body. path: the data set's file.

    A row is played as one of `tasks`: its unittest is hidden, and imports the file that the agent writes.
    """
    with gzip.open(path, "rt") if path.endswith(".gz") else open(path) as file:
        every = [json.loads(line) for line in file]
    print(f"not played: {NEED_MORE}", file=sys.stderr)
    usable = [row for row in every if row["task_id"] not in NEED_MORE]
    standard = [row for row in usable if _imported(row) <= sys.stdlib_module_names]
    chosen = Random(0).sample(standard, min(count or len(standard), len(standard)))
    with of_rows([*map(_own_row, chosen)], "") as (env, tasks):

        def play(task: Task, solve: bool) -> float | None:
            env.reset(task)
            for text in env.solution() if solve else ():
                env.step(text)
            return env.grade().reward

        for words, solve in (("solutions that get 0", True), ("functions without a body that are paid", False)):
            rewards = (_reward(task.task_id, lambda task=task, solve=solve: play(task, solve)) for task in tasks)
            yield from _counted("BigCodeBench", words, tasks, rewards, float(solve))


def _imported(row: Mapping[str, Any]) -> set[str]:
    """Return the top-level modules that a row's solution and its test import."""
    nodes = [*ast.walk(ast.parse(f"{row['code_prompt']}{row['canonical_solution']}\n{row['test']}"))]
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    return {name.partition(".")[0] for name in names}


def _own_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of BigCodeBench as one of `tasks`."""
    begin = row["code_prompt"]
    return {
        "id": row["task_id"].replace("/", "-"),
        "prompt": f"Write {row['entry_point']} in task.py.\n{row['instruct_prompt']}",
        "files": {"task.py": f"{begin}    pass\n"},
        # In the namespace of the solution, as BigCodeBench runs it.
        "hidden": {"test_task.py": f"exec(compile(open('task.py').read(), 'task.py', 'exec'))\n{row['test']}\n"},
        "tests": ["test_task.py"],
        "timeout_s": 300.0,
        "solution": {"task.py": f"{begin}{row['canonical_solution']}\n"},
        "split": "train",
    }


JUNK = ("", "I do not know.", "no answer", "-1234567.25", "[]", "()", "None")
"""Answers that are right for no question, unless one of them is its answer."""


def puzzles(draws: int = 6) -> Iterator[Claim]:
    """Draws of every task of reasoning-gym that is not refused: the right answer, and junk."""
    cases.needed("reasoning_gym", by=cases.EXTRA.format("reasoning-gym"))
    refused, unpaid, paid, tried = [], [], [], 0
    for name in sorted(reasoning_gym.modules()):
        try:
            env = reasoning_gym.ReasoningGymEnv(name, shots=0)
            tasks = env.tasks("train", draws, 0)
        except UsageError:
            refused.append(name)
            continue
        for task in tasks:
            right = task.data["answer"]
            for answer in (right, *(junk for junk in JUNK if junk.strip() != right.strip())):
                env.reset(task)
                env.step(answer)
                if (env.grade().reward == 1.0) is not (answer == right):
                    (unpaid if answer == right else paid).append(f"{name} ({answer!r:.40})")
        tried += len(tasks)
    print(f"refused: {', '.join(refused)}; unpaid: {', '.join(unpaid)}; paid: {', '.join(paid)}", file=sys.stderr)
    yield measured("reasoning-gym: right answers that get 0", len(unpaid), n=tried, goal="= 0")
    yield measured("reasoning-gym: junk that is paid", len(paid), n=tried * len(JUNK), goal="= 0")


def attacks(count: int = 300, cache: str = "", without: tuple[str, ...] = ("swe-mini",)) -> Iterator[Claim]:
    """Forgeries and honest solutions by the tables of forgeries.py. without: those that fetch packages."""
    for honest, words in ((True, "honest solutions that get 0 or are flagged"), (False, "forgeries paid on values")):
        rows = [TABLES[name](count, cache, honest=honest).total for name in sorted(TABLES) if name not in without]
        wrong = sum(row["wrong" if honest else "values"] for row in rows)
        yield measured(f"attack suite: {words}", wrong, n=sum(row["tried"] for row in rows), goal="= 0")


CASES = {"answers": answers, "code": code, "bigcodebench": bigcodebench, "puzzles": puzzles, "attacks": attacks}


if __name__ == "__main__":
    cases.main(__file__, CASES)
