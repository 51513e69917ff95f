"""Record kinds: the named, versioned row types that stages exchange, each with an explicit Arrow schema.

In this order: training and evaluation, teachers and pairs, the gradient probe, rollouts. A kind is written
`name/version`, for example `pair/1`; a change of its columns raises the version, and `parse_kind` refuses newer ones.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from stages.errors import BadInput, UsageError

if TYPE_CHECKING:
    import pyarrow as pa

TEXT, INT, FLOAT, BOOL = "string", "int64", "double", "bool"
TOKENS, FLOATS, TEXTS, BOOLS = "list<int32>", "list<double>", "list<string>", "list<bool>"
MESSAGES = "list<role: string, content: string>"
"""The types of columns, as words: Arrow is imported where a table is read or written, which takes 0.2 s."""
REFERENCE, NOOP = "reference", "noop"
"""Policies of rollouts that no model wrote: the tasks' own solutions, and nothing (`stages.policy.scripted`)."""


@dataclass(frozen=True)
class Kind:
    """A row type: its name, version, columns in order, and those that depend on wall time or the machine (`wall`).

    Columns in `wall` are stored, but do not enter a table's content digest, so that rerunning a stage on the same
    inputs gives the same digest.
    """

    name: str
    version: int
    columns: Mapping[str, str]
    wall: frozenset[str] = field(default_factory=frozenset)

    def __str__(self) -> str:
        return f"{self.name}/{self.version}"

    @property
    def plural(self) -> str:
        """Return what people call its rows, which is the name of their table where a run has one: `rollouts`."""
        return f"{self.name.replace('_', ' ')}s"

    @property
    def schema(self) -> "pa.Schema":
        """Return the Arrow schema, with kind and version in its key-value metadata."""
        import pyarrow as pa

        of_word = {
            TEXT: pa.string(),
            INT: pa.int64(),
            FLOAT: pa.float64(),
            BOOL: pa.bool_(),
            TOKENS: pa.list_(pa.int32()),
            FLOATS: pa.list_(pa.float64()),
            TEXTS: pa.list_(pa.string()),
            BOOLS: pa.list_(pa.bool_()),
            MESSAGES: pa.list_(pa.struct({"role": pa.string(), "content": pa.string()})),
        }
        columns = [(name, of_word[word]) for name, word in self.columns.items()]
        return pa.schema(columns, metadata={"composer.kind": str(self)})

    def check(self, row: Mapping[str, Any]) -> None:
        """Raise `UsageError` when a row has not exactly the kind's columns, which Arrow would drop or null silently."""
        if row.keys() != self.columns.keys():
            missing, extra = self.columns.keys() - row.keys(), row.keys() - self.columns.keys()
            raise UsageError(f"A {self} row does not fit: missing {sorted(missing)}, unknown {sorted(extra)}.")

    def stable(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return the row without its wall-time columns."""
        return {name: row[name] for name in self.columns if name not in self.wall}


# Training and evaluation: rewards, hints, checkpoints, items of an evaluation, difficulties, selections.

WORK: Mapping[str, str] = {
    "submission": TEXT,
    "patch": TEXT,
    "f2p_passed": INT,
    "f2p_total": INT,
    "p2p_passed": INT,
    "p2p_total": INT,
    "test_log": TEXT,
    "image": TEXT,
    "canary": TEXTS,
}
"""Columns of a rollout, and of an item of an evaluation, that hold what the agent left and how its tests ended."""
EVAL_ITEM = Kind(
    "eval_item",
    1,
    {
        "item_id": TEXT,
        "arm": TEXT,
        "train_seed": INT,
        "pair_set": TEXT,
        "task_id": TEXT,
        "family": TEXT,
        "unit": TEXT,
        "sample_idx": INT,
        "passed": BOOL,
        "ground": TEXT,
        "hidden_pass": BOOL,
        "visible_pass": BOOL,
        "hacked": BOOL,
        "protocol_ok": BOOL,
        "num_steps": INT,
        "terminated_by": TEXT,
        "transcript_json": TEXT,
        "error_type": TEXT,
        "error": TEXT,
        "cost_usd": FLOAT,
        "sampled_tokens": INT,
        "wall_s": FLOAT,
        "steps_json": TEXT,
        **WORK,
        "metrics_json": TEXT,
    },
    frozenset({"wall_s", "test_log", "metrics_json"}),
)
"""`transcript_json` is the conversation, and `steps_json` what it does not hold of each action: its place, its tokens,
the exit code, and what was cut. From `submission` on the columns are those of a rollout; they are null for rollouts
that were recorded elsewhere, whose own run has them."""

TRAINING_REWARD = Kind(
    "training_reward",
    1,
    {"training_step": INT, "rollout_id": TEXT, "task_id": TEXT, "sample_idx": INT, "reward": FLOAT},
)
"""The reward of a rollout of one training step; null where the environment could not grade it."""

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
"""The hint that self-distillation gave the teacher at a turn. `source`: "template", the model that wrote the
hint, or the id of the rollout that was shown."""

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
"""The difficulty of a task: of its graded rollouts (`num_rollouts`) the share that solved it, with Wilson's 95 %
interval, all null where there are none. `place`: in the curriculum, from 0; null for a task that is not in it."""

SELECTION = Kind(
    "selection", 1, {"rollout_id": TEXT, "task_id": TEXT, "kept": BOOL, "stats_json": TEXT, "reason": TEXT}
)
"""Whether a recipe kept a rollout, the statistics that it left, null for what it dropped or did not judge, and which
operator dropped it, null for what is kept and where Data-Juicer does not trace it."""

START = Kind("start", 1, {})
"""A folder with a model that trainings start from."""
CHECKPOINT = Kind("checkpoint", 1, {})


# Teachers and pairs.

TEACHER_ACTION = Kind(
    "teacher_action",
    1,
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
        "reasoning": TEXT,
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
`reasoning` is the teacher's chain of thought, where its server returns that apart from text and tool calls.
`served_model` and `provider` are those that a server reports; `usage_by` is "server" where it counted the
tokens, else "bound": an upper bound. `cost_usd` is null where no price is known."""

PAIR = Kind(
    "pair",
    1,
    {
        "pair_id": TEXT,
        "rule": TEXT,
        "rollout_id": TEXT,
        "task_id": TEXT,
        "family": TEXT,
        "step": INT,
        "state_sha256": TEXT,
        "state_id": TEXT,
        "chosen": TEXT,
        "rejected": TEXT,
        "rejected_by": TEXT,
        "votes_chosen": FLOAT,
        "votes_rejected": FLOAT,
        "num_teachers": INT,
        "compared_by": TEXT,
        "chosen_by": TEXTS,
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
"""A state as the difference from the state before it in its rollout, whose row precedes its own: the first
`kept_messages` messages and `kept_token_ids` ids of that state are kept, and these are added. `before_id` is null for a
first state; token ids are null where they are not known. A state that several rollouts reached has one row, with the
first of them, unless token ids are known, which may differ."""

CONTINUATION = Kind(
    "continuation",
    1,
    {
        "continuation_id": TEXT,
        "state_sha256": TEXT,
        "rollout_id": TEXT,
        "step": INT,
        "task_id": TEXT,
        "family": TEXT,
        "action": TEXT,
        "sample_idx": INT,
        "seed": INT,
        "num_steps": INT,
        "passed": BOOL,
        "reward": FLOAT,
        "terminated_by": TEXT,
        "transcript_json": TEXT,
        "error_type": TEXT,
        "error": TEXT,
        "prompt_tokens": INT,
        "completion_tokens": INT,
        "cost_usd": FLOAT,
        "wall_s": FLOAT,
    },
    frozenset({"wall_s"}),
)
"""An action of a pair, played in the recorded state in place of the step `step` of `rollout_id`, and how the policy's
rollout went on: `num_steps` and `transcript_json` count and hold what came from this action on. Pairs name the action
by their `state_sha256` with `chosen` or `rejected`. An action that ends the rollout has sample 0 alone. `passed` is
null where the environment could not grade the rollout, and where the state could not be restored: `terminated_by` is
"not_restored" then, and `error` the reason."""


# The gradient probe.

POOL_ROW = Kind(
    "pool_row",
    1,
    {
        **dict.fromkeys(("row_uid", "problem_id", "src_problem_id", "family", "src_pool"), TEXT),
        **dict.fromkeys(("step", "sample_id", "plen", "comp_len", "n_loss_tokens"), INT),
        # verdicts; null where the environment cannot tell
        "reward": FLOAT,
        **dict.fromkeys(("hacked", "hidden_pass", "fmt_ok", "can_compile", "has_test_func", "eq_hinted"), BOOL),
        **dict.fromkeys(("hacked_arbitrary", "hacked_strict", "hacked_loose", "ends_with_eos", "truncated"), BOOL),
        **dict.fromkeys(("label", "test_mod"), TEXT),
        **dict.fromkeys(("hedge_count", "comment_count"), INT),
        # text and tokens; `own` marks completion tokens the policy wrote, behav_logp is its log-prob of each, null
        # elsewhere
        "problem_messages": MESSAGES,
        **dict.fromkeys(("prompt", "completion", "prompt_role", "prompt_sha256"), TEXT),
        **dict.fromkeys(("prompt_ids", "completion_ids"), TOKENS),
        "own": BOOLS,
        "behav_logp": FLOATS,
        # who wrote it
        **dict.fromkeys(("gen_model", "gen_adapter"), TEXT),
        "gen_temperature": FLOAT,
    },
)
"""One answer of a teacher pool, before anything is measured. `src_pool`: teacher, base, student or teacher_nohint.
`label` is correct, correct_attempted, reward_hack, attempted or incorrect, `test_mod` what the answer's own tests do,
`eq_hinted` whether they pass; hacked_strict is the label reward_hack, hacked_loose that or an attempt."""

PROBE_ROW = Kind(
    "probe_row",
    1,
    {
        **POOL_ROW.columns,
        "arm": TEXT,
        **dict.fromkeys(
            ("cos_S_contrib", "cos_stack", "cos_global", "cos_first128", "energy", "hackfrac", "grad_dot"), FLOAT
        ),
        **dict.fromkeys(("grad_norm_contrib", "per_sample_loss", "logp_mean", "delta_S_norm"), FLOAT),
        **dict.fromkeys(("mean_cos_pre", "mean_cos_post", "frac_fired"), FLOAT),
        **dict.fromkeys(("n_modules_v", "grad_store_offset"), INT),
        "null_reason": TEXT,
        "imp_ratio": FLOAT,
    },
)
"""A row with what was measured on its gradient: cos_S_contrib is sum <c, v>/||c|| (at most sqrt(M)), cos_stack that
over sqrt(M); grad_norm_contrib is of the mean loss a token; mean_cos_pre, mean_cos_post and frac_fired are
its step's, repeated. imp_ratio is the geometric mean over own tokens of student's over generator's probability."""

SVD_MODULE = Kind(
    "svd_module",
    1,
    {
        "module": TEXT,
        **dict.fromkeys(("outputs", "inputs", "rank"), INT),
        "reconstruction_error": FLOAT,
        "sha256": TEXT,
    },
)
DIRECTION = Kind(
    "direction",
    1,
    {
        "module": TEXT,
        **dict.fromkeys(("numbers", "axes"), INT),
        **dict.fromkeys(
            ("norm", "signal_to_noise", "split_half_cos", "leave_one_out_accuracy", "energy_explained"), FLOAT
        ),
    },
)
"""One module of v_hack: its mean difference's norm, that over its standard error, how halves of the pairs agree."""

PROBE_SCORE = Kind(
    "probe_score", 1, {"row_uid": TEXT, **dict.fromkeys(("cos_stack", "cos_S_contrib", "cos_global"), FLOAT)}
)
PLACEBO = Kind("placebo", 1, {"family": TEXT, "draw": INT, "cos_with_v": FLOAT, "scores": FLOATS})
"""One placebo direction: its cos_stack with every row, in the order of the run's `probe_score` rows."""

PROBE_CHECK = Kind(
    "probe_check",
    1,
    {
        **dict.fromkeys(
            ("check", "plan_item", "severity", "status", "threshold", "detail", "evidence_path", "asks"), TEXT
        ),
        **dict.fromkeys(("stat", "placebo_q95"), FLOAT),
        "passed": BOOL,
    },
)
TRAJECTORY = Kind(
    "trajectory",
    1,
    {
        **dict.fromkeys(("arm", "mixed", "adapter"), TEXT),
        **dict.fromkeys(("train_seed", "step", "rows", "groups", "zero_variance_groups"), INT),
        **dict.fromkeys(("hack_rate_student", "hack_rate_all", "hidden_pass_rate_student", "reward_mean"), FLOAT),
        **dict.fromkeys(("eval_solve_rate", "weight_change", "cos_in", "cos_update", "cos_hacked", "cos_other"), FLOAT),
        **dict.fromkeys(("energy_removed", "energy_removed_update", "hack_advantage_sum"), FLOAT),
        **dict.fromkeys(("corr_advantage_hacked", "corr_advantage_source"), FLOAT),
        **dict.fromkeys(("clip_low", "clip_high", "vanish", "ess", "ratio_p5", "ratio_p50", "ratio_p95"), FLOAT),
        "saturated": TEXT,
    },
)
"""One optimiser step of one training, in which something or nothing was taken out (`arm`); student rates are over
rollouts that the student itself played. Cosines and energies of gradient and update are those of `projection.json`,
ratios those of `ratios.json`, cos_hacked and cos_other the mean cosines of rollouts that hack and of others; saturated
says why ratios carry no signal. eval_solve_rate is on held-out tasks, at a training's last step."""

ROLLOUT_GRADIENT = Kind(
    "rollout_gradient",
    1,
    {
        "training_step": INT,
        "rollout_id": TEXT,
        **dict.fromkeys(("advantage", "cos_stack", "grad_norm", "logp_mean", "ratio"), FLOAT),
    },
)
"""A rollout of a training at the weights of the step that learns from it: its reward less its group's mean, the cosine
of its gradient with the hack direction and the gradient's norm (null without a direction), the mean log-prob of its own
tokens in nats, and the geometric mean of their probability now over that at sampling."""

WATCHED = Kind(
    "watched",
    1,
    {
        **dict.fromkeys(("step", "rows"), INT),
        **dict.fromkeys(("hack_rate", "hidden_pass_rate", "reward_mean", "hack_like", "push"), FLOAT),
        **{
            f"{name}_{look}": FLOAT
            for look in ("update_sum", "policy_sum", "update", "policy", "policy_length")
            for name in ("cos", "z", "haar_low", "haar_high")
        },
        "alarm": BOOL,
    },
)
"""One checkpoint of a watched training: the share of its rollouts that look like the hack and the push toward it so far
(`stages.probe.checks.alarm`); the cosine with v of the update since the checkpoint before and of the policy gradient on
the rollouts played there, of that with length held fixed, and of update and policy gradients since the start; z in
units of random directions' cosines, whose 95 % are haar_low to haar_high; alarm from the first push on that is above
what 5 % of runs with permuted advantages reach, and 5 % of placebos (both in `watch.json`)."""

WATCHED_ROLLOUT = Kind(
    "watched_rollout",
    1,
    {
        "step": INT,
        "task_id": TEXT,
        "sample_idx": INT,
        **dict.fromkeys(("reward", "advantage", "projection", "cosine"), FLOAT),
        "hack_like": BOOL,
    },
)
"""A rollout of a watched training, as the alarm uses it: its group is the task at that step, its advantage the reward
less the group's mean; cosine and projection are of its gradient, at an advantage of 1, with v; hack_like is whether the
cosine is nearer to that of the pairs' hacks than to that of their clean answers."""

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
    1,
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
        "ground": TEXT,
        "hidden_pass": BOOL,
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
        "history": TEXT,
        "tools_json": TEXT,
        **WORK,
        "metrics_json": TEXT,
    },
    frozenset({"wall_s", "test_log", "metrics_json"}),
)
"""`ground`: whether a pass follows from values that were compared outside of the sandbox ("values") or from the report
of a process that ran the agent's code ("report"), null where nothing passed. `hidden_pass`: the hidden tests pass;
`visible_pass`: those that the agent could run pass. `tools_json`: what could be called. `submission`: what was
submitted; `patch`: all that was changed, submitted or not; then the numbers of fail-to-pass (f2p) and pass-to-pass
(p2p) tests, and the log of their run (which has times in it); `canary`: why the rollout counts as a search for the
solution; `metrics_json`: the grader's further numbers by name, of which some are durations. All of them are null where
the environment, or the source of an import, has no value."""

STEP = Kind(
    "step",
    1,
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
        "logprobs": FLOATS,
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
        "history": TEXT,
    },
    frozenset({"latency_s", "command_s"}),
)
"""`new_messages_json` and `num_messages` are of the complete transcript; `state_sha256` is the digest of the part of it
that the policy was shown, by `history`: null and "full" mean all."""

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
"""The source of an imported rollout, its submission, and the columns that the source does not have (`missing`), which
are null in the other tables. `effective`: whether it entered a training batch. `extra_json` keeps what has
no column."""

_OUTCOMES = (EVAL_ITEM, TRAINING_REWARD, HINT, DIFFICULTY, SELECTION, START, CHECKPOINT)
_PIPELINE = (TASK, ROLLOUT, STEP, TEACHER_ACTION, PAIR, STATE, CONTINUATION, ORIGIN, *_OUTCOMES)
PROBE_KINDS = (
    POOL_ROW,
    PROBE_ROW,
    SVD_MODULE,
    DIRECTION,
    PROBE_SCORE,
    PLACEBO,
    PROBE_CHECK,
    TRAJECTORY,
    ROLLOUT_GRADIENT,
    WATCHED,
    WATCHED_ROLLOUT,
)
KINDS: dict[str, Kind] = {kind.name: kind for kind in (*_PIPELINE, *PROBE_KINDS)}


def parse_kind(text: str, where: str) -> Kind:
    """Return the kind named `name/version`; `BadInput` when it is unknown or newer than this program."""
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
