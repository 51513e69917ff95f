"""How fast two importers read: one Claude Code session and ATIF documents, each of about 20 MB, made here.

    python benchmarks/importers.py

Prints for each MB, rollouts, steps, seconds and MB/s of reading, redaction and making rows (writing tables is left
out), the same without redaction, and the peak of this process's memory.
"""

import json
import random
import resource
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import records

from stages.formats import files, reading, rows
from stages.formats.base import Drop
from stages.formats.reading import FileCount
from stages.formats.reports import Sidecars

MEGABYTES = 20
WORDS = ("return", "def", "value", "index", "error", "assert", "import", "token", "state", "path", "name", "for")
OUTPUT = 10_000
"""Characters of a command's output, cut where agents cut it."""


def main() -> None:
    """Make both files and read them."""
    with tempfile.TemporaryDirectory() as folder:
        for name, lines in (("claude-code", claude_code()), ("atif", atif())):
            path = Path(folder) / f"{name}.jsonl"
            with path.open("w") as file:
                size = 0
                while size < MEGABYTES * 1e6:
                    size += file.write(json.dumps(next(lines)) + "\n")
            for redact in (True, False):
                measure(path, name, redact=redact)


def measure(path: Path, name: str, *, redact: bool) -> None:
    """Read a file as `composer import` does."""
    began, rollouts, steps = time.perf_counter(), 0, 0
    sidecars = Sidecars(redact=redact)
    for source, importer in reading.detect_formats(files.find([str(path)]), name, sidecars).items():
        for item in reading.read(source, importer, sidecars, FileCount("", "", "")):
            assert not isinstance(item, Drop), item
            rollouts, steps = rollouts + 1, steps + len(rows.payload(item, 0)["steps"])
    took, size = time.perf_counter() - began, path.stat().st_size / 1e6
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    told = f"{size:.1f} MB, {rollouts} rollouts, {steps} steps, {took:.2f} s, {size / took:.1f} MB/s"
    print(f"{name:12} redact={redact!s:5} {told}, peak {peak:.0f} MB", flush=True)
    what = f"{name}, a file of {MEGABYTES} MB, {'with' if redact else 'without'} redaction"
    claims = [
        records.measured(f"{what}: read", size / took, unit="MB/s", n=1),
        records.measured(f"{what}: peak memory of the process", peak, unit="MB", n=1),
    ]
    records.write(__file__, claims)


def output(rng: random.Random) -> str:
    """What a command might print."""
    return "\n".join(" ".join(rng.choices(WORDS, k=10)) for _ in range(OUTPUT // 60))


def claude_code() -> Iterator[dict[str, Any]]:
    """The lines of one session without end."""
    rng, before = random.Random(0), None
    about = {"sessionId": "s", "cwd": "/work", "version": "2.1.0", "isSidechain": False}
    for number in range(10**9):
        asked = number == 0
        result = {"type": "tool_result", "tool_use_id": f"c{number - 2}", "content": output(rng)}
        content: Any = "Fix it." if asked else [result]
        user = {"type": "user", "uuid": f"u{number}", "parentUuid": before, "message": {"content": content}}
        yield {**about, **user, **({} if asked else {"toolUseResult": {"stdout": content[0]["content"]}})}
        call = {"type": "tool_use", "id": f"c{number}", "name": "Bash", "input": {"command": "cat a.py"}}
        usage = {"input_tokens": 4, "cache_read_input_tokens": 90, "output_tokens": 30}
        message = {"id": f"m{number}", "model": "m", "content": [call], "usage": usage, "stop_reason": "tool_use"}
        before = f"a{number}"
        yield {**about, "type": "assistant", "uuid": before, "parentUuid": f"u{number}", "message": message}


def atif() -> Iterator[dict[str, Any]]:
    """Documents of 50 steps each."""
    rng = random.Random(0)
    for number in range(10**9):
        steps: list[dict[str, Any]] = [{"step_id": 1, "source": "user", "message": f"Fix {number}."}]
        for step in range(2, 52):
            call = {"tool_call_id": str(step), "function_name": "bash", "arguments": {"command": "cat a.py"}}
            results = [{"source_call_id": str(step), "content": output(rng)}]
            acted = {"source": "agent", "message": "I look.", "tool_calls": [call], "observation": {"results": results}}
            steps.append({"step_id": step, **acted, "metrics": {"prompt_tokens": 9, "completion_tokens": 3}})
        agent = {"name": "a", "version": "1", "model_name": "m"}
        yield {"schema_version": "ATIF-v1.6", "session_id": str(number), "agent": agent, "steps": steps}


if __name__ == "__main__":
    main()
