"""Sampling: log-probs are those of a recomputation, and a row's draws depend on its own seed alone."""

import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.environments import GuessEnv
from support.models import save_tiny, tiny_model, tiny_tokenizer
from support.transcripts import assistant, user
from transformers import GPT2Config, GPT2LMHeadModel, Qwen3Config, Qwen3ForCausalLM

from composer_stages.errors import UsageError
from composer_stages.messages import following_ids, opening_ids
from composer_stages.policy import kv_cache, sampling, trials
from composer_stages.policy.base import PolicyConfig, Turn
from composer_stages.policy.local import LocalPolicy
from composer_stages.policy.sampling import Drawn, PrefixCache, draw, sample_batch
from composer_stages.rollouts.agent_loop import LiveRollout, play

PROMPTS = [[5, 6, 7], [8, 9, 10, 11, 12], [13]]


OFTEN = set(range(0, 260, 9))
"""End tokens, so many that rows end at different times."""


def rows_of(
    model: torch.nn.Module, prompts: list[list[int]], seeds: Sequence[int] = (), **settings: Any
) -> list[Drawn]:
    """A batch of rows, by the seeds 0, 1, ... where no others are given."""
    settings = {"max_tokens": 40, "temperature": 1.0, "end_ids": OFTEN, "pad_id": 0, **settings}
    return sample_batch(model, prompts, seeds=list(seeds or range(len(prompts))), **settings)


def rows_alone(
    model: torch.nn.Module, prompts: list[list[int]], seeds: Sequence[int] = (), **settings: Any
) -> list[Drawn]:
    """The same rows, each a batch of its own."""
    pairs = zip(prompts, seeds or range(len(prompts)), strict=True)
    return [rows_of(model, [prompt], [seed], **settings)[0] for prompt, seed in pairs]


def sampled(prompts: list[list[int]], seeds: list[int], **settings: float) -> list[Drawn]:
    return rows_of(tiny_model().double(), prompts, seeds, **{"max_tokens": 12, "end_ids": {3}, **settings})


def recomputed(prompt: list[int], ids: list[int], temperature: float) -> torch.Tensor:
    logits = tiny_model().double()(input_ids=torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits / temperature, -1).gather(-1, torch.tensor(ids)[:, None])[:, 0]


def test_log_probs_equal_a_recomputation() -> None:
    for temperature in (1.0, 0.7):
        for prompt, (ids, logps) in zip(PROMPTS, sampled(PROMPTS, [1, 2, 3], temperature=temperature), strict=True):
            assert logps == pytest.approx(recomputed(prompt, ids, temperature).tolist(), rel=1e-5, abs=1e-5)


def test_another_seed_draws_another_row() -> None:
    assert sampled(PROMPTS[1:2], [4])[0][0] != sampled(PROMPTS[1:2], [2])[0][0]


def test_greedy_takes_the_most_likely_token() -> None:
    ids, logps = sampled([PROMPTS[0]], [1], temperature=0.0)[0]
    logits = tiny_model().double()(input_ids=torch.tensor([PROMPTS[0] + ids])).logits[0, 2:-1]
    assert ids == logits.argmax(-1).tolist()
    torch.testing.assert_close(torch.tensor(logps), recomputed(PROMPTS[0], ids, 1.0).float(), rtol=1e-5, atol=1e-5)


def test_a_row_ends_with_its_end_token() -> None:
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


def test_following_ids_continue_a_rendered_conversation() -> None:
    tokenizer = tiny_tokenizer()
    conversation = [user("a"), assistant("b"), user("c")]
    answered = opening_ids(tokenizer, conversation[:1]) + tokenizer("b<|im_end|>")["input_ids"]
    assert answered + following_ids(tokenizer, conversation[2:]) == opening_ids(tokenizer, conversation)


# Rows are computed as if each were alone, however they are batched


def lengths_fed(model: torch.nn.Module) -> list[tuple[int, int]]:
    """Record rows and tokens of every pass of a model from here on."""
    seen: list[tuple[int, int]] = []
    model.register_forward_pre_hook(
        lambda _, args, given: seen.append(tuple(given["input_ids"].shape)), with_kwargs=True
    )
    return seen


MANY = [[5, 6, 7], [8, 9, 10, 11, 12], [13], [5, 6, 7], [5, 6, 7], [8, 9, 10, 11, 12], [14, 15], [16]]


def assert_equal_rows(one: Sequence[Drawn], other: Sequence[Drawn]) -> None:
    assert [ids for ids, _ in one] == [ids for ids, _ in other]
    for (_, logps), (_, same) in zip(one, other, strict=True):
        torch.testing.assert_close(torch.tensor(logps), torch.tensor(same), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("look", "prefill_tokens", "fixed"), [(1, 1, False), (16, 8192, False), (16, 8192, True)])
def test_rows_are_independent_of_ended_rows(look: int, prefill_tokens: int, fixed: bool) -> None:
    model, settings = tiny_model().double(), {"prefill_tokens": prefill_tokens, "look_every": look, "fixed": fixed}
    alone = rows_alone(model, MANY, **settings)
    assert len({len(ids) for ids, _ in alone}) > 3
    assert_equal_rows(rows_of(model, MANY, **settings), alone)


@pytest.mark.parametrize("number", range(4))
def test_random_batches_equal_rows_sampled_alone(number: int) -> None:
    """Any lengths, numbers of end tokens, passes over prompts, and rows that continue or are left out."""
    chosen, model = random.Random(number), tiny_model().double()
    size = model.config.vocab_size
    ends = set(chosen.sample(range(3, size), chosen.choice([3, 20, 60, 120])))

    def words(most: int) -> list[int]:
        return [chosen.randrange(3, size) for _ in range(chosen.randint(1, most))]

    prompts, prefixes = [words(14) for _ in range(chosen.randint(2, 10))], PrefixCache()
    prompts[1] = prompts[0] if number % 2 else prompts[1]
    for _ in range(3):
        seeds = [chosen.randrange(10**6) for _ in prompts]
        settings: dict[str, Any] = {"end_ids": ends, "temperature": chosen.choice([1.0, 0.7])}
        settings |= {"max_tokens": chosen.choice([1, 2, 8, 20]), "prefill_tokens": chosen.choice([1, 7, 8192])}
        fixed = chosen.random() < 0.5  # as a GPU reads a token
        found = rows_of(model, prompts, seeds, prefixes=prefixes, fixed=fixed, **settings)
        assert_equal_rows(found, rows_alone(model, prompts, seeds, **settings))
        goes_on = [prompt + ids + words(5) for prompt, (ids, _) in zip(prompts, found, strict=True)]
        prompts = [prompt for prompt in goes_on if chosen.random() < 0.8] or goes_on


def test_eager_and_windowed_attention_give_the_same_rows() -> None:
    eager = tiny_model()  # in float32, where transformers' mask of eager attention is finite
    eager.set_attn_implementation("eager")
    given = {**tiny_model().config.to_dict(), "use_sliding_window": True, "sliding_window": 20}
    given["layer_types"] = ["full_attention", "sliding_attention"]
    windowed = Qwen3ForCausalLM(Qwen3Config(**given)).eval()
    windowed.load_state_dict(tiny_model().state_dict())
    found = [trials.outcome(model, sampling.try_sampling) for model in (eager, windowed)]
    assert [ways[sampling.BATCHED] for ways in found] == ["all", "all"]
    assert trials.longest(found[1], sampling.IN_PLACE, windowed.config) == 20
    for model in (eager, windowed):
        assert_equal_rows(rows_of(model, MANY), rows_alone(model, MANY))
    assert_equal_rows(rows_of(eager, MANY), rows_of(tiny_model(), MANY))


def test_a_fixed_step_attends_to_more_columns_as_rows_grow() -> None:
    model, most = tiny_model().double(), kv_cache.WINDOW + 20
    fixed, growing = (rows_of(model, MANY[:4], max_tokens=most, end_ids={3}, fixed=fixed) for fixed in (True, False))
    assert max(len(ids) for ids, _ in fixed) == most
    assert_equal_rows(fixed, growing)


def test_ended_rows_are_dropped_and_equal_prompts_prefilled_once() -> None:
    model = tiny_model().double()
    fed = lengths_fed(model)
    found = rows_of(model, MANY)
    assert fed[0] == (5, 5), "five prompts differ, of at most five tokens"
    rows = [rows for rows, _ in fed[1:]]
    assert rows == sorted(rows, reverse=True) and rows[0] == 8
    needed = sum(len(ids) - 1 for ids, _ in found)
    assert needed <= sum(rows) <= needed / sampling.SHRINK + 8
    assert len(fed) == max(len(ids) for ids, _ in found), "nothing is computed behind the last end"


def test_prefill_is_split_by_prefill_tokens() -> None:
    model = tiny_model().double()
    fed = lengths_fed(model)
    rows_of(model, [[5] * 30, [6] * 9], max_tokens=1, prefill_tokens=16)
    assert fed == [(2, 8), (2, 8), (2, 8), (2, 6)]


def test_half_precision_rows_are_sampled_in_place() -> None:
    found = rows_of(tiny_model().to(torch.bfloat16), MANY, max_tokens=9)
    assert all(ids and all(math.isfinite(p) for p in logps) for ids, logps in found)


# Turns continue from where the keys and values of the turn before end


MORE = [[20 + i] * (1 + i % 3) for i in range(8)]


def test_a_turn_feeds_only_new_tokens() -> None:
    model = tiny_model().double()
    fed, prefixes, prompts = lengths_fed(model), PrefixCache(), MANY
    for turn in range(3):
        seeds = [100 * turn + i for i in range(8)]
        anew = rows_of(model, prompts, seeds, max_tokens=30)
        fed.clear()
        found = rows_of(model, prompts, seeds, prefixes=prefixes, max_tokens=30)
        assert_equal_rows(found, anew)
        if turn:
            assert fed[0] == (8, 4), "at most three new tokens, and the last of the turn before, which was not fed"
        prompts = [[*prompt, *ids, *new] for prompt, (ids, _), new in zip(prompts, found, MORE, strict=True)]
    # Fewer rows, in another order, and one that continues nothing.
    few = [prompts[5], [30, 31], prompts[2]]
    assert_equal_rows(rows_of(model, few, [7, 8, 9], prefixes=prefixes), rows_of(model, few, [7, 8, 9]))


def test_a_shared_beginning_is_computed_once() -> None:
    model = tiny_model().double()
    opening = [5 + i % 200 for i in range(40)]
    prompts = [[*opening, *own] for own in ([7, 8, 9], [10], [7, 8, 9], [7, 12])]
    few: dict[str, Any] = {"max_tokens": 4, "end_ids": {3}}
    alone = rows_alone(model, prompts, **few)
    fed, prefixes = lengths_fed(model), PrefixCache()
    found = rows_of(model, prompts, prefixes=prefixes, **few)
    assert fed[:2] == [(1, 40), (3, 3)]
    assert_equal_rows(found, alone)
    fed.clear()
    longer = [[*p, *ids, 20] for p, (ids, _) in zip(prompts, found, strict=True)]
    again = rows_of(model, longer, prefixes=prefixes, **few)
    assert fed[0] == (4, 2), "the next turn continues whole rows"
    assert_equal_rows(again, rows_alone(model, longer, **few))
    fed.clear()
    inside = [[*opening, *opening], [*opening, *opening, 9]]  # one prompt is what the other begins with
    within = rows_of(model, inside, **few)
    assert fed[:2] == [(1, 79), (2, 2)]
    assert_equal_rows(within, rows_alone(model, inside, **few))
    fed.clear()
    rows_of(model, [[*opening[:20], 7], [*opening[:20], 8]], **few)
    assert fed[0] == (2, 21), "too short to pay for a pass"


def test_beginnings_shared_by_groups_are_computed_once_each() -> None:
    model = tiny_model().double()
    openings = [[base + i % 50 for i in range(60)] for base in (5, 60, 120)]
    prompts = [[*openings[i % 3], 200, 201 + i] for i in range(9)] + [[*openings[0][:30], *openings[1][:20]]]
    few: dict[str, Any] = {"max_tokens": 4, "end_ids": {3}}
    alone = rows_alone(model, prompts, **few)
    fed = lengths_fed(model)
    assert_equal_rows(rows_of(model, prompts, **few), alone)
    assert fed[:2] == [(4, 61), (10, 1)], "three openings, and nearly all of the prompt that shares nothing"


def small_policy(characters: str | None = None, **settings: Any) -> LocalPolicy:
    tokenizer = tiny_tokenizer(characters)
    model = tiny_model(vocabulary=len(tokenizer))
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    return LocalPolicy(model, tokenizer, PolicyConfig(**{"model": "tiny", "max_tokens": 6, **settings}))


def test_a_rollouts_prompt_is_prefilled_once() -> None:
    policy = small_policy("abcdefgh", max_tokens=200)  # of few characters, so that answers end by themselves
    fed = lengths_fed(policy.model)
    rollouts = [LiveRollout(task, 0, seed) for seed, task in enumerate(GuessEnv().tasks("train", 3, 0))]
    opening = {}

    def before_turn() -> None:
        opening[len(opening)] = len(fed)

    play(lambda: GuessEnv(turns=3), policy, rollouts, max_steps=3, before_turn=before_turn)
    prompts = [fed[opening[turn]][1] for turn in range(3)]
    held = [len(rollouts[0].steps[turn].sample.prompt_ids or []) for turn in range(3)]
    assert held[0] < held[1] < held[2]
    assert prompts[0] == held[0]
    assert all(length <= held[turn] - held[turn - 1] for turn, length in enumerate(prompts[1:], 1)), prompts
    assert policy._reused is None

    # Weights change between plays: the same rollout again is read anew, and drawn from the new weights.
    with torch.no_grad():
        policy.model.lm_head.weight.neg_()
    ours, theirs = (
        play(lambda: GuessEnv(turns=2), p, [LiveRollout(rollouts[0].task, 0, 0)], max_steps=2)[0]
        for p in (policy, LocalPolicy(policy.model, policy.tokenizer, policy.config))
    )
    assert [s.sample.completion_ids for s in ours.steps] == [s.sample.completion_ids for s in theirs.steps]
    assert ours.steps[0].sample.completion_ids != rollouts[0].steps[0].sample.completion_ids


# Memory


def test_answers_are_sampled_in_batches_that_fit() -> None:
    turns = [Turn([{"role": "user", "content": "x" * n}], seed=n) for n in (3, 40, 5, 41, 4)]
    whole = small_policy().sample(turns)
    roomy = small_policy()
    longest = max(map(roomy.count_tokens, turns))
    policy = small_policy(kv_cache_gib=2.5 * sampling.row_bytes(roomy.model, longest + 6) / 2**30)
    fed = lengths_fed(policy.model)
    found = policy.sample(turns)
    assert [sample.completion_ids for sample in found] == [sample.completion_ids for sample in whole]
    lengths = sorted(map(roomy.count_tokens, turns))
    assert [shape for shape in fed if shape[1] > 1] == [(2, lengths[4]), (3, lengths[2])]
    fed.clear()
    small_policy(kv_cache_gib=1e-9).sample(turns[:1])  # one row is always tried
    with policy.reusing_prefixes():
        again = policy.sample(turns)
        assert policy._reused is not None and policy._reused[0]._rows is None, "two batches would not fit together"
    assert [sample.completion_ids for sample in again] == [sample.completion_ids for sample in whole]


def test_row_bytes_equal_the_cache_tables() -> None:
    model = tiny_model().to(torch.bfloat16)
    rows, _ = sampling._prefilled(model, [[5, 6, 7]], 13, 0, 99, None, True)
    tables = sum(t.nbytes for layer in rows._cache.layers for t in (layer.keys, layer.values))
    assert sampling.row_bytes(model, 16) == tables + 32 * 260


def test_a_row_ends_at_the_end_of_the_context() -> None:
    """Behind which GPT-2 has no position; another row of the batch goes on."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 64, "n_embd": 16, "n_layer": 1, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(**sizes, n_positions=16, initializer_range=0.5)).eval()
    prompts = [[1] * 14, [2] * 3]
    settings: dict[str, Any] = {"max_tokens": 10, "context": 16, "temperature": 1.0, "end_ids": set(), "pad_id": 0}
    rows = sample_batch(model, prompts, seeds=[1, 2], **settings)
    assert [len(ids) for ids, _ in rows] == [2, 10]
    assert_equal_rows(rows[1:], sample_batch(model, prompts[1:], seeds=[2], **settings))


def test_a_model_without_memory_for_an_answer_is_refused(tmp_path: Path) -> None:
    folder = str(save_tiny(tmp_path))
    for settings, words in (
        ({"max_tokens": 10**12}, "and there are"),
        ({"max_tokens": 64, "kv_cache_gib": 1e-6}, "and policy.kv_cache_gib allows 1e-06"),
    ):
        with pytest.raises(UsageError, match=f"takes .* GiB for keys and values, {words}") as refused:
            LocalPolicy.open(PolicyConfig(model=folder, **settings), cache=tmp_path, listener=lambda *told: None)
        assert "Lower policy.max_tokens" in str(refused.value)
    LocalPolicy.open(PolicyConfig(model=folder), cache=tmp_path, listener=lambda *told: None)


def test_lockstep_is_part_of_the_identity_and_memory_is_not() -> None:
    usual = PolicyConfig().identity()
    assert PolicyConfig(kv_cache_gib=1, prefill_tokens=9).identity() == usual != PolicyConfig(lockstep=8).identity()
