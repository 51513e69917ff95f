"""Presets: chains of stages in TOML. Those that are shipped lie in `presets/`; a file of one's own works the same."""

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from composer_cli import settings
from stages.backends.engine import check_engine
from stages.errors import UsageError
from stages.runs.config import Settings, StageConfig
from stages.runs.stage import load_stage

SHIPPED = Path(__file__).parent / "presets"
EXAMPLES = Path(__file__).parent / "examples"
"""The repository's folder of that name; an installed Composer holds a copy, for use from any folder."""


class Entry(Settings):
    """One run of a stage."""

    stage: str
    name: str = ""
    """What people and later entries call it; the stage when empty."""
    reads: list[str] = Field([], alias="from")
    """Earlier entries whose runs it reads."""
    parallel: str = ""
    """Neighbours with the same word may run at the same time, each as soon as those that it reads have ended."""
    on: str = ""
    """Workers among whom its units are dealt, where `composer run` is not told others with --on."""
    config: dict[str, Any] = Field(default_factory=dict)

    @property
    def title(self) -> str:
        """Its name."""
        return self.name or self.stage


class Preset(Settings):
    """A chain, in the order in which it runs."""

    about: str = ""
    next: str = ""
    """What to type afterwards."""
    to_the_end: bool = False
    """Go on also after an entry that judges itself not ok: its findings are part of what the last entry shows."""
    stage: list[Entry] = Field(min_length=1)

    def groups(self) -> list[list[Entry]]:
        """Entries that may run at the same time, together."""
        numbered = enumerate(self.stage)
        return [
            [entry for _, entry in group] for _, group in groupby(numbered, lambda item: item[1].parallel or item[0])
        ]


def names() -> list[str]:
    """The presets that are shipped."""
    return sorted(path.stem for path in SHIPPED.glob("*.toml"))


def load(wanted: str | None) -> Preset:
    """A shipped preset by name or one's own by path; `UsageError` says what is wrong with it."""
    if wanted is None:
        raise UsageError(f"Which preset? Give --preset NAME. There are: {', '.join(names())}; or give a TOML file.")
    path = SHIPPED / f"{wanted}.toml" if wanted in names() else _example(Path(wanted))
    if path.suffix != ".toml":
        raise UsageError(f"There is no preset {wanted!r}. There are: {', '.join(names())}; or give a TOML file.")
    try:
        preset = Preset.model_validate(_here(settings.read_file(path), path))
    except ValidationError as error:
        first = error.errors()[0]
        raise UsageError(f"{path} is no preset: {'.'.join(map(str, first['loc']))}: {first['msg']}.") from None
    _check_names(path, preset.stage)
    return preset


def _example(path: Path) -> Path:
    """`examples/NAME.toml` is the one that came with Composer, where the current folder has none of that name."""
    shipped = EXAMPLES / path.name
    return shipped if not path.exists() and path.parent == Path("examples") and shipped.exists() else path


def _here(value: Any, path: Path) -> Any:
    """Settings of a shipped example, with the files that lie beside it by their full paths."""
    if path.parent != EXAMPLES:
        return value
    if isinstance(value, dict):
        return {name: value if name in ("about", "next") else _here(value, path) for name, value in value.items()}
    if isinstance(value, list):
        return [_here(one, path) for one in value]
    before, found, name = value.rpartition("examples/") if isinstance(value, str) else ("", "", "")
    return f"{before}{EXAMPLES / name}" if found and (EXAMPLES / name).is_file() else value


def _check_names(path: Path, entries: Sequence[Entry]) -> None:
    earlier: list[str] = []
    for entry in entries:
        if entry.title in earlier:
            raise UsageError(f"{path}: two entries are called {entry.title!r}. Give each a name of its own.")
        for name in entry.reads:
            if name not in earlier:
                raise UsageError(f"{path}: {entry.title} reads {name!r}, but no earlier entry is called so: {earlier}.")
        if entry.on:
            check_engine(entry.on)
            if entry.parallel or not load_stage(entry.stage).work:
                why = "its stage deals no units" if not entry.parallel else "it may run beside others"
                raise UsageError(f"{path}: {entry.title} has on = {entry.on!r}, but {why}. Remove `on` there.")
        earlier.append(entry.title)


def configure(preset: Preset, layers: Sequence[settings.Tree]) -> dict[str, StageConfig]:
    """The configuration of every entry, by title. Layers hold settings under the titles: `--set collect.tasks=5`.

    A stage's name that is no entry's title stands for all entries of that stage: `--set train.adapter.rank=8`.
    """
    merged: settings.Tree = {}
    for layer in layers:
        merged = settings.merge(merged, _by_title(preset, layer))
    return {entry.title: _configure(entry, merged.get(entry.title, {})) for entry in preset.stage}


def _by_title(preset: Preset, layer: settings.Tree) -> settings.Tree:
    titles = [entry.title for entry in preset.stage]
    meant = {
        entry.stage: [other.title for other in preset.stage if other.stage == entry.stage] for entry in preset.stage
    }
    meant |= {title: [title] for title in titles}
    found: settings.Tree = {}
    for name in sorted(layer, key=lambda name: name in titles):  # what is given by title goes over its stage's
        if name not in meant or not isinstance(layer[name], dict):
            raise UsageError(
                f"This preset has no entry {name!r}. Write ENTRY.KEY=VALUE, or STAGE.KEY=VALUE for all entries of a "
                f"stage; its entries are: {', '.join(titles)}."
            )
        for title in meant[name]:
            found = settings.merge(found, {title: layer[name]})
    return found


def everywhere(preset: Preset, key: str, value: str, keeping: str = "") -> list[settings.Tree]:
    """One setting for every entry that has it; `keeping` stays before it where it stands before an entry's value."""
    having = [entry for entry in preset.stage if key in dict(settings.known(load_stage(entry.stage).config))]
    return [{entry.title: settings.nested(key, _kept(entry.config, key, keeping, value))} for entry in having]


def _kept(config: settings.Tree, key: str, keeping: str, value: str) -> str:
    own: Any = config
    for part in key.split("."):
        own = own.get(part, {}) if isinstance(own, dict) else {}
    before = isinstance(own, str) and own.startswith(keeping) and not value.startswith(keeping)
    return f"{keeping}{value}" if before else value


def _configure(entry: Entry, above: settings.Tree) -> StageConfig:
    try:
        return settings.build(entry.stage, load_stage(entry.stage).config, [entry.config, above])
    except UsageError as error:
        raise UsageError(f"{entry.title}: {error}" if entry.title != entry.stage else str(error)) from None
