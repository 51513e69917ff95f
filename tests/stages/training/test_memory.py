"""What a training takes is known from config.json alone, and what does not fit is refused with a way out."""

import os
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support import trainings
from support.models import tiny_model, tiny_tokenizer
from support.refusals import refused
from transformers import Gemma2Config, Qwen2Config, Qwen3Config, Qwen3ForCausalLM

from benchmarks.shapes import shape
from composer_cli.preset import configure_preset, for_every_entry, load_preset
from composer_stages import train
from composer_stages.backends import resources
from composer_stages.errors import UsageError
from composer_stages.policy.base import PolicyConfig
from composer_stages.runs import runner, settings
from composer_stages.runs.run import Inputs
from composer_stages.training import memory
from composer_stages.training.memory import GIB, KEPT, Room
from composer_stages.training.model_shape import ModelShape, Prompts, model_shape
from composer_stages.training.plan import TrainPlan, resolve

EIGHT = shape("8B")


@pytest.fixture(scope="module")
def eight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the config.json of a model of eight billion parameters, and nothing else."""
    folder = tmp_path_factory.mktemp("eight")
    EIGHT.save_pretrained(folder)
    return folder


def shape_of(folder: Path) -> ModelShape:
    shape = model_shape(PolicyConfig(model=str(folder)))
    assert shape is not None
    return shape


def planned(folder: Path, processes: int = 1, rollout_tokens: int = 512, **settings: Any) -> TrainPlan:
    """The plan of a training of a model, with rollouts of so many tokens."""
    policy = {"model": str(folder), **settings.pop("policy", {})}
    resolved = resolve(train.Config(policy=policy, **settings), processes)
    return replace(resolved, rollout_tokens=rollout_tokens)


def too_large(plan: TrainPlan, room: Room, *names: str, **values: Any) -> str:
    """The text of the refusal of a plan that does not fit."""
    check = partial(memory.check_memory, plan, room)
    return refused(check, UsageError, *names, code="training.too-little-memory", **values)


def test_the_shape_is_that_of_the_model(tmp_path: Path, eight: Path) -> None:
    model = tiny_model()
    model.config.save_pretrained(tmp_path)
    found = shape_of(tmp_path)
    assert found.parameters == sum(p.numel() for p in model.parameters())
    assert (found.bytes, found.layers, found.kv) == (4, 2, 16)
    assert shape_of(eight).parameters == 8_190_735_360  # as the model card of Qwen3-8B has it: 8.2 B
    assert shape_of(eight).bytes == 2


def test_the_activations_of_a_layer_match_autograd() -> None:
    config = Qwen3Config(
        vocab_size=50,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
    )
    model, tokens = Qwen3ForCausalLM(config).to(torch.bfloat16).train(), 128
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            saved[tensor.untyped_storage().data_ptr()] = tensor  # held, so that no address is used twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.get_decoder()(input_ids=torch.zeros(1, tokens, dtype=torch.long), use_cache=False)
    linears = [m for m in model.get_decoder().modules() if isinstance(m, torch.nn.Linear)]
    estimate = 2 * KEPT * tokens * sum(m.in_features + m.out_features for m in linears)
    assert 1.0 <= estimate / sum(t.untyped_storage().nbytes() for t in saved.values()) <= 1.2


def test_defaults_fit_eight_billion_on_one_accelerator_and_full_training_does_not(eight: Path) -> None:
    memory.check_memory(planned(eight), Room(80 * GIB))

    size = {"gradient_checkpointing": False, "micro_batch": 64}
    full = planned(eight, optimisation=size, adapter={"rank": 0})
    total = memory.estimate_memory(full)
    assert total.gradients == 4 * 8_190_735_360 and total.optimiser == 8 * 8_190_735_360
    ways = ("optimisation.gradient_checkpointing=true", "optimisation.micro_batch=1", "adapter.rank=16")
    for gib, fits in ((30, True), (8, False)):
        names = ("weights 45.8, gradients 30.5, optimiser 61.0, activations", f"{gib}.0 GiB", *(ways if fits else ()))
        too_large(full, Room(gib * GIB), *names, fits=fits)


@pytest.mark.parametrize(("generations", "max_tokens", "rows"), [(8, 64, 8), (8, 752, 4), (6, 752, 3), (8, 4096, 1)])
def test_long_rollouts_share_a_pass_with_fewer_others(
    eight: Path, generations: int, max_tokens: int, rows: int
) -> None:
    policy = {"model": str(eight), "max_tokens": max_tokens, "device": "cuda"}
    found = resolve(train.Config(policy=policy, optimisation={"generations": generations}), 1)
    assert found.config.optimisation.micro_batch == rows


def test_a_model_without_a_limit_of_answers_is_trained_on_its_whole_context_in_80_gb(eight: Path) -> None:
    found = resolve(train.Config(policy={"model": str(eight), "device": "cuda"}), 1)
    assert found.rollout_tokens == 40_960, "the context of EIGHT"
    memory.check_memory(found, Room(int(SMALLEST * GIB)))


def test_a_training_that_cannot_fit_is_refused_before_loading(tmp_path: Path) -> None:
    """The folder has no weights at all, so that loading would say something else."""
    changes = {"hidden_size": 16384, "intermediate_size": 65536, "num_hidden_layers": 200}
    Qwen3Config(**{**EIGHT.to_dict(), **changes, "layer_types": None}).save_pretrained(tmp_path / "huge")
    tiny_tokenizer().save_pretrained(tmp_path / "huge")
    call = partial(runner.execute, "train", {}, trainings.settings(tmp_path / "huge"), root=tmp_path)
    refused(call, UsageError, code="training.too-little-memory")


def test_the_plan_lists_chosen_settings_with_their_reason(eight: Path) -> None:
    # By a limit that nothing fits in, whatever this machine has.
    config = train.Config(policy={"model": str(eight)}, optimisation={"memory_limit": 1})
    chosen, needed = train.plan(Inputs(), config).notes
    assert "LoRA of rank 16 at learning rate 1e-05, 1 rollout a pass, activations recomputed" in chosen
    assert (
        "8.2 B parameters" in chosen and "GiB (weights 15.4" in needed and "1,024 tokens, which are assumed" in needed
    )
    assert train.plan(Inputs(), train.Config()).notes == ()


def test_memory_counts_local_teachers_and_no_served_ones(eight: Path) -> None:
    held = {"model": str(eight)}
    opd = {"weights": {"opd": 1.0}, "opd": {"form": "sampled"}}
    alone, beside, served, unused = (
        planned(eight, **settings)
        for settings in (
            {},
            {"weights": {"eopd": 1.0}, "teacher": held},
            {**opd, "teacher": {"model": f"vllm:{eight}", "base_url": "http://127.0.0.1:1/v1"}},
            {"weights": {"opd": 1.0}, "teacher": {"model": "nobody/asks"}, "opd": {"teachers": [held]}},
        )
    )
    both, wide = (
        planned(eight, weights={"eopd": 1.0, "opd": 1.0}, teacher=held, opd={"teachers": [held | more]})
        for more in ({"tasks": ["sum*"]}, {"dtype": "float32"})
    )
    assert unused.teacher_bytes == beside.teacher_bytes == both.teacher_bytes, "one model in two ways is loaded once"
    assert wide.teacher_bytes == 3 * beside.teacher_bytes
    assert beside.teacher_bytes == 2 * 8_190_735_360 and alone.teacher_bytes == served.teacher_bytes == 0
    room = memory.estimate_memory(alone).total + GIB
    memory.check_memory(alone, Room(int(room)))
    too_large(beside, Room(int(room)), "teacher 15.3, program 0.7)")


def groups(root: Path, cgroup: str, **limits: str) -> Path:
    """A root whose proc and sys say this; `limits` are files below sys/fs/cgroup, `__` for a slash."""
    files = {"proc/self/cgroup": cgroup} | {f"sys/fs/cgroup/{k.replace('__', '/')}": v for k, v in limits.items()}
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_available_memory_heeds_control_groups(tmp_path: Path) -> None:
    two = groups(tmp_path / "2", "0::/a/job\n", **{"a__job__memory.max": "3000\n", "a__memory.max": "max\n"})
    assert resources.available("cpu", two) == 3000
    above = groups(tmp_path / "above", "0::/a/job\n", **{"a__job__memory.max": "3000\n", "a__memory.max": "2000\n"})
    assert resources.available("cpu", above) == 2000, "a group above it may allow less"
    one = "memory__a__memory.limit_in_bytes"
    first = groups(tmp_path / "1", "4:cpu,memory:/a\n0::/\n2:cpuset:/\n", **{one: "5000\n"})
    assert resources.available("cpu", first) == 5000
    inside = groups(tmp_path / "inside", "0::/of/the/host\n", **{"memory.max": "4000\n"})
    assert resources.available("cpu", inside) == 4000, "a container sees its own group as the root"


def test_unused_memory_subtracts_usage_of_control_groups(tmp_path: Path) -> None:
    """But files that nothing has used lately; and never less than nothing is left."""
    used = {"a__memory.current": "2500\n", "a__memory.stat": "anon 2000\ninactive_file 300\n"}
    two = groups(tmp_path / "2", "0::/a\n", **{"a__memory.max": "3000\n", **used})
    assert resources.unused("cpu", two) == 800
    small = groups(tmp_path / "small", "0::/a\n", **{"a__memory.max": "2000\n", **used})
    assert resources.unused("cpu", small) == 0
    first = {
        "limit_in_bytes": "3000\n",
        "usage_in_bytes": "2500\n",
        "stat": "inactive_file 10\ntotal_inactive_file 400\n",
    }
    one = groups(tmp_path / "1", "4:memory:/a\n", **{f"memory__a__memory.{name}": text for name, text in first.items()})
    assert resources.unused("cpu", one) == 900
    endless = groups(tmp_path / "free", "0::/a\n", **{"a__memory.max": "max\n", **used})
    assert resources.unused("cpu", endless) > 2**20


def test_cores_heed_quotas_of_control_groups(tmp_path: Path) -> None:
    all_there_are = resources.cores(tmp_path / "no such system")
    assert all_there_are == len(os.sched_getaffinity(0))
    two = groups(tmp_path / "2", "0::/a/job\n", **{"a__job__cpu.max": "max 100000\n", "a__cpu.max": "60000 50000\n"})
    assert resources.cores(two) == 1, "1.2 cores"
    little = groups(tmp_path / "little", "0::/a\n", **{"a__cpu.max": "10000 100000\n"})
    assert resources.cores(little) == 1, "and never none"
    first = groups(tmp_path / "1", "3:cpuacct,cpu:/a\n", **{"cpu__a__cpu.cfs_quota_us": "100000\n"})
    assert resources.cores(first) == 1
    endless = groups(tmp_path / "free", "3:cpu:/a\n", **{"cpu__a__cpu.cfs_quota_us": "-1\n"})
    assert resources.cores(endless) == all_there_are


def test_the_users_omp_num_threads_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(resources.cores() + 1)
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        resources.use_own_cores()
        assert torch.get_num_threads() == resources.cores() + 1
        monkeypatch.delenv("OMP_NUM_THREADS")
        resources.use_own_cores()
        assert torch.get_num_threads() == resources.cores()
    finally:
        torch.set_num_threads(before)


def test_without_a_limit_all_memory_is_available(tmp_path: Path) -> None:
    machine = resources.available("cpu", tmp_path / "no such system")
    endless = groups(tmp_path / "1", "4:memory:/a\n", **{"memory__a__memory.limit_in_bytes": "9223372036854771712\n"})
    free = groups(tmp_path / "2", "0::/a\n", **{"a__memory.max": "max\n"})
    assert resources.available("cpu", endless) == resources.available("cpu", free) == machine > 2**30


def served(folder: Path, *, address: bool = False, **settings: Any) -> TrainPlan:
    """The plan of a training on a GPU whose rollouts come from a vLLM server, by default one that it starts."""
    policy: dict[str, Any] = {"model": f"vllm:{folder}", "device": "cuda", **settings.pop("policy", {})}
    if address:
        policy["base_url"] = "http://127.0.0.1:1/v1"
    return resolve(train.Config(policy=policy, **settings), 1)


def gpu(free: int, whole: int = 80) -> Callable[[str], tuple[int, int]]:
    """What the driver reports of a GPU, in GiB."""
    return lambda device: (free * GIB, whole * GIB)


def test_a_server_s_rollouts_take_no_cache_in_this_process(eight: Path) -> None:
    here = planned(eight, rollout_tokens=4096, optimisation={"micro_batch": 1}, policy={"kv_cache_gib": 60})
    fitted = planned(eight, rollout_tokens=4096, optimisation={"micro_batch": 1})
    there = replace(served(eight, optimisation={"micro_batch": 1}), rollout_tokens=4096)
    assert memory.estimate_memory(here).activations > 40 * GIB
    assert memory.estimate_memory(fitted).activations < 5 * GIB, "as many rows at once as fit, and one at least"
    assert memory.estimate_memory(there).activations < 5 * GIB
    assert memory.estimate_memory(here).weights == memory.estimate_memory(there).weights


def test_room_subtracts_the_share_of_a_server_until_it_started(eight: Path) -> None:
    own = served(eight, policy={"server": {"args": {"gpu-memory-utilization": 0.25}}})
    assert memory.room(own, gpu_memory=gpu(78)).bytes == 58 * GIB
    assert memory.room(own, started=True, gpu_memory=gpu(57)).bytes == 57 * GIB, "the driver has taken it off"
    assert memory.room(served(eight), gpu_memory=gpu(80)).bytes == pytest.approx(0.08 * 80 * GIB, rel=1e-6)
    assert memory.room(served(eight, address=True), gpu_memory=gpu(40)).bytes == 40 * GIB, "it runs already"
    assert memory.room(served(eight, policy={"device": "cuda:1"}), gpu_memory=gpu(10)).bytes == 0


def test_a_server_on_a_cpu_takes_its_weights_and_its_cache(eight: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = memory.room(planned(eight))
    for space, gib in ((None, 1), ("4", 4)):
        if space:
            monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", space)
        for started in (False, True):
            beside = memory.room(served(eight, policy={"device": "cpu"}), started=started)
            assert beside == Room(alone.free, 2 * 8_190_735_360 + gib * GIB)


def test_a_training_that_does_not_fit_beside_its_server_names_the_server_s_setting(eight: Path) -> None:
    args = {"max-model-len": 8192, "gpu-memory-utilization": 0.35}
    size = {"micro_batch": 8, "max_staleness": 1}
    own = served(eight, policy={"server": {"args": args}, "max_tokens": 752}, optimisation=size)
    found = memory.room(own, gpu_memory=gpu(80))
    sizes = "52.0 GiB beside its vLLM server, which takes 28.0", "optimisation.micro_batch=1 "
    smaller = re.search(r"gpu-memory-utilization=(\S+) alone", too_large(own, found, *sizes, fits=True))
    args["gpu-memory-utilization"] = float(smaller[1])
    mended = served(eight, policy={"server": {"args": args}, "max_tokens": 752}, optimisation=size)
    memory.check_memory(mended, memory.room(mended, gpu_memory=gpu(80)))
    # Started, and larger than was assumed: the same setting, by what is free now.
    started = memory.room(own, started=True, gpu_memory=gpu(50))
    too_large(own, started, "there are 50.0 GiB. policy.server.args.gpu-memory-utilization=0.3")
    # A server that could not even hold the model is no way out.
    too_large(own, memory.room(own, gpu_memory=gpu(60, 60)), server="")


def test_a_server_that_sleeps_leaves_its_memory_to_a_step_and_takes_it_between_steps(eight: Path) -> None:
    def sleeping(part: float, **size: Any) -> TrainPlan:
        args = {"max-model-len": 8192, "enable-sleep-mode": True, "gpu-memory-utilization": part}
        return served(
            eight, policy={"server": {"args": args}, "max_tokens": 752}, optimisation={"micro_batch": 8, **size}
        )

    for started, free in ((False, 80), (True, 32)):
        found = memory.room(sleeping(0.6), started=started, gpu_memory=gpu(free))
        assert found.bytes == 78 * GIB and "takes 2.0 asleep" in str(found)
        memory.check_memory(sleeping(0.6), found)
    check = partial(memory.check_memory, sleeping(0.9), memory.room(sleeping(0.9), gpu_memory=gpu(80)))
    text = refused(check, UsageError, "leaves 8.0", code="training.server-leaves-too-little")
    part = float(re.search(r"utilization=(0\.8\d*)", text)[1])
    memory.check_memory(sleeping(part), memory.room(sleeping(part), gpu_memory=gpu(80)))
    refused(lambda: sleeping(0.6, max_staleness=1), UsageError, code="training.sleep-and-staleness")


SMALLEST = 79.1
"""GiB of a GPU that is sold with 80 GB: 79.2 of an A100, 79.1 of an H100, as torch reports them."""


EXAMPLES = [("real-model", "train"), ("three-arms", "grpo-pairs-4"), ("three-arms", "grpo-opd-4")]


@pytest.mark.parametrize(("preset", "entry"), EXAMPLES)
def test_an_example_for_80_gb_fits_with_room_to_spare(eight: Path, tmp_path: Path, preset: str, entry: str) -> None:
    preset = load_preset(f"examples/{preset}.toml")
    layers = for_every_entry(preset, "policy.model", str(eight), prefix="vllm:")
    here: dict[str, Any] = {"policy": {"device": "cuda"}}
    if "opd" in entry:  # its teacher of 14.8 billion parameters
        larger = {"hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 40, "num_attention_heads": 40}
        Qwen3Config(**EIGHT.to_dict() | larger | {"layer_types": None}).save_pretrained(tmp_path)
        here["teacher"] = {"model": str(tmp_path)}
    config = configure_preset(preset, [*layers, {entry: here}])[entry]
    resolved = resolve(config, 1, ["pairs"] if entry == "grpo-pairs-4" else [])
    whole = int(SMALLEST * GIB)
    found = memory.room(resolved, gpu_memory=lambda device: (whole, whole))
    memory.check_memory(resolved, found)
    taken = memory.estimate_memory(resolved).total + found.server
    assert found.server > 2 * 8_190_735_360 + memory.SERVER_RESERVE, "the server holds its model"
    assert taken <= 0.95 * whole, f"{taken / GIB:.1f} of {SMALLEST} GiB"


@pytest.mark.parametrize(("prompt", "answer", "tracked"), [(128, 512, 19.1), (1024, 2048, 31.7)])
def test_on_a_gpu_the_estimate_is_near_the_peak_that_was_tracked(
    eight: Path, prompt: int, answer: int, tracked: float
) -> None:
    size = {"generations": 8, "prompts_per_step": 1, "micro_batch": 8, "shared_prompts": False}
    of_gpu = planned(eight, rollout_tokens=answer, optimisation=size, policy={"device": "cuda"})
    found = memory.estimate_memory(replace(of_gpu, prompts=Prompts(prompt))).total / GIB
    assert 1.0 <= found / tracked <= 1.15  # on fake tensors: GRPO, LoRA of rank 16, activations recomputed


def test_pairs_are_in_memory_beside_the_rollouts_of_a_pass(eight: Path) -> None:
    size = {"generations": 8, "prompts_per_step": 2, "micro_batch": 8, "shared_prompts": False}
    plan = planned(eight, optimisation=size, pairs={"per_step": 24})
    prompts = Prompts(100)

    def activations(**more: Any) -> float:
        return memory.estimate_memory(replace(plan, prompts=replace(prompts, **more))).activations

    rollouts = replace(plan, prompts=Prompts(100 + (300 + 11 * 200) // 8), rollout_tokens=plan.rollout_tokens)
    # Two parts of a step: twelve pairs in each, one of them as long as the longest.
    with_pairs = activations(pair=200.0, longest_pair=300)
    assert with_pairs == pytest.approx(memory.estimate_memory(rollouts).activations, rel=0.01)
    assert activations() < with_pairs
    prompts = replace(prompts, pair=200.0, longest_pair=300)
    few = replace(plan, prompts=prompts).changed(optimisation={"max_tokens_per_micro_batch": 500})
    assert memory.estimate_memory(few).activations < with_pairs


@pytest.mark.parametrize(
    ("layers", "prompt", "answer", "tracked", "recomputed"),
    [(26, 1024, 3072, 10.06, True), (4, 512, 1536, 6.95, False)],
)
def test_eager_attention_holds_the_scores_of_all_pairs(
    tmp_path: Path, layers: int, prompt: int, answer: int, tracked: float, recomputed: bool
) -> None:
    config = Gemma2Config(num_hidden_layers=layers, dtype="bfloat16", architectures=["Gemma2ForCausalLM"])
    config.save_pretrained(tmp_path)
    size = {"generations": 2, "prompts_per_step": 1, "micro_batch": 2, "gradient_checkpointing": recomputed}
    of_gpu = planned(tmp_path, rollout_tokens=answer, optimisation=size, policy={"device": "cuda"})
    found = memory.estimate_memory(replace(of_gpu, prompts=Prompts(prompt))).total / GIB
    assert 1.0 <= found / tracked <= 1.15  # on fake tensors: GRPO, LoRA of rank 16


def test_a_direction_of_eight_billion_weights_fits_an_adapters_training(eight: Path) -> None:
    """v in bfloat16; with a random direction in its place both; of all weights their float32 values before a step."""
    settings: dict[str, Any] = {"optimisation": {"micro_batch": 1, "prompts_per_step": 1, "generations": 2}}
    areas = [width * height for width, height in shape_of(eight).linears]
    area = sum(areas)

    def estimate(project: str, rank: int, tokens: int) -> memory.MemoryEstimate:
        found = planned(eight, rollout_tokens=tokens, adapter={"rank": rank}, probe={"project": project}, **settings)
        return memory.estimate_memory(replace(found, direction=1536))

    # Finding v takes most in a short training: float32 sums, and what one row keeps, before there is anything to train.
    short = estimate("v", 16, 512)
    finding = 2 * shape_of(eight).parameters + 4 * area + 2 * max(areas) + estimate("v", 16, 512).activations
    assert short.total == pytest.approx(finding + memory.PROGRAM) and short.total < 0.6 * 79.1 * GIB
    v, random, whole = estimate("v", 16, 60_000), estimate("random", 16, 60_000), estimate("v", 0, 60_000)
    assert v.direction == 2 * area + v.gradients and random.direction == 4 * area + random.gradients
    assert whole.direction == (2 + 4) * area
    assert memory.estimate_memory(planned(eight)).direction == 0


SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
QWEN2 = {"7 B": (3584, 18944, 28, 28, 4), "14 B": (5120, 13824, 48, 40, 8), "32 B": (5120, 27648, 64, 40, 8)}
"""Of Qwen2.5, by their cards."""


def test_the_table_of_several_processes_is_the_estimate(tmp_path: Path) -> None:
    def gib(tokens: int, rank: int, processes: int = 1, **settings: Any) -> int:
        size = {"prompts_per_step": processes, "generations": 8, "micro_batch": 1, "gradient_checkpointing": True}
        policy = {"model": str(tmp_path), "device": "cuda"}
        if "distribution" in settings:
            policy |= {"model": f"vllm:{tmp_path}", "base_url": "http://127.0.0.1:8000/v1"}
        config = train.Config(policy=policy, optimisation=size, adapter={"rank": rank}, **settings)
        found = replace(resolve(config, processes), rollout_tokens=tokens)
        return round(memory.estimate_memory(found).total / GIB)

    rows = []
    fixed = {"vocab_size": 152_064, "tie_word_embeddings": False, "architectures": ["Qwen2ForCausalLM"]}
    for name, sizes in QWEN2.items():
        Qwen2Config(**fixed, **dict(zip(SIZES, sizes, strict=True)), dtype="bfloat16").save_pretrained(tmp_path)
        shared: dict[str, Any] = {"distribution": {"sharding": "fsdp2"}}
        cells = [gib(3072, 16), gib(9216, 16), gib(9216, 16, 8, **shared), gib(3072, 0)]
        cells += [gib(3072, 0, n, **shared) for n in (8, 16, 32)]
        rows.append(f"| {' | '.join([name, *map(str, cells)])} |")
    page = (Path(__file__).parents[3] / "docs" / "recipes" / "processes.md").read_text()
    assert [row for row in rows if row not in page] == []


FOURTEEN = {**EIGHT.to_dict(), "hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 40}
BY_LORA = {"adapter": {"rank": 16}, "distribution": {"sharding": "none"}, "optimisation": {"micro_batch": 4}}


@pytest.mark.parametrize(
    ("shape", "processes", "inputs", "changes", "expected"),
    [
        (EIGHT.to_dict(), 6, [], {}, 36),
        (EIGHT.to_dict(), 6, ["pairs"], {"weights": {"dpo": 1.0}}, 49),
        (FOURTEEN, 6, [], BY_LORA, 60),
    ],
)
def test_the_example_for_eight_gpus_fits_in_every_process(
    tmp_path: Path, shape: dict[str, Any], processes: int, inputs: list[str], changes: dict[str, Any], expected: int
) -> None:
    heads = {"num_attention_heads": shape["hidden_size"] // 128, "layer_types": None}
    Qwen3Config(**{**shape, **heads}).save_pretrained(tmp_path)
    table = settings.read_file(Path("examples/eight-gpus.toml"))
    policy = {**table["policy"], "model": f"vllm:{tmp_path}", "device": "cuda"}
    given = {name: {**table.get(name, {}), **change} for name, change in changes.items()}
    resolved = resolve(train.Config(**{**table, **given, "policy": policy}), processes, inputs)
    taken = memory.estimate_memory(resolved).total / GIB
    assert round(taken) == expected and taken <= 0.95 * SMALLEST
    page = (Path(__file__).parents[3] / "docs" / "recipes" / "processes.md").read_text()
    assert f"{expected} GiB" in page


def test_a_shared_prompt_counts_once_for_its_rollouts(eight: Path) -> None:
    sizes = {"prompts_per_step": 2, "generations": 8, "micro_batch": 16, "gradient_checkpointing": False}

    def activations(**more: object) -> float:
        return memory.estimate_memory(planned(eight, rollout_tokens=32, optimisation=sizes | more)).activations

    # 2 x 1,024 + 16 x 32 tokens of 16 x 1,056; what does not grow with them is a tile of logits.
    assert activations(shared_prompts=True) / activations(shared_prompts=False) == pytest.approx(2560 / 16896, abs=0.02)
    alone = [activations(shared_prompts=shared, micro_batch=1) for shared in (True, False)]
    assert alone[0] == alone[1], "one row has one prompt"


def test_memory_limit_replaces_free_memory(eight: Path) -> None:
    small, enough = (planned(eight, optimisation={"memory_limit": limit}) for limit in (0.5, 400.0))
    too_large(small, memory.room(small), "there are 0.5 GiB")
    memory.check_memory(enough, memory.room(enough))


def test_a_training_takes_the_passes_that_fit_and_records_them(tmp_path: Path) -> None:
    """Of eleven million parameters, so that it is not small; most of them embeddings, which cost no time."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=170_000, tie_word_embeddings=True, num_key_value_heads=4, **sizes))
    model.save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    size = {"steps": 1, "generations": 2}
    run = trainings.trained(tmp_path, tmp_path / "model", policy={"max_tokens": 4, "device": "cpu"}, optimisation=size)
    training = run.manifest.models["policy"]["training"]
    assert (training["micro_batch"], training["gradient_checkpointing"]) == (4, False)
