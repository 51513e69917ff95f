"""How often a model solves the tasks of each family of `skills` before any training.

    python benchmarks/base_rates.py skills --policy FOLDER --templates date json

GRPO learns from groups with right and wrong answers, so a family between .1 and .6 teaches most. Temperature 1, three
worked examples, questions of every family. The runs are kept in --artifacts, and a second call plays what is missing.
"""

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import cases
from records import Claim, folder, measured, read

import composer_post_training as composer
from stages.envs.skills.families import FAMILIES, HELD_OUT, TEMPLATES
from stages.evaluation.inference import wilson
from stages.runs.kinds import ROLLOUT

LOW, HIGH = 0.1, 0.6
"""Between these, `composer curriculum` keeps what GRPO learns from."""
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
            yield measured(claim(family), rate, wilson(rate, len(found)), n=len(found))


def claim(family: str) -> str:
    """Return the words of the claim about a family."""
    return f"right answers of SmolLM2-135M-Instruct to {family}, temperature 1, three examples"


def table() -> str:
    """Return the rates of all families by template, those held out in italics, for the document on environments."""
    rates = {found.claim: found.value for found in read(folder() / "base_rates.json")}
    lines = ["| template | share of right answers before any training |", "| --- | --- |"]
    for template, variants in TEMPLATES.items():
        families = {variant: f"{template}-{variant}" for variant in variants}
        cells = [
            f"{'*' * (family in HELD_OUT)}{variant}{'*' * (family in HELD_OUT)} {rates[claim(family)]:.2f}".replace(
                " 0.", " ."
            )
            for variant, family in families.items()
        ]
        lines.append(f"| `{template}` | {', '.join(cells)} |")
    between = sum(LOW <= rates[claim(family)] <= HIGH for family in FAMILIES)
    return "\n".join([*lines, "", f"{between} of {len(FAMILIES)} families are between {LOW:.1f} and {HIGH:.1f}."])


CASES = {"skills": skills}


if __name__ == "__main__":
    cases.main(__file__, CASES)
