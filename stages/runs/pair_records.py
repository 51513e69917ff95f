"""Record kinds of what teachers say and what pairs are made of it."""

from stages.runs.kinds import FLOAT, INT, TEXT, TEXTS, TOKENS, Kind

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
    4,
    {
        "pair_id": TEXT,
        "rule": TEXT,
        "rollout_id": TEXT,
        "task_id": TEXT,
        "family": TEXT,
        "step": INT,
        "state_sha256": TEXT,
        "state_id": TEXT,  # since version 4, in place of the state's messages and token ids
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
"""One preference in one state, whose messages are in the table of states under `state_id`. `chosen_by` are the teachers
that did what was chosen, and the student where it did; `served_models` what the servers of these teachers said they
answered with, else the models that were asked for. `cost_usd` is what all answers in the state cost, shared among its
pairs; null where that is not known. All three are null for pairs of imported groups."""

STATE = Kind(
    "state",
    1,
    {
        "state_id": TEXT,
        "before_id": TEXT,
        "state_sha256": TEXT,
        "kept_messages": INT,
        "new_messages_json": TEXT,
        "kept_token_ids": INT,
        "new_token_ids": TOKENS,
    },
)
"""A state as what it gained over the one before it in its rollout, whose row stands before its own: so many of its
messages and token ids are kept, and these are added. `before_id` is null where nothing led to the state; token ids are
null where they are not known. A state in which several rollouts were stands once, with the first of them, unless their
token ids are known, which may differ."""
