"""Finished runs written by hand, for pages that only read them."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from composer_stages.runs import store
from composer_stages.runs.kinds import Kind, Row
from composer_stages.runs.run import Manifest, SealedFile, manifest_seal, write_manifest
from composer_stages.runs.tables import write_table


def written(
    root: Path, name: str, tables: Sequence[tuple[Kind, Sequence[Mapping[str, Any]]]] = (), **facts: Any
) -> Path:
    """A run folder `root/STAGE/FOLDER` with these tables; columns that a row leaves out are null."""
    stage, _, _ = name.partition("/")
    folder = root / name
    record = Manifest(composer="0", stage=stage, stage_version=1, fingerprint=store.digest(name))
    record = record.model_copy(update={"status": "complete", "started_at": "2026-01-02T03:04:05+00:00", **facts})
    for kind, rows in tables:
        path = folder / f"{kind.name}s.parquet"
        about = write_table(path, kind, [row(kind, r) for r in rows])
        record.outputs[f"{kind.name}s"] = {"file": path.name, **about}
        record.files[path.name] = SealedFile(bytes=path.stat().st_size, sha256=store.file_sha256(path))
    write_manifest(folder, record)
    return folder


def rewritten(path: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Change a manifest's fields and seal it again."""
    fields = change(json.loads(path.read_text()))
    store.write_json(path, fields | {"seal": manifest_seal(fields)})


def eval_item(arm: str, task: int | str, passed: bool, seed: int = 0, *, hacked: bool = False) -> dict[str, Any]:
    """One graded rollout of an arm; tasks with a number are of twenty families."""
    family = f"f{task % 20}" if isinstance(task, int) else task
    task = f"t{task}" if isinstance(task, int) else task
    return {
        "item_id": f"{arm}/{seed}/{task}#0@0",
        "arm": arm,
        "train_seed": seed,
        "task_id": task,
        "family": family,
        "sample_idx": 0,
        "passed": passed,
        "hacked": hacked,
        "protocol_ok": True,
        "error_type": None,
        "error": None,
        "num_steps": 1,
    }


def row(kind: Kind, given: Mapping[str, Any]) -> Row:
    """A whole row of a kind."""
    return dict.fromkeys(kind.columns) | dict(given)
