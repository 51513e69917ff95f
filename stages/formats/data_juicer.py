"""Data-Juicer over rollouts, in an environment of its own: which rollouts a recipe keeps, and their statistics.

Data-Juicer installs the packages that an operator lacks while it runs, gigabytes of CUDA among them, so it must not be
in this program's own environment, and here it may install nothing. Its own texts and messages of a rollout are
discarded: texts stay as they were imported, tool-call arguments included, and only keep, drop and statistics are read,
joined by id. The reason for a drop is read from Data-Juicer's tracer, which is on for the operators that drop.

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

from stages.errors import ComposerError, UsageError
from stages.messages import Message
from stages.runs import store
from stages.runs.settings import Settings

STATS = "__dj__stats__"
OFFLINE = {
    "UV_OFFLINE": "1",
    "UV_NO_CACHE": "1",
    "PIP_NO_INDEX": "1",
    "PIP_NO_CACHE_DIR": "1",
    "CUDA_VISIBLE_DEVICES": "",
}
"""Environment variables that keep Data-Juicer from installing anything."""
AT_MOST_S = 3600.0
DROPPING = re.compile(rb"\b\w+_(?:filter|deduplicator|selector)\b")
"""Names of operators that drop; mappers change texts, which are not read back."""


@dataclass(frozen=True)
class Judged:
    """The result of a recipe, by rollout id: the statistics of those it keeps, the reasons of those it drops.

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
        """Replace the path of the recipe by its content; the program's path does not count."""
        if self.recipe is None:
            return {"recipe": None}
        return {"recipe": store.digest(_recipe(self.recipe).decode("utf-8", "replace"))}


def judge(rollouts: Iterable[tuple[str, list[Message]]], config: JuicerConfig, folder: Path) -> Judged:
    """Run the recipe over rollouts (id, messages); its files stay in `folder`."""
    given, kept = folder / "rollouts.jsonl", folder / "kept" / "kept.jsonl"
    with store.sealing(given) as file:
        rows = (
            {
                "id": name,
                "text": "\n\n".join(f"{one['role']}: {one['content']}" for one in messages),
                "messages": messages,
            }
            for name, messages in rollouts
        )
        store.write_lines(file, rows)
    # An interrupted attempt may have left a result and traces, which would be read as those of this one.
    shutil.rmtree(kept.parent, ignore_errors=True)
    recipe = Path(config.recipe or "").expanduser()
    words = ["--config", str(recipe), "--dataset_path", str(given)]
    words += ["--export_path", str(kept), "--np", "1", "--keep_stats_in_res_ds", "true"]
    operators = sorted({found.decode() for found in DROPPING.findall(_recipe(config.recipe or ""))})
    if operators:
        # Without a limit: by default the tracer keeps the first 10 samples of each operator.
        words += ["--open_tracer", "true", "--trace_num", str(sys.maxsize)]
        words += ["--op_list_to_trace", orjson.dumps(operators).decode()]
    _run([program(config.command), *words], folder)
    if not kept.exists():
        raise ComposerError(f"Data-Juicer ended without an error and without a result in {kept}.")
    with kept.open("rb") as lines:
        results = [orjson.loads(line) for line in lines if line.strip()]
    reasons: dict[str, str] = {}
    for path in sorted(kept.parent.rglob("trace/*.jsonl")):
        kind, _, operator = path.stem.partition("-")
        with path.open("rb") as file:
            for traced in map(orjson.loads, file):
                # A deduplicator traces pairs of equal samples (dup1 was kept), a filter the samples that it dropped.
                if kind == "duplicate":
                    reasons[traced["dup2"]["id"]] = f"{operator}, like {traced['dup1']['id']}"
                else:
                    statistics = (f"{name} {value}" for name, value in sorted((traced.get(STATS) or {}).items()))
                    reasons[traced["id"]] = f"{operator} ({', '.join(statistics)})"
    return Judged({row["id"]: row.get(STATS) or {} for row in results}, reasons)


def _recipe(path: str) -> bytes:
    try:
        return Path(path).expanduser().read_bytes()
    except OSError as error:
        raise UsageError(f"The Data-Juicer recipe {path} cannot be read: {error.strerror}.") from None


def program(command: str) -> str:
    """Return Data-Juicer's path; raise `UsageError` when it is absent, or in this program's own environment."""
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
    # No other variable: neither the keys of this environment nor PYTHONPATH, which would mix the environments.
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
        last = " / ".join(lines[-3:])[:600]
        # The cause is for the runner, which finds a failed disk by its words.
        raise ComposerError(f"Data-Juicer failed with code {done.returncode}: {last}") from OSError(last)
