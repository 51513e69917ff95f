"""`composer serve`: what it starts and prints, and how it ends; a program stands in vLLM's place.

What it answers in this process is tested in test_completions.py.
"""

import json
import os
import re
import shlex
import signal
import socket
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path

import openai
import pytest
from support import blocks
from support.command_line import call, environment, until
from support.models import save_tiny

from composer_cli import serve
from composer_stages.errors import BadInput
from composer_stages.policy.base import PolicyConfig
from composer_stages.policy.server import OWN
from composer_stages.runs import queries
from composer_stages.runs.run import Run

PROGRAM = f"""#!{sys.executable}
import http.server, sys
print("started", *sys.argv[1:], flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(b'{{"data": []}}')
http.server.HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""
without_vllm = pytest.mark.skipif(OWN.exists(), reason="vLLM is installed here, which would serve")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model"), characters=None)


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "python"
    path.write_text(PROGRAM)
    path.chmod(0o755)
    return path


@contextmanager
def serving(tmp_path: Path, *words: object, vllm: Path | str = "") -> Iterator[tuple[BaseProcess, str]]:
    """`composer serve WORDS` in a process, once it answers; yields what it printed too."""
    env = environment(tmp_path / "artifacts", COMPOSER_VLLM=str(vllm))
    process, printed = blocks.start(["serve", *map(str, words), "--quiet"], tmp_path, env), tmp_path / blocks.PRINTED
    try:
        printed.touch()
        until(lambda: not process.is_alive() or re.search(r"(base_url=.*|\})\n", printed.read_text()))
        yield process, printed.read_text()
    finally:
        process.kill()
        process.join()


def printed_command(printed: str) -> list[str]:
    """The words behind `composer` of the command that a server has printed, as a shell reads them."""
    program, *words = shlex.split(printed.partition("\n")[2].replace("\\\n", ""))
    assert program == "composer"
    return words


def starts(log: str) -> list[str]:
    return re.findall(r"^started .*", Path(log).read_text(), re.M)


def test_serve_restarts_a_dead_server_and_ends_at_sigterm(tmp_path: Path, program: Path, model: Path) -> None:
    words = (model, "--json", "--set", "server.args.max-model-len=512")
    with serving(tmp_path, *words, vllm=program) as (process, printed):
        told = json.loads(printed)
        assert (told["model"], told["program"]) == (f"vllm:{model}", "vllm")
        assert urllib.request.urlopen(told["url"] + "/models").status == 200
        (first,) = starts(told["log"])
        assert f"--model {model}" in first and "--max-model-len 512" in first and "--dtype float32" in first
        assert "--max-lora-rank 16" in first, "room for the adapters of a training"
        os.kill(int(told["pid"]), signal.SIGKILL)
        until(lambda: not process.is_alive() or len(starts(told["log"])) == 2)
        assert process.is_alive(), "a server that dies is started again"
        process.terminate()
        process.join(30)
        assert process.exitcode == 143
        with pytest.raises(OSError, match="refused"):
            urllib.request.urlopen(told["url"] + "/models")


def test_the_command_printed_with_vllm_is_accepted(tmp_path: Path, program: Path, model: Path) -> None:
    with serving(tmp_path, model, "--set", "max_tokens=9", vllm=program) as (_, printed):
        command = printed_command(printed)
        done = call(tmp_path / "artifacts", *command, "--dry-run")
        assert done.returncode == 0, done.stderr
        assert f"policy.model=vllm:{model}" in command and "policy.max_tokens=9" in command


@without_vllm
def test_the_command_printed_without_vllm_works(tmp_path: Path) -> None:
    words = ("kata:student", "--set", "temperature=0.5", "--set", "max_tokens=48")
    with serving(tmp_path, *words) as (process, printed):
        done = call(tmp_path / "artifacts", *printed_command(printed), "-s", "tasks=1", "-s", "samples=2", "--json")
        assert done.returncode == 0, done.stderr
        run = Run(Path(json.loads(done.stdout)["path"]))
        asked = run.manifest.config["policy"]
        assert (asked["model"], asked["temperature"], asked["max_tokens"]) == ("kata:student", 0.5, 48)
        [first, second] = queries.page(run, queries.RolloutFilter(), 0, 9).rows  # type: ignore[union-attr]
        assert first["error_type"] is second["error_type"] is None
        process.terminate()
        process.join(30)
        assert process.exitcode == 143
    assert "Traceback" not in (tmp_path / blocks.PRINTED).read_text()


@without_vllm
def test_a_signal_ends_the_server_while_it_samples(tmp_path: Path, model: Path) -> None:
    """Requests of different temperatures are sampled one after the other: the last ones are not reached."""
    with serving(tmp_path, model, "--json") as (process, printed), ThreadPoolExecutor(16) as threads:
        told = json.loads(printed)
        assert (told["model"], told["program"], told["pid"]) == (str(model), "composer", process.pid)
        client = openai.OpenAI(base_url=told["url"], api_key="EMPTY", max_retries=0)
        messages = [{"role": "user", "content": "Hello"}]
        answers = [
            threads.submit(
                client.chat.completions.create,
                model=str(model),
                messages=messages,  # type: ignore[arg-type]
                temperature=1 + number / 100,
            )
            for number in range(16)
        ]
        time.sleep(0.5)  # of the seconds that 16 times 2,000 tokens take
        os.kill(process.pid or 0, signal.SIGINT)
        process.join(15)
        assert process.exitcode == 130
        errors = [error for answer in answers if (error := answer.exception(15))]
        ended = [error for error in errors if isinstance(error, openai.InternalServerError)]
        assert ended and all("ending" in str(error) for error in ended)
        rest = {type(error) for error in errors} - {openai.InternalServerError}
        assert rest <= {openai.APIConnectionError}, "of requests that the server had not taken yet"
        client.close()


def test_a_server_that_fails_to_start_is_reported_at_once(tmp_path: Path, program: Path, model: Path) -> None:
    """The program ends, the port is taken, the model is missing or damaged: each in seconds, with its exit code."""
    began, artifacts = time.monotonic(), tmp_path / "artifacts"
    # What an earlier start has written is not why this one ended.
    log = artifacts / "serve" / model.name / "vllm.log"
    log.parent.mkdir(parents=True)
    log.write_text("an old line\n")
    program.write_text(f"#!{sys.executable}\nraise SystemExit('no such head size')")
    done = call(artifacts, "serve", model, COMPOSER_VLLM=str(program))
    assert done.returncode == 3 and "no such head size" in done.stderr and "an old line" not in done.stderr
    assert str(log) in done.stderr
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = call(artifacts, "serve", model, "--port", port, COMPOSER_VLLM=str(program))
        assert done.returncode == 2 and f"Port {port} cannot be used" in done.stderr
        if not OWN.exists():
            done = call(artifacts, "serve", model, "--port", port, COMPOSER_VLLM="")
            assert done.returncode == 2 and f"Port {port} cannot be used" in done.stderr and done.stdout == ""
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "config.json").write_text((model / "config.json").read_text())
    for words, code in (((tmp_path / "nothing",), 4), ((empty,), 4), (("kata:nobody",), 4)):
        done = call(artifacts, "serve", *words, COMPOSER_VLLM="")
        assert (done.returncode, done.stdout) == (code, "") and str(words[0]) in done.stderr
    assert time.monotonic() - began < 15


@without_vllm
@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--set", "server.args.max-model-len=512"), "max-model-len"),
        (("--host", "0.0.0.0"), "api_key_env"),
        (("--host", "0.0.0.0", "--set", "api_key_env=NO_SUCH_KEY"), "NO_SUCH_KEY"),
        (("--host", "203.0.113.7", "--set", "api_key_env=SERVE_KEY"), "203.0.113.7"),
        (("--set", "device=gpu"), "gpu"),
        (("--set", "dtype=float99"), "float99"),
    ],
)
def test_a_start_that_cannot_succeed_is_refused(
    tmp_path: Path, model: Path, words: tuple[str, ...], named: str
) -> None:
    done = call(tmp_path, "serve", model, *words, COMPOSER_VLLM="", SERVE_KEY="secret")
    assert done.returncode == 2 and named in done.stderr and done.stdout == ""


@without_vllm
def test_all_addresses_are_served_with_a_key_alone(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERVE_KEY", "secret")
    with serving(tmp_path, model, "--host", "0.0.0.0", "--set", "api_key_env=SERVE_KEY") as (_, printed):
        command = printed_command(printed)
        url = command[command.index("--set", 2) + 1].partition("=")[2]
        assert url.startswith("http://127.0.0.1:") and "policy.api_key_env=SERVE_KEY" in command
        other = url.replace("127.0.0.1", "127.0.0.2")
        for key, seen in (("secret", True), ("other", False)):
            with openai.OpenAI(base_url=other, api_key=key, max_retries=0) as client:
                if seen:
                    assert [one.id for one in client.models.list().data] == [str(model)]
                else:
                    with pytest.raises(openai.AuthenticationError):
                        client.models.list()


def test_an_interpreter_that_does_not_exist_is_named(tmp_path: Path, model: Path) -> None:
    done = call(tmp_path / "artifacts", "serve", model, COMPOSER_VLLM="/nowhere/python")
    assert done.returncode == 2 and "The interpreter /nowhere/python" in done.stderr


def test_served_models_are_found_by_folder_name_or_run(tmp_path: Path, model: Path) -> None:
    assert serve.find_model(str(model), tmp_path).model == str(model)
    assert serve.find_model("kata:student-served", tmp_path).logs == tmp_path / "serve" / "kata-student-served"
    assert serve.find_model("Qwen/Qwen3-8B", tmp_path).model == "Qwen/Qwen3-8B"
    with pytest.raises(BadInput, match="There is no run 'nothing'"):
        serve.find_model("nothing", tmp_path)


def test_printed_client_settings_reproduce_the_served_policy(tmp_path: Path) -> None:
    url = "http://127.0.0.1:8000/v1"
    words = serve.client_words(url, PolicyConfig(model="kata:student", tool_calls="qwen3", temperature=0.0))
    assert words[1::2] == [
        "policy.model=kata:student",
        f"policy.base_url={url}",
        "policy.temperature=0.0",
        "policy.tool_calls=native",
    ]
    served = PolicyConfig(model="vllm:8", tool_calls="qwen3", chat_template_kwargs={"enable_thinking": False})
    assert serve.client_words(url, served)[5::2] == [
        'policy.chat_template_kwargs={"enable_thinking"=false}',
        "policy.tool_calls=qwen3",
    ]
    assert serve.client_words(url, PolicyConfig(model="8"))[1] == 'policy.model="8"', "a number is no name"
