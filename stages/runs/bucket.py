"""Buckets and folders of runs: access through obstore, the Hugging Face hub, finished runs, and runs in progress.

Keys come from where each provider's own tools look for them (AWS_ACCESS_KEY_ID, GOOGLE_APPLICATION_CREDENTIALS, ...),
as do endpoints (AWS_ENDPOINT_URL, and AWS_ALLOW_HTTP=true for one without TLS).
"""

import os
import re
import shutil
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any, Protocol
from uuid import uuid4

from pydantic import ValidationError

from stages.errors import BadInput, ComposerError, InfrastructureError, UsageError
from stages.redaction import redacted, secret_in
from stages.runs import store
from stages.runs.artifact import Run, RunWriter
from stages.runs.ledger import NAME as LEDGER
from stages.runs.manifest import Manifest
from stages.runs.store import sealing

PART_BYTES = 8 * 1024 * 1024
SCHEMES = ("s3", "gs", "az", "file", "memory")


class ReadStore(Protocol):
    """A place of finished runs."""

    url: str
    sent: int

    def read(self, key: str) -> bytes | None:
        """Return the object under a name; None when there is none."""

    def fetch(self, key: str, path: Path) -> None:
        """Write the object into a local file."""

    def keys(self, prefix: str) -> list[str]:
        """Return the sorted names that begin with a prefix."""

    def send_all(self, files: Sequence[tuple[Path, str]]) -> None:
        """Write files under these names, none of them after the last one."""


class WriteStore(ReadStore, Protocol):
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


# Runs on the Hugging Face hub, in a bucket (`hf://buckets/OWNER/NAME/RUN`) or a dataset (`hf://datasets/OWNER/NAME/RUN`).
# A bucket takes runs in progress. A dataset is a repository whose every write is a commit, so it takes finished runs
# only, one commit each. Neither can create a file only if it is absent, append, or rename: nothing here needs that,
# but DiLoCo replicas do, and are refused (`open_bucket`). The token is HF_TOKEN, else that of `hf auth login`;
# HF_ENDPOINT names another hub. Uses `HfFileSystem` and `HfApi` of huggingface_hub 2.4.

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


# Finished runs in a bucket: fetched into a local folder to be read, and published. A run in a bucket is the files of
# its folder under the same names, the manifest written last. Fetched files are compared with the manifest's digests,
# kept, and not fetched again while the manifest in the bucket is the same.

MANIFEST = "manifest.json"
LEFT_OUT = ("scratch", "ledger.jsonl")
"""Files that only a resumed attempt needs; hidden files are left out too."""


def is_address(text: str) -> bool:
    """Whether a text means a place in a bucket, not a folder or a name."""
    return text.partition("://")[0] in (*SCHEMES, SCHEME) and "://" in text


def open_store(url: str) -> ReadStore:
    """The bucket or the repository of an address; `UsageError` where there is none."""
    return open_hub(url) if url.startswith(f"{SCHEME}://") else open_bucket(url)


def fetch(url: str, cache: Path) -> Path:
    """The run at an address, below `cache`; `BadInput` where there is none, or it is unfinished or damaged."""
    bucket = open_store(url.rstrip("/"))
    found = bucket.read(MANIFEST)
    if found is None:
        raise BadInput(f"{url} holds no run: it has no {MANIFEST}. `composer publish RUN {url}` would write one.")
    about = _manifest(found, url)
    if about.status != "complete":
        raise BadInput(f"{url} is {about.status}, not complete. Publish the run once it is finished.")
    folder = place(url, about.stage, cache)
    if store.read_bytes(folder / MANIFEST) == found and not _damage(Run(folder)):
        return folder
    bring(bucket, folder, found)
    if damage := _damage(Run(folder)):
        (folder / MANIFEST).unlink()
        raise BadInput(f"{url}: {damage}. Publish the run again.")
    return folder


def place(url: str, stage: str, cache: Path) -> Path:
    """The folder below `cache` for the run at an address."""
    url = url.rstrip("/")
    return cache / store.digest(url)[:12] / stage / url.rpartition("/")[2]


def bring(bucket: ReadStore, folder: Path, manifest: bytes, *, but: Collection[str] = ()) -> None:
    """Put the files of a run in a bucket, all `but` these, into a folder in place of what is there."""
    shutil.rmtree(folder, ignore_errors=True)
    for key in sorted(bucket.keys("")):
        if key not in (MANIFEST, *but) and is_inside(key):
            bucket.fetch(key, folder / key)
    store.write_sealed(folder / MANIFEST, manifest)  # last: a folder without it is no run


def _damage(run: Run) -> str | None:
    """What is wrong with a run that came from elsewhere; its checkpoints are looked into as well."""
    changed = (
        f"{name} has changed since it was written"
        for name, out in run.manifest.outputs.items()
        if (run.path / out["file"]).is_dir() and store.folder_sha256(run.path / out["file"]) != out["sha256"]
    )
    return run.damage() or next(changed, None)


def _manifest(data: bytes, url: str) -> Manifest:
    try:
        return Manifest.model_validate_json(data)
    except ValidationError as error:
        raise BadInput(
            f"{url}/{MANIFEST} does not fit this Composer ({error.errors()[0]['msg']}). It may be newer."
        ) from None


def is_inside(key: str) -> bool:
    """Whether a key is a name below a folder: whoever writes into a bucket chooses the names there."""
    return not key.startswith("/") and not {"..", ""} & set(PurePosixPath(key).parts)


def publish(run: Run, url: str) -> int:
    """Write a finished run to an address; the bytes that were sent, none where the same run is there already.

    `BadInput` where the run is unfinished or damaged, `UsageError` where another run is there.
    """
    if run.manifest.status != "complete":
        raise BadInput(f"{run.path} is {run.manifest.status}, not complete. Finish it first, with --resume.")
    if damage := run.damage():
        raise BadInput(f"{run.path}: {damage}. Rerun that stage, or restore the file.")
    bucket = open_store(url.rstrip("/"))
    if (there := bucket.read(MANIFEST)) is not None:
        if _manifest(there, url).outputs == run.manifest.outputs:
            return 0
        raise UsageError(f"{url} holds another run. Choose another address, or delete that run there.")
    bucket.send_all([*_to_publish(run.path), (run.path / MANIFEST, MANIFEST)])
    return bucket.sent


def _to_publish(folder: Path) -> Iterator[tuple[Path, str]]:
    """The files of a run and their names, all but the manifest."""
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        hidden = any(part.startswith(".") for part in name.parts)
        if path.is_file() and not path.is_symlink() and not hidden and name.parts[0] not in (*LEFT_OUT, MANIFEST):
            yield path, name.as_posix()


# A run whose folder is in a bucket while it runs: it is written into a local folder, and durable files are sent every
# few seconds: units, then everything else, then the ledger, then the manifest. So the bucket holds a run folder as a
# kill would leave it, at most that much older, and `--resume` on another machine continues from it. The machine that
# began last owns the run: one that comes back finds that out and stops.

EVERY_S = 5.0
"""Seconds between two transfers: the work that a lost machine loses at most."""
OWNER = "owner.json"
PASSING = "scratch/"
"""What lies here goes on only where it was begun."""
Stamp = tuple[int, int]
"""When a file was last written, in ns, and its size."""
NEVER: Stamp = (0, -1)


class Mirror:
    """The place of one run in a bucket, and the folder below `cache` in which it is written."""

    def __init__(self, url: str, stage: str, cache: Path, every_s: float = EVERY_S) -> None:
        self.url = url.rstrip("/")
        self.folder = place(self.url, stage, cache)
        self._bucket = _open_writable(self.url)
        self._owner, self._sent = uuid4().hex, dict[str, Stamp]()
        self._over, self._every_s = threading.Event(), every_s

    def bring(self) -> None:
        """Have here what is there, unless this machine was the last to write it: then the folder is newer."""
        owner = self._bucket.read(OWNER)
        if owner is not None and owner == store.read_bytes(self.folder / OWNER):
            return
        there = self._bucket.read(MANIFEST)
        if there is None or (owner is None and there == store.read_bytes(self.folder / MANIFEST)):
            return
        bring(self._bucket, self.folder, there, but=[OWNER])

    @contextmanager
    def following(self, out: RunWriter, *, units: bool) -> Iterator[None]:
        """Send what the block writes, `UsageError` once another process took the run.

        units: whether the stage goes on from its units alone; then they are sent while the block lasts and however it
        ends. Else the run is sent once it is complete.
        """
        self._bucket.write(OWNER, self._owner.encode())
        store.write_sealed(self.folder / OWNER, self._owner.encode())
        self._sent = {key: NEVER for key in self._bucket.keys("") if key != OWNER}  # to be sent anew, or deleted
        sender = threading.Thread(target=self._send_now_and_then, args=[out], name="mirror")
        if units:
            sender.start()
        try:
            yield
        except BaseException as error:
            if units:
                try:
                    self._end(sender, out)
                except ComposerError as other:
                    error.add_note(str(other))
            raise
        self._end(sender, out)

    def _end(self, sender: threading.Thread, out: RunWriter) -> None:
        self._over.set()
        if sender.is_alive():
            sender.join()
        if not self._send():
            raise UsageError(
                f"{self.url} was taken over by another process, so this one stopped. "
                "Leave the run to that one, or end it and --resume here."
            )
        over = out.manifest.status == "complete" or not self.folder.exists()
        if over and self._owns():  # sending takes its time: another process may have begun meanwhile
            self._bucket.delete([OWNER])

    def _owns(self) -> bool:
        return self._bucket.read(OWNER) == self._owner.encode()

    def _send_now_and_then(self, out: RunWriter) -> None:
        while not self._over.wait(self._every_s):
            with suppress(InfrastructureError):  # tried again; at the end it is raised
                if not self._send():
                    out.stop.set()
                    return

    def _send(self) -> bool:
        """Bring the bucket up to what is here now; False once another process has begun to write there."""
        if not self._owns():
            return False
        here = dict(sorted(self._files().items(), key=lambda item: (_rank(item[0]), item[1])))
        for name, stamp in here.items():
            if self._sent.get(name) != stamp:
                with suppress(FileNotFoundError):  # sealed or deleted meanwhile
                    self._bucket.send(self.folder / name, name)
                    self._sent[name] = stamp
        gone = sorted(self._sent.keys() - here.keys())
        self._bucket.delete(gone)
        for name in gone:
            del self._sent[name]
        return True

    def _files(self) -> dict[str, Stamp]:
        """What is to lie in the bucket."""
        found: dict[str, Stamp] = {}
        for path in self.folder.rglob("*"):
            name = path.relative_to(self.folder).as_posix()
            if name == OWNER or name.startswith(PASSING) or "/." in f"/{name}":
                continue
            with suppress(FileNotFoundError):
                if path.is_file() and not path.is_symlink():
                    found[name] = path.stat().st_mtime_ns, path.stat().st_size
        return found


def _open_writable(url: str) -> WriteStore:
    place = open_store(url)
    if not isinstance(place, Bucket | HubBucket):
        raise UsageError(
            f"{url} takes finished runs only, since every write to a dataset is a commit. Give --out "
            "hf://buckets/OWNER/NAME/RUN, or `composer publish RUN` there once it is finished."
        )
    return place


def _rank(name: str) -> int:
    """Units first, so that nothing there knows of a unit that is not; a ledger may know more than they, never less."""
    if name in (LEDGER, MANIFEST):
        return 2 + (LEDGER, MANIFEST).index(name)
    return 0 if name.startswith("steps/") else 1
