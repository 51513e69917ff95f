"""Folders of models are complete or absent, also after a failure or a signal."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from stages.policy.folders import ensure_folder
from stages.runs.run import Manifest, RunWriter
from stages.stopping import Dropped, Interrupted, dropped_on_stop, on_signals, stopped_by


def nothing() -> None:
    pass


class Saved:
    """A model or tokenizer that writes one file, then does what it is given to do."""

    def __init__(self, then: Callable[[], None] = nothing) -> None:
        self.then = then

    def save_pretrained(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        (folder / "weights").write_text("1")
        self.then()


def fail() -> None:
    raise OSError("no space left")


def stop_now() -> None:
    """Get the signal, then do what takes long, were it not ended."""
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(30)


@pytest.mark.parametrize(
    ("while_building", "while_saving", "error"),
    [(nothing, fail, OSError), (stop_now, nothing, Interrupted), (nothing, stop_now, Interrupted)],
)
def test_a_build_that_fails_or_is_stopped_leaves_no_folder_and_can_be_made_again(
    tmp_path: Path, while_building: Callable[[], None], while_saving: Callable[[], None], error: type[BaseException]
) -> None:
    def build() -> tuple[Any, Any, str]:
        while_building()
        return Saved(while_saving), Saved(), "card"

    record = Manifest(composer="1", stage="collect", stage_version=1, fingerprint="f")
    writer = RunWriter(tmp_path / "run", record, cache=tmp_path)
    started = time.monotonic()
    with pytest.raises(error), on_signals() as caught, stopped_by(writer.stop):
        ensure_folder(tmp_path / "models" / "m", build)
    assert time.monotonic() - started < 5
    assert writer.stop.is_set() == (caught == [signal.SIGTERM]) == (error is Interrupted)
    assert [path.name for path in (tmp_path / "models").iterdir()] == [".m.lock"]
    made = ensure_folder(tmp_path / "models" / "m", lambda: (Saved(), Saved(), "card"))
    assert (made / "weights").exists() and ensure_folder(made, fail) == made, "and is not built twice"


def test_what_is_not_kept_does_not_begin_after_a_signal() -> None:
    stop = Event()
    with stopped_by(stop):
        with dropped_on_stop():
            stop.set()
        with pytest.raises(Dropped), dropped_on_stop():
            raise AssertionError("it began")
    with dropped_on_stop():
        pass
