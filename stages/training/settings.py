"""The settings of training other than the channels' weights: pairs, hints, TAID, EOPD, optimisation."""

from typing import Annotated, Literal

from pydantic import Field

from stages.policy.base import PolicyConfig
from stages.runs.settings import Settings

DpoForm = Literal[
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


class Pairs(Settings):
    """How preference pairs are used."""

    per_step: int = Field(default=16, gt=0)
    """Pairs in every optimiser step."""
    loss_type: DpoForm = "sigmoid"
    """DPO's form, as TRL names them. Those that need more than beta (robust and exo_pair a label smoothing), or all
    pairs of a step at once (aot, aot_unpaired), are not among them."""
    beta: float = Field(default=0.1, gt=0)
    """DPO's distance to the reference, which is the model that training starts from."""
    simpo_beta: float = Field(default=2.0, gt=0)
    simpo_gamma_ratio: float = Field(default=0.25, ge=0)
    max_tokens: int = Field(default=4096, gt=0)
    """Longest prompt plus completion; longer completions are cut, and pairs that become equal by that are dropped."""


class Hints(Settings):
    """Where the hints of the self-distillation channel come from, and how the divergence is taken."""

    source: Literal["template", "llm", "rollout"] = "template"
    """What the teacher knows more: the error, a model's word on it, or (SDPO's main mode) a successful rollout of the
    same group, shown in the opening message to every other rollout of it."""
    llm: PolicyConfig | None = None
    """The model that is shown the error, for source = "llm"."""
    per_step: int = Field(default=16, gt=0)
    """Hinted turns in every optimiser step, or rollouts for source = "rollout", at most."""
    success_reward: float = 0.5
    """Least reward of a rollout that counts as successful, for source = "rollout"; SDPO's own is 0.5."""
    alpha: float = Field(default=0.5, ge=0, le=1)
    """0 forward KL, 1 reverse KL, between them the generalised Jensen-Shannon divergence."""
    top_k: int | None = 100
    """Support of the divergence: the student's k most likely tokens; None for the whole vocabulary."""
    tail: bool = True
    """Whether the mass outside the top k is one more entry; otherwise it is divided out."""
    teacher: Literal["current", "ema", "trust-region"] = "current"
    """Whose distribution behind the hint is learnt: the student's own, its moving average's (SDPO's default), or in
    logits a mixture of the starting model's and the student's."""
    teacher_rate: float = Field(default=0.05, ge=0, le=1)
    """The student's share in a moving average after every step, or in the mixture; SDPO's own is 0.05."""
    importance_clip: float | None = Field(default=None, gt=0)
    """Weigh each token by its probability now over that of sampling it, at most so much; SDPO's own is 2."""


class TaidSettings(Settings):
    """TAID's schedule: how fast its target moves from the student (0) to the teacher (1)."""

    t_start: float = Field(default=0.4, ge=0, lt=1)
    t_end: float = Field(default=1.0, gt=0, le=1)
    alpha: float = Field(default=5e-4, ge=0, le=1)
    """Size of the adaptive increments."""
    beta: float = Field(default=0.99, ge=0, le=1)
    """Memory of the momentum."""
    disable_adaptive: bool = False
    """Move linearly, by the share of steps that are done."""


class EopdSettings(Settings):
    """Where and how much EOPD adds the forward KL."""

    entropy_threshold: float = Field(default=0.8, ge=0)
    """Least entropy (nats) of the teacher at a token that gets it."""
    coefficient: float = Field(default=1.0, ge=0)
    """Its weight beside the reverse KL."""
    top_k: int = Field(default=128, gt=0)
    """The teacher's most likely tokens that it is taken over."""


class Optimisation(Settings):
    """The optimiser and the size of a step."""

    steps: int = Field(default=20, gt=0)
    prompts_per_step: int = Field(default=8, gt=0)
    generations: int = Field(default=8, gt=1)
    """Rollouts of every prompt: the group whose mean reward is the baseline."""
    learning_rate: float | None = Field(default=None, gt=0)
    """None chooses by the model's size: 2e-4 for small ones, or what suits a model that an environment brings along;
    else 1e-5 for adapters and 1e-6 for all weights."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    beta: float = Field(default=0.0, ge=0)
    """GRPO's KL to the reference."""
    loss_type: str = "dapo"
    """TRL's form of the GRPO loss."""
    micro_batch: int | None = None
    """Rollouts in one forward and backward pass; None takes all of a step for a small model, else one group,
    or a part of it where its longest episodes would have more than 32,768 tokens."""
    max_tokens_per_micro_batch: int | None = Field(default=None, gt=0)
    """Cut micro-batches further, by length: at most so many tokens, padding included, in one forward and backward
    pass. A row longer than that goes by itself, so that it decides the memory of no other. None does not cut."""
    shared_prompts: bool = False
    """Compute a prompt once for all its samples when scoring them: faster, and equal up to rounding. Off, a step
    without channels is TRL's bit for bit; a step with channels always shares."""
    gradient_checkpointing: bool | None = None
    """Recompute activations instead of keeping them: less memory, more time. None: not for small models."""
    max_staleness: int = Field(default=0, ge=0)
    """With a policy vllm:..., rollouts may be this many steps older than the weights: those of the next steps are
    played while a step trains, and are corrected by truncated importance sampling. 0 waits for the newest weights."""
    sync_tolerance: float | None = Field(default=None, gt=0)
    """With a policy vllm:..., the mean difference in nats, after every step, between the log-probs of a fixed text here
    and on the server, above which training stops. None: 0.001 in float32, else 0.1."""
    threads: int | None = Field(default=None, gt=0)
    """CPU threads; None for as many as there are. On a CPU, runs are equal byte for byte on equally many only."""
    save_every: int = Field(default=5, gt=0, json_schema_extra={"affects_results": False})
    """Steps between checkpoints that a resumed run can start from."""
    keep_every: int = Field(default=0, ge=0)
    """Steps between checkpoints that stay beside the result, for `composer probe watch`; 0 for none."""
    gradient_cosine_every: int = Field(default=0, ge=0, json_schema_extra={"affects_results": False})
    """Steps between reports of each channel's gradient norm and their cosines; 0 for none."""


class Distribution(Settings):
    """How the processes that torchrun starts share one training."""

    sharding: Literal["none", "fsdp2"] = "none"
    """fsdp2 spreads float32 masters, gradients and the optimiser's state over the processes, each of which holds the
    weights whole only in the type they compute in. none keeps all of them in every process."""
    servers: tuple[Annotated[str, Field(pattern=r"^https?://[^/\s]+")], ...] = ()
    """With a policy vllm:..., further servers beside policy.base_url: the processes sample from all of them in turn."""


class AdapterSettings(Settings):
    """LoRA through peft: the base is frozen, and float32 adapters beside its Linears are trained."""

    rank: int | None = Field(default=None, ge=0)
    """Rank of the adapters; 0 trains all weights. None: 0 below ten million parameters, 16 above."""
    alpha: int = Field(default=32, gt=0)
    """The adapters' output is scaled by alpha / rank, with rslora by alpha / sqrt(rank)."""
    targets: tuple[str, ...] = ()
    """Names of the Linears that get an adapter, such as q_proj; none for all but the output head."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    rslora: bool = False
    """Scale by the square root of the rank, which keeps high ranks stable."""
    dora: bool = False
    """Train the magnitude of each weight column apart from its direction."""


class Probe(Settings):
    """What is done with a hack direction, which is given by --from a run of `composer probe extract-vhack`."""

    project: Literal["v", "random"] = "v"
    """Take what points toward the hack out of every gradient and update, or along a random direction, the control."""
