"""Executors: services to which `composer run --on` submits a chain, and the table of their names.

EXECUTORS["paper"] = "my_package.paper:Paper"
"""

from composer_cli.executors.base import (
    ACTIVE,
    CANCELLED,
    COMPLETE,
    EXECUTORS,
    FAILED,
    INTERRUPTED,
    LOST,
    QUEUED,
    RUNNING,
    Executor,
    JobSettings,
    JobState,
    SubmittedChain,
    follow_log,
    key_values,
    redact,
    script,
    state_of_exit,
)

__all__ = [
    "ACTIVE",
    "CANCELLED",
    "COMPLETE",
    "EXECUTORS",
    "FAILED",
    "INTERRUPTED",
    "LOST",
    "QUEUED",
    "RUNNING",
    "Executor",
    "JobSettings",
    "JobState",
    "SubmittedChain",
    "follow_log",
    "key_values",
    "redact",
    "script",
    "state_of_exit",
]
