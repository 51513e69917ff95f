"""import: bring rollouts of other programs into the records of this one.

Answers: is somebody else's trace stream as clean as ours? Reads files of known formats, writes `tasks`, `rollouts`,
`steps` and `origins`, the counts of every file, and the collection gate. Whatever a source cannot tell is null and
named; whatever could not be read is dropped, named and counted. The unit is a rollout.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from stages.envs.swe import eval_logs
from stages.errors import BadInput
from stages.formats import FORMATS, files, reading, swe_logs
from stages.formats import session as dealt
from stages.formats.base import Importer
from stages.formats.data_juicer import JuicerConfig
from stages.formats.files import Source
from stages.formats.reports import Sidecars
from stages.formats.session import PREDICTIONS, Dealt, ImportSession, report
from stages.rollouts import gate
from stages.rollouts.gate import Account
from stages.runs.artifact import Inputs, RunWriter
from stages.runs.config import StageConfig
from stages.runs.records import ORIGIN, ROLLOUT, STEP, TASK, Row
from stages.runs.stage import Plan, Stage


class Config(StageConfig):
    """What to import."""

    format: Literal[
        "auto",
        "verifiers",
        "mini-swe-agent",
        "swe-agent",
        "openhands",
        "inspect",
        "nemo-gym",
        "trl",
        "openenv",
        "moatless",
        "spans",
        "swebench-preds",
        "messages",
        "claude-code",
        "atif",
        "swe-logs",
    ] = "auto"
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
        formats = ("auto", *FORMATS, swe_logs.NAME)
        if isinstance(paths, list) and paths and paths[0] in formats and "format" not in given:
            return given if Path(paths[0]).exists() else {**given, "format": paths[0], "paths": paths[1:]}
        return given

    def identity(self) -> dict[str, Any]:
        """The content of the files stands for their paths: the same files elsewhere are the same work."""
        contents = [[source.label, source.sha256] for source in self.sources()]
        off = {} if self.redact else {"redact": False}
        return {"format": self.format, "model": self.model, "files": contents, "dj": self.dj.identity(), **off}

    def sources(self) -> Sequence[Source]:
        """The files to read; a saved log counts as one with all that lies around it."""
        return swe_logs.find(self.paths) if self.format == swe_logs.NAME else files.find(self.paths)

    def label(self) -> str:
        """The format."""
        return self.format


def plan(inputs: Inputs, config: Config) -> Plan:
    """The files to read."""
    del inputs
    return Plan(units=len(config.sources()), what="files")


def run(inputs: Inputs, config: Config, out: RunWriter) -> None:
    """Read every file, then tabulate and check everything."""
    del inputs
    sidecars = Sidecars(config.model, config.redact)
    chosen = _sorted(config.sources(), config, sidecars)
    if config.format != swe_logs.NAME:  # whose files are read while they are graded
        out.spread([[dealt.unit(source)] for source in chosen], "files", Dealt.of(chosen, sidecars))
    session = ImportSession(out, sidecars)
    for done, (source, importer) in enumerate(chosen.items()):
        out.progress("files", done, len(chosen))
        session.read(source, importer)
    out.progress("files", len(chosen), len(chosen))
    agreement = _agreement([source for source in chosen if isinstance(source, swe_logs.Log)], out)
    out.set_summary(reports=sidecars.reports.summary())
    _finish(session, config, out, [*agreement, *sidecars.reports.lines()])


def work(inputs: Inputs, config: Config, out: RunWriter) -> None:
    """Read a worker's files."""
    del inputs, config
    found: Dealt = out.found
    found.leave(out)


def _sorted(sources: Sequence[Source], config: Config, sidecars: Sidecars) -> Mapping[Source, Importer | None]:
    if config.format == swe_logs.NAME:
        return dict.fromkeys(sources, swe_logs)
    chosen = reading.sort(list(sources), config.format, sidecars)
    return dict(sorted(chosen.items(), key=lambda pair: pair[1] is not None and pair[1].NAME == PREDICTIONS))


def _agreement(logs: Sequence[swe_logs.Log], out: RunWriter) -> list[str]:
    """Writes `graded.json` with all logs and tests; returns how our verdicts compare with the harness's, in lines."""
    if not logs:
        return []
    out.document("graded", [log.graded.record() for log in logs])
    return ["", *eval_logs.account([log.graded for log in logs])]


def _finish(session: ImportSession, config: Config, out: RunWriter, remarks: list[str]) -> None:
    """Writes the tables in the order of the files, and the report with every file's counts and the gate's verdict."""
    if not session.rollouts:
        first = session.drops[0] if session.drops else None
        why = f" {first.file}, line {first.line}: {first.reason} ({first.detail})." if first else ""
        raise BadInput(f"Nothing could be imported from {len(session.counts)} files.{why}")
    if config.dj.recipe is not None:
        session.filter(config.dj)
    tasks: dict[str, Row] = {}
    checks, told, models = gate.Gate(), Account(), set[str | None]()

    def rollouts() -> Iterator[Row]:
        for unit in session.units():
            task = tasks.setdefault(unit["task"]["task_id"], unit["task"])
            task["prompt"] = min((task["prompt"], unit["task"]["prompt"]), key=_plainness)
            told.add(unit["rollout"], len(unit["steps"]))
            checks.add(unit["rollout"], unit["steps"], unit["origin"]["missing"])
            models.add(unit["rollout"]["model"])
            yield unit["rollout"]

    out.table(ROLLOUT, rollouts())
    out.table(TASK, tasks.values())
    out.table(STEP, (step for unit in session.units() for step in unit["steps"]))
    out.table(ORIGIN, (_with_effective(unit["origin"], session.effective) for unit in session.units()))
    about = f"{len(tasks)} tasks, {len(models)} models"
    report(session.counts, session.drops, told, about, checks.checks(told.rollouts), remarks, out)


def _plainness(prompt: str | None) -> tuple[bool, int]:
    """The shortest wording of a task has the least of a harness's instructions around it."""
    return prompt is None, len(prompt or "")


def _with_effective(origin: Row, effective: dict[str, bool]) -> Row:
    """Whether a rollout entered a batch is known where any file of batches was read."""
    known = origin["effective"] is not None and any(effective.values())
    return {**origin, "effective": effective[origin["rollout_id"]] if known else None}


STAGE = Stage(
    name="import",
    version=2,
    config=Config,
    outputs={"tasks": TASK, "rollouts": ROLLOUT, "steps": STEP, "origins": ORIGIN},
    plan=plan,
    run=run,
    work=work,
)
