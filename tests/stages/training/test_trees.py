"""A tree's branches score as separate rows do, whatever lies beside them, and gradients agree."""

from typing import Any

import pytest
import torch
from support.models import tiny_model
from support.trees import SIZES, TREES
from transformers import AutoModelForCausalLM, CohereConfig, Gemma2Config, GraniteConfig

from stages.training.scoring import Tree, logits, score, score_together, token_log_probs


def separate(model: torch.nn.Module, prompt: list[int], branch: list[int]) -> torch.Tensor:
    """Log-probs of a branch from a row of its own."""
    logits = model(input_ids=torch.tensor([prompt + branch])).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits, -1).gather(-1, torch.tensor(branch)[:, None])[:, 0]


def test_branches_score_as_rows_of_their_own() -> None:
    model = tiny_model().double()
    expected = torch.cat([separate(model, tree.prompt, branch) for tree in TREES for branch in tree.branches])
    scored = score(model, TREES)
    logps = torch.log_softmax(model.get_output_embeddings()(scored.hidden), -1)
    found = logps.gather(-1, scored.targets[:, None])[:, 0]
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    assert scored.lengths.tolist() == [3, 2, 1, 4, 2, 2]


def test_gradients_are_those_of_separate_rows() -> None:
    model = tiny_model().double()
    weights = torch.randn(sum(len(b) for t in TREES for b in t.branches), dtype=torch.float64)
    (token_log_probs(model, score(model, TREES)).double() * weights).sum().backward()
    ours = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    rows = torch.cat([separate(model, tree.prompt, branch) for tree in TREES for branch in tree.branches])
    (rows * weights).sum().backward()
    for a, p in zip(ours, model.parameters(), strict=True):
        torch.testing.assert_close(a, p.grad, rtol=1e-5, atol=1e-6)


def test_a_branch_does_not_see_its_sibling() -> None:
    model = tiny_model()
    one = token_log_probs(model, score(model, [Tree([5, 6], ([7, 8], [9, 10]))]))
    other = token_log_probs(model, score(model, [Tree([5, 6], ([7, 8], [11, 12]))]))
    assert torch.equal(one[:2], other[:2])
    assert not torch.equal(one[2:], other[2:])


def test_what_parts_share_is_computed_once_and_scores_as_it_does_apart() -> None:
    """A group of GRPO's, the same rollouts as episodes of their own, and a turn behind the same prompt."""
    model, group = tiny_model().double(), TREES[1]
    episodes = [Tree(list(group.prompt), (list(branch),)) for branch in (*group.branches, group.branches[1])]
    parts = [TREES, episodes, [Tree(list(group.prompt), ([29],))], []]
    computed: list[int] = []
    watch = model.get_decoder().register_forward_pre_hook(
        lambda module, args, given: computed.append(given["input_ids"].numel()), with_kwargs=True
    )
    together = score_together(model, parts)
    once, _ = sum(computed), computed.clear()
    score(model, [tree for part in parts for tree in part])
    watch.remove()
    assert once < 0.8 * sum(computed)
    weights = [torch.rand(len(scored.targets), dtype=torch.float64) for scored in together]
    for part, found in zip(parts[:-1], together, strict=False):
        apart = score(model, part)
        torch.testing.assert_close(found.hidden, apart.hidden, rtol=1e-10, atol=1e-10)
        assert torch.equal(found.targets, apart.targets) and torch.equal(found.branch, apart.branch)
        assert found.num_branches == apart.num_branches
    assert len(together[-1].hidden) == together[-1].num_branches == 0

    def gradient(scores: list[Any]) -> torch.Tensor:
        pairs = zip(scores, weights, strict=False)
        loss = sum(((token_log_probs(model, scored) * weight).sum() for scored, weight in pairs), torch.zeros(()))
        return torch.cat([x.flatten() for x in torch.autograd.grad(loss, list(model.parameters()))])

    apart = gradient([score(model, part) for part in parts[:-1]])
    torch.testing.assert_close(gradient(together[:-1]), apart, rtol=1e-5, atol=1e-5)


def test_sums_and_lengths_by_branch() -> None:
    scored = score(tiny_model(), TREES)
    ones = torch.ones(len(scored.targets))
    assert scored.per_branch(ones).tolist() == [3, 2, 1, 4, 2, 2]


def test_a_prompt_is_computed_once_for_all_its_branches() -> None:
    model, seen = tiny_model(), []
    model.get_decoder().register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    score(model, [Tree(list(range(5, 45)), ([1, 2, 3],) * 8)])
    assert seen == [40 + 8 * 2]


def test_branches_of_one_token_need_nothing_but_their_prompt() -> None:
    model = tiny_model().double()
    trees = [Tree([5, 6, 7], ([8], [9])), Tree([5, 6], ([8], [10]))]
    expected = torch.cat([separate(model, tree.prompt, branch) for tree in trees for branch in tree.branches])
    torch.testing.assert_close(token_log_probs(model, score(model, trees)).double(), expected, rtol=1e-6, atol=1e-6)


GROUPED = {**SIZES, "num_key_value_heads": 2}
HEADS = {
    "soft cap": Gemma2Config(**GROUPED, head_dim=8, final_logit_softcapping=0.5, sliding_window=3),
    "multiplied": CohereConfig(**GROUPED, logit_scale=0.25),
    "divided": GraniteConfig(**GROUPED, logits_scaling=4.0),
}


@pytest.mark.parametrize("kind", HEADS)
def test_what_models_do_after_their_head_is_done_here(kind: str) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(HEADS[kind], attn_implementation="eager").double().eval()
    expected = torch.cat([separate(model, tree.prompt, branch) for tree in TREES for branch in tree.branches])
    scored = score(model, TREES)
    torch.testing.assert_close(token_log_probs(model, scored).double(), expected, rtol=1e-5, atol=1e-5)
    found = torch.log_softmax(logits(model, scored), -1).gather(-1, scored.targets[:, None])[:, 0]
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
