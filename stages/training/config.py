"""The configuration of a training: one arm, its model, its channels, and where it runs.

`Weights`, the setting `weights`, has one field a channel, made from the registry; a channel is off until it is given a
weight.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import ConfigDict, Field, ValidationError, create_model, model_validator
from pydantic_core import InitErrorDetails

from stages.diloco.settings import Diloco
from stages.envs.config import EnvStageConfig
from stages.policy.base import PolicyConfig
from stages.runs.reporting import Backends
from stages.runs.settings import Given, Settings, with_default
from stages.training.channels import CHANNELS
from stages.training.settings import (
    AdapterSettings,
    Distribution,
    EopdSettings,
    Hints,
    Optimisation,
    Pairs,
    Probe,
    TaidSettings,
)

Weight = Annotated[float, Field(ge=0)]
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
    def _registered(cls, given: Any) -> Any:
        # Looked up at each call: a channel may be registered after this class was made, with the fields of that moment.
        known = {GRPO, *CHANNELS}
        unknown = [name for name in given if name not in known] if isinstance(given, dict) else []
        if unknown:
            errors = [InitErrorDetails(type="extra_forbidden", loc=(name,), input=given[name]) for name in unknown]
            raise ValidationError.from_exception_data(cls.__name__, errors)
        return given

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


class Config(EnvStageConfig):
    """One arm."""

    arm: str = Field(default="A", min_length=1, pattern=r"^[\w.+-]+$")
    """The arm's name in the evaluation."""
    policy: PolicyConfig = PolicyConfig()
    """The model to start from, and how rollouts are sampled from it."""
    tasks: int = Field(default=200, gt=0, le=100_000)
    """Training tasks to draw prompts from."""
    max_steps: int = Field(default=8, gt=0)
    """Actions after which a rollout ends."""
    optimisation: Optimisation = Optimisation()
    adapter: AdapterSettings = AdapterSettings()
    distribution: Distribution = Field(default=Distribution(), json_schema_extra={"affects_results": False})
    trl: dict[str, Any] = Field(default_factory=dict)
    """Further fields of TRL's GRPOConfig, such as trl.warmup_steps, trl.epsilon_high or trl.scale_rewards."""
    weights: Weights = Weights()
    pairs: Pairs = Pairs()
    hints: Hints = Hints()
    taid: TaidSettings = TaidSettings()
    eopd: EopdSettings = EopdSettings()
    diloco: Diloco = Diloco()
    probe: Probe = Probe()
    report_to: Backends = Field(default=(), json_schema_extra={"affects_results": False})
    """Where training is logged besides metrics.jsonl: tensorboard, trackio, wandb, one or several."""
    teacher: Given[PolicyConfig | None, PolicyConfig | Mapping[str, Any] | str | None] = with_default(None)
    """The model to distil from, for taid and eopd; it must share the student's tokenizer. `vllm:MODEL` with base_url is
    asked for the log-probs of the student's tokens, which is all that eopd needs with eopd.coefficient=0."""

    def uses_gpu(self) -> bool:
        """Return whether training takes a GPU: the model is trained in this process, whoever samples from it."""
        return self.policy.in_process().uses_gpu() or super().uses_gpu()

    @model_validator(mode="after")
    def _check(self) -> "Config":
        if self.weights.grpo == 0 and not self.weights.active():
            raise ValueError(
                "weights.grpo is 0 and no channel has a weight, so nothing would be trained; "
                "give a channel a weight, such as weights.sft=1 with pairs, or leave weights.grpo at 1"
            )
        if self.teacher is None and any("teacher" in CHANNELS[name].needs for name in self.weights.active()):
            needing = [f"weights.{name}" for name, channel in CHANNELS.items() if "teacher" in channel.needs]
            raise ValueError(f"{' and '.join(needing)} need a teacher: set teacher.model")
        if self.hints.source == "llm" and self.hints.llm is None:
            raise ValueError('hints.source = "llm" needs hints.llm: set hints.llm.model and its base_url')
        if self.policy.base_url is not None and not self.policy.served:
            raise ValueError(
                "policy.base_url: a model behind a server cannot be trained; give the folder or hub id of its weights "
                'as policy.model, and base_url = "" where a file gives an address: in the file, below [train.policy]'
            )
        if self.distribution.servers and not (self.policy.served and self.policy.base_url):
            raise ValueError(
                "distribution.servers are further ones beside policy.base_url, of a policy vllm:MODEL; set both"
            )
        if self.optimisation.max_staleness and not self.policy.served:
            raise ValueError(
                "optimisation.max_staleness needs rollouts from a server; write vllm: before policy.model, or take 0"
            )
        if self.policy.temperature == 0:
            raise ValueError(
                "policy.temperature is 0: a group of equal rollouts has no advantage to learn from; take 1"
            )
        if self.diloco.store is not None and self.optimisation.steps % self.diloco.inner_steps:
            raise ValueError(
                f"optimisation.steps is {self.optimisation.steps}, no multiple of diloco.inner_steps, which is "
                f"{self.diloco.inner_steps}: the last steps would be no part of the result"
            )
        # A teacher behind a server returns the log-probs of given tokens, at temperature 1, and nothing else.
        teacher = self.teacher
        if teacher is None:
            return self
        if teacher.base_url is not None and not teacher.served:
            raise ValueError(
                "teacher.base_url: a server that answers in text tells nothing of the student's tokens; "
                "write vllm: before teacher.model, or leave base_url out for a folder or a hub id"
            )
        if not teacher.served:
            return self
        if teacher.base_url is None:
            raise ValueError(
                f"teacher.model is {teacher.model!r}, and training starts no server for a teacher; "
                f"start one with `composer serve {teacher.source}` and give its address as teacher.base_url"
            )
        active = self.weights.active()
        if "taid" in active or ("eopd" in active and self.eopd.coefficient):
            raise ValueError(
                f"teacher.model is {teacher.model!r}, which tells the log-probs of the student's tokens alone, but "
                "weights.taid and eopd.coefficient above 0 need whole distributions; "
                "take weights.eopd with eopd.coefficient=0, or a teacher in this process"
            )
        if self.policy.temperature != 1:
            raise ValueError(
                f"teacher.model is {teacher.model!r}, which is scored at temperature 1, and policy.temperature is "
                f"{self.policy.temperature:g}; take 1"
            )
        return self

    def label(self) -> str:
        """Return environment, arm and seed, and a replica's number."""
        replica = "" if self.diloco.replica is None else f"-r{self.diloco.replica}"
        return f"{self.env.label()}-{self.arm}-s{self.seed}{replica}"
