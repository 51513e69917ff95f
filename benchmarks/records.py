"""The record of what benchmarks measured: written by the benchmarks, read by the documents.

A record is `benchmarks/results/NAME.json`, a list of claims, each one measured number with what it takes to judge it:

    claim         what was measured, sizes included; unique in its record
    value, unit   the number; a ratio has no unit
    interval      its 95 % interval, or null
    n             how many measurements (rounds, runs, tasks, rows) the value rests on
    date, commit  when it was measured, and of which code; `-dirty` after a commit: with changes that were not committed
    machine       processor, cores, load before the benchmark began, versions
    command       what gives the number again
    kind          `exploratory`, or `registered`: hypothesis and decision rule were committed before the measurement
    registration  that commit; null for exploratory
    goal, met     `<= 1.1`, `>= 2` or `= 0`, decided beforehand, and whether the entire interval meets it; or null, null

A benchmark is a script in this folder that prints what it measures and hands the same numbers over:

    import records
    records.write(__file__, [records.measured("time of X, 16 rows, beside Y's", *records.ratio(ours, theirs), n=9)])

`write` replaces claims of the same words and keeps the others, so a call with other sizes adds claims. To withdraw a
number, delete its claim from the record. Then `./dev docs` makes the tables of documents and the page of all records
anew; it ends with an error where a document still asks for a claim that is gone.
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
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, model_validator

ROOT = Path(__file__).parents[1]
LOAD = os.getloadavg()[0]
"""Load of the machine before the benchmark adds its own."""
CODE = ("stages", "composer_cli", "benchmarks/*.py", "tests/support", "tests/parity", "tests/probe_faults")
"""What a benchmark executes; a change of anything else leaves its commit as it is."""
RESAMPLES = 2000
COMPARED = {"<=": operator.le, ">=": operator.ge, "=": operator.eq}
WORDS = {"<=": "at most", ">=": "at least", "=": "exactly"}


class Claim(BaseModel):
    """One measured number, as the module's docstring explains it."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    claim: str = Field(min_length=10)
    value: float = Field(allow_inf_nan=False)
    unit: str
    interval: tuple[float, float] | None
    n: int = Field(ge=1)
    date: datetime.date
    commit: str = Field(pattern=r"^[0-9a-f]{7,40}(-dirty)?$")
    machine: str = Field(min_length=1)
    command: str = Field(min_length=1)
    kind: Literal["exploratory", "registered"]
    registration: str | None = Field(pattern=r"^[0-9a-f]{7,40}$")
    goal: str | None = Field(pattern=r"^(<=|>=|=) -?\d+(\.\d+)?$")
    met: bool | None

    @model_validator(mode="after")
    def _agree(self) -> "Claim":
        low, high = self.interval or (self.value, self.value)
        if not low <= self.value <= high:
            raise ValueError(f"interval {[low, high]} does not hold the value {self.value}")
        if (self.registration is not None) != (self.kind == "registered"):
            raise ValueError("a registered claim, and no other, names its registration")
        if self.met != met(self.goal, low, high):
            raise ValueError(f"met is {self.met} with the goal {self.goal} and the values {low} to {high}")
        return self


def met(goal: str | None, low: float, high: float) -> bool | None:
    """Return whether all from `low` to `high` meets the goal; None without a goal."""
    if goal is None:
        return None
    sign, bound = goal.split()
    return all(COMPARED[sign](value, float(bound)) for value in (low, high))


# --- what benchmarks call

EXTRA = "python -m pip install -c constraints.txt -e '.[{}]'"


def needed(*modules: str, by: str = EXTRA.format("bench")) -> None:
    """Exit with one sentence and code 2 where a peer is not installed; `by` is the command that installs it."""
    missing = [name for name in modules if find_spec(name) is None]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        print(f"{sys.argv[0]} needs {', '.join(missing)}, which {verb} not installed. Type: {by}", file=sys.stderr)
        sys.exit(2)


def measured(
    claim: str,
    value: float,
    interval: Sequence[float] | None = None,
    *,
    n: int,
    unit: str = "",
    goal: str | None = None,
    registration: str | None = None,
    command: Sequence[str] | None = None,
) -> Claim:
    """Return a claim measured now, on this machine.

    registration: the commit that announced it. command: the script and its arguments, those of this process by default.
    """
    number = value if isinstance(value, int) else _rounded(value)
    between = None if interval is None else (_rounded(interval[0]), _rounded(interval[1]))
    return Claim(
        claim=claim,
        value=number,
        unit=unit,
        interval=between,
        n=n,
        date=datetime.datetime.now(datetime.UTC).date(),
        commit=_commit(),
        machine=_machine(),
        command=_command(command or sys.argv),
        kind="exploratory" if registration is None else "registered",
        registration=registration,
        goal=goal,
        met=met(goal, *(between or (number, number))),
    )


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, tuple[float, float]]:
    """Return the median of `ours` over that of `theirs`, with its 95 % interval by bootstrap.

    Rounds, in which both had their turn, are drawn together, because other work on the machine slows both.
    """
    rounds, draw = list(zip(ours, theirs, strict=True)), random.Random(0)
    drawn = sorted(_over(draw.choices(rounds, k=len(rounds))) for _ in range(RESAMPLES))
    found, low, high = _over(rounds), drawn[RESAMPLES // 40], drawn[-1 - RESAMPLES // 40]
    return found, (min(found, low), max(found, high))


def _over(rounds: list[tuple[float, float]]) -> float:
    return statistics.median(pair[0] for pair in rounds) / statistics.median(pair[1] for pair in rounds)


def write(script: str, claims: Iterable[Claim]) -> None:
    """Put claims into the record of a script (`__file__`); those of the same words are replaced."""
    path = _folder() / f"{Path(script).stem}.json"
    held = {claim.claim: claim for claim in (read(path) if path.exists() else ())}
    held |= {claim.claim: claim for claim in claims}
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [claim.model_dump(mode="json") for claim in held.values()]
    path.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _folder() -> Path:
    return Path(os.environ.get("COMPOSER_BENCHMARK_RESULTS", ROOT / "benchmarks" / "results"))


def _rounded(value: float) -> float:
    """To four significant digits, more than any of these measurements supports."""
    return float(f"{value:.4g}")


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


def _command(words: Sequence[str]) -> str:
    """Return the command line, without the folders of this machine."""
    script, *arguments = (Path(word).name if word.startswith("/") else word for word in words)
    return shlex.join(["python", f"benchmarks/{Path(script).name}", *arguments])


# --- what documents call


def read(path: Path) -> list[Claim]:
    """Return the claims of a record; pydantic's `ValidationError` names what is wrong with one."""
    return TypeAdapter(list[Claim]).validate_json(path.read_bytes())


def page() -> str:
    """Return how many goals were met, then a section for each record, with a row for each of its claims."""
    held = {path: claims for path in sorted(_folder().glob("*.json")) if (claims := read(path))}
    told, num_goals = _outcomes(held.values())
    scripts = {path.stem for path in (ROOT / "benchmarks").glob("*.py") if "records.write(" in path.read_text()}
    without = sorted(scripts - {path.stem for path in held} - {"records"})
    lines = [f"{sum(map(len, held.values()))} claims, {num_goals} of them with a goal: {told}."]
    lines += [f"Without a record at present: {', '.join(without)}."] if without else []
    return "\n\n".join([" ".join(lines), *map(_section, held)])


def goals(cog: Any) -> None:
    """Print how many of all goals were met, in a sentence; cog: the module of the block in the document."""
    told, number = _outcomes([read(path) for path in sorted(_folder().glob("*.json"))])
    cog.outl(f"{number} goals were set before they were measured: {told}.")


def _outcomes(records: Iterable[Sequence[Claim]]) -> tuple[str, int]:
    """Return how many goals were met, not shown and missed, in words, and their number."""
    found = [_goal(claim).rpartition(": ")[2].strip("*") for claims in records for claim in claims if claim.goal]
    return ", ".join(f"{found.count(word)} {word}" for word in ("met", "not shown", "missed")), len(found)


def _section(path: Path) -> str:
    claims = read(path)
    script = ROOT / "benchmarks" / f"{path.stem}.py"
    about = (ast.get_docstring(ast.parse(script.read_text())) or "").partition("\n\n")[0] if script.exists() else ""
    lines = [f"## {path.stem}", "", *([about.replace("\n", " "), ""] if about else [])]
    lines += ["| claim | value | n | goal | measured |", "| --- | --- | --- | --- | --- |"]
    circumstances = list(dict.fromkeys((claim.command, claim.machine) for claim in claims))
    for claim in claims:
        kind = claim.kind if claim.registration is None else f"registered at {claim.registration}"
        place = circumstances.index((claim.command, claim.machine)) + 1
        when = f"{claim.date} at {claim.commit}, {kind} ({place})"
        lines.append(f"| {_cell(claim.claim)} | {_value(claim)} | {claim.n:,} | {_goal(claim)} | {when} |")
    notes = [f"{i:3} {command}\n    {machine}" for i, (command, machine) in enumerate(circumstances, 1)]
    return "\n".join([*lines, "", "```", *notes, "```"])


def show(cog: Any, wanted: str) -> None:
    """Print a table of the claims that a document asks for, a line `NAME: claim` for each.

    A line may end in ` => WORDS`, which are shown in the place of the claim's own. cog: the module of the block. A
    claim that was withdrawn ends the generation.
    """
    cog.outl("| measured | value | goal |\n| --- | --- | --- |")
    for line in wanted.strip().splitlines():
        name, _, rest = line.partition(": ")
        words, _, shown = rest.partition(" => ")
        path = _folder() / f"{name}.json"
        held = {claim.claim: claim for claim in read(path)} if path.exists() else {}
        if words not in held:
            cog.error(
                f"{cog.inFile} asks for a claim that benchmarks/results/{path.name} does not hold, withdrawn or "
                f"reworded: {words!r}. Delete the line from {cog.inFile}, or run ./dev bench {name}."
            )
        cog.outl(f"| {_cell(shown or words)} | {_value(held[words])} | {_goal(held[words])} |")


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _value(claim: Claim) -> str:
    unit = f" {claim.unit}" if claim.unit else ""
    between = f" [{_number(claim.interval[0])}, {_number(claim.interval[1])}]" if claim.interval else ""
    return f"{_number(claim.value)}{between}{unit}"


def _number(value: float) -> str:
    if value == int(value):
        return f"{int(value):,}"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return re.sub(r"e-0?", "e-", f"{value:.3g}")


def _goal(claim: Claim) -> str:
    if claim.goal is None:
        return ""
    sign, bound = claim.goal.split()
    met_alone = met(claim.goal, claim.value, claim.value)
    return f"{WORDS[sign]} {bound}: {'met' if claim.met else '**not shown**' if met_alone else '**missed**'}"
