"""Checkpoints that a power cut, a disk or a person has damaged: the next older one is taken, and it is said."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from composer_stages.errors import BadInput
from composer_stages.runs import store
from composer_stages.runs.run import Manifest, RunWriter
from composer_stages.training.checkpoints import link_kept, newest

FILES = {"model.safetensors": b"weights" * 200_000, "optimizer.pt": b"moments", "trainer_state.json": b"{}"}


def sealed(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for name, data in FILES.items():
        (folder / name).write_bytes(data)
    store.seal_folder(folder, {"step": 1, "channels": {}})
    return folder


def empty(path: Path) -> None:
    path.write_bytes(b"")


def zero(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:1].ljust(path.stat().st_size, b"\0"))


def change_byte(place: int, path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def out(tmp_path: Path, told: list[str]) -> RunWriter:
    record = Manifest(composer="", stage="train", stage_version=1, fingerprint="")
    return RunWriter(tmp_path / "run", record, cache=tmp_path, listener=lambda what, done, total: told.append(what))


@pytest.mark.parametrize("name", [*FILES, store.SEAL])
@pytest.mark.parametrize("damage", [empty, zero, partial(change_byte, 0), partial(change_byte, -1), os.unlink])
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_is_taken(
    name: str, damage: Callable[[Path], None], tmp_path: Path, out: RunWriter, told: list[str]
) -> None:
    older, damaged = sealed(tmp_path / "checkpoint-9"), sealed(tmp_path / "checkpoint-10")
    assert newest(tmp_path, out) == damaged and not told
    damage(damaged / name)
    assert newest(tmp_path, out) == older
    assert not damaged.exists()
    if (name, damage) == (store.SEAL, os.unlink):
        assert not told, "without a seal it was never complete"
    else:
        (sentence,) = told
        assert "checkpoint-10 is damaged" in sentence and name in sentence and "goes on from checkpoint-9" in sentence


def test_without_a_whole_checkpoint_training_starts_anew(tmp_path: Path, out: RunWriter, told: list[str]) -> None:
    for step in (2, 4):
        empty(sealed(tmp_path / f"checkpoint-{step}") / "optimizer.pt")
    assert newest(tmp_path, out) is None
    (sentence,) = told
    assert "checkpoint-4" in sentence and "checkpoint-2" in sentence and "from its start" in sentence


def test_a_copy_is_left_alone_and_a_link_to_a_damaged_checkpoint_is_deleted(tmp_path: Path, out: RunWriter) -> None:
    folder, moved = tmp_path / "trainer", sealed(tmp_path / "moved")
    copies = [sealed(folder / name) for name in ("checkpoint-5-old", "checkpoint-best")]
    (folder / "checkpoint-5").symlink_to(moved)
    assert newest(folder, out) == folder / "checkpoint-5"
    empty(moved / "optimizer.pt")
    assert newest(folder, out) is None
    assert sorted(folder.iterdir()) == copies and moved.exists()


def test_newest_ignores_checkpoints_beyond_the_limit(tmp_path: Path, out: RunWriter) -> None:
    first, second = sealed(tmp_path / "checkpoint-2"), sealed(tmp_path / "checkpoint-4")
    assert newest(tmp_path, out, most=3) == first and second.exists()


def test_kept_checkpoints_are_compared_with_their_seals_and_linked_without_them(tmp_path: Path) -> None:
    kept = sealed(tmp_path / "kept" / "step_000002").parent
    (kept / ".tmp").mkdir()
    link_kept(kept, tmp_path / "output")
    linked = tmp_path / "output" / "step_000002"
    assert {path.name: path.read_bytes() for path in linked.iterdir()} == FILES
    assert [path.name for path in linked.parent.iterdir()] == ["step_000002"]
    empty(kept / "step_000002" / "model.safetensors")
    with pytest.raises(BadInput, match=r"step_000002 is damaged \(model\.safetensors.*Delete that folder.*--resume"):
        link_kept(kept, tmp_path / "again")
