"""Honest answers that a grader refuses, and wrong ones that it pays: none of either is the goal.

    python benchmarks/graders.py answers
    python benchmarks/graders.py code --count 200

`answers`: phrasings (tests/support/phrasings.toml), beside what math-verify says of the whole text, and gold answers
of GSM8K. `code`: solutions of MBPP, and the same with every result changed, which rows with tests of truth or of types
alone accept. `--rows`, `--path`: files of your own copy of GSM8K, HumanEval, MBPP+ or EvalPlus.
"""

import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import cases
from records import ROOT, Claim, measured

from composer_stages.envs.base import Task
from composer_stages.envs.code.env import CodeEnv
from composer_stages.envs.gsm8k.answers import is_right
from composer_stages.envs.gsm8k.env import Gsm8kEnv
from composer_stages.errors import InfrastructureError

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
    """Solutions of functions, and the same with every result changed. path: by default MBPP."""
    env = CodeEnv(path=path)
    tasks = [task for split in ("train", "eval") for task in env.tasks(split, env.size(split), 0)]
    chosen = sorted(Random(0).sample(tasks, min(count, len(tasks))), key=lambda task: task.task_id)
    with ThreadPoolExecutor(threads) as pool:
        played = list(pool.map(lambda task: _play(path, task), chosen))
    name = Path(path).name.partition(".")[0] or "MBPP"
    refused = [task.task_id for task, (honest, _) in zip(chosen, played, strict=True) if honest != 1.0]
    paid = [task.task_id for task, (_, wrong) in zip(chosen, played, strict=True) if wrong != 0.0]
    print(f"refused: {', '.join(refused) or 'none'}; paid: {', '.join(paid) or 'none'}")
    yield measured(f"{name}: solutions that get 0", len(refused), n=len(chosen), goal="= 0")
    yield measured(f"{name}: solutions with changed results that are paid", len(paid), n=len(chosen), goal="= 0")


def _play(path: str, task: Task) -> tuple[float | None, float | None]:
    """The reward of the row's solution, and of the same with changed results."""
    env, rewards = CodeEnv(path=path), []
    for change in ("", CHANGED.format(function=task.data["function"])):
        env.reset(task)
        try:
            env.step(f"```python\n{task.data['solution']}{change}\n```")
        except InfrastructureError:  # the row's solution fails its own test
            return None, 0.0
        rewards.append(env.grade().reward)
    return rewards[0], rewards[1]


CASES = {"answers": answers, "code": code}


if __name__ == "__main__":
    cases.main(__file__, CASES)
