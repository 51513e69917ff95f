"""From the words of `composer run --on` to a job, and to its record below the artifacts folder."""

import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import BaseModel, create_model

from composer_cli import settings
from composer_cli.executors import jobs
from composer_cli.executors.base import LOST, QUEUED, Executor, JobState, SubmittedChain, redact
from composer_cli.printing import print_json, print_text
from stages.errors import ComposerError, UsageError
from stages.redaction import redacted_value
from stages.runs import store
from stages.runs.config import Settings, StageConfig

ON = "on"
"""The table of settings of an executor; without --on it has no meaning."""


@dataclass(frozen=True)
class RunRequest:
    """The words of `composer run` that the job repeats."""

    preset: str
    config: Sequence[Path] = ()
    policy: str | None = None
    set_: Sequence[str] = ()
    max_cost: float | None = None


def split_on(layers: Sequence[settings.Tree]) -> tuple[list[settings.Tree], settings.Tree]:
    """Return the layers without their tables `on`, and these tables merged into one."""
    where: settings.Tree = {}
    for layer in layers:
        found = layer.get(ON, {})
        if not isinstance(found, dict):
            raise UsageError(
                f"on = {found!r} is no table of settings. Write on.KEY=VALUE, and the executor behind --on."
            )
        where = settings.merge(where, found)
    return [{key: value for key, value in layer.items() if key != ON} for layer in layers], where


def submit_or_show(
    word: str,
    executor: Executor,
    request: RunRequest,
    configs: Mapping[str, StageConfig],
    tree: settings.Tree,
    artifacts: Path,
    *,
    clean: bool,
    dry_run: bool,
    json: bool,
) -> None:
    """Submit a chain, or with `dry_run` show what would be submitted, and print the result.

    word: the executor's name. tree: its settings. Raises `UsageError` for what the executor cannot take.
    """
    if clean:
        raise UsageError("--clean would delete at every launch what the one before did. Leave it out with --on.")
    model = create_model("On", __base__=Settings, on=(executor.settings, ...))
    where = settings.build(f"run --on {word}", model, [{ON: tree}]).on  # type: ignore[attr-defined]
    local = [] if executor.shares_files else [found for key, config in configs.items() for found in _files(key, config)]
    if local:
        key, path = local[0]
        raise UsageError(
            f"{key} = {path} lies on this machine, which {word} does not see. Give what it can reach: a hub id, "
            "an address, or a path in its image or below /artifacts."
        )
    chain = _prepare(request, configs, where, artifacts)
    if dry_run:
        spec = _spec(executor, chain, where)
        head = [f"{key}: {value}" for key, value in spec.items() if key != "script"]
        text = "\n".join([*head, "script:", *(f"  {line}" for line in spec["script"].splitlines())])
        print_json({"on": word, "spec": spec}) if json else print_text(text)
        return
    job = _submit(word, executor, chain, where)
    if json:
        print_json({"job": job})
        return
    print_text(
        f"{job.name} is submitted to {word}.\n`composer status` says how it stands, "
        f"`composer show {job.name} --follow` what it prints, `composer cancel {job.name}` stops it."
    )


def _prepare(request: RunRequest, configs: Mapping[str, StageConfig], where: Any, artifacts: Path) -> SubmittedChain:
    """Return what would be submitted: words, the files that go along, the names of keys."""
    words, files = ["run"], dict[str, str]()

    def along(path: Path, name: str) -> str:
        files[name] = settings.read_toml_text(path)
        return name

    path = Path(request.preset)
    shipped = request.preset in settings.preset_names() or (path.parent == Path("examples") and not path.exists())
    words += ["--preset", request.preset if shipped else along(path, "preset.toml")]
    for number, file in enumerate(request.config, start=1):
        words += ["--config", along(file, f"settings-{number}.toml")]
    words += ["--policy", request.policy] if request.policy else []
    for text in request.set_:
        words += [] if text.strip().startswith(f"{ON}.") else ["--set", text]
    words += ["--max-cost", str(request.max_cost)] if request.max_cost is not None else []
    words += ["--on", where.workers] if where.workers else []
    keys = list(dict.fromkeys([*(key for config in configs.values() for key in _keys(config)), *where.keys]))
    if clash := [name for name in where.env if name in keys]:
        raise UsageError(f"on.env holds {clash[0]}, which is a key. Name it in on.keys and export it instead.")
    digest = store.digest([words, files, keys])[:6]
    stem = re.sub(r"[^A-Za-z0-9_.-]", "-", path.stem)[:32]  # what all executors take as a name
    name = f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{stem}-{digest}"
    return SubmittedChain(name, artifacts / jobs.FOLDER / name, words, files, keys)


def _keys(group: Any) -> Iterator[str]:
    """Yield the names of the variables from which a configuration's servers take their keys."""
    if isinstance(group, BaseModel):
        sends = getattr(group, "sends", None)
        name = getattr(group, "api_key_env", "")
        if name and (sends is None or sends()):
            yield name
    for _, item in _items(group):
        yield from _keys(item)


def _files(key: str, group: Any) -> Iterator[tuple[str, str]]:
    """Yield settings that name files of this machine: by their beginning, or as found from the current folder."""
    if isinstance(group, str):
        path = group.partition(":")[2] if ":" in group else group
        if path.startswith(("./", "../", "~")) or (os.sep in path[1:] and Path(path).exists()):
            yield key, group
    for name, item in _items(group):
        yield from _files(f"{key}.{name}", item)


def _items(group: Any) -> list[tuple[Any, Any]]:
    """Return the named parts of a settings model, a dict, a list or a tuple; none of other values."""
    if isinstance(group, BaseModel):
        return [(field, getattr(group, field)) for field in type(group).model_fields]
    if isinstance(group, dict):
        return list(group.items())
    return list(enumerate(group)) if isinstance(group, (list, tuple)) else []


def _spec(executor: Executor, chain: SubmittedChain, where: Any) -> dict[str, Any]:
    """Return what would be submitted; raises `UsageError` where the settings hold the value of a key."""
    spec = executor.spec(chain, where)
    redact(chain.keys)
    if redacted_value(spec) != spec:
        raise UsageError(
            "What would be submitted holds the value of a key. Take it out of the settings: its name is enough."
        )
    return spec


def _submit(word: str, executor: Executor, chain: SubmittedChain, where: Any) -> jobs.SubmittedJob:
    """Submit a chain once, and keep its record; refused while the same chain is queued or running there."""
    for job in jobs.every(chain.folder.parents[1]):
        same = job.executor == word and job.name[-7:] == chain.name[-7:]
        if same and not jobs.refreshed(job).state.over:
            raise UsageError(f"This chain is {job.state.status} as {job.name}. `composer cancel {job.name}` stops it.")
    job = jobs.SubmittedJob(
        name=chain.name,
        executor=word,
        words=list(chain.words),
        keys=list(chain.keys),
        where=where.model_dump(),
        submitted_at=datetime.now(UTC).isoformat(timespec="seconds"),
        spec=_spec(executor, chain, where),
        state=JobState(QUEUED),
    )
    job = jobs.keep(chain.folder, job)
    try:
        return jobs.keep(chain.folder, job, found=executor.submit(chain, where))
    except UsageError:
        shutil.rmtree(chain.folder)  # nothing was submitted
        raise
    except BaseException as error:
        reason = str(error) if isinstance(error, ComposerError) else type(error).__name__
        jobs.keep(chain.folder, job, state=JobState(LOST, f"it may not have been submitted: {reason}"))
        raise
