"""A run as a folder for the Hugging Face hub: a model with its card, or tables with a dataset card.

    README.md                         the card: front matter, what was done, figures
    composer/run.json                 what was asked, read, used and spent; without this machine's paths
    composer/*                        the report, the metrics, what the checkpoint was trained on
    *                                 a model: the files of the checkpoint
    TABLE/train-00000-of-00001.parquet   a dataset: each table as it is, a configuration of its own

`datasets.load_dataset(folder, "steps")` opens a table. The licence is the user's to choose and stands as a comment in
the front matter. Equal runs give equal bytes.
"""

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson
from tabulate import tabulate

from stages.errors import BadInput, InfrastructureError, UsageError
from stages.policy import adapters
from stages.policy.adapters import CheckpointInfo
from stages.redaction import redacted, secret_in
from stages.runs import store
from stages.runs.artifact import Inputs, Run, RunWriter
from stages.runs.records import CHECKPOINT

# ---- cards
# Model cards and dataset cards: front matter that the hub reads, and in words and figures what was done.

LICENCE = "# license: choose one, for example apache-2.0; the base model's and the data's terms may bind you"


def model_card(told: Mapping[str, Any], info: CheckpointInfo, *, base: str | None, adapter: bool) -> str:
    """The card of a trained model. `base`: the model's id on the hub that training began with, where it has one."""
    library = "peft" if adapter else "transformers"
    matter = ["tags:", "- composer", "- post-training", f"library_name: {library}", "pipeline_tag: text-generation"]
    if base:
        matter += [f"base_model: {base}", f"base_model_relation: {'adapter' if adapter else 'finetune'}"]
    what = [
        ("arm", info.arm),
        ("started from", base or "a model that is not on the hub"),
        ("weights", "an adapter (LoRA)" if adapter else "a whole model"),
        ("environment", info.env),
        ("trained on", f"{len(info.task_ids)} tasks of the split {info.split}, listed in `composer/checkpoint.json`"),
        ("seed", info.train_seed),
    ]
    load = (
        "from peft import AutoPeftModelForCausalLM\n\nmodel = AutoPeftModelForCausalLM.from_pretrained(FOLDER_OR_REPO)"
        if adapter
        else "from transformers import AutoModelForCausalLM\n\n"
        "model = AutoModelForCausalLM.from_pretrained(FOLDER_OR_REPO)"
    )
    said = "Nothing here says how good the model is: that is what `composer evaluate` on held-out tasks is for."
    return _card(matter, f"{info.arm}, trained with Composer", [_table(what), said, _python(load)], told)


def dataset_card(told: Mapping[str, Any], tables: Mapping[str, Mapping[str, Any]]) -> str:
    """The card of a run's tables, each a configuration; the largest kind of record a reader wants comes first."""
    first = next((name for name in ("pairs", "rollouts") if name in tables), next(iter(tables)))
    matter = ["tags:", "- composer", "configs:"]
    for name in tables:
        matter += [f"- config_name: {name}", f"  data_files: {name}/*.parquet"]
        matter += ["  default: true"] if name == first else []
    rows = [(f"`{name}`", about["kind"], f"{about['rows']:,}") for name, about in tables.items()]
    load = f'from datasets import load_dataset\n\nrows = load_dataset(FOLDER_OR_REPO, "{first}", split="train")'
    body = [tabulate(rows, headers=("table", "kind of record", "rows"), tablefmt="github"), _python(load)]
    body.append("What a column means stands in Composer's reference of record kinds. A null is not a zero: the source")
    body[-1] += " did not record it."
    return _card(matter, f"Records of `composer {told['stage']}`", body, told)


def _card(matter: list[str], title: str, body: list[str], told: Mapping[str, Any]) -> str:
    parts = ["\n".join(["---", *matter, LICENCE, "---"]), f"# {title}", *body, "## Figures"]
    figures = {**told["outcome"]["summary"], **told["counts"]}
    parts.append(_table(sorted((name, value) for name, value in figures.items() if _is_figure(value))) or "None.")
    settings = json.dumps(told["config"], indent=2, sort_keys=True, ensure_ascii=False)
    parts += ["## Settings", f"```json\n{settings.replace('```', '` ` `')}\n```"]
    version, print_ = told["composer"], told["fingerprint"]
    parts.append(f"Made with Composer {version}; `composer/run.json` tells the whole run (fingerprint `{print_}`).")
    return "\n\n".join(parts) + "\n"


def _is_figure(value: Any) -> bool:
    return isinstance(value, str | int | float)


def _table(rows: list[tuple[str, Any]]) -> str:
    return tabulate([(name, _cell(value)) for name, value in rows], headers=("", ""), tablefmt="github") if rows else ""


def _cell(value: Any) -> str:
    """A value that cannot break out of its cell."""
    shown = f"{value:.6g}" if isinstance(value, float) else str(value)
    return " ".join(shown.split()).replace("|", "\\|").replace("<", "&lt;")


def _python(code: str) -> str:
    return f"```python\n{code}\n```"


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


def export(run: Run, out: RunWriter) -> Path:
    """Write `hub/`; returns the folder."""
    is_model = bool(run.holds(CHECKPOINT))
    out.checkpoint(lambda folder: _model(run, folder) if is_model else _dataset(run, folder), FORMAT)
    folder = out.path / FORMAT
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    kind = "model" if is_model else "dataset"
    out.count(files=len(names))
    out.set_summary(format=FORMAT, repo_type=kind)
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
        data = run.read_file(name)
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


# ---- hub_push
# A folder into a repository of the Hugging Face hub, in one commit.

REFUSED = (401, 403)


def token(variable: str) -> str:
    """The token from the environment, redacted from now on; `UsageError` names a variable that is missing or empty."""
    value = secret_in(variable)
    if not value:
        raise UsageError(
            f"The environment variable {variable}, which holds the hub's token, is not set. Export it, name another "
            "with api_key_env, or leave repo out: then the folder is written and nothing is sent."
        )
    return value


def push(folder: Path, repo: str, repo_type: str, *, endpoint: str, secret: str, private: bool) -> dict[str, Any]:
    """Create the repository where there is none, commit the folder; returns the commit's address and digest.

    Raises `UsageError` where the hub refuses the token or the name, `InfrastructureError` where it cannot be reached.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError
    from huggingface_hub.errors import HTTPError as Unreachable  # type: ignore[attr-defined]  # of its HTTP client

    api = HfApi(endpoint=endpoint, token=secret, library_name="composer")
    try:
        api.create_repo(repo, repo_type=repo_type, private=private, exist_ok=True)
        done = api.upload_folder(
            repo_id=repo, repo_type=repo_type, folder_path=folder, commit_message="Publish a run of Composer"
        )
    except HFValidationError as error:
        raise UsageError(f"repo={repo} is no name for a repository: {error}") from None
    except HfHubHTTPError as error:
        said = redacted(str(error.server_message or error).strip().split("\n")[0])
        if error.response.status_code in REFUSED:
            raise UsageError(f"{endpoint} refuses the token for {repo}: {said}") from None
        raise InfrastructureError(f"{endpoint} answered {error.response.status_code} for {repo}: {said}") from None
    except (Unreachable, OSError, RuntimeError, ValueError) as error:
        said = redacted(str(error).strip().split("\n")[0])
        raise InfrastructureError(f"{repo} could not be sent to {endpoint}: {said}") from None
    return {"commit": str(done.commit_url), "oid": done.oid}


# ---- merged
# A plain Hugging Face folder: an adapter added to its base's weights, for programs that know nothing of adapters.

MERGED_FORMAT = "merged"


def merged_export(checkpoint: Run | None, out: RunWriter) -> None:
    """Merge, count what changed, and write `merged/`. Sums are rounded to the type of the base's weights."""
    from stages.policy.local import load_model

    if checkpoint is None:
        raise UsageError("merged writes a trained model. Give its run: --from artifacts/train/latest.")
    folder = checkpoint.folder()
    if not adapters.is_adapter(str(folder)):
        raise BadInput(f"{checkpoint.path} holds a whole model, not an adapter. Use {folder} as it is.")
    config = CheckpointInfo.of(checkpoint).start.model_copy(update={"model": str(folder)})
    model, tokenizer = load_model(config, cache=out.cache, listener=out.progress, merged=False)
    changed, weights = merge(model)

    def fill(target: Any) -> None:
        model.save_pretrained(target)
        tokenizer.save_pretrained(target)

    out.checkpoint(fill, MERGED_FORMAT)
    out.count(adapted_weights=weights, changed_weights=changed)
    out.set_summary(format=MERGED_FORMAT)
    out.text(
        "report.txt",
        f"{folder} merged into {out.path / MERGED_FORMAT}\n"
        f"{changed / weights:.1%} of the adapted weights differ from the base's in {str(model.dtype)[6:]}\n",
    )


def merge(model: Any) -> tuple[int, int]:
    """Put a plain Linear in the place of each adapted one; returns (weights that changed, weights of these Linears)."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    changed = weights = 0
    for name, module in list(model.named_modules()):
        if isinstance(module, BaseTunerLayer):
            linear: Any = module.get_base_layer()
            before = linear.weight.detach().clone()
            module.merge()
            changed += int((linear.weight != before).sum())
            weights += before.numel()
            model.set_submodule(name, linear)
    return changed, weights
