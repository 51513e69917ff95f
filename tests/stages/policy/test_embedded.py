"""Models that environments bring along: recognised by name, told apart by their recipe, refused when unknown."""

import pytest

from stages.errors import UsageError
from stages.policy import base
from stages.policy.base import PolicyConfig


def test_a_name_with_an_environment_before_a_colon_is_embedded():
    assert base.is_embedded(base.EXAMPLE) and base.is_embedded("gsm8k:rows.jsonl")
    assert not any(map(base.is_embedded, ("kata", "Qwen/Qwen3-8B", "./kata", "other:name")))


def test_models_are_told_apart_and_an_unknown_one_is_refused():
    assert PolicyConfig(model="kata:student").identity() != PolicyConfig(model="kata:teacher-a").identity()
    with pytest.raises(UsageError, match=r"no embedded model kata:nobody\. There is kata:student"):
        base.weights_identity(PolicyConfig(model="kata:nobody"))
