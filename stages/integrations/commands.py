"""A command that another framework hands over, as the message in which an environment finds it again, whole."""

from stages.envs.bash import FENCE, ActionError, fenced, parse_bash


def message(command: str) -> str:
    """A message of one command alone; `ActionError` where a line of the command itself would end the block early."""
    text = fenced(command)
    if command.strip() and parse_bash(text) != command.strip("\n"):
        raise ActionError(f"The command holds a line {FENCE}, which would cut it short. Write such a line another way.")
    return text
