"""A tiny model and the decomposition of its Linears."""

import pytest
from probe_faults.loophole_world import tiny_qwen3

from composer_stages.gradients.basis import Spectrum, factorise, target_linears


@pytest.fixture(scope="module")
def model():
    return tiny_qwen3()


@pytest.fixture(scope="module")
def spectrum(model) -> Spectrum:
    return Spectrum({name: factorise(linear.weight) for name, linear in target_linears(model).items()})
