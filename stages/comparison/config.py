"""The settings of `compare`."""

import os
from math import inf, nan
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from composer_stages.errors import UsageError
from composer_stages.runs.settings import BASIC, Option, StageConfig

if TYPE_CHECKING:
    from composer_stages.comparison.tables import Columns

LONGEST_NAME = 16
"""Characters of a log's name in the name of the run, enough for the date and the time of Inspect's logs."""


class Config(StageConfig):
    """What to compare, and how."""

    paths: list[Annotated[str, Field(min_length=1)]] = Field(min_length=1)
    """Logs, each a file, a folder, a pattern or a run; the first is A. One alone is split by its models."""
    min_gain: Annotated[float | None, BASIC, Option("D")] = Field(default=None, gt=0)
    """The smallest difference of interest, in units of the score: 0.02 is two points of a pass rate. By default 2 % of
    the scale."""
    not_worse: Annotated[float | None, BASIC, Option("D")] = Field(default=None, gt=0)
    """Decide by whether the side is worse by this or more: exit code 0 where its interval ends above -D, 1 where it
    ends below, else 3. In units of the score, as `min_gain`."""
    missing: Annotated[Literal["auto", "excluded", "failed", "bounds"], BASIC, Option("WAY")] = "auto"
    """Tasks that one side lacks, and samples without a score. `excluded`: these tasks leave both sides, these samples
    the mean of their task. `failed`: they count as the worst score. `bounds`: what is decided must hold however they
    would have ended. `auto`: failed for SWE-bench and Terminal-Bench, whose rule that is; bounds with
    `not_worse` or `policy`, so that no gate passes by tasks that were not played; else excluded."""
    all_pairs: Annotated[bool, BASIC, Option(help="Compare all pairs of sides, and give each its positions.")] = False
    """Compare every side with every other one, not with the first alone, and say which positions each may have."""
    noise: Annotated[str | None, BASIC, Option("LOG")] = Field(default=None, min_length=1)
    """Another run of the first log's model, which shows how large a difference repeats alone make. Beside one log alone
    it is the other side, too."""
    policy: Annotated[str | None, BASIC, Option("FILE")] = Field(default=None, min_length=1)
    """A TOML file with a table `[[metric]]` for each score in which B has to be `better` or `not_worse` than A: exit
    code 0 where all of it is shown."""
    outcome: Annotated[str, BASIC, Option("mean|pass@K|pass^K")] = Field(
        default="mean", pattern=r"^(mean|pass[@^][1-9]\d{0,5})$"
    )
    """What counts of a task's samples: their mean, the chance that one or more of K pass, or that all K do. Estimated
    without bias from all samples of the task, of which there are K or more."""
    unit: Annotated[str, BASIC, Option("COLUMN")] = ""
    """Tasks that agree in this column (a document, a repository, a family) are no independent evidence: they are
    resampled together."""
    score: Annotated[
        tuple[str, ...],
        BASIC,
        Option("NAME"),
        BeforeValidator(
            lambda names: [names] if isinstance(names, str) else names, json_schema_input_type=str | tuple[str, ...]
        ),
    ] = ()
    """The score to compare, where logs hold several (metrics, scorers, filters, columns): one for all sides, or one for
    each. By default the one that all sides have, if it is one alone. `X+Y+Z` are scores of several judges."""
    id: Annotated[str, BASIC, Option("COLUMN[,COLUMN]")] = ""
    """The columns of a table that identify a task. By default the first of `task_id`, `id` and their like."""
    scale: Annotated[str, BASIC, Option("LOW,HIGH")] = ""
    """The lowest and the highest score, where the logs do not declare them: what is missing is counted by it."""
    unreconciled: Annotated[
        bool, BASIC, Option(help="Decide although a side differs from what its own program reports.")
    ] = False
    lower_is_better: Annotated[bool | None, BASIC, Option(help="Lower scores are better, as of errors or a loss.")] = (
        None
    )
    """Whether lower scores are better, as of an error rate or a loss. By default what the logs say, and higher where
    they say nothing; it is asked for where lower values of their metric are better by most definitions."""
    flips: Annotated[bool, BASIC, Option(help="Print every task on which the sides differ.")] = False
    html: Annotated[str | None, BASIC, Option("FILE", "Write the result as one page.")] = Field(
        default=None, json_schema_extra={"affects_results": False}
    )
    markdown: Annotated[str | None, BASIC, Option("FILE", "Write a summary for a comment or a job, as Markdown.")] = (
        Field(default=None, json_schema_extra={"affects_results": False})
    )

    def identity(self) -> dict[str, Any]:
        """Replace the paths by the content of the files: the same logs elsewhere are the same work."""
        from composer_stages.comparison.logs import content
        from composer_stages.comparison.policy import read_policy
        from composer_stages.formats import added_sha256

        contents = {"paths": [content(path) for path in self.paths], "noise": self.noise and content(self.noise)}
        policy = self.policy and [metric.model_dump() for metric in read_policy(self.policy)]
        return super().identity() | contents | {"policy": policy} | added_sha256()

    @property
    def logs(self) -> list[str]:
        """Return the logs to read: those to compare, and last that of the noise."""
        return [*self.paths, *([self.noise] if self.noise else [])]

    @property
    def of_samples(self) -> tuple[str, int]:
        """Return what counts of a task's samples: "mean", "pass@" or "pass^", and of how many."""
        return (self.outcome, 1) if self.outcome == "mean" else (self.outcome[:5], int(self.outcome[5:]))

    @property
    def limits(self) -> tuple[float, float] | None:
        """Return the lowest and the highest score, where they are given; `UsageError` if they are no two numbers."""
        try:
            low, high = map(float, self.scale.split(",")) if self.scale else (0.0, 0.0)
        except ValueError:
            low = high = nan
        if self.scale and not -inf < low < high < inf:
            raise UsageError("comparison.bad-scale", scale=self.scale)
        return (low, high) if self.scale else None

    @property
    def columns(self) -> "Columns":
        """Return what is said of the columns of tables."""
        from composer_stages.comparison.policy import read_policy
        from composer_stages.comparison.tables import Columns

        names = [metric.score for metric in read_policy(self.policy)] if self.policy else self.score
        scores = [part for name in names for part in (name, *name.split("+"))]
        return Columns(self.unit, tuple(self.id.split(",")) if self.id else (), tuple(dict.fromkeys(scores)))

    def targets(self) -> dict[str, Path]:
        """Return the files that are written, by the names of their options."""
        named = {"html": self.html, "markdown": self.markdown}
        return {option: Path(os.path.expanduser(path)) for option, path in named.items() if path}

    def label(self) -> str:
        """Return the names of the first two logs, or of their folders."""
        from composer_stages.formats.reports import differing_folders, stem

        names = differing_folders(self.paths) or [stem(Path(path)) for path in self.paths]
        return "-vs-".join(name[:LONGEST_NAME] for name in names[:2])
