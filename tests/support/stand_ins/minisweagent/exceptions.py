"""How a rollout ends: an exception that carries the last messages."""


class InterruptAgentFlow(Exception):
    """Its messages are appended to the history."""

    def __init__(self, *messages: dict) -> None:
        self.messages = messages
        super().__init__()


class Submitted(InterruptAgentFlow):
    """The agent has handed in."""
