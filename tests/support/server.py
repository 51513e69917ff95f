"""A real HTTP server on loopback that speaks /v1/chat/completions and misbehaves on request."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from composer_stages.policy.requests import QUESTION
from composer_stages.runs.run import AnswerFolders
from support.loopback import Handler, listening


def kept_in(folder: Path) -> AnswerFolders:
    """Where a policy keeps answers: below the folder, those of its own run in `own`."""
    return AnswerFolders(folder, folder / "own")


@dataclass
class Reply:
    """What to send: a status, a body (a dict becomes JSON), headers, and how long to wait before."""

    status: int = 200
    body: Any = None
    headers: dict[str, str] = field(default_factory=dict)
    delay_s: float = 0.0


def answer(text: str, prompt_tokens: int = 10, completion_tokens: int = 5, **more: Any) -> dict[str, Any]:
    """A well-formed completion."""
    return {
        "id": "c",
        "object": "chat.completion",
        "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}],
        "usage": {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens, **more},
    }


FIELDS = {"model", "messages", "temperature", "max_tokens", "max_completion_tokens", "seed", "tools", "logprobs"}
ASSISTANT = {"role", "content", "tool_calls"}


def fault(body: dict[str, Any]) -> str | None:
    """What a server that takes nothing beyond the protocol finds wrong with a request; None where it is right."""
    if unknown := body.keys() - FIELDS:
        return f"unknown fields {sorted(unknown)}"
    for tool in body.get("tools", []):
        if set(tool) != {"type", "function"} or set(tool["function"]) - {"name", "description", "parameters"}:
            return f"not a tool: {tool}"
    waiting: list[str] = []
    for message in body["messages"]:
        role = message["role"]
        if role == "tool":
            if set(message) != {"role", "tool_call_id", "content"} or message["tool_call_id"] not in waiting:
                return "a tool's message answers no call before it"
            waiting.remove(message["tool_call_id"])
            continue
        if waiting:
            return f"calls without a result: {waiting}"
        if role not in ("system", "user", "assistant") or set(message) - ASSISTANT:
            return f"unknown role or field: {role}, {sorted(message)}"
        calls = message.get("tool_calls") or []
        if calls and (role != "assistant" or not body.get("tools")):
            return "calls where there are no tools"
        if not calls and not isinstance(message["content"], str):
            return "no content"
        for call in calls:
            is_object = isinstance(json.loads(call["function"]["arguments"]), dict)
            if set(call) != {"id", "type", "function"} or not is_object:
                return f"not a call: {call}"
        waiting = [call["id"] for call in calls]
    return f"calls without a result: {waiting}" if waiting else None


def strict(reply: Callable[[dict[str, Any], int], "Reply"]) -> Callable[[dict[str, Any], int], "Reply"]:
    """The same replies, but 400 for whatever is not the protocol to the letter."""

    def checked(body: dict[str, Any], earlier: int) -> Reply:
        wrong = fault(body)
        return reply(body, earlier) if wrong is None else Reply(400, {"error": {"message": wrong}})

    return checked


@dataclass
class Server:
    """Base URL, the body of every request that came in, and the key that each was sent with.

    Probing calls are answered apart and listed in `probes`.
    """

    url: str
    requests: list[dict[str, Any]] = field(default_factory=list)
    probes: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)


@contextmanager
def serving(
    reply: Callable[[dict[str, Any], int], Reply],
    listing: Reply | None = None,
    probed: Callable[[dict[str, Any], int], Reply] = lambda body, earlier: Reply(body=answer("OK", 10, 1)),
) -> Iterator[Server]:
    """Serve until the block ends; `reply` gets the request's body and how many requests came before it.

    listing: what a GET, which asks for the list of models, is answered with; 404 without. `probed` is `reply` for the
    calls by which a server is probed.
    """
    lock = threading.Lock()
    server = Server("")

    class Asked(Handler):
        def post(self) -> None:
            body = json.loads(self.body())
            with lock:
                came = server.probes if body["messages"] == QUESTION else server.requests
                number = len(came)
                came.append(body)
                server.keys.append(self.headers.get("Authorization"))
            self._reply((probed if came is server.probes else reply)(body, number))

        def get(self) -> None:
            self._reply(listing or Reply(404, {"error": {"message": "no such page"}}))

        def _reply(self, sent: Reply) -> None:
            time.sleep(sent.delay_s)
            self.send(sent.status, sent.body, sent.headers)

    with listening(Asked) as url:
        server.url = f"{url}/v1"
        yield server
