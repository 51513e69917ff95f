"""An arm of a replay: an optimiser that removes a direction from gradient and update; and the replay.

Order in a step: accumulate, project the gradient, clip, optimise, project the update. An update is projected too
because a projected gradient does not give a projected update under Adam, whose steps are not along its gradient.

Removing relu(V g) V from the gradient is the method of wassname/grpo_proj2 @25ad306. Here the mean direction decides
and the span of the axes is removed: relu on single axes would depend on the arbitrary rotation of a singular basis.
With one axis, the mean's, both are the same.

One-sided removal is not neutral: on noise it leaves a drift away from any direction, even a random one. Random and
two-sided arms control for it.

`Replay` is student, direction, optimiser and gradient store, one step at a time, resumable after each: `step` measures
the rows of a step, moves the student and writes the step; `finish` tabulates and judges all steps. Checks of each step:
T2 (rows are measured) and T3 (projection removes v).

Shapes: N numbers of the flat gradient, n of one module.
"""

import time
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from composer_stages.gradients.basis import coordinates
from composer_stages.gradients.per_row import TokenRow, mean_weights
from composer_stages.gradients.tensors import GradientStore, read_tensors, tensors_sha256, write_tensors
from composer_stages.probe.checks.check import Check, write_checks
from composer_stages.probe.checks.gradients import b_is_probed, canary, coverage, masks
from composer_stages.probe.checks.removal import basis_stays, removed, removed_toward_hack
from composer_stages.probe.direction import FLOOR, Direction, open_probe, pair_rows, random_axes
from composer_stages.probe.metrics import (
    basis_overlap,
    probe_rows,
    row_metrics,
    set_first_token_cosines,
    step_facts,
    stream,
    toward_hack,
    weight_direction,
)
from composer_stages.probe.rows import as_tokens, mean_known, write_step
from composer_stages.probe.settings import PROJECTION_MODES, DescentConfig, ProjectionMode, ReplayConfig
from composer_stages.runs.kinds import PROBE_ROW, VECTORS, Row
from composer_stages.runs.run import Inputs, RunWriter
from composer_stages.runs.store import link_folder, read_lines


@dataclass(frozen=True)
class Projection:
    """The result of a projection: the modules it removed from (`fired`), and its size and exactness.

    Cosines are means over modules with a direction and a gradient; `n_skipped` counts the modules with a direction
    and no gradient. Energies are shares of the squared norm |g|^2. `conservation_err` is
    | |g|^2 - |g_out|^2 - removed | / |g|^2, `residual` the largest |V g_out| / |g| of a fired module, and `removed_dot`
    the inner product of the removed part with the unit directions. All but `fired` are columns of `step_NNN.diag.json`.
    """

    cos_in: float | None
    cos_out: float | None
    frac_fired: float
    n_modules: int
    n_skipped: int
    grad_norm_in: float
    grad_norm_out: float
    energy_in: float
    energy_out: float
    energy_removed: float
    conservation_err: float
    residual: float
    removed_dot: float
    fired: tuple[str, ...]


def project(
    gradient: Float[Tensor, " N"], direction: Direction, mode: ProjectionMode = "one_sided", beta: float = 1.0
) -> tuple[Float[Tensor, " N"], Projection]:
    """Return a new gradient without `beta` times its part along the direction, and the account of the removal.

    one_sided acts where a module's gradient points toward the hack (<g, mean> > 0), two_sided wherever there is a
    gradient. Modules that did not fire are unchanged bit for bit, and the input tensor is not changed.
    """
    # A copy: the caller compares input and output, and `removed` checks that they share no memory.
    out = gradient.clone()
    parts, outs = direction.layout.split(gradient), direction.layout.split(out)
    if mode == "none":
        fired: tuple[str, ...] = ()
    elif mode == "two_sided":
        fired = tuple(name for name in direction.modules if bool(parts[name].norm() > FLOOR))
    else:
        fired = tuple(name for name in direction.modules if bool(parts[name] @ direction.means[name] > 0))
    # Fire or not by the mean, remove the span of the axes: relu on each axis would depend on the rotation of the basis.
    for name in fired:
        outs[name] -= beta * (direction.axes[name].T @ (direction.axes[name] @ parts[name]))
    return out, account(gradient, out, direction, fired, beta)


def account(
    before: Float[Tensor, " N"],
    after: Float[Tensor, " N"],
    direction: Direction,
    fired: tuple[str, ...],
    beta: float = 1.0,
) -> Projection:
    """Compare a gradient before and after projection.

    Removing `beta` times a part of square a^2 lowers the squared norm by beta (2 - beta) a^2.
    """
    # In float64: conservation is checked to 1e-4 of the squared norm, a difference of two nearly equal numbers.
    square_before, square_after = (float(gradient.double().square().sum()) for gradient in (before, after))
    square = max(square_before, FLOOR)
    along_before, along_after = (
        {name: float((direction.axes[name].double() @ parts[name]).square().sum()) for name in direction.modules}
        for parts in (direction.layout.split(gradient.double()) for gradient in (before, after))
    )
    norms = dict(zip(direction.layout.names, direction.layout.norms(before).tolist(), strict=True))
    removed_energy = beta * (2 - beta) * sum(along_before[name] for name in fired)
    return Projection(
        cos_in=mean_cosine(before, direction),
        cos_out=mean_cosine(after, direction),
        frac_fired=len(fired) / max(len(direction.modules), 1),
        n_modules=len(direction.modules),
        n_skipped=sum(norms[name] <= FLOOR for name in direction.modules),
        grad_norm_in=float(before.norm()),
        grad_norm_out=float(after.norm()),
        energy_in=sum(along_before.values()) / square,
        energy_out=sum(along_after.values()) / square,
        energy_removed=removed_energy / square,
        conservation_err=abs(square_before - square_after - removed_energy) / square,
        residual=max((along_after[name] ** 0.5 / max(norms[name], FLOOR) for name in fired), default=0.0),
        removed_dot=float((before - after) @ direction.unit),
        fired=fired,
    )


def mean_cosine(gradient: Float[Tensor, " N"], direction: Direction) -> float | None:
    """Return the mean over modules with a gradient of <g_m, v_m> / ||g_m||; None without such a module."""
    parts, units = direction.layout.split(gradient), direction.layout.split(direction.unit)
    cosines = [
        float(parts[n] @ units[n] / parts[n].norm()) for n in direction.modules if float(parts[n].norm()) > FLOOR
    ]
    return sum(cosines) / len(cosines) if cosines else None


class Descent:
    """An optimiser of the flat vector theta [N], on the CPU, whose state can be saved and loaded."""

    def __init__(
        self, theta: Float[Tensor, " N"], config: DescentConfig, mode: ProjectionMode, direction: Direction
    ) -> None:
        # On the CPU, as v and stored gradients are.
        self.start = theta.detach().clone().cpu()
        self.theta = self.start.clone().requires_grad_()
        self.config, self.mode, self.direction = config, mode, direction
        make = torch.optim.Adam if config.optimiser == "adam" else torch.optim.SGD
        self._optimiser = make([self.theta], lr=config.learning_rate)

    def step(self, gradient: Float[Tensor, " N"]) -> Row:
        """Move theta against this gradient, and return the account: the columns of `step_NNN.diag.json`.

        `config.project_on` selects gradient, update or both. The update is -(theta' - theta), with the sign of a
        gradient. `change` is the norm of the removed part, `shares_memory` whether input and output share memory,
        `kept_bits` whether modules that did not fire, and those without a direction, are unchanged bit for bit.
        """
        config, direction = self.config, self.direction
        projects_gradient, projects_update = (config.project_on in (target, "both") for target in ("grad", "update"))
        out, removal = project(gradient, direction, self.mode if projects_gradient else "none", config.beta)
        # Clipping after projection: the limit then applies to the optimiser's gradient.
        before = self.theta.detach().clone()
        self.theta.grad = out * min(1.0, config.clip / max(float(out.norm()), 1e-12))
        self._optimiser.step()
        update = before - self.theta.detach()
        # Adam divides each number by its own scale, so its update has a part along v even if its gradient has none: in
        # a toy model |cos| .05 on average and up to .20, under SGD 0.
        projected, update_removal = project(update, direction, self.mode if projects_update else "none", config.beta)
        with torch.no_grad():
            self.theta.copy_(before - projected)
        parts, outs = direction.layout.split(gradient), direction.layout.split(out)
        return {
            **{name: value for name, value in vars(removal).items() if name != "fired"},
            "cos_upd_in": mean_cosine(update, direction),
            "cos_upd_out": mean_cosine(projected, direction),
            "change": float((gradient - out).norm()),
            "shares_memory": out.data_ptr() == gradient.data_ptr(),
            "kept_bits": all(torch.equal(parts[name], outs[name]) for name in parts if name not in removal.fired),
            "frac_fired_upd": update_removal.frac_fired,
            "projects_update": projects_update,
            "lr": config.learning_rate,
        }

    def save(self, path: Path) -> None:
        """Write theta and the optimiser's state."""
        # Adam's moments and its count of steps are tensors; a safetensors file can hold nothing else.
        state = {name: value for name, value in self._optimiser.state[self.theta].items() if isinstance(value, Tensor)}
        write_tensors(path, {"theta": self.theta.detach(), **state}, {})

    def load(self, path: Path) -> None:
        """Restore theta and the optimiser's state."""
        tensors, _ = read_tensors(path)
        with torch.no_grad():
            self.theta.copy_(tensors.pop("theta"))
        self._optimiser.state[self.theta].update(tensors)


CANARY_ROWS, MASK_ROWS = 2, 8


class Replay:
    """One arm over one pool of `num_rows` rows; resumes after the last finished step of an earlier attempt."""

    def __init__(self, inputs: Inputs, config: ReplayConfig, num_rows: int, out: RunWriter) -> None:
        self.config, self.out = config, out
        self.student, self.direction, self.facts = open_probe(
            inputs.one("direction"), inputs.optional("svd"), config.student, out
        )
        self.student.max_tokens = config.max_tokens
        self.contract = inputs.one("pool").manifest.summary["contract_sha256"]
        adapter = self.student.adapter
        random = config.arm == "projected_random"
        removed_direction = random_axes(self.direction, config.seed) if random else self.direction
        self.descent = Descent(adapter.theta, config.descent, PROJECTION_MODES[config.arm], removed_direction)
        facts = {**coordinates(adapter), "loss": "token_sum", "arm": config.arm}
        # With keep=sums the scores are v's own, so `probe score` must know which v that was.
        facts["measured_with"] = tensors_sha256([self.direction.mean])
        kept_rows = num_rows if config.keep == "rows" else 0
        self.store = GradientStore.create(
            out.scratch("gradients"), adapter.layout, kept_rows, facts, dtype=config.dtype
        )
        self.start, self.weights = adapter.theta.clone(), None
        if config.drift:
            pairs = pair_rows(inputs.one("direction").folder(VECTORS))
            self.weights = weight_direction(self.student, pairs, out.scratch("drift") / "weights.bin")
        num_done = 0
        while self.out.finished(f"step_{num_done:03d}"):
            num_done += 1
        self.states = out.scratch("states")
        if num_done:
            self.descent.load(self.states / f"step_{num_done - 1:03d}.safetensors")
            self.student.move_to(self.descent.theta)

    def step(self, number: int, rows: list[Row], offset: int) -> None:
        """Measure a step's rows, move the student, write the step. offset: the index of the first row in the store."""
        started, config, theta = time.monotonic(), self.config, self.descent.theta
        tokens = [as_tokens(row) for row in rows]
        # Before the student moves. Once: the oracles of the guards are slow, one backward pass a row.
        checks = self._guards(rows, tokens) if number == 0 else []
        measured, gradient = self._measure(rows, tokens, offset)
        set_first_token_cosines(self.student, measured, tokens, self.direction, config.first_tokens)
        account = self.descent.step(gradient)
        self.student.move_to(theta)
        moved_theta = self.student.adapter.theta
        account |= {"step": number, "arm": config.arm, "cos_v_in": mean_cosine(gradient, self.direction)}
        account |= step_facts(measured, gradient, theta.detach())
        account["basis_overlap"] = basis_overlap(moved_theta, self.start.to(moved_theta), self.student)
        account["cos_weights"] = None if self.weights is None else toward_hack(self.student, self.weights, self.start)
        repeated = {
            "step": number,
            "arm": config.arm,
            "delta_S_norm": account["delta_S_norm"],
            "mean_cos_pre": account["cos_in"],
            "mean_cos_post": account["cos_out"],
            "frac_fired": account["frac_fired"],
        }
        measured = [row | repeated | {"grad_store_offset": offset + index} for index, row in enumerate(measured)]
        # Gradients, rows and state first; last the line of the journal, which marks the step as finished.
        seconds = time.monotonic() - started
        self.store.file.flush()
        write_step(self.out, number, measured, {**account, "seconds": seconds})
        self.descent.save(self.states / f"step_{number:03d}.safetensors")
        self.out.write(f"step_{number:03d}", {"diagnostics": account, "checks": [check.row() for check in checks]})

    def _measure(self, rows: list[Row], tokens: list[TokenRow], offset: int) -> tuple[list[Row], Float[Tensor, " N"]]:
        """Build the `probe_row/1` of rows, and the mean gradient of the rows that teach; store the gradients if kept.

        With keep=sums no gradient of a row exists; the streamed sums differ from those of stored gradients by rounding.
        """
        taught = [index for index, row in enumerate(rows) if row["src_pool"] in self.config.teach]
        weights = mean_weights(tokens, taught)
        if self.config.keep == "sums":
            streamed = stream(self.student, tokens, self.direction, weights)
            return probe_rows(rows, tokens, streamed.metrics, streamed.logps, self.direction), streamed.total
        sums, logps = self.student.gradients(tokens)
        self.store.put(offset, sums)
        return probe_rows(rows, tokens, row_metrics(sums, self.direction), logps, self.direction), weights @ sums

    def _guards(self, rows: list[Row], tokens: list[TokenRow]) -> list[Check]:
        """Check before the first step that the gradients are those of the rows and their tokens."""
        student = self.student
        # Rows spread over the pool: the masks of answers differ between sources and problems.
        spread = list(range(0, len(rows), max(len(rows) // MASK_ROWS, 1)))
        some_rows, some_tokens = [rows[i] for i in spread], [tokens[i] for i in spread]
        checks = [
            canary(student, tokens[:CANARY_ROWS], self.direction, lambda batch: student.gradients(batch)[0]),
            masks(student, some_rows, some_tokens, student.log_probs, self.config.student.model),
        ]
        if self.facts["adapter"] in ("lora", "lora_frozenA"):
            # One row where the gradients of rows are too large to store.
            few = some_tokens if self.store.kept else some_tokens[:1]
            checks.insert(0, b_is_probed(student.gradients(few)[0], self.direction))
        return checks

    def finish(self, steps: int, planned: int) -> None:
        """Write tables and gradients of all steps, and judge them. planned: the number of rows of the pool."""
        out, mode = self.out, PROJECTION_MODES[self.config.arm]
        files = [out.path / f"step_{number:03d}.jsonl.gz" for number in range(steps)]
        rows = [row for path in files for row in read_lines(path)]
        finished = (out.journal.get(f"step_{number:03d}") for number in range(steps))
        records = [record for record in finished if record is not None]
        accounts = [record["diagnostics"] for record in records]
        checks = [Check.of_row(row) for record in records for row in record["checks"]]
        checks.append(coverage(rows, planned))
        if self.facts["adapter"] == "lora":
            checks.append(basis_stays(accounts))
        if mode != "none":
            checks.append(removed(accounts))
        if mode == "one_sided":
            checks.append(removed_toward_hack(accounts))
        out.table(PROBE_ROW, rows)
        # Linked, not copied: the gradients of a pool can take gigabytes.
        out.checkpoint(lambda target: link_folder(out.scratch("gradients"), target), "gradients", VECTORS)
        out.count(planned=len(rows), done=len(rows), steps=len(accounts))
        out.metrics(accounts)
        write_checks(
            out,
            checks,
            "checks",
            arm=self.config.arm,
            adapter=self.facts["adapter"],
            contract_sha256=self.contract,
            delta_S_norm=accounts[-1]["delta_S_norm"],
            mean_cos_in=mean_known(account["cos_in"] for account in accounts),
            mean_cos_out=mean_known(account["cos_out"] for account in accounts),
            frac_fired=mean_known(account["frac_fired"] for account in accounts),
        )
