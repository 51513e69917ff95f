"""A fake of the Hugging Face hub on loopback: repositories, preupload, LFS uploads and commits; buckets through Xet."""

import base64
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import unquote, urlsplit

from hf_xet import XetFileInfo, XetSession

from support.loopback import Handler, listening

BUCKET, DATASET = "someone/runs", "someone/tables"
FOREVER = 4_000_000_000
"""Seconds since 1970 at which a token for the storage ends."""


@dataclass
class Hub:
    """What was asked of it, and what its repositories hold. Only `token` may write; `status` answers everything."""

    token: str
    status: int = 200
    endpoint: str = ""
    asked: list[str] = field(default_factory=list)
    created: list[dict[str, Any]] = field(default_factory=list)
    existing: set[str] = field(default_factory=set)
    """Names of repositories that were there before."""
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
            self.created.append(asked)
            prefix = "datasets/" if asked.get("type") == "dataset" else ""
            url = f"{self.endpoint}/{prefix}{asked['organization']}/{asked['name']}"
            return (409 if asked["name"] in self.existing else 200), {"url": url}
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


@dataclass
class FileHub(Hub):
    """One bucket and one dataset of those names; `files` are the dataset's, `objects` the bucket's."""

    storage: Path = Path()
    objects: dict[str, bytes] = field(default_factory=dict)
    uploads: int = 0

    def told(self, path: str) -> tuple[int, Any, dict[str, str]]:
        """Status, body and headers for a GET."""
        for at, files in ((f"buckets/{BUCKET}", self.objects), (f"datasets/{DATASET}", self.files)):
            branch = "/main" if files is self.files else ""
            if path in (f"/api/{at}", f"/api/{at}/revision/main"):
                about = {"id": at.partition("/")[2], "private": True, "createdAt": "2026-01-01T00:00:00.000Z"}
                return 200, {**about, "disabled": False, "downloads": 0, "likes": 0, "size": 0, "totalFiles": 0}, {}
            if path.startswith(place := f"/{at}/resolve{branch}/"):
                data = files.get(path.removeprefix(place))
                return (200, data, {}) if data is not None else (404, {}, {"X-Error-Code": "EntryNotFound"})
            if path.startswith(place := f"/api/{at}/tree{branch}"):
                below = path.removeprefix(place).removeprefix("/")
                return 200, [_entry(name, data) for name, data in files.items() if name.startswith(f"{below}/")], {}
        if path == f"/api/buckets/{BUCKET}/xet-write-token":
            self.uploads += 1
            url = f"local://{self.storage}/{self.uploads}"
            return 200, {"casUrl": url, "exp": FOREVER, "accessToken": "any"}, {}
        return 404, {}, {"X-Error-Code": "RepoNotFound"}

    def answer(self, path: str, data: bytes, authorization: str) -> tuple[int, Any]:
        """Status and body for a POST."""
        if path != f"/api/buckets/{BUCKET}/batch":
            return super().answer(path, data, authorization)
        self.asked.append(path)
        failed = []
        for asked in map(json.loads, data.splitlines()):
            if asked["type"] == "addFile":
                self.objects[asked["path"]] = self._uploaded(asked["xetHash"])
            elif self.objects.pop(asked["path"], None) is None:
                failed.append({"path": asked["path"], "error": "File not found"})
        return (422 if failed else 200), {"success": not failed, "failed": failed}

    def _uploaded(self, digest: str) -> bytes:
        """The bytes of a file by the hash that hf_xet gave it, from whichever upload has it, the latest first."""
        for number in range(self.uploads, 0, -1):
            with TemporaryDirectory(dir=self.storage) as folder:
                copied = shutil.copytree(self.storage / str(number), Path(folder) / "copy")  # its writer locks it
                target, told = Path(folder) / "whole", {"token": "any", "token_expiry_unix_secs": FOREVER}
                try:
                    with XetSession().new_file_download_group(endpoint=f"local://{copied}", **told) as group:
                        group.start_download_file(XetFileInfo(digest), str(target))
                except Exception:  # of hf_xet's own; not in this one
                    continue
                return target.read_bytes()
        raise KeyError(digest)


def _entry(name: str, data: bytes) -> dict[str, Any]:
    return {"type": "file", "path": name, "size": len(data), "xetHash": "0" * 64, "oid": "0" * 40}


@contextmanager
def file_hub(token: str, storage: Path) -> Iterator[FileHub]:
    """A running hub that shows and takes files for that token alone; storage: a folder for what hf_xet stores."""
    state = FileHub(token, storage=storage)

    class Asked(taking(state)):  # type: ignore[misc]  # a class that is made for the state
        def get(self) -> None:
            path = unquote(urlsplit(self.path).path)
            if state.status != 200:
                self.send(state.status, {"error": "no"})
            elif self.headers.get("Authorization") != f"Bearer {state.token}":
                self.send(401, {}, {"X-Error-Code": "RepoNotFound"})
            else:
                self.send(*state.told(path))

    with listening(Asked) as state.endpoint:
        yield state


OID = "c" * 40
