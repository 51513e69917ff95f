"""How often a model solves the tasks of each family of `skills` before any training.

    python benchmarks/base_rates.py skills --policy FOLDER --templates date json

GRPO learns from groups with right and wrong answers, so a family between .1 and .6 teaches most. Temperature 1, three
worked examples, questions of every family. A second call with the same --artifacts plays only what is missing, which
does not notice that a family was changed.
"""

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import cases
from records import Claim, measured

import composer_post_training as composer
from composer_stages.envs.skills.families import TEMPLATES
from composer_stages.evaluation.inference import wilson
from composer_stages.runs.kinds import ROLLOUT

MAX_TOKENS = 32


def skills(
    templates: tuple[str, ...] = tuple(TEMPLATES),
    policy: str = "smollm2",
    questions: int = 4,
    samples: int = 8,
    artifacts: Path = Path("artifacts"),
) -> Iterator[Claim]:
    """The share of right answers by family. templates: those that are played; policy: the model."""
    for template in templates:
        run = composer.collect(
            env={"name": "skills", "families": template, "held_out": "questions"},
            policy={"model": policy, "max_tokens": MAX_TOKENS, "temperature": 1.0},
            tasks=questions * len(TEMPLATES[template]),
            samples=samples,
            artifacts=str(artifacts),
        )
        passed: dict[str, list[bool]] = defaultdict(list)
        for row in run.rows(ROLLOUT):
            passed[row["family"]].append(row["hidden_pass"])
        for family, found in passed.items():
            rate = sum(found) / len(found)
            claim = f"right answers of SmolLM2-135M-Instruct to {family}, temperature 1, three examples"
            yield measured(claim, rate, wilson(rate, len(found)), n=len(found))


CASES = {"skills": skills}


if __name__ == "__main__":
    cases.main(__file__, CASES)
