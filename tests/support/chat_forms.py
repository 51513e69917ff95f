"""Chat templates that end their answers in different ways, and a tokenizer whose ids decode to the very text."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

OWN_END = (
    "{% for m in messages %}<start>{{ m['role'] }}\n{{ m['content'] }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<start>assistant\n{% endif %}"
)

# Writes all that a message may hold.
FULL = (
    "{% if tools %}<|im_start|>system\ntools{% for t in tools %} {{ t | tojson }}{% endfor %}<|im_end|>{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m.get('reasoning_content') %}<think>\n{{ m['reasoning_content'] }}\n</think>\n\n{% endif %}"
    "{% if m['content'] is string %}{{ m['content'] }}"
    "{% else %}{% for part in m['content'] or [] %}{{ part['text'] }}{% endfor %}{% endif %}"
    "{% for c in m.get('tool_calls') or [] %}<call>{{ c['function']['name'] }} "
    "{{ c['function']['arguments'] | tojson }}</call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class ChatForm:
    """A template; `following` is what it writes behind an answer, `end` the token that ends the last one.

    `sampled`: tokens that a model may have ended its answer with; `repeated` is what follows the mark of the next role.
    """

    template: str
    eos: str
    others: tuple[str, ...]
    following: str
    end: str = ""
    sampled: tuple[str, ...] = ()
    repeated: str | None = None

    def after(self, sampled: str) -> str:
        """Return what follows an answer that this token ended."""
        starts = self.repeated is not None and self.following.startswith(sampled)
        return self.following.removeprefix(sampled) if starts else self.following

    def trained(self, answered: str) -> str:
        """Return the text of a conversation that is trained on: up to the end token."""
        return answered[: answered.rindex(self.end) + len(self.end)] if self.end else answered


FORMS = {
    "the answer ends with eos_token": ChatForm(
        OWN_END, "<end>", ("<start>",), "\n<start>user\nfive<end>\n<start>assistant\n", "<end>", ("<end>",)
    ),
    "a token of its own ends a turn": ChatForm(
        OWN_END,
        "<eos>",
        ("<start>", "<end>"),
        "\n<start>user\nfive<end>\n<start>assistant\n",
        "<end>",
        ("<end>", "<eos>"),
    ),
    "a space before eos_token": ChatForm(
        "{% for m in messages %}{% if m['role'] == 'user' %}<s>[Q] {{ m['content'] }} [/Q]"
        "{% else %} {{ m['content'] }} </s>{% endif %}{% endfor %}",
        "</s>",
        ("<s>",),
        "<s>[Q] five [/Q]",
        "</s>",
        ("</s>",),
    ),
    "the mark of the next role ends a turn": ChatForm(
        "{% for m in messages %}<{{ m['role'] }}>\n{{ m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>\n{% endif %}",
        "<eos>",
        ("<user>", "<assistant>"),
        "<user>\nfive<assistant>\n",
        "",
        ("<user>", "<eos>"),
        repeated="<user>",
    ),
    "earlier answers end with another token": ChatForm(
        "{% for m in messages %}<start>{{ m['role'] }}\n{{ m['content'] }}"
        "{% if loop.last and m['role'] == 'assistant' %}<return>{% else %}<end>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<start>assistant\n{% endif %}",
        "<return>",
        ("<start>", "<end>"),
        "<start>user\nfive<end><start>assistant\n",
        "<return>",
        ("<return>",),
    ),
    "two tokens end the last answer": ChatForm(
        "{% for m in messages %}<start>{{ m['role'] }}\n{{ m['content'] }}<end>\n{% endfor %}"
        "{% if add_generation_prompt %}<start>assistant\n{% else %}{{ eos_token }}{% endif %}",
        "<eos>",
        ("<start>", "<end>"),
        "\n<start>user\nfive<end>\n<start>assistant\n",
        "<end>",
        ("<end>", "<eos>"),
    ),
    "a part of the answer ends with a token of its own": ChatForm(
        "{% for m in messages %}<start>{{ m['role'] }}\n{{ m['content'] }}"
        "{% if m['role'] == 'assistant' %}<part>{% endif %}<end>{% endfor %}{{ '<start>assistant\n' }}",
        "<end>",
        ("<start>", "<part>"),
        "<start>user\nfive<end><start>assistant\n",
        "<end>",
        ("<end>",),
    ),
    "the last answer alone ends with eos_token": ChatForm(
        "{% for m in messages %}<{{ m['role'] }}>\n{{ m['content'] }}"
        "{% if loop.last and m['role'] == 'assistant' %}<eos>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>\n{% endif %}",
        "<eos>",
        ("<user>", "<assistant>"),
        "<user>\nfive<assistant>\n",
        "<eos>",
        ("<eos>",),
    ),
    "no token ends a turn": ChatForm(
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}",
        "<eos>",
        (),
        "\nuser: five\nassistant:",
        "",
        ("<eos>",),
    ),
}


def byte_tokenizer(template: Any, eos: str | None, others: Iterable[str]) -> Any:
    """Return a tokenizer with a token for each byte and for each special token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token=eos, bos_token="<BOS>", pad_token="<pad>", chat_template=template
    )
    tokenizer.add_special_tokens({"additional_special_tokens": list(others)})
    return tokenizer
