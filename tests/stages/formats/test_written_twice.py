"""Every format written and read twice, under two orders of hashes: equal files, and equal content of the import."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from composer_stages import export, import_traces
from composer_stages.formats import FORMATS
from composer_stages.formats.transcripts import plain_arguments
from composer_stages.runs import runner, store
from composer_stages.runs.run import Run


def write_and_read(source: str) -> dict[str, dict[str, Any]]:
    """Export a run to every format and import it again, below the working folder; return digests by format."""
    root, digests = Path("artifacts"), dict[str, dict[str, Any]]()
    for name in (*(name for name, spec in FORMATS.items() if spec.written), "hub"):
        config = export.Config(format=name)
        path = runner.execute("export", {"rollouts": Run(Path(source))}, config, root=root, out=root / name).path
        files = {str(file.relative_to(path)): store.file_sha256(file) for file in path.rglob("*") if file.is_file()}
        ignored = (".", "manifest.json", "logs")
        digests[name] = {file: sha for file, sha in files.items() if not file.startswith(ignored)}
        if name != "hub":
            again = import_traces.Config(paths=[str(path)], format=name, model="m")
            manifest = Run(runner.execute("import", {}, again, root=root).path).manifest
            digests[name]["read"] = {table: out["content_sha256"] for table, out in manifest.outputs.items()}
            digests[name]["counts"] = manifest.counts["rollouts"]
    return digests


def test_every_format_is_written_and_read_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rollouts of SWE-bench's shape by two models, with rewards and patches."""
    from support.transcripts import PATCH, assistant, imported, jsonl, tool, user

    said = [assistant("```bash\nls\n```"), tool("a.py"), assistant("Done.")]
    rows = [
        {"instance_id": f"owner__repo-{n % 3}", "model": f"model-{n % 2}", "resolved": bool(n % 2)}
        | {"patch": PATCH * (n + 1), "messages": [user(f"Q{n % 3}"), *said]}
        for n in range(6)
    ]
    source = str(imported(tmp_path, jsonl(tmp_path / "rows.jsonl", *rows)).path)
    for folder in ("here", "there"):
        (tmp_path / folder).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    first = write_and_read(source)
    # Another process orders sets by other hashes.
    env = {**os.environ, "PYTHONHASHSEED": "1"}
    words = [sys.executable, __file__, source]
    second = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path / "there", env=env)
    assert second.returncode == 0, second.stderr
    assert first == json.loads(second.stdout.splitlines()[-1])
    assert first.keys() == {*(name for name, spec in FORMATS.items() if spec.written), "hub"}
    assert all(digests.get("counts", 6) == 6 for digests in first.values())


def test_arguments_are_an_object_only_where_readers_of_json_leave_it_as_it_is() -> None:
    assert plain_arguments('{"b": 1, "a": [2.5]}') == {"b": 1, "a": [2.5]}
    assert [plain_arguments(text) for text in ('{"n": 1e400}', '{"n": 12345678901234567890123}', "{", "[1]")] == [
        None
    ] * 4


if __name__ == "__main__":
    print(json.dumps(write_and_read(sys.argv[1])))
