"""A job of Slurm that is cancelled."""

import sys
from pathlib import Path

import pytest
from support.server import Server

from composer_cli.executors.base import SubmittedChain
from composer_cli.executors.slurm import Slurm, SlurmSettings
from tests.crash.test_stops import assert_cancellation_ends_job, server

__all__ = ["server"]


@pytest.mark.slow
@pytest.mark.parametrize("group", [False, True])
def test_a_cancelled_job_ends_as_the_command_does(tmp_path: Path, server: Server, group: bool) -> None:
    def batch_script(submitted: SubmittedChain) -> str:
        return str(Slurm().spec(submitted, SlurmSettings(python=sys.executable))["script"])

    assert_cancellation_ends_job(tmp_path, server, batch_script, group)
