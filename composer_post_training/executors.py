"""Executors: services to which `composer run --on` submits a chain, and the table of their names.

[project.entry-points."composer.executors"]
paper = "my_package.paper:Paper"
"""

from composer_cli.executors.base import (
    ACTIVE as ACTIVE,
    CANCELLED as CANCELLED,
    COMPLETE as COMPLETE,
    EXECUTORS as EXECUTORS,
    FAILED as FAILED,
    INTERRUPTED as INTERRUPTED,
    LOST as LOST,
    QUEUED as QUEUED,
    RUNNING as RUNNING,
    Executor as Executor,
    JobSettings as JobSettings,
    JobState as JobState,
    SubmittedChain as SubmittedChain,
    follow_log as follow_log,
    key_values as key_values,
    redact as redact,
    script as script,
    state_of_exit as state_of_exit,
)
