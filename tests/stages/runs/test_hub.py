"""The hub of models: where it does not answer, one sentence within ten seconds, or what was fetched before."""

import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from subprocess import run

import pytest
from support.command_line import call_process
from support.models import save_tiny
from support.server import Reply, serving

from composer_stages.runs import activity, hub

REFUSED = "http://127.0.0.1:9"


@pytest.fixture
def silent() -> Iterator[str]:
    """A server that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


def test_a_hub_that_refuses_breaks_or_is_silent_is_unreachable_and_one_that_answers_is_not(silent: str) -> None:
    with serving(lambda body, n: Reply()) as there, serving(lambda body, n: Reply(), Reply(502)) as broken:
        started = time.monotonic()
        assert hub.unreachable(there.url) is None  # any answer will do, this one's is 404
        assert "cannot be reached" in (hub.unreachable(REFUSED) or "")
        assert "502" in (hub.unreachable(broken.url) or "")
        assert hub.unreachable(silent) is not None
        assert time.monotonic() - started < 10


def test_what_takes_long_is_told_and_then_withdrawn() -> None:
    told: list[str] = []
    with activity.on_activity(told.append):
        hub.unreachable("http://127.0.0.1:8")
    with activity.activity("nobody listens"):
        pass
    assert told == ["contacting http://127.0.0.1:8", ""]
    with activity.on_activity(told.append), activity.activity("opening"), activity.activity("loading"):
        pass
    assert told[2:] == ["opening", "loading", "opening", ""]


def test_details_of_an_activity_are_told_once_a_second_however_often_they_come() -> None:
    told: list[str] = []
    with activity.on_activity(told.append), activity.activity("sampling"):
        for number in range(100):
            activity.detail(f"{number} tokens")
    activity.detail("nothing runs")
    assert told == ["sampling", "sampling: 0 tokens", ""]


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("words", "refused"),
    [
        (["collect", "--dry-run"], False),
        pytest.param(["collect"], False, marks=SLOW),
        pytest.param(["collect"], True, marks=SLOW),
        pytest.param(["train"], True, marks=SLOW),
        pytest.param(["train", "--dry-run"], False, marks=SLOW),
    ],
)
def test_a_model_of_an_unreachable_hub_is_one_sentence_within_ten_seconds(
    words: list[str], refused: bool, tmp_path: Path, silent: str
) -> None:
    endpoint, env = REFUSED if refused else silent, {"HF_HOME": str(tmp_path), "PYTHONPATH": "."}
    started = time.monotonic()
    call_process(tmp_path, *words, "--policy", "./nowhere", **env)
    imports_s, started = time.monotonic() - started, time.monotonic()
    done = call_process(tmp_path, *words, "--policy", "Qwen/Qwen3-8B", HF_ENDPOINT=endpoint, **env)
    waited_s = time.monotonic() - started - imports_s
    assert done.returncode == 4 and endpoint in done.stderr and "Qwen/Qwen3-8B" in done.stderr
    lines = [line for line in done.stderr.splitlines() if not line.startswith(words[0])]
    assert len(lines) == 1, done.stderr
    assert waited_s < 10, "what Python takes to import on a busy machine left out"


def test_a_model_that_was_fetched_before_is_used_without_the_hub(tmp_path: Path) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    kept = tmp_path / "hub" / "models--us--tiny"
    (kept / "refs").mkdir(parents=True)
    (kept / "refs" / "main").write_text(commit)
    save_tiny(kept / "snapshots" / commit)
    code = "from composer_stages.runs import hub; print(hub.source('us/tiny'))"
    env = {"HF_ENDPOINT": REFUSED, "HF_HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    done = run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == str(kept / "snapshots" / commit)
