"""What a user's own script with TRL takes: channels, hints, the probe's alarm, pairs for DPOTrainer."""

import json
import math
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from support.chat_forms import FULL
from support.models import save_tiny, tiny_model, tiny_tokenizer
from support.refusals import refused
from support.torchrun import BROKEN, launch, wait
from transformers import AutoTokenizer
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer

import composer_post_training as composer
from composer_post_training.trl import SIDES, ProbeCallback, _hinted, _token_pair, preference_dataset, with_channels
from composer_stages.backends.ranks import Ranks, join
from composer_stages.policy.base import PolicyConfig
from composer_stages.policy.local import load_tokenizer
from composer_stages.rollouts.trace import pairs_with_states
from composer_stages.runs import store
from composer_stages.runs.run import Run
from composer_stages.training.channels.pairs import tokenise

LETTERS = "abcdef"
ROUNDING = 0.1 * 4 * 20 * torch.finfo(torch.float32).eps
"""Of a margin, which is beta, .1, times a difference of four sums of log-probs, each of which is above -20: 1e-6.
Policy and reference, equal before the first update, are scored in other passes, whose kernels may round otherwise."""


def asked(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def said(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


PAIRS = [{"prompt": asked(x), "chosen": said("ab" + x), "rejected": said("ba")} for x in "ab"]


def letters(completions: list[list[dict[str, str]]], **columns: Any) -> list[float]:
    return [answer[0]["content"].count("a") / 4 for answer in completions]


class Own(GRPOTrainer):
    """A user's subclass, whose loss is its own."""

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        return 2.0 * super()._compute_loss(model, inputs)


def trainer(folder: Path, kind: Any = GRPOTrainer, model: Any = None, steps: int = 2, **more: Any) -> Any:
    """A script of a user, with a tiny model."""
    tokenizer = more.pop("tokenizer", None) or tiny_tokenizer(LETTERS)
    size = {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "num_generations": 4,
        "max_completion_length": 4,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "bf16": False,
        "use_cpu": True,
        "seed": 1,
    }
    named = {name: more.pop(name) for name in list(more) if name in GRPOConfig.__dataclass_fields__}
    return kind(
        model=model or tiny_model(vocabulary=len(tokenizer)),
        processing_class=tokenizer,
        reward_funcs=letters,
        args=GRPOConfig(str(folder), max_steps=steps, **(size | named)),
        train_dataset=Dataset.from_list([{"prompt": asked(x), "word": x} for x in ("a", "b", "ab", "ba")]),
        **more,
    )


def trained(one: Any) -> tuple[list[dict[str, Any]], list[torch.Tensor]]:
    one.train()
    return [row for row in one.state.log_history if "loss" in row], [p.detach().clone() for p in one.model.parameters()]


@pytest.mark.parametrize("kind", [GRPOTrainer, Own])
def test_with_channels_at_weight_0_equals_the_trainer_bit_for_bit(tmp_path: Path, kind: type[GRPOTrainer]) -> None:
    theirs = trained(trainer(tmp_path / "a", kind))
    ours = trained(trainer(tmp_path / "b", with_channels(kind), weights={"dpo": 0.0, "sdpo": 0.0}, pairs=PAIRS))
    assert [row["loss"] for row in ours[0]] == [row["loss"] for row in theirs[0]] and any(r["loss"] for r in ours[0])
    assert all(torch.equal(a, b) for a, b in zip(ours[1], theirs[1], strict=True))
    assert not all(
        torch.equal(a, b)
        for a, b in zip(ours[1], tiny_model(vocabulary=len(tiny_tokenizer(LETTERS))).parameters(), strict=True)
    )


@pytest.mark.parametrize(
    ("prompt", "hinted"),
    [
        ("a", "a\nb"),
        (asked("a"), asked("a\nb")),
        (
            [{"role": "user", "content": [{"type": "text", "text": "a"}]}],
            [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "\nb"}]}],
        ),
    ],
)
def test_a_hint_ends_a_prompt_of_every_form(prompt: Any, hinted: Any) -> None:
    assert _hinted(prompt, "b") == hinted


def test_with_channels_learns_from_pairs_and_hints(tmp_path: Path) -> None:
    shown: list[tuple[str, str]] = []

    async def hints(prompts: Any, completions: Any, word: list[str], trainer_state: Any, **columns: Any) -> Any:
        assert trainer_state.max_steps == 2 and "log_metric" in columns
        shown.extend(zip(word, (prompt[0]["content"] for prompt in prompts), strict=True))
        return [None if text == "a" else "ab" for text in word]

    weights, settings = {"dpo": 0.5, "sft": 1.0, "sdpo": 1.0}, {"pairs": {"per_step": 2}, "hints": {"teacher": "ema"}}
    one = trainer(
        tmp_path,
        with_channels(),
        weights=weights,
        pairs=Dataset.from_list(PAIRS),
        hints=hints,
        settings=settings,
        save_strategy="steps",
        save_steps=1,
        eval_strategy="steps",
        eval_steps=1,
        eval_dataset=Dataset.from_list([{"prompt": asked("a"), "word": "a"}]),
        per_device_eval_batch_size=4,
    )
    rows, _ = trained(one)
    assert rows[0]["dpo/margin"] == pytest.approx(0, abs=ROUNDING)  # the reference is the start
    assert rows[0]["dpo/loss"] == pytest.approx(math.log(2), abs=ROUNDING)
    assert rows[0]["dpo/denominator"] == 2 and rows[1]["sft/loss"] < rows[0]["sft/loss"]
    turns = [sum(word != "a" for word, _ in shown[first : first + 8]) for first in (0, 8)]
    assert [row["sdpo/turns"] for row in rows] == turns and min(turns) > 0 and rows[0]["sdpo/loss"] > 0
    assert all(word == prompt for word, prompt in shown) and len(shown) == 16
    # The teacher follows the student: of each step's weights it takes the share `hints.teacher_rate`, by default .05.
    first, last = (load_file(tmp_path / f"checkpoint-{step}" / "self_teacher.safetensors") for step in (1, 2))
    student = dict(one.model.named_parameters())
    for name, kept in first.items():
        torch.testing.assert_close(last[name], kept.lerp(student[name].detach(), 0.05))
    assert any(not torch.equal(last[name], kept) for name, kept in first.items())
    again = trainer(tmp_path, with_channels(), weights=weights, pairs=PAIRS, hints=hints, settings=settings)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    resumed = [row for row in again.state.log_history if "loss" in row][-1]
    for name in ("dpo/loss", "sdpo/loss"):
        assert resumed[name] == pytest.approx(rows[1][name])


def test_an_optimiser_step_may_be_a_part_of_a_generation(tmp_path: Path) -> None:
    settings = {"pairs": {"per_step": 2}}
    one = trainer(
        tmp_path, with_channels(), weights={"sft": 1.0}, pairs=PAIRS, settings=settings, steps_per_generation=4
    )
    rows, _ = trained(one)
    assert [row["sft/denominator"] for row in rows] == [10, 10]  # of both chosen sides, with end and line break


def play(prompts: list[list[dict[str, str]]], trainer: Any) -> dict[str, Any]:
    """The same completions in any number of processes: by the prompt, and by the place in its group of four."""
    tokenizer = trainer.processing_class
    texts = ["aabab"[i % 4 :] + prompt[0]["content"] for i, prompt in enumerate(prompts)]
    shown = tokenizer.apply_chat_template(prompts, add_generation_prompt=True, return_dict=False)
    ids = [tokenizer(text)["input_ids"] + [tokenizer.eos_token_id] for text in texts]
    return {"prompt_ids": shown, "completion_ids": ids, "logprobs": None}


def by_word(word: list[str], **columns: Any) -> list[str | None]:
    return [None if text == "a" else "ab" for text in word]


def train_as_one_of(folder: Path, count: int) -> None:
    """One of the processes of trainings of eight completions a step; the first writes weights and metrics."""
    for broken in ("", *BROKEN)[: None if count > 1 else 1]:
        here = join(BROKEN.get(broken, Ranks))
        one = trainer(
            folder / str(here.rank),
            with_channels(),
            weights={"dpo": 0.5, "sft": 1.0, "sdpo": 1.0},
            pairs=PAIRS * 2,
            hints=by_word,
            settings={"pairs": {"per_step": 3}, "hints": {"teacher": "ema"}},
            rollout_func=play,
            ranks=here,
            per_device_train_batch_size=4 // count,
            optim="sgd",
            learning_rate=0.05,
        )
        rows, _ = trained(one)
        if here.first:
            weights = {name: weight.detach() for name, weight in one.model.named_parameters()}
            save_file(weights, folder / f"{broken}.safetensors")
            store.write_json(folder / f"{broken}.json", rows)


@pytest.mark.slow
def test_two_processes_take_the_steps_of_one(tmp_path: Path) -> None:
    for count in (1, 2):
        (tmp_path / str(count)).mkdir()
        wait(launch([__file__, str(tmp_path / str(count)), str(count)], count))
    alone = load_file(tmp_path / "1" / ".safetensors")
    apart = {
        broken: max(
            float((weight - alone[name]).abs().max())
            for name, weight in load_file(tmp_path / "2" / f"{broken}.safetensors").items()
        )
        for broken in ("", *BROKEN)
    }
    assert apart.pop("") < 1e-6 and all(much > 1e-5 for much in apart.values()), apart
    for ours, theirs in zip(*(store.read_json(tmp_path / count / ".json") for count in "21"), strict=True):
        names = [name for name in theirs if name.startswith(("dpo/", "sft/", "sdpo/", "reward", "loss"))]
        # Before the first update the policy is its reference: rounding decides on which side of 0 the margins lie.
        names = [name for name in names if name != "dpo/accuracy" or abs(theirs["dpo/loss"] - math.log(2)) > 1e-5]
        assert {name: ours[name] for name in names} == pytest.approx({name: theirs[name] for name in names}, abs=1e-5)


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"weights": {"dpo": 0.1}}, composer.UsageError, "dpo .* Give pairs"),
        ({"weights": {"sdpo": 0.1}}, composer.UsageError, "sdpo .* Give hints"),
        ({"weights": {"taid": 0.1}}, composer.UsageError, "taid .* `composer train`"),
        ({"weights": {"dop": 0.1}}, composer.UsageError, "'dop'.* Did you mean 'dpo'.* grpo, dpo, simpo, sft, sdpo"),
        ({"settings": {"pairs": {"betta": 1}}}, composer.UsageError, r"pairs\.betta.*pairs\.beta"),
        ({"settings": {"optimisation": {"beta": 0.04}}}, composer.UsageError, "'optimisation', which is not read"),
        (
            {"pairs": [{**PAIRS[0], "chosen": [*said("a"), *asked("b")]}], "weights": {"sft": 1}},
            composer.BadInput,
            "Pair 0 has 2 messages as chosen",
        ),
        (
            {"pairs": [{name: PAIRS[0][name] for name in ("prompt", "chosen")}], "weights": {"sft": 1}},
            composer.BadInput,
            "Pair 0 has no 'rejected'",
        ),
        ({"pairs": PAIRS[0], "weights": {"sft": 1}}, composer.BadInput, "pairs is a dict whose rows .* a Dataset"),
        (
            {"pairs": "pairs.parquet", "weights": {"sft": 1}},
            composer.BadInput,
            "pairs is a str whose rows are such as 'p'",
        ),
        *(
            ({"pairs": [{**PAIRS[0], **row}], "weights": {"sft": 1}}, composer.BadInput, words)
            for row, words in (
                ({"chosen": None}, "Pair 0 has no 'chosen'"),
                ({"prompt": "a"}, "as chosen. Give text, .* leave the prompt out"),
                ({"prompt": []}, r"'\[\]' as prompt. Give a list of messages"),
                ({"rejected": [{"from": "gpt", "value": "b"}]}, "as rejected. Give a list of messages with a role"),
                ({"images": ["x.png"]}, "Pair 0 has images"),
                *(
                    ({"chosen": [{"role": "assistant", **odd}]}, "as chosen. Give .* the names of calls")
                    for odd in (
                        {"content": [{"type": "text"}]},
                        {"content": [{"type": "text", "text": None}]},
                        {"content": None, "tool_calls": [{"function": {"arguments": "{}"}}]},
                        {"content": None, "tool_calls": "f"},
                    )
                ),
                ({"tools": '[{"name": "f"'}, "as tools. Give a list of functions"),
                ({"tools": [{"type": "function", "function": {"description": "d"}}]}, "as tools"),
                ({"chat_template_kwargs": "high"}, "as chat_template_kwargs. Give a table"),
            )
        ),
        (
            {"pairs": [{**PAIRS[0], "chosen": said("ba")}], "weights": {"sft": 1}},
            composer.UsageError,
            "None of 1 pair is left",
        ),
        (
            {"pairs": PAIRS, "weights": {"sft": 1}, "steps_per_generation": 3},
            composer.UsageError,
            "steps_per_generation is 3 and gradient_accumulation_steps 2",
        ),
        (
            {"pairs": PAIRS, "weights": {"sft": 1}, "entropy_coef": 0.1, "max_tokens": 99},
            composer.UsageError,
            "entropy_coef acts on the tokens of each pass, into several of which max_tokens cuts",
        ),
    ],
)
def test_unusable_pairs_hints_and_weights_are_refused(
    tmp_path: Path, given: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        trainer(tmp_path, with_channels(), **given)


def test_rows_of_pandas_are_read_and_dropout_that_is_switched_off_is_told(tmp_path: Path) -> None:
    rows = [{**row, **{name: np.array(row[name], dtype=object) for name in ("prompt", *SIDES)}} for row in PAIRS]
    adapter = LoraConfig(r=2, lora_dropout=0.5, target_modules=["q_proj"], task_type="CAUSAL_LM")
    with pytest.warns(UserWarning, match="lora_dropout has no effect"):
        one = trainer(tmp_path, with_channels(), weights={"dpo": 1.0}, pairs=rows, peft_config=adapter)
    plain = trainer(tmp_path, with_channels(), weights={"dpo": 1.0}, pairs=PAIRS)
    assert [pair.tree for pair in one._pairs.pairs] == [pair.tree for pair in plain._pairs.pairs]


def test_text_without_an_end_token_is_refused(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer(LETTERS)
    tokenizer.eos_token = None
    with pytest.raises(composer.BadInput, match="Pair 3 is text, and the tokenizer has no eos_token"):
        _token_pair(tokenizer, 3, {"prompt": "a", "chosen": "b", "rejected": "c"})


@pytest.mark.parametrize("hint", [False, math.nan])
def test_a_hint_that_is_no_text_is_refused(tmp_path: Path, hint: Any) -> None:
    """As `not right and "The answer is 4."` gives one, and a column of pandas; f"{hint}" had been taught."""
    one = trainer(tmp_path, with_channels(), weights={"sdpo": 1.0}, hints=lambda prompts, **columns: [hint] * 8)
    refused(one.train, composer.BadInput, code="python.hint-no-text")


def test_dpo_trainer_takes_the_pairs_of_a_run(tmp_path: Path, made: Path) -> None:
    with pytest.raises(composer.UsageError, match=r"'/nope' is not a run.*find\("):
        preference_dataset("/nope")  # type: ignore[arg-type]
    run = composer.find("extract-pairs", made)
    pairs = preference_dataset(run)
    first = run.pairs()[0]
    assert pairs[0] == {
        "prompt": first["messages"],
        "chosen": said(first["chosen"]),
        "rejected": said(first["rejected"]),
    }
    folder = str(save_tiny(tmp_path / "tiny", characters=None))
    args = DPOConfig(str(tmp_path), max_steps=1, per_device_train_batch_size=2, report_to=[], bf16=False, use_cpu=True)
    dpo = DPOTrainer(folder, args=args, train_dataset=pairs)
    dpo.train()
    assert dpo.state.log_history[-1]["train_loss"] == pytest.approx(0.693, abs=0.01)


def test_pairs_are_capped_by_tokens_and_named(tmp_path: Path) -> None:
    """As `train` and `DPOTrainer` cap them: the prompt alone, both sides when cut, a longer completion."""
    sides = [("aaaaaa", "b"), ("ab", "ab"), ("aaaaac", "aaaaad"), ("a", "b")]
    rows = [{"prompt": asked("a"), "chosen": said(a), "rejected": said(b)} for a, b in sides]
    rows.append(PAIRS[0] | {"prompt": asked("a" * 9)})
    opening = tiny_tokenizer(LETTERS).apply_chat_template(asked("a"), add_generation_prompt=True)["input_ids"]
    settings = {"pairs": {"max_tokens": len(opening) + 4}}
    with pytest.warns(UserWarning, match="5 pairs") as warned:
        one = trainer(tmp_path, with_channels(), weights={"sft": 1.0}, pairs=rows, settings=settings)
    pairs = {pair.pair_id: pair.tree for pair in one._pairs.pairs}
    assert [*pairs] == ["0", "3"] and [len(branch) for branch in pairs["0"].branches] == [4, 3]
    text = next(str(each.message) for each in warned if "5 pairs" in str(each.message))
    numbers = {reason.rpartition(": ")[2].rstrip(".") for reason in text.split("; ")}
    assert numbers == {"0", "1", "2", "4"} and "pairs.max_tokens = " in text, text


LS = {"type": "function", "function": {"name": "ls", "description": "list", "parameters": {"type": "object"}}}


def called(content: Any, folder: str, **more: Any) -> list[dict[str, Any]]:
    call = {"type": "function", "function": {"name": "ls", "arguments": {"dir": folder}}}
    return [{"role": "assistant", "content": content, "tool_calls": [call], **more}]


def parts(text: str) -> list[dict[str, Any]]:
    return [{"role": "assistant", "content": [{"type": "text", "text": text}]}]


RICH = {
    "calls": {"chosen": called(None, "x"), "rejected": called(None, "y")},
    "a call beside words": {"chosen": called(None, "x"), "rejected": said("None")},
    "calls with words and thoughts": {
        "chosen": called("a", "x", reasoning_content="why"),
        "rejected": called("b", "x", reasoning_content="so"),
    },
    "tools": {"chosen": said("a"), "rejected": said("b"), "tools": [LS]},
    "parts": {"chosen": parts("a"), "rejected": parts("b")},
}


def test_pairs_are_tokenised_as_by_dpo_trainer(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "tiny", characters=None)
    (folder / "chat_template.jinja").write_text(FULL)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = [{"prompt": asked("a"), "tools": None, **sides} for sides in RICH.values()]
    args = DPOConfig(str(tmp_path), max_length=None, report_to=[], bf16=False, use_cpu=True)
    dataset = Dataset.from_list(rows, on_mixed_types="use_json")
    theirs = DPOTrainer(str(folder), args=args, train_dataset=dataset).train_dataset
    # Of two sides that begin alike DPOTrainer takes the prompt out, and the row's other columns stay.
    rows[-1] = {"tools": None, **{side: [*asked("a"), *RICH["parts"][side]] for side in SIDES}}
    model = tiny_model(vocabulary=len(tokenizer))
    script = trainer(tmp_path, with_channels(), model, weights={"sft": 1.0}, pairs=rows, tokenizer=tokenizer)
    for pair, row in zip(script._pairs.pairs, theirs, strict=True):
        assert [pair.tree.prompt, *pair.tree.branches] == [row[f"{name}_ids"] for name in ("prompt", *SIDES)]


@pytest.mark.parametrize(
    ("name", "lost"),
    [
        ("calls", "the call of ls"),
        ("a call beside words", "it fails (TypeError: Object of type Undefined is not JSON serializable)"),
        ("calls with words and thoughts", "the call of ls"),
        ("tools", "the tool ls"),
        ("parts", "content in parts"),
    ],
)
def test_a_pair_that_the_template_does_not_write_is_refused(tmp_path: Path, name: str, lost: str) -> None:
    pairs = [PAIRS[0], {"prompt": asked("a"), **RICH[name]}]
    tokenizer = tiny_tokenizer(LETTERS)
    if "fails" in lost:
        tokenizer.chat_template = tokenizer.chat_template.replace("m['content']", "m['content'] | tojson")
    refused(
        lambda: trainer(tmp_path, with_channels(), weights={"sft": 1.0}, pairs=pairs, tokenizer=tokenizer),
        composer.BadInput,
        code="python.pair-not-written",
        number=1,
        side="chosen",
        lost=lost,
    )


OF_TWO_ROLES = """\
{% for m in messages if m.role in ('user', 'assistant') %}{{ (m.content or '').split('</think>')[-1] }}
{%- for call in m.tool_calls or [] %}{{ call.function.name }}{{ call.function.arguments }}{% endfor %}
{%- endfor %}"""


@pytest.mark.parametrize(
    ("prompt", "chosen", "lost"),
    [
        ([{"role": "system", "content": "be brief"}], said("a"), "what the system says"),
        ([*said("b"), {"role": "tool", "content": "f"}], said("a"), "what the tool says"),
        ([], said("<think>why</think>a"), "thoughts"),
        ([], called("a", "x"), "the arguments of ls, as an object"),
        ([], [said("a")[0] | {"function_call": {"name": "pwd", "arguments": "{}"}}], "the call of pwd"),
    ],
)
def test_a_template_of_two_roles_loses_nothing_in_silence(prompt: Any, chosen: Any, lost: str) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = OF_TWO_ROLES
    made = partial(
        _token_pair, tokenizer, 0, {"prompt": [*asked("c"), *prompt], "chosen": chosen, "rejected": said("d")}
    )
    refused(partial(made, tools=None), composer.BadInput, code="python.pair-not-written", side="chosen", lost=lost)


def test_arguments_in_quotes_in_quotes_are_no_arguments() -> None:
    tokenizer, call = tiny_tokenizer(), called("", "x")[0]
    tokenizer.chat_template = OF_TWO_ROLES.replace("arguments }}", "arguments | tojson }}")
    call["tool_calls"][0]["function"]["arguments"] = '{"dir": "x"}'
    row = {"prompt": asked("a"), "chosen": [call], "rejected": said("b")}
    lost = "the arguments of ls, as a text"
    refused(lambda: _token_pair(tokenizer, 0, row, tools=None), composer.BadInput, lost=lost)


def test_pairs_of_imported_rollouts_declare_their_tools(tmp_path: Path) -> None:
    """To `DPOTrainer` and to `composer train` alike, with calls and thoughts."""
    result: dict[str, Any] = {"role": "tool", "content": "f", "tool_call_id": "x"}
    rows = [
        {
            "instance_id": f"t{task}",
            "model": "m",
            "tools": [LS],
            "reward": float(number % 2),
            "messages": [
                *asked(f"task {task}"),
                *called(None, "a", reasoning_content="I look"),
                result,
                *called("see", "ab"[number % 2], reasoning_content=f"thought {number}"),
                result,
                *said(f"done {number}"),
            ],
        }
        for task in range(2)
        for number in range(24)
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    where = {"artifacts": tmp_path / "artifacts", "quiet": True}
    imported = composer.import_traces(tmp_path / "rows.jsonl", **where)
    run = composer.extract_pairs(imported, **where)
    folder = save_tiny(tmp_path / "tiny", characters=None)
    (folder / "chat_template.jinja").write_text(FULL)
    args = DPOConfig(str(tmp_path), max_length=None, report_to=[], bf16=False, use_cpu=True)
    theirs = DPOTrainer(str(folder), args=args, train_dataset=preference_dataset(run)).train_dataset
    tokenizer = load_tokenizer(str(folder), PolicyConfig(model=str(folder)))
    ours, dropped = tokenise(pairs_with_states(run), tokenizer, 4096)
    assert len(ours) == len(theirs) > 0 and not dropped
    for pair, row in zip(ours, theirs, strict=True):
        newline = tokenizer("\n")["input_ids"]  # behind the end token, where no model writes
        assert [pair.tree.prompt, *(side + newline for side in pair.tree.branches)] == [
            row[f"{name}_ids"] for name in ("prompt", *SIDES)
        ]
        text = tokenizer.decode(pair.tree.prompt)
        assert text.startswith("<|im_start|>system\ntools ") and "I look" in text


@pytest.fixture(scope="module")
def direction(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """From answers of b to answers of a, on a tiny model."""
    folder = tmp_path_factory.mktemp("direction")
    save_tiny(folder / "tiny", characters=LETTERS)
    pairs = [
        {"prompt": asked("ab"[i % 2] * (i % 3 + 1)), "hack": said("a" * (i % 4 + 1)), "clean": said("b" * (i % 4 + 1))}
        for i in range(10)
    ]
    (folder / "pairs.json").write_text(json.dumps(pairs))
    return composer.probe.extract_vhack(
        student=str(folder / "tiny"),
        adapter="lora",
        pairs={"source": str(folder / "pairs.json"), "count": 8, "held_out": 2},
        artifacts=folder / "artifacts",
        quiet=True,
    )


def test_the_probe_gives_an_alarm_where_hacks_are_paid(tmp_path: Path, direction: Run) -> None:
    one = trainer(tmp_path, model=tiny_model(vocabulary=len(tiny_tokenizer(LETTERS))), per_device_train_batch_size=8)
    verdict = direction.manifest.outcome
    assert verdict.exit_code, "ten pairs of a tiny model are no direction that passes its checks"
    with pytest.warns(UserWarning, match=f"{direction.path.name}: its own verdict was {verdict.summary['verdict']}"):
        one.add_callback(ProbeCallback(one, direction, every=2, placebos=19, permutations=99))
    first, second = trained(one)[0]
    assert "probe/push" not in first and second["probe/push"] > 1
    assert second["probe/p"] <= 0.05 and second["probe/alarm"] == 1 and 0 < second["probe/hack_like"] < 1


def test_a_direction_of_another_model_is_refused(tmp_path: Path, direction: Run) -> None:
    with pytest.raises(composer.BadInput, match="other weights are trained"):
        ProbeCallback(trainer(tmp_path, model=tiny_model(1, len(tiny_tokenizer(LETTERS)))), direction, placebos=19)


if __name__ == "__main__":
    train_as_one_of(Path(sys.argv[1]), int(sys.argv[2]))
