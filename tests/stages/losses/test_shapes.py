"""Signatures state shapes, and the tests run with those statements checked."""

import pytest
import torch
from jaxtyping import TypeCheckError
from parity.kernels.jsd import divergence_loss

from stages.losses import token_log_probs
from tests.stages.losses.samples import logits


def test_two_vocabularies_are_refused() -> None:
    with pytest.raises(TypeCheckError):
        divergence_loss(logits(0, 2, 3, 5), logits(1, 2, 3, 6), torch.ones(2, 3))


def test_a_mask_of_another_length_is_refused() -> None:
    with pytest.raises(TypeCheckError):
        divergence_loss(logits(0, 2, 3, 5), logits(1, 2, 3, 5), torch.ones(2, 4))


def test_token_ids_must_be_integers() -> None:
    with pytest.raises(TypeCheckError):
        token_log_probs(logits(0, 2, 3, 5), torch.zeros(2, 3))
