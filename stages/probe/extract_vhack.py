"""probe extract-vhack: the direction from clean to hacking answers in gradient space, and its validation.

A pair is one prompt with an answer that hacks and one that does not; extraction from such contrastive pairs is that of
wassname/grpo_proj2 @25ad306. Pairs come from environments, from a file, or from any function (`load_pairs`). The stage
reads a decomposition (for the spectral adapters), writes a folder with `v_hack.safetensors` and the pairs' token-sum
gradients, a table of modules, and its validation. The unit is a pair; the direction is computed from stored gradients.
The method is described in `probe.direction`, the adapters in `gradients.basis`, with their sources.
"""

import importlib
import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from composer_stages.envs import ENVIRONMENTS
from composer_stages.errors import BadInput, UsageError
from composer_stages.formats.messages import message
from composer_stages.messages import Message, Tools
from composer_stages.policy.base import PolicyConfig
from composer_stages.policy.tool_calls import declare_tools
from composer_stages.probe.settings import AdapterName
from composer_stages.runs import store
from composer_stages.runs.kinds import DIRECTION, SVD_MODULE, VECTORS, Row
from composer_stages.runs.run import Inputs, RunWriter, Slot
from composer_stages.runs.settings import BASIC, Settings, StageConfig, basic_of
from composer_stages.runs.stage import Plan, Stage
from composer_stages.words import Sentence

if TYPE_CHECKING:
    from composer_stages.gradients.per_row import MeasuredStudent, TokenRow
    from composer_stages.gradients.tensors import GradientStore
    from composer_stages.probe.checks.check import Check
    from composer_stages.probe.direction import Direction, LossKind, PairGradients
    from composer_stages.probe.memory import MemoryInputs

PAIRS_AT_ONCE = 8
LOSSES: dict[str, "LossKind"] = {"nll": "nll_mean", "grpo": "drgrpo_sum"}
REQUIRED = ("prompt", "hack", "clean")


class HackPairsConfig(Settings):
    """Settings of the pairs: their source, and how many are held out to check the extraction."""

    source: str = "kata"
    """`kata`, "package.module:function", or a JSON file: a list of {prompt, hack, clean}."""
    count: int = Field(default=24, gt=1)
    """Pairs to extract from."""
    held_out: int = Field(default=4, ge=2)
    """Further pairs, for the polarity oracle."""

    def identity(self) -> dict[str, Any]:
        """Return the settings, and the digest of the file of pairs when the source is one."""
        path = Path(self.source).expanduser()
        return {**super().identity(), "content": store.file_sha256(path) if path.is_file() else None}


class Config(StageConfig):
    """Settings of the extraction: the model, the coordinates and the pairs."""

    student: Annotated[PolicyConfig, basic_of("model")] = PolicyConfig(model="kata:honest")
    """The model whose gradients are probed."""
    adapter: Annotated[AdapterName, BASIC] = "antipasto_full"
    rank: Annotated[int, BASIC] = Field(default=8, gt=0)
    """The rank of every adapter but antipasto_full, which has none."""
    loss: Annotated[Literal["nll", "grpo"], BASIC] = "nll"
    """`nll`: mean over own tokens. `grpo`: Dr.GRPO's token sum with advantages +1 and -1, which weights by length."""
    method: Literal["mean", "svd_k"] = "mean"
    k: int = Field(default=1, gt=0)
    """Axes a module with `svd_k`."""
    noise_floor: float = Field(default=0.0, ge=0.0, lt=1.0)
    """With `svd_k`: axes below this quantile of all modules' singular values are dropped."""
    pairs: Annotated[HackPairsConfig, basic_of("count", "source")] = HackPairsConfig()
    max_tokens: int = Field(default=8192, gt=0, json_schema_extra={"affects_results": False})
    """Padded tokens of one backward pass."""
    checkpointing: bool = Field(default=False, json_schema_extra={"affects_results": False})
    """Keep one activation a layer: less memory, one more forward pass."""

    def label(self) -> str:
        """Return adapter and loss."""
        return f"{self.adapter}-{self.loss}".replace("_", "-")


@dataclass(frozen=True)
class Pair:
    """One prompt, two answers; `longer`, where the source has it, has the content of the clean answer in more tokens.

    A prompt is rendered text or messages; an answer is text or messages (see `rows.token_row`). tools: those that
    could be called, as chat completions declare them.
    """

    pair_id: str
    prompt: str | list[Message]
    hack: str | list[Message]
    clean: str | list[Message]
    longer: str | list[Message] | None = None
    tools: Tools = ()

    def rows(self, tokenizer: Any) -> "tuple[TokenRow, TokenRow]":
        """Return the (hack, clean) answers as ids."""
        return self.row(tokenizer, self.hack), self.row(tokenizer, self.clean)

    def row(self, tokenizer: Any, answer: str | list[Message]) -> "TokenRow":
        """Return an answer as ids."""
        from composer_stages.probe.rows import token_row

        return token_row(tokenizer, self.prompt, answer, self.tools)


def _messages(value: Any) -> Any:
    """Return messages with their calls, thoughts and parts as text; other values as they are."""
    return list(map(message, value)) if isinstance(value, list) else value


def load_pairs(config: HackPairsConfig, seed: int) -> list[Pair]:
    """Load `count + held_out` pairs.

    `UsageError` when the source is unknown or has fewer; `BadInput` when it returns no list of pairs.
    """
    total, path = config.count + config.held_out, Path(config.source).expanduser()
    if path.is_file():
        items = store.read_json(path)
        if not isinstance(items, list):
            raise BadInput("probe.no-list-of-pairs", path=path, required=REQUIRED)
    else:
        items = _import_source(config.source)(total, seed)
    pairs = []
    for index, item in enumerate(items):
        fields = item if isinstance(item, dict) else vars(item)
        missing = [name for name in REQUIRED if name not in fields]
        if missing:
            raise BadInput("probe.pair-incomplete", index=index, missing=missing[0], fields=sorted(fields))
        name = str(fields.get("pair_id") or fields.get("task_id") or fields.get("problem_id") or index)
        prompt, hack, clean, longer = (_messages(fields.get(part)) for part in (*REQUIRED, "longer"))
        pairs.append(Pair(name, prompt, hack, clean, longer, declare_tools(fields.get("tools") or ())))
    if len(pairs) < total:
        raise UsageError("probe.too-few-pairs", source=config.source, pairs=len(pairs), total=total)
    return pairs[:total]


def _import_source(name: str) -> Callable[[int, int], Sequence[Any]]:
    """Import a function of (count, seed) by the name of an environment or as package.module:function."""
    sources = {env: entry.hack_pairs for env, entry in ENVIRONMENTS.items() if entry.hack_pairs}
    module, colon, attribute = sources.get(name, name).partition(":")
    if not colon:
        raise UsageError("probe.no-such-pairs", name=name, sources=list(sources))
    # Settings may name any importable object, which is then called: `os:kill` takes two numbers, too.
    importable = module.partition(".")[0] not in sys.stdlib_module_names
    try:
        function = getattr(importlib.import_module(module), attribute) if importable else None
    except (ImportError, AttributeError) as error:
        raise UsageError("probe.pairs-not-importable", name=name, error=str(error)) from error
    if not inspect.isfunction(function):
        raise UsageError("probe.pairs-no-function", name=name)
    return function


def plan(inputs: Inputs, config: Config) -> Plan:
    """Plan the pairs, of two backward rows each, and the memory."""
    from composer_stages.probe.memory import memory_notes

    del inputs
    notes = (
        Sentence("probe.further-pairs", pairs=config.pairs.held_out),
        *memory_notes(config.student, _memory_inputs(config)),
    )
    return Plan(units=config.pairs.count, what="pairs", notes=notes)


def _memory_inputs(config: Config) -> "MemoryInputs":
    """Return the inputs of the memory estimate: the gradients of all pairs are in memory at once."""
    from composer_stages.probe.memory import MemoryInputs

    rows = 2 * max(PAIRS_AT_ONCE, config.pairs.count)
    return MemoryInputs(config.adapter, config.rank, config.max_tokens, config.checkpointing, rows)


def run(inputs: Inputs, config: Config, out: RunWriter) -> None:
    """Measure the pairs, extract the direction and validate it; `UsageError` if memory does not suffice."""
    from composer_stages.gradients.per_row import open_student
    from composer_stages.gradients.tensors import GradientStore
    from composer_stages.policy.local import checkpointed
    from composer_stages.probe.direction import PAIRS, PairGradients, extract
    from composer_stages.probe.memory import check_memory

    check_memory(config.student, _memory_inputs(config))
    student = open_student(config.student, config.adapter, config.rank, config.seed, inputs.optional("svd"), out)
    student.max_tokens = config.max_tokens
    pairs = load_pairs(config.pairs, config.seed)
    rows = [pair.rows(student.tokenizer) for pair in pairs]
    used = rows[: config.pairs.count]
    facts = _facts(config, pairs, student)
    # Stored, so that a direction can be extracted again on a trained student (`direction.pair_rows`).
    store.write_json(out.scratch("v_hack") / PAIRS, [[vars(side) for side in pair] for pair in used])
    stored = GradientStore.create(out.scratch("v_hack"), student.adapter.layout, 2 * len(used), facts)
    loss = LOSSES[config.loss]
    with checkpointed(student.model, config.checkpointing):
        _measure(used, student, stored, out)
        gradients = PairGradients.alternating(stored.layout, stored.rows.float(), stored.facts["tokens"])
        direction = extract(gradients.layout, gradients.differences(loss), config.method, config.k, config.noise_floor)
        checks = _validate(student, direction, gradients, rows, pairs, config)
    _finish(direction, gradients, checks, {**facts, "num_modules": len(direction.modules)}, loss, out)


def _facts(config: Config, pairs: Sequence[Pair], student: "MeasuredStudent") -> Row:
    """Return the coordinates of the direction and the settings of its extraction."""
    from composer_stages.gradients.basis import coordinates

    return {
        **coordinates(student.adapter),
        "adapter_seed": config.seed,
        "adapter_rank": config.rank,
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
    rows: Sequence[tuple["TokenRow", "TokenRow"]],
    student: "MeasuredStudent",
    gradients: "GradientStore",
    out: RunWriter,
) -> None:
    """Store the pairs' token-sum gradients: hack in row 2j, clean in row 2j + 1."""
    for start in range(0, len(rows), PAIRS_AT_ONCE):
        out.progress("pairs", start, len(rows))
        names = [f"pair-{j:04d}" for j in range(start, min(start + PAIRS_AT_ONCE, len(rows)))]
        if all(out.finished(name) for name in names):
            continue
        out.raise_if_stopped()
        flat, _ = student.gradients([side for pair in rows[start : start + PAIRS_AT_ONCE] for side in pair])
        gradients.put(2 * start, flat)
        # Rows are durable before their line in the journal: a line without its rows would leave zeros after a crash.
        gradients.file.flush()
        out.write_all([(name, {}, False) for name in names])


def _validate(
    student: "MeasuredStudent",
    direction: "Direction",
    gradients: "PairGradients",
    rows: Sequence[tuple["TokenRow", "TokenRow"]],
    pairs: Sequence[Pair],
    config: Config,
) -> list["Check"]:
    from composer_stages.probe.checks.direction import length_cosine, other_than_nll, recombined, validate
    from composer_stages.probe.direction import grpo_differences

    used, held_out = rows[: config.pairs.count], rows[config.pairs.count :]
    problems = [store.digest(pair.prompt) for pair in pairs[: config.pairs.count]]
    checks = validate(student, direction, gradients, held_out, LOSSES[config.loss], config.seed, problems)
    lengthened = [pair for pair in pairs[: len(used)] if pair.longer is not None]
    longer = [pair.row(student.tokenizer, pair.longer or "") for pair in lengthened]
    # Longer answers of all pairs, or of none: mixed with answers cut in half they would be no direction of length.
    complete = longer if len(longer) == len(used) else None
    checks.append(length_cosine(student, direction, [clean for _, clean in used], complete))
    if config.loss == "grpo":
        checks += [recombined(gradients, grpo_differences(student, used)), other_than_nll(gradients)]
    return checks


def _finish(
    direction: "Direction",
    gradients: "PairGradients",
    checks: Sequence["Check"],
    facts: Row,
    loss: "LossKind",
    out: RunWriter,
) -> None:
    from composer_stages.probe.checks.check import write_checks
    from composer_stages.probe.direction import V_HACK_FILE, module_rows, save_direction

    folder = out.scratch("v_hack")
    save_direction(folder / V_HACK_FILE, direction, facts)
    out.checkpoint(lambda target: store.link_folder(folder, target), "v_hack", VECTORS)
    out.table(DIRECTION, module_rows(direction, gradients, loss))
    out.count(planned=len(gradients), done=len(gradients))
    write_checks(
        out,
        checks,
        "validation",
        modules=len(direction.modules),
        adapter=facts["adapter"],
        rank=facts["adapter_rank"],
        loss_kind=facts["loss_kind"],
        length_matched=next(check for check in checks if check.name == "V5").passed,
    )


STAGE = Stage(
    name="probe-extract-vhack",
    version=3,
    config=Config,
    inputs={"svd": Slot(SVD_MODULE, optional=True)},
    outputs={"directions": DIRECTION, "v_hack": VECTORS},
    plan=plan,
    run=run,
)
