"""Small files in the formats of other programs, made here, and the importers' answer to them."""

import gzip
import json
from pathlib import Path
from typing import Any

from composer_stages.formats import files, reading, rows
from composer_stages.formats.base import Drop, Trajectory
from composer_stages.formats.reading import FileCount
from composer_stages.formats.reports import Sidecars
from composer_stages.import_traces import Config
from composer_stages.messages import MessageParts, ToolCall, write
from composer_stages.runs import runner
from composer_stages.runs.run import Run

INSTANCE = "owner__repo-12"
PATCH = "diff --git a/f.py b/f.py\n"


def jsonl(path: Path, *records: Any) -> Path:
    """A file of JSON Lines; a str is written as it is, also where it is no JSON. A name in .gz is packed."""
    text = "\n".join(r if isinstance(r, str) else json.dumps(r) for r in records) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def document(path: Path, record: Any, indent: int | None = 2) -> Path:
    """A file with one JSON document."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=indent))
    return path


def read(path: Path, wanted: str = "auto") -> tuple[list[Trajectory], list[Drop], FileCount]:
    """Everything the importers find in a file or folder; the counts are those of all its files together."""
    sidecars, total = Sidecars(), FileCount("all", wanted, "")
    found: list[Trajectory] = []
    drops: list[Drop] = []
    for source, importer in reading.detect_formats(files.find([str(path)]), wanted, sidecars).items():
        for one in reading.read(source, importer, sidecars, total):
            drops.append(one) if isinstance(one, Drop) else found.append(one.trajectory)
    assert total.traces == len(found) + len(drops) and total.dropped.total() == len(drops)
    return found, drops, total


def payloads(path: Path, wanted: str = "auto") -> list[dict[str, Any]]:
    """The rows of every trajectory in a file."""
    sidecars, count = Sidecars(), FileCount("all", wanted, "")
    sources = reading.detect_formats(files.find([str(path)]), wanted, sidecars).items()
    found = [one for source, importer in sources for one in reading.read(source, importer, sidecars, count)]
    return [rows.payload(one, 0) for one in found if not isinstance(one, Drop)]


def system(content: Any) -> dict[str, Any]:
    """A system message."""
    return {"role": "system", "content": content}


def user(content: Any, **more: Any) -> dict[str, Any]:
    """A user's message."""
    return {"role": "user", "content": content, **more}


def assistant(content: Any, **more: Any) -> dict[str, Any]:
    """A model's message."""
    return {"role": "assistant", "content": content, **more}


def tool(content: Any, **more: Any) -> dict[str, Any]:
    """The result of a call."""
    return {"role": "tool", "content": content, **more}


def action(content: str, *calls: tuple[str, str], thought: str | None = None) -> str:
    """What was said, with calls (name, arguments), as the text of an action."""
    return write(MessageParts(content, tuple(ToolCall(*one) for one in calls), thought))


def call(name: str, arguments: str, call_id: str = "call_1") -> dict[str, Any]:
    """A tool call as OpenAI spells it."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def prediction(instance: str, patch: str = PATCH, model: str = "m") -> dict[str, str]:
    """A line of SWE-bench's predictions."""
    return {"instance_id": instance, "model_name_or_path": model, "model_patch": patch}


def submitted(folder: Path, name: str, patch: str, model: str = "m", instance: str = INSTANCE) -> Path:
    """A trajectory of mini-swe-agent, which looked and handed a patch in."""
    info = {"mini_version": "2", "exit_status": "Submitted", "submission": patch}
    info["config"] = {"model": {"model_name": model}}
    said = [user("q"), assistant(f"```bash\nls {name}\n```")]
    return document(folder / f"{name}.traj.json", {"messages": said, "info": info, "instance_id": instance})


def imported(root: Path, *paths: Path, on: str | None = None, **settings: Any) -> Run:
    """The run of `composer import` with these paths, in `root / "artifacts"`."""
    config = Config(paths=[str(path) for path in paths], **settings)
    return Run(runner.execute("import", {}, config, root=root / "artifacts", on=on).path)
