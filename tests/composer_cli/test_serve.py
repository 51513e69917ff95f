"""`composer serve` with a small program in vLLM's place: what it is asked for, what it says, and how it ends."""

import json
import os
import re
import signal
import sys
import urllib.request
from collections.abc import Iterator
from importlib.util import find_spec
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
from support import blocks
from support.command_line import call, environment, until
from support.models import save_tiny

from composer_cli import serve
from stages.errors import BadInput
from stages.policy.server import OWN

PROGRAM = f"""#!{sys.executable}
import http.server, sys
print("started", *sys.argv[1:], flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(b'{{"data": []}}')
http.server.HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model"))


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "python"
    path.write_text(PROGRAM)
    path.chmod(0o755)
    return path


@pytest.fixture
def serving(tmp_path: Path, program: Path, model: Path) -> Iterator[BaseProcess]:
    words = ["serve", str(model), "--json", "--set", "server.args.max-model-len=512", "--quiet"]
    process = blocks.start(words, tmp_path, environment(tmp_path / "artifacts", COMPOSER_VLLM=str(program)))
    yield process
    process.kill()
    process.join()


def starts(log: str) -> list[str]:
    return re.findall(r"^started .*", Path(log).read_text(), re.M)


def test_it_serves_until_sigterm_and_restarts_what_dies(serving: BaseProcess, model: Path, tmp_path: Path) -> None:
    printed = tmp_path / blocks.PRINTED
    until(lambda: not serving.is_alive() or (printed.exists() and printed.read_text().endswith("}\n")))
    told = json.loads(printed.read_text())
    assert (told["model"], told["program"]) == (f"vllm:{model}", "vllm")
    assert urllib.request.urlopen(told["url"] + "/models").status == 200
    (first,) = starts(told["log"])
    assert f"--model {model}" in first and "--max-model-len 512" in first and "--dtype float32" in first
    assert "--max-lora-rank 16" in first, "room for the adapters of a training"
    os.kill(int(told["pid"]), signal.SIGKILL)
    until(lambda: not serving.is_alive() or len(starts(told["log"])) == 2)
    assert serving.is_alive(), "a server that dies is started again"
    serving.terminate()
    serving.join(30)
    assert serving.exitcode == 143
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(told["url"] + "/models")


def test_without_any_server_it_says_what_to_install(tmp_path: Path, model: Path) -> None:
    if find_spec("fastapi") or OWN.exists():
        pytest.skip("a server is installed here")
    done = call(tmp_path / "artifacts", "serve", model, COMPOSER_VLLM="")
    assert done.returncode == 2 and "neither vLLM nor transformers' own server" in done.stderr


def test_an_interpreter_that_does_not_exist_is_named(tmp_path: Path, model: Path) -> None:
    done = call(tmp_path / "artifacts", "serve", model, COMPOSER_VLLM="/nowhere/python")
    assert done.returncode == 2 and "The interpreter /nowhere/python" in done.stderr


def test_what_is_served(tmp_path: Path, model: Path) -> None:
    assert serve.find_model(str(model), tmp_path).model == str(model)
    assert serve.find_model("kata:student-served", tmp_path).logs == tmp_path / "serve" / "kata-student-served"
    assert serve.find_model("Qwen/Qwen3-8B", tmp_path).model == "Qwen/Qwen3-8B"
    with pytest.raises(BadInput, match="There is no run 'nothing'"):
        serve.find_model("nothing", tmp_path)
