"""A program with the arguments of Data-Juicer."""

import sys
from pathlib import Path

STAND_IN = """#!{python}
import json, os, sys
told = dict(zip(sys.argv[1::2], sys.argv[2::2]))
assert os.environ["UV_OFFLINE"] == os.environ["PIP_NO_INDEX"] == "1" and "SECRET" not in os.environ
if "fail" in open(told["--config"]).read():
    sys.exit("no such operator")
rows = [json.loads(line) for line in open(told["--dataset_path"])]
os.makedirs(os.path.dirname(told["--export_path"]))
with open(told["--export_path"], "w") as out:
    for row in reversed(rows):
        if len(row["text"]) >= 30:
            row["text"] = row["text"].lower()
            out.write(json.dumps({{**row, "__dj__stats__": {{"text_len": len(row["text"])}}}}) + "\\n")
"""
"""A program with Data-Juicer's arguments that keeps texts of 30 characters, changes them, and reorders them."""


def stand_in(folder: Path) -> str:
    """The program, in a folder of its own."""
    path = folder / "dj-process"
    path.parent.mkdir(exist_ok=True)
    path.write_text(STAND_IN.format(python=sys.executable))
    path.chmod(0o755)
    return str(path)
