"""Streams and disks that cannot be written, keys that no request can carry: one sentence, the right exit code."""

import json
import subprocess

import pytest
from support.command_line import call, command, environment, model

from stages.errors import UsageError
from stages.redaction import secret_in


def shell(made, words, redirection, **more):
    """Run a command in a shell of its own, with its streams redirected."""
    quoted = " ".join(f"'{word}'" for word in command(*words))
    # Without PYTHONUNBUFFERED, what is printed may stay in a buffer until the interpreter ends.
    variables = {**environment(made, **more), "PYTHONUNBUFFERED": ""}
    return subprocess.run(
        ["bash", "-c", f"{quoted} {redirection}"], capture_output=True, text=True, timeout=120, env=variables
    )


WORDS = [["status"], ["status", "--json"], ["show", "collect"], ["query", "select 1"], ["--help"], ["--version"]]


@pytest.mark.parametrize(
    ("words", "in_shell"), [(["status"], True), *((words, False) for words in WORDS)], ids=lambda value: str(value)
)
def test_a_full_stdout_is_one_sentence(made, words, in_shell):
    done = shell(made, words, ">/dev/full") if in_shell else call(made, *words, stdout="/dev/full")
    assert done.returncode == 1 and "The output cannot be written" in done.stderr and "No space left" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_closed_stdout_is_refused_before_any_work(made, tmp_path):
    done = shell(tmp_path, ["extract-pairs"], ">&-")
    assert done.returncode == 2 and done.stderr.startswith("stdout is closed") and len(done.stderr.splitlines()) == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("redirection", ["2>&-", "2>/dev/full"])
def test_a_missing_stderr_changes_neither_exit_code_nor_result(made, redirection):
    done = shell(made, ["show", "nothing", "--json"], redirection)
    assert done.returncode == 4 and json.loads(done.stdout)["exit_code"] == 4


def test_a_closed_stderr_lets_a_command_succeed(made):
    assert shell(made, ["status", "--json"], "2>&-").returncode == 0


@pytest.mark.parametrize(
    "blocks",
    [4, pytest.param(16, marks=pytest.mark.slow), pytest.param(36, marks=pytest.mark.slow)],
    ids=["no database", "no answer", "no unit"],
)
def test_a_limit_on_the_size_of_files_is_one_sentence_and_nothing_is_lost(server_words, tmp_path, blocks):
    limited = tmp_path / "limited"
    quoted = " ".join(f"'{word}'" for word in command(*server_words))
    variables = environment(limited) | {"PYTHONDONTWRITEBYTECODE": "1"}  # a limit would cut off files of bytecode
    done = subprocess.run(
        ["bash", "-c", f"ulimit -f {blocks}; {quoted}"], capture_output=True, text=True, env=variables
    )
    assert done.returncode == 1 and "The disk is full or cannot be written" in done.stderr, done.stderr
    assert "ulimit -f" in done.stderr and "Traceback" not in done.stderr
    resumed = call(limited, *server_words, "--resume")
    assert resumed.returncode == 0, resumed.stderr


@pytest.fixture
def server_words(server):
    return ["collect", *model(server), "-s", "tasks=3", "-q"]


@pytest.mark.parametrize("value", ["sk-one\nsk-two", "sk-one\r\nX-Header: y", "sk-one\x1b[0m", "schlüssel-1"])
def test_a_key_that_no_header_can_carry_is_refused(value, monkeypatch):
    monkeypatch.setenv("SOME_API_KEY", value)
    with pytest.raises(UsageError, match=r"SOME_API_KEY holds a .* so it is not a key") as refused:
        secret_in("SOME_API_KEY")
    assert "sk-" not in str(refused.value)


def test_a_key_with_a_line_break_is_one_sentence(run_command, server, monkeypatch):
    monkeypatch.setenv("SOME_API_KEY", "sk-first-line\nsk-second-line")
    code, _, err = run_command("collect", *model(server), "-s", "policy.api_key_env=SOME_API_KEY", "-s", "tasks=1")
    assert code == 2 and "line break" in err and "sk-" not in err
