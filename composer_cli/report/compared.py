"""What a report is about, for its first screen: model, environment, arms in words, date, command."""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from composer_cli.settings import assignment, known, nested
from composer_cli.show import runs
from stages import STAGES, typed
from stages.runs.artifact import Run
from stages.runs.pair_records import PAIR
from stages.runs.runner import module

Facts = dict[str, Any]
EXAMPLES = 3
"""Pairs that are shown."""


def compared(chain: Sequence[Run]) -> Facts:
    """What was compared, from the manifests of a chain; what no run says is left out."""
    last = chain[-1]
    configs = [run.manifest.config for run in reversed(chain)]
    models = [config["policy"]["model"] for config in configs if isinstance(config.get("policy"), dict)]
    places = [config["env"] for config in configs if isinstance(config.get("env"), dict)]
    arms = {run.manifest.config["arm"]: arm(run) for run in chain if run.manifest.stage == "train"}
    facts = {
        "model": ", ".join(dict.fromkeys(models)),
        "environment": f"{places[0]['name']}, {places[0]['split']} tasks" if places else "",
        "arms": arms,
        "date": last.manifest.started_at[:10],
        "command": command(last),
    }
    return {name: fact for name, fact in facts.items() if fact}


def arm(run: Run) -> str:
    """An arm in words: `GRPO + 0.1 dpo + 1 sdpo, 12 steps`."""
    config = run.manifest.config
    weights = [f"{weight:g} {name}" for name, weight in config["weights"].items() if weight]
    steps = config.get("optimisation", {}).get("steps")
    return " + ".join(["GRPO", *weights]) + (f", {steps} steps" if steps else "")


def command(run: Run) -> str:
    """The words that ask for this run again: its inputs, and the settings that are not the defaults."""
    stage = run.manifest.stage
    if stage not in STAGES:
        return ""
    reads = [f"--from {runs.name(Path(ref.path))}" for refs in run.manifest.inputs.values() for ref in refs]
    changed = [f"-s {_said(key, value)}" for key, value in _changed(run).items()]
    return " ".join([typed(stage), *dict.fromkeys(reads), *changed])


def _changed(run: Run) -> Mapping[str, Any]:
    """Settings by dotted key that differ from their defaults; a list is given whole."""
    config = module(run.manifest.stage).Config
    found: dict[str, Any] = {}
    for key, field in known(config):
        default = None if field.is_required() else field.get_default(call_default_factory=True)
        parts = key.split(".")
        if "N" in parts:
            key, default = ".".join(parts[: parts.index("N")]), []
        value = _at(run.manifest.config, key)
        if value is not None and value != _plain(default):
            found[key] = value
    return found


def _at(tree: Any, key: str) -> Any:
    for part in key.split("."):
        tree = tree.get(part) if isinstance(tree, dict) else None
    return tree


def _plain(value: Any) -> Any:
    """A default as the manifest would hold it."""
    return orjson.loads(orjson.dumps(value, default=lambda other: other.model_dump(mode="json")))


def _toml(value: Any) -> str:
    """A value as `--set` reads it."""
    if isinstance(value, dict):
        inside = (f"{orjson.dumps(name).decode()} = {_toml(one)}" for name, one in value.items() if one is not None)
        return f"{{ {', '.join(inside)} }}"
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    return orjson.dumps(value).decode()


def _said(key: str, value: Any) -> str:
    """`KEY=VALUE`, a text without quotation marks where it is read as that text."""
    bare = f"{key}={value}"
    is_read = isinstance(value, str) and value.strip() and assignment(bare) == nested(key, value)
    return shlex.quote(bare if is_read else f"{key}={_toml(value)}")


def pairs(run: Run) -> list[Facts]:
    """The first few pairs of an extraction, one of every rule before a second of any."""
    names = ["rule", "task_id", "step", "chosen", "rejected", "votes_chosen", "votes_rejected"]
    by_rule: dict[str, list[Facts]] = {}
    for row in run.scan(PAIR).rows(names) if run.holds(PAIR) else ():
        if len(found := by_rule.setdefault(row["rule"], [])) < EXAMPLES:
            found.append(row)
    turns = [row for place in range(EXAMPLES) for of_rule in by_rule.values() for row in of_rule[place : place + 1]]
    return [{name: row[name] for name in names} for row in turns[:EXAMPLES]]
