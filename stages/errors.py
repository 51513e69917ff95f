"""The ways a stage can say no: each is one sentence for a person, and each has an exit code.

A sentence says what happened, shows the value, and says what to do next. Nothing here imports anything, so every layer
may raise.
"""


class ComposerError(Exception):
    """An expected failure, shown as one sentence without a traceback."""

    exit_code = 1


class UsageError(ComposerError):
    """The request cannot be carried out as asked (unknown name, bad value, folder in use): exit code 2."""

    exit_code = 2


class Incomplete(ComposerError):
    """Part of the work failed or was stopped by a budget; what was done is saved: exit code 3."""

    exit_code = 3


class BadInput(ComposerError):
    """An input artifact is missing, damaged, of another kind or from elsewhere: exit code 4."""

    exit_code = 4


class InfrastructureError(ComposerError):
    """Something around the work broke (sandbox, network, engine): an error with a null reward, never a score."""
