"""What a log says that it measured: one record of a log, one of a sample, which every reader of scores fills.

A score has a name, by which a user chooses it where a log holds several: `match`, `rubric.accuracy`,
`exact_match,strict-match`. Nothing here is guessed: what a program does not say is empty or None.
"""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Any

from composer_stages.data_files import load_toml
from composer_stages.layout import shortened
from composer_stages.runs import store

REWARD = "reward"
"""The score of a program that has one verdict and no name for it."""
LOWER_NAMES = "|".join(load_toml(__package__, "fields.toml")["may_be_lower"])
MAY_BE_LOWER = re.compile(rf"(?<![a-z])({LOWER_NAMES})(?![a-z])", re.IGNORECASE)
"""Names of metrics of which lower values are better by most definitions. Logs that do not say so are asked about."""
ENDED_IN_ERROR = (
    r"(?i)^(?:[a-z]+[ _-])*(?:\w*err(?:or)?(?:s|ed)?|\w*time[d _-]*out|\w*exception|crash\w*|cancel\w*|abort\w*|killed|"
    r"oom|interrupt\w*)(?:_?error)?$|^[45]\d\d$"
)
"""How a sample ended, in the words of programs and of HTTP, where that is an error and no verdict."""
NO_SCORE, CANCELLED = "no score", "cancelled"
LONGEST_REASON = 120
MEASURED = "measured"
"""Key of an imported rollout's `extra_json` under which its `MeasuredSample` is, and the key of its log."""


class State(StrEnum):
    """How a sample ended, for its scores."""

    SCORED = "scored"
    SCORED_WITH_ERROR = "scored with an error"
    """The program counts the score although the sample ended in an error."""
    MISSING = "missing"
    INVALID = "invalid"
    """There is a score, which a person or the program declared to be worth nothing."""
    NOT_RUN = "not run"


UNCOUNTED = frozenset({State.MISSING, State.INVALID, State.NOT_RUN})
"""States in which a sample has no verdict, whatever score is recorded with it."""


class Aggregate(StrEnum):
    """How a program makes one number of the scores of a log."""

    TASKS = "mean of tasks"
    """The mean over tasks of the mean of their samples."""
    SAMPLES = "mean of samples"
    SUM = "sum"
    MEDIAN = "median"
    OTHER = "a number of all samples at once"
    PERPLEXITY = "exp(-sum / sum of weights)"
    BITS = "-sum / (sum of weights * log 2)"


@dataclass(frozen=True)
class ScoreKind:
    """One of the scores of a log's samples.

    name: that by which it is chosen, of which a log has each once. metric: what the number is, empty where the program
    has no name for its verdict, which is then comparable with that of any other. reducer: over the epochs of a sample,
    empty for their mean. scale: the lowest and the highest value as the program declares them. main: the program
    itself calls it its result. aggregate: how lm-evaluation-harness and its like make one number of it.
    """

    name: str = REWARD
    metric: str = ""
    scorer: str = ""
    filter: str = ""
    reducer: str = ""
    higher_is_better: bool | None = None
    scale: tuple[float, float] | None = None
    main: bool = False
    aggregate: str = Aggregate.TASKS

    @property
    def may_be_lower(self) -> bool:
        """Return whether lower values are better, or the name has that meaning and the log does not say."""
        words = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", self.metric or self.name)
        return self.higher_is_better is not True and (
            self.higher_is_better is False or bool(MAY_BE_LOWER.search(words))
        )

    def called(self, name: str) -> bool:
        """Return whether a name that is not its own means this score: its metric (and filter), or its scorer."""
        return name in (self.metric, self.scorer, f"{self.metric},{self.filter}")

    def __str__(self) -> str:
        """Return the name, and what the log says of its direction."""
        direction_words = {True: " (higher is better)", False: " (lower is better)", None: ""}
        return f"{self.name}{direction_words[self.higher_is_better]}"


@dataclass(frozen=True)
class Reported:
    """A number that the program itself reports of a score. name: what the program calls it; count: of how many.

    tasks: all those of a group of tasks, whose numbers are averaged, each with equal weight or that of its samples.
    """

    score: str
    name: str
    value: float
    aggregate: str = Aggregate.TASKS
    reducer: str = ""
    count: int | None = None
    tasks: tuple[str, ...] = ()


def told(score: str, name: str, value: Any, aggregate: str = Aggregate.TASKS, **about: Any) -> tuple[Reported, ...]:
    """Return what a program reports of a score, as `Reported` has it; nothing where the value is no number."""
    return (Reported(score, name, float(value), aggregate, **about),) if isinstance(value, int | float) else ()


@dataclass(frozen=True)
class MeasuredLog:
    """What one log is of: who wrote it, what was measured, how the samples were made, and what the program reports.

    settings: by name, as text. status: that of a log that is no success, None for a finished one.
    """

    program: str = ""
    version: str = ""
    task: str = ""
    task_version: str = ""
    model: str | None = None
    kinds: tuple[ScoreKind, ...] = ()
    settings: Mapping[str, str] = field(default_factory=dict)
    status: str | None = None
    reported: tuple[Reported, ...] = ()

    @cached_property
    def key(self) -> str:
        """Return a digest of all fields."""
        return store.digest(self.record())[:12]

    def kind(self, name: str) -> ScoreKind:
        """Return one of the scores by its name; one that the log does not describe has its name as its metric."""
        bare = ScoreKind(main=True) if name == REWARD else ScoreKind(name, name)
        return next((kind for kind in self.kinds if kind.name == name), bare)

    def record(self) -> dict[str, Any]:
        """Return all fields as JSON values."""
        return asdict(self)

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> "MeasuredLog":
        """Return the log of a `record`."""
        kinds = tuple(
            ScoreKind(**{**kind, "scale": tuple(kind["scale"]) if kind["scale"] else None}) for kind in record["kinds"]
        )
        reported = tuple(
            Reported(**{**number, "tasks": tuple(number.get("tasks", ()))}) for number in record["reported"]
        )
        return cls(**{**record, "kinds": kinds, "reported": reported})


@dataclass
class MeasuredSample:
    """What one sample scored.

    scores: by the name of their kind, None for one that it lacks. state, reason: None and empty where they follow from
    scores and error (`reading.completed`). epoch: or trial. weights: of the scores that a program aggregates by
    weight. before: scores that a person has changed, as they were scored. attempt: key of the evaluation's sample and
    epoch, where the source plays failed samples again. item: the source's own name of the task, by which `compare`
    tells apart what was asked in the same words. asked: a digest of what was asked, where a source has one that says
    more than the question.
    """

    scores: dict[str, float | None] = field(default_factory=dict)
    state: State | None = None
    reason: str = ""
    epoch: int | None = None
    weights: dict[str, float] = field(default_factory=dict)
    before: dict[str, float | None] = field(default_factory=dict)
    attempt: str | None = None
    item: str = ""
    asked: str = ""


def alone(log: MeasuredLog, scores: Mapping[str, float | None], chosen: str = "") -> str | None:
    """Return the name of the score that is a sample's reward: the chosen one, the program's main one, or the only one.

    None where there are several of equal standing.
    """
    if chosen:
        return chosen
    named = [kind.name for kind in log.kinds]
    # Of a scorer whose values are dicts, the header may have the name alone.
    named = [name for name in named if not any(score.startswith(f"{name}.") for score in scores)]
    names = [*dict.fromkeys([*named, *scores])]
    mains = [name for name in names if log.kind(name).main]
    return mains[0] if len(mains) == 1 else names[0] if len(names) == 1 else None


def unread(values: Mapping[str, Any]) -> str:
    """Return why a sample has no score: a recorded value that is no number; empty where none is recorded."""
    name, value = next(((name, value) for name, value in values.items() if value is not None), ("", None))
    text = "a list" if isinstance(value, list) else "an object" if isinstance(value, dict) else repr(value)
    return shortened(f"{name} is {text}", LONGEST_REASON // 3) if name else ""


def reason_of(error: tuple[str, str]) -> str:
    r"""Return why a sample has no score, on one line; the type of its error, where that says more than "error".

    Texts lose the quotes of a `repr`: `RuntimeError("it\'s gone")` has them.
    """
    kind, text = error
    if kind != "error":
        return kind
    if text.startswith("CancelledError"):
        return CANCELLED  # what it says is the address of an object
    quoted = re.match(r"""([\w.]+)\((['"])(.*)\2,?\)$""", text.strip(), re.DOTALL)
    text = f"{quoted[1]}: {quoted[3]}" if quoted else text
    words = " ".join(text.replace("\\n", " ").replace("\\'", "'").replace('\\"', '"').split())
    return shortened(words, LONGEST_REASON) or kind


def as_settings(values: Mapping[str, Any] | None) -> dict[str, str]:
    """Return settings as texts, those that are null left out; of a long one its digest."""
    texts = {name: str(value) for name, value in (values or {}).items() if value is not None}
    return {name: text if len(text) <= LONGEST_REASON else store.digest(text)[:8] for name, text in texts.items()}
