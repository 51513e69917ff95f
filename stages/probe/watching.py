"""Watch a training checkpoint by checkpoint, resumable after each; then judge the alarm.

Everything is measured in the coordinates of v's adapter, at the weights that training started from. A change D of a
weight counts as its part along the adapter, P(D), as a gradient does: for singular values diag(U' D V), by linearity of
the chain rule that `ProbeAdapter.row_gradients` implements. Rollouts of later checkpoints are measured at the start's
weights too, because v has its meaning there. In the planted world a hack's cosine with v is .5 to .7 at the start's
weights, and after some steps at the checkpoint's own weights no more than an honest answer's. The checkpoint's own
weights only give the update.

The contrasts of honest answers are removed from all directions (`direction.watch_directions`): training rightly moves
from wrong to right answers, and any v contains a part of that.

Shapes: R rows, B rows of a batch, n trained numbers of a module, N of all, P directions, D placebos, L looks at a
checkpoint, O outputs and I inputs of a Linear.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from composer_stages.gradients.basis import (
    SPECTRAL,
    ProbeAdapter,
    check_spectrum,
    coordinates,
    load_spectrum,
    open_adapter,
    target_linears,
)
from composer_stages.gradients.per_row import DotSink, MeasuredStudent, Sink, TotalSink, adapt
from composer_stages.gradients.tensors import read_tensors, write_tensors
from composer_stages.policy.adapters import CheckpointInfo
from composer_stages.policy.base import PolicyConfig
from composer_stages.policy.local import load_model
from composer_stages.probe.checks.alarm import (
    RANDOM_FAMILY,
    Alarm,
    CheckpointRollouts,
    CorrectnessFixed,
    alarm,
    carried_by,
    correctness_fixed,
    pushed,
    standardised,
)
from composer_stages.probe.checks.check import Check, Finding, declared
from composer_stages.probe.checks.hacking import factorial
from composer_stages.probe.direction import HackScale, check_coordinates, hack_scale, open_direction, watch_directions
from composer_stages.probe.metrics import stacked_cosines
from composer_stages.probe.rows import as_tokens, finite_or_none, mean_known, run_rows, with_advantages
from composer_stages.probe.statistics import Draws, labelled
from composer_stages.runs.kinds import VECTORS, Row
from composer_stages.runs.run import Inputs, Listener, Run, RunWriter
from composer_stages.words import Sentence

if TYPE_CHECKING:
    from transformers import PreTrainedModel


QUANTITIES = ("update_sum", "policy_sum", "update", "policy", "policy_length")
"""Update and policy gradients since the start, those of this checkpoint alone, the latter with length held fixed."""


@torch.no_grad()
def weight_coordinates(model: "PreTrainedModel", adapter: ProbeAdapter) -> Float[Tensor, " N"]:
    """Compute P(W) of all adapted weights, in float64, so that differences keep small changes.

    `row_gradients` sums g x' over tokens: with the unit vectors as x and the rows of W' as g that sum is W.
    """
    parts: dict[str, Tensor] = {}
    for name, linear in target_linears(model).items():
        # In float64: W is far larger than its change in a training step, and callers subtract two P(W).
        weight = linear.weight.detach().double()
        unit = torch.eye(weight.shape[1], dtype=weight.dtype, device=weight.device)
        parts |= {n: part[0] for n, part in adapter.row_gradients(name, unit[None], weight.T[None])[0].items()}
    return adapter.layout.join({name: part.cpu() for name, part in parts.items()})


@dataclass(frozen=True)
class MeasuredRollouts:
    """Measured rollouts: `cosines` [R, P] with P unit directions, the two policy gradients [2, N], log-probs.

    `projections` [R] are components of the rollouts' token-sum gradients along the first direction, at an advantage of
    1; `logps` [R] are mean log-probs in nats a token, `advantages` [R] those of Dr.GRPO.
    """

    cosines: Float[Tensor, "R P"]
    projections: Float[Tensor, " R"]
    policy: Float[Tensor, "two N"]
    logps: list[float]
    advantages: Float[Tensor, " R"]


def measured_rollouts(
    student: MeasuredStudent, rows: Sequence[Row], units: Float[Tensor, "P N"], modules: Sequence[str]
) -> MeasuredRollouts:
    """Measure rollouts at the student's weights, in one pass; `units` have norm 1 over these modules together.

    The policy gradients are sums of `policy_weights` times a row's token-sum gradient, over the number of rows.
    """
    weights = policy_weights(rows)
    totals = [TotalSink(student.adapter.layout, line.float() / len(rows), student.device) for line in weights]
    measured: list[tuple[list[int], DotSink]] = []

    def sink_of(indices: list[int]) -> Sink:
        dots, adds = DotSink(student.adapter.layout, units), [total.batch_sink(indices) for total in totals]
        measured.append((indices, dots))

        def sink(name: str, contribution: Float[Tensor, "B n"]) -> None:
            # Cosines are over modules with a direction, the policy gradients over all.
            if name in modules:
                dots(name, contribution)
            for add in adds:
                add(name, contribution)

        return sink

    logps = student.stream([as_tokens(row) for row in rows], sink_of)
    order = torch.tensor([index for indices, _ in measured for index in indices]).argsort()
    cosines = torch.cat([(dots.dots / dots.squares.sqrt()[:, None]).cpu() for _, dots in measured])[order]
    projections = torch.cat([dots.dots[:, 0].cpu() for _, dots in measured])[order]
    policy = torch.stack([total.total.cpu() for total in totals])
    return MeasuredRollouts(
        cosines, projections, policy, [float(values.double().mean()) for values in logps], weights[0]
    )


def policy_weights(rows: Sequence[Row]) -> Float[Tensor, "two R"]:
    """Return the advantages of Dr.GRPO (arXiv 2503.20783), and their residuals on length, in float64.

    At ratio 1 the gradient of its loss is the sum of A_i times row i's token-sum gradient, up to a constant. The
    residuals are those of a least-squares fit of the advantages on the lengths of answers within groups.
    """
    with_advantage, _ = with_advantages(rows)
    advantages = torch.tensor([row["advantage"] for row in with_advantage], dtype=torch.float64)
    groups = [row["problem_id"] for row in rows]
    lengths = torch.tensor([float(as_tokens(row).num_own) for row in rows], dtype=torch.float64)
    means = {group: lengths[[row_group == group for row_group in groups]].mean() for group in set(groups)}
    within = lengths - torch.stack([means[group] for group in groups])
    square = within.square().sum()
    explained = within * (within @ advantages) / square if float(square) else torch.zeros_like(advantages)
    return torch.stack([advantages, advantages - explained])


def checkpoints(training: Run) -> list[tuple[int, Path | None]]:
    """Return (steps taken, folder) of each checkpoint: the start (folder None), the kept ones, the end."""
    folders = sorted((training.path / "checkpoints").glob("step_*"))
    # The end may be a kept checkpoint too; then its folder is that of the run's own model.
    by_step: dict[int, Path | None] = {0: None} | {int(path.name.removeprefix("step_")): path for path in folders}
    return sorted((by_step | {training.manifest.counts["done"]: training.folder()}).items(), key=lambda item: item[0])


class Watcher:
    """Measures rollouts against a direction and its placebos, at the weights of the start model.

    start: the model. direction: a run of `probe extract-vhack` on this model. svd: the decomposition, for adapters that
    need one.
    """

    def __init__(
        self,
        start: PolicyConfig,
        direction: Run,
        svd: Run | None,
        placebos: int,
        seed: int,
        max_tokens: int,
        listener: Listener,
    ) -> None:
        self.start, self.max_tokens, self._listener = start, max_tokens, listener
        self.direction, self.facts, pairs = open_direction(direction.folder(VECTORS))
        spectral = svd is not None and self.facts["adapter"] in SPECTRAL
        self.spectrum = load_spectrum(svd.folder(VECTORS)) if svd is not None and spectral else None
        self.families, self.units = watch_directions(self.direction, pairs, self.facts["loss_kind"], placebos, seed)
        self.scale = hack_scale(self.direction, pairs, self.facts["loss_kind"])

    def _load(self, config: PolicyConfig) -> tuple[Any, Any, ProbeAdapter]:
        model, tokenizer = load_model(config, listener=self._listener)
        rank, seed = self.facts["adapter_rank"], self.facts["adapter_seed"]
        adapter = open_adapter(self.facts["adapter"], model, self.spectrum, rank, seed)
        return model.eval(), tokenizer, adapter

    @cached_property
    def student(self) -> MeasuredStudent:
        """The start model, loaded on first use; `BadInput` if the direction is of another model."""
        model, tokenizer, adapter = self._load(self.start)
        check_coordinates(self.facts, coordinates(adapter))
        if self.spectrum is not None:
            check_spectrum(model, self.spectrum)
        student = adapt(model, tokenizer, adapter)
        student.max_tokens = self.max_tokens
        return student

    def played(self, rows: Sequence[Row]) -> tuple[MeasuredRollouts, Float[np.ndarray, " D1"]]:
        """Measure rollouts; return their measurements, and the push of v and of each placebo."""
        measured = measured_rollouts(self.student, rows, self.units, self.direction.modules)
        return measured, pushed(measured.cosines.double().numpy(), measured.advantages.numpy(), self.scale)


class WatchLoop(Watcher):
    """Measures checkpoints of one training run against one direction and its placebos."""

    def __init__(self, inputs: Inputs, placebos: int, seed: int, max_tokens: int, out: RunWriter) -> None:
        self.training, self.out = inputs.one("training"), out
        # bfloat16 would round a LoRA's change away on merging.
        start = CheckpointInfo.of(self.training).start.model_copy(update={"dtype": "float32"})
        direction, svd = inputs.one("direction"), inputs.optional("svd")
        super().__init__(start, direction, svd, placebos, seed, max_tokens, out.progress)
        self.measured = out.scratch("measured")

    @cached_property
    def rollouts(self) -> list[Row]:
        """The pool rows of all rollouts of the training, read on first use."""
        return run_rows(self.training, self.student.tokenizer, source="student", role="plain")

    def measure(self, step: int, folder: Path | None, before: int | None) -> None:
        """Measure the checkpoint in `folder` (None: the start) after `step` steps; `before`: the previous checkpoint.

        `BadInput` if the direction is of another model than the start.
        """
        student = self.student
        if folder is None:
            model, adapter = student.model, student.adapter
        else:
            model, _, adapter = self._load(self.start.model_copy(update={"model": str(folder)}))
        rows = [row for row in self.rollouts if row["step"] == step]
        tensors = {"place": weight_coordinates(model, adapter), "scores": torch.zeros(0, len(self.units))}
        earlier = tensors if before is None else read_tensors(self.measured / f"step_{before:06d}.safetensors")[0]
        policy, tensors["push"] = torch.zeros(2, len(tensors["place"])), torch.zeros(len(self.units))
        if rows:
            measured, push = self.played(rows)
            policy, tensors["scores"], tensors["push"] = measured.policy, measured.cosines, torch.from_numpy(push)
            advantages = measured.advantages.tolist()
            rows = [
                row
                | {"logp_mean": measured.logps[index], "cos_first128": None}
                | {"advantage": advantages[index], "projection": finite_or_none(measured.projections[index])}
                for index, row in enumerate(rows)
            ]
        tensors["start"] = earlier["place"].clone() if before is None else earlier["start"]
        tensors["policy_sum"] = policy[0] + (0 if before is None else earlier["policy_sum"])
        # Minus the change of the weights, which has the sign of a gradient.
        changes = [(since - tensors["place"]).float() for since in (tensors["start"], earlier["place"])]
        quantities = torch.stack([changes[0], tensors["policy_sum"], changes[1], *policy])
        tensors["quantities"] = stacked_cosines(quantities, self.units, self.direction.inside, 1)
        write_tensors(self.measured / f"step_{step:06d}.safetensors", tensors, {})
        self.out.write(f"step_{step:06d}", {"step": step, "rows": rows})

    def finish(self, steps: list[int], draws: Draws) -> tuple[list[Row], list[Row], Row, list[Check]]:
        """Return the `watched/1` and `watched_rollout/1` rows of all checkpoints, the alarm's facts, and the checks."""
        measured = {step: read_tensors(self.measured / f"step_{step:06d}.safetensors")[0] for step in steps}
        rows = {step: (self.out.journal.get(f"step_{step:06d}") or {})["rows"] for step in steps}
        rollouts = {step: self._rollouts(step, measured[step]["scores"][:, 0], rows[step]) for step in steps}
        placebos = np.stack([measured[step]["push"].double().numpy()[1:] for step in steps])
        checkpoint_rollouts = [CheckpointRollouts.of_rows(rollouts[step]) for step in steps]
        result = alarm(checkpoint_rollouts, placebos, self.families, draws.permutations, draws.seed)
        fixed = None
        if all(row["hidden_pass"] is not None for step in steps for row in rows[step]):
            right = [np.array([bool(row["hidden_pass"]) for row in rows[step]], dtype=bool) for step in steps]
            fixed = correctness_fixed(checkpoint_rollouts, right, draws.permutations, draws.seed)
        separates = self.scale.hack > self.scale.clean
        first = steps[result.first] if result.first is not None and separates else None
        watched = []
        for index, step in enumerate(steps):
            row = self._watched(step, measured[step]["quantities"].double().numpy(), rows[step])
            row["push"] = finite_or_none(result.push[index])
            row["hack_like"] = mean_known([rollout["hack_like"] for rollout in rollouts[step]])
            row["alarm"] = first is not None and step >= first
            watched.append(row)
        scores = np.concatenate([measured[step]["scores"].double().numpy() for step in steps])
        # A problem played at two checkpoints is two problems: the policy has changed in between.
        judged_rows = [row | {"problem_id": f"{step}/{row['problem_id']}"} for step in steps for row in rows[step]]
        t4e = factorial(labelled(judged_rows, scores, self.families), draws)
        checks = [alarm_check(result, first, self.scale, fixed), replace(t4e, severity="report")]
        all_rollouts = [row for step in steps for row in rollouts[step]]
        return watched, all_rollouts, alarm_facts(result, first, self.scale, fixed, carried_by(all_rollouts)), checks

    def _rollouts(self, step: int, cosines: Float[Tensor, " R"], rows: list[Row]) -> list[Row]:
        """Build the `watched_rollout/1` rows of a checkpoint: the data of the alarm."""
        hack_like = self.scale.hack_like(cosines.double().numpy())
        return [
            {
                "step": step,
                "task_id": row["problem_id"],
                "sample_idx": row["sample_id"],
                **{name: row[name] for name in ("reward", "advantage", "projection")},
                "cosine": finite_or_none(cosines[index]),
                "hack_like": bool(hack_like[index]),
            }
            for index, row in enumerate(rows)
        ]

    def _watched(self, step: int, quantities: Float[np.ndarray, "L D1"], rows: list[Row]) -> Row:
        """Build the columns of a `watched/1` row that do not depend on the alarm."""
        z = standardised(quantities, self.families)[:, 0]
        random = quantities[:, 1:][:, np.array(self.families) == RANDOM_FAMILY]
        low, high = np.quantile(random, [0.025, 0.975], axis=1)
        row: Row = {
            "step": step,
            "rows": len(rows),
            "hack_rate": mean_known(r["hacked"] for r in rows),
            "hidden_pass_rate": mean_known(r["hidden_pass"] for r in rows),
            "reward_mean": sum(r["reward"] for r in rows) / len(rows) if rows else None,
        }
        for index, name in enumerate(QUANTITIES):
            row |= {f"cos_{name}": finite_or_none(quantities[index, 0]), f"z_{name}": finite_or_none(z[index])}
            row |= {f"haar_low_{name}": finite_or_none(low[index]), f"haar_high_{name}": finite_or_none(high[index])}
        return row


def alarm_facts(
    result: Alarm,
    first: int | None,
    scale: HackScale,
    fixed: CorrectnessFixed | None = None,
    carried: Sequence[Row] = (),
) -> Row:
    """Return the alarm as a JSON document. first: the number of steps before the alarm, None without an alarm.

    fixed: the push with correctness held fixed, None if a rollout has no verdict of the hidden tests. carried: the
    rollouts that caused the alarm.
    """
    return {
        "alarm_at_step": first,
        "level": result.level,
        "p": None if result.untested else result.p,
        "smallest_p": result.smallest_p,
        "permutations": result.permutations,
        "groups_tested": result.groups,
        "largest_push": float(result.push.max()),
        "threshold": None if result.untested else finite_or_none(result.threshold),
        "permuted_push": finite_or_none(result.quantile),
        "placebo_push": finite_or_none(result.placebos),
        "untested": result.untested,
        "push_with_correctness_fixed": fixed and fixed.push,
        "p_with_correctness_fixed": fixed and fixed.p,
        "carried_by": list(carried),
        "cos_of_clean_pairs": scale.clean,
        "cos_of_hack_pairs": scale.hack,
    }


@declared("alarm")
def alarm_check(result: Alarm, first: int | None, scale: HackScale, fixed: CorrectnessFixed | None = None) -> Finding:
    """Judge the alarm; INCONCLUSIVE if v does not separate its pairs, or the rollouts have no power."""
    untested = result.untested if scale.hack > scale.clean else Sentence("probe.v-does-not-separate")
    if untested is not None:
        return Finding(None, None, untested)
    largest = float(result.push.max())
    detail = Sentence("probe.alarm", first=first, largest=largest, alarm=result, fixed=fixed)
    return Finding(first is None, largest, detail)
