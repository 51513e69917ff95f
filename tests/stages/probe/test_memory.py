"""What the probe takes is known from config.json alone, stated before loading, and refused with a way out."""

from pathlib import Path

import pytest
from probe_faults.loophole_world import tiny_qwen3

from benchmarks.gpu import probe_table
from benchmarks.shapes import shape
from composer_stages.errors import UsageError
from composer_stages.gradients.basis import Lora, target_linears
from composer_stages.policy.base import PolicyConfig
from composer_stages.probe import extract_vhack
from composer_stages.probe.memory import MemoryInputs, check_memory, memory_notes, needed, num_trained
from composer_stages.runs import runner
from composer_stages.runs.run import Inputs
from composer_stages.training.memory import GIB
from composer_stages.training.model_shape import model_shape


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> PolicyConfig:
    """A folder with the config.json of a model of four billion parameters, and nothing else."""
    folder = tmp_path_factory.mktemp("four")
    shape("4B").save_pretrained(folder)
    return PolicyConfig(model=str(folder), device="cpu")


def test_trained_parameters_of_adapters_at_four_billion_parameters(four: PolicyConfig) -> None:
    """534,528 singular values; a LoRA of rank 32 has 66.1 million numbers, 264 MB in float32."""
    shape = model_shape(four)
    assert shape is not None and num_trained(shape, "antipasto_full", 8) == 534_528
    assert shape.parameters == 4_022_468_096  # its head is its embedding, counted once
    assert num_trained(shape, "antipasto_topr", 256) == 36 * 7 * 256
    assert 4 * num_trained(shape, "lora", 32) == pytest.approx(264e6, rel=0.01)
    model = tiny_qwen3()
    lora = Lora(target_linears(model), 3, freeze_a=False, seed=0)
    shapes = [tuple(linear.weight.T.shape) for linear in target_linears(model).values()]
    assert sum(3 * (i + o) for i, o in shapes) == lora.layout.width


def test_sums_instead_of_rows_checkpointing_and_fewer_tokens_need_less(four: PolicyConfig) -> None:
    shape = model_shape(four)
    rows, sums = (needed(shape, MemoryInputs("lora", 32, 8192, True, rows=count)) for count in (16, 0))
    assert rows.gradients - sums.gradients == pytest.approx(2 * 16 * 264e6, rel=0.01)
    plain, spare, fewer = (
        needed(shape, MemoryInputs("antipasto_full", 8, tokens, spare)).activations
        for tokens, spare in ((8192, False), (8192, True), (1024, False))
    )
    assert spare < plain / 8 and fewer < plain / 4
    assert needed(shape, MemoryInputs("antipasto_full", 8, 0)).change == pytest.approx(14.6e9, rel=0.01)


def test_the_plan_states_the_memory_before_loading(four: PolicyConfig) -> None:
    config = extract_vhack.Config(student=four, checkpointing=True)
    notes = " ".join(extract_vhack.plan(Inputs(), config).notes)
    assert "GiB (weights" in notes and "activations" in notes
    assert memory_notes(PolicyConfig(model="kata:honest"), MemoryInputs("lora", 8, 10)) == ()


def test_too_little_memory_is_refused_with_settings_that_need_less(four: PolicyConfig) -> None:
    measuring = MemoryInputs("lora", 32, 1_000_000, rows=10_000)
    with pytest.raises(UsageError, match=r"This measurement takes about .* checkpointing=true \(.* keep=sums \("):
        check_memory(four, measuring, {"keep=sums": MemoryInputs("lora", 32, 1_000_000)})
    tiny = MemoryInputs("antipasto_topr", 8, 16)
    if needed(model_shape(four), tiny).total < 8 * GIB:  # a machine that holds it says nothing
        check_memory(four, tiny)


def test_a_stage_refuses_before_it_loads(four: PolicyConfig, tmp_path: Path) -> None:
    """The folder has no weights: a stage that loaded first would say that."""
    config = extract_vhack.Config(student=four, adapter="lora", rank=512, max_tokens=2**24)
    with pytest.raises(UsageError, match="This measurement takes about"):
        runner.execute("probe-extract-vhack", Inputs(), config, root=tmp_path)


def test_the_table_of_the_documents_is_what_is_predicted() -> None:
    told = (Path(__file__).parents[3] / "docs/probe-method.md").read_text().splitlines()
    assert set(probe_table()) <= set(told)
