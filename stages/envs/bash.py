"""The text protocol of a bash action, and what the agent sees of a command.

An action is one assistant message, free text around exactly one fenced block:

```bash
python3 test_solution.py
```
"""

import re

from stages.envs.base import Observation
from stages.sandbox import CommandResult

FENCE = "```"
SUBMIT = "submit"
BLOCK = f"{FENCE}bash\n{{command}}\n{FENCE}"
CLOSED = re.compile(r"^```bash[ \t]*\n(.*?)^```[ \t]*$", re.MULTILINE | re.DOTALL)
OPENED = re.compile(r"^```bash[ \t]*$", re.MULTILINE)


class ActionError(ValueError):
    """The message holds no single action; the text tells the agent what was found and what is expected."""


def parse_bash(text: str) -> str:
    """The command of the only ```bash block of a message; `ActionError` where there is none, or more than one."""
    commands = CLOSED.findall(text)
    if OPENED.search(CLOSED.sub("", text)):
        raise ActionError("The ```bash block does not end with ``` on a line of its own.")
    if len(commands) != 1:
        found = f"{len(commands)} of them" if commands else "none"
        raise ActionError(f"Expected exactly one ```bash block, found {found}.")
    if not commands[0].strip():
        raise ActionError("The ```bash block is empty.")
    return commands[0].strip("\n")


def fenced(command: str) -> str:
    """A message that holds nothing but a command."""
    return BLOCK.format(command=command)


def observation(command: str, result: CommandResult, max_chars: int) -> Observation:
    """What the agent sees of a command: its output, elided beyond `max_chars`, and a line with its exit code."""
    shown, left_out = elided(result.output, max_chars)
    reason = "time" if result.timed_out else result.killed_for
    newline = "\n" if shown and not shown.endswith("\n") else ""
    return Observation(
        f"{shown}{newline}[exit {result.returncode}{f': {reason}' if reason else ''}]",
        commands=(command,),
        returncode=result.returncode,
        timed_out=result.timed_out,
        duration_s=result.duration_s,
        raw_chars=len(result.output),
        elided_chars=left_out,
    )


def elided(output: str, max_chars: int) -> tuple[str, int]:
    """Head and tail of an output longer than `max_chars`, and the number of characters left out between them."""
    if len(output) <= max_chars:
        return output, 0
    half = max_chars // 2
    left_out = len(output) - 2 * half
    return f"{output[:half]}\n[{left_out} characters left out]\n{output[-half:]}", left_out
