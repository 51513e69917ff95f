"""Runs in a bucket or on the Hugging Face hub.

In this order: objects in a bucket (`Bucket`, through obstore), files in a bucket of the hub (`HubBucket`), finished
runs that are fetched and published, and a run that is uploaded while it runs (`Mirror`).

Keys come from where each provider's own tools look for them (AWS_ACCESS_KEY_ID, GOOGLE_APPLICATION_CREDENTIALS, ...),
as do endpoints (AWS_ENDPOINT_URL, and AWS_ALLOW_HTTP=true for one without TLS).
"""

import os
import re
import shutil
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any
from uuid import uuid4

from pydantic import ValidationError

from composer_stages.errors import BadInput, ComposerError, InfrastructureError, UsageError, refusal
from composer_stages.redaction import redacted, secret_in
from composer_stages.runs import store
from composer_stages.runs.ledger import NAME as LEDGER
from composer_stages.runs.run import Manifest, Run, RunWriter
from composer_stages.runs.store import sealing

PART_BYTES = 8 * 1024 * 1024
SCHEMES = ("s3", "gs", "az", "file", "memory")


@dataclass(eq=False)
class Bucket:
    """Objects by key in one of obstore's stores. A read sees a complete object or none, as all these stores promise."""

    store: Any
    url: str
    sent: int = 0
    """Bytes, as `received`."""
    received: int = 0

    def create(self, key: str, data: bytes) -> bool:
        """Write an object if there is none of that key; return whether this call wrote it."""
        import obstore
        from obstore.exceptions import AlreadyExistsError

        with self._failing(f"creating {key}"):
            try:
                # In one part: a multipart upload has no condition on the key, so that two writers would both succeed.
                obstore.put(self.store, key, data, mode="create", use_multipart=False)
            except AlreadyExistsError:
                return False
        self.sent += len(data)
        return True

    def write(self, key: str, data: bytes) -> None:
        """Write an object, replacing any of that key."""
        import obstore

        with self._failing(f"writing {key}"):
            obstore.put(self.store, key, data)
        self.sent += len(data)

    def read(self, key: str) -> bytes | None:
        """Return the bytes of an object; None when there is none."""
        import obstore

        with self._failing(f"reading {key}"):
            try:
                data = bytes(obstore.get(self.store, key).bytes())
            except FileNotFoundError:
                return None
        self.received += len(data)
        return data

    def fetch(self, key: str, path: Path) -> None:
        """Download an object into a local file, a part at a time, which may be larger than memory."""
        import obstore

        with self._failing(f"reading {key}"), sealing(path) as file:
            for part in obstore.get(self.store, key).stream(min_chunk_size=PART_BYTES):
                self.received += file.write(part)

    def send(self, path: Path, key: str) -> None:
        """Upload a file as an object, a part at a time, replacing any of that key.

        A local file that is gone raises `FileNotFoundError`.
        """
        import obstore

        with self._failing(f"writing {key}"):
            obstore.put(self.store, key, path, chunk_size=PART_BYTES)
        self.sent += path.stat().st_size

    def send_all(self, files: Sequence[tuple[Path, str]]) -> None:
        """Upload files in this order, the last one after all others."""
        for path, key in files:
            self.send(path, key)

    def keys(self, prefix: str) -> list[str]:
        """Return the keys below a prefix, sorted."""
        import obstore

        with self._failing(f"listing {prefix}"):
            return sorted(entry["path"] for page in obstore.list(self.store, prefix) for entry in page)

    def delete(self, keys: list[str]) -> None:
        """Delete objects; missing ones count as deleted."""
        import obstore

        with self._failing("deleting old rounds"):
            for key in keys:
                with suppress(FileNotFoundError):  # raised by a local folder; S3 reports success
                    obstore.delete(self.store, key)

    @contextmanager
    def _failing(self, action: str) -> Iterator[None]:
        from obstore.exceptions import BaseError

        try:
            yield
        except BaseError as error:
            raise failed(self.url, action, _first_line(error)) from None


def failed(url: str, action: str, message: str) -> InfrastructureError:
    """Return the error to raise when a store fails at an operation with this message."""
    return InfrastructureError("runs.bucket-failed", url=url, what=action, message=message)


def open_bucket(url: str) -> Bucket:
    """Open the store at an address; `UsageError` when it is not understood, or obstore is not installed."""
    if url.startswith("hf://"):
        raise UsageError("runs.hub-unfit-for-replicas", url=url)
    try:
        from obstore.exceptions import BaseError
        from obstore.store import LocalStore, from_url
    except ModuleNotFoundError:
        raise UsageError("runs.obstore-missing", url=url) from None
    scheme, _, address = url.partition("://")
    if scheme not in SCHEMES or (scheme == "file" and not address.startswith("/")):
        raise UsageError("runs.address-not-understood", url=url)
    try:
        return Bucket(LocalStore(address, mkdir=True) if scheme == "file" else from_url(url), url)
    except BaseError as error:
        raise UsageError("runs.address-cannot-be-opened", url=url, first_line=_first_line(error)) from None


def _first_line(error: Exception) -> str:
    """Return the first line of an error of obstore, without the debug dump of the Rust client that follows."""
    return re.split(r"\n|Debug source", str(error), maxsplit=1)[0].strip().rstrip(".")


# Runs in a bucket of the Hugging Face hub, `hf://buckets/OWNER/NAME/RUN`. The hub cannot create a file only if it is
# absent, append, or rename: nothing here needs that, but DiLoCo replicas do, and are refused (`open_bucket`). The token
# is HF_TOKEN, else that of `hf auth login`; HF_ENDPOINT names another hub. Uses `HfFileSystem` and `HfApi` of
# huggingface_hub 2.4.

SCHEME = "hf"
ADDRESS = re.compile(r"hf://buckets/([\w.-]+/[\w.-]+)((?:/[^/@]+)*)")


class HubBucket:
    """Files below a folder of a bucket of the hub, with the methods of `Bucket` that a run needs."""

    def __init__(self, url: str, repository: str, folder: str) -> None:
        """folder: below the bucket, empty for the bucket itself. `UsageError` when it cannot be opened."""
        from huggingface_hub import HfApi, HfFileSystem
        from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]

        disable_progress_bars()
        endpoint, token = os.environ.get("HF_ENDPOINT") or None, secret_in("HF_TOKEN") or None
        self._api = HfApi(endpoint=endpoint, token=token, library_name="composer")
        self._files = HfFileSystem(endpoint=endpoint, token=token, skip_instance_cache=True)
        self.url, self._repository, self._folder = url, repository, f"{folder}/" if folder else ""
        root = f"buckets/{repository}"
        self._prefix = f"{root}/{self._folder}"  # of the keys, in the paths of HfFileSystem
        self.sent = self.received = 0
        with self._failing("opening it"):
            try:
                self._files.resolve_path(root)
            except FileNotFoundError:
                raise UsageError("runs.hub-bucket-missing", url=url, root=root) from None

    def read(self, key: str) -> bytes | None:
        """Return the bytes of a file; None when there is none."""
        from huggingface_hub.errors import EntryNotFoundError

        with self._failing(f"reading {key}"):
            try:
                # block_size=0 streams the file in one request; the default asks for the size first, then for ranges.
                with self._files.open(self._prefix + key, "rb", block_size=0) as file:
                    data: bytes = file.read()
            except EntryNotFoundError:
                return None
        self.received += len(data)
        return data

    def fetch(self, key: str, path: Path) -> None:
        """Download a file of the hub into a local file, a part at a time."""
        with self._failing(f"reading {key}"), sealing(path) as file:
            with self._files.open(self._prefix + key, "rb", block_size=0) as source:
                shutil.copyfileobj(source, file, PART_BYTES)
            self.received += file.tell()

    def keys(self, prefix: str) -> list[str]:
        """Return the keys below the folder that begin with a prefix, sorted."""
        with self._failing("listing"):
            entries = self._files.find(self._prefix.rstrip("/"), refresh=True)  # else from a cache of this process
        return sorted(key for name in entries if (key := name.removeprefix(self._prefix)).startswith(prefix))

    def write(self, key: str, data: bytes) -> None:
        """Write a file, replacing any of that key."""
        with self._failing(f"writing {key}"):
            self._api.batch_bucket_files(self._repository, add=[(data, self._folder + key)])
        self.sent += len(data)

    def send(self, path: Path, key: str) -> None:
        """Upload a local file, replacing any of that key; `FileNotFoundError` when the local file is gone."""
        size = path.stat().st_size
        with self._failing(f"writing {key}"):
            self._api.batch_bucket_files(self._repository, add=[(path, self._folder + key)])
        self.sent += size

    def send_all(self, files: Sequence[tuple[Path, str]]) -> None:
        """Upload files, the last one after all others."""
        # Two calls, since a batch is no transaction: the manifest must not be there before the files that it names.
        *first, last = files
        with self._failing("writing"):
            self._api.batch_bucket_files(self._repository, add=[(path, self._folder + key) for path, key in first])
        self.sent += sum(path.stat().st_size for path, _ in first)
        self.send(*last)

    def delete(self, keys: list[str]) -> None:
        """Delete files; missing ones count as deleted."""
        remaining = sorted(set(keys) & set(self.keys(""))) if keys else []
        with self._failing("deleting"):
            self._api.batch_bucket_files(self._repository, delete=[self._folder + key for key in remaining])

    @contextmanager
    def _failing(self, action: str) -> Iterator[None]:
        from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HTTPError as Unreachable  # type: ignore[attr-defined]  # Unreachable is of its HTTP client

        try:
            yield
        except (Unreachable, EntryNotFoundError, OSError, RuntimeError, ValueError) as error:
            message = str(error)
            if isinstance(error, HfHubHTTPError):
                message = f"{error.response.status_code}: {error.server_message or error}"
            # redacted(): a proxy or the hub may repeat the request's token in its message.
            raise failed(self.url, action, redacted(message.strip().split("\n")[0])) from None


RunStore = Bucket | HubBucket
"""A store of runs."""


def open_store(url: str) -> RunStore:
    """Open the bucket or the repository at an address; `UsageError` when it is not understood or not found."""
    if not url.startswith(f"{SCHEME}://"):
        return open_bucket(url)
    match = ADDRESS.fullmatch(url)
    if match is None:
        raise UsageError("runs.no-hub-address", url=url)
    return HubBucket(url, match[1], match[2].lstrip("/"))


def is_address(text: str) -> bool:
    """Return whether a text is an address in a bucket or on the hub, not a folder or a name."""
    return text.partition("://")[0] in (*SCHEMES, SCHEME) and "://" in text


# Finished runs: fetched into a local folder to be read, and published. A run in a bucket is the files of its folder
# under the same names, the manifest written last. Fetched files are compared with the manifest's digests, kept, and not
# fetched again while the manifest in the bucket is the same.

MANIFEST = "manifest.json"
NOT_PUBLISHED = ("scratch", "ledger.jsonl")
"""Files that only a resumed attempt needs; hidden files are left out too."""


def fetch(url: str, cache: Path) -> Path:
    """Return the folder below `cache` with the run at an address; `BadInput` when it is missing or unfinished."""
    bucket = open_store(url.rstrip("/"))
    data = bucket.read(MANIFEST)
    if data is None:
        raise BadInput("runs.no-run-in-bucket", url=url, manifest=MANIFEST)
    about = _manifest(data, url)
    if about.status != "complete":
        raise BadInput("runs.bucket-run-incomplete", url=url, status=about.status)
    folder = local_folder(url, about.stage, cache)
    if store.read_bytes(folder / MANIFEST) == data and not Run(folder).damage("bytes"):
        return folder
    download(bucket, folder, data)
    if damage := Run(folder).damage("bytes"):
        (folder / MANIFEST).unlink()  # so that the folder is not a run, and the next fetch downloads it again
        raise BadInput("runs.bucket-run-damaged", url=url, damage=damage)
    return folder


def local_folder(url: str, stage: str, cache: Path) -> Path:
    """Return the folder below `cache` for the run at an address."""
    url = url.rstrip("/")
    # The digest keeps apart runs of one name in two buckets; below it, the folder's parent is the stage, as everywhere.
    # Both names are external text: the stage is what a manifest in the bucket says.
    return cache / store.digest(url)[:12] / store.folder_name(stage) / store.folder_name(url.rpartition("/")[2])


def download(bucket: RunStore, folder: Path, manifest: bytes, *, but: Collection[str] = ()) -> None:
    """Replace a folder by the files of a run in a bucket, except those named in `but`."""
    # First: files of an earlier run at this address would otherwise stay among the new ones.
    shutil.rmtree(folder, ignore_errors=True)
    for key in sorted(bucket.keys("")):
        if key not in (MANIFEST, *but) and is_inside(key):
            bucket.fetch(key, folder / key)
    store.write_sealed(folder / MANIFEST, manifest)  # last: a folder without it is not a run


def is_inside(key: str) -> bool:
    """Return whether a key is a path inside a folder; anyone who may write to the bucket chooses the keys there."""
    return not key.startswith("/") and not {"..", ""} & set(PurePosixPath(key).parts)


def _manifest(data: bytes, url: str) -> Manifest:
    try:
        return Manifest.model_validate_json(data)
    except ValidationError as error:
        raise BadInput(
            "runs.bucket-manifest-unreadable", url=url, manifest=MANIFEST, refusal=refusal(error.errors()[0])
        ) from None


def publish(run: Run, url: str) -> int:
    """Upload a finished run to an address; return the bytes that were sent, 0 when the same run is there already.

    `BadInput` when the run is unfinished or damaged, `UsageError` when another run is there.
    """
    if run.manifest.status != "complete":
        raise BadInput("runs.run-incomplete", run_path=run.path, status=run.manifest.status)
    if damage := run.damage("bytes"):
        raise BadInput("runs.run-damaged", run_path=run.path, damage=damage)
    bucket = open_store(url.rstrip("/"))
    if (published := bucket.read(MANIFEST)) is not None:
        if _manifest(published, url).outputs == run.manifest.outputs:
            return 0
        raise UsageError("runs.address-holds-another-run", url=url)
    kept_back = (*NOT_PUBLISHED, MANIFEST)
    files = [(path, str(name)) for path, name in store.visible_files(run.path) if name.parts[0] not in kept_back]
    bucket.send_all([*files, (run.path / MANIFEST, MANIFEST)])  # the manifest last: it makes the folder a run
    return bucket.sent


# A run whose folder is in a bucket while it runs: it is written into a local folder, and durable files are sent every
# few seconds: the ledger, then units, then everything else, then the manifest. So the bucket holds a run folder as a
# kill would leave it, at most that much older, and `--resume` on another machine continues from it. The machine that
# began last owns the run: one that comes back finds that out and stops.

EVERY_S = 5.0
"""Seconds between two transfers: the work that a lost machine loses at most."""
OWNER = "owner.json"
LOCAL = "scratch"
"""The folder of files that only the machine that wrote them needs."""
Stamp = tuple[int, int]
"""The time of a file's last change, in ns, and its size in bytes."""
NEVER: Stamp = (0, -1)


class Mirror:
    """The address of one run in a bucket, and the folder below `cache` in which the run is written."""

    def __init__(self, url: str, stage: str, cache: Path, every_s: float = EVERY_S) -> None:
        self.url = url.rstrip("/")
        self.folder = local_folder(self.url, stage, cache)
        self._bucket = open_store(self.url)
        self._owner, self._sent = uuid4().hex.encode(), dict[str, Stamp]()
        self._over, self._every_s = threading.Event(), every_s

    def bring(self) -> None:
        """Download the run, unless this machine was the last one to write it: the local folder is newer then."""
        owner = self._bucket.read(OWNER)
        if owner is not None and owner == store.read_bytes(self.folder / OWNER):
            return
        manifest = self._bucket.read(MANIFEST)
        if manifest is None or (owner is None and manifest == store.read_bytes(self.folder / MANIFEST)):
            return
        download(self._bucket, self.folder, manifest, but=[OWNER])

    @contextmanager
    def following(self, out: RunWriter, *, units: bool) -> Iterator[None]:
        """Upload what the block writes; `UsageError` once another process owns the run.

        units: whether the stage can resume from its units alone; then they are sent while the block lasts and however
        it ends. Else the run is sent once it is complete.
        """
        # From here on an earlier owner finds another name than its own, and stops before it sends anything more.
        self._bucket.write(OWNER, self._owner)
        store.write_sealed(self.folder / OWNER, self._owner)
        self._sent = {key: NEVER for key in self._bucket.keys("") if key != OWNER}  # to be sent anew, or deleted
        sender = threading.Thread(target=self._send_periodically, args=[out], name="mirror")
        if units:
            sender.start()
        try:
            yield
        except BaseException as error:
            if units:
                try:
                    self._end(sender, out)
                except ComposerError as failure:
                    error.add_note(str(failure))  # the error of the run is the one to report
            raise
        self._end(sender, out)

    def _send_periodically(self, out: RunWriter) -> None:
        while not self._over.wait(self._every_s):
            with suppress(InfrastructureError):  # the next transfer tries again; `_end` raises what lasts
                if not self._send():
                    out.stop.set()
                    return

    def _end(self, sender: threading.Thread, out: RunWriter) -> None:
        """Send the rest, and give up the ownership of a run that is complete or was refused."""
        self._over.set()
        if sender.is_alive():
            sender.join()
        if not self._send():
            raise UsageError("runs.run-taken-over", url=self.url)
        over = out.manifest.status == "complete" or not self.folder.exists()
        # Read again, since sending takes a while in which another process may have begun.
        if over and self._bucket.read(OWNER) == self._owner:
            self._bucket.delete([OWNER])

    def _send(self) -> bool:
        """Upload every file that changed and delete those that are gone; False once another process owns the run."""
        if self._bucket.read(OWNER) != self._owner:
            return False
        files = self._files()
        # As they are before the ledger is sent: it holds the calls of all their units then.
        opened = {name: store.read_bytes(self.folder / name) for name in files if name.endswith(".jsonl.open")}
        for name, stamp in sorted(files.items(), key=lambda item: (_rank(item[0]), item[1])):
            if self._sent.get(name) != stamp:
                with suppress(FileNotFoundError):  # sealed or deleted meanwhile
                    if (data := opened.get(name)) is not None:
                        self._bucket.write(name, data)
                    else:
                        self._bucket.send(self.folder / name, name)
                    self._sent[name] = stamp  # of before: a file that changed during the transfer is sent again
        # Deletions last: an open journal is deleted only after the sealed file that replaces it was sent.
        gone = sorted(self._sent.keys() - files.keys())
        self._bucket.delete(gone)
        for name in gone:
            del self._sent[name]
        return True

    def _files(self) -> dict[str, Stamp]:
        """Return the durable files of the folder with their stamps; a name that begins with a dot is temporary."""
        stamps: dict[str, Stamp] = {}
        for path, name in store.visible_files(self.folder):
            if str(name) != OWNER and name.parts[0] != LOCAL:
                with suppress(FileNotFoundError):
                    status = path.stat()
                    stamps[str(name)] = status.st_mtime_ns, status.st_size
        return stamps


def _rank(name: str) -> int:
    """Return the place of a file in the order of uploads, so that the bucket always holds what a kill would leave.

    Units come before tables and manifest, which refer to them. A ledger may know of more calls than the units do, which
    costs money at worst; with fewer, the limit would not hold.
    """
    return {LEDGER: 0, MANIFEST: 3}.get(name, 1 if name.startswith("steps/") else 2)
