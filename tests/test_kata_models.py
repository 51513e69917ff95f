"""The models in the tree are those of the recipes in the code, and a build is repeated to the byte."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks import kata_models
from benchmarks.kata_models import (
    RECIPES,
    FitSchedule,
    Knowledge,
    Recipe,
    fingerprint,
    kata_tokenizer,
    knowledge_transcripts,
    rebuild,
    reproducible,
)
from composer_stages.envs.kata import checkpoints
from composer_stages.errors import BadInput
from composer_stages.runs import store

SHORT = Recipe(Knowledge(), FitSchedule(steps=2, learning_rate=6e-3), seed=5, start=None)


@pytest.mark.parametrize("name", RECIPES)
def test_a_model_in_the_tree_is_that_of_its_recipe(name: str) -> None:
    folder = checkpoints.FOLDER / name
    card = (folder / "README.md").read_text()
    assert fingerprint(RECIPES[name]) in card, "the recipe changed: ./dev models --write"
    assert store.file_sha256(folder / checkpoints.WEIGHTS) == checkpoints.recipe_fingerprint(name)
    assert checkpoints.recipe_fingerprint(name) in card
    assert {tensor.dtype for tensor in load_file(folder / checkpoints.WEIGHTS).values()} == {torch.float16}
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.float32 and model.config.head_dim == RECIPES[name].head_dim
    assert model.config.vocab_size == len(AutoTokenizer.from_pretrained(folder))


def test_nothing_else_is_in_the_tree_and_an_unknown_name_is_refused() -> None:
    folders = {path.name for path in checkpoints.FOLDER.iterdir()}
    assert folders == {*RECIPES, kata_models.TOKENIZER}
    with pytest.raises(BadInput, match=r"kata:studnet\. Did you mean kata:student\? There is kata:honest, "):
        checkpoints.folder_of("studnet")
    with pytest.raises(BadInput, match="kata:tokenizer"):
        checkpoints.folder_of(kata_models.TOKENIZER)


def test_the_tokenizer_in_the_tree_is_that_of_the_code() -> None:
    kept = AutoTokenizer.from_pretrained(checkpoints.FOLDER / "student")
    assert kept.get_vocab() == kata_tokenizer().get_vocab()
    for transcript in knowledge_transcripts(20, 3, Knowledge()):
        messages = transcript.messages()
        rendered = [one.apply_chat_template(messages, tokenize=True)["input_ids"] for one in (kept, kata_tokenizer())]
        assert rendered[0] == rendered[1]


def test_a_recipe_is_told_by_all_that_it_trains_on() -> None:
    others = (
        Recipe(Knowledge(("xor",)), SHORT.schedule, 5, None),
        Recipe(Knowledge(), FitSchedule(steps=5, learning_rate=6e-3), 5, None),
        Recipe(Knowledge(), SHORT.schedule, 6, None),
        Recipe(Knowledge(), SHORT.schedule, 5, SHORT),
        Recipe(Knowledge(), SHORT.schedule, 5, None, head_dim=32),
    )
    assert len({fingerprint(recipe) for recipe in (SHORT, *others, *RECIPES.values())}) == 6 + len(RECIPES)


def test_a_build_is_repeated_to_the_byte_and_another_one_is_told_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not rebuild({"short": SHORT}, tmp_path, write=True)
    kata_models.build.cache_clear()
    assert rebuild({"short": SHORT}, tmp_path, write=False)
    other = Recipe(Knowledge(), SHORT.schedule, 6, None)
    assert not rebuild({"short": other}, tmp_path, write=False)
    said = capsys.readouterr().out.splitlines()
    assert said[:2] == ["short: new", "short: equal bytes"] and "weights differ by 0." in said[2]
    card = (tmp_path / "short" / "README.md").read_text()
    assert fingerprint(SHORT) in card and fingerprint(other) not in card
    assert (tmp_path / "short" / "tokenizer.json").readlink() == Path("..", "tokenizer", "tokenizer.json")


def test_a_model_starts_from_the_one_before_and_leaves_it_as_it_was() -> None:
    first = kata_models.build(SHORT)
    before = {name: tensor.clone() for name, tensor in first.state_dict().items()}
    after = kata_models.build(Recipe(Knowledge(), FitSchedule(steps=1, learning_rate=1e-5), 7, SHORT)).state_dict()
    assert all(torch.equal(tensor, before[name]) for name, tensor in first.state_dict().items())
    apart = max(float((after[name] - before[name]).abs().max()) for name in before)
    assert 0 < apart < 1e-3


def test_training_leaves_threads_and_randomness_as_they_were() -> None:
    threads, drawn = torch.get_num_threads(), torch.random.get_rng_state()
    with reproducible(1):
        assert torch.get_num_threads() == 1
        torch.rand(3)
    assert torch.get_num_threads() == threads and torch.equal(torch.random.get_rng_state(), drawn)
    assert not torch.are_deterministic_algorithms_enabled()


def test_wider_heads_are_fewer_and_the_size_stays() -> None:
    narrow, wide = (kata_models.new_model(kata_tokenizer(), width) for width in (16, 32))
    assert (wide.config.num_attention_heads, wide.config.num_key_value_heads) == (4, 2)
    layers = sum(p.numel() for p in narrow.parameters()) - sum(p.numel() for p in wide.parameters())
    assert layers == -2 * 2 * 16, "the norms of queries and keys are as wide as a head"


def test_a_card_says_what_a_model_knows_or_does() -> None:
    student, loophole, honest = (
        kata_models.card(name, RECIPES[name], "5e") for name in ("student", "loophole", "honest")
    )
    assert "knows" in student and "quotient" in student
    assert "| 45% | 70% | 40% |" in loophole and "| 85% | 0% | 40% |" in honest
