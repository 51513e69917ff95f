"""EvalPlus: `*eval_results.json`, which holds every solution with its status, by task; no transcript.

A solution has two scores: `base`, whether it passes the benchmark's tests, and, where they were run, `plus`, whether it
passes these and those that EvalPlus added, which is its result. The program prints pass@1 and does not write it.

Format read from evalplus/evalplus, `evalplus/evaluate.py` of version 0.3.1, and files that it wrote.
"""

import re
from collections.abc import Iterator
from typing import Any

from composer_stages.formats.base import WITHOUT_TRANSCRIPT, Origin, Reader, Record, Trajectory
from composer_stages.formats.measurement import MeasuredLog, MeasuredSample, ScoreKind

NAME = "evalplus"
BASE, PLUS = "base", "plus"
STATUSES = ("pass", "fail", "timeout")
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
    model = named["model"].replace("--", "/") if named else None
    names = (
        [BASE, PLUS] if any(s.get("plus_status") for of_task in record["eval"].values() for s in of_task) else [BASE]
    )
    log = origin.log("", lambda: _log(record, model, names))
    for task, solutions in record["eval"].items():
        for number, solution in enumerate(solutions):
            base, plus = solution.get("base_status"), solution.get("plus_status")
            # A status that is none of the program's is no verdict.
            scores = {BASE: float(base == STATUSES[0])} if base in STATUSES else {}
            # What fails the benchmark's tests may not be run on the others.
            if PLUS in names and scores and (plus in STATUSES or (base != STATUSES[0] and plus is None)):
                scores[PLUS] = float(base == plus == STATUSES[0])
            yield Trajectory(
                task_id=task,
                env=task.partition("/")[0],
                model=model,
                log=log,
                measured=MeasuredSample(dict(scores), epoch=number),
                unscored=True,
                submission=solution.get("solution"),
                extra={name: solution.get(name) for name in ("base_status", "plus_status")},
            )


def _log(record: Record, model: str | None, names: list[str]) -> MeasuredLog:
    """Return what a file of results is of; `hash` is that of the benchmark's problems."""
    kinds = tuple(ScoreKind(name, f"pass@1 ({name})", scale=(0.0, 1.0), main=name == names[-1]) for name in names)
    benchmark = next(iter(record["eval"])).partition("/")[0]
    return MeasuredLog(NAME, "", benchmark, str(record.get("hash") or ""), model, kinds)


READERS = (Reader(NAME, recognises, trajectories, WITHOUT_TRANSCRIPT),)
