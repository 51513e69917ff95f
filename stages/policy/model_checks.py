"""Whether a model can be used: its tensors, their values, its tokenizer and its chat template.

`composer_stages.policy.local` opens models, and what it opens passes here before it is sampled from or trained. What is
wrong is named by one sentence, as `BadInput`.
"""

import copy
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from jinja2 import meta
from tokenizers import Tokenizer
from transformers import AutoConfig, GenerationConfig
from transformers.utils.chat_template_utils import _compile_jinja_template

from composer_stages.data_files import load_text
from composer_stages.errors import BadInput, ComposerError, UsageError
from composer_stages.messages import (
    PROBED_TOOL,
    Message,
    MessageParts,
    ToolCall,
    apart_pinned,
    length_in_common,
    opening_ids,
    read,
    render,
    turn_form,
    write,
)
from composer_stages.policy import base
from composer_stages.policy.base import NotFinite, PolicyConfig
from composer_stages.policy.tool_calls import FORMATS, normalise_calls
from composer_stages.words import Sentence

MOST_CHARACTERS = 100_000
"""Limit of two short messages as rendered by a chat template, in characters; gpt-oss, the longest we know, has 700."""
MOST_LAYERS = 1000
"""Layers that need no comparison with the size of the files; no model we know has more."""
MOST_S = 2.0
"""Limit of the CPU time of that rendering, in seconds; it usually takes milliseconds."""
OF_RENDERING = {"messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token", "pad_token"}
"""Variables that transformers gives to a chat template."""
USER, SYSTEM = "\u2063USER\u2063", "\u2063SYSTEM\u2063"
PARTS = "".join(load_text(__package__, "content_parts.jinja").splitlines())
"""Prefix for a chat template that takes content in parts alone."""
FOLD = "".join(load_text(__package__, "fold_system.jinja").splitlines())
"""Prefix for a chat template without system messages: their text goes before the first user message, as users of vLLM
and TRL do it by hand. It is part of the template, so that a saved tokenizer renders alike elsewhere."""


@contextmanager
def translate_errors(config: PolicyConfig) -> Iterator[None]:
    """Turn what libraries raise for a model that they cannot read into `BadInput`."""
    try:
        yield
    except (ComposerError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # the model's author chooses what is read, and libraries raise plain exceptions for it
        if "trust_remote_code" in str(error):
            raise BadInput("policy.model-with-code", model=config.model) from error
        raise BadInput(
            "policy.model-not-loadable", model=config.model, reason=_in_a_line(error), example=base.EXAMPLE
        ) from error


def _in_a_line(error: Exception) -> str:
    return " ".join((str(error) or repr(error)).split())[:300].rstrip(".")


def read_shape(source: str, config: PolicyConfig, revision: str | None = None) -> Any:
    """Return the configuration of a folder or hub id; `BadInput` if its layers cannot fit into its files.

    Building an empty model with too many layers would take hours.
    """
    with translate_errors(config):
        if (Path(source) / "generation_config.json").is_file():
            GenerationConfig.from_pretrained(source)  # one that cannot be read is taken for none when a model is loaded
        shape: Any = AutoConfig.from_pretrained(source, revision=revision, trust_remote_code=False)
        text, size = shape.get_text_config(), sum(path.stat().st_size for path in Path(source).glob("*.safetensors"))
        layers, width = (getattr(text, name, 0) for name in ("num_hidden_layers", "hidden_size"))
        if size and layers > MOST_LAYERS and layers * width > size:  # a layer has a vector of that width at least
            raise ValueError(Sentence("policy.too-many-layers", layers=layers, size=size))
    return shape


def require_complete(config: PolicyConfig, loading_info: Mapping[str, Any]) -> None:
    """Raise `BadInput` if tensors are missing, unexpected or of another shape; `loading_info`: by transformers."""
    mismatched = [
        f"{name} is {' x '.join(map(str, stored))} instead of {' x '.join(map(str, expected))}"
        for name, stored, expected in sorted(loading_info["mismatched_keys"])
    ]
    faults = (
        ("missing", loading_info["missing_keys"]),
        ("of another shape", mismatched),
        ("unknown", loading_info["unexpected_keys"]),
    )
    clauses = [f"{len(names)} {fault} ({sorted(names)[0]})" for fault, names in faults if names]
    if clauses:
        raise BadInput("policy.tensors-differ", model=config.model, clauses=clauses)


def make_writable(model: Any) -> None:
    """Replace generation settings that transformers reads and refuses to write, which fails at the first checkpoint.

    Of numbers for sampling without `do_sample` (Vicuna 1.5) that is set, as LLaMA-Factory does; else tokens alone stay.
    """
    generation: Any = model.generation_config
    sampling = copy.copy(generation)
    sampling.do_sample = True
    tokens = GenerationConfig(bos_token_id=generation.bos_token_id, eos_token_id=generation.eos_token_id)
    for settings in (generation, sampling, tokens):
        model.generation_config = settings
        with suppress(ValueError):
            settings.validate(strict=True)
            return


def require_finite(config: PolicyConfig, model: Any) -> None:
    """Raise `NotFinite` if a weight is NaN or infinite."""
    if damage := not_finite(model):
        raise NotFinite("policy.weights-not-finite", model=config.model, damage=damage)


def not_finite(model: Any) -> str | None:
    """Return in words where weights are NaN or infinite, None where all are finite; one pass over the weights.

    Of weights that are dealt over processes each looks at its own share.
    """
    for name, weight in model.named_parameters():
        share = weight.detach().to_local() if hasattr(weight, "to_local") else weight.detach()
        # A sum shows both in a tenth of the time of `isfinite`; of large weights it can overflow by itself.
        if share.dtype.itemsize == 1 or share.sum(dtype=torch.float32).isfinite():
            continue
        if number := int((~share.isfinite()).sum()):
            return Sentence("policy.numbers-not-finite", number=number, share=share.numel(), name=name)
    return None


def require_embedded(config: PolicyConfig, tokenizer: Any, model: Any) -> None:
    """Raise `BadInput` if tokens of the tokenizer have no row in the embedding of the model.

    Special tokens that the chat template does not write may have none: those for pictures, in text models of a family
    that has them (Gemma 3, 1B).
    """
    rows, vocabulary = model.get_input_embeddings().weight.shape[0], tokenizer.get_vocab()
    if len(vocabulary) <= len(
        tokenizer.added_tokens_decoder
    ):  # transformers makes an empty one where files are missing
        raise BadInput("policy.empty-tokenizer", model=config.model)
    beyond = {number: token for token, number in vocabulary.items() if number >= rows}
    special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    if beyond.keys() & special:
        roles = ("system", "user", "assistant", "user")
        special -= {*opening_ids(tokenizer, [{"role": role, "content": USER} for role in roles], [PROBED_TOOL])}
    if ordinary := sorted(beyond.keys() - special):
        raise BadInput(
            "policy.tokens-without-embedding",
            model=config.model,
            number=len(ordinary),
            rows=rows,
            token=beyond[ordinary[0]],
            token_id=ordinary[0],
        )


def fit_template(config: PolicyConfig, tokenizer: Any) -> bool:
    """Check the chat template on three conversations; return whether it had no system messages and was given `FOLD`.

    Of templates with names, `tool_use` is for conversations with tools, as transformers has it. `BadInput` where it
    fails on a user message or behind an answer, leaves the user out, or takes too long or too much.
    """
    named = tokenizer.chat_template
    if not isinstance(named, dict):
        named = {"default": named}
    usual, with_tools = named.get("default"), named.get("tool_use")
    if not (usual or with_tools):
        raise BadInput("policy.no-chat-template", model=config.model)
    fitted = _fitted(config, tokenizer, str(usual or with_tools), None if usual else [PROBED_TOOL])
    tokenizer.chat_template = fitted
    if usual and with_tools:
        # The empty texts keep blanks that Jinja cuts off around statements.
        parts = (_fitted(config, tokenizer, with_tools, [PROBED_TOOL]), fitted)
        inner = '{% else %}{{ "" }}'.join(part.removesuffix("\n") + '{{ "" }}' for part in parts)
        tokenizer.chat_template = f'{{% if tools %}}{{{{ "" }}}}{inner}{{% endif %}}'
    return fitted.startswith(FOLD)


TOKENIZER = "tokenizer.json"
PROBE = '```bash\nls -l .\n```\n  return x.py; don\'t: 2023, 1.5e3\t"É" 日本'
"""A text that tokenizers which differ in spaces, digits, signs or scripts cut apart otherwise."""


def cuts_otherwise(source: str, tokenizer: Any, revision: str | None) -> bool:
    """Return whether a loaded tokenizer cuts text into other tokens than the model's own `tokenizer.json` does.

    transformers replaces how some families' files part words, whatever these hold (transformers 5.23,
    `models/qwen2/tokenization_qwen2.py`).
    """
    path: Any = Path(source) / TOKENIZER
    if not Path(source).is_dir():
        path = try_to_load_from_cache(source, TOKENIZER, revision=revision)
    if not (isinstance(path, str | Path) and Path(path).is_file() and getattr(tokenizer, "is_fast", False)):
        return False
    own = Tokenizer.from_file(str(path)).encode(PROBE, add_special_tokens=False).ids
    return bool(own != tokenizer(PROBE, add_special_tokens=False)["input_ids"])


def unread_settings(config: PolicyConfig, tokenizer: Any) -> list[str]:
    """Return the settings that the chat template reads nowhere; `UsageError` where it reads one with a similar name."""
    _, template = apart_pinned(tokenizer.chat_template)
    with translate_errors(config):
        environment = _compile_jinja_template(template).environment
        read_names = meta.find_undeclared_variables(environment.parse(template)) - environment.globals.keys()
    asked = config.chat_template_kwargs.keys()
    others, unread = sorted(read_names - OF_RENDERING - asked), sorted(asked - read_names)
    for name in unread:
        if near := get_close_matches(name, others, 1):
            raise UsageError("policy.template-setting-misspelt", model=config.model, name=name, near=near[0])
    return unread


def require_read_calls(config: PolicyConfig, tokenizer: Any) -> None:
    """Raise `UsageError` if calls as the chat template writes them are not read in the format of `tool_calls`."""
    if config.tool_calls not in FORMATS:
        return
    call = ToolCall(PROBED_TOOL["function"]["name"], '{"a":"b"}')
    question: list[Message] = [{"role": "user", "content": "."}]
    said: Message = {"role": "assistant", "content": write(MessageParts("", (call,)))}
    with translate_errors(config):
        opening, text = render(tokenizer, [(question, True), ([*question, said], False)], [PROBED_TOOL])
    if said["content"] in text:  # in our own form, which is read always
        return
    common = length_in_common(opening, text)
    # A mark may begin as the thought that the template opens, <think> or <tool_call>.
    written = text[max(map(text[:common].rfind, ">]\n")) + 1 :]
    end = turn_form(tokenizer).end
    written = written[: written.rindex(end)] if end and end in written else written
    calls = read(normalise_calls(config.tool_calls, written)).calls
    if [replace(each, arguments="".join(each.arguments.split())) for each in calls] != [call]:
        raise UsageError("policy.calls-not-read", model=config.model, form=config.tool_calls, written=written.strip())


def _fitted(config: PolicyConfig, tokenizer: Any, template: str, tools: list[Any] | None) -> str:
    """Return a template with the prefixes that it needs to render text and system messages."""

    def rendered(template: str, *roles: str) -> str:
        messages = [{"role": role, "content": SYSTEM if role == "system" else USER} for role in roles]
        return _rendered(config, tokenizer, template, messages, tools)

    if USER not in rendered(template, "user"):
        template = PARTS + template
        if USER not in rendered(template, "user"):
            raise _unfit(config, Sentence("policy.template-omits-user"))
    try:
        text = rendered(template, "system", "user")
    except BadInput:
        text = ""
    rendered(template, "user", "assistant", "user")
    return template if SYSTEM in text and USER in text else FOLD + template


def _rendered(
    config: PolicyConfig, tokenizer: Any, source: str, messages: list[dict[str, str]], tools: list[Any] | None
) -> str:
    """Return a conversation as a template renders it, within limits of time and size."""
    pieces, size = list[str](), 0
    try:
        # Piece by piece, which `apply_chat_template` cannot: a text of gigabytes must not be joined to be measured.
        template = _compile_jinja_template(source)
        variables = {"tools": tools, "documents": None, "add_generation_prompt": True, **tokenizer.special_tokens_map}
        with _processor_time(MOST_S):
            for piece in template.generate(messages=messages, **variables):
                pieces.append(piece)
                if (size := size + len(piece)) > MOST_CHARACTERS:
                    break
    except TimeoutError:
        raise _unfit(config, Sentence("policy.template-endless", seconds=MOST_S)) from None
    except Exception as error:  # the template's author chooses what is executed
        raise _unfit(
            config, Sentence("policy.template-fails", error_type=type(error).__name__, error=_in_a_line(error))
        ) from error
    if size > MOST_CHARACTERS:
        raise _unfit(config, Sentence("policy.template-too-long", most=MOST_CHARACTERS))
    return "".join(pieces)


def _unfit(config: PolicyConfig, fault: str) -> BadInput:
    return BadInput("policy.template-unusable", model=config.model, fault=fault)


@contextmanager
def _processor_time(seconds: float) -> Iterator[None]:
    """Raise `TimeoutError` after this CPU time in this thread; compiled code is not interrupted."""
    end, before = time.thread_time() + seconds, sys.gettrace()

    def look(frame: FrameType, event: str, arg: Any) -> Any:
        del frame, event, arg
        if time.thread_time() > end:
            raise TimeoutError
        return look

    sys.settrace(look)
    try:
        yield
    finally:
        sys.settrace(before)
