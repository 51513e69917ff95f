"""Which format a file has, and everything in it: trajectories with secrets removed, and dropped records by reason."""

import base64
import binascii
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from stages.errors import BadInput
from stages.formats import FORMATS, load
from stages.formats.base import Drop, Importer, JoiningImporter, Origin, Trajectory
from stages.formats.files import Source
from stages.formats.reports import Place, Sidecars

# ---- validation
# Whether a trajectory's fields have the types that rows need, since sources hold any JSON.
#
# The types are those of the dataclasses in `base.py`, checked strictly: no text for a number, no bool for a number.

_TRAJECTORY = TypeAdapter(Trajectory)


def check(trajectory: Trajectory) -> Trajectory:
    """The same trajectory; `TypeError` names the first field that has a wrong type, and its value."""
    try:
        _TRAJECTORY.validate_python(trajectory)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(map(str, first["loc"]))
        raise TypeError(f"{field} is {first['input']!r:.60}") from None
    return trajectory


# ---- redaction
# What is likely a secret replaced by its kind, and what JSON or UTF-8 cannot hold made storable.
#
# Likely is what begins as the keys of a provider do, and, where no such beginning is known (passwords in addresses,
# authorization headers), what is random enough and no placeholder. A test's `userid:password@example.com` is left
# alone.

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
"""What stands before a secret and stays, and the secret, by kind. Private keys may have escaped line ends."""
SECRET = re.compile(
    "|".join(
        f"(?P<{name.replace('-', '_')}>{before}(?P<{name.replace('-', '_')}_>{it}))"
        for name, (before, it) in SHAPES.items()
    ),
    re.DOTALL,
)
DOUBTFUL = frozenset({"aws-secret", "authorization", "url-password"})
"""Kinds without a beginning of their own."""
PLACEHOLDER = re.compile(
    r"pass|pwd|secret|example|test|user|token|dummy|fake|sample|change|admin|root|guest|foo|bar|1234|abcd|xxx|key|login",
    re.IGNORECASE,
)
NOWHERE = re.compile(
    r"@(?:[\w.-]*\.)?(?:example(?:\.\w+)?|test|invalid|localhost|local)\b|@(?:host|server|domain)\b|@127\.", re.I
)
LEAST_BITS, RANDOM_BITS = 24.0, 100.0
"""Of randomness in a secret: Shannon's entropy of its characters times their number. From the second number on, words
in it are chance.
"""
BESIDE = 24
"""Characters of a preview before and after what was replaced."""
HINT = re.compile(
    r"PRIVATE KEY|sk-|gh[pousr]_|github_pat_|glpat-|hf_|AKIA|ASIA|(?i:aws_secret)|AIza|xox|k_live_|npm_|pypi-AgE|SG\."
    r"|eyJ|(?i:authorization)|://[^\s/@]{1,64}:[^\s/@]{1,64}@"
)
"""What every shape contains: most strings have none of it and are passed over quickly."""
DEEPEST = 200
SURROGATE = re.compile("[\ud800-\udfff]")


class Redactions(Counter[str]):
    """How many were replaced by kind, and each as (kind, preview): what stood around it, but not the secret."""

    def __init__(self) -> None:
        super().__init__()
        self.previews: list[tuple[str, str]] = []


def redact(text: str, counts: Counter[str]) -> str:
    """A text with `[redacted: KIND]` in place of what is likely a secret, which is counted by kind."""
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
            hidden = SECRET.sub("[...]", around[0]), SECRET.sub("[...]", around[1])
            counts.previews.append((kind, f"{hidden[0]}[{kind}, {end - start} characters]{hidden[1]}"))
        return f"{text[match.start() : start]}[redacted: {kind}]"

    return SECRET.sub(replace, text)


def _likely(kind: str, secret: str, match: re.Match[str], text: str) -> bool:
    """Whether it is likely a secret rather than an example of one."""
    if kind == "aws-key":
        return not secret.endswith("EXAMPLE")
    if kind not in DOUBTFUL:
        return True
    if kind == "url-password" and NOWHERE.match(text, match.end()):
        return False
    if kind == "authorization" and "basic" in match[0].lower():
        secret = _password(secret) or secret
    mixed = any(c.isdigit() for c in secret) and any(c.isalpha() for c in secret)
    random = bits(secret)
    chosen = "example" in secret.lower() or (random < RANDOM_BITS and PLACEHOLDER.search(secret) is not None)
    return mixed and not chosen and random >= LEAST_BITS


def _password(basic: str) -> str | None:
    """What stands behind the colon in the base64 of a basic authorization; None where it is none."""
    try:
        return base64.b64decode(basic, validate=True).decode().partition(":")[2]
    except (binascii.Error, ValueError):
        return None


def bits(text: str) -> float:
    """Shannon's entropy of a text's characters, times their number."""
    counts, length = Counter(text).values(), len(text)
    return -sum(count * math.log2(count / length) for count in counts)


def clean(value: Any, counts: Counter[str] | None, depth: int = 0) -> Any:
    """A JSON value with its texts redacted (not with None for the counts) and everything made storable.

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


LOOK = 20
"""Records of a file that are looked at to tell its format."""
PREVIEWS = 50
SHOWN = 12
"""Keys of a record that a refusal lists."""
MALFORMED = (KeyError, TypeError, ValueError, AttributeError, IndexError)


@dataclass
class FileCount:
    """What one file held. `traces` = rollouts + the sum of what was dropped."""

    file: str
    format: str
    sha256: str
    records: int = 0
    traces: int = 0
    rollouts: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    redacted: Counter[str] = field(default_factory=Counter)
    previews: list[str] = field(default_factory=list)
    """Of what was redacted: kind, line, and what stood around it, for the first `PREVIEWS`."""
    missing: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class ReadTrajectory:
    """A trajectory, where it stood and who read it. `redacted` says that a secret was taken out of its record."""

    trajectory: Trajectory
    origin: Origin
    importer: str
    index: int
    """Its place among the trajectories of one record."""
    redacted: bool


def sort(sources: list[Source], wanted: str, sidecars: Sidecars) -> dict[Source, Importer | None]:
    """The importer of every file of trajectories, None where no format fits; other useful files fill the sidecars."""
    importers = load(wanted)
    chosen: dict[Source, Importer | None] = {}
    for source in sources:
        records = list(islice((r[1] for r in source.records() if not isinstance(r, Drop)), LOOK))
        fitting = next((i for record in records for i in importers if not source.beside and _fits(i, record)), None)
        if fitting is not None or (not _beside(source, sidecars) and not source.beside):
            chosen[source] = fitting
    sidecars.reports.settle(lambda folder: _instances(chosen, folder))
    if not any(chosen.values()) and not chosen:
        raise BadInput("There is nothing to import: the files only describe or judge trajectories that are not here.")
    return chosen


def _instances(chosen: Mapping[Source, Importer | None], folder: Path | None) -> Iterator[str]:
    """The tasks of all trajectories below a folder, or of all."""
    for source, importer in chosen.items():
        if importer is not None and (folder is None or source.path.is_relative_to(folder)):
            for item in read(source, importer, Sidecars(), FileCount("", "", "")):
                if isinstance(item, ReadTrajectory):
                    yield item.trajectory.task_id


def _fits(importer: Importer, record: Any) -> bool:
    """Whether a record is of a format; one that is too odd to be asked is not."""
    try:
        return importer.recognises(record)
    except MALFORMED:
        return False


def _beside(source: Source, sidecars: Sidecars) -> bool:
    """Whether a file says something about others; all its records are taken in."""
    taken = [_takes(sidecars, source, record[1]) for record in source.records() if not isinstance(record, Drop)]
    return any(taken)


def _takes(sidecars: Sidecars, source: Source, record: Any) -> bool:
    try:
        return sidecars.add(Place(source.path, source.label, source.root), record)
    except MALFORMED:
        return False


def read(
    source: Source, importer: Importer | None, sidecars: Sidecars, count: FileCount
) -> Iterator[ReadTrajectory | Drop]:
    """Everything a file holds, counted. The records of a file of no known format are dropped."""
    if importer is None:
        yield from _unknown(source, count)
        return
    records = source.records()
    if isinstance(importer, JoiningImporter):
        records = importer.join(records, source.drop)
    for record in records:
        count.records += 1
        if isinstance(record, Drop):
            _count(record, count)
            yield record
            continue
        secrets = Redactions()
        place = Origin(source.path, source.label, source.sha256, record[0], sidecars)
        for index, trajectory in enumerate(_trajectories(importer, record[1], place, secrets)):
            _count(trajectory, count)
            yield (
                trajectory
                if isinstance(trajectory, Drop)
                else ReadTrajectory(trajectory, place, importer.NAME, index, bool(secrets))
            )
        count.redacted.update(secrets)
        shown = [f"line {place.line}: {preview}" for _, preview in secrets.previews]
        count.previews += shown[: max(0, PREVIEWS - len(count.previews))]


def _unknown(source: Source, count: FileCount) -> Iterator[Drop]:
    """Every record of a file of no known format, dropped, with the reason where it cannot even be read."""
    for record in source.records():
        count.records += 1
        if not isinstance(record, Drop):
            why = f"{_keys(record[1])}; that is none of {', '.join(FORMATS)}"
            record = source.drop(record[0], "unknown_format", why)
        _count(record, count)
        yield record


def _keys(value: Any) -> str:
    """What a record that nobody knows looks like."""
    if not isinstance(value, dict):
        return f"it is of the type {type(value).__name__}"
    more = f" and {len(value) - SHOWN} more" if len(value) > SHOWN else ""
    return f"its keys are {', '.join(sorted(map(str, value))[:SHOWN])}{more}"


def _trajectories(importer: Importer, value: Any, origin: Origin, secrets: Redactions) -> Iterator[Trajectory | Drop]:
    """What one record holds, its secrets taken out first."""
    try:
        value = clean(value, secrets if origin.sidecars.redact else None)
        if not _fits(importer, value):
            yield origin.drop("foreign_record", f"not of the format {importer.NAME}; {_keys(value)}")
            return
        for trajectory in importer.trajectories(value, origin):
            yield trajectory if isinstance(trajectory, Drop) else check(trajectory)
    except MALFORMED as error:
        yield origin.drop("malformed_record", f"{type(error).__name__}: {error}")


def _count(trace: Trajectory | Drop, count: FileCount) -> None:
    count.traces += 1
    if isinstance(trace, Drop):
        count.dropped[trace.reason] += 1
