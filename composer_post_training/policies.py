"""Policies: models that answer turns, in this process or behind a server, and the table of their kinds.

KINDS["sglang"] = "my_package.sglang:SglangPolicy"  # opened for a model `sglang:Qwen/Qwen3-8B`
"""

from stages.policy import KINDS, ask_all, kind_of, open_policy
from stages.policy.base import (
    AsyncPolicy,
    BatchPolicy,
    CountsTokens,
    PlaysSolutions,
    Policy,
    PolicyConfig,
    PolicyKind,
    ReusesPrefixes,
    Sample,
    Turn,
)
from stages.runs.ledger import Budget
from stages.runs.run import Listener

__all__ = [
    "KINDS",
    "AsyncPolicy",
    "BatchPolicy",
    "Budget",
    "CountsTokens",
    "Listener",
    "PlaysSolutions",
    "Policy",
    "PolicyConfig",
    "PolicyKind",
    "ReusesPrefixes",
    "Sample",
    "Turn",
    "ask_all",
    "kind_of",
    "open_policy",
]
