"""Build a wheel with setuptools in a temporary folder: setuptools leaves `build/` beside what it builds."""

from tempfile import TemporaryDirectory
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import (
    build_editable,
    build_sdist,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]


def build_wheel(
    wheel_directory: str, config_settings: dict[str, Any] | None = None, metadata_directory: str | None = None
) -> str:
    """Build a wheel into a folder and return its name, as PEP 517 asks for."""
    with TemporaryDirectory() as folder:
        settings = dict(config_settings or {})
        given = settings.get("--global-option", [])
        words = [given] if isinstance(given, str) else [*given]
        settings["--global-option"] = [*words, "build", f"--build-base={folder}"]
        return build_meta.build_wheel(wheel_directory, settings, metadata_directory)
