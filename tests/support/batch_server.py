"""A server with OpenAI's files and batches API on loopback, whose batches end when they are told to."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email import message_from_bytes
from typing import Any

from stages.policy.requests import QUESTION
from support.loopback import Handler, listening
from support.server import Reply, answer


@dataclass
class BatchServer:
    """What was uploaded and made, by id, and every request that was asked singly (probing calls aside).

    A batch ends once it has been looked at `looks` times; `looks = 10**9` never ends.
    """

    reply: Callable[[dict[str, Any], int], Reply | None]
    url: str = ""
    looks: int = 1
    status: str = "completed"
    lose_next_creation: bool = False
    files: dict[str, bytes] = field(default_factory=dict)
    batches: dict[str, dict[str, Any]] = field(default_factory=dict)
    looked: dict[str, int] = field(default_factory=dict)
    singles: list[dict[str, Any]] = field(default_factory=list)

    def upload(self, content: bytes) -> dict[str, Any]:
        """POST /files."""
        name = f"file-{len(self.files)}"
        self.files[name] = content
        return {
            "id": name,
            "object": "file",
            "bytes": len(content),
            "created_at": 0,
            "filename": "requests.jsonl",
            "purpose": "batch",
            "status": "processed",
        }

    def create(self, body: dict[str, Any]) -> dict[str, Any]:
        """POST /batches."""
        assert body["endpoint"] == "/v1/chat/completions" and body["completion_window"] == "24h"
        name = f"batch-{len(self.batches)}"
        keep = {k: body[k] for k in ("endpoint", "completion_window", "input_file_id", "metadata")}
        self.batches[name] = {"id": name, "object": "batch", "created_at": 0, "status": "in_progress", **keep}
        return self.batches[name]

    def look(self, name: str) -> dict[str, Any]:
        """GET /batches/ID."""
        self.looked[name] = self.looked.get(name, 0) + 1
        batch = self.batches[name]
        if self.looked[name] >= self.looks and batch["status"] == "in_progress":
            self._end(batch)
        return batch

    def requests(self, name: str) -> list[dict[str, Any]]:
        """The lines of a batch's file."""
        return [json.loads(line) for line in self.files[self.batches[name]["input_file_id"]].splitlines()]

    def _end(self, batch: dict[str, Any]) -> None:
        batch["status"] = self.status
        if self.status == "failed":
            batch["errors"] = {"object": "list", "data": [{"code": "invalid", "message": "line 1 is no request"}]}
            return
        good, bad = [], []
        for number, line in enumerate(self.requests(batch["id"])):
            assert line["method"] == "POST" and line["url"] == batch["endpoint"]
            said = self.reply(line["body"], number)
            told = {"id": f"r{number}", "custom_id": line["custom_id"], "error": None, "response": None}
            if said is None:
                bad.append({**told, "error": {"code": "batch_expired", "message": "not executed in time"}})
            else:
                response = {"status_code": said.status, "request_id": "r", "body": said.body}
                (good if said.status == 200 else bad).append({**told, "response": response})
        for key, lines in (("output_file_id", good), ("error_file_id", bad)):
            if lines:
                batch[key] = self.upload("\n".join(map(json.dumps, reversed(lines))).encode())["id"]


@contextmanager
def serving_batches(server: BatchServer) -> Iterator[BatchServer]:
    """Serve until the block ends."""
    lock = threading.Lock()

    class Asked(Handler):
        def post(self) -> None:
            raw = self.body()
            with lock:
                if self.path == "/v1/files":
                    kind = f"Content-Type: {self.headers['Content-Type']}\r\n\r\n".encode()
                    parts = {
                        p.get_param("name", header="content-disposition"): p
                        for p in message_from_bytes(kind + raw).get_payload()
                    }
                    assert parts["purpose"].get_payload() == "batch"
                    self.send(200, server.upload(parts["file"].get_payload(decode=True)))
                elif self.path == "/v1/batches":
                    made = server.create(json.loads(raw))
                    if server.lose_next_creation:
                        server.lose_next_creation = False
                        self.close_connection = True
                        return
                    self.send(200, made)
                else:
                    body = json.loads(raw)
                    if body["messages"] != QUESTION:
                        server.singles.append(body)
                    self.send(200, answer("OK", 10, 1))

        def get(self) -> None:
            with lock:
                path = self.path.partition("?")[0].removeprefix("/v1/").split("/")
                if path == ["batches"]:
                    self.send(200, {"object": "list", "data": list(server.batches.values())[::-1], "has_more": False})
                elif path[0] == "batches":
                    self.send(200, server.look(path[1]))
                else:
                    self.send(200, server.files[path[1]])

    with listening(Asked) as url:
        server.url = f"{url}/v1"
        yield server
