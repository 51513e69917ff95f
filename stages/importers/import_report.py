"""What an import did, file by file: records in, rollouts out, dropped, redacted, and what the source cannot tell."""

from collections import Counter, defaultdict
from collections.abc import Iterable

from tabulate import tabulate

from stages.importers.base import Drop
from stages.importers.reader import FileCount
from stages.rollouts import gate
from stages.rollouts.account import Account
from stages.runs.artifact import Out
from stages.runs.records import Row

SHOWN = 20
"""Files, and reasons for dropping, that the report lists; `sources.json` and `drops.json` have all."""


def report(
    counts: list[FileCount],
    drops: list[Drop],
    told: Account,
    about: str,
    checks: list[gate.Check],
    remarks: list[str],
    out: Out,
) -> None:
    """Write what came of an import: `report.txt`, `sources.json`, `drops.json`, and totals in the manifest.

    `told` are the rollouts, `about` how many tasks and models they are of; `remarks` are a format's own lines for
    `report.txt`, which shows the first `SHOWN` files and drops; the two documents have all.
    """
    out.document("sources", [_source(count) for count in counts])
    out.document("drops", [vars(drop) for drop in drops])
    dropped, redacted = _sum(c.dropped for c in counts), _sum(c.redacted for c in counts)
    traces = sum(count.traces for count in counts)
    out.count(traces=traces, rollouts=told.rollouts, failed=told.failed, steps=told.steps)
    out.count(**{f"dropped_{reason}": number for reason, number in sorted(dropped.items())})
    out.manifest.tokens.update(prompt=told.prompt_tokens, completion=told.completion_tokens)
    out.conclude(
        files=len(counts),
        formats=dict(Counter(count.format for count in counts)),
        mean_reward=told.mean_reward,
        dropped=dict(dropped),
        redacted=dict(redacted),
        gate_ok=all(check.ok for check in checks),
        gate={check.name: [check.total - check.failed, check.total, check.unrecorded] for check in checks},
    )
    lines = [
        f"{told.rollouts} rollouts ({told.failed} failed), {told.steps} steps, {about}, from {len(counts)} files",
        f"{traces} traces in = {told.rollouts} rollouts out + {dropped.total()} dropped; "
        f"{told.rewards.number} rollouts scored",
        *remarks,
        *_files(counts),
        *_drops(drops, dropped),
        *_secrets(redacted, counts),
        *_missing(counts),
        "",
        gate.table(checks),
    ]
    out.text("report.txt", "\n".join(lines) + "\n")


def _sum(counters: Iterable[Counter[str]]) -> Counter[str]:
    return sum(counters, Counter())


def _source(count: FileCount) -> Row:
    counters = {"dropped": dict(count.dropped), "redacted": dict(count.redacted), "missing": sorted(count.missing)}
    return {**vars(count), **counters}


def _files(counts: list[FileCount]) -> list[str]:
    """One line a format, and one a file where there are few."""
    by_format: dict[str, list[FileCount]] = defaultdict(list)
    for count in counts:
        by_format[count.format].append(count)
    lines = []
    for name, group in by_format.items():
        lines.append(_cells(name, group))
        lines += [_cells(f"- {count.file}", [count]) for count in group if len(counts) <= SHOWN]
    return ["", tabulate(lines, ("files", "records", "traces", "rollouts", "dropped", ""), tablefmt="plain")]


def _cells(name: str, group: list[FileCount]) -> tuple[int, int, int, int, int, str]:
    records, traces = sum(count.records for count in group), sum(count.traces for count in group)
    rollouts, dropped = sum(count.rollouts for count in group), sum(count.dropped.total() for count in group)
    return len(group), records, traces, rollouts, dropped, name


def _drops(drops: list[Drop], dropped: Counter[str]) -> list[str]:
    """How many for which reason, and the first of each file and reason."""
    if not drops:
        return []
    alike: dict[tuple[str, str], list[Drop]] = defaultdict(list)
    for drop in drops:
        alike[drop.file, drop.reason].append(drop)
    lines = ["", "dropped", tabulate(sorted(dropped.items()), tablefmt="plain")]
    lines += [_first(group) for group in list(alike.values())[:SHOWN]]
    return lines + ([f"  ... and more of {len(alike) - SHOWN} files in drops.json"] if len(alike) > SHOWN else [])


def _first(group: list[Drop]) -> str:
    drop, others = group[0], f" (and {len(group) - 1} more)" if len(group) > 1 else ""
    return f"  {drop.file}, line {drop.line}{others}: {drop.reason}: {drop.detail[:160]}"


def _secrets(redacted: Counter[str], counts: list[FileCount]) -> list[str]:
    """How many of which kind, and what stood around the first of them, so that a mistake is seen."""
    if not redacted:
        return ["", "redacted: nothing"]
    kinds = ", ".join(f"{number} {kind}" for kind, number in sorted(redacted.items()))
    previews = [f"  {count.file}, {preview}" for count in counts for preview in count.previews]
    lines = [
        "",
        f"redacted: {kinds} (`--set redact=false` leaves all texts as they are)",
        *map(_one_line, previews[:SHOWN]),
    ]
    return lines + ([f"  ... and more in sources.json, of {redacted.total()} in all"] if len(previews) > SHOWN else [])


def _one_line(text: str) -> str:
    return text.replace("\n", "\\n")


def _missing(counts: list[FileCount]) -> list[str]:
    """What the files of each format cannot tell, at least in some of their rollouts."""
    by_format: dict[str, set[str]] = defaultdict(set)
    for count in counts:
        by_format[count.format] |= count.missing
    lines = [(name, ", ".join(sorted(facts))) for name, facts in by_format.items() if facts]
    return ["", "not recorded (null in the tables)", *([tabulate(lines, tablefmt="plain")] if lines else [])]
