"""Record kinds: the named, versioned row types that stages exchange, each with an explicit Arrow schema.

`kinds.toml` has the columns of each, and what they mean. A kind is written `name/version`, for example `pair/1`; a
change of its columns raises the version, and `parse_kind` refuses newer ones.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from composer_stages.data_files import load_toml
from composer_stages.errors import BadInput, UsageError
from composer_stages.layout import plural

if TYPE_CHECKING:
    import pyarrow as pa

REFERENCE, NOOP = "reference", "noop"
"""Policies of rollouts that no model wrote: the tasks' own solutions, and nothing (`policy.scripted`)."""
Row = dict[str, Any]
"""One row of a table or one JSON object, by the names of its columns."""


@dataclass(frozen=True)
class Kind:
    """A row type: its name, version, columns in order, and those that depend on wall time or the machine (`wall`).

    Columns in `wall` are stored, but do not enter a table's content digest, so that rerunning a stage on the same
    inputs gives the same digest. `main`: those that a short table shows of a kind with many; of others the first.
    """

    name: str
    version: int
    columns: dict[str, str]
    wall: frozenset[str] = field(default_factory=frozenset)
    main: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.name}/{self.version}"

    @property
    def plural(self) -> str:
        """Return what people call its rows, which is the name of their table where a run has one: `rollouts`."""
        name = self.name.replace("_", " ")
        return name if name.endswith("s") else plural(name)

    @property
    def schema(self) -> "pa.Schema":
        """Return the Arrow schema, with kind and version in its key-value metadata."""
        import pyarrow as pa  # where a table is read or written alone: it takes 0.2 s

        message = pa.struct({"role": pa.string(), "content": pa.string()})
        types = {"text": pa.string(), "int": pa.int64(), "float": pa.float64(), "bool": pa.bool_()}
        lists = {f"{word}s": pa.list_(of) for word, of in {**types, "token": pa.int32(), "message": message}.items()}
        columns = [(name, (types | lists)[word]) for name, word in self.columns.items()]
        return pa.schema(columns, metadata={"composer.kind": str(self)})

    def check(self, row: Mapping[str, Any]) -> None:
        """Raise `UsageError` when a row has not exactly the kind's columns, which Arrow would drop or null silently."""
        if row.keys() != self.columns.keys():
            missing, extra = self.columns.keys() - row.keys(), row.keys() - self.columns.keys()
            raise UsageError("runs.row-does-not-fit", kind=self, missing=sorted(missing), extra=sorted(extra))

    def stable(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return the row without its wall-time columns."""
        return {name: row[name] for name in self.columns if name not in self.wall}


def columns(text: str) -> dict[str, str]:
    """Return columns by name, from words such as `step:int`; a word without a type is a column of text.

    Types are text, int, float and bool, and lists of them, of tokens and of messages: texts, ints, tokens.
    """
    return {name: word or "text" for name, _, word in (column.partition(":") for column in text.split())}


_TABLES = load_toml(__package__, "kinds.toml")
_SHARED = _TABLES.pop("shared")
KINDS = {
    name: Kind(
        name,
        of["version"],
        columns(of["columns"].format_map(_SHARED)),
        frozenset(of.get("wall", "").split()),
        tuple(of.get("main", "").split()),
    )
    for name, of in _TABLES.items()
}
TASK = KINDS["task"]
ROLLOUT = KINDS["rollout"]
STEP = KINDS["step"]
TEACHER_ACTION = KINDS["teacher_action"]
PAIR = KINDS["pair"]
STATE = KINDS["state"]
CONTINUATION = KINDS["continuation"]
ORIGIN = KINDS["origin"]
EVAL_ITEM = KINDS["eval_item"]
TRAINING_REWARD = KINDS["training_reward"]
HINT = KINDS["hint"]
DIFFICULTY = KINDS["difficulty"]
SELECTION = KINDS["selection"]
START = KINDS["start"]
CHECKPOINT = KINDS["checkpoint"]
VECTORS = KINDS["vectors"]
POOL_ROW = KINDS["pool_row"]
PROBE_ROW = KINDS["probe_row"]
SVD_MODULE = KINDS["svd_module"]
DIRECTION = KINDS["direction"]
PROBE_SCORE = KINDS["probe_score"]
PLACEBO = KINDS["placebo"]
PROBE_CHECK = KINDS["probe_check"]
TRAJECTORY = KINDS["trajectory"]
ROLLOUT_GRADIENT = KINDS["rollout_gradient"]
WATCHED = KINDS["watched"]
WATCHED_ROLLOUT = KINDS["watched_rollout"]


def parse_kind(text: str, where: str) -> Kind:
    """Return the kind named `name/version`; `BadInput` when it is unknown or newer than this program."""
    name, _, version = text.partition("/")
    if name not in KINDS or not version.isdigit():
        raise BadInput("runs.unknown-record-kind", where=where, text=text, kinds=KINDS.values())
    if int(version) > KINDS[name].version:
        raise BadInput("runs.record-version-too-new", where=where, text=text, newest=KINDS[name])
    return KINDS[name]
