"""What a sandbox promises, for both kinds where both promise it."""

import sys
from pathlib import Path

import pytest
from support.refusals import refused

from composer_stages.errors import UsageError
from composer_stages.sandbox import KINDS, Limits, Sandbox, View, open_sandbox, probe
from tests.stages.sandbox.conftest import count_processes


def test_output_and_return_code_come_back(either: Sandbox) -> None:
    result = either.run("echo out; echo err >&2; exit 3")
    assert (result.output, result.returncode, result.output_bytes) == ("out\nerr\n", 3, 8)
    assert not result.timed_out and result.killed_for is None and 0 < result.duration_s < 3


def test_files_persist_and_cwd_and_variables_do_not(either: Sandbox, work: Path) -> None:
    start = either.run("pwd").output
    either.run("mkdir sub; echo kept > sub/file; cd sub; export LEFT=over")
    assert either.run('pwd; echo "[$LEFT]"; cat sub/file').output == f"{start}[]\nkept\n"
    assert (work / "sub/file").read_text() == "kept\n"


def test_work_folder_is_testbed_under_bubblewrap(box: Sandbox) -> None:
    assert box.run("pwd; echo $HOME; id -un; hostname").output == "/testbed\n/home/agent\nagent\nsandbox\n"


def test_exit_codes_of_unusual_commands(either: Sandbox) -> None:
    for impossible in ("echo \x00", "echo " + "x" * 200_000):
        assert either.run(impossible).returncode == 126
    for command, output, returncode in (
        ("kill -TERM $$", "", 128 + 15),
        ("set -o pipefail; yes | head -n 1", "y\n", 128 + 13),
        ("exec >&- 2>&-; sleep 0.2; touch late", "", 0),
        ("ls", "late\n", 0),
        (r"printf 'a\xff\x00b'", "a\ufffd\x00b", 0),
        ("echo '\ud800'", "?\n", 0),
        ("cat; echo end", "end\n", 0),  # standard input is empty
    ):
        result = either.run(command)
        assert (result.output, result.returncode) == (output, returncode), command


def test_time_out_keeps_the_output_and_leaves_nothing(either: Sandbox, mark: str) -> None:
    result = either.run(f"echo begun; sleep {mark} & sleep {mark}", wall_s=1.0)
    assert (result.output, result.returncode, result.timed_out, result.killed_for) == ("begun\n", 124, True, None)
    assert 1.0 <= result.duration_s < 6
    assert count_processes(mark) == 0


def test_background_process_does_not_hang_the_reader(either: Sandbox, mark: str) -> None:
    result = either.run(f"(while true; do echo again; sleep 0.01; done) & sleep {mark} & echo done; exit 4")
    assert result.returncode == 4 and "done" in result.output and result.duration_s < 6
    assert count_processes(mark) == 0


def test_long_output_keeps_head_and_tail(either: Sandbox) -> None:
    result = either.run("echo HEAD; seq 100000; echo TAIL")
    assert result.output.startswith("HEAD\n1\n") and result.output.endswith("100000\nTAIL\n")
    assert "bytes left out" in result.output
    assert len(result.output) <= 8192 < result.output_bytes == 588_895 + 10


def test_environment_is_fixed_and_given(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "host-only")
    for kind in KINDS:
        with open_sandbox(kind, work, view=View(env={"EXTRA": "given"})) as sandbox:
            names = sandbox.run("env | grep -v ^_= | cut -d= -f1 | sort").output.split()
        fixed = ["GIT_TERMINAL_PROMPT", "HOME", "LANG", "PAGER", "PATH", "PYTHONDONTWRITEBYTECODE", "PYTHONHASHSEED"]
        assert names == sorted([*fixed, "EXTRA", "PWD", "SHLVL"])


def test_a_given_variable_cannot_subvert_the_supervisor(work: Path) -> None:
    (work / "struct.py").write_text("print('subverted')")
    for kind, inside in (("bubblewrap", "/testbed"), ("none", str(work))):
        with open_sandbox(kind, work, view=View(env={"PYTHONPATH": inside})) as sandbox:
            assert sandbox.run("python3 -c 'import struct'").output == "subverted\n"


def test_two_sandboxes_do_not_meet(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    with open_sandbox("bubblewrap", folders[0]) as one, open_sandbox("bubblewrap", folders[1]) as other:
        one.run("echo private > /tmp/note; echo own > file")
        assert other.run("ls /tmp /testbed").output == "/testbed:\n\n/tmp:\n"


def test_close_ends_everything(work: Path) -> None:
    sandbox = open_sandbox("bubblewrap", work)
    assert count_processes(str(work)) > 0
    sandbox.close()
    assert count_processes(str(work)) == 0
    sandbox.close()


def test_wrong_arguments_are_refused(work: Path) -> None:
    absent = work / "absent"
    for call, code in (
        (lambda: open_sandbox("docker", work), "unknown-kind"),
        (lambda: probe("docker"), "unknown-kind"),
        (lambda: open_sandbox("none", absent), "work-folder-missing"),
        (lambda: open_sandbox("none", work, view=View(readonly=[absent])), "shown-path-missing"),
        (lambda: Limits(processes=0), "limit-not-positive"),
        (lambda: Limits(output_bytes=10), "output-limit-too-low"),
    ):
        refused(call, UsageError, code=f"sandbox.{code}")


def test_readonly_and_hidden_paths(work: Path, tmp_path: Path) -> None:
    (shown := tmp_path / "shown").mkdir()
    for name in ("answer.py", "other.py"):
        (shown / name).write_text("content\n")
    read = f"cat {shown}/answer.py {shown}/other.py"
    with open_sandbox("bubblewrap", work, view=View(readonly=[shown])) as sandbox:
        assert sandbox.run(read).output == "content\ncontent\n"
        assert "Read-only" in sandbox.run(f"touch {shown}/new").output
    with open_sandbox("bubblewrap", work, view=View(readonly=[shown], hidden=[shown / "answer.py"])) as sandbox:
        result = sandbox.run(read)
        assert result.output.count("content") == 1 and result.returncode != 0
        assert sandbox.run(f"umount {shown}/answer.py").returncode != 0


def test_bundled_wheels_are_hidden(work: Path) -> None:
    bundled = Path(sys.base_prefix) / f"lib/python3.{sys.version_info.minor}/ensurepip/_bundled"
    with open_sandbox("bubblewrap", work) as sandbox:
        assert sandbox.run(f"ls {bundled} | wc -l").output.strip() == "0"
        assert sandbox.run("python3 -m ensurepip --root /tmp/x").returncode != 0
