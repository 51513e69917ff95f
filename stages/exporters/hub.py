"""A run as a folder for the Hugging Face hub: a model with its card, or tables with a dataset card.

    README.md                         the card: front matter, what was done, figures
    composer/run.json                 what was asked, read, used and spent; without this machine's paths
    composer/*                        the report, the metrics, what the checkpoint was trained on
    *                                 a model: the files of the checkpoint
    TABLE/train-00000-of-00001.parquet   a dataset: each table as it is, a configuration of its own

`datasets.load_dataset(folder, "steps")` opens a table. The licence is the user's to choose and stands as a comment in
the front matter. Equal runs give equal bytes.
"""

import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

from stages.errors import UsageError
from stages.exporters.cards import dataset_card, model_card
from stages.policy import adapters
from stages.policy.checkpoint import CheckpointInfo
from stages.runs import store
from stages.runs.artifact import Out, Run
from stages.runs.inputs import Inputs
from stages.runs.outcome_records import CHECKPOINT

FORMAT = "hub"
BESIDE = ("checkpoint.json", "metrics.jsonl", "report.txt")
TOLD = (
    *("composer", "stage", "stage_version", "fingerprint", "label", "config", "counts", "tokens", "cost_usd"),
    *("models", "outcome", "packages", "python"),
)
"""What is published of a run's manifest."""
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def one_run(inputs: Inputs) -> Run:
    """The run to publish; `UsageError` where there are several."""
    runs = {run.path: run for run in inputs.runs()}
    if len(runs) != 1:
        raise UsageError(f"hub publishes one run, and {len(runs)} were given. Export each by itself.")
    return next(iter(runs.values()))


def export(run: Run, out: Out) -> Path:
    """Write `hub/`; returns the folder."""
    is_model = bool(run.holds(CHECKPOINT))
    out.checkpoint(lambda folder: _model(run, folder) if is_model else _dataset(run, folder), FORMAT)
    folder = out.path / FORMAT
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    kind = "model" if is_model else "dataset"
    out.count(files=len(names))
    out.conclude(format=FORMAT, repo_type=kind)
    out.text("report.txt", f"{run.path} as a {kind} for the hub in {folder}\n" + "\n".join(names) + "\n")
    return folder


def _model(run: Run, folder: Path) -> None:
    shutil.copytree(run.folder(), folder, dirs_exist_ok=True)
    adapter = adapters.is_adapter(str(folder))
    info = CheckpointInfo.of(run)
    named = info.start.model if HUB_ID.fullmatch(info.start.model) and not Path(info.start.model).exists() else None
    _without_paths(folder)
    told = _about(run, folder)
    store.write_sealed(folder / "README.md", model_card(told, info, base=named, adapter=adapter).encode())


def _without_paths(folder: Path) -> None:
    """Take paths of this machine out of the JSON beside a model's weights: the name of its base is not a place here."""
    for path in folder.glob("*config.json"):
        held = store.read_json(path)
        places = [name for name, value in held.items() if name.endswith("name_or_path") and _is_place(value)]
        if places:
            store.write_json(path, {**held, **dict.fromkeys(places)})
    base = folder / "composer_base.json"
    if base.is_file():
        store.write_json(base, _nameless(store.read_json(base)))


def _dataset(run: Run, folder: Path) -> None:
    tables: dict[str, dict[str, Any]] = {}
    for name, about in run.manifest.outputs.items():
        if about["file"].endswith(".parquet"):
            (folder / name).mkdir()
            shutil.copyfile(run.path / about["file"], folder / name / "train-00000-of-00001.parquet")
            tables[name] = about
    store.write_sealed(folder / "README.md", dataset_card(_about(run, folder), tables).encode())


def _about(run: Run, folder: Path) -> Mapping[str, Any]:
    """Write what lies beside the tables into `composer/`; returns what is told of the run."""
    manifest = run.manifest.model_dump(mode="json")
    read = {
        slot: [{name: one[name] for name in ("stage", "fingerprint", "content")} for one in ones]
        for slot, ones in manifest["inputs"].items()
    }
    told = _nameless({**{name: manifest[name] for name in TOLD}, "inputs": read})
    (folder / "composer").mkdir()
    store.write_json(folder / "composer" / "run.json", told)
    for name in BESIDE:
        data = run.beside(name)
        if data is not None and name.endswith(".json"):
            store.write_json(folder / "composer" / name, _nameless(orjson.loads(data)))
        elif data is not None:
            store.write_sealed(folder / "composer" / name, _relative(data.decode()).encode())
    return told


def _is_place(value: Any) -> bool:
    return isinstance(value, str) and Path(value).is_absolute()


def _nameless(value: Any) -> Any:
    """A JSON value without this machine's folders: of a path the last part stays."""
    if isinstance(value, str):
        return Path(value).name if _is_place(value) else _relative(value)
    if isinstance(value, dict):
        return {key: _nameless(item) for key, item in value.items()}
    return [_nameless(item) for item in value] if isinstance(value, list) else value


def _relative(text: str) -> str:
    """A text in which folders of this machine are relative to where the program runs, or to the user's own."""
    for place, sign in ((Path.cwd(), "."), (Path.home(), "~")):
        if place != Path("/"):
            text = re.sub(re.escape(str(place)) + r"(?![\w.-])", sign, text)
    return text
