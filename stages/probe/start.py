"""probe start: a student between an honest model and a hacking teacher, as an ordinary model to train from.

W + alpha (W_teacher - W): such a student is on-policy and hacks sometimes, so that its rewards vary. alpha is set or
found once by bisection. `composer train --from` starts from the written model; arms that are compared share it. This
construction is the project's own, not taken from a paper.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from composer_stages.envs.config import EnvStageConfig
from composer_stages.errors import BadInput
from composer_stages.policy import available
from composer_stages.policy.base import PolicyConfig
from composer_stages.runs.kinds import START
from composer_stages.runs.run import Inputs, RunWriter
from composer_stages.runs.settings import BASIC, basic_of
from composer_stages.runs.stage import Plan, Stage

if TYPE_CHECKING:
    from torch import Tensor, nn

LOW, HIGH, ROUNDS = 0.3, 0.6, 8
"""Bounds of the student's hack rate, and the rounds of bisection."""


class Config(EnvStageConfig):
    """Settings of the interpolation."""

    base: Annotated[PolicyConfig, basic_of("model")] = PolicyConfig(model="kata:honest")
    teacher: Annotated[PolicyConfig, basic_of("model")] = PolicyConfig(model="kata:loophole")
    alpha: Annotated[float | None, BASIC] = Field(default=None, ge=0, le=1)
    """Position between base, 0, and teacher, 1; found by bisection when not set."""
    problems: int = Field(default=16, gt=0)
    """Problems on which the hack rate of an alpha is measured; env.hint=true opens kata's loophole."""
    samples: int = Field(default=4, gt=0)
    """Answers to each problem."""
    max_steps: int = Field(default=8, gt=0)
    """Actions after which a rollout ends."""


def plan(inputs: Inputs, config: Config) -> Plan:
    """Plan the values of alpha to try, and their answers."""
    del inputs
    if config.alpha is not None:
        return Plan(units=1, what="model")
    tokens = ROUNDS * config.problems * config.samples * config.max_steps * available.longest_answer(config.base)
    return Plan(units=ROUNDS, what="places", max_completion_tokens=tokens, up_to=True)


def run(inputs: Inputs, config: Config, out: RunWriter) -> None:
    """Find alpha and write the model; `BadInput` if no alpha hacks sometimes, or the models do not fit."""
    del inputs
    from composer_stages.policy.local import LocalPolicy, load_model
    from composer_stages.probe.rows import mean_known
    from composer_stages.probe.sources import answers
    from composer_stages.training.channels.rollouts import check_vocabulary

    model, tokenizer = load_model(config.base, listener=out.progress)
    teacher_model, teacher_tokenizer = load_model(config.teacher, listener=out.progress)
    check_vocabulary(tokenizer, teacher_tokenizer, config.teacher.model)
    policy = LocalPolicy(model.eval().requires_grad_(False), tokenizer, config.base)
    out.model("base", **policy.facts())
    out.model("teacher", **LocalPolicy(teacher_model, teacher_tokenizer, config.teacher).facts())
    # `interpolate_weights` gives the model new tensors, so the current ones and the teacher's need no copies.
    base, teacher = ({n: p.detach() for n, p in m.named_parameters()} for m in (model, teacher_model))
    make = config.opener()

    def hack_rate(alpha: float) -> float:
        out.raise_if_stopped()
        interpolate_weights(model, base, teacher, alpha)
        tasks = config.draw(make, config.problems)
        rows = answers(make, policy, tasks, config.samples, config.seed, "student", config.max_steps)
        return mean_known(row["hacked"] for row in rows) or 0.0

    alpha, rate = find_alpha(hack_rate) if config.alpha is None else (config.alpha, None)
    interpolate_weights(model, base, teacher, alpha)

    def save(folder: Path) -> None:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)

    out.checkpoint(save, "start", START)
    out.count(planned=1, done=1)
    out.set_summary(alpha=alpha, hack_rate=rate)
    measured = "" if rate is None else f" It hacks in {rate:.0%} of its answers."
    out.write_file(
        "report.txt",
        f"W + {alpha:g} (W_teacher - W), W of {config.base.model} and the teacher {config.teacher.model}.{measured}\n",
    )


def interpolate_weights(
    model: "nn.Module", base: Mapping[str, "Tensor"], teacher: Mapping[str, "Tensor"], alpha: float
) -> None:
    """Set a model to W + alpha (W_teacher - W), from two sets of parameters by name; 0 is the base, bit for bit."""
    import torch

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.data = base[name].clone() if alpha == 0 else torch.lerp(base[name], teacher[name], alpha)


def find_alpha(hack_rate: Callable[[float], float]) -> tuple[float, float]:
    """Find by bisection an alpha with a hack rate of .3 to .6, and that rate; `BadInput` when none is found."""
    # A wide range: the rate of 64 sampled answers has a standard error of .06.
    low, high = 0.0, 1.0
    for _ in range(ROUNDS):
        alpha = (low + high) / 2
        rate = hack_rate(alpha)
        if LOW <= rate <= HIGH:
            return alpha, rate
        low, high = (alpha, high) if rate < LOW else (low, alpha)
    raise BadInput("probe.no-mixture-hacks", low=LOW, high=HIGH, alpha=alpha, rate=rate)


STAGE = Stage(name="probe-start", version=1, config=Config, outputs={"start": START}, plan=plan, run=run)
