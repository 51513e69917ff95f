"""The gradient store."""

import pytest
import torch

from stages.errors import BadInput
from stages.gradients.tensors import GradientStore, Layout

LAYOUT = Layout({"a": 12, "b": 20, "c": 8})


def test_a_store_is_reopened_for_the_same_rows_and_refused_for_others(tmp_path) -> None:
    GradientStore.create(tmp_path, LAYOUT, 9, {"model": "x"}).put(0, torch.ones(9, LAYOUT.width))
    assert GradientStore.create(tmp_path, LAYOUT, 9, {"model": "x"}).rows.abs().sum() > 0
    with pytest.raises(BadInput, match="something else"):
        GradientStore.create(tmp_path, LAYOUT, 9, {"model": "y"})
