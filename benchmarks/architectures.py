"""A table of all causal LMs of transformers: which ways of sampling and scoring are taken, and how far they are off.

    python -m benchmarks.architectures [TYPE ...]

Each type is made small from its default configuration. Rows on both sides of every length at which it switches are
sampled and scored together, as a run does it, and compared with forward passes of each row alone.
"""

import sys
import time
import warnings
from typing import Any

import torch
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

from composer_stages.policy import small_models, trials
from composer_stages.policy.sampling import sample_batch, try_sampling
from composer_stages.training.scoring import Tree, score, token_log_probs, try_scoring


def ways(found: dict[str, Any]) -> str:
    """Return what a trial found, without reasons and sizes."""
    kept = {key: value for key, value in found.items() if not key.startswith("not_") and key != "numbers"}
    return " ".join(f"{key}={value}" for key, value in kept.items()) or "nothing"


def differences(model: Any, switch: int) -> tuple[float, float]:
    """Return the largest difference of sampled and of scored log-probs from passes of rows alone, in nats."""
    prompts = [[7, 8, 9], [11 + i % 60 for i in range(switch + 5)], [70, 71, 72, 73, 74]]
    rows = sample_batch(model, prompts, seeds=[1, 2, 3], max_tokens=switch + 9, temperature=1.0, end_ids={3}, pad_id=0)
    sampled = [
        torch.tensor(logps) - small_models.log_probs_alone(model, prompt, ids, range(len(ids)))
        for prompt, (ids, logps) in zip(prompts, rows, strict=True)
    ]
    trees = [Tree(prompt, (ids, ids[:3])) for prompt, (ids, _) in zip(prompts, rows, strict=True)]
    alone = []
    with torch.no_grad():
        for tree in trees:
            for branch in tree.branches:
                logits = model(input_ids=torch.tensor([tree.prompt + branch]), use_cache=False).logits[0].float()
                table = logits[len(tree.prompt) - 1 : -1].log_softmax(-1)
                alone.append(table.gather(-1, torch.tensor(branch)[:, None])[:, 0])
        found = token_log_probs(model, score(model, trees)).float()
    return float(torch.cat(sampled).abs().max()), float((found - torch.cat(alone)).abs().max())


def line(kind: str) -> str:
    """Return a type's line of the table."""
    try:
        model = small_models.small_model(AutoConfig.for_model(kind), None)
    except Exception as error:  # a default configuration that transformers does not build is no architecture to try
        return f"{kind}: no small model of the default configuration: {' '.join(str(error).split())[:160]}"
    found = [trials.outcome(model, check) for check in (try_sampling, try_scoring)]
    sampled, scored = differences(model, small_models.longest_switch(model.config))
    return f"{kind}: {ways(found[0])} | {ways(found[1])} | off by {sampled:.2g} and {scored:.2g}"


def main() -> None:
    """Print the table."""
    warnings.filterwarnings("ignore")
    logging.set_verbosity_error()
    for kind in sys.argv[1:] or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        started = time.monotonic()
        try:
            text = line(kind)
        except Exception as error:
            text = f"{kind}: CRASHED {type(error).__name__}: {' '.join(str(error).split())[:300]}"
        print(f"{text} ({time.monotonic() - started:.1f} s)", flush=True)


if __name__ == "__main__":
    main()
