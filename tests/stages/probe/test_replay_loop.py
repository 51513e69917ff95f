"""Arms of one replay: equal until the student moves, then apart where projection acts."""

import pytest
import torch

from composer_stages.gradients.tensors import GradientStore
from composer_stages.probe.direction import V_HACK_FILE, load_direction
from composer_stages.runs import store
from composer_stages.runs.kinds import PROBE_ROW, VECTORS
from composer_stages.runs.run import Run

Chain = dict[str, Run]
ARMS = ("vanilla", "projected", "projected_random")
STEPS = 20


def diagnostics(run: Run) -> list[dict[str, float]]:
    return [store.read_json(run.path / f"step_{number:03d}.diag.json") for number in range(STEPS)]


def test_arms_measure_the_same_until_the_first_step_and_differ_after_it(chain: Chain) -> None:
    rows = {arm: chain[arm].rows(PROBE_ROW) for arm in ARMS}
    gradients = {arm: GradientStore(chain[arm].folder(VECTORS)).rows for arm in ARMS}
    first = [row["step"] == 0 for row in rows["vanilla"]]
    for arm in ARMS[1:]:
        assert [row["row_uid"] for row in rows[arm]] == [row["row_uid"] for row in rows["vanilla"]]
        assert torch.equal(gradients[arm][first], gradients["vanilla"][first])
        moved = (gradients[arm] - gradients["vanilla"]).norm(dim=-1)[[not at_start for at_start in first]]
        assert float(moved.min()) > 0
    assert not torch.equal(gradients["projected"], gradients["projected_random"])


def test_only_projecting_arms_change_gradient_and_update(chain: Chain) -> None:
    vanilla, projected, random = (diagnostics(chain[arm]) for arm in ARMS)
    for step in vanilla:
        assert step["frac_fired"] == step["frac_fired_upd"] == step["change"] == 0
        assert step["cos_in"] == step["cos_out"] and step["grad_norm_in"] == step["grad_norm_out"]
    for step in projected:
        assert step["cos_out"] <= 1e-6 and step["cos_upd_out"] <= 1e-6  # nothing is left that points toward the hack
        assert step["conservation_err"] < 1e-6 and step["residual"] < 1e-5 and step["kept_bits"]
    assert max(step["frac_fired"] for step in projected) == 1 and any(step["frac_fired"] > 0 for step in random)
    removed = [sum(step["energy_removed"] for step in steps) for steps in (projected, random)]
    assert removed[0] > 3 * removed[1]  # a random direction takes what chance gives it
    assert {step["shares_memory"] for step in (*vanilla, *projected, *random)} == {False}


def test_the_student_moves_toward_the_hack_unless_v_is_taken_out(chain: Chain) -> None:
    """`cos_weights` is the cosine of the weights' change with the direction of weights, above 0 toward the hack."""
    for steps in zip(*(diagnostics(chain[arm]) for arm in ARMS), strict=True):
        vanilla, projected, random = (step["cos_weights"] for step in steps)
        assert projected < 0 < 0.05 < vanilla and random == pytest.approx(vanilla, rel=0.05)
    norms = [diagnostics(chain[arm])[-1]["delta_S_norm"] for arm in ARMS]
    assert all(norm > 0 for norm in norms) and chain["vanilla"].manifest.summary["delta_S_norm"] == norms[0]


def test_a_step_teaches_with_the_mean_of_its_teacher_rows_alone(chain: Chain) -> None:
    """The gradient of a step, recomputed from the rows on disk: its cosine with v and its norm are the diagnostics'."""
    run, direction = chain["vanilla"], load_direction(chain["v"].folder(VECTORS) / V_HACK_FILE)[0]
    gradients, rows = GradientStore(run.folder(VECTORS)).rows, run.rows(PROBE_ROW)
    for number, step in enumerate(diagnostics(run)):
        taught = [row for row in rows if row["step"] == number and row["src_pool"] == "teacher"]
        parts = [gradients[row["grad_store_offset"]] / row["n_loss_tokens"] for row in taught]
        gradient = torch.stack(parts).mean(0)
        assert step["grad_norm_in"] == pytest.approx(float(gradient.norm()), rel=1e-4)
        inside = direction.layout.norms(gradient)[direction.indices]
        cosines = direction.layout.sums(gradient * direction.unit)[direction.indices] / inside
        assert step["cos_v_in"] == pytest.approx(float(cosines.mean()), abs=1e-5)
