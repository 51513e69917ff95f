"""Policies: models that answer turns, in this process or behind a server. Teachers are policies, too.

adapters.py - folders of adapters, and the record of the base that each was trained on
alone.py - keeps scorings to themselves where a server dies of them otherwise
answers.py - what a server's response means: an answer, its tokens and price, or a typed error
background.py - the event loop on which all servers are asked
base.py - what is asked (`Turn`), what comes back (`Sample`), and what a policy is
batches.py - many requests to a server in one file, at a lower price
cache.py - answers that were paid for, by content
client.py - requests through openai's own client, sent once a call
checkpoint.py - what evaluating a trained checkpoint needs to know: arm, seed, start, tasks
config.py - how a policy is configured
dialect.py - recorded conversations as chat completions have them: tool calls, their results, `tools`
completions.py - what is asked of a vLLM server: completions of token ids, log-probs of given ones, adapters
embedded.py - models that environments bring along, made on first use
endpoint.py - an OpenAI-compatible server, with typed errors, retries, a budget and a cache
hosts.py - how many requests a server gets at once
local.py - a Hugging Face model in this process; token ids and log-probs captured while sampling
patience.py - says what is waited for when a server takes long
preflight.py - whether a model can be had, before anything is paid for
probing.py - a call before the questions: what a server takes, and how much it tells
sampling.py - batched sampling from a causal LM, one random stream a row
scheduler.py - asks all servers, conversations side by side and the steps of each in order
tool_formats.py - how families of models write tool calls
server.py - a model server as a process of ours: waited for, restarted, ended with the run
serving.py - the policies of a stage with the servers behind them
spending.py - what teachers cost: calls, tokens, money and latency, and whether that is affordable
token_text.py - between conversations and token ids
vllm.py - a model behind a vLLM server: token ids in, token ids and log-probs out
vllm_server.py - how a vLLM server is started

A new kind of policy is one class and one line. The class has what `Policy` lists and the classmethod `open` of
`PolicyKind`; the line registers it under a word of its own, in the table below or from outside:

    KINDS["sglang"] = "my_package.sglang:SglangPolicy"

A model `sglang:Qwen/Qwen3-8B` is then opened by that class, in every stage that samples.
"""

from pathlib import Path
from pkgutil import resolve_name

from stages.policy.base import Policy, PolicyConfig, PolicyKind, Sample, Turn
from stages.runs.artifact import Listener
from stages.runs.ledger import Budget

__all__ = ["KINDS", "Policy", "PolicyConfig", "PolicyKind", "Sample", "Turn", "kind_of", "open_policy"]

KINDS: dict[str, str | PolicyKind] = {
    "endpoint": "stages.policy.endpoint:EndpointPolicy",
    "local": "stages.policy.local:LocalPolicy",
    "vllm": "stages.policy.vllm:VllmPolicy",
}
"""Kind of policy -> its class, or `module:Class`, which is imported when a policy of that kind is first opened."""


def kind_of(config: PolicyConfig) -> str:
    """The kind of a policy, a key of `KINDS`.

    `endpoint` with `base_url`, but for `vllm:`; else the word before the colon of `model`, if that is a registered
    kind; else `local`.
    """
    if config.base_url is not None and not config.served:
        return "endpoint"
    word, colon, _ = config.model.partition(":")
    return word if colon and word in KINDS else "local"


def open_policy(config: PolicyConfig, *, cache: Path, budget: Budget, listener: Listener) -> Policy:
    """The policy that a configuration describes, ready to sample; its kind is `kind_of` the configuration.

    cache: folder for what later runs can use again (answers that were paid for, embedded models). budget: what money is
    reserved from. listener: called with the progress of anything slow.
    """
    kind = KINDS[kind_of(config)]
    opener: PolicyKind = resolve_name(kind) if isinstance(kind, str) else kind
    return opener.open(config, cache=cache, budget=budget, listener=listener)
