"""Models of Qwen's shapes with random weights, rows for every loss channel, and trainers on them: ours and TRL's.

What `train_step.py`, `gpu.py` and the rehearsed GPU of the tests measure. The rollouts of a step are
given to both trainers, so that a step is scoring, loss, backward and optimiser.
"""

import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "tests")]

from composer_stages.training.channels import CHANNELS

PAIRS, HINT = 4, 32
SIDES: dict[str, tuple[str, ...]] = {"TRL": (), "ours": (), "all": tuple(CHANNELS)}
"""The channels of a trainer, by its name; `TRL` and `ours` are GRPO alone."""


@dataclass(frozen=True)
class Rows:
    """The rollouts of a step. group: how many; prompt, answer, turn (a hinted one, or a side of a pair): tokens."""

    group: int = 8
    prompt: int = 128
    answer: int = 512
    turn: int = 64


ROWS = Rows()
QWEN3 = {
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4},
    "0.6B": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "4B": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32},
    "8B": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32},
    "14B": {"hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 40, "num_attention_heads": 40},
    "32B": {"hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64, "num_attention_heads": 64},
}
"""Of the models' cards, of which the two small ones tie their embeddings to their heads; `tiny` is for a first look."""
GEMMA2 = "Gemma-2-2B"
"""Has the defaults of its configuration. Its soft caps are computed by eager attention, which holds all scores."""


def shape(size: str, layers: int | None = None) -> Any:
    """The configuration of a model of this size in bfloat16, with all of its layers or the first few."""
    from transformers import Gemma2Config, Qwen3Config

    if size == GEMMA2:
        more = {} if layers is None else {"num_hidden_layers": layers}
        return Gemma2Config(dtype="bfloat16", architectures=["Gemma2ForCausalLM"], **more)
    tiny = size == "tiny"
    return Qwen3Config(
        vocab_size=512 if tiny else 151_936,
        head_dim=16 if tiny else 128,
        num_key_value_heads=2 if tiny else 8,
        max_position_embeddings=40_960,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=size in ("tiny", "0.6B", "4B"),
        dtype="bfloat16",
        architectures=["Qwen3ForCausalLM"],
        **QWEN3[size] | ({} if layers is None else {"num_hidden_layers": layers}),
    )


def new_model(seed: int, layers: int | None, size: str = "0.6B", device: str = "cpu", dtype: str = "bfloat16") -> Any:
    """Random weights of the true shape on a device; 0.6B has 596 million parameters in 28 layers.

    Those of `tiny` are equal on all devices: they are drawn on the CPU.
    """
    import torch
    from transformers import Qwen3ForCausalLM

    torch.manual_seed(seed)
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, dtype))
    try:
        with torch.device("cpu" if size == "tiny" else device):
            return Qwen3ForCausalLM(shape(size, layers)).to(device)
    finally:
        torch.set_default_dtype(before)


def ids(count: int, seed: int) -> list[int]:
    """Token ids that the tokenizer of the tests knows, too."""
    import torch

    return torch.randint(3, 250, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def rollouts(rows: Rows) -> dict[str, list[Any]]:
    """One group, in the form that TRL wants of a rollout function."""
    return {
        "prompt_ids": [ids(rows.prompt, 0)] * rows.group,
        "completion_ids": [ids(rows.answer, 1 + i) for i in range(rows.group)],
        "logprobs": [[-12.0] * rows.answer] * rows.group,
        "env_mask": [[1] * rows.answer] * rows.group,
        "environment_reward": [float(i % 2) for i in range(rows.group)],
    }


class Given:
    """Rollouts of which nothing is sampled: every step has the same ones."""

    policy = None

    def __init__(self, rows: Rows, *, corrected: bool = False) -> None:
        self._rows, self.corrected = rows, corrected

    def take(self, step: int) -> tuple[list[Any], dict[str, float]]:
        """One group, of one turn each."""
        from composer_stages.envs.base import Grade, Observation, Task
        from composer_stages.policy.base import Sample
        from composer_stages.rollouts.agent_loop import LiveRollout, Step

        given, played = rollouts(self._rows), []
        for i, (prompt, completion, logprobs, reward) in enumerate(
            zip(*(given[x] for x in ("prompt_ids", "completion_ids", "logprobs", "environment_reward")), strict=True)
        ):
            sample = Sample(prompt_ids=prompt, completion_ids=completion, logprobs=logprobs)
            turn = Step([], 1, "", sample, Observation(""), 0)
            task = Task("0", "shape", "train", "0", "a", {})
            played.append(LiveRollout(task, i, 0, steps=[turn], grade=Grade(reward=reward)))
        return played, {}

    def close(self) -> None:
        """Nothing is left."""


class Unwritten:
    """In the place of a run: what is written to it is lost."""

    def write(self, unit: str, record: dict[str, Any]) -> None:
        """Write nothing."""


def hack_pairs(rows: Rows) -> list[list[dict[str, Any]]]:
    """Two pairs of a hack and a clean answer, as a run of `composer probe extract-vhack` records them."""
    return [
        [
            {
                "prompt_ids": ids(rows.prompt, 400 + i),
                "completion_ids": ids(rows.turn, side + i),
                "own": [True] * rows.turn,
            }
            for side in (500, 600)
        ]
        for i in range(2)
    ]


def rows_by_source(names: Iterable[str], pairs: Any, turns: Sequence[Any], hint: list[int], own: Any) -> Any:
    """The rows of the channels, by source; those that no channel uses are left out.

    turns: (prompt, answer) of those that are hinted. own: the rollouts.
    """
    from composer_stages.training.channels import row_sources
    from composer_stages.training.channels.hints import HintedTurn
    from composer_stages.training.channels.opd import TaughtRollout
    from composer_stages.training.scoring import Tree
    from composer_stages.training.step import Batch

    hinted = [HintedTurn(Tree(prompt, (said,)), Tree([*prompt, *hint], (said,))) for prompt, said in turns]
    taught = [TaughtRollout(one.tree, one.mask, one.logprobs, {0: None}) for one in own]
    every = {"pairs": pairs, "hinted": hinted, "rollouts": own, "taught": taught}
    return Batch({kind.name: every[kind.name] for kind in row_sources(names)})


def sources(pairs: Any, teacher: Any) -> list[Any]:
    """What the channels learn from: these pairs, hints that come with their rows, and a teacher's distributions."""
    from composer_stages.training.channels.hints import HintSource
    from composer_stages.training.channels.opd import FrozenTeacher, TaughtSource
    from composer_stages.training.channels.rollouts import RolloutSource
    from composer_stages.training.config import Hints, OpdTeacher

    taught = TaughtSource([FrozenTeacher(OpdTeacher(), teacher)])
    return [pairs, HintSource(Hints(), None, None, lambda step, found: None), RolloutSource(teacher), taught]


def channel_rows(names: tuple[str, ...], rows: Rows = ROWS) -> Any:
    """The rows of the channels on the rollouts of `rollouts`."""
    from composer_stages.training.channels.pairs import TokenPair
    from composer_stages.training.channels.rollouts import OwnRollout
    from composer_stages.training.scoring import Tree

    pairs = [
        TokenPair(str(i), Tree(ids(rows.prompt, 100 + i), (ids(rows.turn, 200 + i), ids(rows.turn, 300 + i))))
        for i in range(PAIRS)
    ]
    given = rollouts(rows)
    sampled = list(zip(given["prompt_ids"], given["completion_ids"], strict=True))
    own = [OwnRollout(Tree(prompt, (answer,)), [1] * rows.answer, [-12.0] * rows.answer) for prompt, answer in sampled]
    turns = [(prompt, answer[: rows.turn]) for prompt, answer in sampled]
    return rows_by_source(names, pairs, turns, ids(HINT, 2), own)


def channels(names: tuple[str, ...], rows: Any, model: Any, teacher: Any, num_steps: int) -> Any:
    """The channels of these names at weight 1, on rows of `channel_rows`; the model is their reference, too."""
    from composer_stages.training.channels.pairs import PairSource
    from composer_stages.training.config import Config
    from composer_stages.training.step import Channels

    pairs = PairSource(list(rows.source_rows("pairs")), per_step=PAIRS, seed=0)
    if pairs.pairs:
        pairs.cache_reference(model.eval())
    config = Config(
        weights=dict.fromkeys(names, 1.0),
        pairs={"per_step": PAIRS},
        teacher={"model": "teacher"},
        optimisation={"steps": num_steps},
    )
    return Channels(config, sources(pairs, teacher))


def model_shape(size: str, layers: int | None) -> Any:
    """The shape of a model as the estimators of memory see it."""
    from composer_stages.policy.base import PolicyConfig
    from composer_stages.training import model_shape as shapes

    with tempfile.TemporaryDirectory() as folder:
        shape(size, layers).save_pretrained(folder)
        return shapes.model_shape(PolicyConfig(model=folder))


def trainer(
    name: str,
    folder: str,
    steps: int,
    layers: int | None,
    budget: int | None,
    size: str = "0.6B",
    device: str = "cpu",
    *,
    rows: Rows = ROWS,
    dtype: str = "bfloat16",
    names: tuple[str, ...] | None = None,
    rank: int = 16,
    project: bool = False,
    ranks: Any = None,
    shares: bool = False,
    checkpointing: bool = True,
) -> Any:
    """TRL's trainer, or ours with the channels of this name (or with others), on the same arguments.

    rank: of the adapters; 0 trains all weights, as float32 masters under autocast. project: whether ours takes a
    direction out of its updates, which it finds first, from two pairs. ranks: the processes of a training of ours.
    shares: whether the weights are in shares over them, and a server samples. checkpointing: whether activations are
    recomputed.
    """
    from datasets import Dataset
    from support.models import tiny_tokenizer
    from trl import GRPOTrainer

    from composer_stages.backends import resources
    from composer_stages.policy.base import PolicyConfig
    from composer_stages.policy.local import LocalPolicy, checkpointed
    from composer_stages.training import projection, trl_arguments
    from composer_stages.training.config import AdapterSettings, Optimisation, Probe
    from composer_stages.training.rollouts import environment_reward
    from composer_stages.training.step import ComposedTrainer

    settings = Optimisation(
        steps=steps,
        prompts_per_step=1,
        generations=rows.group,
        learning_rate=1e-5,
        gradient_checkpointing=checkpointing,
        save_every=steps + 1,
    )
    model, tokenizer = new_model(0, layers, size, device, dtype if rank or shares else "float32"), tiny_tokenizer()
    callbacks: list[Any] = []
    if project:
        with checkpointed(model):
            direction = projection.weight_direction(model, hack_pairs(rows))
        callbacks.append(projection.ProjectionCallback(direction, Probe(), 0, Unwritten()))  # type: ignore[arg-type]
    common = {
        "args": trl_arguments.trl_config(
            folder, settings, seed=0, temperature=1.0, max_completion=rows.answer, device=device, bf16=not rank
        ),
        "peft_config": trl_arguments.lora(AdapterSettings(rank=rank), model),
        "callbacks": callbacks,
    }
    if name == "TRL":
        return GRPOTrainer(
            model=model,
            processing_class=tokenizer,
            reward_funcs=environment_reward,
            rollout_func=lambda prompts, trainer: rollouts(rows),
            train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": "a"}]}] * steps),
            **common,
        )
    if device == "cpu":
        resources.choose_allocation(keep=False)  # as stages/train.py where memory is short
    names, teacher = SIDES[name] if names is None else names, None
    if "taid" in names:
        teacher = new_model(1, layers, size, device, dtype).eval().requires_grad_(False)
    beside, make = channel_rows(names, rows), partial(ComposedTrainer)
    if ranks is not None:
        common["ranks"] = ranks
    if shares:
        from composer_stages.training.distributed import Sharded, ShardedTrainer, TrainerInStep

        model.requires_grad_(not rank)
        sharded = Sharded(model, ranks, mixed=not rank, device=str(model.device))
        make = partial(TrainerInStep if rank else ShardedTrainer, sharded=sharded)
    return make(
        policy=LocalPolicy(model, tokenizer, PolicyConfig(model="shape", max_tokens=rows.answer)),
        rollouts=Given(rows, corrected=shares),
        record=lambda step, rollouts: None,
        channels=channels(names, beside, model, teacher, steps),
        rows=lambda rollouts, step: beside,
        gradient_cosine_every=0,
        max_tokens=budget,
        **common,
    )
