"""The replay: student, direction, optimiser and gradient store, one step at a time, resumable after each.

What each step must show: T2 and T3 in docs/probe.md.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from stages.policy.base import PolicyConfig
from stages.probe.adapters.choose import coordinates, load_start
from stages.probe.adapters.spectrum import link_files, read_tensors, tensors_sha256, write_tensors
from stages.probe.checks.check import EXIT_CODES, Check, table, verdict
from stages.probe.checks.guards import b_is_probed, basis_stays, canary, coverage, masks, removed, removed_toward_hack
from stages.probe.directions.drift import basis_overlap, toward_hack, weight_direction
from stages.probe.directions.extraction import Direction, check_coordinates, random_axes
from stages.probe.directions.metrics import (
    mean_weights,
    probe_rows,
    rows_of_metrics,
    set_first_token_cosines,
    step_facts,
    stream,
)
from stages.probe.directions.modes import LORA_PREFIX, DescentConfig, ProjectionMode, is_random, projection_mode
from stages.probe.directions.pair_gradients import open_direction, pair_rows
from stages.probe.directions.projection import Projection, mean_cosine, project
from stages.probe.gradients.store import GradientStore
from stages.probe.gradients.student import Student, open_student
from stages.probe.loops.config import ReplayConfig
from stages.probe.pool.rows import read_step, write_step
from stages.probe.pool.tokens import TokenRow, as_tokens
from stages.runs.artifact import Inputs, Run, RunWriter
from stages.runs.records import PROBE_ROW, Row

# ---- descent
# One optimiser step: gradient, projection, clip, optimiser, projection of the update, with an account of both.
#
# An update is projected too because a projected gradient does not give a projected update under Adam, whose
# steps are not along its gradient. One-sided removal from the gradient is that of wassname/grpo_proj2 @25ad306.


@dataclass(frozen=True)
class StepAccount:
    """What one step did to the gradient and to the update, -(theta' - theta), which points as a gradient does.

    `change` is the norm that projection took from the gradient, `shares_memory` whether the projected gradient lies in
    the memory of the given one, `kept_bits` whether modules that did not fire are unchanged bit for bit.
    """

    gradient: Projection
    update: Projection
    change: float
    shares_memory: bool
    kept_bits: bool
    cos_upd_in: float | None
    cos_upd_out: float | None


class Descent:
    """An optimiser of the flat vector theta [N], on the CPU, whose state can be saved and loaded."""

    def __init__(
        self, theta: Float[Tensor, " N"], config: DescentConfig, mode: ProjectionMode, direction: Direction
    ) -> None:
        self.start = theta.detach().clone().cpu()
        self.theta = self.start.clone().requires_grad_()
        self.config, self.mode, self.direction = config, mode, direction
        make = torch.optim.Adam if config.optimiser == "adam" else torch.optim.SGD
        self._optimiser = make([self.theta], lr=config.learning_rate)

    def step(self, gradient: Float[Tensor, " N"]) -> StepAccount:
        """Move theta against this gradient; what of both is projected is `config.project_on`."""
        on_gradient: ProjectionMode = self.mode if self.config.project_on in ("grad", "both") else "none"
        on_update: ProjectionMode = self.mode if self.config.project_on in ("update", "both") else "none"
        out, account = project(gradient, self.direction, on_gradient, self.config.beta)
        before = self.theta.detach().clone()
        self.theta.grad = out * min(1.0, self.config.clip / max(float(out.norm()), 1e-12))
        self._optimiser.step()
        descent = before - self.theta.detach()
        kept, update = project(descent, self.direction, on_update, self.config.beta)
        with torch.no_grad():
            self.theta.copy_(before - kept)
        return StepAccount(
            gradient=account,
            update=update,
            change=float((gradient - out).norm()),
            shares_memory=out.data_ptr() == gradient.data_ptr(),
            kept_bits=_kept_bits(gradient, out, account, self.direction),
            cos_upd_in=mean_cosine(descent, self.direction),
            cos_upd_out=mean_cosine(kept, self.direction),
        )

    def save(self, path: Path) -> None:
        """Theta and the optimiser's state."""
        state = {name: value for name, value in self._optimiser.state[self.theta].items() if isinstance(value, Tensor)}
        write_tensors(path, {"theta": self.theta.detach(), **state}, {})

    def load(self, path: Path) -> None:
        """Go on from what was saved."""
        tensors, _ = read_tensors(path)
        with torch.no_grad():
            self.theta.copy_(tensors.pop("theta"))
        self._optimiser.state[self.theta].update(tensors)


def _kept_bits(before: Tensor, after: Tensor, account: Projection, direction: Direction) -> bool:
    """Whether modules that did not fire, and those without a direction, are the same bit for bit."""
    parts, outs = direction.layout.split(before), direction.layout.split(after)
    return all(torch.equal(parts[name], outs[name]) for name in parts if name not in account.fired)


def diagnostics(account: StepAccount, config: DescentConfig) -> Row:
    """The account as numbers by name, the columns of `step_NNN.diag.json`."""
    gradient = account.gradient
    return {
        "cos_in": gradient.cos_in,
        "cos_out": gradient.cos_out,
        "cos_upd_in": account.cos_upd_in,
        "cos_upd_out": account.cos_upd_out,
        "frac_fired": gradient.frac_fired,
        "n_modules": gradient.num_modules,
        "n_skipped": gradient.num_skipped,
        "energy_in": gradient.energy_in,
        "energy_out": gradient.energy_out,
        "energy_removed": gradient.energy_removed,
        "conservation_err": gradient.conservation_error,
        "residual": gradient.residual,
        "removed_dot": gradient.removed_dot,
        "grad_norm_in": gradient.norm_in,
        "grad_norm_out": gradient.norm_out,
        "change": account.change,
        "shares_memory": account.shares_memory,
        "kept_bits": account.kept_bits,
        "frac_fired_upd": account.update.frac_fired,
        "projects_update": config.project_on in ("update", "both"),
        "lr": config.learning_rate,
    }


CANARY_ROWS, MASK_ROWS = 2, 8


def open_probe(run: Run, svd: Run | None, policy: PolicyConfig, out: RunWriter) -> tuple[Student, Direction, Row]:
    """The student of a run's direction, the direction and its facts; `BadInput` where their coordinates differ."""
    direction, facts, _ = open_direction(run.folder())
    settings = (facts["adapter"], facts["adapter_rank"], facts["adapter_seed"])
    student = open_student(policy, *settings, svd, out, load_start(run.folder()))
    check_coordinates(facts, coordinates(student.adapter))
    return student, direction, facts


class Replay:
    """One arm over one pool of `num_rows` rows; goes on after the last finished step of an earlier attempt."""

    def __init__(self, inputs: Inputs, config: ReplayConfig, num_rows: int, out: RunWriter) -> None:
        self.config, self.out = config, out
        self.student, self.direction, self.facts = open_probe(
            inputs.one("direction"), inputs.optional("svd"), config.student, out
        )
        self.student.max_tokens = config.max_tokens
        self.contract = inputs.one("pool").manifest.summary["contract_sha256"]
        removed_direction = random_axes(self.direction, config.seed) if is_random(config.arm) else self.direction
        self.descent = Descent(
            self.student.adapter.theta, config.descent, projection_mode(config.arm), removed_direction
        )
        facts = {**coordinates(self.student.adapter), "loss": "token_sum", "arm": config.arm}
        facts["measured_with"] = tensors_sha256([self.direction.mean])
        self.store = GradientStore.create(
            out.scratch("gradients"),
            self.student.adapter.layout,
            num_rows if config.keep == "rows" else 0,
            facts,
            config.dtype,
        )
        self.start, self.weights = self.student.adapter.theta.clone(), None
        if config.drift:
            pairs = pair_rows(inputs.one("direction").folder())
            self.weights = weight_direction(self.student, pairs, out.scratch("drift") / "weights.bin")
        self._go_on()

    def _state(self, number: int) -> Path:
        return self.out.scratch("states") / f"step_{number:03d}.safetensors"

    def _go_on(self) -> None:
        """Take up theta and the optimiser's state from after the last finished step."""
        done = 0
        while self.out.finished(f"step_{done:03d}"):
            done += 1
        if done:
            self.descent.load(self._state(done - 1))
            self.student.move_to(self.descent.theta)

    def step(self, number: int, rows: list[Row], offset: int) -> None:
        """Measure a step's rows, move the student, write all of it; `offset` is the first row's place in the store."""
        started = time.monotonic()
        tokens = [as_tokens(row) for row in rows]
        checks = self._guards(rows, tokens) if number == 0 else []
        measured, gradient = self._measure(rows, tokens, offset)
        set_first_token_cosines(self.student, measured, tokens, self.direction, self.config.first_tokens)
        account = diagnostics(self.descent.step(gradient), self.config.descent)
        self.student.move_to(self.descent.theta)
        account |= {"step": number, "arm": self.config.arm, "cos_v_in": mean_cosine(gradient, self.direction)}
        account |= step_facts(measured, gradient, self.descent.theta.detach()) | self._drift()
        repeated = {
            "step": number,
            "arm": self.config.arm,
            "delta_S_norm": account["delta_S_norm"],
            "mean_cos_pre": account["cos_in"],
            "mean_cos_post": account["cos_out"],
            "frac_fired": account["frac_fired"],
        }
        measured = [row | repeated | {"grad_store_offset": offset + index} for index, row in enumerate(measured)]
        self._seal(number, measured, account, checks, time.monotonic() - started)

    def _measure(self, rows: list[Row], tokens: list[TokenRow], offset: int) -> tuple[list[Row], torch.Tensor]:
        """The `probe_row/1` of rows, and the mean gradient [N] of those that teach; gradients are stored, or not kept.

        Sums alone and sums of what is stored differ by rounding.
        """
        taught = [index for index, row in enumerate(rows) if row["src_pool"] in self.config.teach]
        weights = mean_weights(tokens, taught)
        if self.config.keep == "sums":
            streamed = stream(self.student, tokens, self.direction, weights)
            modules = len(self.direction.modules)
            return rows_of_metrics(rows, tokens, streamed.metrics, streamed.logps, modules), streamed.total
        sums, logps = self.student.gradients(tokens)
        self.store.put(offset, sums)
        return probe_rows(rows, tokens, sums, logps, self.direction), weights @ sums

    def _drift(self) -> Row:
        """How the adapter's basis and the weights have moved since the start."""
        theta = self.student.adapter.theta
        toward = toward_hack(self.student, self.weights, self.start) if self.weights is not None else None
        return {"basis_overlap": basis_overlap(theta, self.start.to(theta), self.student), "cos_weights": toward}

    def _seal(self, number: int, rows: list[Row], account: Row, checks: list[Check], seconds: float) -> None:
        """Write gradients, rows and state first, and the journal's line, which makes the step finished, last."""
        self.store.flush()
        write_step(self.out, number, rows, {**account, "seconds": seconds})
        self.descent.save(self._state(number))
        payload = {"diagnostics": account, "checks": [check.row() for check in checks]}
        self.out.write(f"step_{number:03d}", payload)

    def _guards(self, rows: list[Row], tokens: list[TokenRow]) -> list[Check]:
        """Before anything moves: whether these are the gradients of these rows, and of these tokens."""

        def measure(some: Sequence[TokenRow]) -> torch.Tensor:
            return self.student.gradients(some)[0]

        spread = list(range(0, len(rows), max(len(rows) // MASK_ROWS, 1)))
        some_rows, some_tokens = [rows[i] for i in spread], [tokens[i] for i in spread]
        few = some_tokens if self.store.kept else some_tokens[:1]  # whole gradients, which may be too large for more
        on_b = [b_is_probed(measure(few), self.direction)] if self.facts["adapter"] in ("lora", "lora_frozenA") else []
        return [
            *on_b,
            canary(self.student, tokens[:CANARY_ROWS], self.direction, measure),
            masks(self.student, some_rows, some_tokens, self.student.log_probs, self.config.student.model),
        ]

    def finish(self, steps: int, planned: int) -> None:
        """Write tables and gradients of all steps, and judge them; `planned` is the number of the pool's rows."""
        rows = [row for number in range(steps) for row in read_step(self.out, number)]
        finished = (self.out.journal.get(f"step_{number:03d}") for number in range(steps))
        records = [record for record in finished if record is not None]
        accounts = [record["diagnostics"] for record in records]
        checks = [Check.of_row(row) for record in records for row in record["checks"]]
        checks.append(coverage(rows, planned, "nll"))
        if self.facts["adapter"] in ("lora", "lora_random_B", "lora_warmup"):
            checks.append(basis_stays(accounts))
        if projection_mode(self.config.arm) != "none":
            checks.append(removed(accounts))
        if projection_mode(self.config.arm) == "one_sided":
            checks.append(removed_toward_hack(accounts))
        self.out.table(PROBE_ROW, rows)
        self.out.checkpoint(lambda target: link_files(self.out.scratch("gradients"), target), "gradients")
        self.out.document("checks", [check.as_json() for check in checks])
        self.out.text("report.txt", table(checks) + "\n")
        self._summarise(rows, accounts, checks)

    def _summarise(self, rows: list[Row], accounts: list[Row], checks: list[Check]) -> None:
        status = verdict(checks)
        self.out.count(planned=len(rows), done=len(rows), steps=len(accounts))
        self.out.metrics(accounts)
        self.out.set_summary(
            ok=status == "PASS",
            verdict=status,
            exit_code=EXIT_CODES[status],
            arm=self.config.arm.removeprefix(LORA_PREFIX),
            adapter=self.facts["adapter"],
            contract_sha256=self.contract,
            delta_S_norm=accounts[-1]["delta_S_norm"],
            mean_cos_in=_mean(accounts, "cos_in"),
            mean_cos_out=_mean(accounts, "cos_out"),
            frac_fired=_mean(accounts, "frac_fired"),
        )


def _mean(accounts: list[Row], name: str) -> float | None:
    known = [account[name] for account in accounts if account[name] is not None]
    return sum(known) / len(known) if known else None
