"""Small models as folders: made on first use by one process, whole, and known by all that determines their bytes."""

import ast
import os
from collections.abc import Callable
from functools import cache
from importlib.metadata import version
from pathlib import Path
from shutil import rmtree
from typing import Any

from filelock import FileLock

OWN = tuple(Path(__file__).parent / name for name in ("tokenizer.py", "training.py", "schedule.py"))
LIBRARIES = ("torch", "transformers", "tokenizers", "safetensors")
Progress = Callable[[str, int, int], None]
"""Called with what is being done, steps done, steps in all."""
Made = tuple[Any, Any, str]
"""A model, its tokenizer, and the text of its model card."""


def kept(folder: Path, make: Callable[[], Made]) -> Path:
    """The folder, made first if it is not there. Several processes may ask at once: one makes it, the others wait.

    Whatever `make` or the saving raises is raised, and leaves no folder of that name.
    """
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_name(f".{folder.name}.lock")):
            if not folder.is_dir():
                _save(folder, *make())
    return folder


def _save(folder: Path, model: Any, tokenizer: Any, card: str) -> None:
    """Write beside the folder and rename, so that a folder of that name is whole."""
    unfinished = folder.with_name(f".{folder.name}.{os.getpid()}")
    model.save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    (unfinished / "README.md").write_text(card)
    try:
        unfinished.rename(folder)
    finally:
        rmtree(unfinished, ignore_errors=True)


@cache
def sources_identity(sources: tuple[Path, ...]) -> dict[str, str]:
    """The syntax trees of these files and of the training (so layout does not count), and the libraries' versions."""
    code = {f"{s.parent.name}/{s.name}": ast.dump(ast.parse(s.read_text())) for s in (*OWN, *sources)}
    return code | {library: version(library) for library in LIBRARIES}
