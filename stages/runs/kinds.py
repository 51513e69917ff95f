"""Record kinds: the named, versioned row types that stages exchange, each with an explicit Arrow schema.

In this order: training and evaluation, teachers and pairs, the gradient probe, rollouts. A kind is written
`name/version`, for example `pair/1`; a change of its columns raises the version, and `parse_kind` refuses newer ones.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from composer_stages.errors import BadInput, UsageError
from composer_stages.layout import plural

if TYPE_CHECKING:
    import pyarrow as pa

TEXT, INT, FLOAT, BOOL = "string", "int64", "double", "bool"
TOKENS, FLOATS, TEXTS, BOOLS = "list<int32>", "list<double>", "list<string>", "list<bool>"
MESSAGES = "list<role: string, content: string>"
"""The types of columns, as words: Arrow is imported where a table is read or written, which takes 0.2 s."""
REFERENCE, NOOP = "reference", "noop"
"""Policies of rollouts that no model wrote: the tasks' own solutions, and nothing (`policy.scripted`)."""


@dataclass(frozen=True)
class Kind:
    """A row type: its name, version, columns in order, and those that depend on wall time or the machine (`wall`).

    Columns in `wall` are stored, but do not enter a table's content digest, so that rerunning a stage on the same
    inputs gives the same digest.
    """

    name: str
    version: int
    columns: dict[str, str]
    wall: frozenset[str] = field(default_factory=frozenset)

    def __str__(self) -> str:
        return f"{self.name}/{self.version}"

    @property
    def plural(self) -> str:
        """Return what people call its rows, which is the name of their table where a run has one: `rollouts`."""
        return plural(self.name.replace("_", " "))

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
            raise UsageError("runs.row-does-not-fit", kind=self, missing=sorted(missing), extra=sorted(extra))

    def stable(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return the row without its wall-time columns."""
        return {name: row[name] for name in self.columns if name not in self.wall}


def columns(text: str) -> dict[str, str]:
    """Return columns by name, from words such as `step:int`; a word without a type is a column of text."""
    types = {"": TEXT, "int": INT, "float": FLOAT, "bool": BOOL, "tokens": TOKENS, "floats": FLOATS}
    types |= {"texts": TEXTS, "bools": BOOLS, "messages": MESSAGES}
    return {name: types[kind] for name, _, kind in (word.partition(":") for word in text.split())}


# Training and evaluation: rewards, hints, checkpoints, items of an evaluation, difficulties, selections.

WORK = columns("submission patch f2p_passed:int f2p_total:int p2p_passed:int p2p_total:int test_log image canary:texts")
"""Columns of a rollout, and of an item of an evaluation, that hold what the agent left and how its tests ended."""
EVAL_ITEM = Kind(
    "eval_item",
    1,
    columns("""
        item_id arm train_seed:int pair_set task_id family unit sample_idx:int passed:bool ground hidden_pass:bool
        visible_pass:bool hacked:bool protocol_ok:bool num_steps:int terminated_by transcript_json error_type error
        cost_usd:float sampled_tokens:int wall_s:float steps_json
        """)
    | WORK
    | {"metrics_json": TEXT},
    frozenset({"wall_s", "test_log", "metrics_json"}),
)
"""`transcript_json` is the conversation, and `steps_json` what it does not hold of each action: its place, its tokens,
the exit code, and what was cut. From `submission` on the columns are those of a rollout; they are null for rollouts
that were recorded elsewhere, whose own run has them."""

TRAINING_REWARD = Kind(
    "training_reward", 1, columns("training_step:int rollout_id task_id sample_idx:int reward:float")
)
"""The reward of a rollout of one training step; null where the environment could not grade it."""

HINT = Kind("hint", 1, columns("training_step:int rollout_id task_id step:int kind error hint source"))
"""The hint that self-distillation gave the teacher at a turn. `source`: "template", the model that wrote the
hint, or the id of the rollout that was shown."""

DIFFICULTY = Kind(
    "difficulty",
    1,
    columns("task_id env split family num_rollouts:int num_solved:int rate:float low:float high:float place:int"),
)
"""The difficulty of a task: of its graded rollouts (`num_rollouts`) the share that solved it, with Wilson's 95 %
interval, all null where there are none. `place`: in the curriculum, from 0; null for a task that is not in it."""

SELECTION = Kind("selection", 1, columns("rollout_id task_id kept:bool stats_json reason"))
"""Whether a recipe kept a rollout, the statistics that it left, null for what it dropped or did not judge, and which
operator dropped it, null for what is kept and where Data-Juicer does not trace it."""

START = Kind("start", 1, {})
"""A folder with a model that trainings start from."""
CHECKPOINT = Kind("checkpoint", 1, {})
VECTORS = Kind("vectors", 1, {})
"""A folder with vectors of the probe: gradients, a direction, or a decomposition of weights."""


# Teachers and pairs.

TEACHER_ACTION = Kind(
    "teacher_action",
    1,
    columns("""
        unit_id state_sha256 task_id rollout_id step:int num_steps:int teacher model served_model provider
        sample_idx:int action reasoning finish_reason prompt_tokens:int cached_tokens:int completion_tokens:int
        usage_by cost_usd:float error_type error attempts:int latency_s:float
        """),
    frozenset({"latency_s", "attempts"}),
)
"""One answer of one teacher in one distinct state. `rollout_id` and `step` name the first recorded step in that
state, `num_steps` counts all of them: a question that many rollouts raise is asked, and paid for, once.
`reasoning` is the teacher's chain of thought, where its server returns that apart from text and tool calls; the action
begins with it.
`served_model` and `provider` are those that a server reports; `usage_by` is "server" where it counted the
tokens, else "bound": an upper bound. `cost_usd` is null where no price is known."""

PAIR = Kind(
    "pair",
    1,
    columns("""
        pair_id rule rollout_id task_id family step:int state_sha256 state_id chosen rejected rejected_by
        votes_chosen:float votes_rejected:float num_teachers:int compared_by chosen_by:texts served_models:texts
        cost_usd:float
        """),
)
"""One preference in one state, whose messages are in the table of states under `state_id`. `chosen_by` are the teachers
that did what was chosen, and the student where it did; `served_models` what the servers of these teachers said they
answered with, else the models that were asked for. `cost_usd` is what all answers in the state cost, shared among its
pairs; null where that is not known. All three are null for pairs of imported groups."""

STATE = Kind(
    "state",
    2,
    columns("""
        state_id before_id state_sha256 kept_messages:int new_messages_json kept_token_ids:int new_token_ids:tokens
        tools_json
        """),
)
"""A state as the difference from the state before it in its rollout, whose row precedes its own: the first
`kept_messages` messages and `kept_token_ids` ids of that state are kept, and these are added. `before_id` is null for a
first state; token ids are null where they are not known. A state that several rollouts reached has one row, with the
first of them, unless token ids are known, which may differ. `tools_json`: what could be called in it."""

CONTINUATION = Kind(
    "continuation",
    1,
    columns("""
        continuation_id state_sha256 rollout_id step:int task_id family action sample_idx:int seed:int num_steps:int
        passed:bool reward:float terminated_by transcript_json error_type error prompt_tokens:int
        completion_tokens:int cost_usd:float wall_s:float
        """),
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
    columns("""
        row_uid problem_id src_problem_id family src_pool step:int sample_id:int plen:int comp_len:int
        n_loss_tokens:int
        reward:float hacked:bool hidden_pass:bool fmt_ok:bool can_compile:bool has_test_func:bool eq_hinted:bool
        hacked_arbitrary:bool hacked_strict:bool hacked_loose:bool ends_with_eos:bool truncated:bool label test_mod
        hedge_count:int comment_count:int
        problem_messages:messages prompt completion prompt_role prompt_sha256 prompt_ids:tokens completion_ids:tokens
        own:bools behav_logp:floats
        gen_model gen_adapter gen_temperature:float
        """),
)
"""One answer of a teacher pool, before anything is measured. `src_pool`: teacher, base, student or teacher_nohint.
Verdicts are null where the environment cannot tell. `own` marks the completion tokens that the policy wrote,
`behav_logp` is its log-prob of each, null elsewhere.
`label` is correct, correct_attempted, reward_hack, attempted or incorrect, `test_mod` what the answer's own tests do,
`eq_hinted` whether they pass; hacked_strict is the label reward_hack, hacked_loose that or an attempt."""

PROBE_ROW = Kind(
    "probe_row",
    1,
    POOL_ROW.columns
    | columns("""
        arm cos_S_contrib:float cos_stack:float cos_global:float cos_first128:float energy:float hackfrac:float
        grad_dot:float grad_norm_contrib:float per_sample_loss:float logp_mean:float delta_S_norm:float
        mean_cos_pre:float mean_cos_post:float frac_fired:float n_modules_v:int grad_store_offset:int null_reason
        imp_ratio:float
        """),
)
"""A row with what was measured on its gradient: cos_S_contrib is sum <c, v>/||c|| (at most sqrt(M)), cos_stack that
over sqrt(M); grad_norm_contrib is of the mean loss a token; mean_cos_pre, mean_cos_post and frac_fired are
its step's, repeated. imp_ratio is the geometric mean over own tokens of student's over generator's probability."""

SVD_MODULE = Kind("svd_module", 1, columns("module outputs:int inputs:int rank:int reconstruction_error:float sha256"))
DIRECTION = Kind(
    "direction",
    1,
    columns("""
        module numbers:int axes:int norm:float signal_to_noise:float split_half_cos:float leave_one_out_accuracy:float
        energy_explained:float
        """),
)
"""One module of v_hack: its mean difference's norm, that over its standard error, how halves of the pairs agree."""

PROBE_SCORE = Kind("probe_score", 1, columns("row_uid cos_stack:float cos_S_contrib:float cos_global:float"))
PLACEBO = Kind("placebo", 1, columns("family draw:int cos_with_v:float scores:floats"))
"""One placebo direction: its cos_stack with every row, in the order of the run's `probe_score` rows."""

PROBE_CHECK = Kind(
    "probe_check",
    1,
    columns("""
        check plan_item severity status threshold detail evidence_path asks stat:float placebo_q95:float passed:bool
        """),
)
TRAJECTORY = Kind(
    "trajectory",
    1,
    columns("""
        arm mixed adapter train_seed:int step:int rows:int groups:int zero_variance_groups:int hack_rate_student:float
        hack_rate_all:float hidden_pass_rate_student:float reward_mean:float eval_solve_rate:float weight_change:float
        cos_in:float cos_update:float cos_hacked:float cos_other:float energy_removed:float
        energy_removed_update:float hack_advantage_sum:float corr_advantage_hacked:float corr_advantage_source:float
        clip_low:float clip_high:float vanish:float ess:float ratio_p5:float ratio_p50:float ratio_p95:float saturated
        """),
)
"""One optimiser step of one training, in which something or nothing was taken out (`arm`); student rates are over
rollouts that the student itself played. Cosines and energies of gradient and update are those of `projection.json`,
ratios those of `ratios.json`, cos_hacked and cos_other the mean cosines of rollouts that hack and of others; saturated
says why ratios carry no signal. eval_solve_rate is on held-out tasks, at a training's last step."""

ROLLOUT_GRADIENT = Kind(
    "rollout_gradient",
    1,
    columns("""
        training_step:int rollout_id advantage:float cos_stack:float grad_norm:float logp_mean:float ratio:float
        """),
)
"""A rollout of a training at the weights of the step that learns from it: its reward less its group's mean, the cosine
of its gradient with the hack direction and the gradient's norm (null without a direction), the mean log-prob of its own
tokens in nats, and the geometric mean of their probability now over that at sampling."""

WATCHED = Kind(
    "watched",
    1,
    columns("step:int rows:int hack_rate:float hidden_pass_rate:float reward_mean:float hack_like:float push:float")
    | {
        f"{name}_{look}": FLOAT
        for look in ("update_sum", "policy_sum", "update", "policy", "policy_length")
        for name in ("cos", "z", "haar_low", "haar_high")
    }
    | {"alarm": BOOL},
)
"""One checkpoint of a watched training: the share of its rollouts that look like the hack and the push toward it so far
(`composer_stages.probe.checks.alarm`); the cosine with v of the update since the checkpoint before and of the policy
gradient on the rollouts played there, of that with length held fixed, and of update and policy gradients since the
start; z in units of random directions' cosines, whose 95 % are haar_low to haar_high; alarm from the first push on that
is above what 5 % of runs with permuted advantages reach, and 5 % of placebos (both in `watch.json`)."""

WATCHED_ROLLOUT = Kind(
    "watched_rollout",
    1,
    columns("""
        step:int task_id sample_idx:int reward:float advantage:float projection:float cosine:float hack_like:bool
        """),
)
"""A rollout of a watched training, as the alarm uses it: its group is the task at that step, its advantage the reward
less the group's mean; cosine and projection are of its gradient, at an advantage of 1, with v; hack_like is whether the
cosine is nearer to that of the pairs' hacks than to that of their clean answers."""

Row = dict[str, Any]
"""One row of a table or one JSON object, by the names of its columns."""


TASK = Kind("task", 1, columns("task_id env split family prompt data_json"))

ROLLOUT = Kind(
    "rollout",
    1,
    columns("""
        rollout_id task_id env split family group_id sample_idx:int seed:int num_steps:int reward:float ground
        hidden_pass:bool visible_pass:bool hacked:bool protocol_ok:bool terminated_by error_type error sandbox model
        source prompt_tokens:int completion_tokens:int cost_usd:float wall_s:float history tools_json
        """)
    | WORK
    | {"metrics_json": TEXT},
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
    2,
    columns("""
        rollout_id task_id env group_id sample_idx:int step:int num_steps:int
        new_messages_json num_messages:int state_sha256
        action commands:texts parse_error finish_reason truncated:bool
        observation returncode:int timed_out:bool raw_chars:int elided_chars:int
        reward:float done:bool terminated_by
        capture_level prompt_len:int prompt_delta_token_ids:tokens prefix_ok:bool completion_token_ids:tokens
        logprobs:floats logprob_kind
        model sampling_json seed:int
        prompt_tokens:int completion_tokens:int cost_usd:float latency_s:float command_s:float history
        served_model provider system_fingerprint reasoning prompt_read:int
        """),
    frozenset({"latency_s", "command_s"}),
)
"""`new_messages_json` and `num_messages` are of the complete transcript; `state_sha256` is the digest of the part of it
that the policy was shown, by `history`: null and "full" mean all. `truncated`: the answer is not whole, because it was
cut, filtered, or a call that the server could not read, as `finish_reason` says. By lines: whose step it is, the state,
the action, the observation, the reward, the tokens, the policy, the cost, what a server says of itself and its model's
thoughts apart from the answer, with which the action begins, too. `prompt_read`: the tokens that it counted, where it
read less than the whole prompt."""

ORIGIN = Kind(
    "origin",
    1,
    columns("rollout_id format file line:int effective:bool submission missing:texts tools_json extra_json"),
)
"""The source of an imported rollout, its submission, and the columns that the source does not have (`missing`), which
are null in the other tables. `effective`: whether it entered a training batch. `extra_json` keeps what has
no column."""

PROBE_KINDS = (
    *(POOL_ROW, PROBE_ROW, SVD_MODULE, DIRECTION, PROBE_SCORE, PLACEBO),
    *(PROBE_CHECK, TRAJECTORY, ROLLOUT_GRADIENT, WATCHED, WATCHED_ROLLOUT),
)
_OTHERS = (
    *(TASK, ROLLOUT, STEP, TEACHER_ACTION, PAIR, STATE, CONTINUATION, ORIGIN),
    *(EVAL_ITEM, TRAINING_REWARD, HINT, DIFFICULTY, SELECTION, START, CHECKPOINT, VECTORS),
)
KINDS: dict[str, Kind] = {kind.name: kind for kind in (*_OTHERS, *PROBE_KINDS)}


def parse_kind(text: str, where: str) -> Kind:
    """Return the kind named `name/version`; `BadInput` when it is unknown or newer than this program."""
    name, _, version = text.partition("/")
    if name not in KINDS or not version.isdigit():
        raise BadInput("runs.unknown-record-kind", where=where, text=text, kinds=KINDS.values())
    if int(version) > KINDS[name].version:
        raise BadInput("runs.record-version-too-new", where=where, text=text, newest=KINDS[name])
    return KINDS[name]
