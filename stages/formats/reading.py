"""Which format a file has, and all its trajectories, with secrets removed and types checked; dropped records by reason.

`detect_formats` chooses a reader for every file, `read` yields what one file holds. Every record is cleaned first: what
is likely a secret is replaced by its kind, and what JSON or UTF-8 cannot hold is made storable. Likely is what begins
as the keys of a provider do, and, where no such prefix is known (passwords in addresses, authorization headers), what
is random enough and no placeholder: a test's `userid:password@example.com` is left alone.
"""

import base64
import binascii
import math
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from stages.errors import BadInput
from stages.formats import FORMATS, readers
from stages.formats.base import INSTANCE, Drop, Origin, Reader, Trajectory, family_of
from stages.formats.files import Source
from stages.formats.messages import first_question
from stages.formats.reports import Place, Sidecars
from stages.rollouts import missing
from stages.runs import store

LOOK = 20
"""Records of a file that are examined to detect its format."""
PREVIEWS = 50
SHOWN = 12
"""Keys of a record that a drop lists."""
MALFORMED = (KeyError, TypeError, ValueError, AttributeError, IndexError)
TRAJECTORY = TypeAdapter(Trajectory)


@dataclass
class FileCount:
    """Counts of one file. `traces` = rollouts + the sum of `dropped`."""

    file: str
    format: str
    sha256: str
    records: int = 0
    traces: int = 0
    rollouts: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    redacted: Counter[str] = field(default_factory=Counter)
    previews: list[str] = field(default_factory=list)
    """Kind, line and surrounding text of the first `PREVIEWS` redactions."""
    missing: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class ReadTrajectory:
    """A trajectory, its record, and the name of its format. `redacted`: a secret was removed from the record."""

    trajectory: Trajectory
    origin: Origin
    format: str
    index: int
    """Its index among the trajectories of one record."""
    redacted: bool


def detect_formats(sources: list[Source], wanted: str, sidecars: Sidecars) -> dict[Source, Reader | None]:
    """Return the reader of every file of trajectories, None where no format fits; add all other files to the sidecars.

    Raises `BadInput` where no file holds trajectories.
    """
    candidates = readers(wanted)
    chosen: dict[Source, Reader | None] = {}
    for source in sources:
        # One after the other, since a record may be large.
        records = islice((r[1] for r in source.records() if not isinstance(r, Drop)), LOOK)
        # Record by record, since the first lines of a file may be no rollouts (a header, a summary, a broken line).
        fitting = next((i for record in records for i in candidates if not source.beside and _fits(i, record)), None)
        is_useful = False
        if fitting is None:
            place = Place(source.path, source.label, source.root)
            for item in source.records():
                if not isinstance(item, Drop):
                    with suppress(*MALFORMED):
                        is_useful |= sidecars.add(place, item[1])
        if fitting is not None or not (is_useful or source.beside):
            chosen[source] = fitting

    def instances(folder: Path | None) -> Iterator[str]:
        """Yield the tasks of all trajectories below a folder; of all with None."""
        # With empty sidecars and a count of its own: reading a file for its tasks must leave no verdict and no number.
        for source, reader in chosen.items():
            if reader is not None and (folder is None or source.path.is_relative_to(folder)):
                for item in read(source, reader, Sidecars(), FileCount("", "", "")):
                    if isinstance(item, ReadTrajectory):
                        yield item.trajectory.task_id

    sidecars.reports.settle(instances)
    if not chosen:
        raise BadInput("There is nothing to import: the files only describe or judge trajectories that are not here.")
    return chosen


def _fits(reader: Reader, record: Any) -> bool:
    """Whether a record has the layout of a reader; False where examining it fails."""
    try:
        return reader.recognises(record)
    except MALFORMED:
        return False


def read(
    source: Source, reader: Reader | None, sidecars: Sidecars, count: FileCount
) -> Iterator[ReadTrajectory | Drop]:
    """Yield all trajectories and drops of a file, and count them. Without a reader every record is dropped."""
    records = source.records()
    found: Iterator[Trajectory | Drop]
    if reader is not None and reader.join is not None:
        records = reader.join(records, source.make_drop)
    for record in records:
        count.records += 1
        line, value = (record.line, None) if isinstance(record, Drop) else record
        origin, secrets = Origin(source.path, source.label, source.sha256, line, sidecars), Redactions()
        if isinstance(record, Drop):
            found = iter([record])
        elif reader is None:
            known = ", ".join(name for name, one in FORMATS.items() if one.detected)
            found = iter([origin.make_drop("unknown_format", f"{_describe(value)}; that is none of {known}")])
        else:
            found = _trajectories(reader, value, origin, secrets)
        for index, item in enumerate(found):
            count.traces += 1
            if isinstance(item, Drop):
                count.dropped[item.reason] += 1
                yield item
            else:
                yield ReadTrajectory(item, origin, reader.name if reader else "", index, bool(secrets))
        count.redacted.update(secrets)
        shown = [f"line {origin.line}: {preview}" for _, preview in secrets.previews]
        count.previews += shown[: max(0, PREVIEWS - len(count.previews))]


def _describe(record: Any) -> str:
    """Describe a record of no known format by its type or keys."""
    if not isinstance(record, dict):
        return f"it is of the type {type(record).__name__}"
    more = f" and {len(record) - SHOWN} more" if len(record) > SHOWN else ""
    if "prompt" in record and ("test" in record or "tests" in record):
        return "it is a task and no rollout: `composer tasks check FILE` reads tasks"
    return f"its keys are {', '.join(sorted(map(str, record))[:SHOWN])}{more}"


def _trajectories(reader: Reader, record: Any, origin: Origin, secrets: "Redactions") -> Iterator[Trajectory | Drop]:
    """Clean a record and yield its trajectories, checked."""
    try:
        # Before the reader sees it, so that no field of a trajectory can hold a secret or what JSON cannot store.
        record = clean(record, secrets if origin.sidecars.redact else None)
        if not _fits(reader, record):
            yield origin.make_drop("foreign_record", f"not of the format {reader.name}; {_describe(record)}")
            return
        for trajectory in reader.trajectories(record, origin):
            yield trajectory if isinstance(trajectory, Drop) else check(completed(trajectory, origin, reader))
    except MALFORMED as error:
        yield origin.make_drop("malformed_record", f"{type(error).__name__}: {error}")


def completed(found: Trajectory, origin: Origin, reader: Reader) -> Trajectory:
    """Fill in what follows from the other fields: environment, family, the verdict of a report, task, and error."""
    found.env = found.env or ("swe-bench" if INSTANCE.fullmatch(found.task_id) else reader.name)
    if found.judged and not found.unscored and found.reward is None and found.resolved is None:
        # No report knows a task by a name that its reader made of the environment's.
        named = "" if found.task_id.startswith(f"{found.env}/") else found.task_id
        verdict = origin.sidecars.verdict(origin.path, named or None, found.model)
        if verdict is not None:
            found.resolved, found.model = verdict.resolved, found.model or verdict.model
    if found.reward is None and found.resolved is not None:
        found.reward = float(found.resolved)
    found.task_id = found.task_id or f"{reader.name}/{store.digest(first_question(found.opening))[:12]}"
    found.family = found.family or family_of(found.task_id)
    if not (found.turns or found.error or missing.STEPS in reader.missing):
        found.error = "no_actions", found.terminated_by or "the record holds no action of a model"
    found.missing |= reader.missing
    return found


def check(trajectory: Trajectory) -> Trajectory:
    """Return the same trajectory if its fields have the types that rows need, since sources hold any JSON.

    The types are those of the dataclasses in `base.py`, checked strictly: no text for a number, no bool for a number.
    Raises `TypeError` that names the first field of a wrong type, and its value.
    """
    try:
        TRAJECTORY.validate_python(trajectory)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = ".".join(map(str, first["loc"]))
        raise TypeError(f"{name} is {first['input']!r:.60}") from None
    return trajectory


# Redaction

SHAPES = {
    "private-key": ("", r"-----BEGIN (?:[A-Z]+ )*PRIVATE KEY-----.{16,8000}?-----END (?:[A-Z]+ )*PRIVATE KEY-----"),
    "anthropic-key": (r"\b", r"sk-ant-[\w-]{20,}"),
    "openrouter-key": (r"\b", r"sk-or-v1-[0-9a-f]{32,}"),
    "openai-key": (r"\b", r"sk-(?:(?:proj|svcacct|admin)-[\w-]{40,}|[A-Za-z0-9]{32,})"),
    "github-token": (r"\b", r"gh[pousr]_[A-Za-z0-9]{36,}|github_pat_\w{40,}"),
    "gitlab-token": (r"\b", r"glpat-[\w-]{20,}"),
    "huggingface-token": (r"\b", r"hf_[A-Za-z0-9]{30,}"),
    "aws-key": (r"\b", r"(?:AKIA|ASIA)[A-Z2-7]{16}\b"),
    "aws-secret": (r"(?i:aws_secret_access_key)[\"'\\]*\s*[=:]\s*[\"'\\]*", r"[A-Za-z0-9/+]{40}\b"),
    "google-key": (r"\b", r"AIza[\w-]{35}"),
    "slack-token": (r"\b", r"xox[abeoprs]-[A-Za-z0-9-]{20,}"),
    "stripe-key": (r"\b", r"[rs]k_live_[A-Za-z0-9]{20,}"),
    "npm-token": (r"\b", r"npm_[A-Za-z0-9]{36}\b"),
    "pypi-token": (r"\b", r"pypi-AgE[\w-]{50,}"),
    "sendgrid-key": (r"\b", r"SG\.[\w-]{20,}\.[\w-]{30,}"),
    "jwt": (r"\b", r"eyJ[\w-]{15,}\.eyJ[\w-]{15,}\.[\w-]{20,}"),
    "authorization": (r"(?i:authorization[\"'\\]*: *[\"'\\]*(?:bearer|token|basic) )", r"[\w.~+/=-]{20,}"),
    "url-password": (r"://[\w.%+-]{1,64}:", r"[^\s:/@'\"{}<>$\\]{6,64}(?=@[\w.-])"),
}
"""By kind, the pattern before a secret, which is kept, and that of the secret. Line ends of keys may be escaped."""
SECRET = re.compile(
    "|".join(
        f"(?P<{name.replace('-', '_')}>{before}(?P<{name.replace('-', '_')}_>{it}))"
        for name, (before, it) in SHAPES.items()
    ),
    re.DOTALL,
)
DOUBTFUL = frozenset({"aws-secret", "authorization", "url-password"})
"""Kinds without a known prefix, for which randomness decides."""
PLACEHOLDER = re.compile(
    r"pass|pwd|secret|example|test|user|token|dummy|fake|sample|change|admin|root|guest|foo|bar|1234|abcd|xxx|key|login",
    re.IGNORECASE,
)
NOWHERE = re.compile(
    r"@(?:[\w.-]*\.)?(?:example(?:\.\w+)?|test|invalid|localhost|local)\b|@(?:host|server|domain)\b|@127\.", re.I
)
LEAST_BITS, RANDOM_BITS = 24.0, 100.0
"""Randomness of a secret in bits, at least: Shannon's entropy of its characters times their number. From the second
number on, words of `PLACEHOLDER` in it are chance."""
BESIDE = 24
"""Characters of a preview before and after what was replaced."""
HINT = re.compile(
    r"PRIVATE KEY|sk-|gh[pousr]_|github_pat_|glpat-|hf_|AKIA|ASIA|(?i:aws_secret)|AIza|xox|k_live_|npm_|pypi-AgE|SG\."
    r"|eyJ|(?i:authorization)|://[^\s/@]{1,64}:[^\s/@]{1,64}@"
)
"""A pattern that every shape contains: most strings have none of it and are skipped quickly."""
DEEPEST = 200
"""Levels of nesting that a JSON value may have."""
SURROGATE = re.compile("[\ud800-\udfff]")


class Redactions(Counter[str]):
    """Numbers of redacted secrets by kind, and a preview (kind, surrounding text without the secret) of each."""

    def __init__(self) -> None:
        super().__init__()
        self.previews: list[tuple[str, str]] = []


def redact(text: str, counts: Counter[str]) -> str:
    """Return a text with `[redacted: KIND]` for everything that is likely a secret, and count these by kind."""
    if not HINT.search(text):
        return text

    def replace(match: re.Match[str]) -> str:
        name = str(match.lastgroup)
        kind, start, end = name.replace("_", "-"), match.start(f"{name}_"), match.end(f"{name}_")
        if not _likely(kind, match[f"{name}_"], match, text):
            return match[0]
        counts[kind] += 1
        if isinstance(counts, Redactions):
            around = text[max(0, start - BESIDE) : start], text[end : end + BESIDE]
            # Another secret may be next to this one; previews are written to `sources.json` and the report.
            hidden = SECRET.sub("[...]", around[0]), SECRET.sub("[...]", around[1])
            counts.previews.append((kind, f"{hidden[0]}[{kind}, {end - start} characters]{hidden[1]}"))
        return f"{text[match.start() : start]}[redacted: {kind}]"

    return SECRET.sub(replace, text)


def _likely(kind: str, secret: str, match: re.Match[str], text: str) -> bool:
    """Whether a match is likely a secret rather than an example of one."""
    # Amazon's documentation uses `AKIAIOSFODNN7EXAMPLE`.
    if kind == "aws-key":
        return not secret.endswith("EXAMPLE")
    if kind not in DOUBTFUL:
        return True
    if kind == "url-password" and NOWHERE.match(text, match.end()):
        return False
    if kind == "authorization" and "basic" in match[0].lower():
        with suppress(binascii.Error, ValueError):
            # The base64 of USER:PASSWORD: the randomness that counts is the password's.
            secret = base64.b64decode(secret, validate=True).decode().partition(":")[2] or secret
    mixed = any(c.isdigit() for c in secret) and any(c.isalpha() for c in secret)
    counts = Counter(secret).values()
    random = -sum(count * math.log2(count / len(secret)) for count in counts)
    chosen = "example" in secret.lower() or (random < RANDOM_BITS and PLACEHOLDER.search(secret) is not None)
    return mixed and not chosen and random >= LEAST_BITS


def clean(value: Any, counts: Counter[str] | None, depth: int = 0) -> Any:
    """Return a JSON value with its texts redacted (unless `counts` is None) and every part storable.

    NaN and infinities become null, integers beyond 64 bits text, and lone surrogates U+FFFD.

    Raises `ValueError` where it is nested deeper than can be written again.
    """
    if depth > DEEPEST:
        raise ValueError(f"nested deeper than {DEEPEST} levels")
    if isinstance(value, str):
        text = SURROGATE.sub("\ufffd", value)
        return text if counts is None else redact(text, counts)
    if isinstance(value, dict):
        return {clean(key, counts): clean(item, counts, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [clean(item, counts, depth + 1) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, int) and not isinstance(value, bool) and not -(2**63) <= value < 2**63:
        return str(value)
    return value
