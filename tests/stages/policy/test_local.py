"""A model in this process: settings of its chat template reach every rendering, and code that it brings is not run."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners import lora
from probe_faults.loophole_world import TEMPLATE, WORDS, tiny_qwen3, tokenizer
from pydantic import ValidationError
from safetensors.torch import load_file, save_file
from support.models import save_tiny, tiny_model, tiny_tokenizer

from composer_stages.errors import BadInput
from composer_stages.messages import following_ids, opening_ids
from composer_stages.policy.base import PolicyConfig, Turn
from composer_stages.policy.local import LocalPolicy, load_model, load_tokenizer
from composer_stages.probe.rows import token_row
from composer_stages.training.model_shape import model_shape

THINKING = TEMPLATE + "{% if enable_thinking is defined and enable_thinking is false %}so {% endif %}"
ASKED = [{"role": "user", "content": "task d1 d2"}]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model whose template ends a prompt with "so" where thinking is off, as Qwen3's does with an empty block."""
    words = tokenizer()
    words.chat_template = THINKING
    tiny_qwen3(hidden=16, vocab=len(WORDS)).save_pretrained(tmp_path / "model")
    words.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def load(folder: Path, **settings: bool) -> LocalPolicy:
    config = PolicyConfig(model=str(folder), max_tokens=2, chat_template_kwargs=settings)
    return LocalPolicy.open(config, cache=folder.parent, listener=lambda *_: None)


def test_template_settings_apply_to_every_rendering(folder: Path) -> None:
    plain, off = load(folder), load(folder, enable_thinking=False)
    so = WORDS.index("so")
    words = off.tokenizer
    assert off.sample([Turn(ASKED, 0)])[0].prompt_ids[-1] == so != plain.sample([Turn(ASKED, 0)])[0].prompt_ids[-1]
    assert opening_ids(words, ASKED)[-1] == so == following_ids(words, ASKED)[-1]
    assert token_row(words, ASKED, "fix d2").prompt_ids[-1] == so
    assert words.apply_chat_template(ASKED, add_generation_prompt=True)["input_ids"][-1] == so
    assert plain.facts()["chat_template_sha256"] != off.facts()["chat_template_sha256"]


def test_an_answer_keeps_blanks_that_its_tokenizer_cleans_up(folder: Path) -> None:
    words = tokenizer()
    words.add_tokens("'s")
    words.clean_up_tokenization_spaces = True
    words.chat_template = TEMPLATE
    ids = words("fix 's", add_special_tokens=False)["input_ids"]
    assert words.decode(ids) == "fix's"
    words.save_pretrained(folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "clean_up_tokenization_spaces": True}))
    assert load_tokenizer(str(folder), PolicyConfig(model=str(folder))).decode(ids) == "fix 's"


def test_a_template_setting_must_be_an_identifier() -> None:
    with pytest.raises(ValidationError):
        PolicyConfig(chat_template_kwargs={"x %}": True})


# An adapter is a part of the weights while answers are sampled.


def adapted(dtype: torch.dtype = torch.float32, **form: Any) -> LocalPolicy:
    """A policy on a model with LoRA in training mode, whose adapter changes it much."""
    words = tiny_tokenizer()
    config = LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=12, target_modules="all-linear", **form)
    model = get_peft_model(tiny_model(vocabulary=len(words)).to(dtype), config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name or "magnitude" in name:
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    return LocalPolicy(model.train(), words, PolicyConfig(model="tiny", max_tokens=12))


def calls_of_adapters(policy: LocalPolicy) -> list[str]:
    """Record from here on which adapters compute a product of their own."""
    calls: list[str] = []
    for name, module in policy.model.named_modules():
        if name.endswith("lora_A.default"):
            module.register_forward_hook(lambda *_, name=name: calls.append(name))
    return calls


@pytest.mark.parametrize("form", [{}, {"use_rslora": True}, {"use_dora": True}, {"lora_dropout": 0.5}])
def test_merging_an_adapter_keeps_answers_and_restores_weights(form: dict[str, Any]) -> None:
    policy = adapted(**form)
    model = policy.model
    before = {name: (p.data_ptr(), p.detach().clone()) for name, p in model.named_parameters()}
    calls = calls_of_adapters(policy)
    turns = [Turn([{"role": "user", "content": text}], seed) for seed, text in enumerate(["a", "bcd"])]
    samples = policy.sample(turns)
    with policy.reusing_prefixes():  # one merging for several calls
        again = policy.sample(turns)
        assert all(layer.merged for layer in model.modules() if isinstance(layer, lora.Linear))
    assert not calls and [sample.logprobs for sample in again] == [sample.logprobs for sample in samples]
    assert model.training
    for name, parameter in model.named_parameters():
        assert parameter.data_ptr() == before[name][0] and torch.equal(parameter, before[name][1]), name
    model.eval()
    for sample in samples:
        prompt, ids = sample.prompt_ids or [], sample.completion_ids or []
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
        fresh = torch.log_softmax(logits, -1).gather(-1, torch.tensor(ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(sample.logprobs), fresh, rtol=1e-5, atol=1e-5)
    assert calls, "training computes both apart"


def test_low_precision_weights_and_disabled_adapters_are_not_merged() -> None:
    asked = [Turn([{"role": "user", "content": "a"}], 0)]
    rounded = adapted(torch.bfloat16)
    calls = calls_of_adapters(rounded)
    rounded.sample(asked)
    assert calls
    off = adapted()
    calls = calls_of_adapters(off)
    with off.model.disable_adapter():
        found = off.sample(asked)
    words = tiny_tokenizer()
    start = LocalPolicy(tiny_model(vocabulary=len(words)), words, PolicyConfig(model="tiny", max_tokens=12))
    (plain,) = start.sample(asked)
    assert not calls and found[0].completion_ids == plain.completion_ids
    # Torch multiplies by weights that are trained, as those of `start` are, in another kernel than by frozen ones.
    torch.testing.assert_close(torch.tensor(found[0].logprobs), torch.tensor(plain.logprobs), rtol=1e-6, atol=1e-6)


def test_a_failed_call_restores_the_weights() -> None:
    policy = adapted()
    layer = next(module for module in policy.model.modules() if isinstance(module, lora.Linear))
    weight = layer.get_base_layer().weight
    held = weight.data_ptr()

    def fail(*_: Any) -> None:
        assert layer.merged
        raise MemoryError

    policy.model.register_forward_pre_hook(fail)
    with pytest.raises(MemoryError):
        policy.sample([Turn([{"role": "user", "content": "a"}], 0)])
    assert not layer.merged and weight.data_ptr() == held and policy.model.training


# A model that brings Python code of its own: nobody is asked whether to run it, and it is not run.

EVIL = """
from pathlib import Path
from transformers import PretrainedConfig, PreTrainedTokenizerFast

Path({ran!r}).touch()

class EvilConfig(PretrainedConfig):
    model_type = "evil"

class Evil(PreTrainedTokenizerFast):
    pass
"""


def test_remote_code_of_a_model_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither for its settings nor for its tokenizer, by a library that would ask and is told yes."""
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 9))
    model, ran = save_tiny(tmp_path / "model"), tmp_path / "ran"
    (model / "evil.py").write_text(EVIL.format(ran=str(ran)))
    named = {"AutoConfig": "evil.EvilConfig", "AutoModelForCausalLM": "evil.EvilModel"}
    for file, changes in (
        ("config.json", {"model_type": "evil", "auto_map": named}),
        ("tokenizer_config.json", {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": [None, "evil.Evil"]}}),
    ):
        (model / file).write_text(json.dumps(json.loads((model / file).read_text()) | changes))
    config = PolicyConfig(model=str(model))
    for load_it in (lambda: load_model(config, listener=print), lambda: load_tokenizer(config.model, config)):
        with pytest.raises(BadInput, match="code of its own"):
            load_it()
    assert model_shape(config) is None and not ran.exists(), "nor by a dry run"


def test_fp8_weights_are_the_numbers_they_stand_for_and_are_saved_as_such(folder: Path, tmp_path: Path) -> None:
    """As transformers saves them by itself: FP8 again, with config.json saying nothing of it."""
    block, scaled, plain = 8, {}, {}
    for name, weight in load_file(folder / "model.safetensors").items():
        if not name.endswith("proj.weight"):
            scaled[name] = plain[name] = weight
            continue
        rows, columns = (size // block for size in weight.shape)
        blocks = weight.view(rows, block, columns, block)
        scale = blocks.abs().amax((1, 3)) / 448
        numbers = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn)
        scaled |= {name: numbers.view_as(weight), f"{name}_scale_inv": scale}
        plain[name] = (numbers.float() * scale[:, None, :, None]).view_as(weight).contiguous()
    written = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [block, block]}
    shape = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(shape | {"quantization_config": written}))
    save_file(scaled, folder / "model.safetensors", {"format": "pt"})
    model, _ = load_model(PolicyConfig(model=str(folder)), listener=lambda *_: None)
    for name, weight in plain.items():
        assert torch.equal(model.state_dict()[name], weight), name
    model.save_pretrained(tmp_path / "saved")
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert {name: saved[name].tolist() for name in saved} == {name: plain[name].tolist() for name in plain}
    assert "quantization_config" not in json.loads((tmp_path / "saved" / "config.json").read_text())
