"""The server of `composer serve` in this process, for its own tests and for other programs as its clients."""

import http.client
import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import openai

from composer_cli.completions import listening
from composer_cli.loopback import bound
from composer_cli.sampler import Sampler

NAME = "student"
MESSAGES = [{"role": "user", "content": "Fix the function add."}]


@dataclass
class Running:
    """A server in this process, with openai's client of it."""

    url: str
    sampler: Sampler
    client: openai.OpenAI

    def ask(self, **fields: Any) -> Any:
        return self.client.chat.completions.create(**{"model": NAME, "messages": MESSAGES, **fields})

    def go_on(self, **fields: Any) -> Any:
        return self.client.completions.create(**{"model": NAME, **fields})

    def ids(self, **fields: Any) -> list[int]:
        """The token ids of an answer."""
        answer = self.ask(**fields, extra_body={"return_token_ids": True})
        return list(answer.choices[0].token_ids)

    def send(self, method: str, path: str, body: bytes | None = None, **headers: str) -> tuple[int, dict[str, Any]]:
        """Status and JSON of the answer to a request as it stands."""
        connection = http.client.HTTPConnection(self.url.removeprefix("http://").removesuffix("/v1"), timeout=60)
        connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
        answer = connection.getresponse()
        text = answer.read()
        connection.close()
        return answer.status, json.loads(text) if text.startswith(b"{") else {}


@contextmanager
def running(policy: Any, key: str | None = None) -> Iterator[Running]:
    """Serve a policy until the block ends, as `composer serve` does, but with its model in a thread."""
    sampler, ends = Sampler(policy), threading.Event()

    def sample() -> None:
        while not ends.is_set():
            sampler.sample_next(0.02)

    thread = threading.Thread(target=sample)
    with bound(0) as listener, listening(sampler, NAME, listener, key=key) as url, ExitStack() as at_end:
        thread.start()
        at_end.callback(thread.join)
        at_end.callback(ends.set)
        with openai.OpenAI(base_url=url, api_key="EMPTY", max_retries=0) as client:
            yield Running(url, sampler, client)
