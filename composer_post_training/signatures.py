"""The words of the Python interface with their types, for type checkers. docs/signatures.py generates it."""

# ruff: noqa: D101, D102, D400

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, TypedDict, Unpack

from composer_post_training.results import Evaluation, ReadableRun
from stages.runs.run import Run
from stages.runs.stage import Plan

Listener = Callable[[str, int, int], None]


class EnvConfigWords(TypedDict, total=False):
    name: str
    split: Literal["train", "eval"]
    options: Mapping[str, Any]
    curriculum: str


class EpisodeLimitsWords(TypedDict, total=False):
    wall_s: float | None
    context_tokens: int | None
    cost_usd: float | None


class InFlightWords(TypedDict, total=False):
    episodes: int
    commands: int
    gradings: int


class ServerWords(TypedDict, total=False):
    python: str
    args: Mapping[str, bool | int | float | str]


class PolicyConfigWords(TypedDict, total=False):
    model: str
    base_url: str | None
    server: ServerWords | Mapping[str, Any]
    api_key_env: str
    usd_per_mtok_in: float | None
    usd_per_mtok_cached_in: float | None
    usd_per_mtok_out: float | None
    price: Literal["unknown"] | None
    temperature: float
    max_tokens: int | None
    request: Mapping[str, Any]
    extra_body: Mapping[str, Any]
    chat_template_kwargs: Mapping[str, bool | int | float | str]
    tool_calls: Literal["none", "native", "qwen3", "llama3", "mistral", "deepseek", "gpt-oss"]
    dtype: str
    device: str
    lockstep: int
    kv_cache_gib: float | None
    prefill_tokens: int
    concurrency: int
    timeout_s: float
    max_attempts: int


class CollectWords(TypedDict, total=False):
    seed: int
    env: Path | str | EnvConfigWords | Mapping[str, Any]
    sandbox: str
    max_steps: int
    limits: EpisodeLimitsWords | Mapping[str, Any]
    history: str
    in_flight: InFlightWords | Mapping[str, Any]
    report_to: Sequence[Literal["tensorboard", "trackio", "wandb"]]
    policy: Path | str | PolicyConfigWords | Mapping[str, Any]
    tasks: int
    samples: int


class TeacherConfigWords(TypedDict, total=False):
    model: str
    base_url: str | None
    server: ServerWords | Mapping[str, Any]
    api_key_env: str
    usd_per_mtok_in: float | None
    usd_per_mtok_cached_in: float | None
    usd_per_mtok_out: float | None
    price: Literal["unknown"] | None
    temperature: float
    max_tokens: int | None
    request: Mapping[str, Any]
    extra_body: Mapping[str, Any]
    chat_template_kwargs: Mapping[str, bool | int | float | str]
    tool_calls: Literal["none", "native", "qwen3", "llama3", "mistral", "deepseek", "gpt-oss"]
    dtype: str
    device: str
    lockstep: int
    kv_cache_gib: float | None
    prefill_tokens: int
    concurrency: int
    timeout_s: float
    max_attempts: int
    name: str


class GateConfigWords(TypedDict, total=False):
    rule: Literal["off", "disagreement", "value"]
    usd_per_pair: float
    explore: float
    failed_only: bool


class ReplayTeachersWords(TypedDict, total=False):
    seed: int
    teachers: Path | str | Sequence[TeacherConfigWords | Mapping[str, Any]]
    samples: int
    gate: GateConfigWords | Mapping[str, Any]
    min_answered: float
    max_usd_per_trace: float
    max_p95_latency_s: float
    deal: Literal["local", "teachers"]


class SignalConfigWords(TypedDict, total=False):
    rollouts: int


class ExtractPairsWords(TypedDict, total=False):
    seed: int
    compare: Literal["outcome", "canonical"]
    sandbox: str
    student: str | None
    signal: SignalConfigWords | Mapping[str, Any]


class OptimisationWords(TypedDict, total=False):
    steps: int
    prompts_per_step: int
    generations: int
    learning_rate: float | None
    max_grad_norm: float
    beta: float
    loss_type: str
    micro_batch: int | None
    max_tokens_per_micro_batch: int | None
    shared_prompts: bool
    gradient_checkpointing: bool | None
    max_staleness: int
    sync_tolerance: float | None
    threads: int | None
    save_every: int
    keep_every: int
    gradient_cosine_every: int


class AdapterSettingsWords(TypedDict, total=False):
    rank: int | None
    alpha: int
    targets: Sequence[str]
    dropout: float
    rslora: bool
    dora: bool


class DistributionWords(TypedDict, total=False):
    sharding: Literal["none", "fsdp2"]
    servers: Sequence[str]


class WeightsWords(TypedDict, total=False):
    grpo: float
    dpo: float
    simpo: float
    sft: float
    sdpo: float
    taid: float
    eopd: float


class PairsWords(TypedDict, total=False):
    per_step: int
    loss_type: Literal[
        "sigmoid",
        "hinge",
        "ipo",
        "sigmoid_norm",
        "nca_pair",
        "bco_pair",
        "sppo_hard",
        "apo_zero",
        "apo_down",
        "discopop",
    ]
    beta: float
    simpo_beta: float
    simpo_gamma_ratio: float
    max_tokens: int


class HintsWords(TypedDict, total=False):
    source: Literal["template", "llm", "rollout"]
    llm: PolicyConfigWords | Mapping[str, Any] | None
    per_step: int
    success_reward: float
    alpha: float
    top_k: int | None
    tail: bool
    teacher: Literal["current", "ema", "trust-region"]
    teacher_rate: float
    importance_clip: float | None


class TaidSettingsWords(TypedDict, total=False):
    t_start: float
    t_end: float
    alpha: float
    beta: float
    disable_adaptive: bool


class EopdSettingsWords(TypedDict, total=False):
    entropy_threshold: float
    coefficient: float
    top_k: int


class DilocoWords(TypedDict, total=False):
    store: str | None
    replicas: int
    replica: int | None
    inner_steps: int
    outer_learning_rate: float
    outer_momentum: float
    codec: Literal["float32", "bf16", "int8", "int4"]
    fragments: int
    quorum: int | None
    grace_s: float
    timeout_s: float


class ProbeWords(TypedDict, total=False):
    project: Literal["v", "random"]


class TrainWords(TypedDict, total=False):
    seed: int
    env: Path | str | EnvConfigWords | Mapping[str, Any]
    sandbox: str
    arm: str
    policy: Path | str | PolicyConfigWords | Mapping[str, Any]
    tasks: int
    max_steps: int
    optimisation: OptimisationWords | Mapping[str, Any]
    adapter: AdapterSettingsWords | Mapping[str, Any]
    distribution: DistributionWords | Mapping[str, Any]
    trl: Mapping[str, Any]
    weights: WeightsWords | Mapping[str, Any]
    pairs: PairsWords | Mapping[str, Any]
    hints: HintsWords | Mapping[str, Any]
    taid: TaidSettingsWords | Mapping[str, Any]
    eopd: EopdSettingsWords | Mapping[str, Any]
    diloco: Path | str | DilocoWords | Mapping[str, Any]
    probe: ProbeWords | Mapping[str, Any]
    report_to: Sequence[Literal["tensorboard", "trackio", "wandb"]]
    teacher: PolicyConfigWords | Mapping[str, Any] | None


class HeldOutEnvConfigWords(TypedDict, total=False):
    name: str
    split: Literal["train", "eval"]
    options: Mapping[str, Any]
    curriculum: str


class PlanningWords(TypedDict, total=False):
    gain: float
    power: float
    seeds: int
    pass_rate: float | None
    samples_differ: float | None
    arms_differ: float | None
    family_correlation: float | None
    seed_sd: float | None
    usd_per_rollout: float | None


class EvaluateWords(TypedDict, total=False):
    seed: int
    env: Path | str | HeldOutEnvConfigWords | Mapping[str, Any]
    sandbox: str
    max_steps: int
    limits: EpisodeLimitsWords | Mapping[str, Any]
    history: str
    in_flight: InFlightWords | Mapping[str, Any]
    report_to: Sequence[Literal["tensorboard", "trackio", "wandb"]]
    tasks: int
    samples: int
    temperature: float
    baseline: str
    treatment: str
    control: str | None
    with_start: bool
    policies: Mapping[str, PolicyConfigWords | Mapping[str, Any]]
    looks: int
    shared_only: bool
    units: Literal["auto", "sampled", "fixed"]
    planning: PlanningWords | Mapping[str, Any]


class JuicerConfigWords(TypedDict, total=False):
    recipe: str | None
    command: str


class ImportWords(TypedDict, total=False):
    seed: int
    format: Literal[
        "auto",
        "verifiers",
        "mini-swe-agent",
        "swe-agent",
        "openhands",
        "inspect",
        "nemo-gym",
        "trl",
        "openenv",
        "swebench-preds",
        "messages",
        "claude-code",
        "atif",
        "swe-logs",
    ]
    paths: Sequence[str]
    model: str | None
    redact: bool
    dj: Path | str | JuicerConfigWords | Mapping[str, Any]


class ExportWords(TypedDict, total=False):
    seed: int
    format: Literal["trl", "openenv", "swebench-preds", "verifiers", "inspect", "harbor", "merged", "hub"]
    base_image: str
    repo: str
    private: bool
    api_key_env: str
    endpoint: str


class ProposerWords(TypedDict, total=False):
    model: str
    base_url: str | None
    server: ServerWords | Mapping[str, Any]
    api_key_env: str
    usd_per_mtok_in: float | None
    usd_per_mtok_cached_in: float | None
    usd_per_mtok_out: float | None
    price: Literal["unknown"] | None
    temperature: float
    max_tokens: int
    request: Mapping[str, Any]
    extra_body: Mapping[str, Any]
    chat_template_kwargs: Mapping[str, bool | int | float | str]
    tool_calls: Literal["none", "native", "qwen3", "llama3", "mistral", "deepseek", "gpt-oss"]
    dtype: str
    device: str
    lockstep: int
    kv_cache_gib: float | None
    prefill_tokens: int
    concurrency: int
    timeout_s: float
    max_attempts: int


class TasksWords(TypedDict, total=False):
    seed: int
    env: Literal["feature-deletion"]
    package: str
    tasks: int
    split: Literal["train", "eval", "both"]
    kinds: Sequence[Literal["function", "class", "cluster"]]
    difficulty: Literal["easy", "medium", "hard", "mixed"]
    scope: Literal["full", "covering"]
    requirements: Sequence[str]
    sandbox: str
    proposer: ProposerWords | Mapping[str, Any] | None
    questions: int
    time_limit_s: float


class CurriculumWords(TypedDict, total=False):
    seed: int
    min_rate: float
    max_rate: float
    min_rollouts: int
    order: Literal["easy-first", "hard-first"]


class NormalizeWords(TypedDict, total=False):
    seed: int
    dj: Path | str | JuicerConfigWords | Mapping[str, Any]


class SubstratesWords(TypedDict, total=False):
    seed: int
    env: Path | str | EnvConfigWords | Mapping[str, Any]
    sandbox: str
    policy: Path | str | PolicyConfigWords | Mapping[str, Any]
    tasks: int
    samples: int
    max_steps: int
    through: Literal["process", "openenv"]
    openenv_python: str
    traces: str | None


class ProbeSvdWords(TypedDict, total=False):
    seed: int
    model: PolicyConfigWords | Mapping[str, Any]
    precision: Literal["float32", "float64"]


class PairsConfigWords(TypedDict, total=False):
    source: str
    count: int
    held_out: int


class ProbeExtractVhackWords(TypedDict, total=False):
    seed: int
    student: PolicyConfigWords | Mapping[str, Any]
    adapter: Literal[
        "antipasto_full", "antipasto_topr", "antipasto_paper", "lora", "lora_frozenA", "lora_random_B", "lora_warmup"
    ]
    rank: int
    warmup_steps: int
    loss: Literal["nll", "grpo"]
    method: Literal["mean", "svd_k"]
    k: int
    noise_floor: float
    pairs: PairsConfigWords | Mapping[str, Any]
    max_tokens: int
    checkpointing: bool


class SourceConfigWords(TypedDict, total=False):
    name: Literal["teacher", "teacher_nohint", "base", "student"]
    policy: PolicyConfigWords | Mapping[str, Any]
    lora: str
    options: Mapping[str, Any]
    samples: int
    role: Literal["rh", "plain"]


class ContractWords(TypedDict, total=False):
    hint: str
    replaced: str
    system: str
    answer_prefix: str


class RecordedConfigWords(TypedDict, total=False):
    folder: str
    model: str
    eos_id: int
    pad_ids: Sequence[int]


class GivenConfigWords(TypedDict, total=False):
    name: Literal["teacher", "teacher_nohint", "base", "student"]
    role: Literal["rh", "plain"]


class ProbeTeacherPoolWords(TypedDict, total=False):
    seed: int
    env: Path | str | EnvConfigWords | Mapping[str, Any]
    sandbox: str
    sources: Sequence[SourceConfigWords | Mapping[str, Any]]
    problems: int
    max_problems: int
    max_steps: int
    contract: ContractWords | Mapping[str, Any]
    recorded: RecordedConfigWords | Mapping[str, Any] | None
    given: Sequence[GivenConfigWords | Mapping[str, Any]]
    tokenizer: PolicyConfigWords | Mapping[str, Any] | None


class DescentConfigWords(TypedDict, total=False):
    optimiser: Literal["adam", "sgd"]
    learning_rate: float
    clip: float
    project_on: Literal["grad", "update", "both"]
    beta: float


class ProbeReplayWords(TypedDict, total=False):
    seed: int
    arm: Literal[
        "vanilla",
        "projected",
        "projected_random",
        "two_sided",
        "lora_vanilla",
        "lora_projected",
        "lora_projected_random",
        "lora_two_sided",
    ]
    student: PolicyConfigWords | Mapping[str, Any]
    steps: int
    teach: Sequence[str]
    descent: DescentConfigWords | Mapping[str, Any]
    first_tokens: int
    max_tokens: int
    drift: bool
    keep: Literal["rows", "sums"]
    dtype: Literal["float32", "bfloat16", "float16"]
    checkpointing: bool


class ProbeScoreWords(TypedDict, total=False):
    seed: int
    placebos: int


class ProbeUatWords(TypedDict, total=False):
    seed: int
    permutations: int
    placebos: int


class ProbeGrpoWords(TypedDict, total=False):
    seed: int
    env: Path | str | EnvConfigWords | Mapping[str, Any]
    sandbox: str
    arm: Literal[
        "vanilla",
        "projected",
        "projected_random",
        "two_sided",
        "lora_vanilla",
        "lora_projected",
        "lora_projected_random",
        "lora_two_sided",
        "teacher_off",
        "lora_teacher_off",
    ]
    generator: Literal["pi_theta", "mixed_is", "mixed_awr", "interp"]
    student: PolicyConfigWords | Mapping[str, Any]
    teacher: PolicyConfigWords | Mapping[str, Any]
    options: Mapping[str, Any]
    plain_options: Mapping[str, Any]
    alpha: float | None
    direction_at: Literal["start", "given"]
    drift_every: int
    seeds: Sequence[int]
    steps: int
    problems: int
    samples: int
    max_steps: int
    descent: DescentConfigWords | Mapping[str, Any]
    eval_problems: int
    eval_temperature: float
    max_tokens: int
    checkpointing: bool


class ProbeCompareWords(TypedDict, total=False):
    seed: int
    resamples: int


class ProbeWatchWords(TypedDict, total=False):
    seed: int
    placebos: int
    permutations: int
    max_tokens: int
    checkpointing: bool


class ProbePlotWords(TypedDict, total=False):
    seed: int


class ProbeSelftestWords(TypedDict, total=False):
    seed: int


class Collect(Protocol):
    """Play a policy in an environment and keep every step."""

    name: str

    def __call__(
        self,
        *runs: Run,
        config: Path | str | Sequence[Path | str] = ...,
        artifacts: Path | str = ...,
        out: Path | str | None = ...,
        resume: bool = ...,
        clean: bool = ...,
        on: str | None = ...,
        max_cost: float | None = ...,
        trust: bool = ...,
        quiet: bool = ...,
        listener: Listener | None = ...,
        **chosen: Unpack[CollectWords],
    ) -> ReadableRun: ...

    def plan(
        self,
        *runs: Run,
        config: Path | str | Sequence[Path | str] = ...,
        artifacts: Path | str = ...,
        trust: bool = ...,
        **chosen: Unpack[CollectWords],
    ) -> Plan: ...

    def settings(self) -> dict[str, Any]: ...


class ReplayTeachers(Protocol):
    """Ask every teacher what it would have done at each step."""

    name: str

    def __call__(
        self,
        *runs: Run,
        config: Path | str | Sequence[Path | str] = ...,
        artifacts: Path | str = ...,
        out: Path | str | None = ...,
        resume: bool = ...,
        clean: bool = ...,
        on: str | None = ...,
        max_cost: float | None = ...,
        trust: bool = ...,
        quiet: bool = ...,
        listener: Listener | None = ...,
        **chosen: Unpack[ReplayTeachersWords],
    ) -> ReadableRun: ...

    def plan(
        self,
        *runs: Run,
        config: Path | str | Sequence[Path | str] = ...,
        artifacts: Path | str = ...,
        trust: bool = ...,
        **chosen: Unpack[ReplayTeachersWords],
    ) -> Plan: ...

    def settings(self) -> dict[str, Any]: ...


class ExtractPairs(Protocol):
    """Turn disagreement with the teachers into preference pairs."""

    name: str

    def __call__(
        self,
        *runs: Run,
        config: Path | str | Sequence[Path | str] = ...,
        artifacts: Path | str = ...,
        out: Path | str | None = ...,
        resume: bool = ...,
        clean: bool = ...,
        on: str | None = ...,
        max_cost: float | None = ...,
        trust: bool = ...,
        quiet: bool = ...,
        listener: Listener | None = ...,
        **chosen: Unpack[ExtractPairsWords],
    ) -> ReadableRun: ...

    def plan(
        self,
        *runs: Run,
        config: Path | str | Sequence[Path | str] = ...,
        artifacts: Path | str = ...,
        trust: bool = ...,
        **chosen: Unpack[ExtractPairsWords],
    ) -> Plan: ...

    def settings(self) -> dict[str, Any]: ...


class Train(Protocol):
    """Train an arm: GRPO, with preference pairs or imitation in addition."""

    name: str

    def __call__(
        self,
        *runs: Run,
        config: Path | str | Sequence[Path | str] = ...,
        artifacts: Path | str = ...,
        out: Path | str | None = ...,
        resume: bool = ...,
        clean: bool = ...,
        on: str | None = ...,
        max_cost: float | None = ...,
        trust: bool = ...,
        quiet: bool = ...,
        listener: Listener | None = ...,
        **chosen: Unpack[TrainWords],
    ) -> ReadableRun: ...

    def plan(
        self,
        *runs: Run,
        config: Path | str | Sequence[Path | str] = ...,
        artifacts: Path | str = ...,
        trust: bool = ...,
        **chosen: Unpack[TrainWords],
    ) -> Plan: ...

    def settings(self) -> dict[str, Any]: ...


class Evaluate(Protocol):
    """Compare trained arms on held-out tasks, with statistics."""

    name: str

    def __call__(
        self,
        *runs: Run,
        config: Path | str | Sequence[Path | str] = ...,
        artifacts: Path | str = ...,
        out: Path | str | None = ...,
        resume: bool = ...,
        clean: bool = ...,
        on: str | None = ...,
        max_cost: float | None = ...,
        trust: bool = ...,
        quiet: bool = ...,
        listener: Listener | None = ...,
        **chosen: Unpack[EvaluateWords],
    ) -> Evaluation: ...

    def plan(
        self,
        *runs: Run,
        config: Path | str | Sequence[Path | str] = ...,
        artifacts: Path | str = ...,
        trust: bool = ...,
        **chosen: Unpack[EvaluateWords],
    ) -> Plan: ...

    def settings(self) -> dict[str, Any]: ...


class Import(Protocol):
    """Import rollouts that other programs wrote."""

    name: str

    def __call__(
        self,
        *runs: Run,
        config: Path | str | Sequence[Path | str] = ...,
        artifacts: Path | str = ...,
        out: Path | str | None = ...,
        resume: bool = ...,
        clean: bool = ...,
        on: str | None = ...,
        max_cost: float | None = ...,
        trust: bool = ...,
        quiet: bool = ...,
        listener: Listener | None = ...,
        **chosen: Unpack[ImportWords],
    ) -> ReadableRun: ...

    def plan(
        self,
        *runs: Run,
        config: Path | str | Sequence[Path | str] = ...,
        artifacts: Path | str = ...,
        trust: bool = ...,
        **chosen: Unpack[ImportWords],
    ) -> Plan: ...

    def settings(self) -> dict[str, Any]: ...


class Export(Protocol):
    """Write rollouts and pairs in the formats of other programs."""

    name: str

    def __call__(
        self,
        *runs: Run,
        config: Path | str | Sequence[Path | str] = ...,
        artifacts: Path | str = ...,
        out: Path | str | None = ...,
        resume: bool = ...,
        clean: bool = ...,
        on: str | None = ...,
        max_cost: float | None = ...,
        trust: bool = ...,
        quiet: bool = ...,
        listener: Listener | None = ...,
        **chosen: Unpack[ExportWords],
    ) -> ReadableRun: ...

    def plan(
        self,
        *runs: Run,
        config: Path | str | Sequence[Path | str] = ...,
        artifacts: Path | str = ...,
        trust: bool = ...,
        **chosen: Unpack[ExportWords],
    ) -> Plan: ...

    def settings(self) -> dict[str, Any]: ...


class Tasks(Protocol):
    """Make tasks from any tested Python package."""

    name: str

    def __call__(
        self,
        *runs: Run,
        config: Path | str | Sequence[Path | str] = ...,
        artifacts: Path | str = ...,
        out: Path | str | None = ...,
        resume: bool = ...,
        clean: bool = ...,
        on: str | None = ...,
        max_cost: float | None = ...,
        trust: bool = ...,
        quiet: bool = ...,
        listener: Listener | None = ...,
        **chosen: Unpack[TasksWords],
    ) -> ReadableRun: ...

    def plan(
        self,
        *runs: Run,
        config: Path | str | Sequence[Path | str] = ...,
        artifacts: Path | str = ...,
        trust: bool = ...,
        **chosen: Unpack[TasksWords],
    ) -> Plan: ...

    def settings(self) -> dict[str, Any]: ...


class Curriculum(Protocol):
    """Order tasks by how often rollouts solved them."""

    name: str

    def __call__(
        self,
        *runs: Run,
        config: Path | str | Sequence[Path | str] = ...,
        artifacts: Path | str = ...,
        out: Path | str | None = ...,
        resume: bool = ...,
        clean: bool = ...,
        on: str | None = ...,
        max_cost: float | None = ...,
        trust: bool = ...,
        quiet: bool = ...,
        listener: Listener | None = ...,
        **chosen: Unpack[CurriculumWords],
    ) -> ReadableRun: ...

    def plan(
        self,
        *runs: Run,
        config: Path | str | Sequence[Path | str] = ...,
        artifacts: Path | str = ...,
        trust: bool = ...,
        **chosen: Unpack[CurriculumWords],
    ) -> Plan: ...

    def settings(self) -> dict[str, Any]: ...


class Normalize(Protocol):
    """Filter rollouts by a Data-Juicer recipe."""

    name: str

    def __call__(
        self,
        *runs: Run,
        config: Path | str | Sequence[Path | str] = ...,
        artifacts: Path | str = ...,
        out: Path | str | None = ...,
        resume: bool = ...,
        clean: bool = ...,
        on: str | None = ...,
        max_cost: float | None = ...,
        trust: bool = ...,
        quiet: bool = ...,
        listener: Listener | None = ...,
        **chosen: Unpack[NormalizeWords],
    ) -> ReadableRun: ...

    def plan(
        self,
        *runs: Run,
        config: Path | str | Sequence[Path | str] = ...,
        artifacts: Path | str = ...,
        trust: bool = ...,
        **chosen: Unpack[NormalizeWords],
    ) -> Plan: ...

    def settings(self) -> dict[str, Any]: ...


class Substrates(Protocol):
    """Compare rollouts through TRL with those of prime-rl or verifiers."""

    name: str

    def __call__(
        self,
        *runs: Run,
        config: Path | str | Sequence[Path | str] = ...,
        artifacts: Path | str = ...,
        out: Path | str | None = ...,
        resume: bool = ...,
        clean: bool = ...,
        on: str | None = ...,
        max_cost: float | None = ...,
        trust: bool = ...,
        quiet: bool = ...,
        listener: Listener | None = ...,
        **chosen: Unpack[SubstratesWords],
    ) -> ReadableRun: ...

    def plan(
        self,
        *runs: Run,
        config: Path | str | Sequence[Path | str] = ...,
        artifacts: Path | str = ...,
        trust: bool = ...,
        **chosen: Unpack[SubstratesWords],
    ) -> Plan: ...

    def settings(self) -> dict[str, Any]: ...


class ProbeSvd(Protocol):
    """Decompose the adapted weights of a model, once."""

    name: str

    def __call__(
        self,
        *runs: Run,
        config: Path | str | Sequence[Path | str] = ...,
        artifacts: Path | str = ...,
        out: Path | str | None = ...,
        resume: bool = ...,
        clean: bool = ...,
        on: str | None = ...,
        max_cost: float | None = ...,
        trust: bool = ...,
        quiet: bool = ...,
        listener: Listener | None = ...,
        **chosen: Unpack[ProbeSvdWords],
    ) -> ReadableRun: ...

    def plan(
        self,
        *runs: Run,
        config: Path | str | Sequence[Path | str] = ...,
        artifacts: Path | str = ...,
        trust: bool = ...,
        **chosen: Unpack[ProbeSvdWords],
    ) -> Plan: ...

    def settings(self) -> dict[str, Any]: ...


class ProbeExtractVhack(Protocol):
    """Find the direction from clean to hacking answers in gradient space."""

    name: str

    def __call__(
        self,
        *runs: Run,
        config: Path | str | Sequence[Path | str] = ...,
        artifacts: Path | str = ...,
        out: Path | str | None = ...,
        resume: bool = ...,
        clean: bool = ...,
        on: str | None = ...,
        max_cost: float | None = ...,
        trust: bool = ...,
        quiet: bool = ...,
        listener: Listener | None = ...,
        **chosen: Unpack[ProbeExtractVhackWords],
    ) -> ReadableRun: ...

    def plan(
        self,
        *runs: Run,
        config: Path | str | Sequence[Path | str] = ...,
        artifacts: Path | str = ...,
        trust: bool = ...,
        **chosen: Unpack[ProbeExtractVhackWords],
    ) -> Plan: ...

    def settings(self) -> dict[str, Any]: ...


class ProbeTeacherPool(Protocol):
    """Collect answers of a hacking teacher, with and without its hint, and of the base model."""

    name: str

    def __call__(
        self,
        *runs: Run,
        config: Path | str | Sequence[Path | str] = ...,
        artifacts: Path | str = ...,
        out: Path | str | None = ...,
        resume: bool = ...,
        clean: bool = ...,
        on: str | None = ...,
        max_cost: float | None = ...,
        trust: bool = ...,
        quiet: bool = ...,
        listener: Listener | None = ...,
        **chosen: Unpack[ProbeTeacherPoolWords],
    ) -> ReadableRun: ...

    def plan(
        self,
        *runs: Run,
        config: Path | str | Sequence[Path | str] = ...,
        artifacts: Path | str = ...,
        trust: bool = ...,
        **chosen: Unpack[ProbeTeacherPoolWords],
    ) -> Plan: ...

    def settings(self) -> dict[str, Any]: ...


class ProbeReplay(Protocol):
    """Train a student on the pool and measure every row's gradient."""

    name: str

    def __call__(
        self,
        *runs: Run,
        config: Path | str | Sequence[Path | str] = ...,
        artifacts: Path | str = ...,
        out: Path | str | None = ...,
        resume: bool = ...,
        clean: bool = ...,
        on: str | None = ...,
        max_cost: float | None = ...,
        trust: bool = ...,
        quiet: bool = ...,
        listener: Listener | None = ...,
        **chosen: Unpack[ProbeReplayWords],
    ) -> ReadableRun: ...

    def plan(
        self,
        *runs: Run,
        config: Path | str | Sequence[Path | str] = ...,
        artifacts: Path | str = ...,
        trust: bool = ...,
        **chosen: Unpack[ProbeReplayWords],
    ) -> Plan: ...

    def settings(self) -> dict[str, Any]: ...


class ProbeScore(Protocol):
    """Score kept gradients against a direction and its placebos, without a model."""

    name: str

    def __call__(
        self,
        *runs: Run,
        config: Path | str | Sequence[Path | str] = ...,
        artifacts: Path | str = ...,
        out: Path | str | None = ...,
        resume: bool = ...,
        clean: bool = ...,
        on: str | None = ...,
        max_cost: float | None = ...,
        trust: bool = ...,
        quiet: bool = ...,
        listener: Listener | None = ...,
        **chosen: Unpack[ProbeScoreWords],
    ) -> ReadableRun: ...

    def plan(
        self,
        *runs: Run,
        config: Path | str | Sequence[Path | str] = ...,
        artifacts: Path | str = ...,
        trust: bool = ...,
        **chosen: Unpack[ProbeScoreWords],
    ) -> Plan: ...

    def settings(self) -> dict[str, Any]: ...


class ProbeUat(Protocol):
    """Run the checks T1 to T4 and say what they decide."""

    name: str

    def __call__(
        self,
        *runs: Run,
        config: Path | str | Sequence[Path | str] = ...,
        artifacts: Path | str = ...,
        out: Path | str | None = ...,
        resume: bool = ...,
        clean: bool = ...,
        on: str | None = ...,
        max_cost: float | None = ...,
        trust: bool = ...,
        quiet: bool = ...,
        listener: Listener | None = ...,
        **chosen: Unpack[ProbeUatWords],
    ) -> ReadableRun: ...

    def plan(
        self,
        *runs: Run,
        config: Path | str | Sequence[Path | str] = ...,
        artifacts: Path | str = ...,
        trust: bool = ...,
        **chosen: Unpack[ProbeUatWords],
    ) -> Plan: ...

    def settings(self) -> dict[str, Any]: ...


class ProbeGrpo(Protocol):
    """Follow a GRPO trajectory: does its own gradient lead to hacking?"""

    name: str

    def __call__(
        self,
        *runs: Run,
        config: Path | str | Sequence[Path | str] = ...,
        artifacts: Path | str = ...,
        out: Path | str | None = ...,
        resume: bool = ...,
        clean: bool = ...,
        on: str | None = ...,
        max_cost: float | None = ...,
        trust: bool = ...,
        quiet: bool = ...,
        listener: Listener | None = ...,
        **chosen: Unpack[ProbeGrpoWords],
    ) -> ReadableRun: ...

    def plan(
        self,
        *runs: Run,
        config: Path | str | Sequence[Path | str] = ...,
        artifacts: Path | str = ...,
        trust: bool = ...,
        **chosen: Unpack[ProbeGrpoWords],
    ) -> Plan: ...

    def settings(self) -> dict[str, Any]: ...


class ProbeCompare(Protocol):
    """Compare LoRA with SVD, directions, or projected with vanilla trajectories."""

    name: str

    def __call__(
        self,
        *runs: Run,
        config: Path | str | Sequence[Path | str] = ...,
        artifacts: Path | str = ...,
        out: Path | str | None = ...,
        resume: bool = ...,
        clean: bool = ...,
        on: str | None = ...,
        max_cost: float | None = ...,
        trust: bool = ...,
        quiet: bool = ...,
        listener: Listener | None = ...,
        **chosen: Unpack[ProbeCompareWords],
    ) -> ReadableRun: ...

    def plan(
        self,
        *runs: Run,
        config: Path | str | Sequence[Path | str] = ...,
        artifacts: Path | str = ...,
        trust: bool = ...,
        **chosen: Unpack[ProbeCompareWords],
    ) -> Plan: ...

    def settings(self) -> dict[str, Any]: ...


class ProbeWatch(Protocol):
    """Watch a training run: do its updates turn toward a hack, and when?"""

    name: str

    def __call__(
        self,
        *runs: Run,
        config: Path | str | Sequence[Path | str] = ...,
        artifacts: Path | str = ...,
        out: Path | str | None = ...,
        resume: bool = ...,
        clean: bool = ...,
        on: str | None = ...,
        max_cost: float | None = ...,
        trust: bool = ...,
        quiet: bool = ...,
        listener: Listener | None = ...,
        **chosen: Unpack[ProbeWatchWords],
    ) -> ReadableRun: ...

    def plan(
        self,
        *runs: Run,
        config: Path | str | Sequence[Path | str] = ...,
        artifacts: Path | str = ...,
        trust: bool = ...,
        **chosen: Unpack[ProbeWatchWords],
    ) -> Plan: ...

    def settings(self) -> dict[str, Any]: ...


class ProbePlot(Protocol):
    """Draw the probe's figures, each with a CSV twin."""

    name: str

    def __call__(
        self,
        *runs: Run,
        config: Path | str | Sequence[Path | str] = ...,
        artifacts: Path | str = ...,
        out: Path | str | None = ...,
        resume: bool = ...,
        clean: bool = ...,
        on: str | None = ...,
        max_cost: float | None = ...,
        trust: bool = ...,
        quiet: bool = ...,
        listener: Listener | None = ...,
        **chosen: Unpack[ProbePlotWords],
    ) -> ReadableRun: ...

    def plan(
        self,
        *runs: Run,
        config: Path | str | Sequence[Path | str] = ...,
        artifacts: Path | str = ...,
        trust: bool = ...,
        **chosen: Unpack[ProbePlotWords],
    ) -> Plan: ...

    def settings(self) -> dict[str, Any]: ...


class ProbeSelftest(Protocol):
    """Break the probe in every known way and see which guard notices."""

    name: str

    def __call__(
        self,
        *runs: Run,
        config: Path | str | Sequence[Path | str] = ...,
        artifacts: Path | str = ...,
        out: Path | str | None = ...,
        resume: bool = ...,
        clean: bool = ...,
        on: str | None = ...,
        max_cost: float | None = ...,
        trust: bool = ...,
        quiet: bool = ...,
        listener: Listener | None = ...,
        **chosen: Unpack[ProbeSelftestWords],
    ) -> ReadableRun: ...

    def plan(
        self,
        *runs: Run,
        config: Path | str | Sequence[Path | str] = ...,
        artifacts: Path | str = ...,
        trust: bool = ...,
        **chosen: Unpack[ProbeSelftestWords],
    ) -> Plan: ...

    def settings(self) -> dict[str, Any]: ...
