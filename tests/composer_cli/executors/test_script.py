"""The shell script of a chain, executed by a shell."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.command_line import until

from composer_cli.executors.base import SubmittedChain
from composer_cli.executors.slurm import Slurm, SlurmSettings

TEXT = 'a = "$HOME `id` \\\\"\nEND\n'
"""What a shell would understand, and what looks like the end of a text."""
PROGRAM = """
import os, pathlib, signal, sys, time
words = sys.argv[1:]
folder = pathlib.Path(words[words.index("--artifacts") + 1])
pathlib.Path(folder, "words").write_text("\\n".join(words))
file = words[words.index("--preset") + 1]
pathlib.Path(folder, "copied").write_text(pathlib.Path(file).read_text())
pathlib.Path(folder, "variable").write_text(os.environ.get("GREETING", ""))
if "--wait" in words:
    code = int(words[words.index("--stopped") + 1]) if "--stopped" in words else 143
    if "--killed" not in words:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(code))
    pathlib.Path(folder, "ready").touch()
    time.sleep(30)
sys.exit(int(words[words.index("--code") + 1]))
"""


@pytest.fixture
def job(tmp_path: Path):
    """Start the batch script of a chain whose program is a stand-in; requeueing is kept in a file."""
    (tmp_path / "stand_in" / "composer_cli").mkdir(parents=True)
    (tmp_path / "stand_in" / "composer_cli" / "__init__.py").touch()  # else a package later on the path is taken
    (tmp_path / "stand_in" / "composer_cli" / "__main__.py").write_text(PROGRAM)
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.parent.mkdir()
    scontrol.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/requeued\n')
    scontrol.chmod(0o755)
    folder = tmp_path / "my artifacts" / "submitted" / "job"
    folder.mkdir(parents=True)

    def start(*words: str, restarted: int = 0, **where: object) -> subprocess.Popen[bytes]:
        chain = SubmittedChain("job", folder, ["run", "--preset", "preset.toml", *words], {"preset.toml": TEXT}, [])
        text = Slurm().spec(chain, SlurmSettings(python=sys.executable, **where))["script"]
        (tmp_path / "job.sh").write_text(text)
        path = f"{scontrol.parent}{os.pathsep}{os.environ['PATH']}"
        more = {"PATH": path, "SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": str(restarted)}
        env = {**os.environ, **more, "PYTHONPATH": str(tmp_path / "stand_in")}
        return subprocess.Popen(["/bin/sh", tmp_path / "job.sh"], env=env, cwd=tmp_path)

    return start


def test_files_and_words_arrive_as_they_were(job, tmp_path):
    words = ("--set", "collect.note=it's $HOME", "--code", "3")
    assert job(*words, env={"GREETING": "a 'b' $c"}, setup="cd /").wait(30) == 3
    root = tmp_path / "my artifacts"
    arrived = (root / "words").read_text().split("\n")
    assert arrived[0] == "run" and arrived[3:] == [*words, "--resume", "--artifacts", str(root)]
    assert (root / "copied").read_text() == TEXT
    assert (root / "variable").read_text() == "a 'b' $c"
    assert (root / "submitted" / "job" / "exit-code").read_text() == "3\n"
    assert not Path(arrived[2]).exists()


@pytest.mark.parametrize(
    ("sent", "restarted", "requeued"),
    [(signal.SIGUSR1, 0, True), (signal.SIGUSR1, 2, False), (signal.SIGTERM, 0, False)],
)
def test_a_warning_of_the_time_limit_requeues_and_a_cancellation_does_not(job, tmp_path, sent, restarted, requeued):
    started = job("--wait", restarted=restarted, restarts=2)
    until((tmp_path / "my artifacts" / "ready").exists)
    started.send_signal(sent)
    assert started.wait(30) == (0 if requeued else 143)
    assert (tmp_path / "requeued").exists() == requeued
    assert (tmp_path / "my artifacts" / "submitted" / "job" / "exit-code").exists() != requeued


def test_the_code_is_the_chains_own_also_where_it_is_gone_before_the_shell_looks(job, tmp_path):
    ready = tmp_path / "my artifacts" / "ready"
    codes = []
    for _ in range(12):  # a shell that took the code of its interrupted `wait` failed in one of four
        started = job("--wait", "--killed", restarted=2, restarts=2)
        until(ready.exists)
        started.send_signal(signal.SIGUSR1)
        codes.append(started.wait(30))
        ready.unlink()
    assert codes == [143] * 12


def test_a_chain_that_ends_just_before_the_warning_is_not_run_again(job, tmp_path):
    started = job("--wait", "--stopped", "1")
    until((tmp_path / "my artifacts" / "ready").exists)
    started.send_signal(signal.SIGUSR1)
    assert started.wait(30) == 1 and not (tmp_path / "requeued").exists()
