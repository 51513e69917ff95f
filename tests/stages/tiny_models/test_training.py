"""Small models learn, and learn the same again."""

from pathlib import Path

import torch

from stages.envs.kata import checkpoints as tokenizers
from stages.envs.kata.checkpoints import encode
from stages.envs.kata.recipes import Knowledge
from stages.envs.kata.transcripts import write
from stages.tiny_models.folders import Schedule, kept
from stages.tiny_models.training import fit, new_model, reproducible


def test_two_builds_have_equal_bytes_and_one_is_not_built_twice(tmp_path: Path) -> None:
    words, schedule, calls = tokenizers.train(), Schedule(steps=4, learning_rate=6e-3), []
    examples = [encode(words, transcript) for transcript in write(32, 3, Knowledge())]

    def make():
        calls.append(torch.initial_seed())
        with reproducible(5):
            model = new_model(words)
            fit(model, examples, schedule, 5, lambda done, total: None)
        return model, words, "# card\n"

    one, other = kept(tmp_path / "one", make), kept(tmp_path / "other", make)
    assert kept(tmp_path / "one", make) == one and len(calls) == 2
    names = sorted(path.name for path in one.iterdir())
    assert "model.safetensors" in names and "tokenizer.json" in names and "README.md" in names
    assert all((one / name).read_bytes() == (other / name).read_bytes() for name in names)


def test_a_build_that_fails_leaves_no_folder(tmp_path: Path) -> None:
    class Torn:
        def save_pretrained(self, folder: Path) -> None:
            raise OSError("no space left")

    try:
        kept(tmp_path / "torn", lambda: (Torn(), None, ""))
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
