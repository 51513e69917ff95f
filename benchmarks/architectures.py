"""A table of all causal LMs of transformers: which ways of sampling and scoring are taken, and how far they are off.

    python benchmarks/architectures.py [TYPE ...]

Each type is made small from its default configuration, completed by `architectures.toml` where the default cannot be
built. Rows on both sides of every length at which it switches are sampled and scored together, as a run does it, and
compared with forward passes of each row alone, in float32, and in float64 where that is off by more than 1e-4. A type
has a process and a limit of time of its own; types whose row is of the same versions and code are not repeated unless
they are named.
"""

import json
import multiprocessing
import sys
import time
import tomllib
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import peft
import records
import torch
import transformers
import trl.trainer.utils  # noqa: F401  # which each process would import again
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

from composer_stages.policy import kv_cache, sampling, small_models, trials
from composer_stages.policy.sampling import TOGETHER, sample_batch, try_sampling
from composer_stages.runs import store
from composer_stages.training import packing, scoring
from composer_stages.training.scoring import Tree, score, token_log_probs, try_scoring

SHAPES = Path(__file__).with_suffix(".toml")
LIMIT_S = 1800
CODE = (trials, small_models, kv_cache, sampling, packing, scoring)


def differences(model: Any, switch: int) -> tuple[float, float]:
    """Return the largest difference of sampled and of scored log-probs from passes of rows alone, in nats."""
    prompts = [[7, 8, 9], [11 + i % 60 for i in range(switch + 5)], [70, 71, 72, 73, 74]]
    rows = sample_batch(model, prompts, seeds=[1, 2, 3], max_tokens=switch + 9, temperature=1.0, end_ids={3}, pad_id=0)
    sampled = [
        torch.tensor(logps, dtype=torch.float64) - small_models.log_probs_alone(model, prompt, ids, range(len(ids)))
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


def way(found: Mapping[str, Any], ways: Iterable[str], last: str) -> str:
    """Return the ways that a trial found right, each with the rows that it is right for, before the one for all."""
    taken = [f"{name} {found[name]}" for name in ways if found.get(name)]
    return ", ".join(taken if taken and taken[-1].endswith(" all") else [*taken, last])


def row(kind: str) -> dict[str, str]:
    """Return a type's row of the table."""
    shape = tomllib.loads(SHAPES.read_text()).get(kind, {})
    if "refused" in shape:
        return {"ways": "refused", "why": shape["refused"]}
    config = AutoConfig.for_model(kind, **{key: value for key, value in shape.items() if key != "why"})
    try:
        model = small_models.small_model(config, None)
    except small_models.Unmade as error:
        refused = isinstance(error.__cause__, ImportError)
        return {"ways": "refused" if refused else "plain", "why": f"{'' if refused else 'no small model: '}{error}"}
    sampled, scored = (trials.outcome(model, check) for check in (try_sampling, try_scoring))
    sampling_way = way(sampled, TOGETHER, "generate" if sampled.get("alone") else "a pass for each token")
    scoring_way = way(scored if scored.get("head") else {}, (scoring.PACKED, scoring.BATCHED), "a pass for each row")
    fast = any(map(sampled.get, TOGETHER)) and scored.get("head") and any(map(scored.get, ("packed", "batched")))
    reasons = ((name.removeprefix("not_"), each) for name, each in (sampled | scored).items())
    why = {name: each for name, each in reasons if f"not_{name}" in sampled | scored or name == "unmade"}
    off, switch = "", small_models.longest_switch(model.config)
    for words, precision in (("", nullcontext()), (", in float64 ", trials.float64(model))):
        with precision:
            largest = differences(model, switch)
        off += words + " and ".join(f"{each:.1g}" for each in largest)
        if max(largest) <= trials.AGREEING:
            break
    return {
        "ways": "refused" if "lora" in scored else "fast" if fast else "plain",
        "sampling": sampling_way,
        "scoring": scoring_way,
        "off by": off,
        "why": "; ".join(f"{name}: {each}" for name, each in why.items()) + scored.get("lora", ""),
    }


def _send(kind: str, to: Any) -> None:
    warnings.filterwarnings("ignore")
    logging.set_verbosity_error()
    try:
        to.send(row(kind))
    except BaseException as error:
        to.send({"ways": "CRASHED", "why": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"})


def tried(kind: str) -> dict[str, str]:
    """Return a type's row, made in a process of its own within `LIMIT_S`."""
    receiving, sending = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=_send, args=(kind, sending), daemon=True)
    process.start()
    sending.close()
    try:
        return receiving.recv() if receiving.poll(LIMIT_S) else {"ways": "CRASHED", "why": f"more than {LIMIT_S} s"}
    except EOFError:
        return {"ways": "CRASHED", "why": "the process ended"}
    finally:
        process.kill()
        process.join()


def main() -> None:
    """Try the types that are named, or all that have no row of these versions; keep and print their rows."""
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}, peft {peft.__version__}"
    code = store.digest([store.known_sha256(Path(str(module.__file__))) for module in CODE])[:7]
    shape = {kind: store.digest(each)[:7] for kind, each in tomllib.loads(SHAPES.read_text()).items()}
    table = records.folder() / "tables" / "architectures-types.json"
    named, rows = sys.argv[1:], {each["type"]: each for each in json.loads(table.read_text())} if table.exists() else {}
    for kind in named or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        made_of = f"{versions}, code {code}{shape.get(kind, '')}"
        if not named and rows.get(kind, {}).get("made of") == made_of:
            continue
        started = time.monotonic()
        empty = dict.fromkeys(("type", "ways", "sampling", "scoring", "off by", "why"), "")
        rows[kind] = {**empty, "type": kind, **tried(kind), "made of": made_of}
        records.keep(__file__, "types", [rows[each] for each in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if each in rows])
        print(*rows[kind].values(), f"({time.monotonic() - started:.0f} s)", flush=True)
    print(Counter(each["ways"] for each in rows.values()))


if __name__ == "__main__":
    main()
