"""EvalPlus: `*eval_results.json`, which holds every solution with its status, by task; no transcript.

A solution passes where it passes the benchmark's tests and those that EvalPlus added.

Format read from evalplus/evalplus, `evalplus/evaluate.py` of version 0.3.1, and files that it wrote.
"""

import re
from collections.abc import Iterator
from typing import Any

from composer_stages.formats.base import WITHOUT_TRANSCRIPT, Origin, Reader, Record, Trajectory

NAME = "evalplus"
BACKENDS = "vllm|hf|openai|mistral|anthropic|google|bedrock|ollama|gptqmodel"
MODEL = re.compile(rf"(?P<model>.+?)(?:_(?:{BACKENDS}))?_temp_[\d.]+")
"""The beginning of a file's or its folder's name, in which `--` stands for the slash of a hub id."""


def recognises(record: Any) -> bool:
    """Whether a record is a file of results: by task, a list of solutions with their status."""
    tasks = record.get("eval") if isinstance(record, dict) else None
    first = next(iter(tasks.values()), None) if isinstance(tasks, dict) else None
    return isinstance(first, list) and bool(first) and "base_status" in first[0]


def trajectories(record: Record, origin: Origin) -> Iterator[Trajectory]:
    """Yield one item a solution."""
    named = MODEL.match(origin.path.name) or MODEL.match(origin.path.parent.name)
    for task, solutions in record["eval"].items():
        for solution in solutions:
            statuses = [solution[name] for name in ("base_status", "plus_status") if solution.get(name) is not None]
            yield Trajectory(
                task_id=task,
                env=task.partition("/")[0],
                model=named["model"].replace("--", "/") if named else None,
                reward=float(all(status == "pass" for status in statuses)) if statuses else None,
                unscored=True,
                submission=solution.get("solution"),
                extra={name: solution.get(name) for name in ("base_status", "plus_status")},
            )


READERS = (Reader(NAME, recognises, trajectories, WITHOUT_TRANSCRIPT),)
