"""A fake of the hub's files on loopback: a bucket and a dataset, listed, read, written and deleted.

Uploads into a bucket are stored and put together again by hf_xet itself, which takes a folder here for its storage.
"""

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

from support.hub import Hub, taking
from support.loopback import listening

BUCKET, DATASET = "someone/runs", "someone/tables"
FOREVER = 4_000_000_000
"""Seconds since 1970 at which a token for the storage ends."""


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
