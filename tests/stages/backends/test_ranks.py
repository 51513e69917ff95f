"""What processes tell each other, in real ones: values by rank, the first one's word, weights and gradients."""

import os
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing import start_processes

from composer_stages.backends import ranks
from composer_stages.backends.ranks import Ranks


def test_a_single_process_returns_its_arguments() -> None:
    here, weight = ranks.join(), torch.nn.Parameter(torch.ones(2))
    values = torch.tensor([1.0, 2.0])
    weight.grad = values.clone()
    here.average_gradients([weight])
    here.broadcast_weights([weight])
    with here.leading():
        here.begin()
    assert here.count == 1 and here.first
    assert here.gather(3) == here.gather_to_rank0(3) == [3] and here.broadcast_from_rank0(lambda: 4) == 4
    assert here.total(values) is values and torch.equal(weight.grad, values)


def begun(here: Ranks) -> list[bool]:
    """What the second hears of three pieces of work: done, refused before it began, and one inside another."""
    if not here.first:
        return [here.broadcast_from_rank0(lambda: True) for _ in range(3)]
    with here.leading():
        here.begin()
    with pytest.raises(ValueError, match="refused"), here.leading():
        raise ValueError("refused")
    with here.leading(), here.leading():
        here.begin()
    return [True, False, True]


def one_of_two(rank: int, port: int, folder: str) -> None:
    """What each of two processes does; the sum of what it found lies in the folder."""
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank), **shared})
    here = ranks.join()
    found: dict[str, Any] = {"gather": here.gather({"rank": rank}), "gather_to_rank0": here.gather_to_rank0(rank)}
    found["broadcast_from_rank0"] = here.broadcast_from_rank0(lambda: f"made by {rank}")
    found["total"] = here.total(torch.tensor([1.0 + rank, 0.0])).tolist()
    model = [torch.nn.Parameter(torch.full((n,), float(rank + 1))) for n in (3, 1, 2, 2)]
    model[2].requires_grad_(False)
    model[3].data = model[3].data.double()
    here.broadcast_weights(model)
    found["weights"] = [p.tolist() for p in model]
    model[0].grad = torch.tensor([1.0, 2.0, 3.0]) * (rank + 1)
    if rank:  # the other one saw no use of it
        model[3].grad = torch.tensor([4.0, 2.0], dtype=torch.double)
    here.average_gradients(model)
    found["gradients"] = [None if p.grad is None else p.grad.tolist() for p in model]
    found["begun"] = begun(here)
    torch.save(found, f"{folder}/{rank}.pt")


def test_two_processes(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    start_processes(one_of_two, (port, str(tmp_path)), nprocs=2, start_method="forkserver")  # where torch is imported
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert first["gather"] == second["gather"] == [{"rank": 0}, {"rank": 1}]
    assert (first["gather_to_rank0"], second["gather_to_rank0"]) == ([0, 1], [1])
    for found in (first, second):
        assert found["begun"] == [True, False, True]
        assert found["broadcast_from_rank0"] == "made by 0" and found["total"] == [3.0, 0.0]
        learning, frozen = found["weights"][:2] + found["weights"][3:], found["weights"][2]
        assert learning == [[1.0, 1.0, 1.0], [1.0], [1.0, 1.0]] and frozen == [1.0 + (found is second)] * 2
        assert found["gradients"] == [[1.5, 3.0, 4.5], None, None, [2.0, 1.0]]


def test_buckets_keep_types_apart_and_bounded() -> None:
    sizes = [(3, torch.float32), (2, torch.float32), (2, torch.float64), (9, torch.float64)]
    tensors = [torch.ones(size, dtype=dtype) for size, dtype in sizes]
    assert [len(bucket) for bucket in ranks.buckets(tensors, 4)] == [1, 1, 1, 1]
    assert [len(bucket) for bucket in ranks.buckets(tensors, 20)] == [2, 2]
    assert [len(bucket) for bucket in ranks.buckets(tensors, 1)] == [1, 1, 1, 1]
