"""Sampling: log-probs are those of a recomputation, and a row's draws depend on its own seed alone."""

import torch
from support.models import tiny_model, tiny_tokenizer

from stages.messages import following_ids, opening_ids
from stages.policy.base import PolicyConfig, Turn
from stages.policy.local import LocalPolicy, draw, sample_batch

PROMPTS = [[5, 6, 7], [8, 9, 10, 11, 12], [13]]


def sampled(prompts: list[list[int]], seeds: list[int], **settings: float) -> list[tuple[list[int], list[float]]]:
    return sample_batch(
        tiny_model().double(),
        prompts,
        seeds=seeds,
        end_ids={3},
        pad_id=0,
        **{"max_tokens": 12, "temperature": 1.0, **settings},
    )


def recomputed(prompt: list[int], ids: list[int], temperature: float) -> torch.Tensor:
    logits = tiny_model().double()(input_ids=torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits / temperature, -1).gather(-1, torch.tensor(ids)[:, None])[:, 0]


def test_captured_log_probs_are_those_of_a_recomputation() -> None:
    for temperature in (1.0, 0.7):
        for prompt, (ids, logps) in zip(PROMPTS, sampled(PROMPTS, [1, 2, 3], temperature=temperature), strict=True):
            torch.testing.assert_close(
                torch.tensor(logps), recomputed(prompt, ids, temperature).float(), rtol=1e-5, atol=1e-5
            )


def test_a_row_depends_on_its_own_seed_alone() -> None:
    alone = sampled([PROMPTS[1]], [2])[0][0]
    together = sampled(PROMPTS, [1, 2, 3])[1][0]
    assert alone == together
    assert sampled([PROMPTS[1]], [4])[0][0] != alone


def test_greedy_takes_the_most_likely_token() -> None:
    ids, logps = sampled([PROMPTS[0]], [1], temperature=0.0)[0]
    logits = tiny_model().double()(input_ids=torch.tensor([PROMPTS[0] + ids])).logits[0, 2:-1]
    assert ids == logits.argmax(-1).tolist()
    torch.testing.assert_close(torch.tensor(logps), recomputed(PROMPTS[0], ids, 1.0).float(), rtol=1e-5, atol=1e-5)


def test_a_row_ends_with_its_end_token_and_nothing_after_it() -> None:
    logits = torch.full((1, 8), -30.0)
    logits[0, 3] = 30.0
    token, logp = draw(logits, torch.tensor([0.5], dtype=torch.float64), 1.0)
    assert token.tolist() == [3] and abs(float(logp[0])) < 1e-6
    for ids, logps in sampled(PROMPTS, [1, 2, 3], max_tokens=60):
        assert len(ids) == len(logps) and 3 not in ids[:-1]


def test_draws_follow_the_distribution() -> None:
    logits = torch.log(torch.tensor([[0.1, 0.2, 0.7]])).repeat(3000, 1)
    uniforms = torch.rand(3000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    shares = torch.bincount(draw(logits, uniforms, 1.0)[0], minlength=3) / 3000
    assert torch.allclose(shares, torch.tensor([0.1, 0.2, 0.7]), atol=0.03)


def test_prompts_extend_what_was_sampled() -> None:
    tokenizer = tiny_tokenizer()
    policy = LocalPolicy(tiny_model(vocabulary=len(tokenizer)), tokenizer, PolicyConfig(model="tiny", max_tokens=5))
    messages = [{"role": "user", "content": "hello"}]
    first = policy.sample([Turn(messages, 1)])[0]
    held = [*(first.prompt_ids or []), *(first.completion_ids or [])]
    longer = [*messages, {"role": "assistant", "content": first.text}, {"role": "user", "content": "more"}]
    second = policy.sample([Turn(longer, 2, held)])[0]
    assert (second.prompt_ids or [])[: len(held)] == held


def test_following_ids_continue_a_rendered_conversation() -> None:
    tokenizer = tiny_tokenizer()
    conversation = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    answered = opening_ids(tokenizer, conversation[:1]) + tokenizer("b<|im_end|>")["input_ids"]
    assert answered + following_ids(tokenizer, conversation[2:]) == opening_ids(tokenizer, conversation)
