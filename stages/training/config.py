"""The configuration of a training: one arm, its model, its channels, its optimiser, and where it runs.

`Weights`, the setting `weights`, has one field a channel, made from the registry; a channel is off until it is given a
weight.
"""

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import ConfigDict, Field, ValidationError, create_model, model_validator
from pydantic_core import InitErrorDetails

from composer_stages.data_files import load_toml
from composer_stages.diloco.settings import Diloco
from composer_stages.envs.base import Task
from composer_stages.envs.config import EnvStageConfig
from composer_stages.errors import UsageError
from composer_stages.policy.base import BasicPolicy, PolicyConfig
from composer_stages.rollouts.config import InFlight, RolloutLimits
from composer_stages.runs.reporting import Backends
from composer_stages.runs.settings import BASIC, Option, Settings, StageConfig, basic_of
from composer_stages.training.channels import CHANNELS, Need
from composer_stages.words import Sentence

DpoForm = Literal[
    "sigmoid", "hinge", "ipo", "sigmoid_norm", "nca_pair", "bco_pair", "sppo_hard", "apo_zero", "apo_down", "discopop"
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
    top_k: int | None = Field(default=100, ge=0)
    """Support of the divergence: the student's k most likely tokens; 0 for the whole vocabulary."""
    tail: bool = True
    """Whether the mass outside the top k is one more entry; otherwise it is divided out."""
    teacher: Literal["current", "ema", "trust-region"] = "current"
    """Whose distribution behind the hint is learnt: the student's own, its moving average's (SDPO's default), or in
    logits a mixture of the starting model's and the student's."""
    teacher_rate: float = Field(default=0.05, ge=0, le=1)
    """The student's share in a moving average after every step, or in the mixture; SDPO's own is 0.05."""
    importance_clip: float | None = Field(default=None, gt=0)
    """Weigh each token by its probability now over that of sampling it, at most so much; SDPO's own is 2."""
    check_answers: int = Field(default=32, ge=0, json_schema_extra={"affects_results": False})
    """Answers before training with the hint, and as many without, where hints stand before an answer (gsm8k, skills):
    a training whose hints make the student pass less often stops with exit code 3. 0 trains without checking."""


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


class OpdTeacher(PolicyConfig):
    """A teacher of opd and the tasks that it teaches."""

    tasks: tuple[str, ...] = ()
    """Patterns of task ids or families, such as `arithmetic*`; none for all tasks."""
    opening: dict[str, Any] = Field(default_factory=dict)
    """Options of the environment with which it opens the teacher's tasks, over the student's: {shots = 8} for worked
    examples that the student is not shown."""

    def teaches(self, task: Task) -> bool:
        """Return whether a task is one that the teacher teaches."""
        names = (task.task_id, task.family)
        return not self.tasks or any(fnmatchcase(name, pattern) for pattern in self.tasks for name in names)


class OpdSettings(Settings):
    """How opd distils: from which teachers, and which form its loss has."""

    form: Literal["divergence", "sampled"] = "divergence"
    """divergence compares distributions (GKD, OPSD), given top_k also with those of a teacher behind vLLM; sampled is a
    policy gradient whose advantage is the teacher's log-prob of each sampled token less the student's (MOPD,
    tinker-cookbook)."""
    beta: float = Field(default=1.0, ge=0, le=1)
    """1 reverse KL, 0 forward KL, between them the generalised Jensen-Shannon divergence."""
    top_k: int | None = Field(default=None, gt=0)
    """The teacher's k most likely tokens, with the mass outside divided out, as OPSD; None for the whole vocabulary. A
    server tells so many from --max-logprobs, 20 unless it was started with another."""
    teachers: tuple[OpdTeacher, ...] = ()
    """Several teachers in place of `teacher`: a task is taught by each whose `tasks` match it, by their mean where
    there are several; a task without one is not distilled."""


class Optimisation(Settings):
    """The optimiser and the size of a step."""

    steps: int = Field(default=20, gt=0)
    prompts_per_step: int = Field(default=8, gt=0)
    generations: int = Field(default=8, gt=1)
    """Rollouts of every prompt: the group whose mean reward is the baseline."""
    learning_rate: float | None = Field(default=None, gt=0)
    """By default chosen by the model's size: 2e-4 for small ones; else 1e-6 for all weights, and for adapters
    4e-4 below 0.3 billion parameters, 1e-4 below 1 billion, and 1e-5."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    beta: float = Field(default=0.0, ge=0)
    """GRPO's KL to the reference."""
    loss_type: str = "dapo"
    """TRL's form of the GRPO loss."""
    micro_batch: int | None = Field(default=None, gt=0)
    """Rollouts in one forward and backward pass, which moves results by rounding alone, except by fields of TRL's that
    act on the tokens of a pass (entropy_coef, top_entropy_quantile, loss_type bnpo). None takes all of a step for a
    small model, else what is fastest of what fits into the free memory: into a third of a CPU's, 85 % of a GPU's."""
    max_tokens_per_micro_batch: int | None = Field(default=None, gt=0)
    """Cut micro-batches further, by length: at most so many tokens, padding included, in one forward and backward
    pass. A row longer than that goes by itself, so that it decides the memory of no other. None does not cut."""
    shared_prompts: bool | None = None
    """Compute a prompt once for all its samples when scoring them: faster, and equal up to rounding. Off, a step
    without channels is TRL's bit for bit; a step with channels always shares. By default on, where all layers attend by
    `sdpa` to all earlier tokens (Llama, Mistral, Qwen2, Qwen3, SmolLM2, ...), but off for small models, and with
    distribution.sharding."""
    memory_limit: float | None = Field(default=None, gt=0, json_schema_extra={"affects_results": False})
    """GiB that the estimate of a training's memory may reach, in place of what is free: for rollouts that are known to
    be shorter than their limit."""
    gradient_checkpointing: bool | None = None
    """Recompute activations instead of keeping them: less memory, more time. By default not for small models, and not
    where they fit into free memory."""
    max_staleness: int = Field(default=0, ge=0)
    """With a policy vllm:..., rollouts are played while a step trains, and a step takes the groups that are complete.
    Tokens may be of weights this many steps old, and are corrected by truncated importance sampling; older groups are
    given up, those of the slowest tasks first. 0: each step waits for its own rollouts, of the newest weights."""
    sync_tolerance: float | None = Field(default=None, gt=0)
    """With a policy vllm:..., the mean difference in nats, after every step, between log-probs of its rollouts here
    and on the server, above which training stops. By default 0.001 in float32, else 0.1."""
    threads: int | None = Field(default=None, gt=0)
    """CPU threads; by default as many as there are. On a CPU, runs are equal byte for byte on equally many only."""
    save_every: int = Field(default=5, gt=0, json_schema_extra={"affects_results": False})
    """Steps between checkpoints that a resumed run can start from, rounded up to a multiple of trl.num_iterations."""
    keep_every: int = Field(default=0, ge=0)
    """Steps between checkpoints that stay beside the result, for the stage probe-watch; 0 for none."""
    stop_on_collapse: Annotated[bool, Option()] = False
    """End the training where reward, entropy, length or form of the answers leave their course (of which it warns in
    any case), with the newest checkpoint from before. Checkpoints of forty steps are then kept beside it."""
    gradient_cosine_every: int = Field(default=0, ge=0, json_schema_extra={"affects_results": False})
    """Steps between reports of each channel's gradient norm and their cosines; 0 for none."""


class Distribution(Settings):
    """How the processes that torchrun starts share one training."""

    sharding: Literal["none", "fsdp2"] = "none"
    """fsdp2 spreads weights, float32 masters, gradients and the optimiser's state over the processes, which gather a
    layer at a time; with an adapter its frozen base. none keeps all of them in every process."""
    servers: tuple[Annotated[str, Field(pattern=r"^https?://[^/\s]+")], ...] = ()
    """With a policy vllm:..., further servers beside policy.base_url: the processes sample from all of them in turn."""


class AdapterSettings(Settings):
    """What is trained beside frozen weights, in float32: LoRA through peft, or a change of the singular values."""

    kind: Literal["lora", "singular-values"] = "lora"
    """singular-values trains a change of all singular values of every Linear; the settings below are those of LoRA."""
    rank: int | None = Field(default=None, ge=0)
    """Rank of the adapters; 0 trains all weights. By default 0 below ten million parameters, 16 above."""
    alpha: int = Field(default=32, gt=0)
    """The adapters' output is scaled by alpha / rank, with rslora by alpha / sqrt(rank)."""
    targets: tuple[str, ...] = ()
    """Names of the Linears that get an adapter, such as q_proj; none for all but the output head."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Of the adapters; only without weights of channels."""
    rslora: bool = False
    """Scale by the square root of the rank, which keeps high ranks stable."""
    dora: bool = False
    """Train the magnitude of each weight column apart from its direction."""


class Probe(Settings):
    """What is done with a hack direction, which is given by --from a run of `composer probe extract-vhack`."""

    project: Literal["v", "random", "none"] = "v"
    """Take what points toward the hack out of every gradient and update, or along a random direction, the control.
    none takes nothing out: the training is measured alone."""
    two_sided: bool = False
    """Take out what points away from the hack, too."""
    measure: bool = False
    """Compare the gradient of every rollout with the direction, at the weights of the step that learns from it."""
    mixed: Literal["", "ratio", "imitation"] = ""
    """Half of each group is the teacher's (`teacher`): weighted by the ratio of the student's probability to the
    teacher's, clipped as in PPO, or with ratio 1, which is imitation weighted by advantages. Needs no direction."""


Weight = Annotated[float, Field(ge=0)]
SCORED_TOKENS = 16_384
"""Of one pass through the layers in scoring.py, which takes several for more."""
VOCABULARY_CHUNK = 32_768
"""Logits of one token that are held at once, as in TRL; on a CPU `composer_stages.training.scoring` holds fewer."""
GRPO = "grpo"
"""GRPO's name among the weights, in gradient norms and in cosines."""


class ChannelWeights(Settings):
    """How much each loss counts in a step. At 0 a loss is not even computed.

    Names that are not in the registry are refused; a channel that was registered after import is accepted.
    """

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Weight] = Field(init=False)

    grpo: Weight = 1.0
    """GRPO on the environment's reward. At 0 rollouts are still played and recorded, so that learning curves can be
    compared, but nothing is learned from their rewards: with weights.sft alone this is pure imitation."""

    @model_validator(mode="before")
    @classmethod
    def _registered(cls, weights: Any) -> Any:
        # Looked up at each call: a channel may be registered after this class was made, with the fields of that moment.
        names = {GRPO, *CHANNELS}
        unknown = [name for name in weights if name not in names] if isinstance(weights, dict) else []
        if unknown:
            errors = [InitErrorDetails(type="extra_forbidden", loc=(name,), input=weights[name]) for name in unknown]
            raise ValidationError.from_exception_data(cls.__name__, errors)
        return weights

    def identity(self) -> dict[str, Any]:
        """Return all weights, those of channels that were registered after import among them."""
        return self.model_dump()

    def active(self) -> dict[str, float]:
        """Return the channels besides GRPO with a weight, by name, in the order of the registry."""
        weights = self.model_dump()
        return {name: weights[name] for name in CHANNELS if weights.get(name, 0.0) > 0}


if TYPE_CHECKING:
    Weights = ChannelWeights
else:
    Weights = create_model(
        "Weights",
        __base__=ChannelWeights,
        __doc__=ChannelWeights.__doc__,
        __module__=__name__,
        **{name: (Weight, Field(0.0, description=channel.description)) for name, channel in CHANNELS.items()},
    )


TRL_FIELDS = load_toml(__package__, "trl_fields.toml")
OURS: dict[str, str] = TRL_FIELDS["ours"]
"""Fields of TRL's that a setting of ours sets: users give trl.KEY=VALUE for the others alone."""
FIXED = frozenset(TRL_FIELDS["fixed"])
"""Fields that the rollouts, the records and resuming depend on."""


class Config(EnvStageConfig):
    """One arm."""

    arm: Annotated[str, BASIC, Option("NAME")] = Field(default="A", min_length=1, pattern=r"^[\w.+-]+$")
    """The arm's name in the evaluation."""
    policy: BasicPolicy = PolicyConfig()
    """The model to start from, and how rollouts are sampled from it. A run of
    `composer probe start`, given by --from, has the model in its place."""
    tasks: Annotated[int, BASIC] = Field(default=200, gt=0, le=100_000)
    """Training tasks to draw prompts from."""
    max_steps: Annotated[int, BASIC] = Field(default=8, gt=0)
    """Actions after which a rollout ends."""
    limits: RolloutLimits = RolloutLimits()
    in_flight: InFlight = Field(default=InFlight(), json_schema_extra={"affects_results": False})
    optimisation: Annotated[Optimisation, basic_of("generations", "learning_rate", "prompts_per_step", "steps")] = (
        Optimisation()
    )
    adapter: Annotated[AdapterSettings, basic_of("rank")] = AdapterSettings()
    distribution: Distribution = Field(default=Distribution(), json_schema_extra={"affects_results": False})
    trl: dict[str, Any] = Field(default_factory=dict)
    """Further fields of TRL's GRPOConfig, such as trl.warmup_steps, trl.epsilon_high or trl.scale_rewards."""
    weights: Annotated[Weights, basic_of("*")] = Weights()
    pairs: Annotated[Pairs, basic_of("per_step")] = Pairs()
    hints: Hints = Hints()
    taid: TaidSettings = TaidSettings()
    eopd: EopdSettings = EopdSettings()
    opd: OpdSettings = OpdSettings()
    diloco: Annotated[Diloco, Option("URL")] = Diloco()
    probe: Probe = Probe()
    seeds: Annotated[int, BASIC, Option("N")] = Field(default=1, gt=0, json_schema_extra={"affects_results": False})
    """Trainings that differ in the seed alone, from `seed` on, each a run of its own. The next evaluation reads all."""
    report_to: Backends = Field(default=(), json_schema_extra={"affects_results": False})
    """Where training is logged besides metrics.jsonl: tensorboard, trackio, wandb, one or several."""
    teacher: Annotated[PolicyConfig | None, basic_of("model")] = None
    """The model to distil from, for taid, eopd and opd, or that plays in mixed groups (probe.mixed); it must share the
    student's tokenizer. `vllm:MODEL` with base_url is asked for log-probs of the student's tokens or of its own
    likeliest, which is all that opd needs with opd.form=sampled or with opd.top_k."""

    def uses_gpu(self) -> bool:
        """Return whether training takes a GPU, in this process, also where a server samples."""
        return self.policy.in_process().uses_gpu() or super().uses_gpu()

    def opd_teachers(self) -> tuple[OpdTeacher, ...]:
        """Return the teachers of opd: several, or the one that other channels have too."""
        if self.opd.teachers or self.teacher is None:
            return self.opd.teachers
        return (OpdTeacher(**self.teacher.model_dump()),)

    def teachers(self) -> tuple[PolicyConfig, ...]:
        """Return all models that distil or play in mixed groups; those that are `loaded` alike share their weights."""
        several = self.channels_that_need("teachers")
        shared = self.probe.mixed or set(self.channels_that_need("teacher")) - set(several)
        shared_teachers = (self.teacher,) if self.teacher is not None and shared else ()
        return (*shared_teachers, *(self.opd_teachers() if several else ()))

    def channels_that_need(self, need: Need) -> list[str]:
        """Return the channels with a weight that need this, in the order of the registry."""
        return [name for name in self.weights.active() if need in CHANNELS[name].needs]

    @model_validator(mode="before")
    @classmethod
    def _without_those_of_trl(cls, settings: Any) -> Any:
        # Here and not beside TRL's other fields: to import TRL takes seconds.
        if not isinstance(settings, dict):
            return settings
        trl_fields = settings["trl"] if isinstance(settings.get("trl"), dict) else {}
        for prefix, keys in (("trl.", trl_fields), ("", settings.keys() - cls.model_fields.keys())):
            for key in keys:
                if key in OURS:
                    raise UsageError("training.trl-field-is-setting", prefix=prefix, key=key, setting_key=OURS[key])
                if key in FIXED:
                    raise UsageError("training.trl-field-fixed", prefix=prefix, key=key)
        return settings

    @model_validator(mode="after")
    def _check(self) -> "Config":
        if self.weights.grpo == 0 and not self.weights.active():
            raise ValueError(Sentence("training.nothing-trained"))
        taught = self.channels_that_need("teachers") if self.opd.teachers else []
        if self.teacher is None and set(self.channels_that_need("teacher")) - set(taught):
            needing = [f"weights.{name}" for name, channel in CHANNELS.items() if "teacher" in channel.needs]
            raise ValueError(Sentence("training.no-teacher", needing=needing))
        if self.opd.form == "sampled" and (self.opd.beta, self.opd.top_k) != (1.0, None):
            raise ValueError(Sentence("training.sampled-form-settings"))
        if self.adapter.kind == "singular-values" and self.adapter.rank:
            raise ValueError(Sentence("training.rank-of-singular-values"))
        if self.probe.mixed and (self.teacher is None or self.teacher.served or self.policy.served):
            raise ValueError(Sentence("training.mixed-needs-local-models"))
        if self.hints.source == "llm" and self.hints.llm is None:
            raise ValueError(Sentence("training.no-hint-model"))
        if self.policy.base_url is not None and not self.policy.served:
            raise ValueError(Sentence("training.trained-behind-server"))
        if self.distribution.servers and not (self.policy.served and self.policy.base_url):
            raise ValueError(Sentence("training.servers-without-address"))
        if self.optimisation.max_staleness and not self.policy.served:
            raise ValueError(Sentence("training.staleness-without-server"))
        if self.policy.temperature == 0:
            raise ValueError(Sentence("training.temperature-zero"))
        if self.diloco.store is not None and self.optimisation.steps % self.diloco.inner_steps:
            raise ValueError(
                Sentence(
                    "training.steps-no-multiple", steps=self.optimisation.steps, inner_steps=self.diloco.inner_steps
                )
            )
        for teacher in self.teachers():
            self._check_server(teacher)
        return self

    def _check_server(self, teacher: PolicyConfig) -> None:
        """Check a teacher behind a server: it returns the log-probs of given tokens, or of a few, at temperature 1."""
        if teacher.base_url is not None and not teacher.served:
            raise ValueError(Sentence("training.teacher-text-server", model=teacher.model))
        if not teacher.served:
            return
        if teacher.base_url is None:
            raise ValueError(Sentence("training.teacher-without-address", model=teacher.model, source=teacher.source))
        needing = self.channels_that_need("distributions") if teacher is self.teacher else []
        if self.opd.form == "divergence" and self.opd.top_k is None:
            needing += self.channels_that_need("teachers")
        if needing:
            raise ValueError(Sentence("training.teacher-tells-few", model=teacher.model, needing=needing))
        if self.opd.form == "sampled" and self.policy.temperature != 1:
            raise ValueError(
                Sentence("training.teacher-temperature", model=teacher.model, temperature=self.policy.temperature)
            )

    def answers_to_check_hints(self) -> int:
        """Return how many tasks are answered each way to check hints; 0 where no channel learns from hints."""
        return self.hints.check_answers if self.channels_that_need("hints") else 0

    def each_seed(self) -> list[StageConfig]:
        """Return the settings of every training."""
        seeds = range(self.seed, self.seed + self.seeds)
        return [self.model_copy(update={"seed": seed}) for seed in seeds]

    def label(self) -> str:
        """Return environment, arm and seed, and a replica's number."""
        replica = "" if self.diloco.replica is None else f"-r{self.diloco.replica}"
        return f"{self.env.label()}-{self.arm}-s{self.seed}{replica}"
