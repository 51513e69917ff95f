"""The HTTP application of `composer serve`: OpenAI's chat completions, and completions, of a model in this process.

Answers are sampled by the policy that a stage would have of the model: template, draws, end tokens and log-probs are
those of `composer_stages.policy.local`, and equal seeds give equal tokens. A field of a request that would shape an
answer in a way that the policy does not have is refused by its name. `/v1/completions` takes token ids and tells them
and prompt log-probs as vLLM does: policies `vllm:...` and TRL's clients work with it.
"""

import asyncio
import re
import secrets
import socket
import threading
import time
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import orjson
import uvicorn
from jinja2 import TemplateError
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from transformers.convert_slow_tokenizer import bytes_to_unicode

from composer_cli.loopback import HOST, HOSTS, address
from composer_cli.sampler import Likeliest, Sampler, SamplingQuestion, ScoredAnswer
from composer_stages.data_files import load_toml
from composer_stages.errors import InfrastructureError, refusal
from composer_stages.formats.messages import conversation
from composer_stages.messages import MessageParts, least_tokens, read, write
from composer_stages.policy.base import Turn
from composer_stages.policy.tool_calls import declare_tools, normalise_calls
from composer_stages.words import Sentence

MOST_BYTES = 64 * 2**20
"""Length of a request that is read."""
MOST_ANSWERS = 128
"""Answers to one request."""
GRACE_S = 10
"""Seconds in which requests are told that the server ends."""
REPLACED = "\N{REPLACEMENT CHARACTER}"
BYTE = re.compile("<0x([0-9A-F]{2})>")
BYTES = {letter: number for number, letter in bytes_to_unicode().items()}
"""Letters in which vocabularies of bytes are written (GPT-2's `bytes_to_unicode`)."""
MOST_PARTS = 4
"""Tokens of one character at most, which has up to four bytes."""
FIELDS = load_toml(__package__, "completions.toml")
NEUTRAL: dict[str, list[Any]] = FIELDS["neutral"]
WITHOUT_EFFECT: list[str] = FIELDS["without_effect"]


class RefusedRequest(Exception):
    """A request that is answered with an error, as OpenAI's servers write it."""

    def __init__(self, text: str, status: int = 400, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(text)
        self.status, self.param, self.code = status, param, code


class TextPart(BaseModel):
    """A part of a message's content: text alone, which is all that the models here read."""

    type: Literal["text"]
    text: str


class CalledFunction(BaseModel):
    """Name of a called function, and the JSON text of its arguments."""

    name: str
    arguments: str


class EarlierCall(BaseModel):
    """A tool call of an earlier answer."""

    function: CalledFunction
    id: str | None = None


class ChatMessage(BaseModel):
    """A message of a conversation; fields that are not rendered, such as `name`, may be there."""

    model_config = ConfigDict(extra="allow")
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    tool_calls: list[EarlierCall] | None = None


class StreamOptions(BaseModel):
    """Whether a stream ends with an event that has the usage."""

    model_config = ConfigDict(extra="forbid")
    include_usage: bool = False


class SamplingRequest(BaseModel):
    """The fields that both kinds of requests have, besides `NEUTRAL` and `WITHOUT_EFFECT`.

    n: answers, with the seeds `seed`, `seed` + 1, ... return_token_ids: as vLLM has it, for the token ids of prompt and
    answer. stop_token_ids: of the model's own end tokens, which end an answer in any case.
    """

    model_config = ConfigDict(strict=True, extra="forbid")
    model: str
    temperature: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    max_tokens: int | None = Field(default=None, gt=0)
    seed: int | None = None
    n: int = Field(default=1, ge=1, le=MOST_ANSWERS)
    stop: str | list[str] = []
    stop_token_ids: list[int] = []
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    return_token_ids: bool = False

    def stops(self) -> list[str]:
        """Return the texts before which the answer ends."""
        return [stop for stop in ([self.stop] if isinstance(self.stop, str) else self.stop) if stop]


class ChatRequest(SamplingRequest):
    """The fields of a chat completion request."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, gt=0)
    tools: list[dict[str, Any]] = []
    logprobs: bool = False
    top_logprobs: int = Field(default=0, ge=0, le=20)
    chat_template_kwargs: dict[str, Any] = {}


TokenIds = list[int]


class TextRequest(SamplingRequest):
    """The fields of a completion request: a prompt, or several, as text or as token ids."""

    prompt: str | TokenIds | list[str] | list[TokenIds] = Field(min_length=1)
    logprobs: int | None = Field(default=None, ge=0, le=128)
    prompt_logprobs: int | None = Field(default=None, ge=0, le=128)
    return_tokens_as_token_ids: bool = False


@dataclass(frozen=True)
class FinishedAnswer:
    """An answer before its stop text. raw: as the model wrote it; text: with its calls as `messages.write` has them."""

    raw: str
    text: str
    ids: list[int]
    logprobs: list[float]
    finish_reason: str
    prompt_ids: list[int]
    likeliest: list[Likeliest] = field(default_factory=list)
    prompt_likeliest: list[Likeliest] = field(default_factory=list)


class CompletionPages:
    """The addresses of the server, as methods. name: of the model, which every request has to give."""

    def __init__(self, sampler: Sampler, name: str, key: str | None) -> None:
        self._sampler, self._policy, self._name, self._key = sampler, sampler.policy, name, key

    def routes(self) -> list[Route]:
        """Return the addresses; all but /health need the key, if there is one."""
        return [
            Route("/v1/chat/completions", self._guarded(self.chat), methods=["POST"]),
            Route("/v1/completions", self._guarded(self.text), methods=["POST"]),
            Route("/v1/models", self._guarded(self.models)),
            Route("/health", self.health),
        ]

    def _guarded(self, page: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        async def checked(request: Request) -> Response:
            sent = request.headers.get("authorization", "").encode()
            if self._key is not None and not secrets.compare_digest(sent, f"Bearer {self._key}".encode()):
                raise RefusedRequest(Sentence("cli.request-without-key"), 401, code="invalid_api_key")
            return await page(request)

        return checked

    async def models(self, request: Request) -> Response:
        """List the one model, and its context where it states one."""
        del request
        context = self._policy.context
        stated = {} if context == float("inf") else {"max_model_len": int(context)}
        model = {"id": self._name, "object": "model", "created": 0, "owned_by": "composer", **stated}
        return JSONResponse({"object": "list", "data": [model]})

    async def health(self, request: Request) -> Response:
        """Report that the server answers."""
        del request
        return JSONResponse({"status": "ok"})

    async def chat(self, request: Request) -> Response:
        """Answer a conversation."""
        chat = self._checked(ChatRequest, await _body(request))
        if chat.max_tokens and chat.max_completion_tokens and chat.max_tokens != chat.max_completion_tokens:
            raise RefusedRequest(Sentence("cli.two-token-limits"), param="max_tokens")
        for tool in chat.tools:
            if not declare_tools([tool]):
                raise RefusedRequest(Sentence("cli.tool-without-name", tool=tool), param="tools")
        pinned = self._policy.config.chat_template_kwargs
        if chat.chat_template_kwargs and chat.chat_template_kwargs != pinned:
            text = Sentence("cli.chat-template-kwargs-differ", kwargs=chat.chat_template_kwargs, pinned=pinned)
            raise RefusedRequest(text, param="chat_template_kwargs")
        if chat.top_logprobs and not chat.logprobs:
            raise RefusedRequest(Sentence("cli.top-without-logprobs"), param="top_logprobs")
        messages = conversation(chat_message.model_dump(exclude_none=True) for chat_message in chat.messages)
        questions = self._questions(
            chat,
            [Turn(messages, 0, tools=chat.tools)],
            max_tokens=chat.max_completion_tokens or chat.max_tokens,
            likeliest=chat.top_logprobs if chat.logprobs and chat.top_logprobs else None,
        )
        choices = await self._answered(request, chat, questions)
        if choices is None:
            return Response(status_code=499)
        written = [self._chat_choice(chat, index, choice) for index, choice in enumerate(choices)]
        about = {"prompt_token_ids": choices[0].prompt_ids} if chat.return_token_ids else {}
        return self._response("chatcmpl", "chat.completion", chat, choices, written, about)

    async def text(self, request: Request) -> Response:
        """Go on with a prompt, or with several."""
        parameters = self._checked(TextRequest, await _body(request))
        is_single = isinstance(parameters.prompt, str) or isinstance(parameters.prompt[0], int)
        prompts = [self._token_ids(prompt) for prompt in ([parameters.prompt] if is_single else parameters.prompt)]
        vocabulary = self._policy.model.get_input_embeddings().num_embeddings
        if wrong := [token for ids in prompts for token in ids if not 0 <= token < vocabulary]:
            raise RefusedRequest(Sentence("cli.no-such-token", token=wrong[0], vocabulary=vocabulary), param="prompt")
        if not all(prompts) or len(prompts) * parameters.n > MOST_ANSWERS:
            raise RefusedRequest(Sentence("cli.prompts-none-or-many", most=MOST_ANSWERS), param="prompt")
        questions = self._questions(
            parameters,
            prompts,
            max_tokens=parameters.max_tokens,
            likeliest=parameters.logprobs or None,
            prompt_likeliest=parameters.prompt_logprobs,
        )
        choices = await self._answered(request, parameters, questions)
        if choices is None:
            return Response(status_code=499)
        written = [self._text_choice(parameters, index, choice) for index, choice in enumerate(choices)]
        return self._response("cmpl", "text_completion", parameters, choices, written, {})

    def _token_ids(self, prompt: Any) -> list[int]:
        tokenizer, most = self._policy.tokenizer, self._policy.context
        if isinstance(prompt, list):
            return prompt
        if len(prompt) > most and (least := least_tokens(tokenizer, prompt)) > most:  # before it takes gigabytes
            text = Sentence("policy.prompt-beyond-context", number=f"at least {least:,} tokens", context=most)
            raise RefusedRequest(f"{text}.", param="prompt", code="context_length_exceeded")
        ids: list[int] = tokenizer(prompt)["input_ids"]
        return ids

    def _checked(self, kind: type[Any], body: Any) -> Any:
        """Validate a request and return it; raise `RefusedRequest` with the field's name for an unsupported one."""
        if not isinstance(body, dict):
            raise RefusedRequest(Sentence("cli.request-not-object"))
        fields = {name: value for name, value in body.items() if value is not None and name not in WITHOUT_EFFECT}
        if fields.get("tool_choice") == "none" and not fields.get("tools"):
            del fields["tool_choice"]
        for name in NEUTRAL.keys() & fields.keys():
            if (value := fields.pop(name)) not in NEUTRAL[name]:
                text = Sentence("cli.field-not-neutral", name=name, value=value, neutral=NEUTRAL[name][0])
                raise RefusedRequest(text, param=name)
        try:
            parameters = kind.model_validate(fields)
        except ValidationError as error:
            problem = error.errors()[0]
            name = ".".join(map(str, problem["loc"]))
            raise RefusedRequest(f"{name}: {refusal(problem)}.", param=name) from None
        if parameters.model != self._name:
            text = Sentence("cli.other-model", model=parameters.model, name=self._name)
            raise RefusedRequest(text, 404, param="model", code="model_not_found")
        if others := set(parameters.stop_token_ids) - self._policy.model_facts.end_ids:
            text = Sentence(
                "cli.other-stop-tokens", others=sorted(others), ends=sorted(self._policy.model_facts.end_ids)
            )
            raise RefusedRequest(text, param="stop_token_ids")
        return parameters

    def _questions(
        self, parameters: SamplingRequest, prompts: Sequence[Turn | list[int]], *, max_tokens: int | None, **fields: Any
    ) -> list[SamplingQuestion]:
        """Return the questions of a request, the answers to one prompt one after the other."""
        config = self._policy.config
        temperature = config.temperature if parameters.temperature is None else parameters.temperature
        return [
            SamplingQuestion(
                prompt,
                # -1 as in vLLM: none.
                secrets.randbits(60) if parameters.seed in (None, -1) else parameters.seed + index,
                temperature,
                max_tokens or config.max_tokens,
                **fields,
            )
            for prompt in prompts
            for index in range(parameters.n)
        ]

    async def _answered(
        self, request: Request, parameters: SamplingRequest, questions: Sequence[SamplingQuestion]
    ) -> list[FinishedAnswer] | None:
        """Return an answer to each question; None where who asked has given up: nobody would read them."""
        answers = asyncio.gather(*(asyncio.wrap_future(self._sampler.ask(question)) for question in questions))
        gone = asyncio.ensure_future(request.receive())
        either: set[asyncio.Future[Any]] = {answers, gone}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        gone.cancel()
        if not answers.done():
            answers.cancel()
            return None
        try:
            answered = answers.result()
        except TemplateError as error:
            raise RefusedRequest(Sentence("cli.chat-template-refuses", name=self._name, error=error)) from None
        for answer in answered:
            if answer.sample.error_type is not None:
                param = "messages" if isinstance(parameters, ChatRequest) else "prompt"
                raise RefusedRequest(f"{answer.sample.error}.", param=param, code="context_length_exceeded")
        return [self._choice(answer, parameters.stops()) for answer in answered]

    def _choice(self, answer: ScoredAnswer, stops: list[str]) -> FinishedAnswer:
        """Cut an answer before the first stop text; keep the tokens up to the one that completed it."""
        sample, ends, decode = answer.sample, self._policy.model_facts.end_ids, self._decode
        ids, finish_reason = sample.completion_ids or [], sample.finish_reason

        def holds(num: int) -> bool:
            text = decode(ids[:num])
            return any(stop in text for stop in stops)

        raw = decode(ids[:-1] if ids and ids[-1] in ends else ids)
        text = sample.text
        if holds(len(ids)):
            ids, finish_reason = ids[: bisect_left(range(len(ids)), True, key=holds)], "stop"
            raw = decode(ids)
            raw = raw[: min(raw.index(stop) for stop in stops if stop in raw)]
            text = normalise_calls(self._policy.config.tool_calls, raw)
        return FinishedAnswer(
            raw,
            text,
            ids,
            (sample.logprobs or [])[: len(ids)],
            finish_reason,
            sample.prompt_ids or [],
            answer.likeliest[: len(ids)],
            answer.prompt_likeliest,
        )

    def _bytes(self, token: int) -> bytes:
        """Return the bytes of a token, which may be a part of a character."""
        text = self._decode([token])
        if REPLACED not in text:
            return text.encode()
        word = str(self._policy.tokenizer.convert_ids_to_tokens(token))
        if fallback := BYTE.fullmatch(word):
            return bytes([int(fallback[1], 16)])
        return bytes(BYTES[letter] for letter in word) if BYTES.keys() >= {*word} else text.encode()

    def _offsets(self, ids: Sequence[int]) -> list[int]:
        """Return where in the text each token begins; of a character in several tokens, where it begins."""
        offsets, length, pending = list[int](), 0, list[int]()
        for token in ids:
            offsets.append(length)
            pending.append(token)
            if not (text := self._decode(pending)).endswith(REPLACED) or len(pending) == MOST_PARTS:
                length, pending = length + len(text), []
        return offsets

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self._policy.tokenizer.decode(list(ids), skip_special_tokens=False))

    def _chat_choice(self, chat: ChatRequest, index: int, choice: FinishedAnswer) -> dict[str, Any]:
        """Return an answer as the protocol has it; calls are told apart from the text where tools were declared."""
        spoken = read(choice.text) if chat.tools else MessageParts(choice.text)
        reply: dict[str, Any] = {
            "role": "assistant",
            "content": write(MessageParts(spoken.content, (), spoken.reasoning)),
        }
        if spoken.calls:
            reply["tool_calls"] = [
                {
                    "id": f"call_{secrets.token_hex(12)}",
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in spoken.calls
            ]
        return {
            "index": index,
            "message": reply,
            "finish_reason": "tool_calls" if spoken.calls and choice.finish_reason == "stop" else choice.finish_reason,
            "logprobs": {"content": self._chat_logprobs(chat, choice)} if chat.logprobs else None,
            **({"token_ids": choice.ids} if chat.return_token_ids else {}),
        }

    def _chat_logprobs(self, chat: ChatRequest, choice: FinishedAnswer) -> list[dict[str, Any]]:
        def entry(token: int, logprob: float) -> dict[str, Any]:
            return {"token": self._decode([token]), "logprob": logprob, "bytes": list(self._bytes(token))}

        rows = choice.likeliest or [{} for _ in choice.ids]
        return [
            {
                **entry(token, logprob),
                "top_logprobs": [entry(top, value) for top, (value, rank) in row.items() if rank <= chat.top_logprobs],
            }
            for token, logprob, row in zip(choice.ids, choice.logprobs, rows, strict=True)
        ]

    def _text_choice(self, parameters: TextRequest, index: int, choice: FinishedAnswer) -> dict[str, Any]:
        """Return a completion as vLLM writes it."""

        def name(token: int) -> str:
            return f"token_id:{token}" if parameters.return_tokens_as_token_ids else self._decode([token])

        logprobs = None
        if parameters.logprobs is not None:
            rows = choice.likeliest or [{} for _ in choice.ids]
            logprobs = {
                "tokens": [name(token) for token in choice.ids],
                "token_logprobs": choice.logprobs,
                "top_logprobs": [
                    {name(token): logprob} | {name(word): top for word, (top, _) in row.items() if word != token}
                    for token, logprob, row in zip(choice.ids, choice.logprobs, rows, strict=True)
                ],
                "text_offset": self._offsets(choice.ids),
            }
        written = {"index": index, "text": choice.raw, "finish_reason": choice.finish_reason, "logprobs": logprobs}
        if parameters.return_token_ids:
            written |= {"token_ids": choice.ids, "prompt_token_ids": choice.prompt_ids}
        if parameters.prompt_logprobs is not None:
            entries = [
                {
                    str(token): {"logprob": logprob, "rank": rank, "decoded_token": self._decode([token])}
                    for token, (logprob, rank) in row.items()
                }
                for row in choice.prompt_likeliest
            ]
            written["prompt_logprobs"] = [None, *entries]
        return written

    def _response(
        self,
        prefix: str,
        kind: str,
        parameters: SamplingRequest,
        choices: Sequence[FinishedAnswer],
        written: list[dict[str, Any]],
        about: dict[str, Any],
    ) -> Response:
        """Return the answers in one body, or as the events of a stream."""
        prompt_tokens = sum(len(choice.prompt_ids) for choice in choices[:: parameters.n])
        completion_tokens = sum(len(choice.ids) for choice in choices)
        usage = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        }
        chat = kind == "chat.completion"
        body = {
            "id": f"{prefix}-{secrets.token_hex(12)}",
            "object": f"{kind}.chunk" if chat and parameters.stream else kind,
            "created": int(time.time()),
            "model": self._name,
        }
        if not parameters.stream:
            return JSONResponse({**body, "choices": written, "usage": usage, **about})
        events = [
            {**body, "choices": [part], **about}
            for choice in written
            for part in (_parts(choice) if chat else [choice])
        ]
        events += [{**body, "choices": [], "usage": usage}] if parameters.stream_options.include_usage else []
        lines = [f"data: {orjson.dumps(event).decode()}\n\n" for event in events]
        return Response("".join([*lines, "data: [DONE]\n\n"]), media_type="text/event-stream")


def _parts(choice: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a chat's answer as a stream has it: the message, then why it ended."""
    message = dict(choice["message"])
    if "tool_calls" in message:
        message["tool_calls"] = [{"index": index, **call} for index, call in enumerate(message["tool_calls"])]
    rest = {name: value for name, value in choice.items() if name not in ("message", "finish_reason")}
    yield {**rest, "delta": message, "finish_reason": None}
    yield {"index": choice["index"], "delta": {}, "finish_reason": choice["finish_reason"], "logprobs": None}


async def _body(request: Request) -> Any:
    """Return the JSON of a request."""
    # A page of another site can send this type only after asking, and is never allowed to.
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise RefusedRequest(Sentence("cli.request-content-type"), 415)
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MOST_BYTES:
            raise RefusedRequest(Sentence("cli.request-too-long", most_mib=MOST_BYTES // 2**20), 413)
    try:
        return orjson.loads(body)
    except ValueError as error:
        raise RefusedRequest(Sentence("cli.request-not-json", error=error)) from None


def _error(request: Request, error: Exception) -> Response:
    """Return an error as the protocol has it."""
    del request
    status = 503 if isinstance(error, InfrastructureError) else 500
    text, param, code = str(error) or type(error).__name__, None, None
    if isinstance(error, HTTPException):
        status, text = error.status_code, error.detail
    if isinstance(error, RefusedRequest):
        status, param, code = error.status, error.param, error.code
    kind = "invalid_request_error" if status < 500 else "server_error"
    # uvicorn closes the connection after what nobody expected; the next request on it would be lost.
    headers = {"connection": "close"} if status == 500 else None
    return JSONResponse({"error": {"message": text, "type": kind, "param": param, "code": code}}, status, headers)


def build(sampler: Sampler, name: str, key: str | None, host: str) -> Any:
    """Return the application, which serves the sampler's model under this name."""
    errors: Mapping[Any, Any] = dict.fromkeys((RefusedRequest, HTTPException, InfrastructureError, Exception), _error)
    app = Starlette(routes=CompletionPages(sampler, name, key).routes(), exception_handlers=errors)
    return TrustedHostMiddleware(app, allowed_hosts=HOSTS if host in HOSTS else ["*"], www_redirect=False)


@contextmanager
def listening(
    sampler: Sampler, name: str, listener: socket.socket, *, key: str | None = None, host: str = HOST
) -> Iterator[str]:
    """Answer requests in a thread until the block ends; yields the root of the server's addresses.

    key: that requests have to carry; another host than this machine needs one.
    """
    config = uvicorn.Config(
        build(sampler, name, key, host),
        log_level="warning",
        access_log=False,
        server_header=False,
        lifespan="off",
        timeout_graceful_shutdown=GRACE_S,
    )
    server = uvicorn.Server(config)
    listener.listen(128)
    thread = threading.Thread(target=server.run, args=([listener],), name="completions")
    thread.start()
    try:
        yield f"{address(listener)}/v1"
    finally:
        sampler.close()
        server.should_exit = True
        thread.join()
