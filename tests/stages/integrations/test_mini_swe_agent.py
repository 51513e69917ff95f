"""mini-swe-agent's protocol around our environments: by hand, and driven by its own agent where it is installed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from minisweagent.exceptions import Submitted
from needs import needs
from support.environments import BreakingEnv, GuessEnv

from composer_stages.envs.bash import ActionError, parse_bash
from composer_stages.envs.kata.env import KataEnv
from composer_stages.errors import InfrastructureError, UsageError
from composer_stages.integrations.mini_swe_agent import MiniSweEnvironment, message

ROOT = Path(__file__).parents[3]
SCRIPT = """
import sys
from minisweagent.agents.default import DefaultAgent
from minisweagent.models.test_models import DeterministicModel, make_output
from composer_stages.integrations.mini_swe_agent import MiniSweEnvironment
from composer_stages.envs.kata.env import KataEnv

task, = KataEnv().tasks("train", 1, 0)
environment = MiniSweEnvironment(KataEnv(), task)
commands = ("cat solution.py", "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")
model = DeterministicModel(outputs=[make_output(c, [{"command": c}], 0.0) for c in commands])
agent = DefaultAgent(model, environment, system_template="On {{system}}.", instance_template="{{task}}")
result = agent.run(task.prompt)
assert result == {"exit_status": "Submitted", "submission": ""}, result
assert "def " in str(agent.messages[3]["content"]), agent.messages
assert agent.serialize()["info"]["config"]["environment"]["sandbox"] == "bubblewrap"
assert environment.grade().hidden_pass is False
environment.cleanup()
assert "litellm" not in sys.modules
"""


@pytest.fixture(autouse=True)
def quiet(tmp_path, monkeypatch):
    monkeypatch.setenv("MSWEA_SILENT_STARTUP", "1")
    monkeypatch.setenv("MSWEA_GLOBAL_CONFIG_DIR", str(tmp_path))


def kata() -> MiniSweEnvironment:
    return MiniSweEnvironment(KataEnv(), KataEnv().tasks("train", 1, 0)[0])


def test_commands_run_in_the_workspace_until_the_marker():
    environment = kata()
    done = environment.execute({"command": "cat solution.py"})
    assert "def " in done["output"] and done["returncode"] == 0 and done["exception_info"] == ""
    assert environment.execute({"command": "exit 3"})["returncode"] == 3
    marker = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
    assert environment.execute({"command": f"false; {marker}; exit 1"})["returncode"] == 1
    with pytest.raises(Submitted) as ended:
        environment.execute({"command": marker})
    assert ended.value.messages[0]["extra"] == {"exit_status": "Submitted", "submission": ""}
    assert environment.grade().hidden_pass is False
    environment.cleanup()


def test_a_failing_command_returns_its_error():
    environment = kata()
    cut = environment.execute({"command": "cat <<X\n```\nX"})
    assert cut["exception_info"].startswith("The command holds a line ```")
    assert environment.execute({"command": ""})["returncode"] == -1
    with pytest.raises(UsageError, match="cwd"):
        environment.execute({"command": "ls"}, cwd="/")
    environment.cleanup()


def test_the_environment_ends_rollouts_and_raises_its_errors():
    one = MiniSweEnvironment(GuessEnv(turns=1), GuessEnv().tasks("train", 1, 0)[0])
    with pytest.raises(Submitted) as ended:
        one.execute({"command": "ls"})
    assert ended.value.messages[0]["extra"]["exit_status"] == "answered"
    with pytest.raises(InfrastructureError):
        MiniSweEnvironment(BreakingEnv(), GuessEnv().tasks("train", 1, 0)[0]).execute({"command": "ls"})


def test_no_environment_variable_reaches_templates_or_trajectories(monkeypatch):
    monkeypatch.setenv("MY_SECRET", "hunter2")
    environment = kata()
    assert "hunter2" not in str([environment.get_template_vars(task="t"), environment.serialize()])
    assert environment.get_template_vars(task="t")["task"] == "t" and environment.get_template_vars()["system"]
    assert environment.opening[-1]["role"] == "user"
    environment.cleanup()


@needs("mini-swe-agent")
def test_mini_swe_agents_loop_plays_an_environment():
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr


# A command arrives as it was given, or not at all.


@pytest.mark.parametrize("command", ["ls", "cat > a.md <<'X'\nsome `code`\nX", "echo '```bash'"])
def test_a_command_survives(command):
    assert parse_bash(message(command)) == command


@pytest.mark.parametrize("command", ["cat > a.md <<'X'\n```\nX", "cat <<X\n```bash\nls\n```\nX"])
def test_a_command_that_would_be_cut_is_refused(command):
    with pytest.raises(ActionError, match="cut it short"):
        message(command)
