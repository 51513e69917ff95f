"""Pages of a large run in a headless Chromium, and lists of many runs: `composer view`, `status` and `query`.

    python benchmarks/view.py pages RUN [--rollouts 1000 100000] [--rounds 7] [--pictures FOLDER]
    python benchmarks/view.py lists ARTIFACTS [--runs 2000]

RUN is the folder of a small collection, which is multiplied to as many rollouts as are asked for, below a temporary
artifacts folder. Measured are milliseconds to the first byte, the first paint and the load of a page: medians and the
least of the rounds; the first of each page, which reads its files for the first time, is dropped. `--pictures` saves
every page, light, dark and on a phone. The runs of ARTIFACTS, such as those of a demo, are copied until there are as
many as are asked for.
"""

import hashlib
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import cases
from needs import NEEDS
from records import Claim, measured
from support.browser import browsing
from support.command_line import command, environment
from support.view_site import multiplied, rollout_path, serving_view

from stages.runs import catalog, queries
from stages.runs.run import SMALL_BYTES, Manifest, Run, write_manifest

LOOKS = {"light": {}, "dark": {"dark": True}, "phone": {"width": 390, "height": 844}}


def pages_of(run: str, rollout_id: str) -> dict[str, str]:
    """The pages that are measured."""
    copy = rollout_id.rpartition("-")[2]
    return {
        "runs": "",
        "first page of rollouts": f"run/{run}",
        "hacked ones": f"run/{run}?hacked=on",
        "a text": f"run/{run}?text=copy-{copy}",
        "by reward": f"run/{run}?order=reward",
        "a rollout": rollout_path(run, rollout_id),
    }


def pages(
    run: Path, rollouts: tuple[int, ...] = (1_000, 100_000), rounds: int = 7, pictures: Path | None = None
) -> Iterator[Claim]:
    """The load of each page of a run that is multiplied to so many rollouts. pictures: a folder for screenshots."""
    if NEEDS["chromium"].found() is None:
        sys.exit("benchmarks/view.py needs a Chromium. Type: apt install chromium")
    print("| rollouts | page | first byte, ms (least) | paint (least) | load (least) |")
    print("| --- | --- | --- | --- | --- |")
    for number in rollouts:
        with tempfile.TemporaryDirectory() as folder:
            yield from _pages(Path(folder), run, number, rounds, pictures)


def _pages(folder: Path, source: Path, number: int, rounds: int, pictures: Path | None) -> Iterator[Claim]:
    run = multiplied(source.resolve(), folder / "artifacts", number)
    (found,) = queries.page(Run(run), queries.RolloutFilter(), number * 9 // 10, 1).rows
    with serving_view(folder / "artifacts") as site, browsing(folder) as tab:
        for name, path in pages_of(f"collect/{run.name}", found["id"]).items():
            times = []
            for _ in range(rounds + 1):
                tab.open(site.url + path)
                times.append(tab.timing())
            shown = [[t[key] for t in times[1:]] for key in ("first_byte", "paint", "load")]
            cells = " | ".join(f"{statistics.median(ms):.0f} ({min(ms):.0f})" for ms in shown)
            print(f"| {number:,} | {name} | {cells} |", flush=True)
            claim, loads = f"composer view, {number:,} rollouts, {name}: load of the page", shown[-1]
            yield measured(claim, statistics.median(loads), unit="ms", n=len(loads), goal="<= 1000")
            for look, settings in LOOKS.items() if pictures else ():
                tab.look(**settings)
                tab.open(site.url + path)
                tab.picture(pictures / f"{number}-{name.replace(' ', '-')}-{look}.png")
            tab.look()


def lists(artifacts: Path, runs: int = 2000) -> Iterator[Claim]:
    """Wall time, processor time and peak memory of lists of so many runs; without an index on disk, then with one."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder).resolve()
        copied(artifacts.resolve(), root, runs)
        time.sleep(3)  # what is younger than a tick of the file system's clock is not remembered
        query = ("query", "select count(*) from runs")
        for words, goal in ((query, None), (("status",), None), (("view",), "<= 1")):
            index = root / ".runs.json"
            for state in ("without an index", "with an index"):
                if state == "without an index":
                    index.unlink(missing_ok=True)
                told = f"composer {words[0]}, {runs:,} runs, {state}"
                for what, (seconds, busy, peak) in (
                    first_page(root) if words == ("view",) else ran(root, words)
                ).items():
                    again = what.endswith("again")
                    yield measured(f"{told}{what}", seconds, unit="s", n=1, goal="<= 0.2" if again else goal)
                    yield measured(f"{told}{what}: processor time", busy, unit="s", n=1)
                    if peak:
                        yield measured(f"{told}{what}: peak memory", peak, unit="MB", n=1)


def copied(source: Path, root: Path, number: int) -> None:
    """Copy runs until there are `number`, with names and fingerprints of their own; copies read copies."""
    every = catalog.folders(source)
    for at in range(number):
        old, copy = every[at % len(every)], at // len(every)
        folder = root / _copy(catalog.name(old), copy)
        shutil.copytree(old, folder, copy_function=_copied)
        fields = json.loads((old / "manifest.json").read_bytes())
        fields["fingerprint"] = _digest(fields["fingerprint"], copy)
        for ref in (ref for refs in fields["inputs"].values() for ref in refs):
            read = root / _copy(catalog.name(Path(ref["path"])), copy)
            ref |= {"path": str(read), "fingerprint": _digest(ref["fingerprint"], copy)}
        write_manifest(folder, Manifest.model_validate(fields))


def _copy(name: str, copy: int) -> str:
    """Return the name of a copy of a run, which ends in another fingerprint."""
    return name[:-6] + _digest(name, copy)[:6]


def _digest(text: str, copy: int) -> str:
    return hashlib.sha256(f"{copy} {text}".encode()).hexdigest()


def _copied(source: str, target: str) -> None:
    """Copy small files, which are read with the list; large ones are links."""
    shutil.copyfile(source, target) if os.path.getsize(source) <= SMALL_BYTES else os.link(source, target)


def ran(root: Path, words: tuple[str, ...]) -> dict[str, tuple[float, float, float]]:
    """Run a command in a process of its own; return seconds, processor seconds, peak memory in MB."""
    began = time.perf_counter()
    null = os.open(os.devnull, os.O_WRONLY)
    line = command(*words, "--json")
    process = os.posix_spawn(line[0], line, dict(environment(root)), file_actions=[(os.POSIX_SPAWN_DUP2, null, 1)])
    _, status, usage = os.wait4(process, 0)
    os.close(null)
    assert status == 0
    return {"": (time.perf_counter() - began, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024)}


def first_page(root: Path) -> dict[str, tuple[float, float, float]]:
    """Ask a server twice for the list of runs; return seconds, processor seconds and, once, peak memory in MB."""
    found = {}
    with serving_view(root) as site:
        for what in (": first page", ": first page again"):
            began, busy = time.perf_counter(), _busy(site.process.pid)
            assert site.get().status == 200
            seconds, busy = time.perf_counter() - began, _busy(site.process.pid) - busy
            found[what] = (seconds, busy, 0.0)
        found[what] = (seconds, busy, cases.memory("VmHWM", site.process.pid) / 1e6)
    return found


def _busy(process: int) -> float:
    """Return the processor seconds of a process so far. Source: Linux, proc(5)."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


CASES = {"pages": pages, "lists": lists}


if __name__ == "__main__":
    cases.main(__file__, CASES)
