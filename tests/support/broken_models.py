"""Model folders that are broken, each in one way: `BROKEN` edits a copy of a complete one in place."""

import json
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from support.models import save_tiny

Edit = Callable[[Path], object]
WEIGHTS, CONFIG, TOKENIZER, TEMPLATE = "model.safetensors", "config.json", "tokenizer.json", "chat_template.jinja"
INDEX, QUERY = "model.safetensors.index.json", "model.layers.1.self_attn.q_proj.weight"
PLAIN = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CODE = "from pathlib import Path\nPath('ran').touch()\n"


def written(name: str, content: str | bytes) -> Edit:
    """Return an edit that gives a file this content."""
    data = content if isinstance(content, bytes) else content.encode()
    return lambda folder: (folder / name).write_bytes(data)


def without(name: str) -> Edit:
    """Return an edit that deletes a file."""
    return lambda folder: (folder / name).unlink()


def cut(name: str, share: float = 0.5) -> Edit:
    """Return an edit that keeps only the beginning of a file."""

    def edit(folder: Path) -> None:
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[: int(len(data) * share)])

    return edit


def changed(name: str, /, **values: Any) -> Edit:
    """Return an edit that sets keys of a JSON file; None deletes one."""

    def edit(folder: Path) -> None:
        found = json.loads((folder / name).read_text()) | values
        (folder / name).write_text(json.dumps({key: value for key, value in found.items() if value is not None}))

    return edit


def tensors(edit: Callable[[dict[str, torch.Tensor]], object]) -> Edit:
    """Return an edit of the weights by name."""

    def edited(folder: Path) -> None:
        held = load_file(folder / WEIGHTS)
        edit(held)
        save_file({name: tensor.contiguous() for name, tensor in held.items()}, folder / WEIGHTS, {"format": "pt"})

    return edited


def filled(value: float, index: Any = ...) -> Edit:
    """Return an edit that puts a number into one matrix."""
    return tensors(lambda held: held[QUERY].__setitem__(index, value))


def template(text: str) -> Edit:
    """Return an edit of the chat template."""
    return written(TEMPLATE, text)


def all_of(*edits: Edit) -> Edit:
    """Return these edits, one after the other."""
    return lambda folder: [edit(folder) for edit in edits]


def _pickled(folder: Path) -> None:
    torch.save(load_file(folder / WEIGHTS), folder / "pytorch_model.bin")
    (folder / WEIGHTS).unlink()


def _embedding_of(rows: int) -> Edit:
    """Return an edit to a model of so many tokens, whose tokenizer has more."""

    def edit(held: dict[str, torch.Tensor]) -> None:
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            if name in held:
                held[name] = held[name][:rows]

    return all_of(tensors(edit), changed(CONFIG, vocab_size=rows))


def _with_token(folder: Path, special: bool = False) -> None:
    """Add a token to the tokenizer without a row of the embedding; the template writes a special one."""
    held = json.loads((folder / TOKENIZER).read_text())
    held["added_tokens"].append({**held["added_tokens"][-1], "id": 100_000, "content": "more", "special": special})
    (folder / TOKENIZER).write_text(json.dumps(held))
    if special:
        (folder / TEMPLATE).write_text("more" + (folder / TEMPLATE).read_text())


def _adapter(edit: Callable[[dict[str, torch.Tensor]], object]) -> Edit:
    """Return an edit that makes the folder an adapter on a model beside it, whose tensors are edited."""

    def made(folder: Path) -> None:
        from composer_stages.policy.adapters import WEIGHTS as ADAPTER, describe_base, save_adapter
        from composer_stages.policy.base import PolicyConfig

        base = folder.with_name(f"{folder.name}-base")
        shutil.copytree(folder, base)
        model = AutoModelForCausalLM.from_pretrained(base)
        record = describe_base(PolicyConfig(model=str(base)), model)
        trained = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj", "v_proj"]))
        shutil.rmtree(folder)
        save_adapter(trained, record, folder)
        held = load_file(folder / ADAPTER)
        edit(held)
        save_file({name: tensor.contiguous() for name, tensor in held.items()}, folder / ADAPTER)

    return made


def _a_half(held: dict[str, torch.Tensor]) -> str:
    return next(name for name in sorted(held) if "lora_A" in name)


LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
BROKEN: Mapping[str, Edit] = {
    # files of weights
    "weights cut": cut(WEIGHTS),
    "weights empty": written(WEIGHTS, b""),
    "weights missing": without(WEIGHTS),
    "weights without a header": written(WEIGHTS, b"\xff" * 64),
    "weights zeros": lambda folder: (folder / WEIGHTS).write_bytes(bytes((folder / WEIGHTS).stat().st_size)),
    "weights pickled": _pickled,
    "index names a missing file": all_of(
        written(
            "model.safetensors.index.json", json.dumps({"metadata": {}, "weight_map": {QUERY: "gone.safetensors"}})
        ),
        without(WEIGHTS),
    ),
    "index cut": all_of(written(INDEX, '{"metadata":'), without(WEIGHTS)),
    # tensors
    "tensor missing": tensors(lambda held: held.pop(QUERY)),
    "tensor unexpected": tensors(lambda held: held.update(more=torch.zeros(2))),
    "tensor of another shape": tensors(lambda held: held.update({QUERY: held[QUERY][:-1]})),
    "one weight NaN": filled(float("nan"), (0, 0)),
    "all weights NaN": tensors(lambda held: [tensor.fill_(float("nan")) for tensor in held.values()]),
    "one weight infinite": filled(float("inf"), (-1, -1)),
    "weights that overflow": filled(1e38),
    "embedding too small": _embedding_of(20),
    # config.json
    "config missing": without(CONFIG),
    "config empty": written(CONFIG, ""),
    "config cut": cut(CONFIG),
    "config a list": written(CONFIG, "[]"),
    "config without a type": changed(CONFIG, model_type=None),
    "architecture unknown": changed(CONFIG, model_type="mystery", architectures=["MysteryForCausalLM"]),
    "architecture of no causal model": changed(CONFIG, model_type="vit", architectures=["ViTModel"]),
    "code of its own": all_of(
        changed(CONFIG, model_type="mystery", auto_map={"AutoConfig": "evil.A", "AutoModelForCausalLM": "evil.B"}),
        written("evil.py", CODE),
    ),
    "more layers": changed(CONFIG, num_hidden_layers=3, layer_types=["full_attention"] * 3),
    "fewer layers": changed(CONFIG, num_hidden_layers=1, layer_types=["full_attention"]),
    "layers without weights": changed(CONFIG, num_hidden_layers=20_000, layer_types=None),
    "larger vocabulary": changed(CONFIG, vocab_size=9_999),
    "endless vocabulary": changed(CONFIG, vocab_size=10**12),
    "smaller vocabulary": changed(CONFIG, vocab_size=20),
    "another width": changed(CONFIG, hidden_size=48),
    "no heads": changed(CONFIG, num_attention_heads=0),
    "context in words": changed(CONFIG, max_position_embeddings="long"),
    "unknown type of numbers": changed(CONFIG, dtype="float12"),
    "generation settings cut": written("generation_config.json", '{"eos_token_id":'),
    # the tokenizer
    "tokenizer missing": all_of(without(TOKENIZER), without("tokenizer_config.json")),
    "tokenizer cut": cut(TOKENIZER),
    "tokenizer a list": written(TOKENIZER, "[]"),
    "tokenizer settings cut": cut("tokenizer_config.json"),
    "token beyond the embedding": _with_token,
    "special token beyond the embedding": partial(_with_token, special=True),
    # the chat template
    "template missing": without(TEMPLATE),
    "template empty": template(""),
    "template malformed": template("{% for m in messages %}"),
    "template raises": template("{{ raise_exception('never') }}"),
    "template ignores messages": template("hello"),
    "template fails": template("{{ messages[0].content + 1 }}"),
    "template refuses system": template(
        "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
        "{% endif %}{% endfor %}" + PLAIN
    ),
    "template loops": template(LOOP + PLAIN),
    "template adds a megabyte": template("{{ 'a' * 1000000 }}" + PLAIN),
    "template grows for ever": template("{% for i in range(99999) %}{{ 'a' * 1000000 }}{% endfor %}" + PLAIN),
    # adapters
    "adapter incomplete": _adapter(lambda held: held.pop(_a_half(held))),
    "adapter with more": _adapter(lambda held: held.update(more=torch.zeros(2))),
    "adapter of another shape": _adapter(lambda held: held.update({_a_half(held): torch.zeros(3, 7)})),
    "adapter NaN": _adapter(lambda held: held[_a_half(held)].fill_(float("nan"))),
    "adapter cut": all_of(_adapter(lambda held: None), cut("adapter_model.safetensors")),
}
"""By what is wrong."""


def broken(what: str, folder: Path) -> Path:
    """Make the folder of a model that is broken in this way; returns it."""
    save_tiny(folder, characters=None)
    BROKEN[what](folder)
    return folder
