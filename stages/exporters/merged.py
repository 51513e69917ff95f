"""A plain Hugging Face folder: an adapter added to its base's weights, for programs that know nothing of adapters."""

from typing import Any

from stages.errors import BadInput, UsageError
from stages.policy import adapters
from stages.policy.checkpoint import CheckpointInfo
from stages.runs.artifact import Out, Run

FORMAT = "merged"


def export(checkpoint: Run | None, out: Out) -> None:
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

    out.checkpoint(fill, FORMAT)
    out.count(adapted_weights=weights, changed_weights=changed)
    out.conclude(format=FORMAT)
    out.text(
        "report.txt",
        f"{folder} merged into {out.path / FORMAT}\n"
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
