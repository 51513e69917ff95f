"""What Slurm says about a job, and what is made of it."""

import os

import pytest

from composer_cli.executors.base import follow_log
from composer_cli.executors.slurm import Slurm
from composer_stages.errors import InfrastructureError

FORGOTTEN = "slurm_load_jobs error: Invalid job id specified"


@pytest.mark.parametrize(
    ("says", "left", "status", "detail"),
    [
        ("JobState=PENDING Reason=Resources Restarts=0", None, "queued", "Resources"),
        ("JobState=PENDING Reason=BeginTime Restarts=1", "143", "queued", "attempt 2, BeginTime"),
        ("JobState=RUNNING Reason=None Restarts=2", None, "running", "attempt 3"),
        ("JobState=COMPLETED ExitCode=0:0", None, "complete", ""),
        ("JobState=FAILED ExitCode=3:0", None, "failed", "exit code 3: incomplete"),
        ("JobState=TIMEOUT ExitCode=0:0", "143", "interrupted", "exit code 143"),
        ("JobState=NODE_FAIL ExitCode=0:0", None, "failed", "NODE_FAIL"),
        ("JobState=CANCELLED ExitCode=0:15", "143", "cancelled", ""),
        (FORGOTTEN, "0", "complete", ""),
        (FORGOTTEN, "143", "interrupted", "exit code 143"),
        (FORGOTTEN, None, "lost", "Slurm has forgotten it"),
    ],
)
def test_the_state_comes_from_scontrol_or_from_the_exit_code_file(tmp_path, monkeypatch, says, left, status, detail):
    stand_in(tmp_path, monkeypatch, says)
    if left is not None:
        (tmp_path / "exit-code").write_text(f"{left}\n")
    state = Slurm().state({"id": "7", "folder": str(tmp_path)})
    assert state.status == status and detail in state.detail and bool(state.detail) == bool(detail)


def test_a_controller_that_does_not_answer_raises(tmp_path, monkeypatch):
    stand_in(tmp_path, monkeypatch, "Unable to contact slurm controller error")
    with pytest.raises(InfrastructureError, match="Unable to contact slurm controller"):
        Slurm().state({"id": "7", "folder": str(tmp_path)})


def stand_in(folder, monkeypatch, says: str) -> None:
    """A scontrol that says this, on stderr and with a failure where it is an error."""
    program = folder / "bin" / "scontrol"
    program.parent.mkdir()
    end = ">&2; exit 1" if "error" in says else ""
    program.write_text(f'#!/bin/sh\necho "JobId=$4 {says}" {end}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")


def test_each_line_of_a_log_comes_once_and_whole():
    """A line that still grows is waited for, until nothing more comes."""
    texts, states = iter(["a\nb", "a\nbc\nd", "a\nbc\nde"]), iter([False, False, True])
    assert list(follow_log(lambda: next(texts), lambda: next(states), every_s=0)) == ["a", "bc", "de"]
