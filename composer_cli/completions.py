"""The HTTP application of `composer serve`: OpenAI's chat completions of a model in this process.

Answers are sampled by the policy that a stage would have of the model: template, draws, end tokens and log-probs are
those of `composer_stages.policy.local`, and equal seeds give equal tokens. A field of a request that would shape an
answer in a way that the policy does not have is refused by its name. `Sampler` holds the requests that wait; the thread
that owns the model calls `sample_next`, while the server answers in a thread of its own.
"""

import asyncio
import secrets
import socket
import threading
import time
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from queue import Empty, SimpleQueue
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

from composer_cli.loopback import HOSTS
from composer_stages.errors import InfrastructureError, refusal
from composer_stages.formats.messages import message
from composer_stages.messages import MessageParts, read, write
from composer_stages.policy.base import Sample, Turn
from composer_stages.policy.local import LocalPolicy
from composer_stages.policy.tool_calls import declare_tools, normalise_calls
from composer_stages.stopping import Interrupted
from composer_stages.words import Sentence

MOST_BYTES = 64 * 2**20
"""Length of a request that is read."""
GRACE_S = 10
"""Seconds in which requests are told that the server ends."""
ENDING = "The server is ending. Ask again once it runs."
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "stream": (False,),
    "top_p": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "top_logprobs": (0,),
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto",),
    "parallel_tool_calls": (True,),
}
"""Fields that are taken with these values alone, which leave an answer as it is."""
WITHOUT_EFFECT = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}
"""Fields that change no answer, whatever they hold."""


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


class ChatMessage(BaseModel):
    """A message of a conversation; fields that are not rendered, such as `name`, may be there."""

    model_config = ConfigDict(extra="allow")
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    tool_calls: list[EarlierCall] | None = None


class ChatRequest(BaseModel):
    """The supported fields of a chat completion request, besides `NEUTRAL` and `WITHOUT_EFFECT`.

    return_token_ids: as vLLM has it, for the token ids of prompt and answer.
    """

    model_config = ConfigDict(strict=True, extra="forbid")
    model: str
    messages: list[ChatMessage] = Field(min_length=1)
    temperature: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    max_tokens: int | None = Field(default=None, gt=0)
    max_completion_tokens: int | None = Field(default=None, gt=0)
    seed: int | None = None
    stop: str | list[str] = []
    tools: list[dict[str, Any]] = []
    logprobs: bool = False
    return_token_ids: bool = False
    chat_template_kwargs: dict[str, Any] = {}

    def stops(self) -> list[str]:
        """Return the texts before which the answer ends."""
        return [stop for stop in ([self.stop] if isinstance(self.stop, str) else self.stop) if stop]


# Requests that wait, and the model.


@dataclass(frozen=True)
class Waiting:
    """A request: its turn, how its answer is sampled, and the answer once it is there."""

    turn: Turn
    temperature: float
    max_tokens: int | None
    answer: Future[Sample] = field(default_factory=Future)


class Sampler:
    """A queue of requests for one model, sampled in one thread; requests with equal settings form a batch.

    An answer depends on its own request alone, up to rounding.
    """

    def __init__(self, policy: LocalPolicy) -> None:
        self.policy = policy
        self._arrived = SimpleQueue[Waiting]()
        self._waiting, self._running = list[Waiting](), list[Waiting]()
        self._closing, self._closed = threading.Lock(), False

    def ask(self, turn: Turn, temperature: float, max_tokens: int | None) -> Future[Sample]:
        """Return a future of the answer, from any thread; cancelling it before it is sampled withdraws the request."""
        request = Waiting(turn, temperature, max_tokens)
        with self._closing:  # none may be put after `close` has answered all: the server would wait for it for ever
            if self._closed:
                request.answer.set_exception(InfrastructureError(ENDING))
            else:
                self._arrived.put(request)
        return request.answer

    def sample_next(self, wait_s: float) -> None:
        """Sample the answer to the request that has waited longest, and with it all with its settings.

        Returns after `wait_s` where none has come. An error of the model is the answer to these requests.
        """
        with suppress(Empty):
            if not self._waiting:
                self._admit(self._arrived.get(timeout=wait_s))
            while True:
                self._admit(self._arrived.get_nowait())
        if not self._waiting:
            return
        settings = self._waiting[0].temperature, self._waiting[0].max_tokens
        batch = [request for request in self._waiting if (request.temperature, request.max_tokens) == settings]
        self._waiting = [request for request in self._waiting if (request.temperature, request.max_tokens) != settings]
        self._running = [request for request in batch if request.answer.set_running_or_notify_cancel()]
        policy = self.policy.sampling_at(*settings)
        try:
            samples = policy.sample([request.turn for request in self._running]) if self._running else []
            for request, sample in zip(self._running, samples, strict=True):
                # Without a limit all of a batch end where its longest prompt leaves no room: the others have more.
                cut_off = settings[1] is None and len(samples) > 1 and sample.finish_reason == "length"
                request.answer.set_result(policy.sample([request.turn])[0] if cut_off else sample)
        except Interrupted:
            raise
        except Exception as error:
            for request in self._running:
                if not request.answer.done():
                    request.answer.set_exception(error)
        self._running = []

    def close(self) -> None:
        """Answer all that wait, are being sampled or come later with the error that the server ends."""
        with self._closing:
            self._closed = True
        with suppress(Empty):
            while True:
                self._waiting.append(self._arrived.get_nowait())
        for request in (*self._running, *self._waiting):
            if not request.answer.done():
                request.answer.set_exception(InfrastructureError(ENDING))

    def _admit(self, request: Waiting) -> None:
        """Add a request to those that wait, unless its conversation cannot be rendered."""
        try:
            room = self.policy.context - self.policy.count_tokens(request.turn)
        except Exception as error:
            if request.answer.set_running_or_notify_cancel():
                request.answer.set_exception(error)
            return
        fits = request.max_tokens is not None and request.max_tokens <= room
        self._waiting.append(request if fits else replace(request, max_tokens=None))


# Requests and answers of the protocol.


class ChatCompletions:
    """The addresses of the server, as methods. name: of the model, which every request has to give."""

    def __init__(self, sampler: Sampler, name: str) -> None:
        self._sampler, self._policy, self._name = sampler, sampler.policy, name

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

    async def complete(self, request: Request) -> Response:
        """Answer a conversation."""
        chat = self._checked(await _body(request))
        turn = Turn(
            [message(chat_message.model_dump(exclude_none=True)) for chat_message in chat.messages],
            secrets.randbits(60) if chat.seed is None else chat.seed,
            tools=chat.tools,
        )
        config, limit = self._policy.config, chat.max_completion_tokens or chat.max_tokens
        temperature = config.temperature if chat.temperature is None else chat.temperature
        answer = asyncio.wrap_future(self._sampler.ask(turn, temperature, limit or config.max_tokens))
        gone = asyncio.ensure_future(request.receive())
        either: set[asyncio.Future[Any]] = {answer, gone}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        gone.cancel()
        if not answer.done():  # who asked has given up, and may have asked again: nobody would read this answer
            answer.cancel()
            return Response(status_code=499)
        try:
            sample = answer.result()
        except TemplateError as error:
            raise RefusedRequest(Sentence("cli.chat-template-refuses", name=self._name, error=error)) from None
        if sample.error_type is not None:
            raise RefusedRequest(f"{sample.error}.", param="messages", code="context_length_exceeded")
        return JSONResponse(self._completion(chat, self._stopped(sample, chat.stops())))

    def _checked(self, body: Any) -> ChatRequest:
        """Validate a request and return it; raise `RefusedRequest` with the field's name for an unsupported one."""
        if not isinstance(body, dict):
            raise RefusedRequest(Sentence("cli.request-not-object"))
        fields = {name: value for name, value in body.items() if value is not None and name not in WITHOUT_EFFECT}
        for name in NEUTRAL.keys() & fields.keys():
            if (value := fields.pop(name)) not in NEUTRAL[name]:
                raise RefusedRequest(
                    Sentence(
                        "cli.field-not-neutral",
                        name=name,
                        value=value,
                        neutral=NEUTRAL[name][0],
                    ),
                    param=name,
                )
        try:
            chat = ChatRequest.model_validate(fields)
        except ValidationError as error:
            problem = error.errors()[0]
            name = ".".join(map(str, problem["loc"]))
            raise RefusedRequest(f"{name}: {refusal(problem)}.", param=name) from None
        if chat.model != self._name:
            text = Sentence("cli.other-model", model=chat.model, name=self._name)
            raise RefusedRequest(text, 404, param="model", code="model_not_found")
        if chat.max_tokens and chat.max_completion_tokens and chat.max_tokens != chat.max_completion_tokens:
            raise RefusedRequest(Sentence("cli.two-token-limits"), param="max_tokens")
        for tool in chat.tools:
            if not declare_tools([tool]):
                text = Sentence("cli.tool-without-name", tool=tool)
                raise RefusedRequest(text, param="tools")
        pinned = self._policy.config.chat_template_kwargs
        if chat.chat_template_kwargs and chat.chat_template_kwargs != pinned:
            raise RefusedRequest(
                Sentence(
                    "cli.chat-template-kwargs-differ",
                    kwargs=chat.chat_template_kwargs,
                    pinned=pinned,
                ),
                param="chat_template_kwargs",
            )
        return chat

    def _stopped(self, sample: Sample, stops: list[str]) -> Sample:
        """Cut an answer before the first stop text; keep the tokens up to the one that completed it."""
        ids, decode = sample.completion_ids or [], self._policy.tokenizer.decode

        def holds(num: int) -> bool:
            text = decode(ids[:num], skip_special_tokens=False)
            return any(stop in text for stop in stops)

        if not holds(len(ids)):
            return sample
        num = bisect_left(range(len(ids)), True, key=holds)
        text = decode(ids[:num], skip_special_tokens=False)
        text = text[: min(text.index(stop) for stop in stops if stop in text)]
        return replace(
            sample,
            text=normalise_calls(self._policy.config.tool_calls, text),
            completion_ids=ids[:num],
            logprobs=(sample.logprobs or [])[:num],
            completion_tokens=num,
            finish_reason="stop",
        )

    def _completion(self, chat: ChatRequest, sample: Sample) -> dict[str, Any]:
        """Return an answer as the protocol has it; calls are told apart from the text where tools were declared."""
        spoken = read(sample.text) if chat.tools else MessageParts(sample.text)
        reply: dict[str, Any] = {"role": "assistant", "content": write(replace(spoken, calls=()))}
        if spoken.calls:
            reply["tool_calls"] = [
                {
                    "id": f"call_{secrets.token_hex(12)}",
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in spoken.calls
            ]
        ids, logprobs = sample.completion_ids or [], sample.logprobs or []
        tokens = [
            {
                "token": self._policy.tokenizer.decode([token], skip_special_tokens=False),
                "logprob": logprob,
                "bytes": None,
                "top_logprobs": [],
            }
            for token, logprob in zip(ids, logprobs, strict=True)
        ]
        ended = "tool_calls" if spoken.calls and sample.finish_reason == "stop" else sample.finish_reason
        return {
            "id": f"chatcmpl-{secrets.token_hex(12)}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": self._name,
            "choices": [
                {
                    "index": 0,
                    "message": reply,
                    "finish_reason": ended,
                    "logprobs": {"content": tokens} if chat.logprobs else None,
                    **({"token_ids": ids} if chat.return_token_ids else {}),
                }
            ],
            "usage": {
                "prompt_tokens": sample.prompt_tokens,
                "completion_tokens": sample.completion_tokens,
                "total_tokens": sample.prompt_tokens + sample.completion_tokens,
            },
            **({"prompt_token_ids": sample.prompt_ids} if chat.return_token_ids else {}),
        }


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
    return JSONResponse({"error": {"message": text, "type": kind, "param": param, "code": code}}, status)


def build(sampler: Sampler, name: str) -> TrustedHostMiddleware:
    """Return the application, which serves the sampler's model under this name."""
    pages = ChatCompletions(sampler, name)
    routes = [
        Route("/v1/chat/completions", pages.complete, methods=["POST"]),
        Route("/v1/models", pages.models),
        Route("/health", pages.health),
    ]
    errors: Mapping[Any, Any] = dict.fromkeys((RefusedRequest, HTTPException, InfrastructureError, Exception), _error)
    app = Starlette(routes=routes, exception_handlers=errors)
    return TrustedHostMiddleware(app, allowed_hosts=HOSTS, www_redirect=False)


@contextmanager
def listening(sampler: Sampler, name: str, listener: socket.socket) -> Iterator[str]:
    """Answer requests in a thread until the block ends; yields the root of the server's addresses."""
    config = uvicorn.Config(
        build(sampler, name),
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
        yield f"http://{listener.getsockname()[0]}:{listener.getsockname()[1]}/v1"
    finally:
        sampler.close()
        server.should_exit = True
        thread.join()
