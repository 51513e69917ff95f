"""A command arrives as it was given, or not at all."""

import pytest

from stages.envs.bash import ActionError, parse_bash
from stages.integrations.mini_swe_agent import message


@pytest.mark.parametrize("command", ["ls", "cat > a.md <<'X'\nsome `code`\nX", "echo '```bash'"])
def test_a_command_survives(command):
    assert parse_bash(message(command)) == command


@pytest.mark.parametrize("command", ["cat > a.md <<'X'\n```\nX", "cat <<X\n```bash\nls\n```\nX"])
def test_a_command_that_would_be_cut_is_refused(command):
    with pytest.raises(ActionError, match="cut it short"):
        message(command)
