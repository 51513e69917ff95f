"""Streams and disks that cannot be written, keys that no request can carry: one sentence, the right exit code."""

import json
import subprocess
import sys

import pytest
from support.command_line import call, command, environment, model
from support.limits import file_size_limit


def shell(made, words, redirection, **more):
    """Run a command in a shell of its own, with its streams redirected."""
    quoted = " ".join(f"'{word}'" for word in command(*words))
    # Without PYTHONUNBUFFERED, what is printed may stay in a buffer until the interpreter ends.
    variables = {**environment(made, **more), "PYTHONUNBUFFERED": ""}
    return subprocess.run(
        ["bash", "-c", f"{quoted} {redirection}"], capture_output=True, text=True, timeout=120, env=variables
    )


WORDS = [["status"], ["status", "--json"], ["show", "collect"], ["query", "select 1"], ["--help"], ["--version"]]


@pytest.mark.parametrize("run", ["here", "in a shell"])
def test_a_full_stdout_is_one_sentence(made, run):
    for words in WORDS if run == "here" else WORDS[:1]:
        done = call(made, *words, stdout="/dev/full") if run == "here" else shell(made, words, ">/dev/full")
        assert done.returncode == 5 and "The output cannot be written" in done.stderr, words
        assert "No space left" in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr


def test_a_closed_stdout_is_refused_before_any_work(made, tmp_path):
    done = shell(tmp_path, ["extract-pairs"], ">&-")
    assert done.returncode == 2 and done.stderr.startswith("stdout is closed") and len(done.stderr.splitlines()) == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("redirection", ["2>&-", "2>/dev/full"])
def test_a_missing_stderr_changes_neither_exit_code_nor_result(made, redirection):
    done = shell(made, ["show", "nothing", "--json"], redirection)
    assert done.returncode == 4 and json.loads(done.stdout)["exit_code"] == 4


@pytest.mark.parametrize("num_kib", [4, 36], ids=["no reserve", "no answer"])
def test_a_limit_on_the_size_of_files_is_one_sentence_and_nothing_is_lost(server, tmp_path, monkeypatch, num_kib):
    words = ["collect", *model(server), "-s", "tasks=2", "-s", "samples=2", "-q"]
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # a limit would cut off files of bytecode
    with file_size_limit(num_kib * 1024):
        done = call(tmp_path, *words)
    assert done.returncode == 5 and "The disk is full or cannot be written" in done.stderr, done.stderr
    assert "ulimit -f" in done.stderr and "Traceback" not in done.stderr
    resumed = call(tmp_path, *words, "--resume")
    assert resumed.returncode == 0, resumed.stderr


@pytest.mark.parametrize("value", ["sk-one\nsk-two", "sk-one\r\nX-Header: y", "sk-one\x1b[0m", "schlüssel-1"])
def test_a_key_that_no_header_can_carry_is_refused(run_command, value, monkeypatch):
    monkeypatch.setenv("SOME_API_KEY", value)
    words = ["-s", "policy.base_url=http://127.0.0.1:9/v1", "-s", "policy.api_key_env=SOME_API_KEY"]
    code, _, err = run_command("collect", "--policy", "m", *words)
    assert code == 2 and "SOME_API_KEY holds a " in err and "so it is not a key" in err and "sk-" not in err
