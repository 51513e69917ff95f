"""What `swe-lite` needs of a machine, looked at part by part: what both ways of running it need, and containers.

The other way, clones with an environment for every version of a repository, is in clone_requirements.py.
"""

import os
import platform
import pwd
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from stages.envs.swe import engine
from stages.envs.swe.instance_runtime import TEST_LIMITS
from stages.runs.records import Row

ALL_IMAGES_GB, ALL_IMAGES = 120, 300
"""What SWE-bench's own README asks for, and for how many images."""
MANIFEST_S = 30
"""Seconds for a registry to say whether it has an image."""
State = Literal["ok", "note", "missing"]


@dataclass(frozen=True)
class Part:
    """One thing that a way needs. `note`: it works without, but less well; `way_out` says what to do."""

    name: str
    state: State
    found: str
    way_out: str = ""


@dataclass(frozen=True)
class Way:
    """One way to run the rows. `repositories`: rows, and environments that are there and that will be built."""

    name: str
    parts: list[Part]
    repositories: list[Row] = field(default_factory=list)

    @property
    def ready(self) -> bool:
        """Whether `collect` can begin."""
        return all(part.state != "missing" for part in self.parts)

    @property
    def build_s(self) -> float:
        """Seconds for what is still to be built, of repositories where that was measured."""
        return float(sum(each["build_s"] or 0 for each in self.repositories))

    def document(self) -> Row:
        """As JSON."""
        return {
            "way": self.name,
            "ready": self.ready,
            "build_s": self.build_s,
            "parts": [vars(part) for part in self.parts],
            "repositories": self.repositories,
        }


@dataclass(frozen=True)
class Report:
    """The rows, both ways, and which of them `collect` takes with these settings."""

    rows: Part
    ways: list[Way]
    chosen: str

    @property
    def ready(self) -> bool:
        """Whether `collect` can begin as it is set."""
        return self.rows.state != "missing" and all(way.ready for way in self.ways if way.name == self.chosen)

    def document(self) -> Row:
        """As JSON."""
        ways = [way.document() for way in self.ways]
        return {"ready": self.ready, "chosen": self.chosen, "rows": vars(self.rows), "ways": ways}


def containers(rows: Sequence[Row], program: str | None) -> Way:
    """What running in containers needs. program: an engine that answers, None where there is none."""
    if program is None:
        said = "; ".join(f"{name} {why}" for name, why in engine.refusals().items())
        way_out = "Install Docker or Podman and start it."
        return Way("containers", [Part("engine", "missing", said, way_out), architecture(), memory()])
    info = engine.info(program)
    parts = [Part("engine", "ok", f"{program}, {'rootless' if info.rootless else 'as root'}"), *_ids(info)]
    missing = sorted({engine.image_of(row) for row in rows} - engine.images(program))
    storage = disk(info.storage or Path("/"), ALL_IMAGES_GB * 1000 * len(missing) // ALL_IMAGES, "images")
    return Way("containers", [*parts, architecture(), memory(), *_images(program, rows, missing), storage])


def _ids(info: engine.Info) -> list[Part]:
    """Whether a rootless engine has user ids to give to containers."""
    if not info.rootless:
        return []
    user = pwd.getpwuid(os.getuid()).pw_name
    given = Path("/etc/subuid")
    lines = given.read_text().splitlines() if given.exists() else []
    if any(line.split(":")[0] in (user, str(os.getuid())) for line in lines):
        return [Part("user ids", "ok", f"{user} has some in {given}")]
    way_out = f"sudo usermod --add-subuids 100000-165535 --add-subgids 100000-165535 {user}"
    return [Part("user ids", "missing", f"{user} has none in {given}, which rootless containers need", way_out)]


def architecture() -> Part:
    """Whether the official images run on this kind of machine."""
    machine = platform.machine()
    if machine == "x86_64":
        return Part("architecture", "ok", machine)
    return Part("architecture", "missing", f"{machine}; the official images are for x86_64", "Use clones instead.")


def memory() -> Part:
    """Whether one run of tests under its limit fits; several go on at once only where there is more."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    kib = {name: int(value.split()[0]) for name, _, value in (line.partition(":") for line in lines)}
    total, needed = kib["MemTotal"] >> 10, TEST_LIMITS.memory_mb
    said = f"{total} MiB; one run of tests may take {needed}"
    return Part("memory", "ok", said) if total >= needed else Part("memory", "missing", said, "Take a larger machine.")


def _images(program: str, rows: Sequence[Row], missing: Sequence[str]) -> list[Part]:
    """How many images are here, and whether one of the others can be had."""
    total = len({engine.image_of(row) for row in rows})
    said = f"{total - len(missing)} of {total} are here"
    if not missing:
        return [Part("images", "ok", said)] if total else []
    reason = engine.refused_manifest(program, missing[0], MANIFEST_S)
    if reason is None:
        return [Part("images", "ok", f"{said}; the others are fetched when they are first used")]
    way_out = "Connect to the registry, or load the images with the engine."
    return [Part("images", "missing", f"{said}; {missing[0]} cannot be fetched ({reason})", way_out)]


def disk(folder: Path, needed_mb: int, what: str) -> Part:
    """Whether what is still to come fits below a folder, which need not be there yet."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free_mb = shutil.disk_usage(existing).free // 1_000_000
    said = f"{free_mb / 1000:.0f} GB free at {existing}; {what} to come need about {needed_mb / 1000:.1f}"
    return Part("disk", "ok", said) if free_mb >= needed_mb else Part("disk", "missing", said, "Make room there.")
