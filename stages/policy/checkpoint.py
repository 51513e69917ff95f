"""What a trained checkpoint must be evaluated against: the arm, the seed, where training started, and on which tasks.

`train` writes it beside the checkpoint, and `evaluate` reads nothing else of the training run.
"""

from collections.abc import Iterable, Sequence
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from stages import envs
from stages.errors import BadInput, UsageError
from stages.policy.config import PolicyConfig
from stages.runs.artifact import Run


class CheckpointInfo(BaseModel):
    """The document `checkpoint.json` of a training run."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    arm: str
    train_seed: int
    start: PolicyConfig
    """The model that training started from, and how rollouts were sampled from it."""
    start_identity: str
    """SHA-256 of the start's settings and weights: arms are comparable when it is equal."""
    projected: Literal["v", "random"] | None = None
    """What was taken out of gradients and updates: the hack direction, or a random one, its control."""
    env: str
    split: Literal["train", "eval"]
    task_ids: tuple[str, ...]
    """Tasks that prompts were drawn from, in the order of first use."""

    @classmethod
    def of(cls, run: Run) -> Self:
        """What a run says of its checkpoint; `BadInput` when it says nothing, or nothing that can be read."""
        document = run.beside("checkpoint.json")
        if document is None:
            raise BadInput(
                f"{run.path} has no checkpoint.json, which says what was trained: it is not a run of `composer train`, "
                "or one of an older version. Train again with --clean."
            )
        try:
            return cls.model_validate_json(document)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            raise BadInput(
                f"{run.path}/checkpoint.json cannot be read ({'.'.join(map(str, first['loc']))}: {first['msg']}). "
                "Train again with --clean."
            ) from None


def refuse_trained(infos: Iterable[CheckpointInfo], env: str, task_ids: Sequence[str]) -> None:
    """`UsageError` when an arm was trained on one of these tasks of this environment, whatever their split."""
    for info in infos:
        seen = set(info.task_ids) if envs.same(info.env, env) else set()
        if trained := [task_id for task_id in task_ids if task_id in seen]:
            raise UsageError(
                f"{len(trained)} of {len(task_ids)} tasks, for example {trained[0]}, are among those that arm "
                f"{info.arm!r} was trained on, so they are not held out. Take env.split=eval or other tasks."
            )
