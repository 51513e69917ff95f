"""Turns of a conversation as chat templates write them: how answers end, and what comes before the next one."""

import re
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import trl
from needs import needs, where
from support.chat_forms import FORMS, byte_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from composer_stages.errors import BadInput
from composer_stages.messages import (
    PROBED_TOOL,
    Message,
    MessageParts,
    ToolCall,
    answer_ids,
    apart_pinned,
    declares_tools,
    end_id,
    following_ids,
    opening_ids,
    pin_settings,
    thoughts_apart,
    turn_form,
    with_thought,
    write,
)
from composer_stages.policy.base import PolicyConfig
from composer_stages.policy.model_checks import fit_template


def conversation(*texts: str, first: str = "user") -> list[Message]:
    roles = ("user", "assistant") if first == "user" else ("assistant", "user")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]


def whole_text(tokenizer: Any, messages: list[Message], answering: bool = True) -> str:
    text: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=answering)
    return text


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_what_follows_an_answer_is_what_the_template_writes(form: Any) -> None:
    tokenizer = byte_tokenizer(form.template, form.eos, form.others)
    whole = whole_text(tokenizer, conversation("one", "two", "five"))
    new = conversation("five")
    assert whole.endswith(form.following)
    assert tokenizer.decode(following_ids(tokenizer, new)) == form.following
    # The token that was sampled as the end stays, and is not written twice.
    for sampled in form.sampled:
        last = tokenizer.convert_tokens_to_ids(sampled)
        assert tokenizer.decode(following_ids(tokenizer, new, answer="two", last_id=last)) == form.after(sampled)
    answered = whole_text(tokenizer, conversation("one", "two"), False)
    trained, replaced = answer_ids(tokenizer, conversation("one"), "two")
    assert not replaced
    assert tokenizer.decode(opening_ids(tokenizer, conversation("one")) + trained) == form.trained(answered)
    assert end_id(tokenizer) == tokenizer.convert_tokens_to_ids(form.end or form.eos)


# Special tokens of the models that TRL's templates belong to: the tokenizer's end token first.
SPECIAL = {
    "cohere cohere2": "<|END_OF_TURN_TOKEN|>",
    "deepseekv3 deepseek_r1_distill": "<｜end▁of▁sentence｜>",
    "diffusion_gemma": "<eos> <turn|> <|turn>",
    "gemma gemma3": "<eos> <start_of_turn> <end_of_turn>",
    "glm4moe": "<|endoftext|> <|user|> <|assistant|> <|observation|> <|system|>",
    "gptoss": "<|return|> <|start|> <|end|> <|message|> <|channel|> <|call|>",
    "idefics3": "<|im_end|> <end_of_utterance>",
    "llava_next": "</s>",
    "llama3 llama3_1 llama3_2": "<|eot_id|> <|start_header_id|> <|end_header_id|>",
    "phi3 phi3_5": "<|endoftext|> <|end|> <|user|> <|assistant|> <|system|>",
    "lfm2 lfm2_2_5 nemotron_3_nano nemotron_3_super nemotron_3_ultra qwen2_5 qwen2_5_vl qwen3 qwen3_5_nothink "
    "qwen3_5_think qwen3_6 qwen3_instruct_2507 qwen3_vl": "<|im_end|> <|im_start|>",
}
PUBLIC = {name: special.split() for names, special in SPECIAL.items() for name in names.split()}
REWRITING = {  # they write an earlier answer otherwise than they open the next one
    *(
        "deepseekv3",
        "deepseek_r1_distill",
        "glm4moe",
        "gptoss",
        "nemotron_3_nano",
        "nemotron_3_super",
        "nemotron_3_ultra",
    ),
    *("qwen3_5_nothink", "qwen3_5_think", "qwen3_6"),
    *("idefics3", "llava_next"),  # a space
}


def public(name: str) -> Any:
    eos, *others = PUBLIC[name]
    template = (Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja").read_text()
    tokenizer = byte_tokenizer(template, eos, others)
    fit_template(PolicyConfig(model=name), tokenizer)
    pin_settings(tokenizer, {}, PolicyConfig(model=name).template_date)
    return tokenizer


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_a_public_template_is_appended_to(name: str) -> None:
    tokenizer = public(name)
    form = turn_form(tokenizer)
    system: Message = {"role": "system", "content": "Be brief."}
    asked, new = [system, *conversation("one")], conversation("five")
    opening = tokenizer.decode(opening_ids(tokenizer, asked))
    following = tokenizer.decode(following_ids(tokenizer, new, answer="two", last_id=end_id(tokenizer)))
    whole = whole_text(tokenizer, [*asked, *conversation("two", first="assistant"), *new])
    assert whole.endswith(following) and form.rewrites == (name in REWRITING)
    if not form.rewrites:
        assert f"{opening}two{form.closing}{following}" == whole
    # Pairs end as DPOTrainer ends them, but for the line break behind the end token.
    answered = whole_text(tokenizer, [*asked, *conversation("two", first="assistant")], False)
    trained, replaced = answer_ids(tokenizer, asked, "two")
    prompt = opening_ids(tokenizer, asked)
    text = tokenizer.decode(prompt[: len(prompt) - replaced] + trained)
    assert answered.startswith(text) and text.endswith(f"two{form.closing}")
    assert bool(replaced) == name.startswith(("deepseek", "nemotron"))  # whose opening begins a thought


THINKING = [
    *("diffusion_gemma", "glm4moe", "gptoss", "lfm2_2_5", "nemotron_3_nano", "nemotron_3_super", "nemotron_3_ultra"),
    *("qwen3", "qwen3_5_nothink", "qwen3_5_think", "qwen3_6"),
]


@pytest.mark.parametrize("name", THINKING)
def test_a_thought_is_trained_where_the_template_writes_it(name: str) -> None:
    tokenizer, asked, said = public(name), conversation("one"), with_thought("two", "why")
    apart = {"role": "assistant", "content": "two", "reasoning_content": "why"}
    answered = whole_text(tokenizer, [*asked, apart], False)
    prompt, (trained, replaced) = opening_ids(tokenizer, asked), answer_ids(tokenizer, asked, said)
    text = tokenizer.decode(prompt[: len(prompt) - replaced] + trained)
    assert "why" in text and answered.startswith(text) and text.endswith(f"two{turn_form(tokenizer).closing}")
    followed = [*asked, {"role": "assistant", "content": said}, *conversation("five")]
    assert tokenizer.decode(opening_ids(tokenizer, followed)) == whole_text(tokenizer, thoughts_apart(followed))


def test_a_call_behind_words_and_a_thought_is_trained_to_its_own_end() -> None:
    template = (Path(__file__).parents[1] / "support" / "chat_templates" / "gpt-oss.jinja").read_text()
    tokenizer = byte_tokenizer(template, PUBLIC["gptoss"][0], PUBLIC["gptoss"][1:])
    said = write(MessageParts("two", (ToolCall("ls", '{"a": "b"}'),), "why"))
    trained, _ = answer_ids(tokenizer, conversation("one"), said, [PROBED_TOOL])
    assert tokenizer.decode(trained).endswith('to=functions.ls <|constrain|>json<|message|>{"a": "b"}<|call|>')


@pytest.mark.slow
@needs("chat-templates")
def test_the_templates_of_a_collection_are_appended_to() -> None:
    """18 of chujiezheng/chat_templates@11c49562: all follow an answer as in the whole; these trim earlier ones."""
    rewriting = list[str]()
    for path in sorted(Path(where("chat-templates")).glob("*.jinja")):
        template, end = path.read_text(), "</s>"
        special = {*re.findall(r"<\|?[\w/]{1,40}\|?>", template)} - {end}
        tokenizer = byte_tokenizer(template, end, sorted(special))
        fit_template(PolicyConfig(model=path.stem), tokenizer)
        asked, new = conversation("one"), conversation("five")
        opening, form = tokenizer.decode(opening_ids(tokenizer, asked)), turn_form(tokenizer)
        following = tokenizer.decode(following_ids(tokenizer, new, answer="two", last_id=end_id(tokenizer)))
        whole = whole_text(tokenizer, [*asked, *conversation("two", first="assistant"), *new])
        assert whole.endswith(following), path.stem
        rewriting += [path.stem] if f"{opening}two{form.closing}{following}" != whole else []
        assert form.rewrites == (path.stem in rewriting), path.stem
    equal = {path.stem for path in Path(where("chat-templates")).glob("*.jinja")} - {*rewriting}
    assert equal == {"granite-3.0-instruct", "qwen2.5-instruct"}, "the others open answers with another space"


def test_an_answer_that_a_template_changes_stays_as_it_was_said() -> None:
    """As DeepSeek's template drops thoughts, and Llama 3's cuts blanks off."""
    body = "{{ m['role'] }}: {{ m['content'].split('</think>')[-1] | trim }}<end>"
    tokenizer = byte_tokenizer(f"{{% for m in messages %}}{body}{{% endfor %}}{{{{ 'assistant: ' }}}}", "<end>", [])
    said = "<think>\nwhy\n</think>\n\nb"
    assert tokenizer.decode(answer_ids(tokenizer, conversation("a"), said)[0]) == f"{said}<end>"
    assert not turn_form(tokenizer).verbatim


def test_messages_that_a_template_refuses_are_written_in_the_nearest_form() -> None:
    strict = (
        "{% for m in messages %}{% if m['role'] not in ('user', 'assistant') or "
        "(m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('no') }}{% endif %}"
        "<{{ m['role'] }}>{{ m['content'] }}<end>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    tokenizer = byte_tokenizer(strict, "<end>", [])
    results: list[Message] = [{"role": "tool", "content": "a"}, {"role": "tool", "content": "b"}]
    assert tokenizer.decode(following_ids(tokenizer, results)) == "<user>a\n\nb<end><assistant>"
    asked: list[Message] = [{"role": "system", "content": "s"}, *conversation("one", "two"), *results]
    assert fit_template(PolicyConfig(model="m"), tokenizer)
    assert tokenizer.decode(opening_ids(tokenizer, asked)) == (
        "<user>s\n\none<end><assistant>two<end><user>a\n\nb<end><assistant>"
    )


CALLS = (
    "{% if tools %}declared {{ tools[0]['function']['name'] }}<end>{% endif %}"
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}"
    "{% for c in m['tool_calls'] or [] %}CALL{% endfor %}"
    "{% if m['role'] == 'tool' %} of {{ m['tool_call_id'] }}{% endif %}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
FUNCTION = "{{ c['function']['name'] }} {{ c['function']['arguments'] | tojson }}"
ID = "{{ c['id'] }} {{ c['function']['arguments'] | tojson }}"
NINE = "{% if c['id'] | length != 9 %}{{ raise_exception('nine') }}{% endif %}" + FUNCTION
FIRST = "{% if loop.first %}" + FUNCTION + "{% endif %}"
JOINED = "{{ c['function']['name'] + ' ' + c['function']['arguments'] }}"


@pytest.mark.parametrize(
    ("call", "written", "results"),
    [
        (FUNCTION, 'ls {"a": "b"}', "<tool>c of call00000<end><tool>d of call00001<end>"),
        (JOINED, 'ls {"a": "b"}', "<tool>c of call00000<end><tool>d of call00001<end>"),
        (NINE, 'ls {"a": "b"}', "<tool>c of call00000<end><tool>d of call00001<end>"),  # Mistral
        (ID, 'functions.ls:0 {"a": "b"}', "<tool>c of functions.ls:0<end><tool>d of functions.cat:1<end>"),  # Kimi
        (FIRST, 'ls {"a": "b"}', "<tool>c of call00000<end><tool>d of call00001<end>"),  # GPT-OSS
    ],
)
def test_calls_are_written_in_the_form_that_a_template_takes(call: str, written: str, results: str) -> None:
    tokenizer = byte_tokenizer(CALLS.replace("CALL", call), "<end>", [])
    said = write(MessageParts("", (ToolCall("ls", '{"a": "b"}'), ToolCall("cat", "{}"))))
    asked, new = conversation("q", said), [Message(role="tool", content=text) for text in "cd"]
    text = tokenizer.decode(opening_ids(tokenizer, [*asked, *new], [PROBED_TOOL]))
    assert text.startswith("declared probed_tool<end><user>q<end><assistant>") and written in text
    following = tokenizer.decode(following_ids(tokenizer, new, answer=said, tools=[PROBED_TOOL]))
    assert following == f"{results}<assistant>"
    if call == FIRST:  # several calls of history are messages of their own
        following = "<tool>c of call00000<end><assistant>cat {}<end><tool>d of call00001<end><assistant>"
    assert text.endswith(f"<end>{following}")
    # Of an answer nothing is left out: where the template would, it stays as it was said.
    trained = tokenizer.decode(answer_ids(tokenizer, asked[:1], said, [PROBED_TOOL])[0])
    assert "cat" in trained and (trained == f"{said}<end>") == (call == FIRST)


def test_tools_are_not_given_to_a_template_that_fails_on_them() -> None:
    tokenizer = byte_tokenizer(CALLS.replace("declared", "{{ raise_exception('tools') }}"), "<end>", [])
    assert not declares_tools(tokenizer)
    text = tokenizer.decode(opening_ids(tokenizer, conversation("q"), [PROBED_TOOL]))
    assert text == "<user>q<end><assistant>"


def test_results_reach_a_template_that_leaves_their_role_out() -> None:
    silent = (
        "{% for m in messages %}{% if m['role'] in ('user', 'assistant') %}<{{ m['role'] }}>{{ m['content'] }}<end>"
        "{% endif %}{% endfor %}"
    )
    tokenizer = byte_tokenizer(silent, "<end>", [])
    assert tokenizer.decode(following_ids(tokenizer, [{"role": "tool", "content": "a"}])) == "<user>a<end>"
    two = [*conversation("a"), *conversation("b")]
    assert tokenizer.decode(opening_ids(tokenizer, two)) == "<user>a<end><user>b<end>"


def test_content_is_given_in_parts_where_the_template_takes_nothing_else() -> None:
    parts = (
        "{% for m in messages %}<{{ m['role'] }}>{% for part in m['content'] %}{{ part['text'] }}{% endfor %}<end>"
        "{% endfor %}"
    )
    tokenizer = byte_tokenizer(parts, "<end>", [])
    assert not fit_template(PolicyConfig(model="m"), tokenizer)
    assert whole_text(tokenizer, conversation("one", "two")) == "<user>one<end><assistant>two<end>"


def test_a_template_that_fails_behind_an_answer_is_refused_when_it_is_loaded() -> None:
    once = "{% if loop.index0 > 1 %}{{ raise_exception('once') }}{% endif %}"
    fails = f"{{% for m in messages %}}{once}{{{{ m['content'] }}}}{{% endfor %}}"
    with pytest.raises(BadInput) as error:
        fit_template(PolicyConfig(model="m"), byte_tokenizer(fails, "<end>", []))
    assert error.value.code == "policy.template-unusable"


def test_named_templates_become_one_that_chooses_by_tools() -> None:
    usual = "{% for m in messages %}\n  {{ m['content'] }}\n{% endfor %}\n"
    with_tools = "\n  {{ tools | length }} tools{% for m in messages %}{{ m['content'] }}{% endfor %}  \n"
    upstream, tokenizer = (byte_tokenizer({"default": usual, "tool_use": with_tools}, "<end>", []) for _ in range(2))
    fit_template(PolicyConfig(model="m"), tokenizer)
    tool = {"type": "function", "function": {"name": "ls", "parameters": {"type": "object", "properties": {}}}}
    asked: list[Message] = [{"role": "system", "content": "s"}, *conversation("one")]
    for tools in (None, [tool]):
        texts = [one.apply_chat_template(asked, tools=tools, tokenize=False) for one in (tokenizer, upstream)]
        assert texts[0] == texts[1]


@pytest.mark.parametrize(
    "form", ["%d %b %Y", "%Y-%m-%d", "%B %-d", "%A, %e", "%F", "%D %T", "%%d %d%%", "%Q", "%^a %j"]
)
def test_the_date_of_a_template_is_that_of_the_settings(form: str) -> None:
    right = date(2031, 3, 5).strftime(form)
    macro = f"{{%macro today()%}}{{{{ strftime_now({form!r}) }}}}{{%-endmacro %}}"
    template = f"{macro}{{{{ today() }}}} {{{{ messages[0]['content'] }}}}"
    tokenizer = byte_tokenizer(template, "<end>", [])
    config = PolicyConfig.model_validate({"model": "m", "template_date": "2031-03-05"})
    pin_settings(tokenizer, {}, config.template_date)
    assert whole_text(tokenizer, conversation("one")) == f"{right} one"


@pytest.mark.parametrize("name", ["deepseekv3", "deepseek_r1_distill", "qwen3_5_think", "nemotron_3_nano"])
def test_a_thought_that_the_template_opens_begins_once(name: str) -> None:
    """Also where the template leaves the thought out of an answer, which stays as it was said (DeepSeek)."""
    tokenizer, question = public(name), conversation("one")
    ids, replaced = answer_ids(tokenizer, question, "<think>\nbecause\n</think>\n\n4")
    opening = opening_ids(tokenizer, question)
    text = tokenizer.decode(opening[: len(opening) - replaced] + ids)
    assert text.count("<think>") == 1 and "<think>\nbecause\n</think>" in text


def test_settings_that_a_checkpoint_was_saved_with_give_way_to_others() -> None:
    """Those that are not given again hold, the date too."""
    template = "{{ strftime_now('%F') }} {{ tone }} {{ depth }} {{ messages[0]['content'] }}"
    tokenizer = byte_tokenizer(template, "<end>", [])

    def text(settings: dict[str, Any], today: date | None) -> str:
        pin_settings(tokenizer, settings, today)
        return whole_text(tokenizer, conversation("one"))

    assert text({"tone": 'a "b" -%} c', "depth": 1}, date(2031, 3, 5)) == '2031-03-05 a "b" -%} c 1 one'
    saved = tokenizer.chat_template
    assert text({}, None) == '2031-03-05 a "b" -%} c 1 one' and tokenizer.chat_template == saved
    assert text({"depth": 2}, None) == '2031-03-05 a "b" -%} c 2 one'
    assert text({"tone": "d"}, date(2032, 1, 1)) == "2032-01-01 d 2 one"
    assert apart_pinned(tokenizer.chat_template)[1] == template


def test_a_template_keeps_what_it_sets_itself_and_settings_come_before_it() -> None:
    head = "{%- set think = loud|default(true) -%}{%- set today = strftime_now('%Y') -%}"
    tokenizer = byte_tokenizer(head + "{{ think }} {{ today }} {{ messages[0]['content'] }}", "<end>", [])
    assert apart_pinned(tokenizer.chat_template)[0] == {}
    pin_settings(tokenizer, {"loud": False}, None)
    assert whole_text(tokenizer, conversation("one")) == "False 2024 one"


LLAMA = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}[INST] {{ m['content'] }} [/INST]"
    "{% else %} {{ m['content'] }}</s>{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("scheme", ["always", "first", "never"])
def test_a_space_before_the_first_word_is_written_once(scheme: str) -> None:
    core = Tokenizer(models.BPE(unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=scheme)
    core.decoder = decoders.Metaspace(replacement="▁", prepend_scheme=scheme)
    letters = "abcdefghijklmnopqrstuvwxyz[]/INST▁\n"
    special = ["<unk>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=200, special_tokens=special, initial_alphabet=list(letters), show_progress=False
    )
    core.train_from_iterator(["hello there how are you", "list the files now", "[INST] hello [/INST]"] * 50, trainer)
    core.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=scheme, split=False)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token="</s>", unk_token="<unk>", chat_template=LLAMA
    )
    messages = conversation("hello there", "the answer", "list the files")

    def ids(count: int) -> list[int]:
        text = whole_text(tokenizer, messages[:count], False)
        found: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        return found

    opening, answered = opening_ids(tokenizer, messages[:1]), ids(2)
    answer, _ = answer_ids(tokenizer, messages[:1], "the answer")
    assert opening + answer == answered
    assert answered + following_ids(tokenizer, messages[2:]) == ids(3)


def test_a_tokenizer_without_an_end_token_ends_answers_as_its_template() -> None:
    tokenizer = byte_tokenizer(FORMS["the answer ends with eos_token"].template, None, ["<start>", "<end>"])
    assert tokenizer.eos_token_id is None and end_id(tokenizer) == tokenizer.convert_tokens_to_ids("<end>")
    assert tokenizer.decode(answer_ids(tokenizer, conversation("a"), "b")[0]) == "b<end>"


def test_settings_of_a_template_are_texts_of_any_characters() -> None:
    """Jinja reads the halves in which JSON writes a character beyond 16 bits as two."""
    tokenizer = byte_tokenizer("{{ persona }}", "</s>", [])
    text = 'hi \U0001f600 é \u2028 "q" {{ x }} {% y %} \\n \n'
    pin_settings(tokenizer, {"persona": text}, PolicyConfig(model="m").template_date)
    assert tokenizer.apply_chat_template([{"role": "user", "content": ""}], tokenize=False) == text
