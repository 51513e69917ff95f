"""A folder or bucket, through obstore: create (put if absent), write, read, list, delete. Counts bytes.

Keys come from where each provider's own tools look for them (AWS_ACCESS_KEY_ID, GOOGLE_APPLICATION_CREDENTIALS, ...),
as do endpoints (AWS_ENDPOINT_URL, and AWS_ALLOW_HTTP=true for one without TLS).
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from stages.errors import InfrastructureError, UsageError
from stages.runs.store import sealing

PART_BYTES = 8 * 1024 * 1024
SCHEMES = ("s3", "gs", "az", "file", "memory")


class Shelf(Protocol):
    """Where finished runs lie."""

    url: str
    sent: int

    def read(self, key: str) -> bytes | None:
        """What lies there under a name; None where nothing does."""

    def fetch(self, key: str, path: Path) -> None:
        """Write it into a file here."""

    def keys(self, prefix: str) -> list[str]:
        """The names that begin with a prefix, sorted."""

    def send_all(self, files: Sequence[tuple[Path, str]]) -> None:
        """Write files under these names, none of them after the last one."""


class Desk(Shelf, Protocol):
    """Where a run lies while it goes on: what is there can be replaced and deleted."""

    def write(self, key: str, data: bytes) -> None:
        """Write under a name, in place of what is there."""

    def send(self, path: Path, key: str) -> None:
        """Write a file under a name, in place of what is there."""

    def delete(self, keys: list[str]) -> None:
        """Delete what lies under these names, if anything does."""


class Bucket:
    """Objects by key. A read sees a whole object or none, as all of these stores promise."""

    def __init__(self, store: Any, url: str) -> None:
        """store: one of obstore's."""
        self._store, self.url = store, url
        self.sent = self.received = 0

    def create(self, key: str, data: bytes) -> bool:
        """Write an object if there is none of that key: whether this call was the one that did."""
        import obstore
        from obstore.exceptions import AlreadyExistsError

        with self._failing(f"creating {key}"):
            try:
                obstore.put(self._store, key, data, mode="create", use_multipart=False)
            except AlreadyExistsError:
                return False
        self.sent += len(data)
        return True

    def write(self, key: str, data: bytes) -> None:
        """Write an object in place of any that is there."""
        import obstore

        with self._failing(f"writing {key}"):
            obstore.put(self._store, key, data)
        self.sent += len(data)

    def read(self, key: str) -> bytes | None:
        """An object's bytes; None where there is none."""
        import obstore

        with self._failing(f"reading {key}"):
            try:
                data = bytes(obstore.get(self._store, key).bytes())
            except FileNotFoundError:
                return None
        self.received += len(data)
        return data

    def fetch(self, key: str, path: Path) -> None:
        """Write an object into a file, a part at a time; the file's folder is made."""
        import obstore

        with self._failing(f"reading {key}"), sealing(path) as file:
            for part in obstore.get(self._store, key).stream(min_chunk_size=PART_BYTES):
                self.received += file.write(part)

    def send(self, path: Path, key: str) -> None:
        """Write a file as an object, a part at a time, in place of any that is there."""
        import obstore

        with self._failing(f"writing {key}"):
            obstore.put(self._store, key, path, chunk_size=PART_BYTES)
        self.sent += path.stat().st_size

    def send_all(self, files: Sequence[tuple[Path, str]]) -> None:
        """Write files as objects of these keys, one after the other."""
        for path, key in files:
            self.send(path, key)

    def keys(self, prefix: str) -> list[str]:
        """The keys below a prefix, sorted."""
        import obstore

        with self._failing(f"listing {prefix}"):
            return sorted(entry["path"] for page in obstore.list(self._store, prefix) for entry in page)

    def delete(self, keys: list[str]) -> None:
        """Delete objects; those that are not there count as deleted."""
        import obstore

        with self._failing("deleting old rounds"):
            for key in keys:
                try:
                    obstore.delete(self._store, key)
                except FileNotFoundError:
                    continue

    @contextmanager
    def _failing(self, what: str) -> Iterator[None]:
        from obstore.exceptions import BaseError

        try:
            yield
        except BaseError as error:
            raise failed(self.url, what, _first_line(error)) from None


def failed(url: str, what: str, said: str) -> InfrastructureError:
    """The sentence for a store that did not do what it was asked, and what it said."""
    return InfrastructureError(
        f"{url} failed at {what} ({said}). Check the address, the keys in the environment "
        "and the network, then --resume."
    )


def open_bucket(url: str) -> Bucket:
    """The store of an address; `UsageError` where it is not understood, or obstore is not installed."""
    if url.startswith("hf://"):
        raise UsageError(
            f"{url} will not do for replicas: they write objects only where there is none, which the hub does not "
            "offer. Write s3://BUCKET/RUN, gs://BUCKET/RUN, az://CONTAINER/RUN or file:///FOLDER."
        )
    try:
        from obstore.exceptions import BaseError
        from obstore.store import LocalStore, from_url
    except ModuleNotFoundError:
        raise UsageError(
            f"{url} needs obstore, which is not installed. Install composer-post-training[diloco]."
        ) from None
    scheme, _, rest = url.partition("://")
    if scheme not in SCHEMES or (scheme == "file" and not rest.startswith("/")):
        raise UsageError(
            f"The address {url!r} is not understood. Write s3://BUCKET/RUN, gs://BUCKET/RUN, az://CONTAINER/RUN or "
            "file:///FOLDER."
        )
    try:
        return Bucket(LocalStore(rest, mkdir=True) if scheme == "file" else from_url(url), url)
    except BaseError as error:
        raise UsageError(f"{url} cannot be opened ({_first_line(error)}). Check the address and the keys.") from None


def _first_line(error: Exception) -> str:
    """What went wrong, without the client's dump of itself."""
    return re.split(r"\n|Debug source", str(error), maxsplit=1)[0].strip().rstrip(".")
