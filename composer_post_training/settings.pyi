# Generated from the settings of all stages by `./dev cog`.
# [[[cog
# from docs import stubs
# cog.outl(stubs.stubs())
# ]]]
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any, Literal, Required, TypedDict, Unpack

from composer_post_training.results import ComparedLogs, Evaluation, ReadableRun
from composer_stages.runs.run import Run
from composer_stages.runs.settings import Settings as _Group
from composer_stages.runs.stage import Plan

class _Function:
    def settings(self) -> dict[str, Any]:
        """Return every setting by its dotted key, with its default; None where there is none."""

Submitted = Literal["slurm", "hf-jobs", "modal"]
"""Where a chain is submitted to."""

class Arguments(TypedDict, total=False):
    config: Path | str | list[Path | str] | tuple[Path | str, ...]
    """A TOML file with settings, or several; later ones and keywords win."""
    artifacts: Path | str
    """The folder where runs are kept."""
    out: Path | str | None
    """Another folder for this run, or s3://BUCKET/RUN."""
    resume: bool
    """Go on with an unfinished run."""
    clean: bool
    """Delete what the run's folder holds and start again."""
    on: str | None
    """Workers to which the work is dealt, such as processes:4, ray or ray://HOST:PORT."""
    max_cost: float | None
    """USD, never more, over all attempts."""
    fresh: bool
    """Ask anew also where another run has bought the answer."""
    trust: bool
    """Send a provider's key to another server where a settings file says so."""
    quiet: bool
    """No progress on stderr."""
    listener: Callable[[str, int, int], None] | None
    """Called with the progress in place of stderr: (what, units done, units in all)."""

class RolloutLimitsSettings(TypedDict, total=False):
    wall_s: float | None
    """Wall time of a rollout; a request in flight is then abandoned, a running command is awaited."""
    context_tokens: int | None
    """Longest prompt and answer together, as counted by the server or a tokenizer, else by UTF-8 bytes as a bound."""
    cost_usd: float | None
    """What a rollout may cost; the answer that reaches the limit is the last. Without prices and without a limit of the
    run, all rollouts together may cost as much."""

class InFlightSettings(TypedDict, total=False):
    rollouts: int
    """Rollouts played at once where the policy is on a server; as many again may wait for a grader. A model in this
    process plays batches instead."""
    commands: int
    """Commands and workspace set-ups at once."""
    gradings: int
    """Gradings at once."""

class ServerSettings(TypedDict, total=False):
    python: str
    """Interpreter of the environment that holds vLLM; empty for the one that COMPOSER_VLLM names, else `.vllm`'s."""
    args: Mapping[str, bool | int | float | str]
    """Further options of vLLM's server: {"tensor-parallel-size": 2, "gpu-memory-utilization": 0.4}. With {"enable-
    sleep-mode": true} it leaves the memory of a GPU to the training while a step trains."""

class PolicySettings(TypedDict, total=False):
    model: str
    """Hugging Face folder, hub id, GGUF file, `smollm2`, `qwen-coder` or `kata:NAME`; with `base_url`, the server's
    name for it. Without `base_url`, `vllm:` before it starts a vLLM server that samples it, token by token. `reference`
    plays each task's own solution, `noop` does nothing; neither asks a server."""
    base_url: str | None
    """Root of an OpenAI-compatible server, for example https://api.openai.com/v1; empty for none, where a file gives
    one."""
    server: _Group | ServerSettings
    api_key_env: str
    """Name of the environment variable that holds the key; empty for a server that needs none."""
    usd_per_mtok_in: float | None
    """Price of a million input tokens of a server in USD; 0 where it is free. Without prices those of the package
    genai-prices count, if it is installed and knows model and host."""
    usd_per_mtok_cached_in: float | None
    """Price of a million input tokens that the server reports as cached; without it they cost as much as others."""
    usd_per_mtok_cache_write: float | None
    """Price of a million input tokens that the server writes to its cache; without it 1.25 times that of others."""
    usd_per_mtok_out: float | None
    """Price of a million output tokens in USD."""
    price: Literal['unknown'] | None
    """"unknown" lets a server without prices be asked under a limit of cost: a call at a time, by its own bills."""
    temperature: float
    """0 is greedy. Nothing else shapes the distribution, so that log-probs are exact: no top_p, top_k or penalties."""
    max_tokens: int | None
    """Longest answer in tokens; one that reaches it counts as truncated. Without it 64 for an environment's own model
    such as `kata:student`, 128 for smollm2, 512 for qwen-coder; for all others as long as the context has room for."""
    request: Mapping[str, Any]
    """Fields of a server's request to set otherwise, or with `false` to leave out: `request = { seed = false }`."""
    extra_body: Mapping[str, Any]
    """Further fields of a server's request, sent as they are: `extra_body = { provider = { only = ["x"] } }`."""
    chat_template_kwargs: Mapping[str, bool | int | float | str]
    """Settings of the chat template, in every rendering: {"enable_thinking": false} for Qwen3 without thinking."""
    template_date: date | str | None
    """What chat templates that write the date of today (Llama 3.2's, GPT-OSS's) take for it: by default 2024-07-26."""
    tool_calls: Literal['none', 'native', 'qwen3', 'qwen3-coder', 'llama3', 'mistral', 'deepseek', 'gpt-oss']
    """How tools are called: `native` where a server reads calls, else in which family's format answers are written. One
    of none, native, qwen3, qwen3-coder, llama3, mistral, deepseek, gpt-oss."""
    dtype: Literal['auto', 'float32', 'bfloat16', 'float16']
    """Floating-point type of a local model's weights. One of auto, float32, bfloat16, float16."""
    device: str
    """auto takes a GPU when there is one."""
    lockstep: int
    """Rollouts or questions that a model in this process works on together; another number moves results by rounding.
    Training plays all rollouts of a step together."""
    kv_cache_gib: float | None
    """Memory for keys and values of a model in this process, in GiB: as many answers are sampled at once as fit. None
    takes 80 % of what the GPU has free, on a CPU half of the memory."""
    prefill_tokens: int
    """Tokens of prompts in one pass of a model in this process."""
    concurrency: int
    """Requests in flight at once to a server."""
    timeout_s: float
    """Wall time of one request; long, because a request that is given up may have been billed."""
    max_attempts: int
    """Launches of one request, the first included."""

class MixingSettings(TypedDict, total=False):
    mixed: float
    """Share of turns that a teacher plays in place of the policy, drawn for each: DAgger's beta. Such turns lead to
    states that the policy alone would not reach; no loss takes them for the policy's own."""

class ExampleSettings(TypedDict, total=False):
    user: Required[str]
    assistant: Required[str]

class TeacherSettings(TypedDict, total=False):
    model: Required[str]
    """Hugging Face folder, hub id, `kata:NAME`, or with `base_url` the server's name for it."""
    base_url: str | None
    """Root of an OpenAI-compatible server, for example https://api.openai.com/v1; empty for none, where a file gives
    one."""
    server: _Group | ServerSettings
    api_key_env: str
    """Name of the environment variable that holds the key; empty for a server that needs none."""
    usd_per_mtok_in: float | None
    """Price of a million input tokens of a server in USD; 0 where it is free. Without prices those of the package
    genai-prices count, if it is installed and knows model and host."""
    usd_per_mtok_cached_in: float | None
    """Price of a million input tokens that the server reports as cached; without it they cost as much as others."""
    usd_per_mtok_cache_write: float | None
    """Price of a million input tokens that the server writes to its cache; without it 1.25 times that of others."""
    usd_per_mtok_out: float | None
    """Price of a million output tokens in USD."""
    price: Literal['unknown'] | None
    """"unknown" lets a server without prices be asked under a limit of cost: a call at a time, by its own bills."""
    temperature: float
    """0 is greedy. Nothing else shapes the distribution, so that log-probs are exact: no top_p, top_k or penalties."""
    max_tokens: int | None
    """Longest answer in tokens; one that reaches it counts as truncated. Without it 64 for an environment's own model
    such as `kata:student`, 128 for smollm2, 512 for qwen-coder; for all others as long as the context has room for."""
    request: Mapping[str, Any]
    """Fields of a server's request to set otherwise, or with `false` to leave out: `request = { seed = false }`."""
    extra_body: Mapping[str, Any]
    """Further fields of a server's request, sent as they are: `extra_body = { provider = { only = ["x"] } }`."""
    chat_template_kwargs: Mapping[str, bool | int | float | str]
    """Settings of the chat template, in every rendering: {"enable_thinking": false} for Qwen3 without thinking."""
    template_date: date | str | None
    """What chat templates that write the date of today (Llama 3.2's, GPT-OSS's) take for it: by default 2024-07-26."""
    tool_calls: Literal['none', 'native', 'qwen3', 'qwen3-coder', 'llama3', 'mistral', 'deepseek', 'gpt-oss']
    """How tools are called: `native` where a server reads calls, else in which family's format answers are written. One
    of none, native, qwen3, qwen3-coder, llama3, mistral, deepseek, gpt-oss."""
    dtype: Literal['auto', 'float32', 'bfloat16', 'float16']
    """Floating-point type of a local model's weights. One of auto, float32, bfloat16, float16."""
    device: str
    """auto takes a GPU when there is one."""
    lockstep: int
    """Rollouts or questions that a model in this process works on together; another number moves results by rounding.
    Training plays all rollouts of a step together."""
    kv_cache_gib: float | None
    """Memory for keys and values of a model in this process, in GiB: as many answers are sampled at once as fit. None
    takes 80 % of what the GPU has free, on a CPU half of the memory."""
    prefill_tokens: int
    """Tokens of prompts in one pass of a model in this process."""
    concurrency: int
    """Largest number of requests in flight to a server; the actual number adapts to the server."""
    timeout_s: float
    """Wall time of one request; long, because a request that is given up may have been billed."""
    max_attempts: int
    """Launches of one request, the first included."""
    name: Required[str]
    """The teacher's name in tables and reports."""
    system: str | None
    """The teacher's own system message, in place of the student's; an empty text for none. It has to say again what
    form an action has, if the student's said it."""
    examples: Sequence[_Group | ExampleSettings] | Path | str
    opening: Mapping[str, Any]
    """Options of the environment with which it opens the teacher's tasks, over the student's: {shots = 8}."""

class StageSettings(TypedDict, total=False):
    seed: int
    """All randomness of the stage comes from here."""

class EnvStageSettings(StageSettings, total=False):
    env: _Group | Mapping[str, Any] | str
    sandbox: str
    """`none` runs the agent's commands unprotected on this machine; every row records it."""

class PlayingSettings(EnvStageSettings, total=False):
    max_steps: int
    """Actions after which a rollout ends."""
    limits: _Group | RolloutLimitsSettings
    history: str
    """What the policy is shown of the past: `full`; `last 5`: of all observations the last five; or `summarise`: from
    near the context limit on, its own summary and everything since."""
    in_flight: _Group | InFlightSettings
    report_to: Literal['tensorboard', 'trackio', 'wandb'] | Sequence[Literal['tensorboard', 'trackio', 'wandb']]
    """Where the run is logged besides its own files: tensorboard, trackio, wandb, one or several."""

class SelectionSettings(TypedDict, total=False):
    rule: Literal['off', 'disagreement', 'value']
    """`off` asks all teachers in all states. The others ask the cheapest, and one more in states where the answers have
    no majority yet (`disagreement`), or where the pairs that it may add are worth more than its answer (`value`). A
    teacher of unknown price comes last. One of off, disagreement, value."""
    usd_per_pair: float
    """Value of a pair in USD, for the rule `value`."""
    explore: float
    """Share of the states in which all teachers are asked, to measure what an answer adds."""
    failed_only: bool
    """Ask only in states of rollouts that failed, or whose outcome is not known."""

class SignalSettings(TypedDict, total=False):
    rollouts: int
    """Continuations of each action of a pair by the policy that collected the rollouts; 0 plays none. An action that
    ends the rollout is played once, and every action is where the policy's temperature is 0."""

class OptimisationSettings(TypedDict, total=False):
    steps: int
    prompts_per_step: int
    generations: int
    """Rollouts of every prompt: the group whose mean reward is the baseline."""
    learning_rate: float | None
    """By default chosen by the model's size: 2e-4 for small ones; else 1e-6 for all weights, and for adapters 4e-4
    below 0.3 billion parameters, 1e-4 below 1 billion, and 1e-5."""
    max_grad_norm: float
    beta: float
    """GRPO's KL to the reference."""
    loss_type: str
    """TRL's form of the GRPO loss."""
    micro_batch: int | None
    """Rollouts in one forward and backward pass, which moves results by rounding alone, except by fields of TRL's that
    act on the tokens of a pass (entropy_coef, top_entropy_quantile, loss_type bnpo). None takes all of a step for a
    small model, else what is fastest of what fits into the free memory: into a third of a CPU's, 85 % of a GPU's."""
    max_tokens_per_micro_batch: int | None
    """Cut micro-batches further, by length: at most so many tokens, padding included, in one forward and backward pass.
    A row longer than that goes by itself, so that it decides the memory of no other. None does not cut."""
    shared_prompts: bool | None
    """Compute a prompt once for all its samples when scoring them: faster, and equal up to rounding. Off, a step
    without channels is TRL's bit for bit; a step with channels always shares. By default on, where all layers attend by
    `sdpa` to all earlier tokens (Llama, Mistral, Qwen2, Qwen3, SmolLM2, ...), but off for small models, and with
    distribution.sharding."""
    memory_limit: float | None
    """GiB that the estimate of a training's memory may reach, in place of what is free: for rollouts that are known to
    be shorter than their limit."""
    gradient_checkpointing: bool | None
    """Recompute activations instead of keeping them: less memory, more time. By default not for small models, and not
    where they fit into free memory."""
    max_staleness: int
    """With a policy vllm:..., rollouts are played while a step trains, and a step takes the groups that are complete.
    Tokens may be of weights this many steps old, and are corrected by truncated importance sampling; older groups are
    given up, those of the slowest tasks first. 0: each step waits for its own rollouts, of the newest weights."""
    sync_tolerance: float | None
    """With a policy vllm:..., the mean difference in nats, after every step, between log-probs of its rollouts here and
    on the server, above which training stops. By default 0.001 in float32, else 0.1."""
    threads: int | None
    """CPU threads; by default as many as there are. On a CPU, runs are equal byte for byte on equally many only."""
    save_every: int
    """Steps between checkpoints that a resumed run can start from, rounded up to a multiple of trl.num_iterations."""
    keep_every: int
    """Steps between checkpoints that stay beside the result, for the stage probe-watch; 0 for none."""
    stop_on_collapse: bool
    """End the training where reward, entropy, length or form of the answers leave their course (of which it warns in
    any case), with the newest checkpoint from before. Checkpoints of forty steps are then kept beside it."""
    gradient_cosine_every: int
    """Steps between reports of each channel's gradient norm and their cosines; 0 for none."""

class AdapterSettings(TypedDict, total=False):
    kind: Literal['lora', 'singular-values']
    """singular-values trains a change of all singular values of every Linear; the settings below are those of LoRA. One
    of lora, singular-values."""
    rank: int | None
    """Rank of the adapters; 0 trains all weights. By default 0 below ten million parameters, 16 above."""
    alpha: int
    """The adapters' output is scaled by alpha / rank, with rslora by alpha / sqrt(rank)."""
    targets: list[str] | tuple[str, ...]
    """Names of the Linears that get an adapter, such as q_proj; none for all but the output head."""
    dropout: float
    """Of the adapters; only without weights of channels."""
    rslora: bool
    """Scale by the square root of the rank, which keeps high ranks stable."""
    dora: bool
    """Train the magnitude of each weight column apart from its direction."""

class DistributionSettings(TypedDict, total=False):
    sharding: Literal['none', 'fsdp2']
    """fsdp2 spreads weights, float32 masters, gradients and the optimiser's state over the processes, which gather a
    layer at a time; with an adapter its frozen base. none keeps all of them in every process. One of none, fsdp2."""
    servers: list[str] | tuple[str, ...]
    """With a policy vllm:..., further servers beside policy.base_url: the processes sample from all of them in turn."""

class ChannelWeightsSettings(TypedDict, total=False):
    grpo: float
    """GRPO on the environment's reward. At 0 rollouts are still played and recorded, so that learning curves can be
    compared, but nothing is learned from their rewards: with weights.sft alone this is pure imitation."""

class WeightsSettings(ChannelWeightsSettings, total=False):
    dpo: float
    """Direct preference optimisation on extracted pairs."""
    simpo: float
    """SimPO on extracted pairs: length-averaged, without a reference."""
    sft: float
    """Cross-entropy on the chosen action of extracted pairs."""
    sdpo: float
    """Self-distillation: the model's own hint-conditioned distribution teaches it at the faulty turn."""
    taid: float
    """Distillation towards a target that moves from the student to a teacher model, on the student's own actions."""
    eopd: float
    """Entropy-aware on-policy distillation from a teacher model, on the student's own actions."""
    opd: float
    """On-policy distillation from frozen teachers, routed by task or averaged, on the student's own actions."""

class PairsSettings(TypedDict, total=False):
    per_step: int
    """Pairs in every optimiser step."""
    loss_type: Literal['sigmoid', 'hinge', 'ipo', 'sigmoid_norm', 'nca_pair', 'bco_pair', 'sppo_hard', 'apo_zero', 'apo_down', 'discopop']
    """DPO's form, as TRL names them. Those that need more than beta (robust and exo_pair a label smoothing), or all
    pairs of a step at once (aot, aot_unpaired), are not among them. One of sigmoid, hinge, ipo, sigmoid_norm, nca_pair,
    bco_pair, sppo_hard, apo_zero, apo_down, discopop."""
    beta: float
    """DPO's distance to the reference, which is the model that training starts from."""
    simpo_beta: float
    simpo_gamma_ratio: float
    max_tokens: int
    """Longest prompt plus completion; longer completions are cut, and pairs that become equal by that are dropped."""

class HintsSettings(TypedDict, total=False):
    source: Literal['template', 'llm', 'rollout']
    """What the teacher knows more: the error, a model's word on it, or (SDPO's main mode) a successful rollout of the
    same group, shown in the opening message to every other rollout of it. One of template, llm, rollout."""
    llm: _Group | PolicySettings | str | None
    per_step: int
    """Hinted turns in every optimiser step, or rollouts for source = "rollout", at most."""
    success_reward: float
    """Least reward of a rollout that counts as successful, for source = "rollout"; SDPO's own is 0.5."""
    alpha: float
    """0 forward KL, 1 reverse KL, between them the generalised Jensen-Shannon divergence."""
    top_k: int | None
    """Support of the divergence: the student's k most likely tokens; 0 for the whole vocabulary."""
    tail: bool
    """Whether the mass outside the top k is one more entry; otherwise it is divided out."""
    teacher: Literal['current', 'ema', 'trust-region']
    """Whose distribution behind the hint is learnt: the student's own, its moving average's (SDPO's default), or in
    logits a mixture of the starting model's and the student's. One of current, ema, trust-region."""
    teacher_rate: float
    """The student's share in a moving average after every step, or in the mixture; SDPO's own is 0.05."""
    importance_clip: float | None
    """Weigh each token by its probability now over that of sampling it, at most so much; SDPO's own is 2."""
    check_answers: int
    """Answers before training with the hint, and as many without, where hints stand before an answer (gsm8k, skills): a
    training whose hints make the student pass less often stops with exit code 3. 0 trains without checking."""

class TaidSettings(TypedDict, total=False):
    t_start: float
    t_end: float
    alpha: float
    """Size of the adaptive increments."""
    beta: float
    """Memory of the momentum."""
    disable_adaptive: bool
    """Move linearly, by the share of steps that are done."""

class EopdSettings(TypedDict, total=False):
    entropy_threshold: float
    """Least entropy (nats) of the teacher at a token that gets it."""
    coefficient: float
    """Its weight beside the reverse KL."""
    top_k: int
    """The teacher's most likely tokens that it is taken over."""

class OpdTeacherSettings(PolicySettings, total=False):
    tasks: list[str] | tuple[str, ...]
    """Patterns of task ids or families, such as `arithmetic*`; none for all tasks."""
    opening: Mapping[str, Any]
    """Options of the environment with which it opens the teacher's tasks, over the student's: {shots = 8} for worked
    examples that the student is not shown."""

class OpdSettings(TypedDict, total=False):
    form: Literal['divergence', 'sampled']
    """divergence compares distributions (GKD, OPSD), given top_k also with those of a teacher behind vLLM; sampled is a
    policy gradient whose advantage is the teacher's log-prob of each sampled token less the student's (MOPD, tinker-
    cookbook). One of divergence, sampled."""
    beta: float
    """1 reverse KL, 0 forward KL, between them the generalised Jensen-Shannon divergence."""
    top_k: int | None
    """The teacher's k most likely tokens, with the mass outside divided out, as OPSD; None for the whole vocabulary. A
    server tells so many from --max-logprobs, 20 unless it was started with another."""
    teachers: list[_Group | OpdTeacherSettings | str] | tuple[_Group | OpdTeacherSettings | str, ...]

class DilocoSettings(TypedDict, total=False):
    store: str | None
    """Object store by which replicas exchange weights: s3://BUCKET/RUN, gs://, az:// or file:///FOLDER. None trains
    without replicas."""
    replicas: int
    """Replicas that the first round waits for; later ones may join, and any may leave."""
    replica: int | None
    """This replica's number, from 0, on which its random draws depend. None takes the first free one in the bucket."""
    inner_steps: int
    """Training steps between two rounds on the same weights."""
    outer_learning_rate: float
    """Learning rate of the outer step. 1 with momentum 0 is the plain average."""
    outer_momentum: float
    """Nesterov momentum of the outer step. The papers' 0.7 and 0.9 are for hundreds of rounds."""
    codec: Literal['float32', 'bf16', 'int8', 'int4']
    """Encoding of the weights that are sent. The rounding error of an offer is added to the next offer. One of float32,
    bf16, int8, int4."""
    fragments: int
    """Parts of the weights that are averaged in turn, each every inner_steps: equal traffic in smaller portions."""
    quorum: int | None
    """Least number of replicas in a round; by default more than half of `replicas`."""
    grace_s: float
    """Seconds that a round waits for others once there is a quorum; later offers do not count in it."""
    timeout_s: float
    """Seconds that a replica waits for a quorum before it gives up."""

class ProbeSettings(TypedDict, total=False):
    project: Literal['v', 'random', 'none']
    """Take what points toward the hack out of every gradient and update, or along a random direction, the control. none
    takes nothing out: the training is measured alone. One of v, random, none."""
    two_sided: bool
    """Take out what points away from the hack, too."""
    measure: bool
    """Compare the gradient of every rollout with the direction, at the weights of the step that learns from it."""
    mixed: Literal['', 'ratio', 'imitation']
    """Half of each group is the teacher's (`teacher`): weighted by the ratio of the student's probability to the
    teacher's, clipped as in PPO, or with ratio 1, which is imitation weighted by advantages. Needs no direction. One of
    , ratio, imitation."""

class PlanningSettings(TypedDict, total=False):
    gain: float
    """The true difference in the pass rate, a fraction."""
    power: float
    seeds: int
    """Training seeds; where nobody gives them, those of the trainings or of the evaluation that are read."""
    pass_rate: float | None
    """The baseline's pass rate, a fraction."""
    samples_differ: float | None
    """How often one of two rollouts of one model on one task passes and the other fails."""
    arms_differ: float | None
    """How often a rollout of one arm passes and one of the other arm on the same task fails."""
    family_correlation: float | None
    """The correlation of two tasks' difficulty within a family, or within what the environment declares instead."""
    seed_sd: float | None
    """The standard deviation of the gain from training seed to training seed, a fraction."""
    usd_per_rollout: float | None

class ProposerSettings(TypedDict, total=False):
    model: str
    """Hugging Face folder, hub id, GGUF file, `smollm2`, `qwen-coder` or `kata:NAME`; with `base_url`, the server's
    name for it. Without `base_url`, `vllm:` before it starts a vLLM server that samples it, token by token. `reference`
    plays each task's own solution, `noop` does nothing; neither asks a server."""
    base_url: str | None
    """Root of an OpenAI-compatible server, for example https://api.openai.com/v1; empty for none, where a file gives
    one."""
    server: _Group | ServerSettings
    api_key_env: str
    """Name of the environment variable that holds the key; empty for a server that needs none."""
    usd_per_mtok_in: float | None
    """Price of a million input tokens of a server in USD; 0 where it is free. Without prices those of the package
    genai-prices count, if it is installed and knows model and host."""
    usd_per_mtok_cached_in: float | None
    """Price of a million input tokens that the server reports as cached; without it they cost as much as others."""
    usd_per_mtok_cache_write: float | None
    """Price of a million input tokens that the server writes to its cache; without it 1.25 times that of others."""
    usd_per_mtok_out: float | None
    """Price of a million output tokens in USD."""
    price: Literal['unknown'] | None
    """"unknown" lets a server without prices be asked under a limit of cost: a call at a time, by its own bills."""
    temperature: float
    """0 is greedy. Nothing else shapes the distribution, so that log-probs are exact: no top_p, top_k or penalties."""
    max_tokens: int
    """Longest answer in tokens; of one that is cut off nothing is used."""
    request: Mapping[str, Any]
    """Fields of a server's request to set otherwise, or with `false` to leave out: `request = { seed = false }`."""
    extra_body: Mapping[str, Any]
    """Further fields of a server's request, sent as they are: `extra_body = { provider = { only = ["x"] } }`."""
    chat_template_kwargs: Mapping[str, bool | int | float | str]
    """Settings of the chat template, in every rendering: {"enable_thinking": false} for Qwen3 without thinking."""
    template_date: date | str | None
    """What chat templates that write the date of today (Llama 3.2's, GPT-OSS's) take for it: by default 2024-07-26."""
    tool_calls: Literal['none', 'native', 'qwen3', 'qwen3-coder', 'llama3', 'mistral', 'deepseek', 'gpt-oss']
    """How tools are called: `native` where a server reads calls, else in which family's format answers are written. One
    of none, native, qwen3, qwen3-coder, llama3, mistral, deepseek, gpt-oss."""
    dtype: Literal['auto', 'float32', 'bfloat16', 'float16']
    """Floating-point type of a local model's weights. One of auto, float32, bfloat16, float16."""
    device: str
    """auto takes a GPU when there is one."""
    lockstep: int
    """Rollouts or questions that a model in this process works on together; another number moves results by rounding.
    Training plays all rollouts of a step together."""
    kv_cache_gib: float | None
    """Memory for keys and values of a model in this process, in GiB: as many answers are sampled at once as fit. None
    takes 80 % of what the GPU has free, on a CPU half of the memory."""
    prefill_tokens: int
    """Tokens of prompts in one pass of a model in this process."""
    concurrency: int
    """Requests in flight at once to a server."""
    timeout_s: float
    """Wall time of one request; long, because a request that is given up may have been billed."""
    max_attempts: int
    """Launches of one request, the first included."""

class JuicerSettings(TypedDict, total=False):
    recipe: str | None
    """The recipe, a YAML file; rollouts that it drops are dropped."""
    command: str
    """Data-Juicer's program, in an environment of its own."""

class HackPairsSettings(TypedDict, total=False):
    source: str
    """`kata`, "package.module:function", or a JSON file: a list of {prompt, hack, clean}."""
    count: int
    """Pairs to extract from."""
    held_out: int
    """Further pairs, for the polarity oracle."""

class SourceSettings(TypedDict, total=False):
    name: Required[Literal['teacher', 'teacher_nohint', 'base', 'student']]
    """One of teacher, teacher_nohint, base, student."""
    policy: Required[_Group | PolicySettings | str]
    lora: str
    """A PEFT LoRA that is put into the policy's model: a folder, or a hub id."""
    options: Mapping[str, Any]
    """Options of the environment for this source: with the hint, or without."""
    samples: int
    """Answers to each problem."""
    role: Literal['rh', 'plain']
    """Whether the prompt reveals the loophole. One of rh, plain."""

class ContractSettings(TypedDict, total=False):
    hint: str
    """A phrase that the user message of a hinted prompt contains exactly once, and that of a plain prompt never."""
    replaced: str
    """The phrase that the hint replaces, absent from hinted prompts."""
    system: str
    """The system message, word for word."""
    answer_prefix: str
    """The end of the rendered prompt, for example an empty think block."""

class RecordedSettings(TypedDict, total=False):
    folder: Required[str]
    model: Required[str]
    """The model that wrote the rows."""
    eos_id: Required[int]
    pad_ids: Sequence[int]

class GivenSettings(TypedDict, total=False):
    name: Required[Literal['teacher', 'teacher_nohint', 'base', 'student']]
    """One of teacher, teacher_nohint, base, student."""
    role: Literal['rh', 'plain']
    """One of rh, plain."""

class DescentSettings(TypedDict, total=False):
    optimiser: Literal['adam', 'sgd']
    """One of adam, sgd."""
    learning_rate: float
    clip: float
    """Largest norm of the gradient, after projection."""
    project_on: Literal['grad', 'update', 'both']
    """One of grad, update, both."""
    beta: float
    """Share of the component along v that is removed."""

class CollectSettings(PlayingSettings, Arguments, total=False):
    policy: _Group | PolicySettings | str
    tasks: int
    """Number of tasks of the split."""
    samples: int
    """Rollouts of every task."""
    rollouts: _Group | MixingSettings
    teachers: list[_Group | TeacherSettings | str] | tuple[_Group | TeacherSettings | str, ...] | str | Path

class _Collect(_Function):
    """Play a policy in an environment and keep every step."""

    def __call__(self, *runs: Run, **settings: Unpack[CollectSettings]) -> ReadableRun: ...
    def plan(self, *runs: Run, **settings: Unpack[CollectSettings]) -> Plan: ...

class ReplayTeachersSettings(StageSettings, Arguments, total=False):
    teachers: list[_Group | TeacherSettings | str] | tuple[_Group | TeacherSettings | str, ...] | str | Path
    answers_per_state: int
    """Answers of every teacher to one state; more than one makes sense with a temperature above 0."""
    selection: _Group | SelectionSettings
    min_answered: float
    """Least share of complete answers for the run to pass."""
    max_usd_per_rollout: float
    """Highest cost of a rollout for the verdict AFFORDABLE."""
    max_p95_latency_s: float
    """Highest 95th percentile of the seconds a step takes with its slowest teacher, for the verdict AFFORDABLE."""
    deal: Literal['local', 'teachers']
    """What workers get: the questions to local models, while servers are asked from this process alone; or teachers,
    those behind servers too, all questions to each by one worker. One of local, teachers."""

class _ReplayTeachers(_Function):
    """Ask every teacher what it would have done at each step."""

    def __call__(self, *runs: Run, **settings: Unpack[ReplayTeachersSettings]) -> ReadableRun: ...
    def plan(self, *runs: Run, **settings: Unpack[ReplayTeachersSettings]) -> Plan: ...

class ExtractPairsSettings(StageSettings, Arguments, total=False):
    compare: Literal['outcome', 'canonical']
    """`outcome` runs actions whose canonical forms differ and compares their outcomes; `canonical` compares text. One
    of outcome, canonical."""
    sandbox: str
    """Where actions are executed."""
    student: str | None
    """The model whose actions are judged in imported groups of several models; without it, each in turn."""
    outcome: Literal['respect', 'ignore']
    """`respect` drops pairs that teach against the grader: those of a majority against an action after which a rollout
    passed. Where both actions were continued (`signal.rollouts`), the pass rates measured there decide instead, about
    every pair. `ignore` keeps all; imported groups have rules of their own. One of respect, ignore."""
    signal: _Group | SignalSettings
    min_pairs_per_rollout: float | None
    """Least mean number of pairs a rollout for the run to pass. By default a tenth of the mean number of steps, and not
    more than 5."""

class _ExtractPairs(_Function):
    """Turn disagreement with the teachers into preference pairs."""

    def __call__(self, *runs: Run, **settings: Unpack[ExtractPairsSettings]) -> ReadableRun: ...
    def plan(self, *runs: Run, **settings: Unpack[ExtractPairsSettings]) -> Plan: ...

class TrainSettings(EnvStageSettings, Arguments, total=False):
    arm: str
    """The arm's name in the evaluation."""
    policy: _Group | PolicySettings | str
    tasks: int
    """Training tasks to draw prompts from."""
    max_steps: int
    """Actions after which a rollout ends."""
    limits: _Group | RolloutLimitsSettings
    in_flight: _Group | InFlightSettings
    optimisation: _Group | OptimisationSettings
    adapter: _Group | AdapterSettings
    distribution: _Group | DistributionSettings
    trl: Mapping[str, Any]
    """Further fields of TRL's GRPOConfig, such as trl.warmup_steps, trl.epsilon_high or trl.scale_rewards."""
    weights: _Group | WeightsSettings
    pairs: _Group | PairsSettings
    hints: _Group | HintsSettings
    taid: _Group | TaidSettings
    eopd: _Group | EopdSettings
    opd: _Group | OpdSettings
    diloco: _Group | DilocoSettings | str
    probe: _Group | ProbeSettings
    seeds: int
    """Trainings that differ in the seed alone, from `seed` on, each a run of its own. The next evaluation reads all."""
    report_to: Literal['tensorboard', 'trackio', 'wandb'] | Sequence[Literal['tensorboard', 'trackio', 'wandb']]
    """Where training is logged besides metrics.jsonl: tensorboard, trackio, wandb, one or several."""
    teacher: _Group | PolicySettings | str | None

class _Train(_Function):
    """Train an arm: GRPO, with preference pairs or imitation in addition."""

    def __call__(self, *runs: Run, **settings: Unpack[TrainSettings]) -> ReadableRun: ...
    def plan(self, *runs: Run, **settings: Unpack[TrainSettings]) -> Plan: ...

class EvaluateSettings(PlayingSettings, Arguments, total=False):
    tasks: int
    """Number of held-out tasks."""
    samples: int
    """Rollouts of every task and arm."""
    temperature: float
    """1 evaluates the policy as it was trained; 0 decodes greedily."""
    baseline: str
    """Trainings of a single arm are compared with their start where no other arms are named."""
    treatment: str
    control: str | None
    """The arm that only imitates the chosen actions."""
    with_start: bool
    """Also evaluate the model that training started from."""
    greedy: bool
    """Also play every arm at temperature 0, as NAME@0 and once a task: whether a gain is shown there too."""
    policies: Mapping[str, _Group | PolicySettings | str]
    looks: int
    """Planned looks: the tasks are played in so many parts, and no more of them once all is decided."""
    units: Literal['auto', 'sampled', 'fixed']
    """Whether the units that tasks are drawn in (kata's operations, SWE-bench's repositories, else families) are a
    sample of possible ones, or all there are. `auto`: as the environment declares. One of auto, sampled, fixed."""
    planning: _Group | PlanningSettings

class _Evaluate(_Function):
    """Compare trained arms on held-out tasks, with statistics."""

    def __call__(self, *runs: Run, **settings: Unpack[EvaluateSettings]) -> Evaluation: ...
    def plan(self, *runs: Run, **settings: Unpack[EvaluateSettings]) -> Plan: ...

class ImportSettings(StageSettings, Arguments, total=False):
    format: Literal['auto', 'verifiers', 'mini-swe-agent', 'swe-agent', 'openhands', 'inspect', 'nemo-gym', 'trl', 'openenv', 'swebench-preds', 'lm-eval', 'lighteval', 'evalplus', 'helm', 'tau-bench', 'terminal-bench', 'messages', 'claude-code', 'atif', 'swe-logs']
    """The format of the files; `auto` looks into each. `swe-logs` grades saved logs of SWE-bench's harnesses again. One
    of auto, verifiers, mini-swe-agent, swe-agent, openhands, inspect, nemo-gym, trl, openenv, swebench-preds, lm-eval,
    lighteval, evalplus, helm, tau-bench, terminal-bench, messages, claude-code, atif, swe-logs."""
    paths: list[str] | tuple[str, ...]
    """Files, folders or patterns. Run descriptions and reports among them are used, not imported."""
    model: str | None
    """The model of rollouts whose files name none."""
    score: str
    """The score that is the reward, where logs hold several (metrics, scorers, filters). By default the one that their
    program calls its result, else none."""
    redact: bool
    """Replace what is likely a secret; `report.txt` shows what stood around each. `false` leaves all texts as they
    are."""

class _Import(_Function):
    """Import rollouts that other programs wrote."""

    def __call__(self, *files: Run | Path | str, **settings: Unpack[ImportSettings]) -> ReadableRun: ...
    def plan(self, *files: Run | Path | str, **settings: Unpack[ImportSettings]) -> Plan: ...

class CompareSettings(StageSettings, Arguments, total=False):
    paths: list[str] | tuple[str, ...]
    """Logs, each a file, a folder, a pattern or a run; the first is A. One alone is split by its models."""
    min_gain: float | None
    """The smallest difference of interest, in units of the score: 0.02 is two points of a pass rate. By default 2 % of
    the scale."""
    not_worse: float | None
    """Decide by whether the side is worse by this or more: exit code 0 where its interval ends above -D, 1 where it
    ends below, else 3. In units of the score, as `min_gain`."""
    missing: Literal['auto', 'excluded', 'failed', 'bounds']
    """Tasks that one side lacks, and samples without a score. `excluded`: these tasks leave both sides, these samples
    the mean of their task. `failed`: they count as the worst score. `bounds`: what is decided must hold however they
    would have ended. `auto`: failed for SWE-bench and Terminal-Bench, whose rule that is; bounds with `not_worse` or
    `policy`, so that no gate passes by tasks that were not played; else excluded. One of auto, excluded, failed,
    bounds."""
    all_pairs: bool
    """Compare every side with every other one, not with the first alone, and say which positions each may have."""
    noise: str | None
    """Another run of the first log's model, which shows how large a difference repeats alone make. Beside one log alone
    it is the other side, too."""
    policy: str | None
    """A TOML file with a table `[[metric]]` for each score in which B has to be `better` or `not_worse` than A: exit
    code 0 where all of it is shown."""
    outcome: str
    """What counts of a task's samples: their mean, the chance that one or more of K pass, or that all K do. Estimated
    without bias from all samples of the task, of which there are K or more."""
    unit: str
    """Tasks that agree in this column (a document, a repository, a family) are no independent evidence: they are
    resampled together."""
    score: str | list[str] | tuple[str, ...]
    """The score to compare, where logs hold several (metrics, scorers, filters, columns): one for all sides, or one for
    each. By default the one that all sides have, if it is one alone. `X+Y+Z` are scores of several judges."""
    id: str
    """The columns of a table that identify a task. By default the first of `task_id`, `id` and their like."""
    scale: str
    """The lowest and the highest score, where the logs do not declare them: what is missing is counted by it."""
    unreconciled: bool
    lower_is_better: bool | None
    """Whether lower scores are better, as of an error rate or a loss. By default what the logs say, and higher where
    they say nothing; it is asked for where lower values of their metric are better by most definitions."""
    flips: bool
    html: str | None
    markdown: str | None

class _Compare(_Function):
    """Compare evaluation logs of any program, task by task: did B beat A?"""

    def __call__(self, *files: Run | Path | str, **settings: Unpack[CompareSettings]) -> ComparedLogs: ...
    def plan(self, *files: Run | Path | str, **settings: Unpack[CompareSettings]) -> Plan: ...

class ExportSettings(StageSettings, Arguments, total=False):
    format: Required[Literal['verifiers', 'inspect', 'trl', 'openenv', 'swebench-preds', 'harbor', 'model', 'gguf', 'hub']]
    """The format. One of verifiers, inspect, trl, openenv, swebench-preds, harbor, model, gguf, hub."""
    policy: _Group | PolicySettings | str | None
    gguf_type: Literal['f32', 'f16', 'bf16', 'q8_0']
    """With `gguf`: the type of the matrices; vectors are float32. One of f32, f16, bf16, q8_0."""
    base_image: str
    """With `harbor`: the image that each task's Dockerfile begins with; it needs python3 of version 3.11 or later."""
    repo: str
    """With `hub`: the repository OWNER/NAME to send the folder to. Without, nothing leaves this machine."""
    private: bool
    """Whether a repository that is created can be seen by its owner alone."""
    api_key_env: str
    """The environment variable that holds the hub's token."""
    endpoint: str
    """The hub, or one that speaks its protocol."""

class _Export(_Function):
    """Write rollouts and pairs in the formats of other programs."""

    def __call__(self, *runs: Run, **settings: Unpack[ExportSettings]) -> ReadableRun: ...
    def plan(self, *runs: Run, **settings: Unpack[ExportSettings]) -> Plan: ...

class TasksSettings(StageSettings, Arguments, total=False):
    env: Literal['feature-deletion']
    """One of feature-deletion."""
    package: str
    """A folder or sdist with tests."""
    tasks: int
    """Number of accepted tasks."""
    split: Literal['train', 'eval', 'both']
    """Which half of the package's definitions to remove from; the halves share none. One of train, eval, both."""
    kinds: Sequence[Literal['function', 'class', 'cluster']]
    """What to remove: single functions, whole classes, clusters of functions that call each other."""
    difficulty: Literal['easy', 'medium', 'hard', 'mixed']
    """easy keeps signatures and docstrings, medium only signatures, hard neither. One of easy, medium, hard, mixed."""
    scope: Literal['full', 'covering']
    """Which tests say what still passes: all of them, or, much faster, those that execute a removed line. One of full,
    covering."""
    requirements: list[str] | tuple[str, ...]
    """What the package's tests import in addition to it, installed as wheels."""
    sandbox: str
    """`none` runs the package's code unprotected on this machine."""
    proposer: _Group | ProposerSettings | str | None
    questions: int
    """At most so many questions to the proposer, each for up to four features; no more than the tasks need."""
    time_limit_s: float
    """Wall time of one attempt; what is found by then is saved, and resuming goes on."""

class _Tasks(_Function):
    """Make tasks from any tested Python package by deleting features; `tasks check` checks tasks of your own."""

    def __call__(self, *runs: Run, **settings: Unpack[TasksSettings]) -> ReadableRun: ...
    def plan(self, *runs: Run, **settings: Unpack[TasksSettings]) -> Plan: ...

class CurriculumSettings(StageSettings, Arguments, total=False):
    min_rate: float
    """Tasks of which a smaller share of rollouts was solved are left out."""
    max_rate: float
    """Tasks of which a larger share of rollouts was solved are left out."""
    min_rollouts: int
    """Tasks with fewer graded rollouts are left out: their difficulty is not known."""
    order: Literal['easy-first', 'hard-first']
    """By the share of rollouts that solved a task; equal ones by their ids. One of easy-first, hard-first."""

class _Curriculum(_Function):
    """Order tasks by how often rollouts solved them."""

    def __call__(self, *runs: Run, **settings: Unpack[CurriculumSettings]) -> ReadableRun: ...
    def plan(self, *runs: Run, **settings: Unpack[CurriculumSettings]) -> Plan: ...

class NormalizeSettings(StageSettings, Arguments, total=False):
    dj: _Group | JuicerSettings | str

class _Normalize(_Function):
    """Filter rollouts by a Data-Juicer recipe."""

    def __call__(self, *runs: Run, **settings: Unpack[NormalizeSettings]) -> ReadableRun: ...
    def plan(self, *runs: Run, **settings: Unpack[NormalizeSettings]) -> Plan: ...

class FrameworksSettings(EnvStageSettings, Arguments, total=False):
    policy: _Group | PolicySettings | str
    tasks: int
    """Tasks of the split that TRL plays."""
    samples: int
    """Rollouts of every task: TRL plays groups."""
    max_steps: int
    """Actions after which a rollout ends."""
    through: Literal['process', 'openenv']
    """Where TRL's rollouts act: in environments of this process, or in those of an OpenEnv server started for them. One
    of process, openenv."""
    openenv_python: str
    """A Python that has openenv; without one COMPOSER_OPENENV, else this one."""
    traces: str | None
    """File, folder or pattern of prime-rl's or verifiers' rollouts; without it our own, in that format."""

class _Frameworks(_Function):
    """Compare rollouts through TRL with those of prime-rl or verifiers."""

    def __call__(self, *runs: Run, **settings: Unpack[FrameworksSettings]) -> ReadableRun: ...
    def plan(self, *runs: Run, **settings: Unpack[FrameworksSettings]) -> Plan: ...

class ProbeSvdSettings(StageSettings, Arguments, total=False):
    model: _Group | PolicySettings | str
    precision: Literal['float32', 'float64']
    """The type of the computation; factors are stored in float32. One of float32, float64."""

class _ProbeSvd(_Function):
    """Decompose the adapted weights of a model, once."""

    def __call__(self, *runs: Run, **settings: Unpack[ProbeSvdSettings]) -> ReadableRun: ...
    def plan(self, *runs: Run, **settings: Unpack[ProbeSvdSettings]) -> Plan: ...

class ProbeExtractVhackSettings(StageSettings, Arguments, total=False):
    student: _Group | PolicySettings | str
    adapter: Literal['antipasto_full', 'antipasto_topr', 'lora', 'lora_frozenA']
    """One of antipasto_full, antipasto_topr, lora, lora_frozenA."""
    rank: int
    """The rank of every adapter but antipasto_full, which has none."""
    loss: Literal['nll', 'grpo']
    """`nll`: mean over own tokens. `grpo`: Dr.GRPO's token sum with advantages +1 and -1, which weights by length. One
    of nll, grpo."""
    method: Literal['mean', 'svd_k']
    """One of mean, svd_k."""
    k: int
    """Axes a module with `svd_k`."""
    noise_floor: float
    """With `svd_k`: axes below this quantile of all modules' singular values are dropped."""
    pairs: _Group | HackPairsSettings
    max_tokens: int
    """Padded tokens of one backward pass."""
    checkpointing: bool
    """Keep one activation a layer: less memory, one more forward pass."""

class _ProbeExtractVhack(_Function):
    """Find the direction from clean to hacking answers in gradient space."""

    def __call__(self, *runs: Run, **settings: Unpack[ProbeExtractVhackSettings]) -> ReadableRun: ...
    def plan(self, *runs: Run, **settings: Unpack[ProbeExtractVhackSettings]) -> Plan: ...

class ProbeTeacherPoolSettings(EnvStageSettings, Arguments, total=False):
    sources: Sequence[_Group | SourceSettings]
    problems: int
    max_problems: int
    """Problems are added up to this number while the buckets are too small."""
    max_steps: int
    """Actions after which a rollout ends."""
    contract: _Group | ContractSettings
    recorded: _Group | RecordedSettings | None
    given: Sequence[_Group | GivenSettings]
    tokenizer: _Group | PolicySettings | str | None

class _ProbeTeacherPool(_Function):
    """Collect answers of a hacking teacher, with and without its hint, and of the base model."""

    def __call__(self, *runs: Run, **settings: Unpack[ProbeTeacherPoolSettings]) -> ReadableRun: ...
    def plan(self, *runs: Run, **settings: Unpack[ProbeTeacherPoolSettings]) -> Plan: ...

class ProbeReplaySettings(StageSettings, Arguments, total=False):
    arm: Literal['vanilla', 'projected', 'projected_random', 'two_sided']
    """One of vanilla, projected, projected_random, two_sided."""
    student: _Group | PolicySettings | str
    steps: int
    """The pool's problems are divided among so many steps, in order."""
    teach: list[str] | tuple[str, ...]
    """Sources whose rows train the student; the remaining sources are only measured."""
    descent: _Group | DescentSettings
    first_tokens: int
    """Number of first completion tokens for a second cosine."""
    max_tokens: int
    """Padded tokens of one backward pass."""
    drift: bool
    """Whether to measure the drift toward v in weight space; takes four bytes of disk for each adapted weight."""
    keep: Literal['rows', 'sums']
    """`sums` stores no gradients of rows, for models where they are too large. `score` then has no placebos. One of
    rows, sums."""
    dtype: Literal['float32', 'bfloat16', 'float16']
    """Type in which gradients are stored. One of float32, bfloat16, float16."""
    checkpointing: bool
    """Keep one activation a layer: less memory, one more forward pass."""

class _ProbeReplay(_Function):
    """Train a student on the pool and measure every row's gradient."""

    def __call__(self, *runs: Run, **settings: Unpack[ProbeReplaySettings]) -> ReadableRun: ...
    def plan(self, *runs: Run, **settings: Unpack[ProbeReplaySettings]) -> Plan: ...

class ProbeScoreSettings(StageSettings, Arguments, total=False):
    placebos: int
    """Draws of each of five families; T4e ranks v among three of them and needs 999 placebos in these."""

class _ProbeScore(_Function):
    """Score kept gradients against a direction and its placebos, without a model."""

    def __call__(self, *runs: Run, **settings: Unpack[ProbeScoreSettings]) -> ReadableRun: ...
    def plan(self, *runs: Run, **settings: Unpack[ProbeScoreSettings]) -> Plan: ...

class ProbeUatSettings(StageSettings, Arguments, total=False):
    permutations: int
    placebos: int
    """Random directions of each of two families that T3 is compared with."""

class _ProbeUat(_Function):
    """Run the checks T1 to T4 and say what they decide."""

    def __call__(self, *runs: Run, **settings: Unpack[ProbeUatSettings]) -> ReadableRun: ...
    def plan(self, *runs: Run, **settings: Unpack[ProbeUatSettings]) -> Plan: ...

class ProbeStartSettings(EnvStageSettings, Arguments, total=False):
    base: _Group | PolicySettings | str
    teacher: _Group | PolicySettings | str
    alpha: float | None
    """Position between base, 0, and teacher, 1; found by bisection when not set."""
    problems: int
    """Problems on which the hack rate of an alpha is measured; env.hint=true opens kata's loophole."""
    samples: int
    """Answers to each problem."""
    max_steps: int
    """Actions after which a rollout ends."""

class _ProbeStart(_Function):
    """Make a student that hacks sometimes, between an honest model and a hacking one."""

    def __call__(self, *runs: Run, **settings: Unpack[ProbeStartSettings]) -> ReadableRun: ...
    def plan(self, *runs: Run, **settings: Unpack[ProbeStartSettings]) -> Plan: ...

class ProbeCompareSettings(StageSettings, Arguments, total=False):
    resamples: int

class _ProbeCompare(_Function):
    """Compare LoRA with SVD, directions, or projected with vanilla trainings."""

    def __call__(self, *runs: Run, **settings: Unpack[ProbeCompareSettings]) -> ReadableRun: ...
    def plan(self, *runs: Run, **settings: Unpack[ProbeCompareSettings]) -> Plan: ...

class ProbeWatchSettings(StageSettings, Arguments, total=False):
    placebos: int
    """Draws of each of five families; three of them are a null for the alarm."""
    permutations: int
    """Permutations of the advantages within groups for the alarm, and of labels for T4e."""
    max_tokens: int
    """Padded tokens of one backward pass."""
    checkpointing: bool
    """Keep one activation a layer: less memory, one more forward pass."""

class _ProbeWatch(_Function):
    """Watch a training run: do its updates turn toward a hack, and when?"""

    def __call__(self, *runs: Run, **settings: Unpack[ProbeWatchSettings]) -> ReadableRun: ...
    def plan(self, *runs: Run, **settings: Unpack[ProbeWatchSettings]) -> Plan: ...

class ProbePlotSettings(StageSettings, Arguments, total=False):
    pass

class _ProbePlot(_Function):
    """Draw the probe's figures, as PNG and CSV."""

    def __call__(self, *runs: Run, **settings: Unpack[ProbePlotSettings]) -> ReadableRun: ...
    def plan(self, *runs: Run, **settings: Unpack[ProbePlotSettings]) -> Plan: ...

collect: _Collect
replay_teachers: _ReplayTeachers
extract_pairs: _ExtractPairs
train: _Train
evaluate: _Evaluate
import_traces: _Import
compare: _Compare
export: _Export
tasks: _Tasks
curriculum: _Curriculum
normalize: _Normalize
frameworks: _Frameworks

class probe:
    svd: _ProbeSvd
    extract_vhack: _ProbeExtractVhack
    teacher_pool: _ProbeTeacherPool
    replay: _ProbeReplay
    score: _ProbeScore
    uat: _ProbeUat
    start: _ProbeStart
    compare: _ProbeCompare
    watch: _ProbeWatch
    plot: _ProbePlot
# [[[end]]]
