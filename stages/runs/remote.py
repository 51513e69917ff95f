"""Finished runs in a bucket: fetched into a folder here to be read, and published there.

A run in a bucket is the files of its folder under the same names, the manifest written last. What was fetched is held
against the digests of the manifest, kept, and not fetched again while the manifest there is the same.
"""

import shutil
from collections.abc import Collection, Iterator
from pathlib import Path, PurePosixPath

from pydantic import ValidationError

from stages.errors import BadInput, UsageError
from stages.runs import store
from stages.runs.artifact import Run
from stages.runs.bucket import SCHEMES, Shelf, open_bucket
from stages.runs.hub_bucket import SCHEME as HUB
from stages.runs.hub_bucket import open_hub
from stages.runs.manifest import Manifest

MANIFEST = "manifest.json"
LEFT_OUT = ("scratch", "ledger.jsonl")
"""What only an attempt that goes on needs; hidden files are left out too."""


def is_address(text: str) -> bool:
    """Whether a text means a place in a bucket, not a folder or a name."""
    return text.partition("://")[0] in (*SCHEMES, HUB) and "://" in text


def open_shelf(url: str) -> Shelf:
    """The bucket or the repository of an address; `UsageError` where there is none."""
    return open_hub(url) if url.startswith(f"{HUB}://") else open_bucket(url)


def fetch(url: str, cache: Path) -> Path:
    """The run at an address, below `cache`; `BadInput` where there is none, or it is unfinished or damaged."""
    bucket = open_shelf(url.rstrip("/"))
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


def bring(bucket: Shelf, folder: Path, manifest: bytes, *, but: Collection[str] = ()) -> None:
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
    bucket = open_shelf(url.rstrip("/"))
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
