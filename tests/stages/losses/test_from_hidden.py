"""TAID, EOPD and SDPO from hidden states: the kernels' numbers, for own tokens only, in little memory."""

import json
import weakref
from typing import Any

import pytest
import torch
from parity.case import load_case
from parity.check import GOLDEN
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from stages.backends import resources
from stages.losses.eopd import EopdOptions, eopd_from_hidden, eopd_loss, soft_targets
from stages.losses.hidden import Head, Predictors, chunk_size, logits_sum
from stages.losses.reduction import aggregation_weights
from stages.losses.sdpo import SelfTaught, sdpo_from_hidden, self_distillation_loss, trust_region_logits
from stages.losses.taid import taid_from_hidden, taid_loss
from tests.stages.losses.samples import gradient, logits

TOKENS, VOCABULARY, WIDTH = 9, 23, 6
MASK = torch.tensor([1, 1, 0, 1, 0, 0, 1, 1, 1], dtype=torch.float64)


def predictors(seed: int, vocabulary: int = VOCABULARY, biased: bool = False) -> Predictors:
    bias = logits(seed + 2, vocabulary, wants_gradient=True) if biased else None
    weight = logits(seed + 1, vocabulary, WIDTH, wants_gradient=True)
    return Predictors(logits(seed, TOKENS, WIDTH, wants_gradient=True), Head(weight, bias, 1.5, 2.0))


def trained(model: Predictors) -> list[Tensor]:
    return [x for x in (model.hidden, model.head.weight, model.head.bias) if x is not None]


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("chunk_tokens", [None, 1, 4])
def test_taid_is_the_kernel_on_logits(biased: bool, chunk_tokens: int | None) -> None:
    student, teacher = predictors(0, biased=biased), predictors(10, biased=biased)
    found = taid_from_hidden(student, teacher, MASK, 0.3, chunk_tokens=chunk_tokens) / MASK.sum()
    given = [model.head.logits(model.hidden)[None] for model in (student, teacher)]
    expected = taid_loss(*given, MASK[None], 0.3)
    torch.testing.assert_close(found.float(), expected, rtol=1e-5, atol=1e-6)
    for a, b in zip(gradient(found, *trained(student)), gradient(expected, *trained(student)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert all(torch.autograd.grad(found, x, allow_unused=True)[0] is None for x in trained(teacher))


@pytest.mark.parametrize("chunk_tokens", [None, 1, 4])
def test_eopd_is_the_kernel_on_logits(chunk_tokens: int | None) -> None:
    student, teacher = predictors(0), predictors(10)
    ids, old = torch.arange(TOKENS) % VOCABULARY, logits(5, TOKENS) - 4
    options = EopdOptions(coef=0.7, entropy_threshold=2.9)
    found, totals = eopd_from_hidden(
        student,
        teacher,
        ids,
        old,
        MASK,
        num_tokens=int(MASK.sum()),
        top_k=4,
        temperature=1.3,
        options=options,
        chunk_tokens=chunk_tokens,
    )
    given = [model.head.logits(model.hidden)[None] for model in (student, teacher)]
    logps = [(x / 1.3).log_softmax(-1).gather(-1, ids[None, :, None]).squeeze(-1) for x in given]
    soft = soft_targets(*given, top_k=4, temperature=1.3)
    expected, metrics = eopd_loss(logps[0], old[None], logps[1], MASK[None], soft, options)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-8)
    for a, b in zip(gradient(found, *trained(student)), gradient(expected, *trained(student)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)
    for name, (total, count) in totals.items():
        value = float(total / count) if count else 0.0
        assert value == pytest.approx(float(metrics[f"actor/{name}"]), rel=1e-6, abs=1e-7), name


@pytest.mark.parametrize("chunk_tokens", [None, 1, 4])
@pytest.mark.parametrize(
    ("alpha", "top_k", "tail"), [(0.0, None, True), (0.5, 5, True), (1.0, 5, False), (0.3, 99, True)]
)
@pytest.mark.parametrize("share", [None, 0.25])
def test_sdpo_is_the_kernel_on_logits(
    alpha: float, top_k: int | None, tail: bool, share: float | None, chunk_tokens: int | None
) -> None:
    student, kept, current = predictors(0, biased=True), predictors(10), predictors(20)
    weights = MASK * torch.linspace(0.1, 2.0, TOKENS, dtype=torch.float64)
    taught = SelfTaught(kept) if share is None else SelfTaught(kept, current, share)
    options = {"alpha": alpha, "top_k": top_k, "add_tail": tail, "temperature": 1.3}
    found, per_token = sdpo_from_hidden(student, taught, weights, chunk_tokens=chunk_tokens, **options)
    own, teacher, other = (model.head.logits(model.hidden)[None] for model in (student, kept, current))
    teacher = teacher if share is None else trust_region_logits(teacher, other, share)
    expected, values = self_distillation_loss(own, teacher.detach(), weights[None], chunk_tokens=None, **options)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(per_token, values[0], rtol=1e-12, atol=1e-14)
    for a, b in zip(gradient(found, *trained(student)), gradient(expected, *trained(student)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-14)
    for model in (kept, current):
        assert all(torch.autograd.grad(found, x, allow_unused=True)[0] is None for x in trained(model))


def test_the_gradient_of_sdpo_is_that_of_finite_differences() -> None:
    kept = predictors(10)

    def loss(hidden: Tensor, weight: Tensor) -> Tensor:
        student = Predictors(hidden, Head(weight, None, 1.5, 2.0))
        return sdpo_from_hidden(student, SelfTaught(kept), MASK, alpha=0.5, chunk_tokens=4)[0]

    student = predictors(0)
    assert torch.autograd.gradcheck(loss, (student.hidden, student.head.weight), rtol=1e-6, atol=1e-8)


RECORDED = [
    case
    for case in json.loads((GOLDEN / "sdpo_lasgroup.json").read_text())["cases"]
    if case["fn"].startswith("dp_actor") and case["args"]["full_logit_distillation"]
]


@pytest.mark.parametrize("chunk_tokens", [None, 2])
@pytest.mark.parametrize("recorded", RECORDED, ids=lambda case: case["name"])
def test_sdpo_gives_upstream_s_numbers(recorded: dict[str, Any], chunk_tokens: int | None) -> None:
    """lasgroup/SDPO 0e6d510 from logits, which are hidden states behind a head that is the identity."""
    case = load_case(recorded, None)
    width = case.inputs["response_mask"].shape[1]
    own, other = (case.inputs[name][:, -width - 1 : -1].flatten(0, 1) for name in ("student_logits", "teacher_logits"))
    identity = Head(torch.eye(own.shape[-1], dtype=own.dtype))
    mask, rows = case.inputs["response_mask"], case.optional("self_distillation_mask")
    mask = mask if rows is None else mask * rows.unsqueeze(1)
    found, _ = sdpo_from_hidden(
        Predictors(own, identity),
        SelfTaught(Predictors(other, identity)),
        aggregation_weights(mask, "token-mean", dtype=own.dtype, min_tokens=1.0).flatten(),
        alpha=case.args["alpha"],
        top_k=case.args["distillation_topk"],
        add_tail=case.args["distillation_add_tail"],
        temperature=case.args["temperature"],
        chunk_tokens=chunk_tokens,
    )
    expected = recorded["expected"]
    assert case.args["loss_agg_mode"] == "token-mean" and case.optional("old_log_probs") is None
    assert found.item() == pytest.approx(expected["loss"], rel=1e-10, abs=1e-12)
    (found_gradient,) = torch.autograd.grad(found, case.inputs["student_logits"])
    wanted = torch.tensor(expected["grad_wrt_student_logits"], dtype=found_gradient.dtype)
    torch.testing.assert_close(found_gradient, wanted, rtol=1e-10, atol=1e-12)


def test_tokens_that_are_not_the_students_own_are_never_computed() -> None:
    seen: list[int] = []

    def per_token(student: Tensor, teacher: Tensor) -> Tensor:
        seen.append(len(student))
        assert len(teacher) == len(student)
        return student.sum(-1, keepdim=True)

    logits_sum(per_token, predictors(0), predictors(10), MASK)
    assert sum(seen) == int(MASK.sum())


def test_heads_of_other_padding_are_compared_on_what_both_know() -> None:
    student, wide = predictors(0), predictors(10, VOCABULARY + 5)
    narrow = Predictors(wide.hidden, Head(wide.head.weight[:VOCABULARY], None, 1.5, 2.0))
    for a, b in ((student, wide), (student, narrow)):
        torch.testing.assert_close(taid_from_hidden(a, b, MASK, 0.5), taid_from_hidden(student, narrow, MASK, 0.5))
    assert gradient(taid_from_hidden(wide, student, MASK, 0.5), wide.head.weight)[0][VOCABULARY:].eq(0).all()


class Peak(TorchDispatchMode):
    """The most bytes that tensors made inside held at once."""

    def __init__(self) -> None:
        super().__init__()
        self.held: dict[int, int] = {}
        self.most = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for value in torch.utils._pytree.tree_leaves(result):
            if isinstance(value, Tensor) and (storage := value.untyped_storage())._cdata not in self.held:
                self.held[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self.held.pop, storage._cdata, None)
                self.most = max(self.most, sum(self.held.values()))
        return result


def test_the_measure_sees_what_is_held_and_what_is_freed() -> None:
    with Peak() as peak:
        for _ in range(3):
            held = torch.zeros(250) + torch.ones(250)
            del held
    assert 2000 <= peak.most <= 3000


@pytest.mark.parametrize("name", ["taid", "eopd", "sdpo", "sdpo-top-k", "sdpo-trust-region"])
def test_memory_stays_under_half_a_table_of_logits(name: str) -> None:
    """From [N, V] logits the same losses held 3.7 and 5.1 tables; both models' own tables not counted."""
    tokens, vocabulary, width = 1024, 512, 8
    torch.manual_seed(0)
    models = [
        Predictors(torch.randn(tokens, width).requires_grad_(), Head(torch.randn(vocabulary, width).requires_grad_()))
        for _ in range(2)
    ]
    own, ids, old = torch.ones(tokens), torch.zeros(tokens, dtype=torch.long), torch.full((tokens,), -6.0)
    with Peak() as peak:
        if name == "taid":
            loss = taid_from_hidden(*models, own, 0.4)
        elif name.startswith("sdpo"):
            near = (models[1], 0.05) if name == "sdpo-trust-region" else (None, 0.0)
            top_k = 100 if name == "sdpo-top-k" else None
            loss, _ = sdpo_from_hidden(models[0], SelfTaught(models[1], *near), own / tokens, top_k=top_k)
        else:
            loss, _ = eopd_from_hidden(*models, ids, old, own, num_tokens=tokens, top_k=16)
        loss.backward()
    assert peak.most < 0.5 * tokens * vocabulary * 4


def test_chunks_are_what_a_cpu_s_cache_and_a_gpu_s_memory_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, gpu, vocabulary = torch.device("cpu"), torch.device("cuda"), 151_936
    assert [chunk_size(n, vocabulary, cpu) for n in (0, 9, 2048, 10**6)] == [32, 32, 64, 128]
    assert [chunk_size(n, vocabulary, cpu, tables=16) for n in (9, 2048, 10**6)] == [16, 32, 64]

    def free(gib: float) -> None:
        monkeypatch.setattr(resources, "gpu_free", lambda device: int(gib * 2**30) if device.type == "cuda" else 0)

    free(100)
    assert [chunk_size(n, vocabulary, gpu) for n in (0, 1, 2048, 2500, 8192)] == [1, 1, 2048, 1250, 2048]
    for gib in (2, 8, 20):
        free(gib)
        for tables in (8, 16):
            size = chunk_size(8192, vocabulary, gpu, tables)
            assert 256 // tables < size < 2048
            assert gib * 2**30 / 16 < 4 * tables * vocabulary * size <= gib * 2**30 / 8
    free(0.01)
    assert chunk_size(8192, vocabulary, gpu) == 32, "never less than on a CPU"


def test_a_loss_takes_the_chunks_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def per_token(student: Tensor, teacher: Tensor) -> Tensor:
        sizes.append(len(student))
        return (student - teacher).square().sum(-1, keepdim=True)

    whole = logits_sum(per_token, predictors(0), predictors(10), MASK)[0]
    assert sizes == [6]
    monkeypatch.setattr("stages.losses.hidden.chunk_size", lambda tokens, vocabulary, device: 4)
    parts = logits_sum(per_token, predictors(0), predictors(10), MASK)[0]
    assert sizes == [6, 4, 2]
    torch.testing.assert_close(whole, parts)
