"""Real programs as clients of `composer serve`, and real servers as those that Composer asks."""

import json
import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest
from needs import needs, where
from support.command_line import call, settings, until
from support.served import NAME, Running, running

from composer_stages.policy import named
from composer_stages.policy.base import PolicyConfig
from composer_stages.policy.local import LocalPolicy
from composer_stages.runs.kinds import STEP
from composer_stages.runs.run import Run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200), needs("smollm2")]  # its context takes an agent's prompt
OPENAI = """
import sys, openai
client = openai.OpenAI(base_url=sys.argv[1], api_key="EMPTY")
model, messages = client.models.list().data[0].id, [{"role": "user", "content": "Hi"}]
whole = client.chat.completions.create(model=model, messages=messages, max_tokens=8, seed=1, logprobs=True)
parts = client.chat.completions.create(model=model, messages=messages, max_tokens=8, seed=1, stream=True)
text = "".join(part.choices[0].delta.content or "" for part in parts)
assert text == whole.choices[0].message.content, (text, whole)
assert client.completions.create(model=model, prompt="a", max_tokens=4, logprobs=2).choices[0].logprobs.tokens
"""
INSPECT = """
import sys
from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import tool

@tool
def add():
    async def execute(x: int, y: int):
        '''Add two numbers.

        Args:
            x: First.
            y: Second.
        '''
        return x + y
    return execute

for solver in ([generate()], [use_tools(add()), generate()]):
    [log] = eval(
        Task(dataset=[Sample(input="2 + 3?", target="5")], solver=solver, scorer=includes(), message_limit=6),
        model="openai-api/local/student", model_base_url=sys.argv[1], max_tokens=24, temperature=0.5, seed=3,
        logprobs=True, top_logprobs=2, display="none", log_dir=sys.argv[2], fail_on_error=True,
    )
    assert log.status == "success" and log.samples[0].output.usage.output_tokens, log.error
"""
MINI_SWE_AGENT = """
import os, pathlib, sys
os.environ.update(OPENAI_API_KEY="EMPTY", MSWEA_COST_TRACKING="ignore_errors", MSWEA_SILENT_STARTUP="1")
os.environ["MSWEA_GLOBAL_CONFIG_DIR"] = sys.argv[2]
import minisweagent, yaml
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models import get_model
config = yaml.safe_load((pathlib.Path(minisweagent.__file__).parent / "config" / "default.yaml").read_text())
sampling = {"api_base": sys.argv[1], "max_tokens": 24, "temperature": 0.5}
model = get_model(config={**config.get("model", {}), "model_name": "openai/student", "model_kwargs": sampling})
agent = DefaultAgent(model, LocalEnvironment(), **{**config["agent"], "step_limit": 2})
agent.run("Say hello.")
assert agent.n_calls >= 1 if hasattr(agent, "n_calls") else agent.messages
"""


@pytest.fixture(scope="module")
def served() -> Iterator[Running]:
    policy = LocalPolicy.open(PolicyConfig(model="smollm2", device="cpu"), listener=lambda *a: None)
    with running(policy) as server:
        yield server


@needs("clients")
@pytest.mark.parametrize("script", [OPENAI, INSPECT, MINI_SWE_AGENT], ids=["openai", "inspect", "mini-swe-agent"])
def test_a_real_client_gets_its_answers(script: str, served: Running, tmp_path: Path) -> None:
    done = subprocess.run(
        [where("clients"), "-c", script, served.url, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=900,
        cwd=tmp_path,
        env={**os.environ, "LOCAL_API_KEY": "EMPTY", "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
    )
    assert done.returncode == 0, done.stderr[-2000:]


@contextmanager
def started(port: int, *command: str, cwd: Path) -> Iterator[str]:
    """A server once its port answers; its address."""
    with open(cwd / "log", "w") as log:
        env = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
        env["LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY"] = "true"  # on loopback, as nothing else is bound
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=cwd, env=env)

    def answers() -> bool:
        assert process.poll() is None, (cwd / "log").read_text()[-2000:]
        try:
            return bool(urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=5).status == 200)
        except (URLError, OSError):
            return False

    try:
        until(answers, 600)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        process.wait(30)


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


def collected(url: str, model: str, artifacts: Path) -> list[dict[str, object]]:
    """The steps of a small collection from a server."""
    words = settings(f"policy.model={model}", f"policy.base_url={url}", "policy.max_tokens=200", "tasks=2", "samples=1")
    done = call(artifacts, "collect", "--env", "skills", *words, "--json")
    assert done.returncode in (0, 1), done.stderr
    return Run(Path(json.loads(done.stdout)["path"])).rows(STEP)


@needs("litellm")
def test_litellms_proxy_is_a_server(served: Running, tmp_path: Path) -> None:
    parameters = {"model": f"openai/{NAME}", "api_base": served.url, "api_key": "EMPTY"}
    (tmp_path / "config.yaml").write_text(
        json.dumps({"model_list": [{"model_name": "small", "litellm_params": parameters}]})
    )
    port = free_port()
    words = (where("litellm"), "--config", "config.yaml", "--host", "127.0.0.1", "--port", str(port))
    with started(port, *words, cwd=tmp_path) as url:
        steps = collected(url, "small", tmp_path / "artifacts")
    assert len(steps) == 2 and all(step["completion_tokens"] for step in steps)


@needs("llama-cpp")
def test_llama_cpps_server_is_a_server(tmp_path: Path) -> None:
    file, port = named.find_file("smollm2"), free_port()
    words = ("-m", "llama_cpp.server", "--model", str(file), "--model_alias", "small", "--n_ctx", "4096")
    listening = ("--host", "127.0.0.1", "--port", str(port))
    with started(port, where("llama-cpp"), *words, *listening, cwd=tmp_path) as url:
        steps = collected(url, "small", tmp_path / "artifacts")
    assert len(steps) == 2 and all(step["completion_tokens"] for step in steps)
