"""Runs on the Hugging Face hub: in a bucket (`hf://buckets/OWNER/NAME/RUN`) or a dataset (`hf://datasets/OWNER/NAME/RUN`).

A bucket takes runs that go on. A dataset is a repository whose every write is a commit, so it takes finished runs only,
one commit each. Neither can write a file only where there is none, append, or rename: nothing here needs that, but
replicas do, and are refused (`bucket.open_bucket`).

The token is HF_TOKEN's, else that of `hf auth login`; HF_ENDPOINT names another hub. Through `HfFileSystem` and `HfApi`
of huggingface_hub 2.4.
"""

import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from stages.errors import UsageError
from stages.redaction import redacted, secret_in
from stages.runs.bucket import PART_BYTES, failed
from stages.runs.store import sealing

SCHEME = "hf"
ADDRESS = re.compile(r"hf://(buckets|datasets)/([\w.-]+/[\w.-]+)((?:/[^/@]+)*)")


class HubDataset:
    """Files below a folder of a dataset repository."""

    def __init__(self, url: str, kind: str, repository: str, folder: str) -> None:
        """folder: below the repository, empty for the repository itself. `UsageError` where that cannot be opened."""
        from huggingface_hub import HfApi, HfFileSystem
        from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]

        disable_progress_bars()
        endpoint, token = os.environ.get("HF_ENDPOINT") or None, secret_in("HF_TOKEN") or None
        self._api = HfApi(endpoint=endpoint, token=token, library_name="composer")
        self._files = HfFileSystem(endpoint=endpoint, token=token, skip_instance_cache=True)
        self.url, self._repository, self._folder = url, repository, f"{folder}/" if folder else ""
        self._root = f"{kind}/{repository}"
        self.sent = self.received = 0
        with self._failing("opening it"):
            try:
                self._files.resolve_path(self._root)
            except FileNotFoundError:
                raise UsageError(
                    f"{url} cannot be opened: there is no {self._root} that this token may see. Create it with "
                    "`hf repo create` or `hf buckets create`, or set HF_TOKEN."
                ) from None

    def read(self, key: str) -> bytes | None:
        """A file's bytes; None where there is none."""
        from huggingface_hub.errors import EntryNotFoundError

        with self._failing(f"reading {key}"):
            try:
                with self._files.open(self._place(key), "rb", block_size=0) as file:
                    data: bytes = file.read()
            except EntryNotFoundError:
                return None
        self.received += len(data)
        return data

    def fetch(self, key: str, path: Path) -> None:
        """Write a file of the hub into one here, a part at a time; its folder is made."""
        with self._failing(f"reading {key}"), sealing(path) as file:
            with self._files.open(self._place(key), "rb", block_size=0) as source:
                shutil.copyfileobj(source, file, PART_BYTES)
            self.received += file.tell()

    def keys(self, prefix: str) -> list[str]:
        """The names of the files below the folder that begin with a prefix, sorted."""
        root = f"{self._root}/{self._folder}"
        with self._failing("listing"):
            found = self._files.find(root.rstrip("/"), refresh=True)
        return sorted(key for name in found if (key := name.removeprefix(root)).startswith(prefix))

    def send_all(self, files: Sequence[tuple[Path, str]]) -> None:
        """Write files under these names, all or none of them."""
        from huggingface_hub import CommitOperationAdd

        operations = [CommitOperationAdd(self._folder + key, path) for path, key in files]
        with self._failing("writing"):
            self._api.create_commit(
                self._repository, operations, commit_message=f"Publish {self.url}", repo_type="dataset"
            )
        self.sent += sum(path.stat().st_size for path, _ in files)

    def _place(self, key: str) -> str:
        return f"{self._root}/{self._folder}{key}"

    @contextmanager
    def _failing(self, what: str) -> Iterator[None]:
        from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError
        from huggingface_hub.errors import HTTPError as Unreachable  # type: ignore[attr-defined]  # of its HTTP client

        try:
            yield
        except (Unreachable, EntryNotFoundError, OSError, RuntimeError, ValueError) as error:
            said = str(error)
            if isinstance(error, HfHubHTTPError):
                said = f"{error.response.status_code}: {error.server_message or error}"
            raise failed(self.url, what, redacted(said.strip().split("\n")[0])) from None


class HubBucket(HubDataset):
    """Files below a folder of a bucket, which can be replaced and deleted as well."""

    def write(self, key: str, data: bytes) -> None:
        """Write a file in place of any that is there."""
        with self._failing(f"writing {key}"):
            self._api.batch_bucket_files(self._repository, add=[(data, self._folder + key)])
        self.sent += len(data)

    def send(self, path: Path, key: str) -> None:
        """Write a file of this machine in place of any that is there; `FileNotFoundError` where this one is gone."""
        size = path.stat().st_size
        with self._failing(f"writing {key}"):
            self._api.batch_bucket_files(self._repository, add=[(path, self._folder + key)])
        self.sent += size

    def send_all(self, files: Sequence[tuple[Path, str]]) -> None:
        """Write files under these names, the last one after all others."""
        *first, last = files
        with self._failing("writing"):
            self._api.batch_bucket_files(self._repository, add=[(path, self._folder + key) for path, key in first])
        self.sent += sum(path.stat().st_size for path, _ in first)
        self.send(*last)

    def delete(self, keys: list[str]) -> None:
        """Delete files; those that are not there count as deleted."""
        there = sorted(set(keys) & set(self.keys(""))) if keys else []
        with self._failing("deleting"):
            self._api.batch_bucket_files(self._repository, delete=[self._folder + key for key in there])


def open_hub(url: str) -> HubDataset:
    """What an address on the hub names, a `HubBucket` where it is a bucket; `UsageError` where it is not understood."""
    found = ADDRESS.fullmatch(url)
    if found is None:
        raise UsageError(
            f"The address {url!r} names no place on the hub. Write hf://buckets/OWNER/NAME/RUN, or "
            "hf://datasets/OWNER/NAME/RUN for a finished run."
        )
    kind, repository, folder = found.groups()
    return (HubBucket if kind == "buckets" else HubDataset)(url, kind, repository, folder.lstrip("/"))
