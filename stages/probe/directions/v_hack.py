"""`v_hack.safetensors`: a direction with what must agree before it is used, and the refusal when something does not.

Keys: V/<module> [k, n], S/<module> [k], mean/<module> [n], float32. The torch version and the commit stand in the
manifest beside it: in here they would give equal directions different digests.

Shapes: k axes and n numbers of a module.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

from stages.errors import BadInput
from stages.probe.adapters.choose import Coordinates
from stages.probe.adapters.layout import Layout
from stages.probe.adapters.tensor_file import read_tensors, write_tensors
from stages.probe.directions.extraction import Direction
from stages.runs import store
from stages.runs.records import Row

V_HACK_FILE = "v_hack.safetensors"


def save_direction(path: Path, direction: Direction, facts: Row) -> None:
    """Write a direction; `facts` holds its coordinates (`adapters.choose.coordinates`) and how it was extracted."""
    kinds = {"V": direction.axes, "S": direction.strengths, "mean": direction.means}
    tensors = {f"{kind}/{name}": part for kind, parts in kinds.items() for name, part in parts.items()}
    layout = store.encode(list(direction.layout.sizes.items())).decode()
    write_tensors(path, tensors, {"layout": layout, "facts": store.encode(facts).decode()})


def load_direction(path: Path) -> tuple[Direction, Row]:
    """A direction and its facts; `BadInput` when the file is missing or damaged."""
    tensors, metadata = read_tensors(path)
    layout = Layout(dict(orjson.loads(metadata["layout"])))
    parts = {
        kind: {name.removeprefix(kind + "/"): t for name, t in tensors.items() if name.startswith(kind + "/")}
        for kind in ("V", "S", "mean")
    }
    return Direction(layout, parts["V"], parts["S"], parts["mean"]), orjson.loads(metadata["facts"])


def check_coordinates(facts: Row, here: Mapping[str, Any]) -> None:
    """`BadInput` when a direction with these facts was not extracted in the coordinates `here`."""
    differ = [
        f"{name} {facts.get(name)!r} there, {here.get(name)!r} here"
        for name in Coordinates.__annotations__
        if facts.get(name) != here.get(name)
    ]
    if differ:
        raise BadInput(
            f"v_hack belongs to other coordinates ({'; '.join(differ)}), where its numbers mean something else. "
            "Extract it again with this adapter and decomposition."
        )
