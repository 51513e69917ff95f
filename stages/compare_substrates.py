"""substrates: collect through TRL, read what prime-rl or verifiers wrote, and check both with one gate.

The settings of the command; the comparison itself is a benchmark of the checkout, `benchmarks/substrates.py`.

Answers: whose traces are cleaner? One side is TRL's rollout function as `train` uses it, without an optimiser step,
kept by our recorder in `steps/*.jsonl.gz`; with `through=openenv` its environments are those of an OpenEnv server on
loopback. The other side is a file of prime-rl or verifiers; without a file it is TRL's rollouts in that format, which
measures the format and not prime-rl, so that neither side is called cleaner. Writes `comparison.json` and the table in
`report.txt`. The unit is a rollout through TRL. Side 002a is TRL's rollout function, 002b a file of prime-rl or
verifiers.
"""

from importlib import import_module
from typing import Annotated, Literal

from pydantic import Field, model_validator

from stages.checkout import add_to_path
from stages.envs.config import EnvStageConfig
from stages.formats import files
from stages.policy import available
from stages.policy.base import BasicPolicy, PolicyConfig
from stages.runs.kinds import Row
from stages.runs.run import Inputs, RunWriter
from stages.runs.settings import BASIC
from stages.runs.stage import Plan, Stage


class Config(EnvStageConfig):
    """What to compare."""

    policy: BasicPolicy = PolicyConfig()
    tasks: Annotated[int, BASIC] = Field(default=25, gt=0)
    """Tasks of the split that TRL plays."""
    samples: Annotated[int, BASIC] = Field(default=4, gt=1)
    """Rollouts of every task: TRL plays groups."""
    max_steps: Annotated[int, BASIC] = Field(default=8, gt=0)
    """Actions after which a rollout ends."""
    through: Annotated[Literal["process", "openenv"], BASIC] = "process"
    """Where TRL's rollouts act: in environments of this process, or in those of an OpenEnv server started for them."""
    openenv_python: str = Field(default="", json_schema_extra={"affects_results": False})
    """A Python that has openenv; without one COMPOSER_OPENENV, else this one."""
    traces: Annotated[str | None, BASIC] = None
    """File, folder or pattern of prime-rl's or verifiers' rollouts; without it our own, in that format."""

    @model_validator(mode="after")
    def _local(self) -> "Config":
        if self.policy.base_url is not None:
            raise ValueError(
                "policy.base_url: TRL samples from a model in this process; give a local folder or a hub id"
            )
        return self

    def identity(self) -> Row:
        """Replace the path of the files by their content."""
        contents = [[file.label, file.sha256] for file in files.find([self.traces])] if self.traces else None
        return {**super().identity(), "traces": contents}


def plan(inputs: Inputs, config: Config) -> Plan:
    """Count the rollouts that TRL plays."""
    del inputs
    add_to_path("benchmarks")  # an installation without a checkout does not have the benchmark
    import_module("benchmarks.substrates")  # and its imports fail here, before anything is played
    number = config.tasks * config.samples
    return Plan(
        units=number,
        what="rollouts",
        max_completion_tokens=number * config.max_steps * available.longest_answer(config.policy),
    )


def run(inputs: Inputs, config: Config, out: RunWriter) -> None:
    """Collect, read, compare."""
    del inputs
    add_to_path("benchmarks")
    # By name: the stages are installed without the benchmarks, and the benchmark imports this module.
    import_module("benchmarks.substrates").compare(config, out)


STAGE = Stage(
    name="substrates",
    version=1,
    example="""\
>>> composer.substrates.settings()["policy.temperature"]
1.0""",
    config=Config,
    plan=plan,
    run=run,
    limit_setting="tasks",
)
