"""Record kinds of what training, evaluation and choosing leave: rewards, hints, checkpoints, verdicts, difficulties."""

from stages.runs.kinds import BOOL, FLOAT, INT, TEXT, Kind

EVAL_ITEM = Kind(
    "eval_item",
    2,
    {
        "item_id": TEXT,
        "arm": TEXT,
        "train_seed": INT,
        "task_id": TEXT,
        "family": TEXT,
        "sample_idx": INT,
        "passed": BOOL,
        "gt_pass": BOOL,
        "visible_pass": BOOL,
        "hacked": BOOL,
        "protocol_ok": BOOL,
        "num_steps": INT,
        "terminated_by": TEXT,
        "transcript_json": TEXT,
        "error_type": TEXT,
        "error": TEXT,
        "cost_usd": FLOAT,
        "sampled_tokens": INT,  # since version 2
        "wall_s": FLOAT,
    },
    frozenset({"wall_s"}),
)

TRAINING_REWARD = Kind(
    "training_reward",
    1,
    {"training_step": INT, "rollout_id": TEXT, "task_id": TEXT, "sample_idx": INT, "reward": FLOAT},
)
"""What a rollout of one step of training was paid; null where the environment could not grade it."""

HINT = Kind(
    "hint",
    1,
    {
        "training_step": INT,
        "rollout_id": TEXT,
        "task_id": TEXT,
        "step": INT,
        "kind": TEXT,
        "error": TEXT,
        "hint": TEXT,
        "source": TEXT,
    },
)
"""What self-distillation told the teacher at a turn. `source`: "template", the model that wrote the hint, or the id of
the rollout that was shown."""

DIFFICULTY = Kind(
    "difficulty",
    1,
    {
        "task_id": TEXT,
        "env": TEXT,
        "split": TEXT,
        "family": TEXT,
        "num_rollouts": INT,
        "num_solved": INT,
        "rate": FLOAT,
        "low": FLOAT,
        "high": FLOAT,
        "place": INT,
    },
)
"""How hard a task is: of its graded rollouts (`num_rollouts`) the share that solved it, with Wilson's 95 % interval,
all null where there are none. `place`: in the curriculum, from 0; null for a task that is no part of it."""

SELECTION = Kind(
    "selection", 1, {"rollout_id": TEXT, "task_id": TEXT, "kept": BOOL, "stats_json": TEXT, "reason": TEXT}
)
"""Whether a recipe kept a rollout, the statistics that it left, null for what it dropped or did not judge, and which
operator dropped it, null for what is kept and where Data-Juicer does not trace it."""

CHECKPOINT = Kind("checkpoint", 1, {})
