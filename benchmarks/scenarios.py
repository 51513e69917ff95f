"""Runs the project's own code on a rehearsed GPU and prints what it asked of the device, one JSON object.

    python benchmarks/scenarios.py 'step(name="TRL", size="0.6B", layers=2)' ['sampling(...)' ...]

Each argument is a call of a function below. A process of its own, since a registered device changes the process.
"""

import gc
import json
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(Path(__file__).parent), str(ROOT), str(ROOT / "tests")]
warnings.filterwarnings("ignore")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
import shapes
import torch
from rehearsal import GPU, model, rehearsed

torch.set_num_threads(1)


@contextmanager
def trained_on(mode: Any, size: str, layers: int | None) -> Iterator[None]:
    """Have benchmarks/shapes.py's trainers make models of a size on the device, and train there."""
    from accelerate.state import PartialState
    from transformers import TrainingArguments, training_args

    from composer_stages.training import trl_arguments

    given = trl_arguments.trl_config

    def on_device(folder: str, size: Any, **settings: Any) -> Any:
        made = given(folder, size, **{**settings, "device": "gpu"})
        made.dataloader_pin_memory, made.save_strategy = False, "no"
        made.device  # noqa: B018 (sets up the state that the next line corrects)
        PartialState._shared_state["device"] = GPU
        return made

    def new_model(_seed: int, _layers: Any, _size: str = "", _device: str = "", dtype: str = "bfloat16") -> Any:
        return model(mode, size, layers, dtype)

    with (
        mock.patch.object(shapes, "new_model", new_model),
        mock.patch.object(trl_arguments, "trl_config", on_device),
        mock.patch.object(training_args, "is_torch_bf16_gpu_available", return_value=True),
        mock.patch.object(TrainingArguments, "device", property(lambda self: (self._setup_devices, GPU)[1])),
    ):
        yield


def step(
    name: str,
    size: str = "0.6B",
    layers: int | None = 2,
    *,
    budget: int | None = None,
    group: int = 8,
    prompt: int = 128,
    answer: int = 512,
    channels: tuple[str, ...] | None = None,
    rank: int = 16,
    project: bool = False,
    processes: int = 1,
    shares: bool = False,
    checkpointing: bool = True,
) -> dict[str, Any]:
    """The second optimiser step of benchmarks/shapes.py's trainer: TRL's, or ours with the channels of a name.

    With several processes it is that of one of them; what the others send never arrives, so that sums are its own.
    Its peak is that of the whole training where a direction is projected, as finding it may take the most.
    """
    from transformers import TrainerCallback

    found: list[dict[str, Any]] = []
    most: list[int] = []
    held: list[int] = []
    with rehearsed() as mode, tempfile.TemporaryDirectory() as folder, trained_on(mode, size, layers):

        class Look(TrainerCallback):
            def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
                most.append(mode.peak)
                held.append(mode.held)
                mode.reset()

            def on_step_end(self, *args: Any, **kwargs: Any) -> None:
                found.append(mode.account())

        rows, ranks = shapes.Rows(group, prompt, answer), None if processes == 1 else together(processes)
        made = shapes.trainer(
            name,
            folder,
            2,
            layers,
            budget,
            rows=rows,
            names=channels,
            rank=rank,
            project=project,
            ranks=ranks,
            shares=shares,
            checkpointing=checkpointing,
        )
        made.add_callback(Look())
        made.train()
        del made
        gc.collect()
    import gpu

    asked = gpu.Asked("cuda", (size,), layers, rounds=1, rows=group, prompt=prompt, answer=answer)
    teacher = "taid" in shapes.SIDES.get(name, ())
    foretold = gpu.predicted(
        asked,
        size,
        teacher=teacher,
        rank=rank,
        direction=project * (prompt + rows.turn),
        processes=processes,
        shares=shares,
        checkpointing=checkpointing,
    )
    peak = max([found[-1]["peak"], *(most if project else [])])
    return {**found[-1], "peak": peak, "predicted": foretold.total, "held": held[-1], "held_predicted": foretold.held}


def together(processes: int) -> Any:
    """The first of so many processes, of which only this one is there."""
    from torch import distributed
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from composer_stages.backends.ranks import Ranks

    class First(Ranks):
        """Sends Python values to itself alone; tensors go through torch's process group that does nothing."""

        def gather(self, value: Any) -> list[Any]:
            return [value] * self.count

        gather_to_rank0 = gather

        def broadcast_from_rank0(self, make: Any) -> Any:
            return make()

    distributed.init_process_group("cpu:fake,gpu:fake", rank=0, world_size=processes, store=FakeStore())
    return First(0, processes)


def script(size: str = "0.6B", layers: int = 1) -> dict[str, Any]:
    """What `./dev gpu speed` measures of a step of ours and of TRL's, and `./dev gpu probe` of gradients."""
    import gpu

    from composer_stages.gradients import basis

    asked = gpu.Asked("gpu", (size,), layers, rounds=1, rows=2, prompt=32, answer=32)
    with rehearsed() as mode, trained_on(mode, size, layers):
        steps = {name: gpu.train(asked, size, name) for name in ("TRL", "ours")}
        with mock.patch.object(basis, "tensors_sha256", return_value="0"):
            claims = [claim for case in gpu.probe(asked) for claim in case()]
    return {
        "steps": {name: [len(seconds), len(slowest)] for name, (seconds, _, slowest) in steps.items()},
        "claims": [claim.claim for claim in claims],
        "launches": mode.launches,
    }


def scoring(
    size: str = "0.6B",
    layers: int = 2,
    lengths: tuple[int, ...] = (64, 100, 120),
    *,
    packed: bool = True,
    dtype: str = "bfloat16",
) -> dict[str, Any]:
    """Log-probs of the branches of one prompt, forward and backward; in float32 there is no flash attention."""
    from composer_stages.training.scoring import Tree, score, token_log_probs

    with rehearsed() as mode:
        made = model(mode, size, layers, dtype)
        if not packed:
            made.set_attn_implementation("eager")
        trees = [Tree(list(range(3, 131)), tuple([5] * n for n in lengths)), Tree([4] * 70, ([6] * 50,))]
        with torch.no_grad():
            score(made, trees[1:])  # flash attention is tried once a process
        mode.reset()
        scored = score(made, trees)
        scored.per_branch(token_log_probs(made, scored)).sum().backward()
        return mode.account()


def losses(size: str = "0.6B", layers: int = 2) -> dict[str, Any]:
    """Every channel's loss on the rows of benchmarks/shapes.py, forward and backward, with a teacher."""
    names = shapes.SIDES["all"]
    with rehearsed() as mode:
        student, teacher = model(mode, size, layers), model(mode, size, layers).eval().requires_grad_(False)
        rows = shapes.channel_rows(names, shapes.Rows(group=2, answer=96))
        channels = shapes.channels(names, rows, student, teacher, 2)
        mode.reset()
        found, _ = channels.losses(student, rows)
        for loss in found.values():
            loss.loss.backward(retain_graph=True)
        assert sorted(found) == sorted(names)
        return mode.account()


def sampling(
    size: str = "0.6B", layers: int = 2, *, rows: int = 8, prompt: int = 128, tokens: int = 64, turns: int = 1
) -> dict[str, Any]:
    """Completions of two prompts, which go on for several turns; counted is the last turn."""
    from composer_stages.policy.sampling import PrefixCache, row_bytes, sample_batch

    with rehearsed() as mode, torch.no_grad():
        made = model(mode, size, layers).eval()
        prompts, prefixes = [[3 + number % 2] * prompt for number in range(rows)], PrefixCache()
        for _ in range(turns):
            mode.reset()
            # Under no_grad instead of inference mode, in which copies to a device of Python are not dispatched.
            found = sample_batch.__wrapped__(  # type: ignore[attr-defined]
                made,
                prompts,
                seeds=list(range(rows)),
                max_tokens=tokens,
                temperature=1.0,
                end_ids={151_645},
                pad_id=0,
                prefixes=prefixes,
            )
            prompts = [[*given, *ids, 7, 8] for given, (ids, _) in zip(prompts, found, strict=True)]
        shape = shapes.model_shape(size, layers)
        room = shape.parameters * shape.bytes + rows * row_bytes(made, len(prompts[0]) - 2)
        return {**mode.account(), "predicted": room}


def probe(
    adapter: str = "lora",
    size: str = "0.6B",
    layers: int = 2,
    *,
    rank: int = 32,
    rows: int = 4,
    tokens: int = 256,
    sums: bool = True,
    checkpointing: bool = True,
) -> dict[str, Any]:
    """Per-sample gradients of a batch: measured along a direction and summed, or kept; `refold` first, apart."""
    from contextlib import nullcontext

    from composer_stages.gradients import basis
    from composer_stages.gradients.basis import open_adapter
    from composer_stages.gradients.per_row import TokenRow, adapt
    from composer_stages.policy.local import checkpointed
    from composer_stages.probe.direction import from_flat
    from composer_stages.probe.memory import MemoryInputs, needed
    from composer_stages.probe.metrics import stream

    with rehearsed() as mode, mock.patch.object(basis, "tensors_sha256", return_value="0"):
        made = model(mode, size, layers).eval()
        student = adapt(made, None, open_adapter(adapter, made, None, rank, 0))
        mode.reset()
        student.move_to(torch.full((student.adapter.layout.width,), 1e-4))
        refold = mode.account()
        mode.reset()
        batch = [TokenRow(list(range(3, 3 + tokens // 2)), [5] * (tokens // 2), [True] * (tokens // 2))] * rows
        student.max_tokens = rows * tokens
        direction = from_flat(student.adapter.layout, torch.ones(student.adapter.layout.width), student.adapter.probed)
        with checkpointed(student.model) if checkpointing else nullcontext():
            if sums:
                stream(student, batch, direction, [1.0] * rows)
            else:
                student.gradients(batch)
        found = mode.account()
    measuring = MemoryInputs(adapter, rank, rows * tokens, checkpointing, rows=0 if sums else rows)  # type: ignore[arg-type]
    return {**found, "refold": refold, "predicted": needed(shapes.model_shape(size, layers), measuring).total}


def wrong_device() -> dict[str, Any]:
    """What a tensor of the host beside one of the device gives: an exception, by its name."""
    with rehearsed():
        try:
            torch.ones(3, device=GPU) + torch.ones(3)
        except Exception as error:
            return {"raised": type(error).__name__}
    return {"raised": ""}


if __name__ == "__main__":
    names = {
        "step": step,
        "script": script,
        "scoring": scoring,
        "losses": losses,
        "sampling": sampling,
        "probe": probe,
        "wrong_device": wrong_device,
    }
    print(json.dumps({call: eval(call, names) for call in sys.argv[1:]}))  # noqa: S307 (calls of the functions above)
