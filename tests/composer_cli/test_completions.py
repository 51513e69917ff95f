"""The server of `composer serve` without vLLM: it answers as the policy in process, and refuses what it cannot do."""

import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from support.command_line import until
from support.models import save_tiny, tiny_tokenizer
from support.served import NAME, Running, running

from composer_cli.completions import CompletionPages, listening
from composer_cli.loopback import bound
from composer_cli.sampler import Sampler, SamplingQuestion
from composer_stages.errors import InfrastructureError, UsageError
from composer_stages.policy import ask_all, open_policy
from composer_stages.policy.base import PolicyConfig, Sample, Turn
from composer_stages.policy.endpoint import EndpointPolicy
from composer_stages.policy.local import LocalPolicy
from composer_stages.policy.vllm import VllmPolicy
from composer_stages.runs.ledger import Budget
from composer_stages.runs.run import AnswerFolders

MESSAGES = [{"role": "user", "content": "Fix the function add."}]
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
TOKENS = {"return_token_ids": True, "return_tokens_as_token_ids": True}


@pytest.fixture(scope="module")
def policy() -> LocalPolicy:
    return LocalPolicy.open(PolicyConfig(model="kata:student", device="cpu"), listener=lambda *a: None)


@pytest.fixture(scope="module")
def served(policy: LocalPolicy) -> Iterator[Running]:
    with running(policy) as server:
        yield server


@pytest.fixture(scope="module")
def rambling(tmp_path_factory: pytest.TempPathFactory) -> LocalPolicy:
    """A random model: all its tokens are about as likely."""
    folder = save_tiny(tmp_path_factory.mktemp("model"))
    return LocalPolicy.open(PolicyConfig(model=str(folder), device="cpu", max_tokens=12), listener=lambda *a: None)


@pytest.fixture(scope="module")
def random_server(rambling: LocalPolicy) -> Iterator[Running]:
    with running(rambling) as server:
        yield server


def test_equal_seeds_give_the_tokens_and_log_probs_of_the_policy_in_process(
    random_server: Running, rambling: LocalPolicy
) -> None:
    """Asked at once, so that the server batches as it comes; the policy in process draws all in one batch."""

    def ask(seed: int) -> Any:
        return random_server.ask(seed=seed, logprobs=True, extra_body={"return_token_ids": True})

    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(ask, range(64)))
    own = rambling.sample([Turn(MESSAGES, seed) for seed in range(64)])
    first = Counter(sample.completion_ids[0] for sample in own if sample.completion_ids)
    assert len(first) > 4, "it is no greedy sampling"
    assert Counter(answer.choices[0].token_ids[0] for answer in answers) == first
    for answer, sample in zip(answers, own, strict=True):
        [choice] = answer.choices
        assert (answer.prompt_token_ids, choice.token_ids) == (sample.prompt_ids, sample.completion_ids)
        assert [token.logprob for token in choice.logprobs.content] == pytest.approx(sample.logprobs, abs=1e-4)
        assert (choice.message.content, choice.finish_reason) == (sample.text, sample.finish_reason)
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (
            sample.prompt_tokens,
            sample.completion_tokens,
            sample.prompt_tokens + sample.completion_tokens,
        )
    assert {sample.finish_reason for sample in own} == {"stop", "length"}


def test_the_seed_minus_one_is_none(random_server: Running) -> None:
    """As in vLLM (`sampling_params.py`)."""
    assert len({tuple(random_server.ids(seed=-1)) for _ in range(8)}) > 1


def test_bytes_of_a_character_in_several_tokens_are_its_own(tmp_path: Path) -> None:
    """Tokens of one byte each: joined they are the text, and each begins where its character does."""
    folder = save_tiny(tmp_path / "bytes", characters=None)
    pages = CompletionPages(
        Sampler(LocalPolicy.open(PolicyConfig(model=str(folder)), listener=lambda *_: None)), "m", None
    )
    text = "a\u00e9\U0001f389b"
    ids = pages._policy.tokenizer(text, add_special_tokens=False)["input_ids"]
    assert b"".join(map(pages._bytes, ids)) == text.encode() and len(ids) == 8
    assert pages._offsets(ids) == [0, 1, 1, 2, 2, 2, 2, 3]


def test_temperature_0_is_greedy_and_others_are_not_all_one(random_server: Running, rambling: LocalPolicy) -> None:
    greedy = {tuple(random_server.ids(seed=seed, temperature=0)) for seed in range(6)}
    [own] = rambling.sampling_at(0.0, 12).sample([Turn(MESSAGES, 0)])
    assert greedy == {tuple(own.completion_ids or ())}
    cold, hot = ([random_server.ids(seed=s, temperature=t) for s in range(6)] for t in (0.3, 3.0))
    own_cold = rambling.sampling_at(0.3, 12).sample([Turn(MESSAGES, seed) for seed in range(6)])
    assert cold == [sample.completion_ids for sample in own_cold] and cold != hot


def test_without_a_seed_answers_differ(random_server: Running) -> None:
    assert len({random_server.ask().choices[0].message.content for _ in range(6)}) > 1


def test_token_limits_of_requests_and_policy_apply(random_server: Running, rambling: LocalPolicy) -> None:
    whole = random_server.ids(seed=3, max_tokens=40)
    assert random_server.ids(seed=3) == whole[:12], "the policy's own limit where a request has none"
    assert random_server.ids(seed=3, max_completion_tokens=5) == whole[:5]
    most = random_server.ask(seed=3, max_tokens=10**9)
    assert most.usage.total_tokens <= rambling.context, "the context ends an answer too"
    [model] = random_server.client.models.list().data
    assert model.id == NAME and model.max_model_len == rambling.context == 2048
    with pytest.raises(openai.BadRequestError) as refused:
        random_server.ask(messages=[{"role": "user", "content": "abc " * 1000}])
    assert refused.value.code == "context_length_exceeded" and "2,048" in str(refused.value)


def test_an_answer_ends_before_a_stop(random_server: Running) -> None:
    whole = random_server.ask(seed=5, max_tokens=40, logprobs=True).choices[0]
    text = whole.message.content
    stop = text[2:4]
    assert len(stop) == 2
    cut = random_server.ask(seed=5, max_tokens=40, logprobs=True, stop=["never", stop])
    assert cut.choices[0].message.content == text[: text.index(stop)]
    assert cut.choices[0].finish_reason == "stop"
    assert cut.usage.completion_tokens == text.index(stop) + 2, "a token is a character here"
    assert cut.choices[0].logprobs.content == whole.logprobs.content[: cut.usage.completion_tokens]
    assert random_server.ask(seed=5, max_tokens=40, stop="never").choices[0].message.content == text


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"top_p": 0.9}, "top_p"),
        ({"n": 0}, "n"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tools": [TOOL], "tool_choice": "required"}, "tool_choice"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"extra_body": {"stop_token_ids": [5]}}, "stop_token_ids"),
        ({"extra_body": {"top_k": 5}}, "top_k"),
        ({"extra_body": {"mirostat": 2}}, "mirostat"),
        ({"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}, "chat_template_kwargs"),
        ({"temperature": -1}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
        ({"seed": "x"}, "seed"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages"),
    ],
)
def test_unsupported_request_fields_are_refused_by_name(served: Running, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        served.ask(**fields)
    assert refused.value.type == "invalid_request_error" and param in str(refused.value)
    assert str(refused.value.param).split(".")[0] == param


def test_neutral_fields_are_taken(served: Running) -> None:
    fields = {"top_p": 1.0, "n": 1, "stream": False, "presence_penalty": 0.0, "user": "me", "stop": None}
    assert served.ids(seed=1, **fields) == served.ids(seed=1)


def test_another_model_and_other_addresses_are_absent(served: Running) -> None:
    with pytest.raises(openai.NotFoundError, match=NAME):
        served.ask(model="gpt-5")
    assert served.send("GET", "/v1/nothing")[1]["error"]["type"] == "invalid_request_error"
    assert served.send("GET", "/v1/chat/completions")[0] == 405
    assert served.send("GET", "/health") == (200, {"status": "ok"})


def test_pages_of_other_sites_are_refused(served: Running) -> None:
    """A page may send a form without asking, and may have bound its own name to this machine (DNS rebinding)."""
    asked = json.dumps({"model": NAME, "messages": MESSAGES}).encode()
    path, as_json = "/v1/chat/completions", {"Content_Type": "application/json"}
    assert served.send("POST", path, asked, **as_json)[0] == 200
    assert served.send("POST", path, asked, Content_Type="text/plain")[0] == 415
    assert served.send("POST", path, asked, **as_json, Host="evil.example")[0] == 400
    assert served.send("GET", "/v1/models", Host="evil.example")[0] == 400
    assert served.send("OPTIONS", path, Origin="http://evil.example")[0] == 405
    for text in (b"{", b"[1]", b"", b'{"model": NaN}'):
        status, told = served.send("POST", path, text, **as_json)
        assert status == 400 and told["error"]["message"]


def test_conversations_with_calls_are_rendered_as_in_process(served: Running, policy: LocalPolicy) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": "x"}'}}
    sent = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Look."}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "a file"},
    ]
    written = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": '<tool_call>\n{"name": "look", "arguments": {"at": "x"}}\n</tool_call>'},
        {"role": "tool", "content": "a file"},
    ]
    answer = served.ask(messages=sent, tools=[TOOL], seed=1, extra_body={"return_token_ids": True})
    [own] = policy.sample([Turn(written, 1, tools=[TOOL])])
    assert (answer.prompt_token_ids, answer.choices[0].token_ids) == (own.prompt_ids, own.completion_ids)


def test_several_answers_have_the_seeds_that_follow(random_server: Running) -> None:
    answer = random_server.ask(seed=7, n=3, extra_body={"return_token_ids": True})
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert [choice.token_ids for choice in answer.choices] == [random_server.ids(seed=seed) for seed in (7, 8, 9)]
    tokens = sum(len(choice.token_ids) for choice in answer.choices)
    assert answer.usage.completion_tokens == tokens and answer.usage.prompt_tokens == len(answer.prompt_token_ids)
    assert len({choice.message.content for choice in random_server.ask(n=4).choices}) > 1


def test_a_stream_brings_the_same_answer_and_errors_keep_their_status(random_server: Running) -> None:
    whole = random_server.ask(seed=5, n=2, logprobs=True)
    events = list(random_server.ask(seed=5, n=2, logprobs=True, stream=True, stream_options={"include_usage": True}))
    assert events[-1].usage == whole.usage and not events[-1].choices
    parts = [choice for event in events for choice in event.choices]
    for choice in whole.choices:
        said, ended = (part for part in parts if part.index == choice.index)
        assert (said.delta.role, said.delta.content) == ("assistant", choice.message.content)
        assert said.logprobs.model_dump() == choice.logprobs.model_dump()
        assert ended.finish_reason == choice.finish_reason and said.finish_reason is None
    with pytest.raises(openai.BadRequestError) as refused:
        random_server.ask(messages=[{"role": "user", "content": "abc " * 1000}], stream=True)
    assert refused.value.code == "context_length_exceeded"
    text = list(random_server.client.completions.create(model=NAME, prompt="abc", seed=1, stream=True))
    assert "".join(event.choices[0].text for event in text) == random_server.go_on(prompt="abc", seed=1).choices[0].text


@torch.no_grad()
def forward(policy: LocalPolicy, ids: list[int], temperature: float) -> torch.Tensor:
    """Log-probs of all tokens at each place but the first, from one pass of the model."""
    logits = policy.model(input_ids=torch.tensor([ids])).logits[0, :-1]
    return torch.log_softmax(logits / (temperature or 1), -1)


@pytest.mark.parametrize("temperature", [0, 0.6, 1])
def test_log_probs_of_likeliest_and_of_prompt_tokens_are_those_of_a_forward_pass(
    random_server: Running, rambling: LocalPolicy, temperature: float
) -> None:
    prompt = [(7 * place) % 13 + 3 for place in range(600)]  # more than are scored at once
    [choice] = random_server.go_on(
        prompt=prompt, seed=3, temperature=temperature, logprobs=3, extra_body=TOKENS | {"prompt_logprobs": 2}
    ).choices
    ids = [*choice.prompt_token_ids, *choice.token_ids]
    assert ids[: len(prompt)] == prompt
    expected = forward(rambling, ids, temperature)
    best = expected.topk(3)
    assert choice.prompt_logprobs[0] is None and len(choice.prompt_logprobs) == len(prompt)
    for place, entry in enumerate(choice.prompt_logprobs[1:]):
        own, row = entry[str(ids[place + 1])], expected[place]
        assert own["logprob"] == pytest.approx(row[ids[place + 1]].item(), abs=1e-4)
        assert own["rank"] == int((row > row[ids[place + 1]]).sum()) + 1
        assert {int(token) for token in entry} == {*best.indices[place, :2].tolist(), ids[place + 1]}
    for place, (token, logprob, likeliest) in enumerate(
        zip(choice.token_ids, choice.logprobs.token_logprobs, choice.logprobs.top_logprobs, strict=True),
        start=len(prompt) - 1,
    ):
        assert logprob == pytest.approx(expected[place, token].item(), abs=1e-4)
        found = {int(name.removeprefix("token_id:")): value for name, value in likeliest.items()}
        assert found.pop(token) == logprob
        told = dict(zip(best.indices[place].tolist(), best.values[place].tolist(), strict=True))
        told.pop(token, None)
        assert found == pytest.approx(told, abs=1e-4)
    [chat] = random_server.ask(seed=3, temperature=temperature, logprobs=True, top_logprobs=3).choices
    for entry in chat.logprobs.content:
        values = [top.logprob for top in entry.top_logprobs]
        assert len(values) == 3 and values == sorted(values, reverse=True) and entry.bytes is not None


def test_completions_of_token_ids_are_those_of_the_conversation(random_server: Running) -> None:
    chat = random_server.ask(seed=11, extra_body={"return_token_ids": True})
    ids = list(chat.prompt_token_ids)
    answer = random_server.go_on(prompt=[ids, ids[:5]], n=2, seed=11, extra_body=TOKENS)
    assert [len(choice.prompt_token_ids) for choice in answer.choices] == [len(ids)] * 2 + [5] * 2
    assert answer.choices[0].token_ids == chat.choices[0].token_ids
    assert answer.choices[1].token_ids == random_server.ids(seed=12)
    assert answer.usage.prompt_tokens == len(ids) + 5
    text = random_server.go_on(prompt="abc", max_tokens=4, seed=1, extra_body=TOKENS).choices[0]
    assert text.prompt_token_ids == random_server.sampler.policy.tokenizer("abc")["input_ids"]
    for wrong in ([10**6], [-1], [], [[]], ["a", "b"] * 65, "abc " * 10**6):
        with pytest.raises(openai.BadRequestError) as refused:
            random_server.go_on(prompt=wrong)
        assert str(refused.value.param).split(".")[0] == "prompt"


def test_a_policy_by_token_ids_answers_as_the_one_in_process(
    random_server: Running, rambling: LocalPolicy, tmp_path: Path
) -> None:
    """Token by token, with 60 bits of seed, and with the sampled ids of the conversation before."""
    config = PolicyConfig(
        model=f"vllm:{rambling.config.model}", base_url=random_server.url, device="cpu", max_tokens=12
    )
    served = open_policy(config, cache=AnswerFolders(tmp_path, tmp_path), budget=Budget(), listener=lambda *a: None)
    assert isinstance(served, VllmPolicy)
    turns = [Turn(MESSAGES, seed) for seed in (1, 2**31 + 1, 2**59 + 1)]
    answers, own = ask_all(served, turns), rambling.sample(turns)
    for answer, sample in zip(answers, own, strict=True):
        assert (answer.prompt_ids, answer.completion_ids) == (sample.prompt_ids, sample.completion_ids)
        assert answer.logprobs == pytest.approx(sample.logprobs, abs=1e-4) and answer.logprob_kind == "processed"
    held = [*(own[0].prompt_ids or ()), *(own[0].completion_ids or ())]
    going_on = [Turn([*MESSAGES, {"role": "assistant", "content": own[0].text}, *MESSAGES], 3, held_ids=held)]
    assert [one.completion_ids for one in ask_all(served, going_on)] == [
        one.completion_ids for one in rambling.sample(going_on)
    ]
    assert served.likeliest_all([(held[:9], held[9:12])], 4)[0].shape == (3, 8)


def test_a_key_is_asked_of_all_but_the_health_check(policy: LocalPolicy) -> None:
    with running(policy, key="secret") as server:
        for headers in ({}, {"Authorization": "Bearer other"}, {"Authorization": "secret"}):
            for method, path in (("GET", "/v1/models"), ("POST", "/v1/chat/completions"), ("POST", "/v1/completions")):
                status, told = server.send(method, path, **headers)
                assert status == 401 and told["error"]["code"] == "invalid_api_key"
        assert server.send("GET", "/v1/models", Authorization="Bearer secret")[0] == 200
        assert server.send("GET", "/health")[0] == 200


def test_a_policy_with_its_address_answers_as_the_one_in_process(
    random_server: Running, rambling: LocalPolicy, tmp_path: Path
) -> None:
    config = PolicyConfig(model=NAME, base_url=random_server.url)
    endpoint = EndpointPolicy(config, budget=Budget(), cache=AnswerFolders(tmp_path, tmp_path))
    turns = [Turn(MESSAGES, seed) for seed in range(12)]
    answers, own = ask_all(endpoint, turns), rambling.sample(turns)
    assert [(one.text, one.finish_reason, one.completion_tokens) for one in answers] == [
        (one.text, one.finish_reason, one.completion_tokens) for one in own
    ]
    [long] = ask_all(endpoint, [Turn([{"role": "user", "content": "abc " * 1000}], 0)])
    assert long.error_type == "context"


@dataclass
class Scripted:
    """A policy with given answers, in the place of a model: it keeps what it was asked at once."""

    answers: dict[str, str]
    config: PolicyConfig = field(default_factory=lambda: PolicyConfig(model=NAME, tool_calls="qwen3"))
    context: float = float("inf")
    finish: str = "stop"
    batches: list[list[str]] = field(default_factory=list)
    busy: threading.Event = field(default_factory=threading.Event)
    tokenizer: Any = field(default_factory=tiny_tokenizer)

    def __post_init__(self) -> None:
        self.busy.set()
        self.model_facts = self
        self.end_ids = set[int]()

    def sampling_at(self, temperature: float, max_tokens: int | None) -> "Scripted":
        return self

    def render(self, turn: Turn) -> list[int]:
        ids: list[int] = self.tokenizer(turn.messages[-1]["content"])["input_ids"]
        return ids

    def sample_ids(self, prompts: list[list[int]], seeds: list[int]) -> list[Sample]:
        said = [self.tokenizer.decode(prompt) for prompt in prompts]
        self.batches.append(said)
        assert self.busy.wait(30)
        if "fail" in said:
            raise MemoryError("no memory")
        written = [self.answers.get(text, "") for text in said]
        ids = [self.tokenizer(text)["input_ids"] for text in written]
        return [
            Sample(text=text, finish_reason=self.finish, completion_ids=one, prompt_ids=[], logprobs=[-1.0] * len(one))
            for text, one in zip(written, ids, strict=True)
        ]


def told(*texts: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text} for text in texts]


def test_calls_are_told_apart_where_tools_were_declared() -> None:
    written = 'I look.\n<tool_call>\n{"name": "look", "arguments": {"at": "x"}}\n</tool_call>'
    with running(Scripted({"go": written, "say": "Hello."})) as server:
        [choice] = server.ask(messages=told("go"), tools=[TOOL]).choices
        [call] = choice.message.tool_calls
        assert (call.function.name, call.function.arguments) == ("look", '{"at": "x"}')
        assert (choice.message.content, choice.finish_reason) == ("I look.", "tool_calls")
        said, ended = (event.choices[0] for event in server.ask(messages=told("go"), tools=[TOOL], stream=True))
        [told_call] = said.delta.tool_calls
        assert (told_call.index, told_call.function.model_dump()) == (0, call.function.model_dump())
        assert ended.finish_reason == "tool_calls"
        [choice] = server.ask(messages=told("go")).choices
        assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (written, None, "stop")
        [choice] = server.ask(messages=told("say"), tools=[TOOL]).choices
        assert (choice.message.content, choice.message.tool_calls) == ("Hello.", None)


def test_requests_that_wait_are_sampled_at_once_where_their_settings_are_equal() -> None:
    model = Scripted({}, finish="length")
    with running(model) as server, ThreadPoolExecutor(8) as threads:
        model.busy.clear()
        first = threads.submit(server.ask, messages=told("first"))
        until(lambda: model.batches)
        asked = [threads.submit(server.ask, messages=told(text)) for text in ("a", "b")]
        asked += [threads.submit(server.ask, messages=told("c"), temperature=0.5)]
        asked += [threads.submit(server.ask, messages=told("d"), max_tokens=7)]
        until(lambda: server.sampler._arrived.qsize() == 4)
        model.busy.set()
        for one in [first, *asked]:
            assert one.result(30).choices[0].finish_reason == "length"
    # Those without a limit that were cut off in a batch of several are sampled once more, alone.
    assert sorted(map(sorted, model.batches)) == [["a"], ["a", "b"], ["b"], ["c"], ["d"], ["first"]]


def test_a_request_that_was_given_up_is_not_sampled_and_an_error_is_its_own() -> None:
    model = Scripted({"go": "gone"})
    with running(model) as server, ThreadPoolExecutor(8) as threads:
        model.busy.clear()
        first = threads.submit(server.ask, messages=told("go"))
        until(lambda: model.batches)
        with pytest.raises(openai.APITimeoutError):
            server.ask(messages=told("late"), timeout=0.3)
        time.sleep(0.3)  # the server has heard of it
        model.busy.set()
        assert first.result(30).choices[0].message.content == "gone"
        with pytest.raises(openai.InternalServerError, match="no memory") as failed:
            server.ask(messages=told("fail"))
        assert failed.value.response.headers["connection"] == "close", "the next request needs another one"
        assert server.ask(messages=told("go")).choices[0].message.content == "gone"
    assert model.batches == [["go"], ["fail"], ["go"]]


def test_requests_under_way_are_told_that_the_server_ends() -> None:
    model = Scripted({})
    sampler = Sampler(model)  # type: ignore[arg-type]
    with ThreadPoolExecutor(1) as threads:
        with bound(0) as listener, listening(sampler, NAME, listener) as url:
            client = openai.OpenAI(base_url=url, api_key="EMPTY", max_retries=0)
            asked = threads.submit(client.chat.completions.create, model=NAME, messages=MESSAGES)  # type: ignore[arg-type]
            until(lambda: sampler._arrived.qsize() == 1)
        with pytest.raises(openai.InternalServerError, match="ending"):
            asked.result(30)
        client.close()
    late = sampler.ask(SamplingQuestion(Turn(MESSAGES, 1), 1, 1.0, 8))
    assert isinstance(late.exception(0), InfrastructureError), "what comes once all were told would wait for ever"


def test_a_taken_port_is_reported(served: Running) -> None:
    with pytest.raises(UsageError, match="cannot be used"):
        bound(int(served.url.rpartition(":")[2].removesuffix("/v1")))
    with pytest.raises(UsageError, match="65535"):
        bound(70_000)
    with bound(0) as free, pytest.raises(OSError, match="refused"):
        socket.create_connection(free.getsockname())


def test_results_are_in_the_order_of_their_calls_and_a_refusal_is_an_answer() -> None:
    model = Scripted({})
    seen: list[Any] = []
    model.render = lambda turn: seen.append(turn.messages) or [5]  # type: ignore[method-assign,assignment,func-returns-value]
    calls = [
        {"id": place, "type": "function", "function": {"name": "look", "arguments": f'{{"at": "{place}"}}'}}
        for place in ("paris", "rome")
    ]
    results = [{"role": "tool", "tool_call_id": place, "content": f"{place} it is"} for place in ("rome", "paris")]
    refusal = {"role": "assistant", "content": None, "refusal": "I will not."}
    asked = [*told("go"), {"role": "assistant", "content": None, "tool_calls": calls}, *results, refusal, *told("why?")]
    with running(model) as server:
        server.ask(messages=asked)
        with pytest.raises(openai.BadRequestError, match="logprobs: true"):
            server.ask(messages=told("go"), top_logprobs=2)
    contents = [message["content"] for message in seen[0]]
    assert contents[2:] == ["paris it is", "rome it is", "I will not.", "why?"]
