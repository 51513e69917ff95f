"""The manifest of a run: everything that was asked, read, used, produced and spent, readable without the program."""

import hashlib
import importlib.metadata
import platform
import subprocess
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from stages.errors import BadInput
from stages.runs import ledger, store

Status = Literal["running", "complete", "incomplete", "interrupted", "failed"]
PACKAGES = ("torch", "transformers", "trl", "pyarrow", "duckdb", "openai")
SOURCE = Path(__file__).resolve().parents[2]


class InputRef(BaseModel):
    """One upstream run that was read: where it lay, which stage wrote it, and the content digest that identifies it."""

    model_config = ConfigDict(extra="forbid")
    stage: str
    path: str
    fingerprint: str
    content: str


class RunOutcome(BaseModel):
    """What a stage found. `ok` is None where it judges nothing; `code` is the exit code that its verdict asks for."""

    model_config = ConfigDict(extra="forbid")
    ok: bool | None = None
    code: int | None = None
    summary: dict[str, Any] = {}

    @property
    def exit_code(self) -> int:
        """The one that the stage chose, else 1 when it judged itself not ok."""
        return int(self.ok is False) if self.code is None else self.code


class Manifest(BaseModel):
    """`manifest.json` of a run folder. Its status flips last, so a folder without `complete` is not finished."""

    model_config = ConfigDict(extra="forbid")
    composer: str
    stage: str
    stage_version: int
    fingerprint: str
    status: Status = "running"
    label: str = ""
    reason: str = ""
    started_at: str = ""
    finished_at: str = ""
    attempts: int = 0
    seconds: float = 0.0
    config: dict[str, Any] = {}
    identity: dict[str, Any] = {}
    inputs: dict[str, list[InputRef]] = {}
    outputs: dict[str, dict[str, Any]] = {}
    counts: dict[str, int] = {}
    tokens: dict[str, int] = {}
    cost_usd: float = 0.0
    possibly_usd: float = 0.0
    models: dict[str, Any] = {}
    outcome: RunOutcome = Field(default_factory=RunOutcome)
    packages: dict[str, str] = {}
    python: str = platform.python_version()
    code: dict[str, str | None] = {}

    @property
    def summary(self) -> dict[str, Any]:
        """The few numbers that a person looks for first."""
        return self.outcome.summary

    @property
    def content(self) -> str:
        """A digest of the outputs' content: equal for two runs that produced the same rows."""
        return store.digest({name: out["content_sha256"] for name, out in self.outputs.items()})


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a run folder; `BadInput` when there is none or it cannot be understood."""
    if not (folder / "manifest.json").is_file():
        raise BadInput(
            f"{folder} is not a run folder: it has no manifest.json. `composer status` lists the runs there are."
        )
    try:
        found = Manifest.model_validate(store.read_json(folder / "manifest.json"))
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        raise BadInput(
            f"{folder}/manifest.json does not fit this Composer ({field}: {first['msg']}). It may be newer or damaged."
        ) from None
    if found.status == "running" and (spent := ledger.totals(folder)) is not None:
        found.cost_usd, found.possibly_usd = spent  # a process that was killed left its money in the ledger alone
    return found


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Replace a run's manifest in one step."""
    store.write_json(folder / "manifest.json", manifest.model_dump(mode="json"))


def package_versions() -> dict[str, str]:
    """Versions of the packages that can change results."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def code_version() -> dict[str, str | None]:
    """The commit the program ran from and a digest of uncommitted changes; None outside a git checkout."""
    commit = _git("rev-parse", "HEAD")
    diff = _git("diff", "HEAD")
    return {
        "commit": commit and commit.strip(),
        "dirty_sha256": hashlib.sha256(diff.encode()).hexdigest() if diff else None,
    }


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(SOURCE), *arguments], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
