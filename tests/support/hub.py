"""A fake of the Hugging Face hub on loopback: creating repositories, preupload, LFS uploads, commits."""

import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote, urlsplit

from support.loopback import Handler, listening

OID = "c" * 40


@dataclass
class Hub:
    """What was asked of it, and what its repositories hold. Only `token` may write; `status` answers everything."""

    token: str
    status: int = 200
    endpoint: str = ""
    asked: list[str] = field(default_factory=list)
    created: list[dict[str, Any]] = field(default_factory=list)
    stored: dict[str, bytes] = field(default_factory=dict)
    """LFS objects by their SHA-256."""
    files: dict[str, bytes] = field(default_factory=dict)

    def answer(self, path: str, data: bytes, authorization: str) -> tuple[int, Any]:
        """Status and body for a POST; the LFS store is asked by PUT."""
        self.asked.append(path)
        if self.status != 200:
            return self.status, {"error": f"no, {authorization}"}
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        if authorization != f"Bearer {self.token}":
            return 401, {"error": f"Invalid credentials: {authorization}"}
        if path == "/api/repos/create":
            asked = json.loads(data)
            known = asked in self.created
            self.created.append(asked)
            prefix = "datasets/" if asked.get("type") == "dataset" else ""
            url = f"{self.endpoint}/{prefix}{asked['organization']}/{asked['name']}"
            return (409 if known else 200), {"url": url}
        if path.endswith("/preupload/main"):
            big = (".parquet", ".safetensors")
            names = [file["path"] for file in json.loads(data)["files"]]
            modes = {name: "lfs" if name.endswith(big) else "regular" for name in names}
            return 200, {"files": [{"path": n, "uploadMode": m, "shouldIgnore": False} for n, m in modes.items()]}
        if path.endswith("/info/lfs/objects/batch"):
            objects = [
                {**one, "actions": {"upload": {"href": f"{self.endpoint}/store/{one['oid']}"}}}
                for one in json.loads(data)["objects"]
            ]
            return 200, {"transfer": "basic", "objects": objects}
        if path.endswith("/commit/main"):
            for line in map(json.loads, data.splitlines()):
                value = line["value"]
                if line["key"] == "file":
                    self.files[value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    self.files[value["path"]] = self.stored[value["oid"]]
            url = f"{self.endpoint}{path.removeprefix('/api').replace('/main', '/' + OID)}"
            return 200, {"success": True, "commitUrl": url, "commitOid": OID, "hookOutput": ""}
        return 404, {"error": f"unknown {path}"}


def taking(state: Hub) -> type[Handler]:
    """What a hub of this state answers to what is sent to it."""

    class Asked(Handler):
        def post(self) -> None:
            path, key = unquote(urlsplit(self.path).path), self.headers.get("Authorization", "")
            self.send(*state.answer(path, self.body(), key))

        def put(self) -> None:
            state.stored[self.path.rpartition("/")[2]] = self.body()
            self.send(200, {})

    return Asked


@contextmanager
def hub(token: str) -> Iterator[Hub]:
    """A running hub."""
    state = Hub(token)
    with listening(taking(state)) as state.endpoint:
        yield state
