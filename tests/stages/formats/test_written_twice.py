"""Every format written and read twice, under two orders of hashes: equal files, and equal content of what is read."""

import json
import os
import subprocess
import sys
from pathlib import Path

from support.transcripts import PATCH, assistant, imported, jsonl, tool, user

from stages.formats import FORMATS

PROGRAM = """
import json, sys
from pathlib import Path
from stages import export, import_traces
from stages.formats import FORMATS
from stages.runs import runner, store
from stages.runs.run import Run

root, told = Path("artifacts"), {}
for name in (*(name for name, one in FORMATS.items() if one.written), "hub"):
    given = {"rollouts": Run(Path(sys.argv[1]))}
    run = Run(runner.execute("export", given, export.Config(format=name), root=root, out=root / name).path)
    files = {str(path.relative_to(run.path)): store.file_sha256(path) for path in run.path.rglob("*") if path.is_file()}
    told[name] = {path: sha for path, sha in files.items() if not path.startswith((".", "manifest.json", "logs"))}
    if name == "hub":
        continue
    again = import_traces.Config(paths=[str(run.path)], format=name, model="m")
    read = Run(runner.execute("import", {}, again, root=root).path)
    told[name]["read"] = {table: out["content_sha256"] for table, out in read.manifest.outputs.items()}
    told[name]["counts"] = read.manifest.counts["rollouts"]
print(json.dumps([told, list({f"x{i}" for i in range(9)})]))
"""


def test_every_format_is_written_and_read_alike(tmp_path: Path) -> None:
    """Rollouts of SWE-bench's shape by two models, with rewards and patches."""
    rows = [
        {
            "instance_id": f"owner__repo-{n % 3}",
            "model": f"model-{n % 2}",
            "resolved": bool(n % 2),
            "patch": PATCH * (n + 1),
        }
        | {"messages": [user(f"Q{n % 3}"), assistant("```bash\nls\n```"), tool("a.py"), assistant("Done.")]}
        for n in range(6)
    ]
    source, told = imported(tmp_path, jsonl(tmp_path / "rows.jsonl", *rows)).path, []
    for seed in ("1", "2"):
        words, here = [sys.executable, "-c", PROGRAM, str(source)], tmp_path / seed
        here.mkdir()
        env = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run(words, capture_output=True, text=True, cwd=here, env=env)
        assert done.returncode == 0, done.stderr
        told.append(json.loads(done.stdout))
    (first, one), (second, other) = told
    assert one != other, "sets come in two orders"
    assert first.keys() == {*(name for name, one in FORMATS.items() if one.written), "hub"}
    assert first == second
    assert all(told.get("counts", 6) == 6 for told in first.values())
