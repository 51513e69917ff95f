"""Candidates for the judge, two calls to each, and what the right one answers."""

from pathlib import Path

from stages.sandbox import Call, Limits

LIMITS = Limits(wall_s=1.0, cpu_s=1, memory_mb=256, processes=16, output_bytes=4096)
RIGHT = "def add(a, b):\n    return a + b\n"
EXPECTED = [3, 7]


def write(work: Path, **candidates: str) -> list[Call]:
    """A folder for each candidate, and the calls to it."""
    for name, source in candidates.items():
        (work / name).mkdir()
        (work / name / "solution.py").write_text(source)
    return [Call(f"{name}/solution.py", "add", [(1, 2), (3, 4)]) for name in candidates]
