"""Made-up runs to report on, and the pages on them."""

import json
from dataclasses import asdict
from html.parser import HTMLParser
from pathlib import Path

from stages.evaluation.verdict import decide
from stages.runs.artifact import InputRef, Manifest, Run, RunWriter, write_manifest

EVIL = "<script>alert('gotcha')</script>"
"""What a model may say."""


class Assets(HTMLParser):
    """Everything on a page that a browser would fetch or execute."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag, attributes):
        self.found += [
            f"{tag} {name}" for name, _ in attributes if name in {"src", "href", "srcset", "onclick", "onload"}
        ]
        self.found += [tag] if tag in {"script", "link", "iframe", "img"} else []


def item(arm, task, passed, hacked=False):
    """One graded rollout of an arm."""
    return {
        "item_id": f"{arm}/0/t{task}#0@0",
        "arm": arm,
        "train_seed": 0,
        "task_id": f"t{task}",
        "family": f"f{task % 20}",
        "sample_idx": 0,
        "passed": passed,
        "hacked": hacked,
        "protocol_ok": True,
        "error_type": None,
        "error": None,
        "num_steps": 1,
        "transcript_json": json.dumps([{"role": "assistant", "content": EVIL}]),
    }


def finished(root: Path, stage: str, *reads: Run, **config) -> RunWriter:
    """A run folder of a stage to be filled, complete once `sealed` has written its manifest."""
    refs = [InputRef(stage=r.manifest.stage, path=str(r.path), fingerprint="", content="") for r in reads]
    folder = root / stage / f"20260101T00000{len(list(root.glob('*/*')))}Z-made-abcdef"
    began = {"started_at": "2026-01-01T00:00:00+00:00", "status": "complete", "attempts": 1}
    record = Manifest(
        composer="0", stage=stage, stage_version=1, fingerprint="ab" * 32, config=config, inputs={"x": refs}, **began
    )
    return RunWriter(folder, record, cache=root)


def sealed(out: RunWriter) -> Run:
    """The run in such a folder, complete."""
    write_manifest(out.path, out.manifest)
    return Run(out.path)


def trained(root: Path, arm: str, **weights: float) -> Run:
    """A run of train that logged three steps."""
    out = finished(root, "train", arm=arm, seed=0, weights=weights)
    out.metrics([{"step": step, "reward": 0.1 * step, "loss": 1.0} for step in (1, 2, 3)])
    return sealed(out)


def evaluated(root: Path, passes: dict[str, int], tasks: int = 40) -> Run:
    """A run of evaluate in which the first `passes[arm]` of the tasks pass."""
    arms = [trained(root, arm, **({"dpo": 1.0} if arm == "B" else {})) for arm in passes]
    out = finished(root, "evaluate", *arms)
    items = [
        item(arm, task, task < passes[arm], hacked=arm == "B" and task == 0) for arm in passes for task in range(tasks)
    ]
    out.document("verdict", asdict(decide(items)))
    out.write_all((one["item_id"], {"item": one}, False) for one in items)
    return sealed(out)


def pages(path: Path) -> tuple[str, dict]:
    """A page and the numbers beside it."""
    return path.read_text(), json.loads(path.with_suffix(".json").read_text())
