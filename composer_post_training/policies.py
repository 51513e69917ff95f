"""Policies: models that answer turns, in this process or behind a server, and the table of their kinds.

[project.entry-points."composer.policies"]
sglang = "my_package.sglang:SglangPolicy"  # opened for a model `sglang:Qwen/Qwen3-8B`
"""

from composer_stages.policy import KINDS as KINDS, ask_all as ask_all, kind_of as kind_of, open_policy as open_policy
from composer_stages.policy.base import (
    AsyncPolicy as AsyncPolicy,
    BatchPolicy as BatchPolicy,
    CountsTokens as CountsTokens,
    PlaysSolutions as PlaysSolutions,
    Policy as Policy,
    PolicyConfig as PolicyConfig,
    PolicyKind as PolicyKind,
    ReusesPrefixes as ReusesPrefixes,
    Sample as Sample,
    Turn as Turn,
)
from composer_stages.runs.ledger import Budget as Budget
from composer_stages.runs.run import Listener as Listener
