"""Fifteen pairs of real logs of six programs: what `composer compare` says, beside an independent computation.

    python benchmarks/compare_pairs.py PUBLIC SHARED

PUBLIC holds clones of public repositories as OWNER+NAME, of which files of less than 4 MiB are enough:
laude-institute/terminal-bench-leaderboard, sierra-research/tau-bench and evaleval/every_eval_ever. SHARED is `real` of
the project's own collection. Each pair takes one command in a fresh process, whose seconds are the table's. The scores
are read again here by a few lines for each program: the difference by numpy, p and interval by scipy (McNemar's exact
test where each side tries a task once, else Student's t), and by the packages evalconfidence and paired-eval, called
with the same scores. tau-bench's file of one model is cut into its first and last two trials; GSM8K's answers of three
models are written as tables of ids and scores.
"""

import gzip
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import cases
import numpy as np
import records
from records import Claim, measured
from scipy import stats

Scores = dict[str, list[float]]
PEERS = "python -m pip install evalconfidence==0.1.1 paired-eval==0.4.0"
TERMINAL = "laude-institute+terminal-bench-leaderboard/results/terminal-bench-core@0.1.1"
SWE, WIKI, GSM8K = "swe-patches", "trajectories/wiki-search", "multi-answers/gsm8k_example_model_solutions.800.jsonl.gz"
ARC = "evaleval+every_eval_ever/tests/data/inspect"
PAIRS = [
    *(
        ("SWE-bench", f"{SWE}/{a}", f"{SWE}/{b}")
        for a, b in (
            ("moatless_gpt-4o_20240617", "moatless_claude-3.5-sonnet_20240623"),
            ("auto-code-rover_gpt-4-0125_run1", "auto-code-rover_gpt-4-0125_run2"),
            ("swe-agent_gpt4_20240402", "aider_gpt-4o+claude-3-opus_20240523"),
        )
    ),
    *(
        ("verifiers", f"{WIKI}/{a}.results.jsonl.gz", f"{WIKI}/{b}.results.jsonl.gz")
        for a, b in (
            ("gpt-4.1-nano", "gpt-4.1"),
            ("gpt-4.1-mini", "gpt-5-mini"),
            ("qwen3-4b-instruct-2507", "willcb-qwen3-4b-wiki-search"),
        )
    ),
    *(
        ("Terminal-Bench", f"{TERMINAL}/{a}", f"{TERMINAL}/{b}")
        for a, b in (
            ("20250829_goose_claude-4-sonnet", "20250829_goose_claude-4-opus"),
            ("20250923_droid_claude-4-sonnet", "20250923_droid_claude-4-1-opus"),
            ("20250902_orchestrator_qwen-3-coder-480B", "20250902_orchestrator_claude-4-sonnet"),
            ("20250825_swe-agent-mini_claude-4-sonnet", "20250811_cursor-cli_claude-4-sonnet"),
        )
    ),
    ("tau-bench", "tau/trials-0-1-airline.json", "tau/trials-2-3-airline.json"),
    ("table", "gsm8k/6b_finetuning.csv", "gsm8k/175b_finetuning.csv"),
    ("table", "gsm8k/175b_finetuning.csv", "gsm8k/175b_verification.csv"),
    ("inspect", f"{ARC}/data_arc_qwen.json", f"{ARC}/data_arc_sonnet.json"),
    (
        "inspect",
        "trajectories/inspect/2025-02-11T15-18-04-05-00_popularity_mj7khqpMM4GBCfVQozKgzB.eval",
        "trajectories/inspect/2025-05-12T20-28-13-04-00_popularity.json",
    ),
]
GRADES = {"C": 1.0, "I": 0.0}


def prepared(folder: Path, public: Path, shared: Path) -> None:
    """Write what is compared and is no file of a program: trials of one file, and tables."""
    trials = json.loads((public / "sierra-research+tau-bench/historical_trajectories/gpt-4o-airline.json").read_text())
    (folder / "tau").mkdir()
    for name, kept in (("0-1", (0, 1)), ("2-3", (2, 3))):
        rows = [row for row in trials if row["trial"] in kept]
        (folder / f"tau/trials-{name}-airline.json").write_text(json.dumps(rows))
    answers = lines_of(shared / GSM8K)
    (folder / "gsm8k").mkdir()
    for model in ("6b_finetuning", "175b_finetuning", "175b_verification"):
        lines = [f"q{at},{int(row[model]['is_correct'])}\n" for at, row in enumerate(answers)]
        (folder / f"gsm8k/{model}.csv").write_text("id,score\n" + "".join(lines))


def lines_of(path: Path) -> list[Any]:
    """Return the rows of packed JSON Lines."""
    return [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]


def scores_of(program: str, path: Path) -> Scores:
    """Return the scores of each task, read without this program; a trial without a verdict has failed."""
    if program == "SWE-bench":
        submitted = [row["instance_id"] for row in lines_of(path / "all_preds.jsonl.gz")]
        resolved = json.loads((path / "report.json").read_text())["resolved"]
        return {name: [float(name in resolved)] for name in submitted}
    if program == "table":
        return {name: [float(score)] for name, score in (line.split(",") for line in path.read_text().split()[1:])}
    found: Scores = {}
    for task, score in _scored(program, path):
        found.setdefault(task, []).append(float(score))
    return found


def _scored(program: str, path: Path) -> Iterator[tuple[str, float]]:
    if program == "verifiers":
        for row in lines_of(path):
            yield row["prompt"][-1]["content"], row["reward"]
    elif program == "Terminal-Bench":
        runs = [json.loads(file.read_text()) for file in path.rglob("*results.json")]
        for trial in (trial for run in runs for trial in run.get("results", ())):
            yield trial["task_id"], trial["is_resolved"] or 0
    elif program == "tau-bench":
        for row in json.loads(path.read_text()):
            yield str(row["task_id"]), row["reward"]
    else:
        yield from _inspect(path)


def _inspect(path: Path) -> Iterator[tuple[str, float]]:
    if path.suffix == ".eval":
        import zipfile

        with zipfile.ZipFile(path) as archive:
            names = [name for name in archive.namelist() if name.startswith("samples/")]
            samples = [json.loads(archive.read(name)) for name in names]
    else:
        samples = json.loads(path.read_text())["samples"]
    for sample in samples:
        yield str(sample["id"]), GRADES[next(iter(sample["scores"].values()))["value"]]


def independent(a: Scores, b: Scores, failed: bool) -> dict[str, Any]:
    """Return tasks, difference, interval and p of B minus A by numpy and scipy, and what the two packages say."""
    from evalconfidence import compare as evalconfidence
    from evalconfidence.types import ItemResult
    from paired_eval import paired_compare

    tasks = sorted(a.keys() | b.keys() if failed else a.keys() & b.keys())
    mean_a, mean_b = (np.array([np.mean(side.get(task, [0.0])) for task in tasks]) for side in (a, b))
    apart = mean_b - mean_a
    once = max(map(len, [*a.values(), *b.values()])) == 1
    wins, losses = int((apart > 0).sum()), int((apart < 0).sum())
    t = stats.ttest_1samp(apart, 0)
    p = stats.binomtest(wins, wins + losses).pvalue if once and wins + losses else 1.0 if once else t.pvalue
    items = [
        [ItemResult(task, name, score, epoch) for task, own in side.items() for epoch, score in enumerate(own)]
        for name, side in (("B", b), ("A", a))
    ]
    theirs = evalconfidence(*items)
    limits = t.confidence_interval()
    return {
        "tasks": len(tasks),
        "difference": float(apart.mean()),
        "interval": (float(limits.low), float(limits.high)),
        "p": float(p),
        "evalconfidence": f"{100 * theirs.diff:+.1f}, p {theirs.p_value:.3f}" + ("" if theirs.paired else ", unpaired"),
        "paired-eval": f"p {paired_compare(mean_b.tolist(), mean_a.tolist())['p_value']:.3f}"
        if a.keys() == b.keys()
        else "refuses unequal lists",
    }


def compared(paths: Sequence[Path], folder: Path) -> tuple[Mapping[str, Any], float]:
    """Return what one command says in a fresh process, and its seconds."""
    program = str(Path(sys.executable).parent / "composer")
    begun = time.perf_counter()
    words = [program, "compare", *map(str, paths), "--json", "--quiet", "--artifacts", str(folder / "runs")]
    done = subprocess.run(words, capture_output=True, text=True)
    seconds = time.perf_counter() - begun
    if done.returncode not in (0, 1, 3):
        raise SystemExit(f"{' '.join(words)}: {done.stderr}")
    return json.loads(done.stdout)["summary"]["differences"][0], seconds


def pairs(public: Path, shared: Path) -> Iterator[Claim]:
    """All pairs: difference, interval and p beside those of numpy, scipy and the two packages."""
    cases.needed("evalconfidence", "paired_eval", by=PEERS)
    rows, apart, seconds = [], [], []
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        prepared(folder, public, shared)
        for program, a, b in PAIRS:
            paths = [next(at / name for at in (folder, shared, public) if (at / name).exists()) for name in (a, b)]
            found, took = compared(paths, folder)
            one, other = (scores_of(program, path) for path in paths)
            own = independent(one, other, failed=found["counted_as"] == "failed")
            apart.append((abs(found["estimate"] - own["difference"]), abs(found["p"] - own["p"])))
            seconds.append(took)
            rows.append(row(program, paths, found, own, took))
            print(*rows[-1].values(), sep=" | ", flush=True)
    records.keep(__file__, "pairs", rows)
    num = len(PAIRS)
    differences, of_p = zip(*apart, strict=True)
    words = f"{num} pairs of real logs of {len({program for program, *_ in PAIRS})} programs"
    off = f"{words}: largest distance of a difference from numpy's"
    yield measured(off, 100 * max(differences), n=num, unit="points", goal="<= 0.000001")
    yield measured(f"{words}: largest distance of p from scipy's", max(of_p), n=num)
    yield measured(f"{words}: commands for each", 1, n=num, goal="= 1")
    spread = min(seconds), max(seconds)
    yield measured(f"{words}: seconds of a fresh process", float(np.median(seconds)), spread, n=num, unit="s")


def row(
    program: str, paths: Sequence[Path], found: Mapping[str, Any], own: Mapping[str, Any], took: float
) -> dict[str, str]:
    """Return one line of the table."""

    def limits(low: float, high: float) -> str:
        return f"[{100 * low:+.1f}, {100 * high:+.1f}]"

    names = [path.name.partition(".results")[0] for path in paths]
    names = [(Path(name).stem if path.is_file() else name)[:40] for name, path in zip(names, paths, strict=True)]
    return {
        "program": program,
        "A": names[0],
        "B": names[1],
        "tasks": f"{found['num_tasks']}",
        "difference": f"{100 * found['estimate']:+.1f} {limits(found['low'], found['high'])}, p {found['p']:.3f}",
        "numpy, scipy": f"{100 * own['difference']:+.1f} {limits(*own['interval'])}, p {own['p']:.3f}",
        "evalconfidence": own["evalconfidence"],
        "paired-eval": own["paired-eval"],
        "s": f"{took:.1f}",
    }


CASES = {"pairs": pairs}

if __name__ == "__main__":
    cases.main(__file__, CASES)
