"""probe svd: decompose every adapted Linear of a model, once, so that all measurements share its singular coordinates.

Writes a folder of factors, one file a module, and a table of their digests. The unit is a module. All
Linears of the layers are decomposed; factors are kept because singular vectors of close values are not unique, and a
direction means something in the basis alone that it was extracted in.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from stages.policy.base import PolicyConfig
from stages.runs import store
from stages.runs.artifact import Inputs, RunWriter
from stages.runs.config import StageConfig
from stages.runs.records import CHECKPOINT, SVD_MODULE, Row
from stages.runs.stage import Plan, Stage

if TYPE_CHECKING:
    from torch import Tensor


class Config(StageConfig):
    """What to decompose, and how exactly."""

    model: PolicyConfig = PolicyConfig(model="kata:honest")
    """The model whose gradients will be probed: the student, not the teacher."""
    precision: Literal["float32", "float64"] = "float32"
    """What the decomposition is computed in; factors are kept in float32."""


def plan(inputs: Inputs, config: Config) -> Plan:
    """One model."""
    del inputs, config
    return Plan(
        units=1, what="model", notes=("seven Linears a layer; about 10 GB of factors for a model of 4 B parameters",)
    )


def run(inputs: Inputs, config: Config, out: RunWriter) -> None:
    """Decompose what is not decomposed yet, then gather."""
    del inputs
    from stages.policy.local import LocalPolicy, load_model
    from stages.probe.adapters.attach import target_linears

    model, tokenizer = load_model(config.model, cache=out.cache, listener=out.progress)
    out.model("student", **LocalPolicy(model, tokenizer, config.model).facts())
    linears, folder = target_linears(model), out.scratch("factors")
    for index, (name, linear) in enumerate(linears.items()):
        out.raise_if_stopped()
        out.progress("decompositions", index, len(linears))
        if not out.finished(name):
            out.write(name, {"module": _decompose(name, linear.weight, folder / f"{index:04d}.safetensors", config)})
    _finish(list(linears), folder, out)


def _decompose(name: str, weight: "Tensor", path: Path, config: Config) -> Row:
    """One `svd_module/1` row; the factors are on disk before it is written."""
    import torch

    from stages.probe.adapters.spectrum import factorise, reconstruction_error, save_factors

    factors = factorise(weight, getattr(torch, config.precision))
    save_factors(path, name, factors)
    return {
        "module": name,
        "outputs": weight.shape[0],
        "inputs": weight.shape[1],
        "rank": len(factors.S),
        "reconstruction_error": reconstruction_error(weight, factors),
        "sha256": factors.sha256,
    }


def _finish(names: list[str], folder: Path, out: RunWriter) -> None:
    from stages.probe.adapters.spectrum import link_files

    rows = [record["module"] for name in names if (record := out.journal.get(name)) is not None]
    sha256 = store.digest([[row["module"], row["sha256"]] for row in rows])
    out.checkpoint(lambda target: link_files(folder, target), "svd")
    out.table(SVD_MODULE, rows)
    out.count(planned=len(rows), done=len(rows))
    worst = max(row["reconstruction_error"] for row in rows)
    out.set_summary(
        svd_sha256=sha256, modules=len(rows), numbers=sum(row["rank"] for row in rows), worst_reconstruction_error=worst
    )


STAGE = Stage(
    name="probe-svd",
    version=1,
    config=Config,
    outputs={"svd_modules": SVD_MODULE, "svd": CHECKPOINT},
    plan=plan,
    run=run,
)
