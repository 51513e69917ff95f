"""LoRA adapter folders with a record of their base model, and `checkpoint.json`, the description of a checkpoint.

A folder holds `adapter_config.json`, `adapter_model.safetensors`, the tokenizer, and `composer_base.json`. Pickles are
never read.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from composer_stages import envs
from composer_stages.errors import BadInput, UsageError, refusal
from composer_stages.policy.base import PolicyConfig, weights_identity
from composer_stages.runs import store
from composer_stages.runs.run import Run
from composer_stages.runs.settings import Settings

CONFIG, WEIGHTS, RECORD = "adapter_config.json", "adapter_model.safetensors", "composer_base.json"

PRODUCTS = {"Linear", "FalconLinear"}
"""Classes of Linears that return a product and no more; routers are of others."""


class AdapterBase(Settings):
    """The base model of an adapter."""

    model: str
    """A folder, hub id or built-in model, as the user wrote it; an adapter's folder means the merged model."""
    weights: str
    """Result of `weights_identity` for the base."""
    dtype: str
    """Floating-point type of the base's weights while the adapter was trained."""
    revision: str | None = None
    """Commit of a model from the hub."""


def linears(model: Any) -> dict[str, tuple[int, int]]:
    """Return inputs and outputs of the Linears of a model's layers by name, also as GPT-2 stores them (`Conv1D`)."""
    import torch
    from transformers.pytorch_utils import Conv1D

    head, sizes = model.get_output_embeddings(), dict[str, tuple[int, int]]()
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and type(module).__name__ in PRODUCTS and module is not head:
            sizes[name] = module.in_features, module.out_features
        elif isinstance(module, Conv1D):
            sizes[name] = module.nx, module.nf
    return sizes


def targets(model: Any) -> str | list[str]:
    """Return peft's name for all Linears, or the last names of those that it adapts in models with Mamba's layers."""
    import torch
    from peft import LoraConfig
    from peft.tuners.tuners_utils import _check_lora_target_modules_mamba

    kinds, fitting = sorted({name.rpartition(".")[2] for name in linears(model)}), list[str]()
    for kind in kinds:
        with suppress(ValueError):
            _check_lora_target_modules_mamba(LoraConfig(), model, kind)
            fitting.append(kind)
    others = any(isinstance(m, torch.nn.Linear) and type(m).__name__ not in PRODUCTS for m in model.modules())
    return "all-linear" if fitting == kinds and not others else fitting


def is_adapter(source: str | Path) -> bool:
    """Return whether this path is an adapter's folder."""
    return (Path(source) / CONFIG).is_file()


def describe_base(config: PolicyConfig, model: Any) -> AdapterBase:
    """Return the record of a base model that was loaded with these settings."""
    return AdapterBase(
        model=config.model,
        weights=weights_identity(config),
        dtype=str(model.dtype).removeprefix("torch."),
        revision=commit_of(model),
    )


def commit_of(model: Any) -> str | None:
    """Return the commit of a model that is on the hub; None for any other."""
    from transformers.utils.hub import extract_commit_hash

    # Where the hub was not asked, the model was loaded from a folder of the cache, whose name is the commit.
    file = f"{model.name_or_path}/{CONFIG}"
    return getattr(model.config, "_commit_hash", None) or extract_commit_hash(file, None)


def base_of(source: str | Path, config: PolicyConfig) -> tuple[PolicyConfig, str | None] | None:
    """Return the settings that load an adapter's base, and the base's hub revision; None for what is no adapter.

    config: the settings that load the adapter. `BadInput` when its folder has no record or no safetensors, or when the
    base is not what it was.
    """
    folder = Path(source)
    if not is_adapter(folder):
        return None
    try:
        base = AdapterBase.model_validate(store.read_json(folder / RECORD))
    except (BadInput, ValidationError):
        raise BadInput("policy.adapter-without-record", folder=folder, record=RECORD) from None
    if not (folder / WEIGHTS).is_file():
        raise BadInput("policy.pickled-adapter", folder=folder, weights=WEIGHTS)
    dtype = base.dtype if config.dtype == "auto" else config.dtype
    start = config.model_copy(update={"model": base.model, "dtype": dtype})
    identity = weights_identity(start)
    if identity != base.weights:
        raise BadInput(
            "policy.adapter-base-changed",
            folder=folder,
            model=base.model,
            weights=base.weights[:12],
            identity=identity[:12],
        )
    return start, base.revision


def add_adapter(model: Any, folder: str, config: PolicyConfig) -> Any:
    """Return a model with the adapter of a folder; `BadInput` if its tensors do not fit its configuration."""
    from peft import PeftModel, get_peft_model_state_dict, load_peft_weights

    from composer_stages.policy import model_checks

    with model_checks.translate_errors(config):
        adapted = PeftModel.from_pretrained(model, folder)
        stored = {*load_peft_weights(folder, device="cpu")}
        expected = {*get_peft_model_state_dict(adapted, save_embedding_layers=False)}
    loading_info = {"missing_keys": expected - stored, "unexpected_keys": stored - expected, "mismatched_keys": ()}
    model_checks.require_complete(config, loading_info)
    return adapted


def save_adapter(trained: Any, base: AdapterBase, folder: Path) -> None:
    """Write a peft model's adapter and the record of its base, under the base's name as the user wrote it."""
    config = trained.peft_config["default"]
    # Only the file gets the user's name: whenever peft saves, it looks for a config.json under the name in memory,
    # and would look for the user's name on the hub at every checkpoint.
    loaded_from = config.base_model_name_or_path
    # Of an adapter's folder peft would load the base alone, without a word. For None it writes a name of its own.
    config.base_model_name_or_path = "" if is_adapter(str(Path(base.model).expanduser())) else base.model
    try:
        trained.save_pretrained(folder, save_embedding_layers=False)
    finally:
        config.base_model_name_or_path = loaded_from
    store.write_json(folder / RECORD, base.model_dump())


class CheckpointInfo(BaseModel):
    """The document `checkpoint.json` of a training run: all that `evaluate` reads of the run except the weights."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    arm: str
    train_seed: int
    start: PolicyConfig
    """The model that training started from, and how rollouts were sampled from it."""
    start_identity: str
    """SHA-256 of the start's settings and weights: arms are comparable when it is equal."""
    env: str
    split: Literal["train", "eval"]
    task_ids: tuple[str, ...]
    """Tasks of the training prompts, in the order of first use."""
    further_tasks: dict[str, tuple[str, ...]] = {}
    """Tasks of pairs and of earlier trainings by environment, which is "" where it is not known."""
    collapsed: str | None = None
    """How the training left its course, and at which step the model is, in one sentence; None where it did not."""

    @classmethod
    def of(cls, run: Run) -> Self:
        """Read a run's `checkpoint.json`; `BadInput` when it is missing or cannot be read."""
        document = run.read_file("checkpoint.json")
        if document is None:
            raise BadInput("policy.no-checkpoint-info", path=run.path)
        try:
            return cls.model_validate_json(document)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            raise BadInput(
                "policy.checkpoint-info-unreadable", path=run.path, key=first["loc"], reason=refusal(first)
            ) from None


def trainings_of(policies: Mapping[str, PolicyConfig]) -> Iterator[CheckpointInfo]:
    """Yield what is known of those of these models that lie in the folder of a training, or of its export."""
    for name, policy in policies.items():
        for folder in Path(policy.model).expanduser().absolute().parents[:2]:
            with suppress(BadInput):
                yield CheckpointInfo.of(Run(folder)).model_copy(update={"arm": name})


def refuse_trained(infos: Iterable[CheckpointInfo], env: str, task_ids: Sequence[str]) -> None:
    """Raise `UsageError` when an arm was trained on one of these tasks of this environment, in any split."""
    for info in infos:
        # One environment may have several names, and ids of different environments may be equal by chance.
        by_env = [(info.env, info.task_ids), *info.further_tasks.items()]
        seen = {name for of_env, ids in by_env if not of_env or envs.is_same_environment(of_env, env) for name in ids}
        if trained := [task_id for task_id in task_ids if task_id in seen]:
            raise UsageError(
                "policy.tasks-trained-on",
                number=len(trained),
                num_tasks=len(task_ids),
                task_id=trained[0],
                arm=info.arm,
            )
