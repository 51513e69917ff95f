"""A run as a folder for the Hugging Face hub, and its upload: a model with its card, or tables with a dataset card.

    README.md                         the card: front matter, what was done, figures
    composer/run.json                 settings, inputs, packages, tokens and cost; without this machine's paths
    composer/*                        the report, the metrics, the tasks that the checkpoint was trained on
    *                                 a model: the files of the checkpoint
    TABLE/train-00000-of-00001.parquet   a dataset: each table as it is, a configuration of its own

`datasets.load_dataset(folder, "steps")` opens a table. The user chooses the licence, which is a comment in the
front matter. Equal runs give equal bytes.
"""

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from composer_stages.data_files import load_template
from composer_stages.errors import InfrastructureError, UsageError
from composer_stages.layout import escape_control_characters, markdown_table
from composer_stages.redaction import redacted, secret_in
from composer_stages.runs import store
from composer_stages.runs.run import Inputs, Run, RunWriter

if TYPE_CHECKING:
    from composer_stages.policy.adapters import CheckpointInfo

FORMAT = "hub"
PUBLISHED_FILES = ("checkpoint.json", "metrics.jsonl", "report.txt")
"""Files of a run, other than its tables and weights, that are published."""
PUBLISHED_FIELDS = (
    *("composer", "stage", "stage_version", "fingerprint", "label", "config", "counts", "tokens", "cost_usd"),
    *("models", "outcome", "packages", "python"),
)
"""Fields of a run's manifest that are published."""
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
REFUSED = (401, 403)


def one_run(inputs: Inputs) -> Run:
    """Return the run to publish; raise `UsageError` if there are several."""
    runs = {run.path: run for run in inputs.runs()}
    if len(runs) != 1:
        raise UsageError("formats.several-runs", num_runs=len(runs))
    return next(iter(runs.values()))


def export_run(run: Run, info: "CheckpointInfo | None", out: RunWriter) -> Path:
    """Write `hub/` and return the folder. info: of the checkpoint, where the run holds one."""
    out.checkpoint(partial(_write_model, run, info) if info else partial(_write_dataset, run), FORMAT)
    folder = out.path / FORMAT
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    kind = "model" if info else "dataset"
    out.count(files=len(names))
    out.set_summary(format=FORMAT, repo_type=kind)
    out.write_file("report.txt", f"{run.path} as a {kind} for the hub in {folder}\n" + "\n".join(names) + "\n")
    return folder


def _write_model(run: Run, info: "CheckpointInfo", folder: Path) -> None:
    shutil.copytree(run.folder(), folder, dirs_exist_ok=True)
    adapter = (folder / "adapter_config.json").is_file()
    start, local, base = info.start.source, False, folder / "composer_base.json"
    if base.is_file():  # of an adapter that was trained on another one, whose first base is not its own
        below = store.read_json(base)
        start, local = below["model"], below["weights"] != "hub"
        store.write_json(base, _without_folders(below))
    named = start if HUB_ID.fullmatch(start) and not (local or Path(start).exists()) else None
    # The JSON files of the weights may name the base by a path of this machine, which may look like a hub id.
    for path in folder.glob("*config.json"):
        fields = store.read_json(path)
        paths = (name for name in fields if name.endswith("name_or_path") and isinstance(fields[name], str))
        if names := [name for name in paths if local or Path(fields[name]).is_absolute()]:
            store.write_json(path, {**fields, **dict.fromkeys(names)})
    published = _write_about(run, folder)
    library, loader = ("peft", "AutoPeftModelForCausalLM") if adapter else ("transformers", "AutoModelForCausalLM")
    # The hub id of the model that was trained, if it has one, is the card's base.
    card = _card(published, info=info, base=named, adapter=adapter, library=library, loader=loader)
    store.write_sealed(folder / "README.md", escape_control_characters(card).encode())


def _write_dataset(run: Run, folder: Path) -> None:
    tables: dict[str, dict[str, Any]] = {}
    for name, about in run.manifest.outputs.items():
        if about["file"].endswith(".parquet"):
            (folder / name).mkdir()
            # `datasets` reads the split from the file's name: SPLIT-NUMBER-of-NUMBER.
            shutil.copyfile(run.path / about["file"], folder / name / "train-00000-of-00001.parquet")
            tables[name] = about
    card = dataset_card(_write_about(run, folder), tables)
    store.write_sealed(folder / "README.md", escape_control_characters(card).encode())


def _write_about(run: Run, folder: Path) -> Mapping[str, Any]:
    """Write `composer/`; return the published fields of the run."""
    manifest = run.manifest.model_dump(mode="json")
    read = {
        slot: [{name: input_run[name] for name in ("stage", "fingerprint", "content")} for input_run in ones]
        for slot, ones in manifest["inputs"].items()
    }
    published: dict[str, Any] = _without_folders(
        {**{name: manifest[name] for name in PUBLISHED_FIELDS}, "inputs": read}
    )
    (folder / "composer").mkdir()
    store.write_json(folder / "composer" / "run.json", published)
    for name in PUBLISHED_FILES:
        data = run.read_file(name)
        if data is not None and name.endswith(".json"):
            store.write_json(folder / "composer" / name, _without_folders(orjson.loads(data)))
        elif data is not None:
            store.write_sealed(folder / "composer" / name, _relative(data.decode()).encode())
    return published


def _without_folders(value: Any) -> Any:
    """Return a JSON value without this machine's folders: of a path the last part stays."""
    if isinstance(value, str):
        return Path(value).name if Path(value).is_absolute() else _relative(value)
    if isinstance(value, dict):
        return {key: _without_folders(item) for key, item in value.items()}
    return [_without_folders(item) for item in value] if isinstance(value, list) else value


def _relative(text: str) -> str:
    """Return a text in which the working folder is `.` and the user's home folder `~`."""
    # The working folder first: it is usually below the home folder. In containers either may be `/`, in every path.
    for folder, sign in ((Path.cwd(), "."), (Path.home(), "~")):
        if folder != Path("/"):
            text = re.sub(re.escape(str(folder)) + r"(?![\w.-])", sign, text)
    return text


def dataset_card(published: Mapping[str, Any], tables: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the card of a run's tables, each a configuration; pairs, else rollouts, are the default one."""
    first = next((name for name in ("pairs", "rollouts") if name in tables), next(iter(tables)))
    rows = [(f"`{name}`", about["kind"], f"{about['rows']:,}") for name, about in tables.items()]
    records = markdown_table(rows, ("table", "kind of record", "rows"))
    return _card(published, info=None, tables=tables, first=first, records=records)


def _card(published: Mapping[str, Any], **values: Any) -> str:
    figures = {**published["outcome"]["summary"], **published["counts"]}
    scalars = sorted((name, value) for name, value in figures.items() if isinstance(value, str | int | float))
    settings = json.dumps(published["config"], indent=2, sort_keys=True, ensure_ascii=False)
    # A fence in a setting (a prompt, for example) would end the block of settings.
    values |= {"published": published, "figures": scalars, "settings": settings.replace("```", "` ` `")}
    return load_template(__package__, "hub_card.jinja").render(table=_table, **values)


def _table(rows: Sequence[tuple[str, Any]]) -> str:
    """Return a table of names and values, none of which can break out of its cell; empty without rows."""
    cells = []
    # Values come from settings and reports: `|` would begin a cell of Markdown, `<` a tag on the hub's page.
    for name, value in rows:
        text = f"{value:.6g}" if isinstance(value, float) else str(value)
        cells.append((name, " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")))
    return markdown_table(cells, ("", "")) if cells else ""


def token(variable: str) -> str:
    """Return the token from the environment, redacted from now on; raise `UsageError` if the variable is not set."""
    value = secret_in(variable)
    if not value:
        raise UsageError("formats.hub-token-missing", variable=variable)
    return value


def push(folder: Path, repo: str, repo_type: str, *, endpoint: str, secret: str, private: bool) -> dict[str, Any]:
    """Commit a folder to a repository, created if needed, in one commit; return the commit's address and digest.

    Raises `UsageError` if the hub refuses the token or the name, `InfrastructureError` if it cannot be reached.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, HTTPError as Unreachable  # type: ignore[attr-defined]  # Unreachable is of its HTTP client

    api = HfApi(endpoint=endpoint, token=secret, library_name="composer")
    try:
        api.create_repo(repo, repo_type=repo_type, private=private, exist_ok=True)
        done = api.upload_folder(
            repo_id=repo, repo_type=repo_type, folder_path=folder, commit_message="Publish a run of Composer"
        )
    except HFValidationError as error:
        raise UsageError("formats.repo-name-invalid", repo=repo, error=str(error)) from None
    except HfHubHTTPError as error:
        reason = redacted(str(error.server_message or error).strip().split("\n")[0])
        if error.response.status_code in REFUSED:
            raise UsageError("formats.hub-refuses-token", endpoint=endpoint, repo=repo, reason=reason) from None
        raise InfrastructureError(
            "formats.hub-error", endpoint=endpoint, status_code=error.response.status_code, repo=repo, reason=reason
        ) from None
    except (Unreachable, OSError, RuntimeError, ValueError) as error:
        reason = redacted(str(error).strip().split("\n")[0])
        raise InfrastructureError("formats.hub-unreachable", repo=repo, endpoint=endpoint, reason=reason) from None
    return {"commit": str(done.commit_url), "oid": done.oid}
