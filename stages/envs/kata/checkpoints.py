"""The small models of kata: ordinary Hugging Face folders in `models/`, whose README.md says how each was built.

Their weights are float16 in the file and are loaded as float32. `./dev models` builds them again.
"""

from difflib import get_close_matches
from pathlib import Path

from composer_stages.errors import BadInput
from composer_stages.runs import store
from composer_stages.runs.run import Listener

FOLDER = Path(__file__).parent / "models"
WEIGHTS = "model.safetensors"


def folder_of(name: str) -> Path:
    """Return the folder of a model; raise BadInput for an unknown one."""
    names = sorted(path.parent.name for path in FOLDER.glob(f"*/{WEIGHTS}"))
    if name not in names:
        raise BadInput("envs.kata.unknown-model", name=name, names=names, close=get_close_matches(name, names, 1))
    return FOLDER / name


def recipe_fingerprint(name: str) -> str:
    """Return the SHA-256 of a model's weights."""
    return store.file_sha256(folder_of(name) / WEIGHTS)


def to_make(name: str) -> str:
    """Return nothing: a model that is known is there."""
    folder_of(name)
    return ""


def ensure(name: str, progress: Listener) -> Path:
    """Return the folder of a model."""
    del progress
    return folder_of(name)
