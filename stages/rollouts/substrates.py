"""Two substrates of rollouts, side by side: which criteria the traces of each meet, capture, and leave null.

A substrate is a way to get rollouts. 002a is TRL's rollout function with our recorder, 002b the files that prime-rl and
verifiers write. The collection gate is the same for both; beside it stands what training asks of a trace and a gate can
pass over as not recorded.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from tabulate import tabulate

from stages.rollouts import gate, missing
from stages.rollouts.gate import GateCheck
from stages.rollouts.missing import Fact
from stages.runs.records import Row

NOT_JUDGED = "Neither is called cleaner: both are the same rollouts."
ENOUGH = 100
"""Rollouts that a collection needs to be judged."""
MAY_BE_NULL = {"parse_error", "terminated_by", "error_type", "error", "commands", "gt_pass", "visible_pass", "hacked"}
"""Columns that are not counted, as null is an answer there: no error, not ended, no command, not judged."""


@dataclass(frozen=True)
class Side:
    """One substrate's rollouts.

    `dropped`: records that could not be read, by reason. `absent`: what the source cannot tell, by rollout.
    """

    name: str
    what: str
    rollouts: Sequence[Row]
    steps: Sequence[Row]
    planned: int
    absent: Mapping[str, Collection[Fact]] = field(default_factory=dict)
    dropped: Mapping[str, int] = field(default_factory=dict)

    @cached_property
    def checks(self) -> list[GateCheck]:
        """The collection gate, then what a trace is needed for."""
        return [*gate.check(list(self.rollouts), list(self.steps), self.planned, self.absent), *self._beyond()]

    def _beyond(self) -> list[GateCheck]:
        rounded = [missing.EXACT_LOGPROBS in self.absent.get(row["rollout_id"], ()) for row in self.steps]
        unusable = sum(row["logprobs"] is None or cut for row, cut in zip(self.steps, rounded, strict=True))
        lost, total = sum(self.dropped.values()), len(self.steps)
        return [
            GateCheck(f"{ENOUGH} rollouts or more", max(ENOUGH - len(self.rollouts), 0), ENOUGH),
            GateCheck("records readable", lost, len(self.rollouts) + lost),
            GateCheck("token ids captured", total - self.levels["tokens"], total),
            GateCheck("log-probs beyond 4 decimals", unusable, total),
        ]

    @property
    def levels(self) -> Counter[str]:
        """Steps by capture level: tokens, logprobs, text."""
        return Counter(row["capture_level"] for row in self.steps)

    @property
    def nulls(self) -> dict[str, int]:
        """Columns of steps and of rollouts that hold null, with how many, but for those in which it is an answer."""
        counts = Counter(f"step.{name}" for row in self.steps for name, value in row.items() if value is None)
        counts += Counter(f"rollout.{name}" for row in self.rollouts for name, value in row.items() if value is None)
        return {name: n for name, n in sorted(counts.items()) if name.partition(".")[2] not in MAY_BE_NULL}

    @property
    def not_recorded(self) -> dict[Fact, int]:
        """What the source cannot tell, with the number of rollouts that lack it."""
        return dict(sorted(Counter(fact for facts in self.absent.values() for fact in facts).items()))

    def verdicts(self, verdict: str) -> list[str]:
        """The names of the criteria with this verdict: ok, FAIL or not recorded."""
        return [check.name for check in self.checks if check.verdict == verdict]

    @property
    def standing(self) -> tuple[int, int]:
        """Criteria failed, then criteria of which the source says nothing: less is cleaner."""
        return len(self.verdicts("FAIL")), len(self.verdicts("not recorded"))

    def document(self) -> Row:
        """All of it as JSON."""
        return {
            "name": self.name,
            "what": self.what,
            "rollouts": len(self.rollouts),
            "steps": len(self.steps),
            "planned": self.planned,
            "checks": [_document(check) for check in self.checks],
            "capture_levels": dict(sorted(self.levels.items())),
            "nulls": self.nulls,
            "source_cannot_tell": self.not_recorded,
            "dropped": dict(self.dropped),
        }


def _document(check: GateCheck) -> Row:
    counts = {"failed": check.failed, "of": check.total, "not_recorded": check.unrecorded}
    return {"name": check.name, "verdict": check.verdict, **counts}


def cleaner(one: Side, other: Side) -> str | None:
    """The name of the side whose traces are cleaner; None when they are equally clean."""
    if one.standing == other.standing:
        return None
    return min(one, other, key=lambda side: side.standing).name


def table(one: Side, other: Side, own: Sequence[str] = ()) -> str:
    """The verdict as plain text. own: says that the other side is the first one's own export, which is not judged."""
    sides = (one, other)
    lines = ["Substrates: whose traces are cleaner?", "", *(f"{side.name}  {side.what}" for side in sides), *own]
    cells: list[tuple[object, ...]] = [
        ("", one.name, other.name),
        ("rollouts", len(one.rollouts), len(other.rollouts)),
        ("steps", len(one.steps), len(other.steps)),
        (),
        *((a.name, _outcome(a), _outcome(b)) for a, b in zip(one.checks, other.checks, strict=True)),
    ]
    for title, counts in _sections(one, other).items():
        names = sorted({name for side in counts for name in side})
        cells += [(), (f"{title}:",), *((name, *(side.get(name, 0) for side in counts)) for name in names)]
        cells += [] if names else [("none",)]
    text = tabulate(cells, tablefmt="plain", disable_numparse=True)
    conclusion = NOT_JUDGED if own else _conclusion(one, other)
    return "\n".join([*lines, "", text, "", *map(_sentence, sides), conclusion]) + "\n"


def _sections(one: Side, other: Side) -> dict[str, list[Mapping[str, int]]]:
    return {
        "steps by capture level": [one.levels, other.levels],
        "nulls by column": [one.nulls, other.nulls],
        "rollouts whose source cannot tell": [one.not_recorded, other.not_recorded],
        "records that could not be read": [one.dropped, other.dropped],
    }


def _outcome(check: GateCheck) -> str:
    if check.verdict == "not recorded":
        return "- not recorded"
    also = f" (+{check.unrecorded} not recorded)" if check.unrecorded else ""
    return f"{check.verdict} {check.total - check.failed} of {check.total}{also}"


def _sentence(side: Side) -> str:
    failed, not_recorded = side.verdicts("FAIL"), side.verdicts("not recorded")
    parts = [f"{side.name} meets {len(side.verdicts('ok'))} of {len(side.checks)} criteria"]
    parts += [f"fails {', '.join(failed)}"] if failed else []
    parts += [f"says nothing of {', '.join(not_recorded)}"] if not_recorded else []
    return "; ".join(parts) + "."


def _conclusion(one: Side, other: Side) -> str:
    name = cleaner(one, other)
    return f"Cleaner: {name}." if name else "Neither is cleaner than the other."
