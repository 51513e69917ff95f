"""probe svd: decompose every adapted Linear of a model, once, so that all measurements share its singular coordinates.

Writes a folder of factors, one file a module, and a table of their digests. The unit is a module. Factors are stored
because singular vectors of close values are not unique, and a direction is only defined in the basis of its extraction.
"""

from typing import Annotated, Literal

from composer_stages.policy.base import PolicyConfig
from composer_stages.runs import store
from composer_stages.runs.kinds import SVD_MODULE, VECTORS
from composer_stages.runs.run import Inputs, RunWriter
from composer_stages.runs.settings import StageConfig, basic_of
from composer_stages.runs.stage import Plan, Stage
from composer_stages.words import Sentence


class Config(StageConfig):
    """Settings of the decomposition."""

    model: Annotated[PolicyConfig, basic_of("model")] = PolicyConfig(model="kata:honest")
    """The model whose gradients will be probed: the student, not the teacher."""
    precision: Literal["float32", "float64"] = "float32"
    """The type of the computation; factors are stored in float32."""


def plan(inputs: Inputs, config: Config) -> Plan:
    """Plan one unit: the model."""
    del inputs, config
    return Plan(units=1, what="model", notes=(Sentence("probe.size-of-factors"),))


def run(inputs: Inputs, config: Config, out: RunWriter) -> None:
    """Decompose the remaining Linears, then tabulate all of them."""
    del inputs
    import torch

    from composer_stages.gradients.basis import factorise, reconstruction_error, save_factors, target_linears
    from composer_stages.policy.local import LocalPolicy, load_model

    model, tokenizer = load_model(config.model, listener=out.progress)
    out.model("student", **LocalPolicy(model, tokenizer, config.model).facts())
    linears, folder = target_linears(model), out.scratch("factors")
    for index, (name, linear) in enumerate(linears.items()):
        out.raise_if_stopped()
        out.progress("decompositions", index, len(linears))
        if out.finished(name):
            continue
        factors = factorise(linear.weight, getattr(torch, config.precision))
        # The factors are on disk before the line of the journal that marks the module as finished.
        save_factors(folder / f"{index:04d}.safetensors", name, factors)
        row = {
            "module": name,
            "outputs": linear.weight.shape[0],
            "inputs": linear.weight.shape[1],
            "rank": len(factors.S),
            "reconstruction_error": reconstruction_error(linear.weight, factors),
            "sha256": factors.sha256,
        }
        out.write(name, {"module": row})
    rows = [record["module"] for name in linears if (record := out.journal.get(name)) is not None]
    out.checkpoint(lambda target: store.link_folder(folder, target), "svd", VECTORS)
    out.table(SVD_MODULE, rows)
    out.count(planned=len(rows), done=len(rows))
    out.set_summary(
        # The digest of `Spectrum.sha256`, without reading 10 GB of factors again.
        svd_sha256=store.digest([[row["module"], row["sha256"]] for row in rows]),
        modules=len(rows),
        numbers=sum(row["rank"] for row in rows),
        worst_reconstruction_error=max(row["reconstruction_error"] for row in rows),
    )


STAGE = Stage(
    name="probe-svd", version=2, config=Config, outputs={"svd_modules": SVD_MODULE, "svd": VECTORS}, plan=plan, run=run
)
