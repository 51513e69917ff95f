"""A collection of as many rollouts as one likes, multiplied from a small one: for what must stay fast."""

import hashlib
import json
import shutil
from pathlib import Path

import duckdb
import pyarrow.parquet as pq


def multiplied(source: Path, root: Path, number: int) -> Path:
    """A complete run below `root` with `number` rollouts, or a few more; ids and observations differ by copy."""
    folder = (
        root / "collect" / f"20260101T{number % 1_000_000:06d}Z-kata-{hashlib.sha256(b'%d' % number).hexdigest()[:6]}"
    )
    folder.mkdir(parents=True)
    manifest = json.loads((source / "manifest.json").read_text())
    rows = manifest["outputs"]["rollouts"]["rows"]
    copies = -(-number // rows)
    changed = {
        "rollouts": "rollout_id || '-' || copy AS rollout_id, copy % 997 = 1 OR hacked AS hacked",
        "steps": "rollout_id || '-' || copy AS rollout_id, observation || ' copy-' || copy AS observation",
    }
    for name, replaced in changed.items():
        old = pq.read_schema(source / f"{name}.parquet")
        every = f"SELECT * FROM '{source}/{name}.parquet', range({copies}) r(copy) ORDER BY copy"
        question = f"SELECT * REPLACE ({replaced}) FROM ({every})"
        with duckdb.connect() as connection:
            table = connection.sql(question).to_arrow_table().drop_columns(["copy"])
        pq.write_table(table.cast(old), folder / f"{name}.parquet", compression="zstd", row_group_size=8192)
        manifest["outputs"][name] |= {"rows": table.num_rows}
    shutil.copy(source / "tasks.parquet", folder)
    shutil.copy(source / "report.txt", folder)
    manifest |= {"fingerprint": hashlib.sha256(b"%d" % number).hexdigest(), "counts": {"planned": copies * rows}}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder
