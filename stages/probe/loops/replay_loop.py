"""The replay: student, direction, optimiser and gradient store, one step at a time, resumable after each.

`Replay.step` measures the rows of a step, moves the student and writes the step; `Replay.finish` tabulates and judges
all steps. What each step must show: T2 and T3 in docs/probe.md.
"""

import time

from jaxtyping import Float
from torch import Tensor

from stages.probe.adapters.choose import coordinates
from stages.probe.adapters.names import LORA_PREFIX, PROJECTION_MODES
from stages.probe.adapters.spectrum import link_files, tensors_sha256
from stages.probe.checks.check import Check, write_checks
from stages.probe.checks.guards import b_is_probed, basis_stays, canary, coverage, masks, removed, removed_toward_hack
from stages.probe.directions.extraction import open_probe, pair_rows
from stages.probe.directions.metrics import (
    basis_overlap,
    probe_rows,
    row_metrics,
    set_first_token_cosines,
    step_facts,
    stream,
    toward_hack,
    weight_direction,
)
from stages.probe.directions.projection import Descent, mean_cosine
from stages.probe.directions.scoring import random_axes
from stages.probe.gradients.per_sample import mean_weights
from stages.probe.gradients.store import GradientStore
from stages.probe.loops.config import ReplayConfig
from stages.probe.pool.rows import mean_known, write_step
from stages.probe.pool.tokens import TokenRow, as_tokens
from stages.runs.kinds import PROBE_ROW, Row
from stages.runs.run import Inputs, RunWriter
from stages.runs.store import read_lines

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
        random = config.arm.endswith("projected_random")
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
            pairs = pair_rows(inputs.one("direction").folder())
            self.weights = weight_direction(self.student, pairs, out.scratch("drift") / "weights.bin")
        done = 0
        while self.out.finished(f"step_{done:03d}"):
            done += 1
        self.states = out.scratch("states")
        if done:
            self.descent.load(self.states / f"step_{done - 1:03d}.safetensors")
            self.student.move_to(self.descent.theta)

    def step(self, number: int, rows: list[Row], offset: int) -> None:
        """Measure a step's rows, move the student, write the step; `offset` is the first row's index in the store."""
        started, config, theta = time.monotonic(), self.config, self.descent.theta
        tokens = [as_tokens(row) for row in rows]
        # Before the student moves: the guards' oracles are slow, one backward pass a row, and one step shows enough.
        checks = self._guards(rows, tokens) if number == 0 else []
        measured, gradient = self._measure(rows, tokens, offset)
        set_first_token_cosines(self.student, measured, tokens, self.direction, config.first_tokens)
        account = self.descent.step(gradient)
        self.student.move_to(theta)
        now = self.student.adapter.theta
        account |= {"step": number, "arm": config.arm, "cos_v_in": mean_cosine(gradient, self.direction)}
        account |= step_facts(measured, gradient, theta.detach())
        account["basis_overlap"] = basis_overlap(now, self.start.to(now), self.student)
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
        # Gradients, rows and state first; the journal's line, which makes the step finished, last.
        seconds = time.monotonic() - started
        self.store.file.flush()
        write_step(self.out, number, measured, {**account, "seconds": seconds})
        self.descent.save(self.states / f"step_{number:03d}.safetensors")
        self.out.write(f"step_{number:03d}", {"diagnostics": account, "checks": [check.row() for check in checks]})

    def _measure(self, rows: list[Row], tokens: list[TokenRow], offset: int) -> tuple[list[Row], Float[Tensor, " N"]]:
        """Build the `probe_row/1` of rows, and the mean gradient of those that teach; gradients are stored, or not.

        With keep=sums no row's gradient exists; those sums and the sums of stored gradients differ by rounding.
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
        """Check before the first step that these are the gradients of these rows, and of these tokens."""
        student = self.student
        # Rows from all over the pool: sources and problems differ in what their answers' masks are like.
        spread = list(range(0, len(rows), max(len(rows) // MASK_ROWS, 1)))
        some_rows, some_tokens = [rows[i] for i in spread], [tokens[i] for i in spread]
        checks = [
            canary(student, tokens[:CANARY_ROWS], self.direction, lambda some: student.gradients(some)[0]),
            masks(student, some_rows, some_tokens, student.log_probs, self.config.student.model),
        ]
        if self.facts["adapter"] in ("lora", "lora_frozenA"):
            # One row where row gradients are too large to keep.
            few = some_tokens if self.store.kept else some_tokens[:1]
            checks.insert(0, b_is_probed(student.gradients(few)[0], self.direction))
        return checks

    def finish(self, steps: int, planned: int) -> None:
        """Write tables and gradients of all steps, and judge them; `planned` is the number of the pool's rows."""
        out, mode = self.out, PROJECTION_MODES[self.config.arm]
        files = [out.path / f"step_{number:03d}.jsonl.gz" for number in range(steps)]
        rows = [row for path in files for row in read_lines(path)]
        finished = (out.journal.get(f"step_{number:03d}") for number in range(steps))
        records = [record for record in finished if record is not None]
        accounts = [record["diagnostics"] for record in records]
        checks = [Check.of_row(row) for record in records for row in record["checks"]]
        checks.append(coverage(rows, planned, "nll"))
        if self.facts["adapter"] in ("lora", "lora_random_B", "lora_warmup"):
            checks.append(basis_stays(accounts))
        if mode != "none":
            checks.append(removed(accounts))
        if mode == "one_sided":
            checks.append(removed_toward_hack(accounts))
        out.table(PROBE_ROW, rows)
        # Linked, not copied: the gradients of a pool can take gigabytes.
        out.checkpoint(lambda target: link_files(out.scratch("gradients"), target), "gradients")
        out.count(planned=len(rows), done=len(rows), steps=len(accounts))
        out.metrics(accounts)
        write_checks(
            out,
            checks,
            "checks",
            arm=self.config.arm.removeprefix(LORA_PREFIX),
            adapter=self.facts["adapter"],
            contract_sha256=self.contract,
            delta_S_norm=accounts[-1]["delta_S_norm"],
            mean_cos_in=mean_known(account["cos_in"] for account in accounts),
            mean_cos_out=mean_known(account["cos_out"] for account in accounts),
            frac_fired=mean_known(account["frac_fired"] for account in accounts),
        )
