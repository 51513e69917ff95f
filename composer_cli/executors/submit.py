"""From the words of `composer run` to a job, and to its record below the artifacts folder."""

import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import BaseModel, create_model

from composer_cli import preset as presets
from composer_cli import settings
from composer_cli.executors import jobs
from composer_cli.executors.base import LOST, QUEUED, Chain, Executor, State, redact
from composer_cli.printing import print_json, print_text
from stages.errors import ComposerError, UsageError
from stages.redaction import redacted_value
from stages.runs import store
from stages.runs.config import Settings, StageConfig

ON = "on"
"""The table of settings that say how to run a chain elsewhere; without --on it has no meaning."""


@dataclass(frozen=True)
class Asked:
    """The words of `composer run` that go along."""

    preset: str
    config: Sequence[Path] = ()
    policy: str | None = None
    set_: Sequence[str] = ()
    max_cost: float | None = None


def split(layers: Sequence[settings.Tree]) -> tuple[list[settings.Tree], settings.Tree]:
    """The layers without their tables `on`, and these as one."""
    where: settings.Tree = {}
    for layer in layers:
        found = layer.get(ON, {})
        if not isinstance(found, dict):
            raise UsageError(
                f"on = {found!r} is no table of settings. Write on.KEY=VALUE, and the executor behind --on."
            )
        where = settings.merge(where, found)
    return [{key: value for key, value in layer.items() if key != ON} for layer in layers], where


def configured(word: str, executor: Executor, tree: settings.Tree) -> Any:
    """The executor's settings; `UsageError` for one that it does not have."""
    both = create_model("On", __base__=Settings, on=(executor.settings, ...))
    return settings.build(f"run --on {word}", both, [{ON: tree}]).on  # type: ignore[attr-defined]


def prepared(asked: Asked, configs: Mapping[str, StageConfig], where: Any, artifacts: Path) -> Chain:
    """What would be submitted: words, the files that go along, the names of keys."""
    words, files = ["run"], dict[str, str]()

    def along(path: Path, name: str) -> str:
        files[name] = settings.source(path)
        return name

    path = Path(asked.preset)
    shipped = asked.preset in presets.names() or (path.parent == Path("examples") and not path.exists())
    words += ["--preset", asked.preset if shipped else along(path, "preset.toml")]
    for number, file in enumerate(asked.config, start=1):
        words += ["--config", along(file, f"settings-{number}.toml")]
    words += ["--policy", asked.policy] if asked.policy else []
    for text in asked.set_:
        words += [] if text.strip().startswith(f"{ON}.") else ["--set", text]
    words += ["--max-cost", str(asked.max_cost)] if asked.max_cost is not None else []
    words += ["--on", where.workers] if where.workers else []
    keys = list(dict.fromkeys([*(key for config in configs.values() for key in _keys(config)), *where.keys]))
    if clash := [name for name in where.env if name in keys]:
        raise UsageError(f"on.env holds {clash[0]}, which is a key. Name it in on.keys and export it instead.")
    digest = store.digest([words, files, keys])[:6]
    stem = re.sub(r"[^A-Za-z0-9_.-]", "-", path.stem)[:32]  # what all executors take as a name
    name = f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{stem}-{digest}"
    return Chain(name, artifacts / jobs.FOLDER / name, words, files, keys)


def _keys(group: Any) -> Iterator[str]:
    """The names of variables that a configuration's servers take their keys from."""
    if isinstance(group, BaseModel):
        sends = getattr(group, "sends", None)
        name = getattr(group, "api_key_env", "")
        if name and (sends is None or sends()):
            yield name
        group = [getattr(group, field) for field in type(group).model_fields]
    for item in group.values() if isinstance(group, dict) else group if isinstance(group, (list, tuple)) else ():
        yield from _keys(item)


def _files(key: str, group: Any) -> Iterator[tuple[str, str]]:
    """Settings whose values are files of this machine, as their beginning says, or as they are found where we stand."""
    if isinstance(group, str):
        path = group.partition(":")[2] if ":" in group else group
        if path.startswith(("./", "../", "~")) or (os.sep in path[1:] and Path(path).exists()):
            yield key, group
        return
    if isinstance(group, BaseModel):
        group = {field: getattr(group, field) for field in type(group).model_fields}
    named = group.items() if isinstance(group, dict) else enumerate(group) if isinstance(group, (list, tuple)) else ()
    for name, item in named:
        yield from _files(f"{key}.{name}", item)


def _without_keys(spec: dict[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    """The same; `UsageError` where somebody wrote the value of a key into the settings."""
    redact(keys)
    if redacted_value(spec) != spec:
        raise UsageError(
            "What would be submitted holds the value of a key. Take it out of the settings: its name is enough."
        )
    return spec


def shown(executor: Executor, chain: Chain, where: Any) -> tuple[dict[str, Any], str]:
    """What would be submitted, as JSON and as text."""
    spec = _without_keys(executor.spec(chain, where), chain.keys)
    head = [f"{key}: {value}" for key, value in spec.items() if key != "script"]
    return spec, "\n".join([*head, "script:", *(f"  {line}" for line in spec["script"].splitlines())])


def submit(word: str, executor: Executor, chain: Chain, where: Any) -> jobs.Job:
    """Submit a chain once, and keep its record; refused while the same chain is queued or running there."""
    for job in jobs.every(chain.folder.parents[1]):
        same = job.executor == word and job.name[-7:] == chain.name[-7:]
        if same and not jobs.asked(job).state.over:
            raise UsageError(f"This chain is {job.state.status} as {job.name}. `composer cancel {job.name}` stops it.")
    job = jobs.Job(
        name=chain.name,
        executor=word,
        words=list(chain.words),
        keys=list(chain.keys),
        where=where.model_dump(),
        submitted_at=datetime.now(UTC).isoformat(timespec="seconds"),
        spec=_without_keys(executor.spec(chain, where), chain.keys),
        state=State(QUEUED),
    )
    jobs.keep(chain.folder, job)
    try:
        job = jobs.kept(chain.folder, job, found=executor.submit(chain, where))
    except UsageError:
        shutil.rmtree(chain.folder)  # nothing was submitted
        raise
    except BaseException as error:
        said = str(error) if isinstance(error, ComposerError) else type(error).__name__
        jobs.kept(chain.folder, job, state=State(LOST, f"it may not have been submitted: {said}"))
        raise
    return job


def carry_out(
    word: str,
    executor: Executor,
    asked: Asked,
    configs: Mapping[str, StageConfig],
    tree: settings.Tree,
    artifacts: Path,
    *,
    clean: bool,
    dry_run: bool,
    json: bool,
) -> None:
    """What `composer run --on` does: submit, or with `dry_run` show what would be submitted, and say so on stdout."""
    if clean:
        raise UsageError("--clean would delete at every launch what the one before did. Leave it out with --on.")
    where = configured(word, executor, tree)
    here = [] if executor.shares_files else [found for key, config in configs.items() for found in _files(key, config)]
    if here:
        key, path = here[0]
        raise UsageError(
            f"{key} = {path} lies on this machine, which {word} does not see. Give what it can reach: a hub id, "
            "an address, or a path in its image or below /artifacts."
        )
    chain = prepared(asked, configs, where, artifacts)
    if dry_run:
        spec, text = shown(executor, chain, where)
        print_json({"on": word, "spec": spec}) if json else print_text(text)
        return
    job = submit(word, executor, chain, where)
    if json:
        print_json({"job": job})
        return
    print_text(
        f"{job.name} is submitted to {word}.\n`composer status` says how it stands, "
        f"`composer show {job.name} --follow` what it prints, `composer cancel {job.name}` stops it."
    )
