"""export: write rollouts in the format of another program.

Answers: can others read what was collected here? Reads rollouts, own or imported, writes files in the run's folder and
a report of what the format has no room for. `merged` reads a trained adapter instead and writes a whole model; `hub`
writes any one run as a folder for the Hugging Face hub, and sends it there where a repository is named.
"""

from collections import Counter
from typing import Any, Literal

from tabulate import tabulate

from stages import formats
from stages.errors import BadInput, UsageError
from stages.formats import hub
from stages.formats.hub import MERGED_FORMAT, merged_export, push, token
from stages.formats.transcripts import Transcripts
from stages.runs.artifact import Inputs, RunWriter, Slot
from stages.runs.config import StageConfig
from stages.runs.records import CHECKPOINT, PAIR, ROLLOUT, STEP
from stages.runs.stage import Plan, Stage


class Config(StageConfig):
    """What to write."""

    format: Literal["trl", "openenv", "swebench-preds", "verifiers", "inspect", "merged", "hub"]
    """The format."""
    repo: str = ""
    """With `hub`: the repository OWNER/NAME to send the folder to. Without, nothing leaves this machine."""
    private: bool = True
    """Whether a repository that is created can be seen by its owner alone."""
    api_key_env: str = "HF_TOKEN"
    """The environment variable that holds the hub's token."""
    endpoint: str = "https://huggingface.co"
    """The hub, or one that speaks its protocol."""

    def identity(self) -> dict[str, Any]:
        """The format; where it goes counts only if it goes anywhere."""
        names = ("repo", "private", "api_key_env", "endpoint")
        return {name: value for name, value in super().identity().items() if self.repo or name not in names}

    def check(self) -> list[str]:
        """The token for sending is there."""
        if not self.repo:
            return []
        self.sends()
        token(self.api_key_env)
        return [f"{self.api_key_env} holds a token for {self.repo}"]

    def sends(self) -> bool:
        """Whether the folder is sent away; `UsageError` where another format would be."""
        if self.repo and self.format != hub.FORMAT:
            raise UsageError(f"repo={self.repo} goes with the format hub, not {self.format}. Leave it out.")
        return bool(self.repo)

    def label(self) -> str:
        """The format."""
        return self.format


def plan(inputs: Inputs, config: Config) -> Plan:
    """The rollouts to write, or the one model or folder."""
    if config.sends():
        token(config.api_key_env)
    if config.format == hub.FORMAT:
        hub.one_run(inputs)
        return Plan(units=1, what="folders")
    if config.format == MERGED_FORMAT:
        return Plan(units=1, what="model")
    _check_rollouts(inputs, config)
    return Plan(units=len(inputs.one("rollouts").scan(ROLLOUT)), what="rollouts")


def run(inputs: Inputs, config: Config, out: RunWriter) -> None:
    """Write every file of the format, then say what is in them and what is not."""
    if config.format == MERGED_FORMAT:
        merged_export(inputs.optional("checkpoint"), out)
        return
    if config.format == hub.FORMAT:
        _to_hub(inputs, config, out)
        return
    _check_rollouts(inputs, config)
    rollouts = inputs.one("rollouts")
    number = len(rollouts.scan(ROLLOUT))
    exporter, dropped = formats.exporters_load(config.format), Counter[str]()
    written: list[tuple[int, str]] = []
    for file in exporter.files(Transcripts(rollouts), dropped):
        out.raise_if_stopped()
        written.append((out.write_export(file.name, file.fill), file.name))
    if not written:
        counted = ", ".join(f"{number} {reason}" for reason, number in (+dropped).items())
        raise BadInput(f"{rollouts.path} holds nothing that {config.format} could hold: {counted}.")
    reasons = sorted((+dropped).items())
    out.count(rollouts=number, files=len(written), **{f"dropped_{reason}": number for reason, number in reasons})
    out.set_summary(format=config.format, lost=list(exporter.LOST), dropped=dict(+dropped))
    lines = [f"{number} rollouts as {config.format}", tabulate(written, tablefmt="plain")]
    lines += ["not in these files", *(f"  {number} {reason}" for reason, number in reasons)]
    lines += [f"  {what}" for what in exporter.LOST]
    out.text("report.txt", "\n".join(lines) + "\n")


def _to_hub(inputs: Inputs, config: Config, out: RunWriter) -> None:
    """Write the folder; send it where a repository is named."""
    secret = token(config.api_key_env) if config.sends() else ""
    run = hub.one_run(inputs)
    folder = hub.export(run, out)
    if secret:
        kind = "model" if run.holds(CHECKPOINT) else "dataset"
        sent = push(folder, config.repo, kind, endpoint=config.endpoint, secret=secret, private=config.private)
        out.set_summary(repo=config.repo, **sent)


def _check_rollouts(inputs: Inputs, config: Config) -> None:
    if "rollouts" not in inputs:
        raise UsageError(
            f"{config.format} writes rollouts. Give a run that holds them: --from artifacts/collect/latest."
        )


STAGE = Stage(
    name="export",
    version=1,
    config=Config,
    inputs={
        "rollouts": Slot(STEP, unless=(CHECKPOINT, PAIR)),
        "checkpoint": Slot(CHECKPOINT, optional=True),
        "pairs": Slot(PAIR, optional=True),
    },
    plan=plan,
    run=run,
)
