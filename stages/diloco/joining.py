"""A replica's number, and the settings that all replicas of a run share."""

from collections.abc import Mapping
from typing import Any

import orjson

from stages.errors import UsageError
from stages.runs import store
from stages.runs.bucket import Bucket

MOST = 10_000


def agree(bucket: Bucket, shared: Mapping[str, Any]) -> None:
    """Write what all replicas share, or hold it against what the first one wrote; `UsageError` names what differs."""
    if bucket.create("run.json", store.encode(shared)):
        return
    theirs, mine = _flat(orjson.loads(bucket.read("run.json") or b"{}")), _flat(orjson.loads(store.encode(shared)))
    differing = [key for key in sorted(theirs.keys() | mine.keys()) if theirs.get(key) != mine.get(key)]
    if differing:
        key = differing[0]
        raise UsageError(
            f"{bucket.url} holds a run with other settings: {key} is {theirs.get(key)!r} there and {mine.get(key)!r} "
            "here. Give the same settings to all replicas, or another folder of the bucket."
        )


def claim(bucket: Bucket, owner: str) -> int:
    """The number of `owner`: the one it has, else the first that is free."""
    for replica in range(MOST):
        key = f"n/{replica:04d}"
        if bucket.create(key, owner.encode()) or bucket.read(key) == owner.encode():
            return replica
    raise UsageError(f"{bucket.url} has had {MOST} replicas. Set diloco.replica, or take another folder of the bucket.")


def _flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    """{"a.b": value} for {"a": {"b": value}}."""
    if not isinstance(tree, dict):
        return {prefix: tree}
    return {key: value for name, below in tree.items() for key, value in _flat(below, _joined(prefix, name)).items()}


def _joined(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
