"""export: write rollouts, or tasks, in the format of another program.

Answers: can others read what was collected here? Reads rollouts, own or imported, writes files in the run's folder and
a report of what the format has no room for. `harbor` writes the tasks of a run as folders, with solution and verifier.
`model` writes a plain Hugging Face folder for other programs instead: a trained adapter merged into its base, or the
folder that was made of a GGUF file or a named model; `gguf` writes such a model as one file for llama.cpp. `hub` writes
any one run as a folder for the Hugging Face hub, and sends it there where a repository is named. `TARGETS` holds what
each format reads and how it is written.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from shutil import copytree
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, Literal

from composer_stages.envs import task_table
from composer_stages.envs.config import EnvStageConfig
from composer_stages.envs.harbor import write as harbor
from composer_stages.errors import BadInput, UsageError
from composer_stages.formats import FORMATS, hub, writer
from composer_stages.formats.transcripts import Transcripts
from composer_stages.layout import aligned, counted
from composer_stages.policy import adapters
from composer_stages.policy.adapters import CheckpointInfo
from composer_stages.policy.base import PolicyConfig
from composer_stages.rollouts.trace import inherited
from composer_stages.runs import store
from composer_stages.runs.kinds import CHECKPOINT, PAIR, ROLLOUT, STEP, TASK, Kind
from composer_stages.runs.run import Inputs, Run, RunWriter, Slot
from composer_stages.runs.settings import Option, StageConfig, basic_of
from composer_stages.runs.stage import Plan, Stage

MODEL, GGUF = "model", "gguf"
ROLLOUT_FORMATS = tuple(name for name, spec in FORMATS.items() if spec.written)
if TYPE_CHECKING:
    Written = str
else:
    Written = Literal[*ROLLOUT_FORMATS, harbor.FORMAT, MODEL, GGUF, hub.FORMAT]
"""A key of `TARGETS`."""


class Config(StageConfig):
    """What to write."""

    format: Written
    """The format."""
    policy: Annotated[PolicyConfig | None, basic_of("model"), Option("MODEL")] = None
    """With `model` and `gguf`: the model to write, instead of that of a training."""
    gguf_type: Literal["f32", "f16", "bf16", "q8_0"] = "f16"
    """With `gguf`: the type of the matrices; vectors are float32."""
    base_image: str = harbor.BASE_IMAGE
    """With `harbor`: the image that each task's Dockerfile begins with; it needs python3 of version 3.11 or later."""
    repo: str = ""
    """With `hub`: the repository OWNER/NAME to send the folder to. Without, nothing leaves this machine."""
    private: bool = True
    """Whether a repository that is created can be seen by its owner alone."""
    api_key_env: str = "HF_TOKEN"
    """The environment variable that holds the hub's token."""
    endpoint: str = "https://huggingface.co"
    """The hub, or one that speaks its protocol."""

    def identity(self) -> dict[str, Any]:
        """Return the settings without those of other formats, and without the hub's where nothing is sent."""
        absent = {name for key, target in TARGETS.items() if key != self.format for name in target.settings}
        absent -= set(TARGETS[self.format].settings)
        absent |= set() if self.repo else set(TARGETS[hub.FORMAT].settings)
        return {name: value for name, value in super().identity().items() if name not in absent}

    def uses_gpu(self) -> bool:
        """Return whether the weights are loaded: `model` adds an adapter to its base."""
        return self.format in (MODEL, GGUF)

    def check(self) -> list[str]:
        """Return lines about a model and the token for sending; `UsageError` without one, or for another format."""
        lines = super().check()
        if not self.sends():
            return lines
        hub.token(self.api_key_env)
        return [*lines, f"{self.api_key_env} holds a token for {self.repo}"]

    def reads_runs(self) -> bool:
        """Return whether a run is read: not where a model is given; `UsageError` for another format than model."""
        if self.policy is not None and self.format not in (MODEL, GGUF):
            raise UsageError("policy-without-model-format", model=self.policy.model, format=self.format)
        return self.policy is None

    def sends(self) -> bool:
        """Return whether the folder is sent, which needs the token; `UsageError` for another format than hub."""
        if self.repo and self.format != hub.FORMAT:
            raise UsageError("repo-without-hub-format", repo=self.repo, format=self.format)
        return bool(self.repo)

    def label(self) -> str:
        """Return the format."""
        return self.format


@dataclass(frozen=True)
class Target:
    """How a format is written: what it is made of, its units, and the function that writes it."""

    source: Callable[[Inputs, Config], Any]
    """Return the run to read, or the model to write; raise `UsageError` where none was given that fits."""
    write: Callable[[Any, Config, RunWriter], None]
    noun: str
    """Plural of a unit."""
    kind: Kind | None = None
    """The records that are the units; None: the run is the only one."""
    settings: tuple[str, ...] = ()
    """Settings that no other format has."""


def plan(inputs: Inputs, config: Config) -> Plan:
    """Return the number of rollouts or tasks to write, or one model or folder."""
    if config.sends():
        hub.token(config.api_key_env)
    target = TARGETS[config.format]
    source = target.source(inputs, config)
    return Plan(units=1 if target.kind is None else len(source.scan(target.kind)), what=target.noun)


def run(inputs: Inputs, config: Config, out: RunWriter) -> None:
    """Write every file of the format, and a report of what they hold and lack."""
    target = TARGETS[config.format]
    target.write(target.source(inputs, config), config, out)
    if config.format in (MODEL, GGUF, hub.FORMAT) and (checkpoint := inputs.optional("checkpoint")):
        # For `evaluate`, which refuses to evaluate the model on what it was trained on.
        out.document("checkpoint", CheckpointInfo.of(checkpoint).model_dump(mode="json"))


def _find_rollouts(inputs: Inputs, config: Config) -> Run:
    if "rollouts" not in inputs:
        raise UsageError("no-run-of-rollouts", format=config.format)
    return inputs.one("rollouts")


def _write_rollouts(rollouts: Run, config: Config, out: RunWriter) -> None:
    """Write the files of a format, and a report with what they lack and how many rollouts were left out."""
    number = len(rollouts.scan(ROLLOUT))
    format_writer, dropped = writer(config.format), Counter[str]()
    written: list[tuple[int, str]] = []
    for file in format_writer.files(Transcripts(rollouts), dropped):
        out.raise_if_stopped()
        written.append((out.write_export(file.name, file.fill), file.name))
    if not written:
        why = [f"{number} {reason}" for reason, number in (+dropped).items()]
        raise BadInput("nothing-to-export", run=rollouts.path, format=config.format, reasons=why)
    reasons = sorted((+dropped).items())
    out.count(rollouts=number, files=len(written), **{f"dropped_{reason}": number for reason, number in reasons})
    out.set_summary(
        format=config.format, lost=list(format_writer.lost), dropped=dict(+dropped), **inherited([rollouts])
    )
    lines = [f"{counted(number, 'rollout')} as {config.format}", aligned(written)]
    lines += ["not in these files", *(f"  {number} {reason}" for reason, number in reasons)]
    lines += [f"  {fact}" for fact in format_writer.lost]
    out.write_file("report.txt", "\n".join(lines) + "\n")


def _find_tasks(inputs: Inputs, config: Config) -> Run:
    """Return the only run that was given, which must hold tasks."""
    del config
    runs = [run for run in {run.path: run for run in inputs.runs()}.values() if run.holds(TASK)]
    if len(runs) != 1:
        raise UsageError("no-single-run-of-tasks", num_runs=len(runs))
    return runs[0]


def _write_tasks(tasks: Run, config: Config, out: RunWriter) -> None:
    """Write `harbor/`, one folder a task."""
    loaded_tasks = [task_table.read_task(row) for row in tasks.scan(TASK).rows()]
    names = {task.env for task in loaded_tasks}
    if len(names) != 1:
        raise BadInput("tasks-of-several-environments", run=tasks.path, envs=sorted(names))
    recorded = tasks.manifest.config
    env = EnvStageConfig.model_validate(
        {
            "env": recorded["env"] if isinstance(recorded.get("env"), dict) else {"name": names.pop()},
            "sandbox": recorded.get("sandbox", "bubblewrap"),
        }
    )
    written: list[str] = []

    def tell(name: str) -> None:
        written.append(name)
        out.raise_if_stopped()
        out.progress("tasks", len(written), len(loaded_tasks))

    def fill(folder: Path) -> None:
        harbor.write_tasks(env.env.name, env.env_options(), loaded_tasks, folder, config.base_image, tell)

    out.checkpoint(fill, harbor.FORMAT)
    out.count(tasks=len(written))
    out.set_summary(format=harbor.FORMAT, tasks=len(written))
    lines = [f"{counted(len(written), 'task')} in {out.path / harbor.FORMAT}", *written]
    out.write_file("report.txt", "\n".join(lines) + "\n")


def _find_model(inputs: Inputs, config: Config) -> PolicyConfig:
    """Return the model that was named, or the adapter of a training; `BadInput` for a training's whole model."""
    checkpoint = inputs.optional("checkpoint")
    if config.policy is not None and checkpoint is None:
        return config.policy
    if config.policy is not None or checkpoint is None:
        raise UsageError("no-single-model", both=checkpoint is not None)
    folder = checkpoint.folder()
    if config.format == MODEL and not adapters.is_adapter(str(folder)):
        raise BadInput("model-is-whole", run=checkpoint.path, folder=folder)
    return CheckpointInfo.of(checkpoint).start.model_copy(update={"model": str(folder)})


def _write_model(policy: PolicyConfig, config: Config, out: RunWriter) -> None:
    """Write `model/`, a plain Hugging Face folder for any program; `UsageError` for a model that the hub has."""
    from composer_stages.policy.local import resolve

    del config
    source = Path(resolve(policy, listener=out.progress))
    if adapters.is_adapter(str(source)):
        _write_merged(policy, out)
    elif source.is_dir():

        def copy(target: Path) -> None:
            copytree(source, target, dirs_exist_ok=True)
            _name_older_tokenizer(target)

        out.checkpoint(copy, MODEL)
        out.write_file("report.txt", f"{policy.model} in {out.path / MODEL}\n")
    else:
        raise UsageError("model-of-hub", model=policy.model)
    out.set_summary(format=MODEL)


def _name_older_tokenizer(folder: Path) -> None:
    """Describe a tokenizer by the words that transformers 4 reads, too, which are those of version 5 before its own."""
    path = folder / "tokenizer_config.json"
    if not path.is_file():  # a folder may describe its tokenizer in `tokenizer.json` alone
        return
    settings = store.read_json(path)
    if settings.get("tokenizer_class") == "TokenizersBackend":
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
        if isinstance(more := settings.get("extra_special_tokens"), list):
            settings["additional_special_tokens"] = more
            del settings["extra_special_tokens"]
        store.write_json(path, settings)


def _write_merged(policy: PolicyConfig, out: RunWriter) -> None:
    """Write an adapter added to its base's weights.

    Sums are rounded to the type of the base's weights; the report counts the weights that changed.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    from composer_stages.policy.local import load_model

    model: Any
    model, tokenizer = load_model(policy, listener=out.progress, merged=False)
    changed = weights = 0
    # Fused experts have one wrapper around another, of which the outer one comes first.
    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)]
    for name, module in reversed(layers):
        layer: Any = module.get_base_layer()
        adapted = getattr(module, "parameter_name", "weight")
        original = getattr(layer, adapted).detach().clone()
        module.merge()
        changed += int((getattr(layer, adapted) != original).sum())
        weights += original.numel()
        model.set_submodule(name, layer)  # the plain one in the place of the adapted one

    def fill(target: Any) -> None:
        model.save_pretrained(target)
        tokenizer.save_pretrained(target)
        _name_older_tokenizer(target)

    out.checkpoint(fill, MODEL)
    out.count(adapted_weights=weights, changed_weights=changed)
    out.write_file(
        "report.txt",
        f"{policy.model} merged into {out.path / MODEL}\n"
        f"{changed / weights:.1%} of the adapted weights differ from the base's in {str(model.dtype)[6:]}\n",
    )


def _write_gguf(policy: PolicyConfig, config: Config, out: RunWriter) -> None:
    """Write `model.gguf`, an adapter added to its base's weights; `BadInput` for a family that is not written."""
    from composer_stages.policy import gguf_writing
    from composer_stages.policy.local import load_model

    gguf_writing.places(*load_model(policy, listener=out.progress, empty=True))  # before weights are loaded
    model, tokenizer = load_model(policy, listener=out.progress)

    def fill(file: BinaryIO) -> int:
        def tell(done: int, total: int) -> None:
            out.progress("tensors", done, total)

        return gguf_writing.write(model, tokenizer, Path(file.name), config.gguf_type, tell)

    out.count(tensors=out.write_export("model.gguf", fill))
    out.set_summary(format=GGUF, type=config.gguf_type)
    out.write_file("report.txt", f"{policy.model} in {out.path / 'model.gguf'}, matrices in {config.gguf_type}\n")


def _write_hub(source: Run, config: Config, out: RunWriter) -> None:
    """Write `hub/`, and send it where a repository is named."""
    secret = hub.token(config.api_key_env) if config.sends() else ""  # refused before anything is written
    info = CheckpointInfo.of(source) if source.holds(CHECKPOINT) else None
    folder = hub.export_run(source, info, out)
    if secret:
        kind = "model" if info else "dataset"
        sent = hub.push(folder, config.repo, kind, endpoint=config.endpoint, secret=secret, private=config.private)
        out.set_summary(repo=config.repo, **sent)


TARGETS = {
    **dict.fromkeys(ROLLOUT_FORMATS, Target(_find_rollouts, _write_rollouts, "rollouts", ROLLOUT)),
    harbor.FORMAT: Target(_find_tasks, _write_tasks, "tasks", TASK, ("base_image",)),
    MODEL: Target(_find_model, _write_model, "model", settings=("policy",)),
    GGUF: Target(_find_model, _write_gguf, "file", settings=("policy", "gguf_type")),
    hub.FORMAT: Target(
        lambda inputs, config: hub.one_run(inputs),
        _write_hub,
        "folders",
        settings=("repo", "private", "api_key_env", "endpoint"),
    ),
}

STAGE = Stage(
    name="export",
    version=1,
    example="""\
>>> exported = composer.export(rollouts, format="trl", quiet=True)
>>> exported.manifest.status
'complete'""",
    config=Config,
    inputs={
        "rollouts": Slot(STEP, unless=(CHECKPOINT, PAIR, TASK)),
        "tasks": Slot(TASK, optional=True),
        "checkpoint": Slot(CHECKPOINT, optional=True),
        "pairs": Slot(PAIR, optional=True),
    },
    plan=plan,
    run=run,
)
