"""Which GPUs a process may use, and how processes that run at the same time share them."""

import os
from pathlib import Path

import pytest

from composer_stages import collect, evaluate, export, extract_pairs, train
from composer_stages.backends import devices
from composer_stages.backends.devices import Pool, visible
from composer_stages.errors import UsageError


@pytest.mark.parametrize(
    ("given", "names"),
    [
        (None, ("0", "1", "2", "3")),
        ("", ()),  # no GPU, as CUDA reads it
        ("-1", ()),
        ("2", ("2",)),
        (" 3, 1 ", ("3", "1")),  # the order is the user's
        ("1,-1,2", ("1",)),  # CUDA ends the list at an invalid name
        ("GPU-8f6b,MIG-5d3e", ("GPU-8f6b", "MIG-5d3e")),
        ("MIG-GPU-8f6b/3/0", ("MIG-GPU-8f6b/3/0",)),
    ],
)
def test_the_variable_is_read_as_cuda_reads_it(given, names):
    environment = {devices.COUNT: "4"} | ({} if given is None else {devices.VISIBLE: given})
    assert visible(environment) == names


def test_there_are_no_more_than_torch_finds():
    assert visible({devices.COUNT: "1", devices.VISIBLE: "0,7"}) == ("0",)
    assert visible({devices.COUNT: "0"}) == ()
    if not any(path.exists() for path in devices.DRIVERS):
        assert visible({devices.VISIBLE: "0,1"}) == ()


def test_a_number_of_gpus_is_a_number():
    with pytest.raises(UsageError, match="COMPOSER_GPUS is 'two'"):
        visible({devices.COUNT: "two"})


def test_device_names_in_words():
    assert devices.used(1, ["3", "1"]) == "GPU 3" and devices.used(2, ["3", "1"]) == "GPU 3, 1"
    assert devices.used(1, ["GPU-8f6b"]) == "GPU-8f6b"
    assert devices.used(0, ["3"]) == devices.used(2, []) == "cpu"


def test_gpus_are_taken_once_and_return_to_their_place():
    pool = Pool(["2", "GPU-8f6b", "0"])
    assert pool.take(1) == ("2",) and pool.take(2) == ("GPU-8f6b", "0")
    assert pool.take(1) is None and pool.take(0) == ()
    pool.give_back(("0",))
    pool.give_back(("2",))
    assert pool.take(2) == ("2", "0")


def test_too_many_gpus_are_refused_and_none_needed_without_gpus():
    with pytest.raises(UsageError, match=r"^large asks for 3 GPUs, and this machine lets it use 2: 0, 1\."):
        Pool(["0", "1"]).check("large", 3)
    none = Pool([])
    none.check("large", 3)
    assert none.take(3) == () and none.needs(3) == 0


SERVER = {"model": "vllm:m", "base_url": "http://127.0.0.1:1/v1"}
REMOTE = {"model": "m", "base_url": "http://127.0.0.1:1/v1"}


@pytest.mark.parametrize(
    ("config", "uses"),
    [
        (collect.Config(), True),
        (collect.Config(policy={"device": "cpu"}), False),
        (collect.Config(policy=REMOTE), False),
        (collect.Config(policy=SERVER), False),  # the server's GPU
        (collect.Config(policy={"model": "vllm:m"}), True),  # the stage starts the server
        (train.Config(), True),
        (train.Config(policy=SERVER), True),  # the server samples, the model is trained here
        (train.Config(policy={"device": "cpu"}), False),
        (train.Config(policy={"device": "cpu"}, teacher={"model": "m"}), True),
        (evaluate.Config(), True),
        (extract_pairs.Config(), False),
        (extract_pairs.Config(signal={"rollouts": 2}), True),
        (export.Config(format="trl"), False),
        (export.Config(format="model"), True),
    ],
)
def test_a_process_takes_a_gpu_if_it_loads_a_model(config, uses):
    assert config.uses_gpu() is uses


def test_this_machine_is_asked_by_default(monkeypatch):
    monkeypatch.setenv(devices.COUNT, "3")
    monkeypatch.setenv(devices.VISIBLE, "5,6")
    assert visible() == visible(os.environ) == tuple(Pool().names) == ("5", "6")
    assert devices.used(1) == "GPU 5"


def test_a_driver_without_a_visible_gpu_is_no_gpu(tmp_path):
    driver, none = [tmp_path], [tmp_path / "no-driver"]
    assert devices.has_nvidia({}, driver) and devices.has_nvidia({devices.VISIBLE: "MIG-5d3e"}, driver)
    assert not devices.has_nvidia({devices.VISIBLE: ""}, driver)
    assert not devices.has_nvidia({}, none)


@pytest.mark.parametrize("answer", ["580.65.06", "NVIDIA-SMI has failed because it couldn't communicate", "550.54.15"])
def test_a_driver_that_is_too_old_for_cuda_13_is_refused_before_anything_is_fetched(tmp_path: Path, answer: str):
    smi = tmp_path / "nvidia-smi"
    smi.write_text(f"#!/bin/sh\ncat <<'END'\n{answer}\nEND\n")
    smi.chmod(0o755)
    if answer.startswith("550"):
        with pytest.raises(UsageError, match=r"driver here is 550\.54\.15, and .* needs 580 or newer"):
            devices.check_cuda_driver({"PATH": str(tmp_path)})
    else:
        said = devices.check_cuda_driver({"PATH": str(tmp_path)})
        assert ("580.65.06 runs" if answer.startswith("580") else "not checked: CUDA 13 needs 580") in said
    assert "not checked" in devices.check_cuda_driver({"PATH": ""})
