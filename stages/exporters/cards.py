"""Model cards and dataset cards: front matter that the hub reads, and in words and figures what was done."""

import json
from collections.abc import Mapping
from typing import Any

from tabulate import tabulate

from stages.policy.checkpoint import CheckpointInfo

LICENCE = "# license: choose one, for example apache-2.0; the base model's and the data's terms may bind you"


def model_card(told: Mapping[str, Any], info: CheckpointInfo, *, base: str | None, adapter: bool) -> str:
    """The card of a trained model. `base`: the model's id on the hub that training began with, where it has one."""
    library = "peft" if adapter else "transformers"
    matter = ["tags:", "- composer", "- post-training", f"library_name: {library}", "pipeline_tag: text-generation"]
    if base:
        matter += [f"base_model: {base}", f"base_model_relation: {'adapter' if adapter else 'finetune'}"]
    what = [
        ("arm", info.arm),
        ("started from", base or "a model that is not on the hub"),
        ("weights", "an adapter (LoRA)" if adapter else "a whole model"),
        ("environment", info.env),
        ("trained on", f"{len(info.task_ids)} tasks of the split {info.split}, listed in `composer/checkpoint.json`"),
        ("seed", info.train_seed),
    ]
    load = (
        "from peft import AutoPeftModelForCausalLM\n\nmodel = AutoPeftModelForCausalLM.from_pretrained(FOLDER_OR_REPO)"
        if adapter
        else "from transformers import AutoModelForCausalLM\n\n"
        "model = AutoModelForCausalLM.from_pretrained(FOLDER_OR_REPO)"
    )
    said = "Nothing here says how good the model is: that is what `composer evaluate` on held-out tasks is for."
    return _card(matter, f"{info.arm}, trained with Composer", [_table(what), said, _python(load)], told)


def dataset_card(told: Mapping[str, Any], tables: Mapping[str, Mapping[str, Any]]) -> str:
    """The card of a run's tables, each a configuration; the largest kind of record a reader wants comes first."""
    first = next((name for name in ("pairs", "rollouts") if name in tables), next(iter(tables)))
    matter = ["tags:", "- composer", "configs:"]
    for name in tables:
        matter += [f"- config_name: {name}", f"  data_files: {name}/*.parquet"]
        matter += ["  default: true"] if name == first else []
    rows = [(f"`{name}`", about["kind"], f"{about['rows']:,}") for name, about in tables.items()]
    load = f'from datasets import load_dataset\n\nrows = load_dataset(FOLDER_OR_REPO, "{first}", split="train")'
    body = [tabulate(rows, headers=("table", "kind of record", "rows"), tablefmt="github"), _python(load)]
    body.append("What a column means stands in Composer's reference of record kinds. A null is not a zero: the source")
    body[-1] += " did not record it."
    return _card(matter, f"Records of `composer {told['stage']}`", body, told)


def _card(matter: list[str], title: str, body: list[str], told: Mapping[str, Any]) -> str:
    parts = ["\n".join(["---", *matter, LICENCE, "---"]), f"# {title}", *body, "## Figures"]
    figures = {**told["outcome"]["summary"], **told["counts"]}
    parts.append(_table(sorted((name, value) for name, value in figures.items() if _is_figure(value))) or "None.")
    settings = json.dumps(told["config"], indent=2, sort_keys=True, ensure_ascii=False)
    parts += ["## Settings", f"```json\n{settings.replace('```', '` ` `')}\n```"]
    version, print_ = told["composer"], told["fingerprint"]
    parts.append(f"Made with Composer {version}; `composer/run.json` tells the whole run (fingerprint `{print_}`).")
    return "\n\n".join(parts) + "\n"


def _is_figure(value: Any) -> bool:
    return isinstance(value, str | int | float)


def _table(rows: list[tuple[str, Any]]) -> str:
    return tabulate([(name, _cell(value)) for name, value in rows], headers=("", ""), tablefmt="github") if rows else ""


def _cell(value: Any) -> str:
    """A value that cannot break out of its cell."""
    shown = f"{value:.6g}" if isinstance(value, float) else str(value)
    return " ".join(shown.split()).replace("|", "\\|").replace("<", "&lt;")


def _python(code: str) -> str:
    return f"```python\n{code}\n```"
