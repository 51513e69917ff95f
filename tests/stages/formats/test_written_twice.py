"""Every format written and read twice, under two orders of hashes: equal files, and equal content of what is read."""

import json
import os
import subprocess
import sys
from pathlib import Path

from support.runs import written
from support.transcripts import PATCH

from stages.formats import FORMATS
from stages.rollouts.trace import digests_of_prefixes
from stages.runs import store
from stages.runs.kinds import ROLLOUT, STEP, TASK

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


def played(root: Path) -> Path:
    """Rollouts of SWE-bench's shape by two models, with calls, rewards, patches and a failure."""
    tasks = [
        {"task_id": f"owner__repo-{i}", "env": "swe", "split": "eval", "prompt": f"Q{i}", "data_json": "{}"}
        for i in range(3)
    ]
    rollouts, steps = [], []
    for number in range(6):
        who = {"rollout_id": f"r{number}", "task_id": f"owner__repo-{number % 3}", "env": "swe", "sample_idx": 0}
        who |= {"group_id": who["task_id"], "model": f"model-{number % 2}"}
        about = {"num_steps": 2, "reward": float(number % 2), "hidden_pass": bool(number % 2), "source": "collect"}
        rollouts.append({**who, **about, "patch": PATCH, "submission": PATCH, "terminated_by": "submitted"})
        gains = [
            [{"role": "user", "content": f"Q{number % 3}"}],
            [{"role": "assistant", "content": "```bash\nls\n```"}, {"role": "user", "content": "a.py"}],
        ]
        for step, (gain, digest) in enumerate(zip(gains, digests_of_prefixes(gains), strict=True)):
            row = {
                "step": step,
                "num_steps": 2,
                "num_messages": 1 + 2 * step,
                "state_sha256": digest,
                "done": step == 1,
            }
            said = {
                "new_messages_json": store.encode(gain).decode(),
                "action": "```bash\nls\n```",
                "observation": "a.py",
            }
            steps.append({**who, **row, **said, "commands": ["ls"], "capture_level": "text"})
    return written(root, "collect/played", [(TASK, tasks), (ROLLOUT, rollouts), (STEP, steps)])


def test_every_format_is_written_and_read_alike(tmp_path: Path) -> None:
    source, told = played(tmp_path), []
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
