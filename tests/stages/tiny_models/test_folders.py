"""Folders of small models: complete or absent, also after a signal."""

import os
import signal
import time
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from stages.runs.activity import Dropped, dropped_on_stop, stopped_by
from stages.runs.run import Interrupted, Manifest, RunWriter
from stages.runs.runner import stop_on_signals
from stages.tiny_models.folders import ensure_folder


class Saved:
    """A model or tokenizer that writes one file, then what it is given to do."""

    def __init__(self, then: Any = None) -> None:
        self.then = then

    def save_pretrained(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        (folder / "weights").write_text("1")
        if self.then:
            self.then()


def stop_now() -> None:
    """Get the signal, then do what takes long, were it not ended."""
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(30)


@pytest.mark.parametrize("when", ["building", "saving"])
def test_a_signal_ends_a_build_at_once_and_leaves_no_folder(tmp_path: Path, when: str) -> None:
    def build() -> tuple[Any, Any, str]:
        if when == "building":
            stop_now()
        return Saved(stop_now), Saved(), "card"

    record = Manifest(
        composer="1",
        stage="collect",
        stage_version=1,
        fingerprint="f",
        label="l",
        started_at="",
        config={},
        identity={},
    )
    writer = RunWriter(tmp_path / "run", record, cache=tmp_path)
    started = time.monotonic()
    with pytest.raises(Interrupted), stop_on_signals(writer) as caught:
        ensure_folder(tmp_path / "models" / "m", build)
    assert time.monotonic() - started < 5 and caught == [signal.SIGTERM] and writer.stop.is_set()
    assert [path.name for path in (tmp_path / "models").iterdir()] == [".m.lock"]
    assert (ensure_folder(tmp_path / "models" / "m", lambda: (Saved(), Saved(), "card")) / "weights").exists()


def test_what_is_not_kept_does_not_begin_after_a_signal() -> None:
    stop = Event()
    with stopped_by(stop):
        with dropped_on_stop():
            stop.set()
        with pytest.raises(Dropped), dropped_on_stop():
            raise AssertionError("it began")
    with dropped_on_stop():
        pass
