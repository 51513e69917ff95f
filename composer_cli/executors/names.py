"""The word behind --on, looked up in one place."""

from collections.abc import Callable
from difflib import get_close_matches
from pkgutil import resolve_name

from composer_cli.executors.base import Executor
from stages.backends.engine import ENGINES, WORDS
from stages.errors import UsageError

EXECUTORS = {
    "slurm": "composer_cli.executors.slurm:Slurm",
    "hf-jobs": "composer_cli.executors.hf_jobs:HfJobs",
    "modal": "composer_cli.executors.modal_sandbox:ModalSandbox",
}
"""Where a whole chain can be submitted. Each is imported when it is wanted."""
LOCAL = "local"


def executor(word: str) -> Executor | None:
    """The executor of this name; None for `local` and engines of workers, where a chain runs in this process."""
    if word == LOCAL or word.partition(":")[0] in ENGINES:
        return None
    if word not in EXECUTORS:
        near = get_close_matches(word, [LOCAL, *EXECUTORS, *ENGINES], n=1)
        hint = f"Did you mean {near[0]}? " if near else ""
        raise UsageError(f"There is no executor {word!r}. {hint}There are: {', '.join([LOCAL, *EXECUTORS])}, {WORDS}.")
    return found(word)


def found(word: str) -> Executor:
    """One of those that there are."""
    made: Callable[[], Executor] = resolve_name(EXECUTORS[word])
    return made()
