"""Record kinds: the named, versioned row types that stages exchange, each with an explicit Arrow schema.

Those of training and evaluation are in `outcome_records`, those of the gradient probe in `probe_records`.
"""

from typing import Any

from stages.errors import BadInput
from stages.runs.kinds import BOOL, FLOAT, INT, LOGPROBS, TEXT, TEXTS, TOKENS, Kind
from stages.runs.outcome_records import CHECKPOINT, EVAL_ITEM, HINT, TRAINING_REWARD
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

TEACHER_ACTION = Kind(
    "teacher_action",
    3,
    {
        "unit_id": TEXT,
        "state_sha256": TEXT,
        "task_id": TEXT,
        "rollout_id": TEXT,
        "step": INT,
        "num_steps": INT,
        "teacher": TEXT,
        "model": TEXT,
        "served_model": TEXT,
        "provider": TEXT,
        "sample_idx": INT,
        "action": TEXT,
        "reasoning": TEXT,  # since version 3
        "finish_reason": TEXT,
        "prompt_tokens": INT,
        "cached_tokens": INT,
        "completion_tokens": INT,
        "usage_by": TEXT,
        "cost_usd": FLOAT,
        "error_type": TEXT,
        "error": TEXT,
        "attempts": INT,
        "latency_s": FLOAT,
    },
    frozenset({"latency_s", "attempts"}),
)
"""One answer of one teacher in one distinct state. `rollout_id` and `step` name the first recorded step in that
state, `num_steps` counts all of them: a question that many rollouts raise is asked, and paid for, once.
`reasoning` is what the teacher thought aside, where its server tells that apart from what it says and calls.
`served_model` and `provider` are what a server says it answered with; `usage_by` is "server" where it counted the
tokens, else "bound": at most so many. `cost_usd` is null where no price is known."""

PAIR = Kind(
    "pair",
    3,
    {
        "pair_id": TEXT,
        "rule": TEXT,
        "rollout_id": TEXT,
        "task_id": TEXT,
        "family": TEXT,
        "step": INT,
        "state_sha256": TEXT,
        "messages_json": TEXT,
        "prompt_token_ids": TOKENS,
        "chosen": TEXT,
        "rejected": TEXT,
        "rejected_by": TEXT,
        "votes_chosen": FLOAT,
        "votes_rejected": FLOAT,
        "num_teachers": INT,
        "compared_by": TEXT,
        "chosen_by": TEXTS,  # since version 3, as are those below
        "served_models": TEXTS,
        "cost_usd": FLOAT,
    },
)
"""One preference in one state. `chosen_by` are the teachers that did what was chosen, and the student where it did;
`served_models` what the servers of these teachers said they answered with, else the models that were asked for.
`cost_usd` is what all answers in the state cost, shared among its pairs; null where that is not known. All three are
null for pairs of imported groups."""

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

_PIPELINE = (TASK, ROLLOUT, STEP, TEACHER_ACTION, PAIR, ORIGIN, EVAL_ITEM, TRAINING_REWARD, HINT, CHECKPOINT)
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
