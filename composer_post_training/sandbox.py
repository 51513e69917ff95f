"""The sandbox in which the commands of a model run: limits, what is visible there, results."""

from stages.sandbox import KINDS, CommandResult, Limits, Sandbox, View, open_sandbox, probe

__all__ = ["KINDS", "CommandResult", "Limits", "Sandbox", "View", "open_sandbox", "probe"]
