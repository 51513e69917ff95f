"""Which of two substrates is cleaner: failures count before what is not recorded; nulls and losses are counted."""

from typing import Any

from stages.rollouts import missing
from stages.rollouts.agent_loop import state_sha256
from stages.rollouts.substrates import Side, cleaner, table
from stages.runs import store

OPENING = [{"role": "user", "content": "q"}]


def side(name: str = "002a", number: int = 100, **changes: Any) -> Side:
    """Rollouts of one sound step each; changes of the step, or of what the side says of itself."""
    own = {key: changes.pop(key) for key in ("absent", "dropped") if key in changes}
    rollouts = [{"rollout_id": f"r{i}", "reward": 1.0, "error": None, "seed": 0} for i in range(number)]
    step = {
        "step": 0,
        "new_messages_json": store.encode(OPENING).decode(),
        "state_sha256": state_sha256(OPENING),
        "action": "a",
        "observation": "",
        "reward": 1.0,
        "done": True,
        "truncated": False,
        "elided_chars": 0,
        "parse_error": None,
        "capture_level": "tokens",
        "logprobs": [-0.12345678],
        "completion_token_ids": [3],
        "prompt_delta_token_ids": [1, 2],
        "prefix_ok": True,
        "prompt_len": 2,
        **changes,
    }
    return Side(
        name, "somewhere", rollouts, [{"rollout_id": row["rollout_id"], **step} for row in rollouts], number, **own
    )


def test_sound_traces_meet_every_criterion():
    one = side()
    assert one.standing == (0, 0) and len(one.verdicts("ok")) == len(one.checks) == 19
    assert one.levels == {"tokens": 100} and one.nulls == {} and cleaner(one, side("002b")) is None
    assert "Neither is cleaner" in table(one, side("002b"), ())


def test_text_without_tokens_fails_what_training_needs():
    told = {"capture_level": "text", "prefix_ok": None, "prompt_len": None, "logprobs": None}
    told |= {"completion_token_ids": None, "prompt_delta_token_ids": None}
    absent = {f"r{i}": {missing.TOKENS, missing.LOGPROBS} for i in range(100)}
    other = side("002b", absent=absent, **told)
    assert other.verdicts("FAIL") == ["token ids captured", "log-probs beyond 4 decimals"]
    assert "ids as many as log-probs" in other.verdicts("not recorded")
    assert (
        other.nulls["step.logprobs"] == 100
        and "step.parse_error" not in other.nulls
        and other.not_recorded[missing.TOKENS] == 100
    )
    assert cleaner(side(), other) == "002a" and cleaner(other, side()) == "002a"


def test_rounded_log_probs_do_not_pass():
    absent = {f"r{i}": {missing.EXACT_LOGPROBS} for i in range(100)}
    assert side(absent=absent).verdicts("FAIL") == ["log-probs beyond 4 decimals"]


def test_few_rollouts_and_lost_records_fail():
    few = side(number=99, dropped={"not_json": 2})
    assert few.verdicts("FAIL") == ["100 rollouts or more", "records readable"]
    assert "99 of 100" in table(few, side("002b"), ()) and "not_json" in table(few, side("002b"), ())


def test_a_failure_weighs_more_than_silence():
    silent = side("002b", absent={f"r{i}": {missing.ELISION, missing.PARSE, missing.FINISH} for i in range(100)})
    assert (
        silent.standing == (0, 3)
        and cleaner(side(truncated=True), silent) == "002b"
        and cleaner(side(), silent) == "002a"
    )
