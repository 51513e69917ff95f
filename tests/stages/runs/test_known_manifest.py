"""A manifest that did not change is read once in a process, and one that changed is never taken from memory."""

import time
from pathlib import Path

from stages.runs.run import Manifest, known_manifest, write_manifest
from stages.runs.store import CTIME_MARGIN_S


def test_an_unchanged_manifest_is_read_once_and_a_changed_one_anew(tmp_path: Path) -> None:
    record = Manifest(composer="", stage="collect", stage_version=1, fingerprint="", status="complete")
    write_manifest(tmp_path, record)
    assert known_manifest(tmp_path) is not known_manifest(tmp_path), "a change might not show yet"
    time.sleep(CTIME_MARGIN_S + 0.1)
    first = known_manifest(tmp_path)
    assert known_manifest(tmp_path) is first
    write_manifest(tmp_path, record.model_copy(update={"label": "changed"}))
    assert known_manifest(tmp_path).label == "changed"
