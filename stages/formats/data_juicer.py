"""Data-Juicer over rollouts, in an environment of its own: which rollouts a recipe keeps, and their statistics.

Data-Juicer installs what an operator lacks while it runs, gigabytes of CUDA packages among it, so it must not live in
this program's own environment, and here it may install nothing. Its own view of a rollout (text and messages) is thrown
away: texts stay as they were imported, tool-call arguments included, and only keep, drop and statistics come back,
joined by id. Why a rollout was dropped is read from Data-Juicer's tracer, which is opened for the operators that drop.

Its trace files as py-data-juicer 1.6.1 writes them, `core/tracer/tracer.py`.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from stages.errors import BadInput, ComposerError, UsageError
from stages.messages import Message
from stages.runs import store
from stages.runs.config import Settings

STATS = "__dj__stats__"
OFFLINE = {
    "UV_OFFLINE": "1",
    "UV_NO_CACHE": "1",
    "PIP_NO_INDEX": "1",
    "PIP_NO_CACHE_DIR": "1",
    "CUDA_VISIBLE_DEVICES": "",
}
"""What keeps it from installing anything on the way."""
AT_MOST_S = 3600.0
DROPPING = re.compile(rb"\b\w+_(?:filter|deduplicator|selector)\b")
"""Operators that drop, by the end of their names; mappers change texts, which are not read back."""


@dataclass(frozen=True)
class Judged:
    """What a recipe made of rollouts, by their ids: statistics of those it keeps, the reasons for the others.

    A rollout in neither was dropped without a reason that Data-Juicer traces, such as the third of equal ones.
    """

    kept: dict[str, Any]
    dropped: dict[str, str]


class JuicerConfig(Settings):
    """A Data-Juicer recipe to run over rollouts."""

    recipe: str | None = None
    """The recipe, a YAML file; rollouts that it drops are dropped."""
    command: str = "dj-process"
    """Data-Juicer's program, in an environment of its own."""

    def identity(self) -> dict[str, Any]:
        """The content of the recipe stands for its path; where Data-Juicer lives does not matter."""
        return {
            "recipe": None if self.recipe is None else store.digest(_recipe(self.recipe).decode("utf-8", "replace"))
        }


def _recipe(path: str) -> bytes:
    try:
        return Path(path).expanduser().read_bytes()
    except OSError as error:
        raise BadInput(f"The Data-Juicer recipe {path} cannot be read: {error.strerror}.") from None


def judge(rollouts: Iterable[tuple[str, list[Message]]], config: JuicerConfig, folder: Path) -> Judged:
    """Run the recipe over rollouts (id, messages); its files stay in `folder`."""
    given, kept = folder / "rollouts.jsonl", folder / "kept" / "kept.jsonl"
    with store.sealing(given) as file:
        store.write_lines(file, (_record(*rollout) for rollout in rollouts))
    shutil.rmtree(kept.parent, ignore_errors=True)
    words = ["--config", str(Path(config.recipe or "").expanduser()), "--dataset_path", str(given)]
    words += ["--export_path", str(kept), "--np", "1", "--keep_stats_in_res_ds", "true"]
    operators = sorted({found.decode() for found in DROPPING.findall(_recipe(config.recipe or ""))})
    if operators:
        words += ["--open_tracer", "true", "--trace_num", str(sys.maxsize)]
        words += ["--op_list_to_trace", orjson.dumps(operators).decode()]
    _run([program(config.command), *words], folder)
    if not kept.exists():
        raise ComposerError(f"Data-Juicer ended without an error and without a result in {kept}.")
    with kept.open("rb") as lines:
        rows = (orjson.loads(line) for line in lines if line.strip())
        return Judged({row["id"]: row.get(STATS) or {} for row in rows}, _reasons(kept.parent))


def _reasons(folder: Path) -> dict[str, str]:
    """Which operator dropped each rollout that a trace file names, by id."""
    reasons: dict[str, str] = {}
    for path in sorted(folder.rglob("trace/*.jsonl")):
        kind, _, operator = path.stem.partition("-")
        with path.open("rb") as file:
            for traced in map(orjson.loads, file):
                if kind == "duplicate":
                    reasons[traced["dup2"]["id"]] = f"{operator}, like {traced['dup1']['id']}"
                else:
                    told = (f"{name} {value}" for name, value in sorted((traced.get(STATS) or {}).items()))
                    reasons[traced["id"]] = f"{operator} ({', '.join(told)})"
    return reasons


def _record(rollout_id: str, messages: list[Message]) -> dict[str, Any]:
    text = "\n\n".join(f"{message['role']}: {message['content']}" for message in messages)
    return {"id": rollout_id, "text": text, "messages": messages}


def program(command: str) -> str:
    """Data-Juicer's path; `UsageError` when it is absent, or lies where it could change what this program runs on."""
    found = shutil.which(os.path.expanduser(command))
    if found is None:
        raise UsageError(
            f"Data-Juicer runs from an environment of its own, and there is no program {command!r}. "
            "Make one with `python -m venv DIR` and `DIR/bin/pip install py-data-juicer aiohttp ray torch` "
            "(a CPU build of torch will do), "
            "and give --set dj.command=DIR/bin/dj-process."
        )
    if Path(found).parent == Path(sys.executable).parent:
        raise UsageError(
            f"{found} lies in the environment that this program runs in, which Data-Juicer would change. "
            "Install it in one of its own and give that with --set dj.command=DIR/bin/dj-process."
        )
    return found


def _run(words: list[str], folder: Path) -> None:
    kept = ("PATH", "HOME", "LANG", "TMPDIR")
    environment = {name: os.environ[name] for name in kept if name in os.environ} | OFFLINE
    try:
        done = subprocess.run(
            words, cwd=folder, env=environment, capture_output=True, text=True, errors="replace", timeout=AT_MOST_S
        )
    except subprocess.TimeoutExpired:
        raise ComposerError(f"Data-Juicer did not end within {AT_MOST_S:g} s.") from None
    if done.returncode != 0:
        lines = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        raise ComposerError(f"Data-Juicer failed with code {done.returncode}: {' / '.join(lines[-3:])[:600]}")
