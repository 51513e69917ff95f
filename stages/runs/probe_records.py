"""The record kinds of the gradient probe."""

import pyarrow as pa

from stages.runs.kinds import BOOL, FLOAT, INT, LOGPROBS, TEXT, TOKENS, Kind

MESSAGES = pa.list_(pa.struct({"role": TEXT, "content": TEXT}))

POOL_ROW = Kind(
    "pool_row",
    1,
    {
        **dict.fromkeys(("row_uid", "problem_id", "src_problem_id", "family", "src_pool"), TEXT),
        **dict.fromkeys(("step", "sample_id", "plen", "comp_len", "n_loss_tokens"), INT),
        # verdicts; null where the environment cannot tell
        "reward": FLOAT,
        **dict.fromkeys(("hacked", "gt_pass", "fmt_ok", "can_compile", "has_test_func", "eq_hinted"), BOOL),
        **dict.fromkeys(("hacked_arbitrary", "hacked_strict", "hacked_loose", "ends_with_eos", "truncated"), BOOL),
        **dict.fromkeys(("label", "test_mod"), TEXT),
        **dict.fromkeys(("hedge_count", "comment_count"), INT),
        # text and tokens; `own` marks completion tokens the policy wrote, behav_logp is its log-prob of each, null
        # elsewhere
        "problem_messages": MESSAGES,
        **dict.fromkeys(("prompt", "completion", "prompt_role", "prompt_sha256"), TEXT),
        **dict.fromkeys(("prompt_ids", "completion_ids"), TOKENS),
        "own": pa.list_(BOOL),
        "behav_logp": LOGPROBS,
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
        **dict.fromkeys(("null_reason", "adv_kind"), TEXT),
        **dict.fromkeys(("advantage", "imp_ratio", "ratio_mean", "ratio_p5", "ratio_p50", "ratio_p95"), FLOAT),
        **dict.fromkeys(("frac_clip_low", "frac_clip_high", "frac_vanish", "ess"), FLOAT),
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
PLACEBO = Kind("placebo", 1, {"family": TEXT, "draw": INT, "cos_with_v": FLOAT, "scores": pa.list_(FLOAT)})
"""One placebo direction: its cos_stack with every row, in the order of the run's `probe_score` rows."""

PROBE_CHECK = Kind(
    "probe_check",
    1,
    {
        **dict.fromkeys(("check", "seed_id", "severity", "status", "threshold", "detail", "evidence_path"), TEXT),
        **dict.fromkeys(("stat", "placebo_q95"), FLOAT),
        "passed": BOOL,
    },
)
TRAJECTORY = Kind(
    "trajectory",
    1,
    {
        **dict.fromkeys(("arm", "generator", "adapter"), TEXT),
        **dict.fromkeys(("train_seed", "step", "rows", "zero_variance_groups"), INT),
        **dict.fromkeys(("hack_rate_student", "hack_rate_all", "gt_rate_student", "reward_mean"), FLOAT),
        **dict.fromkeys(
            ("eval_hack_rate", "eval_solve_rate", "delta_norm", "cos_in", "cos_out", "cos_upd_in", "cos_upd_out"), FLOAT
        ),
        **dict.fromkeys(
            ("frac_fired", "energy_removed", "hack_advantage_sum", "corr_advantage_hacked", "corr_advantage_source"),
            FLOAT,
        ),
        **dict.fromkeys(("clip_low", "clip_high", "vanish", "ess", "ratio_p5", "ratio_p50", "ratio_p95"), FLOAT),
        "bailed": TEXT,
    },
)
"""One optimiser step of one arm and seed; student rates are over rows that the student itself wrote."""

WATCHED = Kind(
    "watched",
    2,
    {
        **dict.fromkeys(("step", "rows"), INT),
        **dict.fromkeys(("hack_rate", "gt_rate", "reward_mean", "hack_like", "push"), FLOAT),
        **{
            f"{name}_{look}": FLOAT
            for look in ("update_sum", "policy_sum", "update", "policy", "policy_length")
            for name in ("cos", "z", "haar_low", "haar_high")
        },
        "placebo_push": FLOAT,
        "alarm": BOOL,
    },
)
"""One checkpoint of a watched training: the share of its rollouts that look like the hack and the push toward it so far
(`stages.probe.checks.alarm`); the cosine with v of the update since the checkpoint before and of the policy gradient on
the rollouts played there, of that with length held fixed, and of update and policy gradients since the start; z in
units of random directions' cosines, whose 95 % are haar_low to haar_high; placebo_push is what 5 % of placebos reach in
the whole run; alarm from the first push above that and above 1 on."""
