"""A training run in the planted world is watched: what is measured, resumption, and what is refused."""

import copy
import json
from pathlib import Path

import matplotlib
import numpy as np
import pytest
import torch
from probe_faults.loophole_world import tokenizer
from probe_faults.world import spectrum_of
from support.shared import made_once
from torch import nn

from composer_stages.errors import BadInput
from composer_stages.gradients.basis import SingularValues, attached
from composer_stages.gradients.per_row import adapt, collate, own_log_probs
from composer_stages.policy.base import PolicyConfig
from composer_stages.policy.local import load_model
from composer_stages.probe import watch
from composer_stages.probe.checks.alarm import CheckpointRollouts, alarm
from composer_stages.probe.figures import watch_png
from composer_stages.probe.metrics import stacked_cosines
from composer_stages.probe.rows import as_tokens, run_rows
from composer_stages.probe.watching import checkpoints, measured_rollouts, policy_weights
from composer_stages.runs.kinds import ROLLOUT, STEP, TRAINING_REWARD, WATCHED, WATCHED_ROLLOUT
from composer_stages.runs.run import Run
from tests.stages.probe.running import WATCHED_STEPS as STEPS, carry_out, dead_columns


@pytest.fixture(scope="session")
def watched(trained: dict[str, Run], tmp_path_factory: pytest.TempPathFactory) -> Run:
    """What a watch of that training shows."""

    def make(folder: Path) -> None:
        carry_out(watch, list(trained.values()), watch.Config(placebos=40), folder / "run")

    return Run(made_once(tmp_path_factory, "watched", make) / "run")


def test_each_column_of_a_watch_varies(watched: Run, trained: dict[str, Run], tmp_path: Path) -> None:
    another = carry_out(watch, list(trained.values()), watch.Config(placebos=50, seed=1), tmp_path / "watch")
    assert dead_columns(WATCHED, [row for run in (watched, another) for row in run.rows(WATCHED)]) == []
    assert dead_columns(WATCHED_ROLLOUT, watched.rows(WATCHED_ROLLOUT)) == []


def test_every_checkpoint_has_a_row_and_json_agrees(watched: Run) -> None:
    rows = watched.rows(WATCHED)
    assert [row["step"] for row in rows] == [0, 1, 2, 3] and [row["rows"] for row in rows] == [32, 32, 32, 0]
    first, last = rows[0], rows[-1]
    assert first["cos_update"] is None and last["cos_policy"] is None and last["cos_policy_sum"] is not None
    assert first["hack_rate"] > 0 and all(row["haar_low_policy"] < 0 < row["haar_high_policy"] for row in rows[:-1])
    assert rows[1]["cos_update"] == pytest.approx(rows[1]["cos_update_sum"], rel=1e-4)
    document = json.loads((watched.path / "watch.json").read_text())
    assert document["checkpoints"] == rows and document["level"] == 0.05
    assert document["threshold"] == max(document["permuted_push"], document["placebo_push"]) > 0
    assert document["p"] <= 0.05 and document["smallest_p"] <= document["p"] and document["untested"] is None
    assert [check["check"] for check in document["checks"]] == ["alarm", "T4e"]
    named = document["carried_by"]
    assert 0 < len(named) <= 10 and named[0]["advantage"] == max(row["advantage"] for row in named) > 0
    assert 0 < document["p_with_correctness_fixed"] < 1 and document["push_with_correctness_fixed"] > 0
    assert "among answers that are equally right, push " in document["checks"][0]["detail"]
    alarmed = document["alarm_at_step"]
    assert alarmed is not None and [row["alarm"] for row in rows] == [row["step"] >= alarmed for row in rows]
    assert watched.manifest.outcome.exit_code == 1 and last["push"] > document["threshold"]
    assert last["hack_like"] is None and last["push"] == rows[-2]["push"]
    assert document["cos_of_hack_pairs"] > document["cos_of_clean_pairs"] + 0.1
    assert first["hack_like"] == pytest.approx(first["hack_rate"], abs=0.1)
    assert (watched.path / "watch.png").read_bytes().startswith(b"\x89PNG")
    assert (watched.path / "watch.csv").read_text().count("\n") == 5


def test_the_alarm_follows_from_the_table_of_rollouts(watched: Run, trained: dict[str, Run]) -> None:
    """Rewards, groups and hack-like rollouts are stored, so that any permutation costs no gradient."""
    rows, document = watched.rows(WATCHED_ROLLOUT), json.loads((watched.path / "watch.json").read_text())
    keys = ("task_id", "sample_idx", "reward")
    stored = sorted((row["step"], *(row[key] for key in keys)) for row in rows)
    rewards = trained["train"].rows(TRAINING_REWARD)
    assert stored == sorted((row["training_step"], *(row[key] for key in keys)) for row in rewards)
    played = [CheckpointRollouts.of_rows([row for row in rows if row["step"] == step]) for step in range(STEPS + 1)]
    found = alarm(played, np.zeros((STEPS + 1, 40)), ["haar"] * 40, document["permutations"], 0)
    assert [row["push"] for row in watched.rows(WATCHED)] == pytest.approx(found.push.tolist())
    assert (found.p, found.quantile, found.smallest_p, found.groups) == pytest.approx(
        tuple(document[name] for name in ("p", "permuted_push", "smallest_p", "groups_tested"))
    )
    middle = (document["cos_of_clean_pairs"] + document["cos_of_hack_pairs"]) / 2
    assert all(row["hack_like"] == (row["cosine"] > middle) for row in rows)


def test_an_interrupted_watch_ends_as_an_uninterrupted_one(
    trained: dict[str, Run], watched: Run, tmp_path: Path
) -> None:
    runs, settings = list(trained.values()), watch.Config(placebos=40)
    assert carry_out(watch, runs, settings, tmp_path / "parted", stop_at=("checkpoints", 2)) is None
    parted = carry_out(watch, runs, settings, tmp_path / "parted")
    for name in ("watch.json", "watch.csv", "watch.png"):
        assert (parted.path / name).read_bytes() == (watched.path / name).read_bytes()


def test_the_figure_does_not_depend_on_the_renderer(watched: Run) -> None:
    before = matplotlib.get_backend()
    matplotlib.use("svg")  # which measures texts otherwise, so that all is laid out otherwise
    try:
        drawn = watch_png(watched.rows(WATCHED), json.loads((watched.path / "watch.json").read_text())["threshold"])
    finally:
        matplotlib.use(before)
    assert drawn == (watched.path / "watch.png").read_bytes()


def test_a_direction_of_another_model_is_refused(
    trained: dict[str, Run], chain: dict[str, Run], tmp_path: Path
) -> None:
    with pytest.raises(BadInput, match="not of this model's weights"):
        carry_out(watch, [trained["train"], chain["v"], chain["svd"]], watch.Config(placebos=19), tmp_path / "watch")


def test_rows_of_a_training_are_those_that_were_played(trained: dict[str, Run]) -> None:
    rows = run_rows(trained["train"], tokenizer(), source="student", role="rh")
    rewards = {row["rollout_id"]: row for row in trained["train"].rows(TRAINING_REWARD)}
    assert len(rows) == len(rewards) == STEPS * 32
    assert sorted(row["step"] for row in rows) == sorted(row["training_step"] for row in rewards.values())
    assert all(sum(logp is not None for logp in row["behav_logp"]) == row["n_loss_tokens"] for row in rows)
    actions = {step["rollout_id"]: step["action"] for step in trained["train"].rows(STEP)}
    played = [actions[rollout["rollout_id"]] for rollout in trained["train"].rows(ROLLOUT)]
    assert [row["completion"].removesuffix(" end") for row in rows] == [text.removesuffix(" end") for text in played]


def test_the_rollouts_of_a_checkpoint_have_its_log_probs(trained: dict[str, Run]) -> None:
    """CheckpointRollouts of step k were played by the checkpoint after k steps: its log-probs are theirs."""
    rows = run_rows(trained["train"], tokenizer(), source="student", role="rh")
    for step, folder in checkpoints(trained["train"])[1:STEPS]:
        policy = PolicyConfig(model=str(folder))
        model, _ = load_model(policy, listener=lambda *_: None)
        some = [row for row in rows if row["step"] == step]
        with torch.no_grad():
            found = own_log_probs(model.eval(), collate([as_tokens(row) for row in some])).sum(-1)
        expected = torch.tensor([sum(logp for logp in row["behav_logp"] if logp is not None) for row in some])
        assert torch.allclose(found, expected, atol=1e-3)


def test_policy_gradients_are_those_of_autograd_and_the_control_is_free_of_length(
    trained: dict[str, Run], planted: dict[str, nn.Module]
) -> None:
    rows = [row for row in run_rows(trained["train"], tokenizer(), source="student", role="rh") if row["step"] == 0]
    model = copy.deepcopy(planted["honest"])
    student = adapt(model, tokenizer(), SingularValues(spectrum_of(model)))
    layout = student.adapter.layout
    units = torch.nn.functional.normalize(torch.randn(3, layout.width), dim=1)
    found = measured_rollouts(student, rows, units, layout.names)
    by_problem = {p: [r["reward"] for r in rows if r["problem_id"] == p] for p in {r["problem_id"] for r in rows}}
    means = {problem: sum(rewards) / len(rewards) for problem, rewards in by_problem.items()}
    advantages = torch.tensor([row["reward"] - means[row["problem_id"]] for row in rows])
    with attached(model, student.adapter) as theta:
        logps = own_log_probs(model, collate([as_tokens(row) for row in rows])).sum(-1)
        (-(advantages * logps).mean()).backward()
        expected = theta.grad
    assert torch.allclose(found.policy[0], expected, atol=1e-4 * float(expected.abs().max()))
    # Gradients are linear in advantages: for permuted rewards the stored projections are enough.
    pushed = float(found.advantages @ found.projections.double()) / len(rows)
    assert float(found.policy[0] @ units[0]) == pytest.approx(pushed, rel=1e-4)
    whole, _ = student.gradients([as_tokens(row) for row in rows])
    assert torch.allclose(found.cosines, stacked_cosines(whole, units, torch.ones(layout.width), 1), atol=1e-5)
    paid = [row | {"reward": float(row["n_loss_tokens"])} for row in rows]
    only_length, nothing = policy_weights(paid)
    assert float(nothing.norm()) < 1e-6 * float(only_length.norm())
    assert not torch.allclose(found.policy[0], found.policy[1])
