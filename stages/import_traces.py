"""import: bring rollouts of other programs into the records of this one.

Answers: is another program's trace stream as clean as ours? Reads files of known formats, writes `tasks`, `rollouts`,
`steps` and `origins`, the counts of every file, and the collection gate. A fact that a source does not record is null
and named; a record that cannot be read is dropped, named and counted. The unit is a rollout.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import orjson
from pydantic import Field, model_validator

from stages.envs.swe import eval_logs
from stages.errors import BadInput
from stages.formats import FORMATS, FormatName, files, readers, reading, swebench
from stages.formats.base import RECORDED_REWARD, Reader
from stages.formats.data_juicer import JuicerConfig
from stages.formats.files import Source
from stages.formats.reports import Sidecars
from stages.formats.session import ImportSession, WorkerFiles, read_into_journal, report, unit_of
from stages.plurals import counted
from stages.rollouts import gate
from stages.rollouts.gate import Account
from stages.runs.kinds import ORIGIN, ROLLOUT, STEP, TASK, Row
from stages.runs.run import Inputs, RunWriter
from stages.runs.settings import StageConfig
from stages.runs.stage import Plan, Stage


class Config(StageConfig):
    """What to import."""

    format: FormatName = "auto"
    """The format of the files; `auto` looks into each. `swe-logs` grades saved logs of SWE-bench's harnesses again."""
    paths: list[str] = Field(min_length=1)
    """Files, folders or patterns. Run descriptions and reports among them are used, not imported."""
    model: str | None = None
    """The model of rollouts whose files name none."""
    redact: bool = True
    """Replace what is likely a secret; `report.txt` shows what stood around each. `false` leaves all texts as they
    are."""
    dj: JuicerConfig = JuicerConfig()

    @model_validator(mode="before")
    @classmethod
    def _first_word(cls, given: Any) -> Any:
        """`composer import FORMAT PATH...`: a first path that is a format's name, and no file, is the format."""
        paths = given.get("paths") if isinstance(given, dict) else None
        if isinstance(paths, list) and paths and paths[0] in ("auto", *FORMATS) and "format" not in given:
            return given if Path(paths[0]).exists() else {**given, "format": paths[0], "paths": paths[1:]}
        return given

    def identity(self) -> dict[str, Any]:
        """Replace the paths by the content of the files: the same files elsewhere are the same work."""
        contents = [[source.label, source.sha256] for source in self.sources()]
        off = {} if self.redact else {"redact": False}
        return {"format": self.format, "model": self.model, "files": contents, "dj": self.dj.identity(), **off}

    def sources(self) -> Sequence[Source]:
        """Return the files to read; a saved log counts as one with the files around it."""
        return swebench.find_logs(self.paths) if self.format == swebench.LOGS else files.find(self.paths)

    def label(self) -> str:
        """Return the format."""
        return self.format


def plan(inputs: Inputs, config: Config) -> Plan:
    """Count the files to read."""
    del inputs
    return Plan(units=len(config.sources()), what="files")


def run(inputs: Inputs, config: Config, out: RunWriter) -> None:
    """Read every file, then write the tables, the gate's checks and the report."""
    del inputs
    sidecars = Sidecars(config.model, config.redact)
    sources, chosen = config.sources(), dict[Source, Reader | None]()
    if config.format == swebench.LOGS:
        (reader,) = readers(config.format)
        chosen = dict.fromkeys(sources, reader)
    else:
        detected = reading.detect_formats(list(sources), config.format, sidecars)
        # Predictions come last: a prediction that repeats a trajectory is a duplicate.
        last = swebench.PREDICTIONS
        chosen = dict(sorted(detected.items(), key=lambda pair: pair[1] is not None and pair[1].name == last))
        # Saved logs are read while they are graded, in this process.
        out.spread([[unit_of(source)] for source in chosen], "files", WorkerFiles(list(chosen.items()), sidecars))
    session = ImportSession(out, sidecars)
    for done, (source, reader_of_file) in enumerate(chosen.items()):
        out.progress("files", done, len(chosen))
        session.read(source, reader_of_file)
    out.progress("files", len(chosen), len(chosen))
    graded = [source.graded for source in chosen if isinstance(source, swebench.Log)]
    if graded:
        out.document("graded", [log.record() for log in graded])
    agreement = ["", *eval_logs.agreement_report(graded)] if graded else []
    out.set_summary(reports=sidecars.reports.summary())
    _finish(session, config, out, [*agreement, *sidecars.reports.lines()])


def work(inputs: Inputs, config: Config, out: RunWriter) -> None:
    """Read a worker's files."""
    del inputs, config
    files_of_worker: WorkerFiles = out.found
    for source, reader in files_of_worker.files:
        if not out.finished(unit_of(source)):
            read_into_journal(source, reader, files_of_worker.sidecars, out)


def _finish(session: ImportSession, config: Config, out: RunWriter, remarks: list[str]) -> None:
    """Write the tables in the order of the files, and the report with every file's counts and the gate's checks."""
    if not session.rollouts:
        first = session.drops[0] if session.drops else None
        why = f"{config.paths[0]} holds no rollout."
        if first is not None:
            why = f"{first.file}, line {first.line}: {first.reason} ({first.detail})."
        raise BadInput(f"Nothing could be imported from {counted(len(session.counts), 'file')}. {why}")
    if config.dj.recipe is not None:
        session.filter(config.dj)
    tasks: dict[str, Row] = {}
    checks, account, models = gate.Gate(), Account(), set[str | None]()
    withheld = Counter[str]()

    def rollouts() -> Iterator[Row]:
        for unit in session.units():
            task = tasks.setdefault(unit["task"]["task_id"], unit["task"])
            prompts = (task["prompt"], unit["task"]["prompt"])
            # The shortest wording of a task has the least of a harness's instructions around it.
            task["prompt"] = min(prompts, key=lambda prompt: (prompt is None, len(prompt or "")))
            account.add(unit["rollout"], len(unit["steps"]))
            checks.add(unit["rollout"], unit["steps"], unit["origin"]["missing"])
            models.add(unit["rollout"]["model"])
            recorded = orjson.loads(unit["origin"]["extra_json"]).get(RECORDED_REWARD)
            withheld.update([] if recorded is None else [f"{recorded:g}"])
            yield ROLLOUT.upgraded(unit["rollout"])

    def origins() -> Iterator[Row]:
        # Whether a rollout entered a batch is known where any file of batches was read.
        any_batch = any(session.effective.values())
        for origin in (unit["origin"] for unit in session.units()):
            known = origin["effective"] is not None and any_batch
            yield {**origin, "effective": session.effective[origin["rollout_id"]] if known else None}

    out.table(ROLLOUT, rollouts())
    out.table(TASK, tasks.values())
    out.table(STEP, (step for unit in session.units() for step in unit["steps"]))
    out.table(ORIGIN, origins())
    about = f"{counted(len(tasks), 'task')}, {counted(len(models), 'model')}"
    if withheld:
        shown = ", ".join(f"{number} of {reward}" for reward, number in sorted(withheld.items()))
        remarks = [
            *remarks,
            f"{withheld.total()} rollouts have a reward and no completion ({shown}): the reward is null, since it says",
            f"nothing about the model; `extra_json` of the origins keeps it as {RECORDED_REWARD}",
        ]
    if session.repeated:
        alike = f"{counted(session.repeated, 'rollout')}, short and alike in every word with another"
        remarks = [*remarks, f"kept as samples of their own: {alike}"]
    report(session.counts, session.drops, account, about, checks.checks(account.rollouts), remarks, out)


STAGE = Stage(
    name="import",
    version=3,
    config=Config,
    outputs={"tasks": TASK, "rollouts": ROLLOUT, "steps": STEP, "origins": ORIGIN},
    plan=plan,
    run=run,
    work=work,
)
