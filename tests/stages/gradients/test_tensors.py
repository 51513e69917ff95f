"""Flat vectors, tensor files, rows on disk and the gradient store."""

import pytest
import torch

from composer_stages.errors import BadInput
from composer_stages.gradients.tensors import GradientStore, Layout, RowFile, read_tensors, write_tensors

LAYOUT = Layout({"a": 12, "b": 20, "c": 8})


def test_a_store_is_reopened_for_the_same_rows_and_refused_for_others(tmp_path) -> None:
    GradientStore.create(tmp_path, LAYOUT, 9, {"model": "x"}).put(0, torch.ones(9, LAYOUT.width))
    assert GradientStore.create(tmp_path, LAYOUT, 9, {"model": "x"}).rows.abs().sum() > 0
    with pytest.raises(BadInput, match=r"gradients of other rows, directions or settings.*--clean"):
        GradientStore.create(tmp_path, LAYOUT, 9, {"model": "y"})


def test_equal_tensors_and_metadata_give_equal_bytes(tmp_path) -> None:
    tensors, metadata = {"b": torch.ones(3), "a": torch.arange(4)}, {name: name for name in "zyxwvu"}
    for index in range(8):
        write_tensors(tmp_path / f"{index}", tensors, metadata)
    assert len({(tmp_path / f"{index}").read_bytes() for index in range(8)}) == 1
    read, found = read_tensors(tmp_path / "0")
    assert found == metadata and all(torch.equal(read[name], tensors[name]) for name in tensors)


def test_a_torn_tensor_file_is_bad_input(tmp_path) -> None:
    (tmp_path / "torn.safetensors").write_bytes(b"\x10\x00")
    with pytest.raises(BadInput, match="torn"):
        read_tensors(tmp_path / "torn.safetensors")


def test_rows_on_disk_are_read_back_and_a_wrong_size_is_refused(tmp_path) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        path = tmp_path / f"rows-{dtype}"
        file = RowFile(path, 5, 3, dtype)
        file.reserve(2, 1)
        file.rows[2] = torch.tensor([1.0, 2.0, 3.0], dtype=dtype)
        file.flush()
        del file
        again = RowFile(path, 5, 3, dtype).rows
        assert again[2].tolist() == [1.0, 2.0, 3.0] and again[0].abs().sum() == 0
        with pytest.raises(BadInput, match="rows of 4"):
            RowFile(path, 5, 4, dtype)


def test_layout_splits_joins_and_measures() -> None:
    layout = Layout({"a": 2, "b": 1})
    flat = torch.tensor([[3.0, 4.0, 2.0], [0.0, 1.0, -1.0]])
    assert torch.equal(layout.join(layout.split(flat)), flat)
    assert torch.equal(layout.norms(flat), torch.tensor([[5.0, 2.0], [1.0, 1.0]]))
    assert torch.equal(layout.sums(flat), torch.tensor([[7.0, 2.0], [1.0, -1.0]]))
    assert torch.equal(layout.join({"b": flat[:, 2:]}), torch.tensor([[0.0, 0.0, 2.0], [0.0, 0.0, -1.0]]))
    assert Layout({"b": 1, "a": 2}).sha256 != layout.sha256
