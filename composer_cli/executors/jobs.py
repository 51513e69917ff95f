"""Submitted jobs: `composer run --on` becomes a record, with the state and the log of its job.

The record of each job is one JSON file, ARTIFACTS/submitted/NAME/job.json. It holds names of keys, never their values.
"""

import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import create_model

from composer_cli.call import ChainArguments
from composer_cli.executors.base import (
    CANCELLED,
    EXECUTORS,
    LOST,
    QUEUED,
    Executor,
    JobState,
    SubmittedChain,
    load,
    redact,
)
from composer_cli.preset import preset_names
from composer_cli.printing import print_result
from composer_stages.errors import BadInput, ComposerError, UsageError
from composer_stages.redaction import redacted, redacted_value
from composer_stages.runs import settings, store
from composer_stages.runs.settings import Settings, StageConfig, Tree
from composer_stages.words import Sentence

ON = "on"
"""The table of settings of an executor; without --on it has no meaning."""
FOLDER = "submitted"
SHOWN = 20
"""Lines of a log that `composer show` prints."""


@dataclass(frozen=True)
class SubmittedJob:
    """A submitted chain, as its record keeps it: names of keys, never their values."""

    name: str
    executor: str
    words: list[str]
    keys: list[str]
    where: dict[str, Any]
    """The settings `on`."""
    submitted_at: str
    spec: dict[str, Any]
    state: JobState
    """The state at the last query of the executor; final once the job is over."""
    handle: Mapping[str, Any] | None = None
    """What finds the job again at its executor; None while it is being submitted."""
    folder: str = ""

    def at_executor(self) -> Executor:
        """Return the executor that the job was submitted to."""
        if self.executor not in EXECUTORS:
            raise BadInput("cli.job-of-unknown-executor", name=self.name, executor=self.executor)
        return load(self.executor)


def keep(folder: Path, job: SubmittedJob, **changed: Any) -> SubmittedJob:
    """Write a job's record with other values for some of its fields; returns the changed job."""
    job = replace(job, **changed, folder=str(folder))
    record = {name: value for name, value in asdict(job).items() if name != "folder"}
    store.write_json(folder / "job.json", record)
    return job


def submitted_jobs(root: Path) -> list[SubmittedJob]:
    """Return all jobs that were submitted from here, oldest first; their keys are redacted from now on."""
    jobs = []
    for path in sorted(root.glob(f"{FOLDER}/*/job.json")):
        record = store.read_json(path)
        try:
            job = SubmittedJob(**{**record, "state": JobState(**record["state"])}, folder=str(path.parent))
        except (TypeError, KeyError) as error:
            raise BadInput("cli.not-a-job-record", path=path, error=error) from None
        redact(job.keys)
        jobs.append(job)
    return jobs


def find(root: Path, text: str, *, part: bool = True) -> SubmittedJob | None:
    """Return the job of this name or folder, or with `part` the only job whose name contains the text; else None."""
    jobs = submitted_jobs(root)
    fitting = [job for job in jobs if text in (job.name, f"{FOLDER}/{job.name}", job.folder)]
    if part and not fitting:
        fitting = [job for job in jobs if text in job.name]
    if len(fitting) > 1:
        some = ", ".join(job.name for job in fitting[-3:])
        raise BadInput("cli.several-jobs-fit", jobs=len(fitting), text=text, examples=some)
    return fitting[0] if fitting else None


@dataclass(frozen=True)
class Request:
    """A chain that is to be submitted, as `composer run` and `composer.run` were asked for it."""

    preset: str
    arguments: ChainArguments
    """The arguments, of which `on` names the executor."""
    set_: Sequence[str]
    """The settings that were typed, as KEY=VALUE."""
    configs: Mapping[str, StageConfig]
    """What all settings make of each entry."""
    where: Tree
    """The settings of the executor, as `split_on` finds them."""

    @property
    def on(self) -> str:
        """Return the name of the executor."""
        return str(self.arguments.on)


def split_on(layers: Sequence[Tree]) -> tuple[list[Tree], Tree]:
    """Return the layers without their tables `on`, and these tables merged into one."""
    where: Tree = {}
    for layer in layers:
        table = layer.get(ON, {})
        if not isinstance(table, dict):
            raise UsageError("cli.on-not-a-table", value=table)
        where = settings.merge(where, table)
    chain_layers = [{key: value for key, value in layer.items() if key != ON} for layer in layers]
    return [settings.FileTree.like(*pair) for pair in zip(layers, chain_layers, strict=True)], where


def submit_or_show(request: Request, *, dry_run: bool, json: bool) -> None:
    """Submit a chain, or with `dry_run` show what would be submitted, and print the result; else as `submit`."""
    if dry_run:
        executor, chain, where = _checked(request)
        spec = _spec(executor, chain, where)
        head = [f"{key}: {value}" for key, value in spec.items() if key != "script"]
        text = "\n".join([*head, "script:", *(f"  {line}" for line in spec["script"].splitlines())])
        print_result(json, {"on": request.on, "spec": spec}, text)
        return
    job = submit(request)
    report = Sentence("cli.submitted", job=job.name, executor=request.on)
    print_result(json, {"job": job}, report)


def _checked(request: Request) -> tuple[Executor, SubmittedChain, Any]:
    """Return the executor, what would be submitted, and the executor's settings; raises as `submit`."""
    if request.arguments.clean:
        raise UsageError("cli.clean-with-on")
    executor = load(request.on)
    model = create_model("On", __base__=Settings, on=(executor.settings, ...))
    where = settings.build(f"run --on {request.on}", model, [{ON: request.where}]).on  # type: ignore[attr-defined]
    for key, value in (part for title, config in request.configs.items() for part in settings.parts(title, config)):
        if executor.shares_files or not isinstance(value, str):
            continue
        # A setting names a file of this machine by how it begins, or because there is one in the current folder.
        path = value.partition(":")[2] if ":" in value else value
        if path.startswith(("./", "../", "~")) or (os.sep in path[1:] and Path(path).exists()):
            raise UsageError("cli.path-not-on-executor", key=key, value=value, executor=request.on)
    return executor, _prepare(request, where), where


def _prepare(request: Request, where: Any) -> SubmittedChain:
    """Return what would be submitted: words, the files that go along, the names of keys."""
    path, arguments = Path(request.preset), request.arguments
    # An example that is not in the current folder is the one that came with Composer, which the job has too.
    shipped = request.preset in preset_names() or (path.parent == Path("examples") and not path.exists())
    # The texts of files go along: what was submitted is what runs, whatever is edited here in the meantime.
    texts = {} if shipped else {"preset.toml": settings.read_toml_text(path)}
    words = ["run", "--preset", request.preset if shipped else "preset.toml"]
    for number, file in enumerate(arguments.config, start=1):
        texts[f"settings-{number}.toml"] = settings.read_toml_text(file)
        words += ["--config", f"settings-{number}.toml"]
    words += ["--policy", arguments.policy] if arguments.policy else []
    for text in request.set_:
        words += [] if re.match(rf"\s*{ON}[.=\s]", text) else ["--set", text]
    words += ["--max-cost", str(arguments.max_cost)] if arguments.max_cost is not None else []
    words += ["--on", where.workers] if where.workers else []
    words += ["--trust"] if arguments.trust else []
    words += ["--to-the-end"] if arguments.to_the_end else []
    # Settings with a method `sends` (an export, a store of replicas) tell by it whether they need their key at all.
    every_part = [part for config in request.configs.values() for _, part in settings.parts("", config)]
    servers = [part for part in every_part if hasattr(part, "api_key_env")]
    needed = [s.api_key_env for s in servers if s.api_key_env and (not hasattr(s, "sends") or s.sends())]
    keys = list(dict.fromkeys([*needed, *where.keys]))
    if clash := [name for name in where.env if name in keys]:
        raise UsageError("cli.key-in-env", key=clash[0])
    digest = store.digest([words, texts, keys])[:6]
    stem = re.sub(r"[^A-Za-z0-9_.-]", "-", path.stem)[:32]  # what all executors take as a name
    name = f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{stem}-{digest}"
    return SubmittedChain(name, arguments.artifacts / FOLDER / name, words, texts, keys)


def _spec(executor: Executor, chain: SubmittedChain, where: Any) -> dict[str, Any]:
    """Return what would be submitted; raises `UsageError` where the settings hold the value of a key."""
    spec = executor.spec(chain, where)
    redact(chain.keys)
    if redacted_value(spec) != spec:
        raise UsageError("cli.key-in-spec")
    return spec


def submit(request: Request) -> SubmittedJob:
    """Submit a chain once, and keep its record.

    Raises `UsageError` for what the executor cannot take, and while the same chain is queued or running there.
    """
    executor, chain, where = _checked(request)
    for job in submitted_jobs(chain.folder.parents[1]):
        # Names end with "-" and six digits of a digest of words, files and keys, after time and preset.
        same = job.executor == request.on and job.name[-7:] == chain.name[-7:]
        if same and not refresh_job(job).state.over:
            raise UsageError("cli.chain-submitted-already", status=job.state.status, job=job.name)
    job = SubmittedJob(
        name=chain.name,
        executor=request.on,
        words=list(chain.words),
        keys=list(chain.keys),
        where=where.model_dump(),
        submitted_at=datetime.now(UTC).isoformat(timespec="seconds"),
        spec=_spec(executor, chain, where),
        state=JobState(QUEUED),
    )
    # Before the chain is submitted: where the answer of the service is lost, the record still tells of the job.
    job = keep(chain.folder, job)
    try:
        return keep(chain.folder, job, handle=executor.submit(chain, where))
    except UsageError:
        shutil.rmtree(chain.folder)  # nothing was submitted
        raise
    except BaseException as error:
        reason = str(error) if isinstance(error, ComposerError) else type(error).__name__
        keep(chain.folder, job, state=JobState(LOST, Sentence("cli.perhaps-not-submitted", reason=reason)))
        raise


def refresh_job(job: SubmittedJob) -> SubmittedJob:
    """Return the job with the state that its executor reports now, kept in its record; ended jobs are not queried."""
    if job.state.over or job.handle is None:
        return job
    return keep(Path(job.folder), job, state=job.at_executor().state(job.handle))


def cancel(root: Path, text: str) -> SubmittedJob:
    """Stop the job of this name; raises `BadInput` where there is none, `UsageError` where it is over."""
    job = find(root, text)
    if job is None:
        raise BadInput("cli.no-job", text=text, root=root)
    job = refresh_job(job)
    if job.state.over or job.handle is None:
        raise UsageError("cli.job-is-over", job=job.name, status=job.state.status)
    job.at_executor().cancel(job.handle)
    return keep(Path(job.folder), job, state=JobState(CANCELLED, "from here"))


def log(job: SubmittedJob, follow: bool) -> Iterator[str]:
    """Yield what a job printed, line by line, without keys."""
    if job.handle is not None:
        for line in job.at_executor().log(job.handle, follow and not job.state.over):
            yield redacted(line)


def lines(root: Path) -> list[dict[str, Any]]:
    """Return every job with its present state, for `composer status`; a failed query is part of the reason."""
    rows = []
    for job in submitted_jobs(root):
        try:
            state = refresh_job(job).state
        except ComposerError as error:
            state = JobState(job.state.status, Sentence("cli.state-unknown-now", error=error))
        age_s = (datetime.now(UTC) - datetime.fromisoformat(job.submitted_at)).total_seconds()
        rows.append(
            {"job": job.name, "on": job.executor, "status": state.status, "age_s": age_s, "reason": state.detail}
        )
    return rows


def page(job: SubmittedJob) -> str:
    """Return a job as text: its state, what was submitted, the end of its log."""
    return Sentence("cli.job-page", job=job, log=list(log(job, follow=False))[-SHOWN:])
