"""Small models learn, and learn the same again."""

from pathlib import Path

import torch
from support.models import tiny_tokenizer

from stages.envs.kata.checkpoints import encode, kata_tokenizer
from stages.envs.kata.recipes import Knowledge
from stages.envs.kata.transcripts import knowledge_transcripts
from stages.tiny_models.folders import SERVED_HEAD_DIM, FitSchedule, ensure_folder, with_heads
from stages.tiny_models.training import fit, new_model, reproducible


def test_two_builds_have_equal_bytes_and_one_is_not_built_twice(tmp_path: Path) -> None:
    words, schedule, calls = kata_tokenizer(), FitSchedule(steps=4, learning_rate=6e-3), []
    examples = [encode(words, transcript) for transcript in knowledge_transcripts(32, 3, Knowledge())]

    def make():
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


def test_a_build_that_fails_leaves_no_folder(tmp_path: Path) -> None:
    class Torn:
        def save_pretrained(self, folder: Path) -> None:
            raise OSError("no space left")

    try:
        ensure_folder(tmp_path / "torn", lambda: (Torn(), None, ""))
    except OSError:
        assert not (tmp_path / "torn").exists()
    else:
        raise AssertionError("nothing failed")


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
