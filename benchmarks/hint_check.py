"""Whether a model passes more often behind a hint, by environment, as `composer train` checks it before `sdpo`.

    python benchmarks/hint_check.py skills --policy FOLDER
    python benchmarks/hint_check.py gsm8k ROWS --policy FOLDER

Temperature 1. Both rates are of the same tasks, answered with equal seeds.
"""

from collections.abc import Iterator
from pathlib import Path

import cases
from records import Claim, measured

from composer_stages.arms.hint_check import measure
from composer_stages.evaluation.inference import wilson
from composer_stages.policy import open_policy
from composer_stages.policy.base import Policy, PolicyConfig
from composer_stages.runs.ledger import Budget
from composer_stages.runs.run import AnswerFolders
from composer_stages.train import Config

ANSWERS = 64


def _open(model: str, max_tokens: int, artifacts: Path) -> Policy:
    config = PolicyConfig(model=model, max_tokens=max_tokens, temperature=1.0)
    cache = AnswerFolders(artifacts / "models", artifacts / "answers")
    return open_policy(config, cache=cache, budget=Budget(), listener=lambda what, done, total: None)


def _rates(title: str, env: dict[str, object], policy: Policy, answers: int) -> Iterator[Claim]:
    """The rate of right answers to an environment's training tasks without and with hints."""
    config = Config(env=env, tasks=answers)
    make = config.opener()
    found = measure(make, policy, config.draw(make, answers), seed=config.seed, max_steps=1)
    for how, rate in (("without", found.plain), ("with", found.hinted)):
        claim = f"right answers of SmolLM2-135M-Instruct to {title}, {how} hints"
        yield measured(claim, rate, wilson(rate, found.graded), n=found.graded)


def skills(
    templates: tuple[str, ...] = ("date", "reverse", "snake"),
    policy: str = "smollm2",
    answers: int = ANSWERS,
    artifacts: Path = Path("artifacts"),
) -> Iterator[Claim]:
    """Templates of `skills`, with three worked examples."""
    opened = _open(policy, 32, artifacts)
    for template in templates:
        yield from _rates(f"{template} of skills", {"name": "skills", "families": template}, opened, answers)


def gsm8k(
    rows: Path, policy: str = "smollm2", answers: int = ANSWERS, artifacts: Path = Path("artifacts")
) -> Iterator[Claim]:
    """Questions of GSM8K. rows: their file."""
    opened = _open(policy, 160, artifacts)
    yield from _rates("gsm8k", {"name": "gsm8k", "path": str(rows.resolve())}, opened, answers)


CASES = {"skills": skills, "gsm8k": gsm8k}


if __name__ == "__main__":
    cases.main(__file__, CASES)
