"""Without a framework its adapter says what to install, and none of the others is touched."""

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import sys
import composer_stages.integrations
assert not {"trl", "torch", "openenv", "minisweagent"} & set(sys.modules)
from composer_stages.errors import UsageError

sys.modules |= {"openenv": None, "minisweagent": None}
try:
    import composer_stages.integrations.openenv
except UsageError as refusal:
    print(refusal)
from composer_stages.integrations import mini_swe_agent
try:
    mini_swe_agent._submitted()
except UsageError as refusal:
    print(refusal)
"""


def test_a_missing_framework_is_named():
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    openenv, mini = done.stdout.splitlines()
    assert "composer-post-training[openenv]" in openenv and "pip install mini-swe-agent" in mini
