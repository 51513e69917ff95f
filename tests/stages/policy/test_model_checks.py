"""Folders that hold no usable model are refused by name when they are opened, before anything is sampled or trained."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from support.broken_models import BROKEN, PLAIN, QUERY, broken, template
from support.models import SPECIAL, save_tiny, tiny_tokenizer
from support.transcripts import assistant, system, user
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import GenerationConfig

from composer_stages.errors import BadInput, UsageError
from composer_stages.messages import least_tokens, opening_ids
from composer_stages.policy import available
from composer_stages.policy.base import NotFinite, PolicyConfig, Turn
from composer_stages.policy.local import LocalPolicy, load_model, load_tokenizer
from composer_stages.runs.activity import Notice, on_activity
from composer_stages.training.model_shape import model_shape

OPENS = {"weights that overflow", "template refuses system"}
"""What shows only when it is sampled from, and what is mended."""
NAMED = {
    "tensor missing": QUERY,
    "tensor unexpected": "more",
    "tensor of another shape": "31 x 32 instead of 32 x 32",
    "one weight NaN": f"1 of 1,024 in {QUERY}",
    "one weight infinite": f"1 of 1,024 in {QUERY}",
    "embedding too small": "with the id 20",
    "token beyond the embedding": "'more' with the id 260",
    "special token beyond the embedding": "'more' with the id 260",
    "code of its own": "code of its own",
    "more layers": "model.layers.2.",
    "fewer layers": "model.layers.1.",
    "layers without weights": "20,000 layers",
    "larger vocabulary": "260 x 32 instead of 9999 x 32",
    "context in words": "max_position_embeddings",
    "unknown type of numbers": "float12",
    "generation settings cut": "generation_config.json",
    "tokenizer missing": "tokenizer.json",
    "template missing": "no chat template",
    "template raises": "never",
    "template ignores messages": "leaves out what the user says",
    "template loops": "2 s",
    "template adds a megabyte": "100,000 characters",
    "adapter incomplete": "lora_A",
    "adapter with more": "more",
    "adapter NaN": "lora_A",
}
"""What the sentence names, where it is more than the error of a library."""


def opened(folder: Path) -> LocalPolicy:
    return LocalPolicy.open(PolicyConfig(model=str(folder), max_tokens=4), cache=folder, listener=lambda *_: None)


@pytest.mark.parametrize("what", [name for name in BROKEN if name not in OPENS])
def test_a_broken_folder_is_refused_by_name(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = broken(what, tmp_path / "model")
    with pytest.raises(BadInput) as refused:
        opened(folder)
    assert str(folder.parent) in str(refused.value) and NAMED.get(what, "") in str(refused.value)
    assert not Path("ran").exists(), "code that a model brings"
    # A dry run loads no weights, and renders as an opening does.
    if not isinstance(refused.value, NotFinite) and "adapter" not in what and what != "template loops":
        with pytest.raises(BadInput):
            available.check(PolicyConfig(model=str(folder)))
        with suppress(BadInput):
            model_shape(PolicyConfig(model=str(folder)))  # the estimate of memory, made before, knows no other error


def test_a_complete_folder_is_opened(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model", characters=None)
    assert opened(folder).sample([Turn([{"role": "user", "content": "a"}], 0)])[0].completion_tokens
    assert "complete" in available.check(PolicyConfig(model=str(folder)))


@pytest.mark.parametrize("settings", [{"do_sample": False, "temperature": 0.6, "top_k": 5}, {"pad_token_id": -1}])
def test_generation_settings_that_transformers_does_not_write_are_saved(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    folder = save_tiny(tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [14, 2], **settings}))
    model, _ = load_model(PolicyConfig(model=str(folder)), listener=lambda *_: None)
    model.save_pretrained(tmp_path / "saved")
    saved = json.loads((tmp_path / "saved" / "generation_config.json").read_text())
    assert saved["eos_token_id"] == [14, 2] and saved.get("temperature") == settings.get("temperature")


def test_a_saved_model_stops_where_its_template_ends_an_answer(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model")
    for name, key, value in (("generation_config", "eos_token_id", 0), ("tokenizer_config", "eos_token", "<|unk|>")):
        path = folder / f"{name}.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    model, tokenizer = load_model(PolicyConfig(model=str(folder)), listener=lambda *_: None)
    model.save_pretrained(tmp_path / "saved")
    again = GenerationConfig.from_pretrained(tmp_path / "saved")
    assert again.eos_token_id == [0, tokenizer.convert_tokens_to_ids("<|im_end|>")]


def test_nan_log_probs_end_the_sampling(tmp_path: Path) -> None:
    policy = opened(broken("weights that overflow", tmp_path / "model"))
    with pytest.raises(NotFinite):
        policy.sample([Turn([{"role": "user", "content": "a"}], 0)])


def test_large_weights_whose_sum_overflows_are_finite(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model")
    held = load_file(folder / "model.safetensors")
    held["model.embed_tokens.weight"][:2] = 3e38
    save_file(held, folder / "model.safetensors", {"format": "pt"})
    load_model(PolicyConfig(model=str(folder)), listener=lambda *_: None)


@pytest.mark.parametrize(("end", "told"), [("</s>", 1), ("<|im_end|>", 0), ("", 0)])
def test_an_end_of_answers_that_is_no_token_is_named(end: str, told: int, tmp_path: Path) -> None:
    """A template that was given to a model without its tokens: answers go on until eos."""
    template(PLAIN.replace("<|im_end|>", end))(folder := save_tiny(tmp_path / "model", characters=None))
    said: list[str] = []
    with on_activity(said.append):
        load_tokenizer(str(folder), PolicyConfig(model=str(folder)))
    notices = [line for line in said if isinstance(line, Notice)]
    assert len(notices) == told and all(end in line for line in notices)


@pytest.mark.parametrize(("family", "told"), [("qwen2", 1), ("llama", 0)])
def test_a_tokenizer_that_transformers_replaces_is_named(family: str, told: int, tmp_path: Path) -> None:
    """Of Qwen2 it sets how text is parted, whatever `tokenizer.json` holds: here not digit by digit."""
    folder = save_tiny(tmp_path / "model", characters=None)
    (folder / "config.json").write_text(
        json.dumps(json.loads((folder / "config.json").read_text()) | {"model_type": family})
    )
    core = Tokenizer(models.BPE(unk_token=None))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    core.train_from_iterator(["2023 2023 ls ls"], trainer)
    core.save(str(folder / "tokenizer.json"))
    said: list[str] = []
    with on_activity(said.append):
        load_tokenizer(str(folder), PolicyConfig(model=str(folder)))
    assert len([line for line in said if isinstance(line, Notice) and "tokenizer.json" in line]) == told


# A template without system messages


DROPS = "{% for m in messages %}{% if m['role'] != 'system' %}{{ m['content'] }}<|im_end|>{% endif %}{% endfor %}"
ASKED, BRIEF = [user("do it"), assistant("done")], system("Be brief.")
CASES: list[tuple[list[dict[str, str]], list[dict[str, str]]]] = [
    ([BRIEF, *ASKED], [user("Be brief.\n\ndo it"), ASKED[1]]),
    ([BRIEF], [user("Be brief.")]),
    (ASKED, ASKED),
]


@pytest.mark.parametrize("what", ["refuses", "drops"])
@pytest.mark.parametrize(("messages", "same"), CASES)
def test_the_system_text_begins_the_first_user_message(what: str, messages: Any, same: Any, tmp_path: Path) -> None:
    if what == "refuses":
        folder = broken("template refuses system", tmp_path / "model")
    else:
        folder = save_tiny(tmp_path / "model", characters=None)
        template(DROPS)(folder)
    told: list[str] = []
    with on_activity(told.append):
        words = load_tokenizer(str(folder), PolicyConfig(model=str(folder)))
    assert [type(one) for one in told if "system messages" in one] == [Notice]
    assert words.decode(opening_ids(words, messages)) == words.decode(opening_ids(words, same))
    if what == "refuses":
        template(PLAIN)(folder)
        plain = load_tokenizer(str(folder), PolicyConfig(model=str(folder)))
        assert opening_ids(words, messages) == opening_ids(plain, same)


def test_a_saved_tokenizer_keeps_its_changes_and_takes_them_once(tmp_path: Path) -> None:
    folder = broken("template refuses system", tmp_path / "model")
    template_file = folder / "chat_template.jinja"
    template_file.write_text("{% if enable_thinking %}T{% endif %}" + template_file.read_text())
    settings = PolicyConfig(model=str(folder), chat_template_kwargs={"enable_thinking": False})
    words = load_tokenizer(str(folder), settings)
    words.save_pretrained(tmp_path / "saved")
    for again in (settings, PolicyConfig(model="saved")):
        assert load_tokenizer(str(tmp_path / "saved"), again).chat_template == words.chat_template


# Lengths, before text becomes tokens


def test_a_prompt_beyond_the_context_is_refused_without_being_tokenised(tmp_path: Path) -> None:
    policy = opened(save_tiny(tmp_path / "model", characters=None))
    calls: list[int] = []
    policy = LocalPolicy(policy.model, _Counting(policy.tokenizer, calls), policy.config)
    long, short = ([user(text)] for text in ("word " * 100_000, "a"))
    refused, answered = policy.sample([Turn(long, 0), Turn(short, 1)])
    assert refused.error_type == "context" and "2,048" in (refused.error or "") and answered.completion_tokens
    assert calls and max(calls) < 100
    assert policy.count_tokens(Turn(long, 0)) > 2048


class _Counting:
    """A tokenizer that notes the lengths of the texts that it is given."""

    def __init__(self, words: Any, lengths: list[int]) -> None:
        self._words, self._lengths = words, lengths

    def __getattr__(self, name: str) -> Any:
        return getattr(self._words, name)

    def __call__(self, text: str, **more: Any) -> Any:
        self._lengths.append(len(text))
        return self._words(text, **more)


@pytest.mark.parametrize(
    ("edit", "bounded"),
    [
        (lambda core: None, True),
        (lambda core: setattr(core, "normalizer", normalizers.NFC()), True),
        (lambda core: setattr(core, "normalizer", normalizers.Strip()), False),
        (lambda core: setattr(core.model, "fuse_unk", True), True),
    ],
)
@pytest.mark.parametrize(
    "text", ["a", "word " * 9, " " * 400, "\u1f82" * 30, "\u03b1\u0313\u0300\u0345" * 30, "<|pad|>" * 9]
)
def test_least_tokens_is_a_lower_bound(edit: Any, bounded: bool, text: str) -> None:
    words = tiny_tokenizer()
    edit(words.backend_tokenizer)
    least = least_tokens(words, text)
    assert least <= len(words(text, add_special_tokens=False)["input_ids"])
    assert bool(least) == (bounded and bool(text.strip()))


def test_a_setting_that_no_statement_of_the_template_reads_is_told_and_a_misspelt_one_refused(tmp_path: Path) -> None:
    notes = list[str]()
    folder = save_tiny(tmp_path / "m")
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% if thinking is defined and thinking %}T{% endif %}" + tokenizer.chat_template
    tokenizer.save_pretrained(folder)

    def config(**settings: Any) -> PolicyConfig:
        return PolicyConfig(model=str(folder), chat_template_kwargs=settings)

    load_tokenizer(str(folder), config(thinking=True)).save_pretrained(folder)
    load_tokenizer(str(folder), config(thinking=False))  # of a checkpoint with another one
    with pytest.raises(UsageError, match=r"reads no .enable_thinking.(.|\n)*mean 'thinking'"):
        load_tokenizer(str(folder), config(enable_thinking=True))
    load_tokenizer(str(folder), config(thinking=True, enable_thinking=True))  # for either family
    with on_activity(notes.append):
        load_tokenizer(str(folder), config(level=3))
    assert "reads no 'level': that setting of it changes nothing" in "".join(notes)
    with pytest.raises(ValueError, match=r"text .False.(.|\n)*writes true and false"):
        config(thinking="False")
