"""An interpreter with harbor, which needs Python 3.12: that of COMPOSER_HARBOR, or one that pip fills in a cache."""

import os
import shutil
import subprocess
from functools import cache
from pathlib import Path

VERSION = "0.26.0"
PLACE = Path("~/.cache/composer/harbor").expanduser() / VERSION


@cache
def interpreter() -> str | None:
    """The interpreter; None where there is none and none can be made."""
    if named := os.environ.get("COMPOSER_HARBOR"):
        return named if shutil.which(named) else None
    made = PLACE / "bin" / "python"
    if (PLACE / "done").exists():
        return str(made)
    pyenv = sorted(Path("~/.pyenv/versions").expanduser().glob("3.1[2-9].*/bin/python"))
    base = next((name for name in ("python3.12", "python3.13", *map(str, pyenv)) if _works(name)), None)
    if base is None:
        return None
    for words in ([base, "-m", "venv", "--clear", PLACE], [made, "-m", "pip", "install", "-q", f"harbor=={VERSION}"]):
        if subprocess.run(list(map(str, words)), capture_output=True, timeout=900, check=False).returncode:
            return None
    (PLACE / "done").write_text("")
    return str(made)


def _works(name: str) -> bool:
    """Whether this is a Python: pyenv has shims of versions that are not chosen, which only fail."""
    return (
        bool(shutil.which(name)) and not subprocess.run([name, "-c", ""], capture_output=True, check=False).returncode
    )


JUDGE = """
import sys
from pathlib import Path
from harbor.models.task.task import Task
for name in sys.argv[1:]:
    task = Task(Path(name))
    assert Task.is_valid_dir(name)
    print(task.name, len(task.instruction))
"""


def judged(folders: list[Path]) -> list[str]:
    """What harbor's own models read in the folders: name and length of the instruction, in order."""
    python = interpreter()
    assert python is not None
    words = [python, "-W", "error", "-c", JUDGE, *map(str, folders)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()
