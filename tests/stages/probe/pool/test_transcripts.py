"""Transcripts as ids: joined, never tokenised again."""

import pytest

from stages.errors import BadInput
from stages.probe.pool.transcripts import token_row
from stages.probe.synthetic.loophole_world import tokenizer


def test_ids_are_joined_and_observations_are_not_the_policys_own() -> None:
    words, prompt = tokenizer(), [{"role": "user", "content": "task d1 d2"}]
    said = [
        {"role": "assistant", "content": "fix d2"},
        {"role": "user", "content": "ok"},
        {"role": "assistant", "content": "run ok"},
    ]
    row = token_row(words, prompt, said)
    assert words.decode(row.prompt_ids) == "user task d1 d2 assistant"
    assert words.decode(row.completion_ids) == "fix d2 end user ok assistant run ok end"
    assert row.own == [True] * 3 + [False] * 3 + [True] * 3
    assert token_row(words, prompt, "fix d2").own == [True] * 3
    with pytest.raises(BadInput, match="begins and ends"):
        token_row(words, prompt, said[:2])
