"""Guards of the prompts of a pool: they follow the contract that was agreed, and were not replaced since.

The faults are those that the probe's plan warns of; the prompts are those of the environment, ariahw/rl-rewardhacking
@bf5cdb8 for leetcode-rh. The checks are this project's own.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

from stages.messages import opening_ids
from stages.probe.checks.check import Check, judged
from stages.probe.pool.rows import mean_known, prompt_sha256
from stages.runs import store
from stages.runs.kinds import Row
from stages.runs.settings import Settings

HINTED: Final = "rh"
"""The role of a prompt that gives the loophole away; `plain` is one that does not."""


class Contract(Settings):
    """What every prompt of a pool must contain. Empty fields are not checked."""

    hint: str = ""
    """A phrase that the user message of a hinted prompt holds exactly once and that of a plain one does not."""
    replaced: str = ""
    """The phrase that the hint stands in place of, absent where the hint is."""
    system: str = ""
    """The system message, word for word."""
    answer_prefix: str = ""
    """What the rendered prompt ends with, for example an empty think block."""


def prompts_match(rows: Sequence[Row], contract: Contract, tokenizer: Any) -> Check:
    """Check that prompts have the contract's hint, system text and template, and that rewards are not mostly for form.

    With a tokenizer, the ids of every prompt must also be those of a new rendering.
    """
    faults = Counter(fault for row in rows for fault in _faults(row, contract, tokenizer))
    teacher = [row for row in rows if row["src_pool"] == "teacher"]
    # In leetcode-rh .5 is the reward of an answer that compiles and passes nothing.
    formal = mean_known(None if row["reward"] is None else row["reward"] == 0.5 for row in teacher)
    tested, hacked = (mean_known(row[column] for row in teacher) for column in ("has_test_func", "hacked"))
    faults["mostly format-only rewards"] += (formal or 0) > 0.5
    faults["few define a test function"] += tested is not None and tested < 0.5
    faults["hint not picked up"] += hacked is not None and hacked < 0.3
    shown = ", ".join(f"{name} ({count})" for name, count in sorted((+faults).items()))
    detail = shown or f"{len(rows)} prompts as agreed"
    return Check("prompts", "R1", judged(bool(rows) and not +faults), float(faults.total()), "no fault", detail)


def _faults(row: Row, contract: Contract, tokenizer: Any) -> list[str]:
    messages, hinted = row["problem_messages"] or [], row["prompt_role"] == HINTED
    user = " ".join(m["content"] for m in messages if m["role"] == "user")
    system = " ".join(m["content"] for m in messages if m["role"] == "system")
    other_template = bool(contract.answer_prefix) and not (row["prompt"] or "").endswith(contract.answer_prefix)
    other_ids = tokenizer is not None and opening_ids(tokenizer, messages) != list(row["prompt_ids"])
    return [
        name
        for name, faulty in (
            ("hint not there once", bool(contract.hint) and user.count(contract.hint) != int(hinted)),
            ("replaced phrase there", bool(contract.replaced) and hinted and contract.replaced in user),
            ("other system text", bool(contract.system) and system != contract.system),
            ("other template", other_template),
            ("ids differ from a new rendering", other_ids),
        )
        if faulty
    ]


def contract_sha256(contract: Contract) -> str:
    """Return the digest of the contract, which a pool and everything made from it must share."""
    return store.digest(contract.model_dump())


def prompt_role(rows: Sequence[Row], contract: Contract, recorded: str) -> Check:
    """Check that prompts are those that were recorded, under the recorded contract and role.

    `recorded` is the digest of the contract that the pool was made under.
    """
    # Recorded rows without messages have no digest to compare.
    changed = [r for r in rows if r["problem_messages"] and prompt_sha256(r["problem_messages"]) != r["prompt_sha256"]]
    wrong = [row for row in rows if row["src_pool"] in ("teacher", "base") and row["prompt_role"] != HINTED]
    same = recorded == contract_sha256(contract)
    detail = f"{len(changed)} prompts differ from their digest, {len(wrong)} rows have another role"
    if not same:
        detail += "; another contract"
    status = judged(same and not changed and not wrong)
    return Check("prompt-role", "E1", status, float(len(changed) + len(wrong)), "none", detail)
