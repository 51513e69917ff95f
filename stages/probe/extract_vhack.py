"""probe extract-vhack: the direction from clean to hacking answers in gradient space, and its validation.

Reads a decomposition (for the spectral adapters), writes a folder with `v_hack.safetensors` and the pairs' token-sum
gradients, a table of modules, and its validation. The unit is a pair. Everything but the gradients is recombined from
what is stored. The method is described in `directions.extraction`, the adapters in `adapters`, with their sources.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from stages.policy.base import PolicyConfig
from stages.probe.adapters.names import LORA_EXTRACT, AdapterName
from stages.probe.pool.pair_source import Pair, PairsConfig, load_pairs
from stages.runs import store
from stages.runs.artifact import Inputs, Run, RunWriter, Slot
from stages.runs.config import StageConfig
from stages.runs.records import CHECKPOINT, DIRECTION, SVD_MODULE, Row
from stages.runs.stage import Plan, Stage

if TYPE_CHECKING:
    from stages.probe.checks.check import Check
    from stages.probe.directions.extraction import Direction, LossKind, PairGradients
    from stages.probe.gradients.memory import Measuring
    from stages.probe.gradients.store import GradientStore
    from stages.probe.gradients.student import Student
    from stages.probe.pool.tokens import TokenRow

PAIRS_AT_ONCE = 8
LOSSES: dict[str, "LossKind"] = {"nll": "nll_mean", "grpo": "drgrpo_sum"}


class Config(StageConfig):
    """Of which model, in which coordinates, from which pairs."""

    student: PolicyConfig = PolicyConfig(model="kata:honest")
    """The model whose gradients are probed."""
    adapter: AdapterName = "antipasto_full"
    rank: int = Field(8, gt=0)
    """Of all but antipasto_full, which has no rank to choose. AntiPaSTO takes 64."""
    warmup_steps: int = Field(6, ge=4, le=10)
    """Steps on the pairs that lora_warmup takes before its gradients are taken."""
    loss: Literal["nll", "grpo"] = "nll"
    """`nll`: mean over own tokens. `grpo`: Dr.GRPO's token sum with advantages +1 and -1, which weights by length."""
    method: Literal["mean", "svd_k"] = "mean"
    k: int = Field(1, gt=0)
    """Axes a module with `svd_k`."""
    noise_floor: float = Field(0.0, ge=0.0, lt=1.0)
    """With `svd_k`: axes below this quantile of all modules' singular values are dropped."""
    pairs: PairsConfig = PairsConfig()
    max_tokens: int = Field(8192, gt=0, json_schema_extra={"affects_results": False})
    """Padded tokens of one backward pass."""
    checkpointing: bool = Field(False, json_schema_extra={"affects_results": False})
    """Keep one activation a layer: less memory, one more forward pass."""

    def label(self) -> str:
        """Adapter and loss."""
        return f"{self.adapter}-{self.loss}".replace("_", "-")


def plan(inputs: Inputs, config: Config) -> Plan:
    """Two backward rows a pair."""
    from stages.probe.gradients.memory import memory_notes

    del inputs
    notes = (f"{config.pairs.held_out} more pairs to check it by", *memory_notes(config.student, _measuring(config)))
    return Plan(units=config.pairs.count, what="pairs", notes=notes)


def _measuring(config: Config) -> "Measuring":
    """What decides the memory: gradients of all pairs at once, from which the direction is made and checked."""
    from stages.probe.gradients.memory import Measuring

    rows = 2 * max(PAIRS_AT_ONCE, config.pairs.count)
    return Measuring(config.adapter, config.rank, config.max_tokens, config.checkpointing, rows)


def run(inputs: Inputs, config: Config, out: RunWriter) -> None:
    """Gradients of the pairs, the direction, its validation; `UsageError` where memory would not suffice."""
    from stages.probe.directions.extraction import extract, pair_gradients, save_pair_rows
    from stages.probe.gradients.memory import check_memory
    from stages.probe.gradients.per_sample import checkpointed
    from stages.probe.gradients.store import GradientStore
    from stages.probe.gradients.student import open_student

    check_memory(config.student, _measuring(config))
    student = open_student(config.student, config.adapter, config.rank, config.seed, inputs.optional("svd"), out)
    student.max_tokens = config.max_tokens
    pairs = load_pairs(config.pairs, config.seed)
    rows = [pair.rows(student.tokenizer) for pair in pairs]
    used = rows[: config.pairs.count]
    student = _prepared(student, used, inputs.optional("svd"), config, out)
    facts = _facts(config, pairs, student)
    save_pair_rows(out.scratch("v_hack"), used)
    kept = GradientStore.create(out.scratch("v_hack"), student.adapter.layout, 2 * len(used), facts)
    loss = LOSSES[config.loss]
    with checkpointed(student.model) if config.checkpointing else nullcontext():
        _measure(used, student, kept, out)
        gradients = pair_gradients(kept)
        direction = extract(gradients.layout, gradients.differences(loss), config.method, config.k, config.noise_floor)
        checks = _validate(student, direction, gradients, rows, pairs, config)
    _finish(direction, gradients, checks, {**facts, "num_modules": len(direction.modules)}, loss, out)


def _prepared(
    student: "Student",
    rows: Sequence[tuple["TokenRow", "TokenRow"]],
    svd: Run | None,
    config: Config,
    out: RunWriter,
) -> "Student":
    """The student where its adapter starts, which is kept beside the direction when the pairs decide it."""
    if config.adapter not in ("antipasto_paper", "lora_warmup"):
        return student
    from stages.probe.adapters.choose import save_start
    from stages.probe.adapters.spectrum import load_spectrum
    from stages.probe.gradients.student import start_from_pairs

    spectrum = load_spectrum(svd.folder()) if svd is not None and config.adapter == "antipasto_paper" else None
    student = start_from_pairs(student, rows, spectrum, config.warmup_steps, config.seed)
    save_start(out.scratch("v_hack"), student.adapter)
    return student


def _facts(config: Config, pairs: Sequence[Pair], student: "Student") -> Row:
    """What must agree before the direction is used, and how it came about."""
    from stages.probe.adapters.choose import coordinates

    return {
        **coordinates(student.adapter),
        "adapter_seed": config.seed,
        "adapter_rank": config.rank,
        "lora_extract": LORA_EXTRACT.get(config.adapter),
        "model": config.student.model,
        "pairs_sha256": store.digest([[p.pair_id, p.prompt, p.hack, p.clean] for p in pairs]),
        "loss_kind": LOSSES[config.loss],
        "method": config.method,
        "k": config.k,
        "noise_floor": config.noise_floor,
        "n_pairs": config.pairs.count,
        "dtype": "float32",
        "polarity": "grad NLL(hack) - grad NLL(clean)",
        "tokens": [[row.num_own for row in pair.rows(student.tokenizer)] for pair in pairs[: config.pairs.count]],
    }


def _measure(
    rows: Sequence[tuple["TokenRow", "TokenRow"]], student: "Student", kept: "GradientStore", out: RunWriter
) -> None:
    """Token-sum gradients of the pairs: hack in row 2j, clean in row 2j + 1."""
    for start in range(0, len(rows), PAIRS_AT_ONCE):
        out.progress("pairs", start, len(rows))
        names = [f"pair-{j:04d}" for j in range(start, min(start + PAIRS_AT_ONCE, len(rows)))]
        if all(out.finished(name) for name in names):
            continue
        out.raise_if_stopped()
        flat, _ = student.gradients([side for pair in rows[start : start + PAIRS_AT_ONCE] for side in pair])
        kept.put(2 * start, flat)
        kept.flush()
        out.write_all([(name, {}, False) for name in names])


def _validate(
    student: "Student",
    direction: "Direction",
    gradients: "PairGradients",
    rows: Sequence[tuple["TokenRow", "TokenRow"]],
    pairs: Sequence[Pair],
    config: Config,
) -> list["Check"]:
    from stages.probe.checks.validation import length_cosine, recombination, validate
    from stages.probe.directions.extraction import grpo_differences

    used, held_out = rows[: config.pairs.count], rows[config.pairs.count :]
    problems = [store.digest(pair.prompt) for pair in pairs[: config.pairs.count]]
    checks = validate(student, direction, gradients, held_out, LOSSES[config.loss], config.seed, problems)
    longer = [row for pair in pairs[: len(used)] if (row := pair.longer_row(student.tokenizer)) is not None]
    complete = longer if len(longer) == len(used) else None
    checks.append(length_cosine(student, direction, [clean for _, clean in used], complete))
    if config.loss == "grpo":
        checks += recombination(gradients, grpo_differences(student, used))
    return checks


def _finish(
    direction: "Direction",
    gradients: "PairGradients",
    checks: Sequence["Check"],
    facts: Row,
    loss: "LossKind",
    out: RunWriter,
) -> None:
    from stages.probe.adapters.spectrum import link_files
    from stages.probe.checks.check import EXIT_CODES, table, verdict
    from stages.probe.directions.extraction import V_HACK_FILE, module_rows, save_direction

    folder = out.scratch("v_hack")
    save_direction(folder / V_HACK_FILE, direction, facts)
    out.checkpoint(lambda target: link_files(folder, target), "v_hack")
    out.table(DIRECTION, module_rows(direction, gradients, loss))
    out.document("validation", [check.as_json() for check in checks])
    out.write_file("report.txt", table(checks) + "\n")
    out.count(planned=len(gradients), done=len(gradients))
    status = verdict(checks)
    out.set_summary(
        ok=status == "PASS",
        verdict=status,
        exit_code=EXIT_CODES[status],
        modules=len(direction.modules),
        adapter=facts["adapter"],
        rank=facts["adapter_rank"],
        loss_kind=facts["loss_kind"],
        length_matched=next(check for check in checks if check.name == "V5").passed,
    )


STAGE = Stage(
    name="probe-extract-vhack",
    version=1,
    config=Config,
    inputs={"svd": Slot(SVD_MODULE, optional=True)},
    outputs={"directions": DIRECTION, "v_hack": CHECKPOINT},
    plan=plan,
    run=run,
)
