"""DiLoCo's rounds between the trainer's steps: a replica that shares nothing with the others but a bucket.

The trainer's own checkpoints hold the replica's position in its round. A resumed replica continues there while the
others are still in the same round, and with their weights otherwise.
"""

import socket
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.numpy import save_file
from torch import Tensor
from transformers import TrainerCallback, TrainerControl, TrainerState

from composer_stages.diloco import arrays, rounds
from composer_stages.diloco.arrays import Fragments
from composer_stages.diloco.loop import OuterLoop, Stopped
from composer_stages.diloco.rounds import ObjectStore
from composer_stages.diloco.settings import Diloco
from composer_stages.errors import UsageError
from composer_stages.runs import store
from composer_stages.runs.bucket import Bucket, open_bucket
from composer_stages.runs.run import RunWriter
from composer_stages.stopping import Interrupted
from composer_stages.training.checkpoints import newest

SAVED = "diloco.safetensors"
SEEDS_APART = 1_000_003
"""Between the seeds of replicas, each of which has its own order of prompts and pairs, and its own rollouts: so far
apart that replicas of trainings with seeds 0, 1, 2 never share one."""


class AllRoundsDone(Exception):
    """All rounds were held before this replica joined: the agreed weights are the result, and no step is left."""


@dataclass(frozen=True)
class Replica:
    """One of several replicas. bucket: where they meet. number: from 0. shared: settings that all must have."""

    settings: Diloco
    bucket: Bucket
    number: int
    shared: dict[str, Any]


def join(settings: Diloco, out: RunWriter) -> Replica | None:
    """Open the bucket and claim a number, the first free or the given one; None for a training without replicas."""
    if settings.store is None:
        return None
    bucket = open_bucket(settings.store)
    owner = out.scratch("diloco") / "owner.json"
    if not owner.exists():
        # Who was given a number may begin anew with it, after a refusal or with --clean.
        given = store.digest([socket.gethostname(), str(out.path.parent.absolute())])
        store.write_json(owner, uuid.uuid4().hex if settings.replica is None else given)
    replica = rounds.claim(bucket, store.read_json(owner), settings.replica)
    return Replica(settings, bucket, replica, shared_settings(out.manifest.identity))


def shared_settings(identity: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that replicas must have in common: all except a replica's own number and paths."""
    shared = {key: shared_settings(value) if isinstance(value, dict) else value for key, value in identity.items()}
    if shared.get("weights", "hub") != "hub" and "model" in shared:
        del shared["model"]  # a folder, which counts by its bytes
    return {key: value for key, value in shared.items() if key not in ("store", "replica")}


def trained(model: Any) -> dict[str, Tensor]:
    """Return the parameters that learn, each once; `UsageError` for a model with saved buffers."""
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    saved = model.state_dict().keys()
    saved_buffers = [name for name, _ in model.named_buffers() if name in saved]
    if saved_buffers:
        raise UsageError("training.replica-with-buffers", buffer=saved_buffers[0])
    return parameters


class OuterSteps(TrainerCallback):
    """Counts the trainer's steps, and holds the rounds that are due. Must precede `Supervision` in the callbacks."""

    _loop: OuterLoop
    """Made when the training begins, before anything else here is called."""

    def __init__(self, replica: Replica, out: RunWriter, folder: Path) -> None:
        """folder: of the trainer's checkpoints."""
        self._replica, self._out, self._folder = replica, out, folder
        self.finished = False
        """Whether all rounds are held."""

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Join the others, with the weights of the checkpoint in the model. Raises `AllRoundsDone`."""
        replica, settings, parameters = self._replica, self._replica.settings, trained(kwargs["model"])
        fragments = Fragments(arrays.shapes(parameters), settings.fragments)
        number = args.max_steps // settings.every
        # The others must train the same parameters with the same settings: a mean over anything else means nothing.
        shared = {**replica.shared, "parameters": {name: list(shape) for name, shape in fragments.all.items()}}
        rounds.agree(replica.bucket, shared)
        objects = ObjectStore(replica.bucket, settings, replica.number, fragments=fragments, rounds=number)
        self._loop = OuterLoop(parameters, settings, objects, number, stop=self._out.stop.is_set)
        try:
            self._loop.start(*_read(newest(self._folder, self._out)))
        except Stopped:
            raise Interrupted from None
        self.finished = self._loop.finished
        if self.finished:
            raise AllRoundsDone

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Count the step, and hold a round that is due."""
        try:
            self._loop.after_step()
        except Stopped:  # while it waited for the others: `Supervision` stops the training, and this saves the round
            control.should_save = True
        self.finished = self._loop.finished
        control.should_training_stop |= self.finished

    def on_save(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Save the position in the round, before `Supervision` marks the checkpoint as complete."""
        position, residual = self._loop.saved()
        metadata = {key: str(value) for key, value in position.items()}
        save_file(residual, self._folder / f"checkpoint-{state.global_step}" / SAVED, metadata=metadata)

    def report(self) -> None:
        """Write the rounds into diloco.json and the summary."""
        round_records = [asdict(round_) for round_ in self._loop.history]
        summary: dict[str, Any] = {
            "replica": self._replica.number,
            "rounds_taken_part": sum(round_["took_part"] for round_ in round_records),
            "bytes_sent": self._replica.bucket.sent,
            "bytes_received": self._replica.bucket.received,
        }
        self._out.document("diloco", {**summary, "weights": self._loop.state.digest, "rounds": round_records})
        self._out.set_summary(**summary)


def _read(checkpoint: Path | None) -> tuple[dict[str, int] | None, arrays.Arrays | None]:
    """Return a saved replica's position in its round, and its codec's residual."""
    if checkpoint is None or not (checkpoint / SAVED).exists():
        return None, None
    with safe_open(checkpoint / SAVED, "np") as file:
        return {key: int(value) for key, value in file.metadata().items()}, {
            name: file.get_tensor(name)
            for name in file.keys()  # noqa: SIM118 - no dict
        }
