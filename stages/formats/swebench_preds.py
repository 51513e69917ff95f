"""SWE-bench predictions: one patch a line, or an object of them by instance, judged by the report beside the file.

A prediction is a rollout without steps: what was handed in, and the verdict on it.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import orjson

from stages.formats.base import Origin, Record, Trajectory, family_of
from stages.formats.transcripts import ExportedTranscript, File, json_lines, whole
from stages.rollouts import missing

NAME = "swebench-preds"
MISSING = frozenset({missing.STEPS, missing.OPENING, missing.FINISH, missing.PARSE, missing.ELISION})


def recognises(record: Any) -> bool:
    """A patch with its instance, or an object of nothing but such."""
    if not isinstance(record, dict) or not record:
        return False
    if "model_patch" in record and "instance_id" in record:
        return "responses_create_params" not in record
    return all(isinstance(value, dict) and "model_patch" in value for value in record.values())


def trajectories(record: Record, origin: Origin) -> Iterator[Trajectory]:
    """One rollout a prediction."""
    if "model_patch" not in record:
        for instance, prediction in record.items():
            yield from trajectories({"instance_id": instance, **prediction}, origin)
        return
    instance = str(record["instance_id"])
    verdict = origin.sidecars.verdict(origin.path, instance, record.get("model_name_or_path"))
    resolved = verdict.resolved if verdict else None
    statement = origin.sidecars.statements.get(instance)
    yield Trajectory(
        task_id=instance,
        env="swe-bench",
        opening=[],
        turns=[],
        missing=set(MISSING) | ({missing.REWARD} if resolved is None else set()),
        model=record.get("model_name_or_path"),
        statement=statement,
        family=family_of(instance),
        reward=None if resolved is None else float(resolved),
        resolved=resolved,
        submission=record["model_patch"] or None,
        error=None,
    )


# ---- swebench_preds
# SWE-bench predictions: a folder a model with `all_preds.jsonl` and, where the rollouts were judged, `report.json`.
#
# A prediction is what a rollout handed in, and of one that a limit ended, what it had changed by then. A file may hold
# an instance once, so a model's further rollouts of an instance go into folders of their own.

WORDS = {"resolved": True, "unresolved": False}
LOST = ("everything but what was handed in and the verdict on it",)


class Prediction(NamedTuple):
    """What one rollout handed in, and the strict verdict on it, where there is one."""

    task_id: str
    patch: str
    passed: bool | None


def files(transcripts: Iterable[ExportedTranscript], dropped: Counter[str]) -> Iterable[File]:
    """One folder for every model and sample, of the rollouts that handed something in."""
    runs: dict[tuple[str, int], list[Prediction]] = defaultdict(list)
    seen: Counter[tuple[str, str]] = Counter()
    for transcript in transcripts:
        rollout = transcript.rollout
        model, task = rollout["model"] or "unknown", rollout["task_id"]
        if transcript.submission is None:
            dropped["no_submission"] += 1
            continue
        runs[model, seen[model, task]].append(Prediction(task, transcript.submission, rollout["gt_pass"]))
        seen[model, task] += 1
    for (model, sample), members in runs.items():
        yield from _folder(model, sample, members)


def _folder(model: str, sample: int, members: list[Prediction]) -> Iterable[File]:
    name = re.sub(r"[^\w.-]+", "-", model).strip("-") + (f".{sample + 1}" if sample else "")
    lines = ({"instance_id": m.task_id, "model_name_or_path": model, "model_patch": m.patch} for m in members)
    yield json_lines(f"{name}/all_preds.jsonl", lines)
    judged = {m.task_id: m.passed for m in members if m.passed is not None}
    if judged:
        verdicts = {
            f"{word}_ids": [i for i, passed in judged.items() if passed is is_it] for word, is_it in WORDS.items()
        }
        yield whole(f"{name}/report.json", orjson.dumps(verdicts, option=orjson.OPT_INDENT_2), len(judged))
