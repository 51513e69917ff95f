"""Models as folders, made on first use by one process and published complete."""

import os
from collections.abc import Callable
from pathlib import Path
from shutil import rmtree
from typing import Any

from filelock import FileLock

from stages.runs import store
from stages.stopping import dropped_on_stop


def users_cache() -> Path:
    """Return the folder of what is made or brought once for all folders of this user."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "composer"


BuiltModel = tuple[Any, Any, str]
"""A model, its tokenizer, and the text of its model card."""


def ensure_folder(folder: Path, build: Callable[[], BuiltModel]) -> Path:
    """Return the folder; build and save the model first if the folder is missing.

    Of several processes that call this at the same time one builds and the others wait. The model is saved under a
    temporary name, fsynced and renamed, so that a folder of that name is complete, also after a power cut. An error of
    `build` or of the saving is raised, and leaves no folder; a signal that stops the run does the same at once.
    """
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_name(f".{folder.name}.lock")):
        if not folder.is_dir():
            unfinished = folder.with_name(f".{folder.name}.{os.getpid()}")
            with dropped_on_stop():
                try:
                    model, tokenizer, card = build()
                    model.save_pretrained(unfinished)
                    tokenizer.save_pretrained(unfinished)
                    (unfinished / "README.md").write_text(card)
                    store.publish_folder(unfinished, folder)
                finally:
                    rmtree(unfinished, ignore_errors=True)
    return folder
