"""The canonical form of an action: what two spellings of one command or one tool call share."""

import json
import re
import shlex
from functools import lru_cache
from typing import Any

from stages import messages
from stages.envs.bash import ActionError, parse_bash
from stages.messages import ToolCall

NO_THOUGHT = re.compile(r"^\s*<think>\s*</think>")
"""What some chat templates leave where a model did not think."""
PLAIN = re.compile(r"[a-zA-Z0-9_@%+=:,./\- \t]*")
"""Words that no shell needs quotes for, and blanks."""
SHELL_ARGUMENTS = ("command", "cmd")
"""The names under which shell tools take their command."""


def canonical(action: str) -> str | None:
    """The canonical form of an action's tool calls or of its ```bash block; None when it is malformed.

    Only spelling is touched (outer blanks, repeated blanks between words, kinds of quotes; order, blanks and escapes of
    JSON); whatever the shell or a tool could understand differently is left as written.
    """
    if calls := messages.read(action).calls:
        return "\n".join(map(canonical_call, calls))
    try:
        return canonical_command(parse_bash(action))
    except ActionError:
        return None


form = lru_cache(65_536)(canonical)
"""The same, remembered for texts that come again."""


def canonical_command(command: str) -> str:
    """A shell command with blanks and quoting normalised where the shell could not tell the difference."""
    command = command.strip()
    if PLAIN.fullmatch(command):
        return " ".join(command.split())
    if any(character in command for character in "\n$`*?[{~<>|;&()#\\!"):
        return command
    try:
        return shlex.join(shlex.split(command))
    except ValueError:
        return command


def canonical_call(call: ToolCall) -> str:
    """A tool's name with its arguments as JSON in one spelling; arguments that are no JSON object stay as written."""
    if not messages.is_object(call.arguments):
        return f"{call.name}({json.dumps(call.arguments)})"
    arguments = {key: _argument(key, value) for key, value in json.loads(call.arguments).items()}
    return f"{call.name}({json.dumps(arguments, sort_keys=True, separators=(',', ':'))})"


def _argument(key: str, value: Any) -> Any:
    if isinstance(value, str) and key in SHELL_ARGUMENTS:
        return canonical_command(value)
    return _number(value)


def _number(value: Any) -> Any:
    """1.0 and 1 are one number in JSON."""
    if isinstance(value, dict):
        return {key: _number(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_number(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def canonical_answer(action: str) -> str:
    """What an action without a command or call says, blanks normalised and reasoning left out."""
    return "says: " + " ".join(NO_THOUGHT.sub("", messages.read(action).content).split())
