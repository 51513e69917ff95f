"""The sandbox in which the commands of a model run: limits, what is visible there, results."""

from composer_stages.sandbox import (
    KINDS as KINDS,
    CommandResult as CommandResult,
    Limits as Limits,
    Sandbox as Sandbox,
    View as View,
    open_sandbox as open_sandbox,
    probe as probe,
)
