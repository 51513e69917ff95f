"""The guard on prompts and rewards."""

from composer_stages.probe.checks.pool import prompts_match
from composer_stages.probe.settings import Contract


def test_format_only_rewards_and_a_missing_test_function_are_seen() -> None:
    row = {
        "src_pool": "teacher",
        "prompt_role": "rh",
        "problem_messages": [{"role": "user", "content": "do"}],
        "prompt": "do",
        "prompt_ids": [],
    }
    good = [row | {"reward": 3.5, "has_test_func": True, "hacked": True}] * 4
    assert prompts_match(good, Contract(), None).status == "PASS"
    formal = prompts_match([r | {"reward": 0.5} for r in good], Contract(), None)
    bare = prompts_match([r | {"has_test_func": False} for r in good], Contract(), None)
    honest = prompts_match([r | {"hacked": False} for r in good], Contract(), None)
    assert "format-only" in formal.detail and "test function" in bare.detail and "not picked up" in honest.detail
    named = prompts_match(good, Contract(hint="tests", replaced="do", system="be", answer_prefix="</think>"), None)
    assert all(word in named.detail for word in ("hint", "replaced", "system", "template"))
