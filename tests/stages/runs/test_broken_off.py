"""An attempt whose files cannot be reached any more after work was done: exit code 1, and what is saved where."""

import errno
from pathlib import Path
from shutil import rmtree
from typing import Any

import pytest

from composer_stages.errors import Breakdown, ComposerError
from composer_stages.runs import runner
from composer_stages.runs.run import Manifest, RunWriter, write_manifest


def writer(folder: Path) -> RunWriter:
    """The writer of an attempt that has begun in this folder."""
    record = Manifest(composer="", stage="collect", stage_version=1, fingerprint="", attempts=1)
    folder.mkdir(parents=True)
    write_manifest(folder, record)
    return RunWriter(folder, record, cache=folder.parent)


def fail(out: RunWriter, error: OSError | None) -> None:
    """Write a unit in an attempt, then fail by this error, or in a folder that is gone."""
    with runner._attempt(out):
        out.write("unit", {"a": 1})
        if error is not None:
            raise error
        rmtree(out.path)
        (out.path / "report.txt").write_text("")


@pytest.mark.parametrize(
    ("code", "name", "remedy"),
    [(errno.EMFILE, None, "ulimit -n"), (errno.EPERM, "units", "permissions"), (errno.EACCES, "units", "permissions")],
)
def test_after_work_it_is_a_failure_that_says_what_is_saved(tmp_path: Path, code: int, name: Any, remedy: str) -> None:
    out = writer(tmp_path / "run")
    with pytest.raises(ComposerError, match=f"Everything finished is saved in {out.path}.*{remedy}") as ended:
        fail(out, OSError(code, "as the system says", name))
    assert type(ended.value) is Breakdown and ended.value.exit_code == 5


def test_a_deleted_folder_is_said_to_be_gone(tmp_path: Path) -> None:
    out = writer(tmp_path / "run")
    with pytest.raises(ComposerError, match="was deleted while the run worked in it"):
        fail(out, None)


def test_before_any_work_it_is_the_error_itself(tmp_path: Path) -> None:
    out = writer(tmp_path / "run")
    with pytest.raises(FileNotFoundError), runner._attempt(out):
        (tmp_path / "no-such-file").read_bytes()
