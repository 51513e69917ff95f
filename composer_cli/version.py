"""Which Composer this is, and whether both of its packages are really its own."""

from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

DISTRIBUTION = "composer-post-training"
HERE = Path(__file__).resolve().parent


def intruder() -> str | None:
    """A sentence when the package that Python finds as `stages` is another project's; None when all is well."""
    spec = find_spec("stages")
    found = [Path(place).resolve() for place in (spec.submodule_search_locations or [])] if spec else []
    if HERE.parent / "stages" in found[:1]:
        return None
    where = f"finds it in {found[0]}" if found else "finds none"
    return (
        f"Composer needs its own package `stages`, which lies in {HERE.parent}, but Python {where}. "
        "Uninstall the other package, or use Composer from a virtual environment of its own (`./dev` makes one)."
    )


def about() -> str:
    """Name, version and place, since two other projects install a command of this name."""
    return (
        f"Composer {metadata.version(DISTRIBUTION)}, the pipeline for post-training coding agents, from {HERE.parent}"
    )
