"""Environments for the agents of mini-swe-agent: its environment protocol around any that takes bash commands."""

from composer_stages.integrations.mini_swe_agent import (
    EnvironmentInfo as EnvironmentInfo,
    MiniSweEnvironment as MiniSweEnvironment,
    message as message,
)
