"""The settings of `import`."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, model_validator

from composer_stages.formats import FORMATS, FormatName, added_sha256
from composer_stages.runs.settings import BASIC, Option, StageConfig

if TYPE_CHECKING:
    from composer_stages.formats.files import Source


class Config(StageConfig):
    """What to import."""

    format: FormatName = "auto"
    """The format of the files; `auto` looks into each. `swe-logs` grades saved logs of SWE-bench's harnesses again."""
    paths: list[str] = Field(min_length=1)
    """Files, folders or patterns. Run descriptions and reports among them are used, not imported."""
    model: str | None = None
    """The model of rollouts whose files name none."""
    score: Annotated[str, BASIC, Option("NAME")] = ""
    """The score that is the reward, where logs hold several (metrics, scorers, filters). By default the one that their
    program calls its result, else none."""
    redact: bool = True
    """Replace what is likely a secret; `report.txt` shows what stood around each. `false` leaves all texts as they
    are."""

    @model_validator(mode="before")
    @classmethod
    def _first_word(cls, values: Any) -> Any:
        """`composer import FORMAT PATH...`: a first path that is a format's name, and no file, is the format."""
        paths = values.get("paths") if isinstance(values, dict) else None
        if isinstance(paths, list) and paths and paths[0] in ("auto", *FORMATS) and "format" not in values:
            return values if Path(paths[0]).exists() else {**values, "format": paths[0], "paths": paths[1:]}
        return values

    def identity(self) -> dict[str, Any]:
        """Replace the paths by the content of the files: the same files elsewhere are the same work."""
        contents = [[source.label, source.sha256] for source in self.sources()]
        return self.model_dump(exclude={"paths", "seed"}) | {"files": contents} | added_sha256()

    def sources(self) -> "Sequence[Source]":
        """Return the files to read; a saved log counts as one with the files around it."""
        from composer_stages.formats import files, swebench

        return swebench.find_logs(self.paths) if self.format == swebench.LOGS else files.find(self.paths)

    def label(self) -> str:
        """Return the format."""
        return self.format
