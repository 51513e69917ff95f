"""Small models learn the same again; their folders are complete or absent, also after a failure or a signal."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from support.models import tiny_tokenizer

from stages.envs.kata.checkpoints import encode, kata_tokenizer
from stages.envs.kata.recipes import Knowledge
from stages.envs.kata.transcripts import knowledge_transcripts
from stages.runs.activity import Dropped, dropped_on_stop, stopped_by
from stages.runs.run import Interrupted, Manifest, RunWriter
from stages.runs.runner import stop_on_signals
from stages.tiny_models.folders import SERVED_HEAD_DIM, FitSchedule, ensure_folder, with_heads
from stages.tiny_models.training import fit, new_model, reproducible


def test_two_builds_have_equal_bytes_and_one_is_not_built_twice(tmp_path: Path) -> None:
    words, schedule, calls = kata_tokenizer(), FitSchedule(steps=4, learning_rate=6e-3), []
    examples = [encode(words, transcript) for transcript in knowledge_transcripts(32, 3, Knowledge())]

    def make() -> tuple[Any, Any, str]:
        calls.append(torch.initial_seed())
        with reproducible(5):
            model = new_model(words)
            fit(model, examples, schedule, 5, lambda done, total: None)
        return model, words, "# card\n"

    one, other = ensure_folder(tmp_path / "one", make), ensure_folder(tmp_path / "other", make)
    assert ensure_folder(tmp_path / "one", make) == one and len(calls) == 2
    names = sorted(path.name for path in one.iterdir())
    assert "model.safetensors" in names and "tokenizer.json" in names and "README.md" in names
    assert all((one / name).read_bytes() == (other / name).read_bytes() for name in names)


def nothing() -> None:
    pass


class Saved:
    """A model or tokenizer that writes one file, then does what it is given to do."""

    def __init__(self, then: Callable[[], None] = nothing) -> None:
        self.then = then

    def save_pretrained(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        (folder / "weights").write_text("1")
        self.then()


def fail() -> None:
    raise OSError("no space left")


def stop_now() -> None:
    """Get the signal, then do what takes long, were it not ended."""
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(30)


@pytest.mark.parametrize(
    ("while_building", "while_saving", "error"),
    [(nothing, fail, OSError), (stop_now, nothing, Interrupted), (nothing, stop_now, Interrupted)],
)
def test_a_build_that_fails_or_is_stopped_leaves_no_folder_and_can_be_made_again(
    tmp_path: Path, while_building: Callable[[], None], while_saving: Callable[[], None], error: type[BaseException]
) -> None:
    def build() -> tuple[Any, Any, str]:
        while_building()
        return Saved(while_saving), Saved(), "card"

    record = Manifest(composer="1", stage="collect", stage_version=1, fingerprint="f")
    writer = RunWriter(tmp_path / "run", record, cache=tmp_path)
    started = time.monotonic()
    with pytest.raises(error), stop_on_signals(writer) as caught:
        ensure_folder(tmp_path / "models" / "m", build)
    assert time.monotonic() - started < 5
    assert writer.stop.is_set() == (caught == [signal.SIGTERM]) == (error is Interrupted)
    assert [path.name for path in (tmp_path / "models").iterdir()] == [".m.lock"]
    assert (ensure_folder(tmp_path / "models" / "m", lambda: (Saved(), Saved(), "card")) / "weights").exists()


def test_what_is_not_kept_does_not_begin_after_a_signal() -> None:
    stop = Event()
    with stopped_by(stop):
        with dropped_on_stop():
            stop.set()
        with pytest.raises(Dropped), dropped_on_stop():
            raise AssertionError("it began")
    with dropped_on_stop():
        pass


def test_training_leaves_threads_and_randomness_as_they_were() -> None:
    threads, drawn = torch.get_num_threads(), torch.random.get_rng_state()
    with reproducible(1):
        assert torch.get_num_threads() == 1
        torch.rand(3)
    assert torch.get_num_threads() == threads and torch.equal(torch.random.get_rng_state(), drawn)
    assert not torch.are_deterministic_algorithms_enabled()


def test_wider_heads_are_fewer_and_the_size_stays() -> None:
    narrow = new_model(tiny_tokenizer())
    wide = with_heads(narrow)
    assert wide.config.head_dim == SERVED_HEAD_DIM and narrow.config.head_dim == 16
    assert (wide.config.num_attention_heads, wide.config.num_key_value_heads) == (4, 2)
    layers = sum(p.numel() for p in narrow.parameters()) - sum(p.numel() for p in wide.parameters())
    assert layers == -2 * 2 * (SERVED_HEAD_DIM - 16), "the norms of queries and keys are as wide as a head"
    assert wide(input_ids=torch.tensor([[1, 2, 3]])).logits.shape == (1, 3, narrow.config.vocab_size)
