"""The record of what benchmarks measured: written by the benchmarks, read by the documents.

A record is `benchmarks/results/NAME.json`, a list of claims, each one measured number with what it takes to judge it:

    claim         what was measured, sizes included; unique in its record
    value, unit   the number; a ratio has no unit
    interval      its 95 % interval, or null; empty where it would be one of fewer than seven measurements
    n             how many measurements (rounds, runs, tasks, rows) the value rests on
    date, commit  when it was measured, and of which code; `-dirty` after a commit: with changes that were not committed
    machine       processor, cores, load before the benchmark began, versions
    command       what gives the number again
    registration  the commit that announced hypothesis and decision rule; null for an exploratory measurement
    goal          `<= 1.1`, `>= 2`, `= 0` or two of these as `>= 1, <= 1.15`, or null: a target, met if the entire
                  interval meets it, and a count of `= 0` by itself; a single value that meets it is `measured once`.
                  Only a registration shows that it was set before the first measurement

`write` replaces claims of the same words and keeps the others, so a call with other sizes adds claims. To withdraw a
number, delete its claim from the record; `./dev cog` ends with an error where a document still asks for it.
A table whose cells are no claims is kept in `tables/SCRIPT-NAME.json` (`keep`), and shown with the record (`page`).
COMPOSER_BENCHMARK_RESULTS names another folder for records, such as a temporary one for a trial.
"""

import ast
import datetime
import json
import operator
import os
import platform
import random
import re
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LOAD = os.getloadavg()[0]
"""Load of the machine before the benchmark adds its own."""
CODE = ("stages", "composer_cli", "benchmarks/*.py", "tests/support", "tests/parity", "tests/probe_faults")
"""What a benchmark executes; a change of anything else leaves its commit as it is."""
RESAMPLES = 2000
FEWEST = 7
"""Measurements from which on an interval is claimed: of three rounds, bootstrap intervals hold 74 to 77 %."""
EARLIER = {
    "crash": "takes hours",
    "forgeries": "takes hours in sandboxes",
    "gpu-correctness": "needs a GPU",
    "gpu-memory": "needs a GPU",
    "gpu-probe": "needs a GPU",
    "gpu-rehearsed": "takes hours",
    "gpu-sampling": "needs a GPU",
    "graders": "needs data sets from outside",
    "hint_check": "needs a model and a data set from outside",
    "probe_levels": "takes hours",
    "sandbox": "needs mini-swe-agent on an idle machine",
}
"""Records with claims of commits that this history lacks or of changed trees, and why they are not measured anew."""
COMPARED = {"<=": operator.le, ">=": operator.ge, "=": operator.eq}
WORDS = {"<=": "at most", ">=": "at least", "=": "exactly"}


@dataclass(frozen=True)
class Claim:
    """One measured number; the module's docstring explains the fields."""

    claim: str
    value: float
    unit: str
    interval: Sequence[float] | None
    n: int
    date: str
    commit: str
    machine: str
    command: str
    registration: str | None
    goal: str | None

    @property
    def outcome(self) -> str | None:
        """Whether the goal was met or missed; `measured once` or `not shown` where the value alone meets it."""
        if self.goal is None:
            return None
        bounds = [(COMPARED[sign], float(bound)) for sign, bound in _bounds(self.goal)]
        meets = [all(meet(value, bound) for meet, bound in bounds) for value in (self.value, *(self.interval or ()))]
        if not meets[0]:
            return "missed"
        if self.interval or self.goal.startswith("="):  # a count of what went wrong is exact
            return "met" if all(meets) else "not shown"
        return "measured once" if self.n == 1 else "not shown"

    def __str__(self) -> str:
        """The value with its interval and unit."""
        between = f" [{', '.join(map(_short, self.interval))}]" if self.interval else ""
        return f"{_short(self.value)}{between} {self.unit}".strip()


# --- what benchmarks call


def measured(
    claim: str,
    value: float,
    interval: Sequence[float] | None = None,
    *,
    n: int,
    unit: str = "",
    goal: str | None = None,
    registration: str | None = None,
) -> Claim:
    """Return a claim measured now, on this machine, by this command; no interval of fewer than `FEWEST`."""
    return Claim(
        claim=claim,
        value=_rounded(value),
        unit=unit,
        interval=None if interval is None else tuple(map(_rounded, interval)) if n >= FEWEST else (),
        n=n,
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        commit=_commit(),
        machine=_machine(),
        command=_command(),
        registration=registration,
        goal=goal,
    )


def ratio(
    ours: Sequence[float], theirs: Sequence[float], of: Callable[[Iterable[float]], float] = statistics.median
) -> tuple[float, tuple[float, float]]:
    """Return the median of `ours` over that of `theirs`, with its 95 % interval by bootstrap.

    Rounds, in which both had their turn, are drawn together, because other work on the machine slows both. of: what
    takes the median's place, such as the mean where rounds follow on each other and their sum counts.
    """
    rounds, draw = list(zip(ours, theirs, strict=True)), random.Random(0)
    drawn = sorted(_over(draw.choices(rounds, k=len(rounds)), of) for _ in range(RESAMPLES))
    found, low, high = _over(rounds, of), drawn[RESAMPLES // 40], drawn[-1 - RESAMPLES // 40]
    return found, (min(found, low), max(found, high))


def share(claim: str, held: int, of: int, goal: str | None = None) -> Claim:
    """Return in how many of all it held as a claim in per cent, with its interval by Clopper and Pearson."""
    from scipy.stats import binomtest  # which a machine that has torch alone lacks

    low, high = binomtest(held, of).proportion_ci()
    return measured(claim, 100 * held / of, (100 * low, 100 * high), n=of, unit="%", goal=goal)


def _over(rounds: list[tuple[float, float]], of: Callable[[Iterable[float]], float]) -> float:
    return of(pair[0] for pair in rounds) / of(pair[1] for pair in rounds)


def write(script: str, claims: Iterable[Claim]) -> None:
    """Put claims into the record of a script, its `__file__` or its name; those of the same words are replaced."""
    path = folder() / f"{Path(script).stem}.json"
    held = {claim.claim: claim for claim in (*(read(path) if path.exists() else ()), *claims)}
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps([asdict(claim) for claim in held.values()], indent=1, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")


def keep(script: str, name: str, rows: Sequence[Mapping[str, str]]) -> None:
    """Keep a table of a script, its `__file__` or its name, in place of the one of this name: cells by column."""
    path = folder() / "tables" / f"{Path(script).stem}-{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def folder() -> Path:
    """Return the folder of records."""
    return Path(os.environ.get("COMPOSER_BENCHMARK_RESULTS", ROOT / "benchmarks" / "results"))


def _rounded(value: float) -> float:
    """To four significant digits, more than any of these measurements supports."""
    return value if isinstance(value, int) else float(f"{value:.4g}")


def _commit() -> str:
    def git(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True)

    changed = git("diff", "--quiet", "HEAD", "--", *CODE).returncode != 0
    return git("rev-parse", "--short=7", "HEAD").stdout.strip() + ("-dirty" if changed else "")


def _machine() -> str:
    names = [line.partition(": ")[2] for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line]
    parts = [names[0] if names else platform.machine(), f"{os.cpu_count()} cores", f"load {LOAD:.1f} before"]
    if torch := sys.modules.get("torch"):
        parts += [torch.cuda.get_device_name()] if torch.cuda.is_available() else []
        parts.append(f"torch {torch.__version__}")
    return ", ".join([*parts, f"CPython {platform.python_version()}"])


def _command() -> str:
    """Return the command line, without the folders of this machine."""
    script, *arguments = (Path(word).name if word.startswith("/") else word for word in sys.argv)
    return shlex.join(["python", f"benchmarks/{Path(script).name}", *arguments])


# --- what documents call


def read(path: Path) -> list[Claim]:
    """Return the claims of a record."""
    rows = json.loads(path.read_bytes())
    return [Claim(**row | {"interval": None if row["interval"] is None else tuple(row["interval"])}) for row in rows]


def show(cog: Any, wanted: str) -> None:
    """Print a table of the claims that a document asks for, a line `NAME: claim` for each.

    A line may end in ` => WORDS`, which are shown in the place of the claim's own. cog: the module of the block. A
    claim that was withdrawn ends the generation.
    """
    found = []
    for line in wanted.strip().splitlines():
        name, _, rest = line.partition(": ")
        words, _, shown = rest.partition(" => ")
        path = folder() / f"{name}.json"
        held = {claim.claim: claim for claim in (read(path) if path.exists() else ())}
        if words not in held:
            cog.error(
                f"{cog.inFile} asks for a claim that benchmarks/results/{path.name} does not hold, withdrawn or "
                f"reworded: {words!r}. Delete the line from {cog.inFile}, or run ./dev bench {name}."
            )
        found.append((shown or words, str(held[words]), _goal(held[words])))
    cog.outl(_table(("measured", "value", "target"), found))


def goals(cog: Any) -> None:
    """Print how many measurements meet their target, in sentences; cog: the module of the block in the document."""
    aimed = [claim for path in folder().glob("*.json") for claim in read(path) if claim.goal]
    found = [claim.outcome for claim in aimed]
    told = ", ".join(f"{found.count(word)} {word}" for word in ("met", "measured once", "not shown", "missed"))
    with_interval = sum(bool(claim.interval) for claim in aimed)
    registered = sum(claim.registration is not None for claim in aimed)
    cog.outl(
        f"{len(found)} measured numbers have a target: {told}. {with_interval} of them have an interval, and "
        f"{registered} had the target registered before the measurement."
    )


def page() -> str:
    """Return a section for each record, with a row for each of its claims, and the tables that its script kept."""
    sections = []
    for path in sorted(folder().glob("*.json")):
        script = ROOT / "benchmarks" / f"{path.stem.partition('-')[0]}.py"
        about = (ast.get_docstring(ast.parse(script.read_text())) or "").partition("\n\n")[0].replace("\n", " ")
        rows = [
            (c.claim, str(c), f"{c.n:,}", _goal(c), f"{c.date} at {c.commit}{_registered(c)}; {c.machine}", c.command)
            for c in read(path)
        ]
        table = _table(("claim", "value", "n", "target", "measured", "command"), rows)
        earlier = (
            [f"From an earlier history where this one lacks the commit: {EARLIER[path.stem]}."]
            if path.stem in EARLIER
            else []
        )
        kept = (json.loads(one.read_bytes()) for one in sorted(folder().glob(f"tables/{path.stem}-*.json")))
        tables = [*earlier, table, *(_table([*rows[0]], ([*row.values()] for row in rows)) for rows in kept)]
        sections.append("\n\n".join([f"## {path.stem}", about, *tables]))
    return "\n\n".join(sections)


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    cells = [titles, ["---"] * len(titles), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


def _registered(claim: Claim) -> str:
    return f", registered at {claim.registration}" if claim.registration else ""


def _goal(claim: Claim) -> str:
    if claim.goal is None:
        return ""
    wanted = " and ".join(f"{WORDS[sign]} {bound}" for sign, bound in _bounds(claim.goal))
    return f"{wanted}: {'met' if claim.outcome == 'met' else f'**{claim.outcome}**'}"


def _bounds(goal: str) -> list[tuple[str, str]]:
    """Return the signs and numbers of a goal."""
    return [(sign, bound) for sign, bound in (part.split() for part in goal.split(","))]


def _short(value: float) -> str:
    if value == int(value):
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 100 else re.sub(r"e-0?", "e-", f"{value:.3g}")
