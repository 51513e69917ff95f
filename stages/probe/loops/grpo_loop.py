"""GRPO trajectories of one arm: models, environments and seeds, what is kept after each step, when a seed is given up.

Arms and generators: `stages.probe.grpo`.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor, nn

from stages.envs.base import Environment, Task
from stages.envs.config import EnvConfig, EnvStageConfig
from stages.errors import BadInput
from stages.policy.local import LocalPolicy, load_model
from stages.probe.checks.check import EXIT_CODES, Check, table, verdict
from stages.probe.checks.contrast_checks import rate
from stages.probe.checks.guards import (
    MAX_BAD_STEPS,
    MAX_FLAT,
    advantages_favour_hacks,
    behaviour_log_probs,
    correlation,
    flat_groups,
    longest_streak,
    ratios_carry_signal,
    rewards_vary,
)
from stages.probe.directions.drift import change_norm
from stages.probe.directions.extraction import Direction, random_axes
from stages.probe.directions.metrics import rows_of_metrics, stream
from stages.probe.directions.modes import LORA_PREFIX, check_arm, is_random, projection_mode
from stages.probe.directions.pair_gradients import extract_again
from stages.probe.gradients.per_sample import TotalSink
from stages.probe.gradients.student import RatioReport, Student, adapt, dr_grpo, ratio_report
from stages.probe.loops.config import GrpoConfig
from stages.probe.loops.replay_loop import Descent, diagnostics, open_probe
from stages.probe.loops.rollouts import answers, with_advantages
from stages.probe.pool.rows import write_step
from stages.probe.pool.tokens import TokenRow, as_tokens
from stages.runs.artifact import Inputs, RunWriter
from stages.runs.records import TRAJECTORY, Row
from stages.runs.store import digest

# ---- trajectory
# One step of a GRPO trajectory: sample groups, measure every row, move the student, account for it.
#
# The loss is Dr.GRPO's (arXiv 2503.20783): token sums over a constant length, advantages not divided by their
# spread. At
# ratio 1 without clipping a row's GRPO gradient is A_i times its token-sum NLL gradient over N Lmax, so one backward
# pass gives both the cosines, of rows with advantage 0 too, and the step. With true ratios (`mixed_is`) the
# surrogate has
# a backward pass of its own.


class Trajectory:
    """One arm and seed: a student, the optimiser of its adapter, and the policies that answer, by source."""

    def __init__(
        self,
        student: Student,
        direction: Direction,
        descent: Descent,
        policies: Mapping[str, LocalPolicy],
        config: GrpoConfig,
    ) -> None:
        self.student, self.direction, self.descent = student, direction, descent
        self.policies, self.config = policies, config

    def step(
        self, make: Callable[[], Environment], tasks: Sequence[Task], seed: int, number: int
    ) -> tuple[Row, list[Row]]:
        """Sample answers to the tasks, measure them, move; returns the step's account and its `probe_row/1` rows."""
        rows, groups = with_advantages(self._sample(make, tasks, int(digest([seed, number])[:12], 16)))
        tokens = [as_tokens(row) for row in rows]
        l_max = max(row.num_own for row in tokens)
        found = stream(self.student, tokens, self.direction, [row["advantage"] / (len(rows) * l_max) for row in rows])
        modules = len(self.direction.modules)
        measured = rows_of_metrics(rows, tokens, found.metrics, found.logps, modules)
        ratios = self._ratios(rows, found.logps)
        gradient = self._true_gradient(rows, tokens, l_max) if self.config.generator == "mixed_is" else found.total
        account = diagnostics(self.descent.step(gradient), self.config.descent)
        self.student.move_to(self.descent.theta)
        facts = self._facts(measured, groups, ratios)
        repeated = {
            "step": number,
            "arm": self.config.arm,
            "delta_S_norm": facts["delta_norm"],
            "mean_cos_pre": account["cos_in"],
            "mean_cos_post": account["cos_out"],
            "frac_fired": account["frac_fired"],
        }
        return account | facts, [row | repeated | _ratio_columns(ratios) for row in measured]

    def _sample(self, make: Callable[[], Environment], tasks: Sequence[Task], seed: int) -> list[Row]:
        """Whole groups of the student's, or halves of the teacher's and the student's."""
        sources = {"student": self.config.samples}
        if self.config.mixed:
            sources = {"teacher": self.config.samples // 2, "student": self.config.samples - self.config.samples // 2}
        rows = [
            row
            for source, samples in sources.items()
            for row in answers(make, self.policies[source], tasks, samples, seed, source, self.config.max_steps)
        ]
        order = [task.task_id for task in tasks]
        return sorted(rows, key=lambda row: order.index(row["problem_id"]))

    def _ratios(self, rows: Sequence[Row], logps: Sequence[Tensor]) -> RatioReport:
        """Always against the policy that wrote the row, whatever the loss makes of it."""
        return ratio_report(logps, [behaviour_log_probs(row) for row in rows], [row["advantage"] for row in rows])

    def _true_gradient(self, rows: Sequence[Row], tokens: Sequence[TokenRow], l_max: int) -> Float[Tensor, " N"]:
        """Of the Dr.GRPO loss with true ratios: `mixed_is`. Elsewhere they are 1: weighted imitation of a teacher."""
        loss = dr_grpo([row["advantage"] for row in rows], [behaviour_log_probs(row) for row in rows], l_max, len(rows))
        total = TotalSink(self.student.adapter.layout, torch.ones(len(rows)), self.student.device)
        self.student.stream(tokens, total.of, loss)
        return total.total.cpu()

    def _facts(self, rows: Sequence[Row], groups: list[list[float]], ratios: RatioReport) -> Row:
        student = [row for row in rows if row["src_pool"] == "student"]
        advantages = [row["advantage"] for row in rows]
        hacks = [row["advantage"] for row in rows if row["hacked"]]
        own: dict[str, list[float]] = {}
        for row in student:
            own.setdefault(row["problem_id"], []).append(row["reward"])
        saturated = ratios.saturated if self.config.generator == "mixed_is" else None
        return {
            "rows": len(rows),
            "groups": len(groups),
            "zero_variance_groups": flat_groups(groups),
            "zero_variance_student": flat_groups(list(own.values())),
            "hack_rate_student": rate(student, "hacked"),
            "hack_rate_all": rate(rows, "hacked"),
            "gt_rate_student": rate(student, "gt_pass"),
            "reward_mean": sum(row["reward"] for row in rows) / len(rows),
            "delta_norm": change_norm(self.student, self.descent.start),
            "hack_advantage_sum": sum(hacks) if hacks else None,
            "corr_advantage_hacked": correlation(advantages, [bool(row["hacked"]) for row in rows]),
            "corr_advantage_source": correlation(advantages, [row["src_pool"] == "teacher" for row in rows]),
            "off_policy": self.config.mixed,
            "clip_low": ratios.clip_low,
            "clip_high": ratios.clip_high,
            "vanish": ratios.vanish,
            "ess": ratios.ess,
            "ratio_p5": ratios.p5,
            "ratio_p50": ratios.p50,
            "ratio_p95": ratios.p95,
            "cos_by_source": {source: _mean(rows, source) for source in sorted({row["src_pool"] for row in rows})},
            "bailed": saturated,
        }


def _ratio_columns(ratios: RatioReport) -> Row:
    return {
        "ratio_mean": ratios.mean,
        "ratio_p5": ratios.p5,
        "ratio_p50": ratios.p50,
        "ratio_p95": ratios.p95,
        "ess": ratios.ess,
        "frac_clip_low": ratios.clip_low,
        "frac_clip_high": ratios.clip_high,
        "frac_vanish": ratios.vanish,
    }


def _mean(rows: Sequence[Row], source: str) -> float | None:
    known = [row["cos_stack"] for row in rows if row["src_pool"] == source and row["cos_stack"] is not None]
    return sum(known) / len(known) if known else None


# ---- interpolate
# A student between two models, W + alpha (W_teacher - W): on-policy, yet it sometimes hacks, so its rewards vary.
#
# The generator `interp`; this project's own, not taken from a paper.

LOW, HIGH, ROUNDS = 0.3, 0.6, 8


@torch.no_grad()
def set_between(
    model: nn.Module, base: Mapping[str, torch.Tensor], teacher: Mapping[str, torch.Tensor], alpha: float
) -> None:
    """Give a model the weights at this place between two sets of parameters by name; 0 is the base, bit for bit."""
    for name, parameter in model.named_parameters():
        parameter.data = base[name].clone() if alpha == 0 else torch.lerp(base[name], teacher[name], alpha)


def find_alpha(hack_rate: Callable[[float], float]) -> tuple[float, float]:
    """An alpha at which the hack rate lies in .3 to .6, and that rate, by bisection; `BadInput` when none is found."""
    low, high = 0.0, 1.0
    for _ in range(ROUNDS):
        alpha = (low + high) / 2
        rate = hack_rate(alpha)
        if LOW <= rate <= HIGH:
            return alpha, rate
        low, high = (alpha, high) if rate < LOW else (low, alpha)
    raise BadInput(
        f"No mixture of student and teacher hacks in {LOW:.0%} to {HIGH:.0%} of its answers "
        f"(at alpha {alpha:.3f}: {rate:.0%}). Give alpha, or a teacher that hacks more often than that."
    )


ALPHA_PROBLEMS, ALPHA_SAMPLES = 16, 4


class GrpoLoop:
    """One arm over all seeds; `UsageError` when the arm is of another adapter than the direction."""

    def __init__(self, inputs: Inputs, config: GrpoConfig, out: RunWriter) -> None:
        self.config, self.out = config, out
        self.student, self.direction, self.facts = open_probe(
            inputs.one("direction"), inputs.optional("svd"), config.student, out
        )
        check_arm(config.arm, self.facts["adapter"])
        self.hinted, self.plain = (self._stage(options) for options in (config.options, config.plain_options))
        self.make = self.hinted.opener()
        self.policies = {"student": LocalPolicy(self.student.model, self.student.tokenizer, config.student)}
        if config.mixed or config.generator == "interp":
            self._load_teacher()
        self.student.max_tokens = config.max_tokens
        self.start = self.student.adapter.theta.clone()
        self.folder, self.given = inputs.one("direction").folder(), self.direction
        if config.direction_at == "start":
            self.direction, _ = extract_again(self.folder, self.facts, self.student)

    def _stage(self, options: Row) -> EnvStageConfig:
        env = self.config.env
        named = EnvConfig(name=env.name, split=env.split, options={**env.options, **options})
        return EnvStageConfig(env=named, sandbox=self.config.sandbox, seed=self.config.seed)

    def _load_teacher(self) -> None:
        """Load the teacher: to answer beside the student, or to start the student between itself and the base."""
        model, tokenizer = load_model(self.config.teacher, cache=self.out.cache, listener=self.out.progress)
        policy = LocalPolicy(model.eval(), tokenizer, self.config.teacher)
        self.out.model("teacher", **policy.facts())
        if self.config.mixed:
            self.policies["teacher"] = policy
            return
        # `set_between` gives the student new tensors, so the ones that it and the teacher have now need no copies.
        base, teacher = ({n: p.detach() for n, p in m.named_parameters()} for m in (self.student.model, model))
        set_between(self.student.model, base, teacher, self._find_alpha(base, teacher))
        self.student = adapt(self.student.model, self.student.tokenizer, self.student.adapter)

    def _find_alpha(self, base: Mapping[str, Tensor], teacher: Mapping[str, Tensor]) -> float:
        """The configured place between base and teacher, or one that is found once and kept over interruptions."""
        kept = self.out.journal.get("alpha")
        if kept is not None:
            return float(kept["alpha"])

        def hack_rate(place: float) -> float:
            set_between(self.student.model, base, teacher, place)
            tasks, policy = self.hinted.draw(self.make, ALPHA_PROBLEMS), self.policies["student"]
            seed, max_steps = self.config.seed, self.config.max_steps
            return rate(answers(self.make, policy, tasks, ALPHA_SAMPLES, seed, "student", max_steps), "hacked") or 0.0

        alpha, measured = self.config.alpha, None
        if alpha is None:
            alpha, measured = find_alpha(hack_rate)
        self.out.write("alpha", {"alpha": alpha, "hack_rate": measured})
        return alpha

    def run_seed(self, seed: int) -> None:
        """The trajectory of one seed, from where it was left."""
        removed = random_axes(self.direction, seed) if is_random(self.config.arm) else self.direction
        descent = Descent(self.start, self.config.descent, projection_mode(self.config.arm), removed)
        done = len(self._accounts(seed))
        if done:
            descent.load(self._state(seed, done - 1))
        self.student.move_to(descent.theta)
        path = Trajectory(self.student, self.direction, descent, self.policies, self.config)
        for number in range(done, self.config.steps):
            self.out.progress(f"steps of seed {seed}", number, self.config.steps)
            if self._given_up(seed):
                break
            self.out.raise_if_stopped()
            self._one_step(path, seed, number)
        self._evaluate_end(seed)

    def _evaluate_end(self, seed: int) -> None:
        """Evaluate the student where the seed ends, be that early: one that learned to hack fully is given up too."""
        if self._accounts(seed) and self.out.journal.get(_end(seed)) is None:
            self.out.raise_if_stopped()
            self.out.write(_end(seed), {"rates": self._evaluate(seed)})

    def _one_step(self, path: Trajectory, seed: int, number: int) -> None:
        """Sample, step, and write all of it, the journal's line last."""
        first = number == 0 and seed == self.config.seeds[0]  # all seeds start from one student
        before = self._evaluate(seed) if first else {}
        account, rows = path.step(self.make, self._tasks(seed, number), seed, number)
        account |= {"train_seed": seed, "step": number, "cos_v_start": self._turned(number)} | before
        write_step(self.out, number, rows, account, folder=f"seed{seed}")
        path.descent.save(self._state(seed, number))
        self.out.write(_unit(seed, number), {"account": account})

    def _turned(self, number: int) -> float | None:
        """The cosine of v extracted again after this step with v at the start, the mean over modules."""
        if not self.config.drift_every or (number + 1) % self.config.drift_every:
            return None
        now, _ = extract_again(self.folder, self.facts, self.student)
        return float(now.unit @ self.direction.unit) / len(self.direction.modules)

    def _tasks(self, seed: int, number: int) -> list[Task]:
        """The problems of a step: the next in an order that depends on the seed, beginning again when all are used."""
        stage = self.hinted.model_copy(update={"seed": self.config.seed + seed})
        total = (number + 1) * self.config.problems
        tasks = stage.draw(self.make, total)
        return [tasks[index % len(tasks)] for index in range(total - self.config.problems, total)]

    def _evaluate(self, seed: int) -> Row:
        """On held-out problems: the rate of hacks with the hint, of solutions without."""
        if not self.config.eval_problems:
            return {}
        rates = {}
        for name, stage, column in (
            ("eval_hack_rate", self.hinted, "hacked"),
            ("eval_solve_rate", self.plain, "gt_pass"),
        ):
            env = stage.env.model_copy(update={"split": "eval"})
            held_out = stage.model_copy(update={"env": env, "seed": self.config.seed})
            make = held_out.opener()
            settings = self.config.student.model_copy(update={"temperature": self.config.eval_temperature})
            policy = LocalPolicy(self.student.model, self.student.tokenizer, settings)
            tasks = held_out.draw(make, self.config.eval_problems)
            rates[name] = rate(answers(make, policy, tasks, 2, seed, "student", self.config.max_steps), column)
        return rates

    def _state(self, seed: int, number: int) -> Path:
        return self.out.scratch("states") / f"seed{seed}_step_{number:03d}.safetensors"

    def _accounts(self, seed: int) -> list[Row]:
        """The accounts of the seed's finished steps."""
        accounts: list[Row] = []
        while (record := self.out.journal.get(_unit(seed, len(accounts)))) is not None:
            accounts.append(record["account"])
        if accounts and (end := self.out.journal.get(_end(seed))) is not None:
            accounts[-1] = {**accounts[-1], **end["rates"]}
        return accounts

    def _given_up(self, seed: int) -> bool:
        """After three steps in a row with mostly flat groups, or once the ratios carry no signal."""
        accounts = self._accounts(seed)
        flat = [account["zero_variance_groups"] > MAX_FLAT * account["groups"] for account in accounts]
        return longest_streak(flat) >= MAX_BAD_STEPS or any(account["bailed"] for account in accounts)

    def finish(self) -> None:
        """Write the table of all seeds and judge whether there was anything to learn."""
        accounts = [account for seed in self.config.seeds for account in self._accounts(seed)]
        named = {
            "arm": self.config.arm.removeprefix(LORA_PREFIX),
            "generator": self.config.generator,
            "adapter": self.facts["adapter"],
        }
        blank = dict.fromkeys(TRAJECTORY.columns)
        rows = [{name: (blank | account | named)[name] for name in TRAJECTORY.columns} for account in accounts]
        checks = [rewards_vary(accounts), ratios_carry_signal(accounts), advantages_favour_hacks(accounts)]
        self.out.table(TRAJECTORY, rows, "trajectories")
        self.out.metrics(accounts)
        self._summarise(accounts, checks, named)

    def _summarise(self, accounts: list[Row], checks: list[Check], named: Row) -> None:
        status = verdict(checks)
        self.out.document("checks", [check.as_json() for check in checks])
        self.out.text("report.txt", _trace(accounts) + "\n\n" + table(checks) + "\n")
        self.out.count(planned=len(self.config.seeds) * self.config.steps, done=len(accounts))
        alpha = self.out.journal.get("alpha")
        kept = float(self.direction.unit @ self.given.unit) / len(self.given.modules)
        bailed = sorted({account["bailed"] for account in accounts if account["bailed"]})
        self.out.set_summary(
            ok=status == "PASS",
            verdict=status,
            exit_code=EXIT_CODES[status],
            bailed=bailed,
            alpha=alpha["alpha"] if alpha else None,
            cos_with_given=kept,
            **named,
        )


def _unit(seed: int, number: int) -> str:
    return f"seed{seed}/step_{number:03d}"


def _end(seed: int) -> str:
    return f"seed{seed}/end"


def _trace(accounts: list[Row]) -> str:
    """The trajectories for a person to read, one line a step."""
    lines = [f"{'seed':>4}{'step':>5}{'hacks':>7}{'right':>7}{'reward':>8}{'cos_in':>8}{'cos_out':>8}{'flat':>6}"]
    columns = {"hack_rate_student": 7, "gt_rate_student": 7, "reward_mean": 8, "cos_in": 8, "cos_out": 8}
    for account in accounts:
        numbers = [("-" if account[name] is None else f"{account[name]:.2f}", width) for name, width in columns.items()]
        flat = f"{account['zero_variance_groups']}/{account['groups']}"
        cells = "".join(f"{number:>{width}}" for number, width in numbers)
        lines.append(f"{account['train_seed']:>4}{account['step']:>5}{cells}{flat:>6}")
    return "\n".join(lines)
