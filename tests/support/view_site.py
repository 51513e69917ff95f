"""Runs of every sort below one folder, one of them hostile, and the real `composer view` over them."""

import hashlib
import http.client
import json
import os
import re
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from html import unescape
from pathlib import Path
from urllib.parse import quote, urlencode, urlsplit

import duckdb
import pyarrow.parquet as pq

from composer_stages.evaluation.document import verdict_document
from composer_stages.evaluation.outcomes import items_table
from composer_stages.evaluation.verdict import decide
from composer_stages.runs import store
from composer_stages.runs.kinds import EVAL_ITEM, ROLLOUT, STEP
from composer_stages.runs.run import Manifest, RunOutcome, write_manifest
from support import blocks
from support.command_line import environment, until
from support.runs import eval_item, row, written


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
    sealed = {path.name: (path.stat().st_size, store.file_sha256(path)) for path in folder.glob("*.*")}
    manifest |= {"files": {name: {"bytes": size, "sha256": digest} for name, (size, digest) in sealed.items()}}
    write_manifest(folder, Manifest.model_validate(manifest))
    return folder


HOSTILE = (
    "</pre><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
    "\x1b[2J\x1b]0;owned\x07\u202e{{ 7 * 7 }} javascript:alert(1) \x00 ' OR 1=1 --"
)
EVALUATION = "evaluate/20260102T030405Z-kata-aaaaaa"
HOSTILE_RUN = "collect/20260102T030405Z-hostile-bbbbbb"
RUNNING = "train/20260102T030405Z-kata-cccccc"
PLOT = "probe-plot/20260102T030405Z-run-dddddd"
DOT = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010806000000"
    "1f15c4890000000d49444154789c6360000002000001e221bc330000000049454e44ae426082"
)


OUTCOMES = {("A", "t-0"): False, ("B", "t-0"): False, ("A", "t-1"): False, ("B", "t-1"): True}
"""Whether an arm of the evaluation passes a task."""


@dataclass
class Answer:
    """What came back."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode()


@dataclass
class Site:
    """A server by its address, token and all."""

    url: str
    printed: str
    """The address that the command printed."""

    def get(
        self,
        path: str = "",
        *,
        method: str = "GET",
        host: str | None = None,
        whole: str | None = None,
        body: bytes | None = None,
        **headers: str,
    ) -> Answer:
        """An answer to a path below the token; `whole` is a path from the root instead."""
        parts = urlsplit(self.url)
        connection = http.client.HTTPConnection(parts.netloc, timeout=60)
        asked = whole if whole is not None else f"{parts.path}{path}"
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, asked, body, headers={"Host": host or parts.netloc, **named})
        found = connection.getresponse()
        return Answer(found.status, {k.lower(): v for k, v in found.getheaders()}, found.read())

    def note(self, run: str, rollout_id: str, *, headers: dict[str, str] | None = None, **fields: str) -> Answer:
        """The answer to the form with which a page of this server saves a note."""
        sent = {"Content_Type": "application/x-www-form-urlencoded", "Sec_Fetch_Site": "same-origin"} | (headers or {})
        body = urlencode({"id": rollout_id, **fields}).encode()
        return self.get(f"note/{run}", method="POST", body=body, **{k: v for k, v in sent.items() if v})


def links(page: str) -> set[str]:
    """Where the links of a page lead."""
    return {unescape(link) for link in re.findall(r'<a [^>]*href="([^"]+)"', page)}


def shown(page: str) -> str:
    """The text of a page without its tags, as a reader sees it."""
    return unescape(re.sub(r"<[^>]+>", "", page))


@contextmanager
def serving_view(artifacts: Path, page: str = "") -> Iterator[Site]:
    """`composer view` in a process of its own, ended as by Ctrl-C."""
    printed = artifacts.parent / blocks.PRINTED
    words = ["view", *([page] if page else []), "--json"]
    process = blocks.start(words, artifacts.parent, environment(artifacts))
    try:
        until(lambda: not process.is_alive() or (printed.exists() and "}\n" in printed.read_text()))
        address = json.loads(printed.read_text().partition("\n")[0])["url"]
        yield Site(address.removesuffix(page), address)
    finally:
        os.kill(process.pid or 0, signal.SIGINT)
        process.join(30)
    assert process.exitcode == 0


def runs(folder: Path, made: Path) -> Path:
    """An artifacts folder with finished runs, an evaluation, a hostile collection, and a training under way."""
    shutil.copytree(made, folder, symlinks=True)
    evaluated = written(
        folder,
        EVALUATION,
        [(EVAL_ITEM, [item(arm, task, passes) for (arm, task), passes in OUTCOMES.items()])],
        models={"A/0": {"model": "x"}, "B/0": {"model": "y"}},
        config={"baseline": "A", "treatment": "B"},
    )
    twice = [item(arm, f"{task}/{n}", passes) for (arm, task), passes in OUTCOMES.items() for n in range(8)]
    store.write_json(evaluated / "verdict.json", verdict_document(decide(items_table(twice))))
    (evaluated / "report.txt").write_text("the report\n")
    step = {"rollout_id": HOSTILE.replace("\x00", ""), "step": 0, "num_steps": 1, "state_sha256": "0"}
    step["completion_tokens"] = 2
    texts = dict.fromkeys(("task_id", "error_type", "error"), HOSTILE)
    hostile = {
        "rollouts": {**step, **texts, "reward": 0.0, "hacked": True},
        "steps": {
            **step,
            "new_messages_json": json.dumps([{"role": HOSTILE, "content": HOSTILE}]),
            "action": HOSTILE,
            "commands": [HOSTILE],
            "observation": f"FAILED tests/test_a.py::{HOSTILE}\n@@ -1 +1 @@\n-{HOSTILE}\n+{HOSTILE}",
            "completion_token_ids": [1, 2],
            "logprobs": [-0.01, -9.0],
        },
    }
    tables = [
        (kind, [{k: v for k, v in hostile[f"{kind.name}s"].items() if k in kind.columns}]) for kind in (ROLLOUT, STEP)
    ]
    written(folder, HOSTILE_RUN, tables, models={HOSTILE: {"model": HOSTILE}}, reason=HOSTILE)
    running = written(folder, RUNNING, status="running", config={"arm": "A", "seed": 0})
    (running / "metrics.jsonl").write_text(
        "".join(json.dumps({"step": n, "reward": n / 10, "entropy": 2.0}) + "\n" for n in range(1, 6))
    )
    plot = written(folder, PLOT, outcome=RunOutcome(summary={"figures": ["01_cosine_by_step"]}))
    (plot / "01_cosine_by_step.png").write_bytes(DOT)
    return folder


def item(arm: str, task: str, passed: bool) -> dict[str, object]:
    """One item of an evaluation."""
    said = [{"role": "user", "content": f"do {task}"}, {"role": "assistant", "content": f"{arm} did {task}"}]
    conversation = {"transcript_json": store.encode(said).decode(), "steps_json": '[{"message": 1}]'}
    return {**eval_item(arm, task, passed), "family": f"family of {task}", **conversation}


def rollout_path(run: str, rollout_id: str) -> str:
    """The path of a rollout's page."""
    return f"rollout/{run}?id={quote(rollout_id, safe='')}"


def unit(number: int) -> dict[str, object]:
    """A unit of a collection's journal."""
    rollout = row(ROLLOUT, {"rollout_id": f"live-{number}", "task_id": "t", "reward": 1.0, "num_steps": 0})
    return {"unit": f"live-{number}", "failed": False, "rollout": rollout, "steps": []}
