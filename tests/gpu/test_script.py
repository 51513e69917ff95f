"""`./dev gpu`: every part runs, on the CPU in the smallest size, and keeps its numbers; what is missing is said."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import gpu

ROOT = Path(__file__).parents[2]
TINY = gpu.Asked("cpu", ("tiny",), 1, rounds=2, rows=2, prompt=16, answer=16)


def kept(folder: Path, part: str) -> dict[str, float]:
    return {row["claim"]: row["value"] for row in json.loads((folder / f"gpu-{part}.json").read_text())}


@pytest.mark.slow
def test_speed_memory_and_probe_keep_their_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COMPOSER_BENCHMARK_RESULTS", str(tmp_path))
    assert [gpu.run(part, TINY) for part in ("speed", "sampling", "memory", "probe")] == [0, 0, 0, 0]
    speed, sampling = kept(tmp_path, "speed"), kept(tmp_path, "sampling")
    assert len(speed) == 7 and all(value > 0 for value in (*speed.values(), *sampling.values()))
    assert list(sampling) == ["Qwen3-tiny, 1 layers, 2 answers behind 16 tokens: sampled tokens a second"]
    assert "Qwen3-tiny, 1 layers, LoRA step of 2 x (16 + 16) tokens: time beside TRL's" in speed
    assert list(kept(tmp_path, "probe")) == ["Qwen3-tiny, 1 layers, gradients of 2 rows of 16 tokens: tokens a second"]
    said = capsys.readouterr().out
    assert said.count("GiB predicted; this device does not count") == 3 and said.count(" ms in ") == 20


@pytest.mark.slow
def test_correctness_compares_every_loss_and_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMPOSER_BENCHMARK_RESULTS", str(tmp_path))
    assert gpu.run("correctness", gpu.Asked("cpu")) == 0
    found = kept(tmp_path, "correctness")
    rest = {name for name in found if "rows" in name or "sample" in name}
    for name in ("dpo", "simpo", "sft", "sdpo", "taid", "eopd", "opd"):
        assert found[f"loss of {name}: relative difference from the CPU"] == 0
    assert found["gradient of a step with all channels: relative difference from the CPU"] == 0

    # A case that ends with an error is counted, and the next ones are measured.
    def broken(model: object, device: str) -> dict[str, object]:
        raise RuntimeError(f"no kernel for {device}")

    (tmp_path / "gpu-correctness.json").unlink()
    assert gpu.run("correctness", gpu.Asked("cpu"), losses=broken) == 1
    assert set(found) - set(kept(tmp_path, "correctness")) == {name for name in found if "channels" not in name} - rest

    # A device whose numbers are off by more than rounding is caught.
    def off(model: object, device: str) -> dict[str, object]:
        values = gpu.losses(model, device)
        off.calls += 1  # type: ignore[attr-defined]
        return {name: value * 1.01 if off.calls == 1 else value for name, value in values.items()}  # type: ignore[attr-defined]

    off.calls = 0  # type: ignore[attr-defined]
    assert gpu.run("correctness", gpu.Asked("cpu"), losses=off) == 14


def said_by(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), *words], capture_output=True, text=True, timeout=200
    )


def test_missing_parts_are_named(tmp_path: Path) -> None:
    unknown = said_by("corectness")
    assert unknown.returncode == 2 and "there is no part 'corectness'; there are correctness, speed" in unknown.stderr
    why = gpu.device_of("cuda")
    assert why is None or ("finds no GPU" in why and "--device cpu" in why)
    why = gpu.provide(imported=("torch", "no_such_package"), wheels=tmp_path / ".whl")
    assert "lacks no_such_package. Run `./dev gpu wheels`" in str(why)
