"""Policies: models that answer turns, in this process or behind a server. Teachers are policies, too.

base.py - the request (`Turn`), the answer (`Sample`), the protocol `Policy`, and its settings `PolicyConfig`
local.py - a Hugging Face model in this process: loading, and turns as prompts and samples
model_facts.py - a model's tokenizer, chat template and context: prompts of turns, samples of token ids
model_checks.py - whether such a model can be used: tensors, numbers, tokenizer, chat template
sampling.py - token sampling with a local model: the loop over tokens, prefill, batches that fit into memory
trials.py - which fast ways to compute are right for an architecture, tried on a small model and kept
small_models.py - a small model of an architecture, by its configuration
kv_cache.py - rows of a batch in a KV cache that is written in place; the decoding step as a CUDA graph
scripted.py - policies without a model, which check an environment: `reference` and `noop`
endpoint.py - an OpenAI-compatible server: a budget, retries, a probe, an adaptive limit
request_fields.py - which fields a user may add to a request without making a call unbounded
requests.py - the bodies of requests to a server, and upper bounds of their cost
client.py - HTTP requests, each sent once, their typed errors with costs, and the retry loop
faults.py - what a refusal of a server means, by its codes, numbers and words
reading.py - responses read as samples; reading.toml - how servers write them
bills.py - what a call cost, checked against request and answer
token_counts.py - lower bounds of the tokens of a text, by its words or by a model's own tokenizer
origin.py - who answers behind an address, and whose answers a run may reuse
served.py - notes for reports on who answered
answer_cache.py - the cache of answers, each with a digest
named.py - models with short names, such as `smollm2`, and their sources
brought.py - the download of a named model's GGUF file in parts by pip
gguf.py - a GGUF file as a Hugging Face folder: its header, and its weights dequantised once
gguf_writing.py - a Hugging Face model as one GGUF file
available.py - whether a model is available, and its context, before it is opened
prices.py - prices of models at known hosts, by a public table
preflight.py - what a dry run asks of a model, and of its server
vllm.py - a model behind a vLLM server: token ids in, token ids and log-probs out
server.py - a model server as a child process: start, restart and end
serving.py - the policies of a stage with the servers that they need
background.py - the event loop of all server requests
tool_calls.py - tool calls in the formats of chat completions and of model families
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

from composer_stages.errors import BadInput
from composer_stages.policy import background
from composer_stages.policy.base import (
    AsyncPolicy,
    BatchPolicy,
    Policy,
    PolicyConfig,
    PolicyKind,
    Sample,
    Turn,
    maker_of,
)
from composer_stages.registry import Registry
from composer_stages.runs import hub
from composer_stages.runs.activity import activity
from composer_stages.runs.ledger import Budget
from composer_stages.runs.run import AnswerFolders, Listener

KINDS = Registry[str | PolicyKind](
    "composer.policies",
    {
        "endpoint": "composer_stages.policy.endpoint:EndpointPolicy",
        "local": "composer_stages.policy.local:LocalPolicy",
        "vllm": "composer_stages.policy.vllm:VllmPolicy",
        "scripted": "composer_stages.policy.scripted:ScriptedPolicy",
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
    """Open the configured policy, ready to sample; `kind_of(config)` chooses its class.

    cache: folders of the answer caches. budget: the budget for paid requests. listener: gets the progress of slow work.
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
    """Return one answer per turn, in order: from one batch of a local model, or from concurrent requests to a server.

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
