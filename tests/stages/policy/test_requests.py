"""What a request may contain, and the most that its answer can cost."""

from typing import Any

import pytest

from composer_stages.policy import available
from composer_stages.policy.base import PolicyConfig
from composer_stages.policy.requests import CallBounds

UNBOUNDED: dict[str, tuple[str, dict[str, Any]]] = {
    "a number as text": ("request", {"max_tokens": "100000"}),
    "part of a token": ("request", {"max_tokens": 100.5}),
    "a bool": ("extra_body", {"max_completion_tokens": True}),
    "no tokens": ("request", {"max_completion_tokens": 0}),
    "nothing": ("request", {"max_tokens": None}),
    "no length at all": ("request", {"max_tokens": False}),
    "left out where only a request can": ("extra_body", {"max_tokens": False}),
    "another name of the length": ("extra_body", {"max_output_tokens": 100_000}),
    "the same in capitals and signs": ("extra_body", {"MAX-Tokens": 100_000}),
    "several answers": ("extra_body", {"n": 2}),
    "a stream": ("extra_body", {"stream": True}),
    "another conversation": ("extra_body", {"messages": []}),
    "inside an object": ("extra_body", {"options": {"num_predict": 10**6}}),
    "inside two": ("extra_body", {"extra_body": {"google": {"thinking_config": {"thinking_budget": 10**6}}}}),
    "reasoning longer than the answer": ("extra_body", {"reasoning": {"max_tokens": 10**6}}),
    "reasoning without a number": ("extra_body", {"reasoning": {"max_tokens": "64"}}),
}


@pytest.mark.parametrize("name", UNBOUNDED)
def test_request_fields_without_a_bound_are_refused(name: str) -> None:
    where, fields = UNBOUNDED[name]
    with pytest.raises(ValueError, match=where):
        PolicyConfig(model="m", base_url="http://h", **{where: fields})


def test_request_fields_that_bound_an_answer_are_accepted() -> None:
    taken = {
        "extra_body": {"max_completion_tokens": 500, "reasoning": {"max_tokens": 400, "effort": "high"}},
        "request": {"max_tokens": False},
    }
    assert available.longest_answer(PolicyConfig(model="m", base_url="http://h", **taken)) == 500
    schema = {"response_format": {"json_schema": {"properties": {"n": {"type": "integer"}, "max_tokens": {}}}}}
    PolicyConfig(model="m", base_url="http://h", extra_body={**schema, "provider": {"order": ["a"]}})


def test_reservations_use_the_higher_price_of_cached_input() -> None:
    settings = PolicyConfig(model="m", usd_per_mtok_in=1.0, usd_per_mtok_cached_in=5.0, usd_per_mtok_out=1.0)
    assert CallBounds(10**6, 0).max_usd(settings) == 5.0 == settings.cost(10**6, 0, 10**6)
