"""Record kinds: the named, versioned row types that stages exchange, each with an explicit Arrow schema.

Those of teachers and pairs are in `pair_records`, those of training and evaluation in `outcome_records`, those of the
gradient probe in `probe_records`.
"""

from typing import Any

from stages.errors import BadInput
from stages.runs.kinds import BOOL, FLOAT, INT, LOGPROBS, TEXT, TEXTS, TOKENS, Kind
from stages.runs.outcome_records import CHECKPOINT, DIFFICULTY, EVAL_ITEM, HINT, SELECTION, TRAINING_REWARD
from stages.runs.pair_records import PAIR, STATE, TEACHER_ACTION
from stages.runs.probe_records import (
    DIRECTION,
    PLACEBO,
    POOL_ROW,
    PROBE_CHECK,
    PROBE_ROW,
    PROBE_SCORE,
    SVD_MODULE,
    TRAJECTORY,
    WATCHED,
)

Row = dict[str, Any]
"""One row of a table or one JSON object, by the names of its columns."""

TASK = Kind(
    "task",
    1,
    {
        "task_id": TEXT,
        "env": TEXT,
        "split": TEXT,
        "family": TEXT,
        "prompt": TEXT,
        "data_json": TEXT,
    },
)

ROLLOUT = Kind(
    "rollout",
    2,
    {
        "rollout_id": TEXT,
        "task_id": TEXT,
        "env": TEXT,
        "split": TEXT,
        "family": TEXT,
        "group_id": TEXT,
        "sample_idx": INT,
        "seed": INT,
        "num_steps": INT,
        "reward": FLOAT,
        "gt_pass": BOOL,
        "visible_pass": BOOL,
        "hacked": BOOL,
        "protocol_ok": BOOL,
        "terminated_by": TEXT,
        "error_type": TEXT,
        "error": TEXT,
        "sandbox": TEXT,
        "model": TEXT,
        "source": TEXT,
        "prompt_tokens": INT,
        "completion_tokens": INT,
        "cost_usd": FLOAT,
        "wall_s": FLOAT,
        # since version 2
        "history": TEXT,
        "tools_json": TEXT,
        "submission": TEXT,
        "patch": TEXT,
        "f2p_passed": INT,
        "f2p_total": INT,
        "p2p_passed": INT,
        "p2p_total": INT,
        "test_log": TEXT,
        "image": TEXT,
        "canary": TEXTS,
    },
    frozenset({"wall_s", "test_log"}),
)
"""`gt_pass` is the strict verdict and `visible_pass` the loose one, where an environment has both. `tools_json`: what
could be called. `submission`: what was handed in; `patch`: all that was changed, handed in or not; then tests that had
to come to pass (f2p) and to stay passing (p2p), and the log of their strict run (times stand in it); `canary`: why the
episode counts as a search for the solution. All of them are null where the environment, or the source of an import,
does not say."""

STEP = Kind(
    "step",
    2,
    {
        "rollout_id": TEXT,
        "task_id": TEXT,
        "env": TEXT,
        "group_id": TEXT,
        "sample_idx": INT,
        "step": INT,
        "num_steps": INT,
        # state
        "new_messages_json": TEXT,
        "num_messages": INT,
        "state_sha256": TEXT,
        # action
        "action": TEXT,
        "commands": TEXTS,
        "parse_error": TEXT,
        "finish_reason": TEXT,
        "truncated": BOOL,
        # observation
        "observation": TEXT,
        "returncode": INT,
        "timed_out": BOOL,
        "raw_chars": INT,
        "elided_chars": INT,
        # reward
        "reward": FLOAT,
        "done": BOOL,
        "terminated_by": TEXT,
        # tokens
        "capture_level": TEXT,
        "prompt_len": INT,
        "prompt_delta_token_ids": TOKENS,
        "prefix_ok": BOOL,
        "completion_token_ids": TOKENS,
        "logprobs": LOGPROBS,
        "logprob_kind": TEXT,
        # policy
        "model": TEXT,
        "sampling_json": TEXT,
        "seed": INT,
        # cost
        "prompt_tokens": INT,
        "completion_tokens": INT,
        "cost_usd": FLOAT,
        "latency_s": FLOAT,
        "command_s": FLOAT,
        "history": TEXT,  # since version 2
    },
    frozenset({"latency_s", "command_s"}),
)
"""`new_messages_json` and `num_messages` are of the whole transcript; the state, whose digest stands here, is what the
policy was shown of it, by `history`: null and "full" mean all."""

ORIGIN = Kind(
    "origin",
    1,
    {
        "rollout_id": TEXT,
        "format": TEXT,
        "file": TEXT,
        "line": INT,
        "effective": BOOL,
        "submission": TEXT,
        "missing": TEXTS,
        "tools_json": TEXT,
        "extra_json": TEXT,
    },
)
"""Where an imported rollout comes from, what it submitted, and what its source cannot tell (`missing`): those columns
are null in the other tables. `effective`: whether it entered a training batch. `extra_json` keeps what has
no column."""

_LEFT = (EVAL_ITEM, TRAINING_REWARD, HINT, DIFFICULTY, SELECTION, CHECKPOINT)
_PIPELINE = (TASK, ROLLOUT, STEP, TEACHER_ACTION, PAIR, STATE, ORIGIN, *_LEFT)
_PROBE = (POOL_ROW, PROBE_ROW, SVD_MODULE, DIRECTION, PROBE_SCORE, PLACEBO, PROBE_CHECK, TRAJECTORY, WATCHED)
KINDS: dict[str, Kind] = {kind.name: kind for kind in (*_PIPELINE, *_PROBE)}


def parse_kind(text: str, where: str) -> Kind:
    """The kind that `text` (`name/version`) names; `BadInput` when it is unknown here or newer than this program."""
    name, _, version = text.partition("/")
    if name not in KINDS or not version.isdigit():
        raise BadInput(
            f"{where} holds records of kind {text!r}, which this program does not know; "
            f"it knows {', '.join(map(str, KINDS.values()))}."
        )
    if int(version) > KINDS[name].version:
        raise BadInput(
            f"{where} holds {text}, written by a newer Composer; this one reads up to {KINDS[name]}. "
            "Update Composer to read it."
        )
    return KINDS[name]
