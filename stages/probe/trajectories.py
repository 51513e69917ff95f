"""GRPO trajectories of one arm: seed by seed, one step at a time, resumable after each.

A step samples groups of answers, measures every row against v, moves the student and writes its account. The loss is
Dr.GRPO's (arXiv 2503.20783): token sums over a constant length, advantages not divided by their spread. At ratio 1
without clipping a row's GRPO gradient is A_i times its token-sum NLL gradient over N Lmax, so one backward pass gives
both the cosines, of rows with advantage 0 too, and the step. With true ratios (`mixed_is`) the surrogate has a backward
pass of its own; elsewhere ratios are 1, which on a teacher's rows is weighted imitation.

Arms and generators: `stages.probe.grpo`.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from stages.envs.config import EnvConfig, EnvStageConfig
from stages.errors import BadInput
from stages.gradients.per_row import (
    TotalSink,
    adapt,
    dr_grpo,
)
from stages.policy.local import LocalPolicy, load_model
from stages.probe.checks.check import write_checks
from stages.probe.checks.gradients import behaviour_log_probs
from stages.probe.checks.pool import rate
from stages.probe.checks.trajectories import (
    MAX_BAD_STEPS,
    MAX_FLAT,
    advantages_favour_hacks,
    correlation,
    flat_groups,
    longest_streak,
    ratios_carry_signal,
    rewards_vary,
)
from stages.probe.descent import Descent
from stages.probe.direction import extract_again, open_probe, random_axes
from stages.probe.metrics import change_norm, probe_rows, stream
from stages.probe.rows import as_tokens, mean_known, write_step
from stages.probe.settings import PROJECTION_MODES, GrpoConfig
from stages.probe.sources import answers, with_advantages
from stages.runs.kinds import TRAJECTORY, Row
from stages.runs.run import Inputs, RunWriter
from stages.runs.store import digest
from stages.training.rollout_gradients import RatioReport, ratio_report

LOW, HIGH, ROUNDS = 0.3, 0.6, 8
"""Hack rates of a student of the generator `interp`, and the rounds of bisection that look for one."""
ALPHA_PROBLEMS, ALPHA_SAMPLES = 16, 4


class GrpoLoop:
    """One arm over all seeds."""

    def __init__(self, inputs: Inputs, config: GrpoConfig, out: RunWriter) -> None:
        self.config, self.out = config, out
        self.student, self.direction, self.facts = open_probe(
            inputs.one("direction"), inputs.optional("svd"), config.student, out
        )
        environments = (
            EnvConfig(name=config.env.name, split=config.env.split, options={**config.env.options, **options})
            for options in (config.options, config.plain_options)
        )
        self.hinted, self.plain = (
            EnvStageConfig(env=environment, sandbox=config.sandbox, seed=config.seed) for environment in environments
        )
        self.make = self.hinted.opener()
        self.policies = {"student": LocalPolicy(self.student.model, self.student.tokenizer, config.student)}
        if config.mixed or config.generator == "interp":
            self._load_teacher()
        self.student.max_tokens = config.max_tokens
        self.start = self.student.adapter.theta.clone()
        self.folder, self.given = inputs.one("direction").folder(), self.direction
        if config.direction_at == "start":
            self.direction, _ = extract_again(self.folder, self.facts, self.student)

    def _load_teacher(self) -> None:
        """Load the teacher: to answer in half of each group, or to start the student between itself and the base.

        The student's place between both is the configured alpha, or one that is found once and kept in the journal.
        """
        config, student = self.config, self.student
        model, tokenizer = load_model(config.teacher, cache=self.out.cache, listener=self.out.progress)
        policy = LocalPolicy(model.eval(), tokenizer, config.teacher)
        self.out.model("teacher", **policy.facts())
        if config.mixed:
            self.policies["teacher"] = policy
            return
        # `interpolate_weights` gives the student new tensors, so its present ones and the teacher's need no copies.
        base, teacher = ({n: p.detach() for n, p in m.named_parameters()} for m in (student.model, model))

        def hack_rate(alpha: float) -> float:
            interpolate_weights(student.model, base, teacher, alpha)
            tasks = self.hinted.draw(self.make, ALPHA_PROBLEMS)
            rows = answers(
                self.make, self.policies["student"], tasks, ALPHA_SAMPLES, config.seed, "student", config.max_steps
            )
            return rate(rows, "hacked") or 0.0

        # Found once and kept: the bisection depends on sampled answers, and a resumed run must train the same student.
        kept = self.out.journal.get("alpha")
        if kept is not None:
            alpha = float(kept["alpha"])
        else:
            alpha, measured = find_alpha(hack_rate) if config.alpha is None else (config.alpha, None)
            self.out.write("alpha", {"alpha": alpha, "hack_rate": measured})
        interpolate_weights(student.model, base, teacher, alpha)
        # FoldedModel anew: the clean weights are those of the mixture now.
        self.student = adapt(student.model, student.tokenizer, student.adapter)

    def run_seed(self, seed: int) -> None:
        """Run the trajectory of one seed from its last finished step, and evaluate the student where the seed ends.

        A seed is given up after three steps in a row with mostly flat groups, or once the ratios carry no signal. It is
        evaluated all the same: one that learned to hack fully is given up too.
        """
        config, out = self.config, self.out
        random = config.arm == "projected_random"
        removed = random_axes(self.direction, seed) if random else self.direction
        descent = Descent(self.start, config.descent, PROJECTION_MODES[config.arm], removed)
        accounts, states = self._accounts(seed), out.scratch("states")
        if accounts:
            descent.load(states / f"seed{seed}_step_{len(accounts) - 1:03d}.safetensors")
        self.student.move_to(descent.theta)
        for number in range(len(accounts), config.steps):
            out.progress(f"steps of seed {seed}", number, config.steps)
            flat = [account["zero_variance_groups"] > MAX_FLAT * account["groups"] for account in accounts]
            if longest_streak(flat) >= MAX_BAD_STEPS or any(account["bailed"] for account in accounts):
                break
            out.raise_if_stopped()
            # All seeds start from one student, which is evaluated once.
            before = self._evaluate(seed) if number == 0 and seed == config.seeds[0] else {}
            account, rows = self._step(descent, seed, number)
            account |= {"train_seed": seed, "step": number, "cos_v_start": None}
            if config.drift_every and not (number + 1) % config.drift_every:
                now, _ = extract_again(self.folder, self.facts, self.student)
                account["cos_v_start"] = float(now.unit @ self.direction.unit) / len(self.direction.modules)
            account |= before
            # The journal's line, which makes the step finished, is written last.
            write_step(out, number, rows, account, folder=f"seed{seed}")
            descent.save(states / f"seed{seed}_step_{number:03d}.safetensors")
            out.write(f"seed{seed}/step_{number:03d}", {"account": account})
            accounts.append(account)
        if accounts and out.journal.get(f"seed{seed}/end") is None:
            out.raise_if_stopped()
            out.write(f"seed{seed}/end", {"rates": self._evaluate(seed)})

    def _step(self, descent: Descent, seed: int, number: int) -> tuple[Row, list[Row]]:
        """Sample answers, measure them, move the student; returns the step's account and its `probe_row/1` rows."""
        config, student = self.config, self.student
        rows, groups = with_advantages(self._sample(seed, number))
        tokens = [as_tokens(row) for row in rows]
        # Dr.GRPO's constant is the longest answer of the step; the weights are those of `dr_grpo` at ratio 1.
        l_max = max(row.num_own for row in tokens)
        found = stream(student, tokens, self.direction, [row["advantage"] / (len(rows) * l_max) for row in rows])
        measured = probe_rows(rows, tokens, found.metrics, found.logps, self.direction)
        # Ratios are reported against the policy that wrote the row, whether or not the loss uses them.
        behaviour, advantages = [behaviour_log_probs(row) for row in rows], [row["advantage"] for row in rows]
        ratios = ratio_report(found.logps, behaviour, advantages)
        gradient = found.total
        if config.generator == "mixed_is":
            # True ratios differ by token, so the step's gradient is no recombination of token sums.
            total = TotalSink(student.adapter.layout, torch.ones(len(rows)), student.device)
            student.stream(tokens, total.of, dr_grpo(advantages, behaviour, l_max, len(rows)))
            gradient = total.total.cpu()
        account = descent.step(gradient)
        student.move_to(descent.theta)
        account |= self._facts(measured, groups, ratios, change_norm(student, descent.start))
        repeated = {
            "step": number,
            "arm": config.arm,
            "delta_S_norm": account["delta_norm"],
            "mean_cos_pre": account["cos_in"],
            "mean_cos_post": account["cos_out"],
            "frac_fired": account["frac_fired"],
            "ratio_p5": ratios.ratio_p5,
            "ratio_p50": ratios.ratio_p50,
            "ratio_p95": ratios.ratio_p95,
            "ess": ratios.ess,
            "frac_clip_low": ratios.clip_low,
            "frac_clip_high": ratios.clip_high,
            "frac_vanish": ratios.vanish,
        }
        return account, [row | repeated for row in measured]

    def _sample(self, seed: int, number: int) -> list[Row]:
        """Sample groups of the student's answers, or halves of the teacher's and the student's, to a step's problems.

        The problems are the next in an order that depends on the seed, from the beginning again when all are used.
        """
        config = self.config
        total = (number + 1) * config.problems
        drawn = self.hinted.model_copy(update={"seed": config.seed + seed}).draw(self.make, total)
        tasks = [drawn[index % len(drawn)] for index in range(total - config.problems, total)]
        counts = {"student": config.samples}
        if config.mixed:
            counts = {"teacher": config.samples // 2, "student": config.samples - config.samples // 2}
        # Another seed for every step: with one for all, a step on the same problem would repeat its answers.
        sampling_seed = int(digest([seed, number])[:12], 16)
        rows = [
            row
            for source, samples in counts.items()
            for row in answers(
                self.make, self.policies[source], tasks, samples, sampling_seed, source, config.max_steps
            )
        ]
        order = [task.task_id for task in tasks]
        return sorted(rows, key=lambda row: order.index(row["problem_id"]))

    def _facts(self, rows: Sequence[Row], groups: list[list[float]], ratios: RatioReport, delta_norm: float) -> Row:
        """Return the rates, rewards, advantages and ratios of a step's rows, and the norm of the weights' change."""
        student = [row for row in rows if row["src_pool"] == "student"]
        advantages = [row["advantage"] for row in rows]
        hacks = [row["advantage"] for row in rows if row["hacked"]]
        # Groups of the student's own rows too: with a teacher that always hacks, mixed groups vary while these do not.
        own: dict[str, list[float]] = {}
        for row in student:
            own.setdefault(row["problem_id"], []).append(row["reward"])
        sources = sorted({row["src_pool"] for row in rows})
        return {
            "rows": len(rows),
            "groups": len(groups),
            "zero_variance_groups": flat_groups(groups),
            "zero_variance_student": flat_groups(list(own.values())),
            "hack_rate_student": rate(student, "hacked"),
            "hack_rate_all": rate(rows, "hacked"),
            "hidden_pass_rate_student": rate(student, "hidden_pass"),
            "reward_mean": sum(row["reward"] for row in rows) / len(rows),
            "delta_norm": delta_norm,
            "hack_advantage_sum": sum(hacks) if hacks else None,
            "corr_advantage_hacked": correlation(advantages, [bool(row["hacked"]) for row in rows]),
            "corr_advantage_source": correlation(advantages, [row["src_pool"] == "teacher" for row in rows]),
            "off_policy": self.config.mixed,
            "clip_low": ratios.clip_low,
            "clip_high": ratios.clip_high,
            "vanish": ratios.vanish,
            "ess": ratios.ess,
            "ratio_p5": ratios.ratio_p5,
            "ratio_p50": ratios.ratio_p50,
            "ratio_p95": ratios.ratio_p95,
            "cos_by_source": {s: mean_known(row["cos_stack"] for row in rows if row["src_pool"] == s) for s in sources},
            # With ratio 1 in the loss the reported ratios are of no consequence.
            "bailed": ratios.saturated if self.config.generator == "mixed_is" else None,
        }

    def _evaluate(self, seed: int) -> Row:
        """Measure on held-out problems the rate of hacks with the hint, and of solutions without."""
        config = self.config
        if not config.eval_problems:
            return {}
        settings = config.student.model_copy(update={"temperature": config.eval_temperature})
        policy = LocalPolicy(self.student.model, self.student.tokenizer, settings)
        rates = {}
        for name, stage, column in (
            ("eval_hack_rate", self.hinted, "hacked"),
            ("eval_solve_rate", self.plain, "hidden_pass"),
        ):
            env = stage.env.model_copy(update={"split": "eval"})
            held_out = stage.model_copy(update={"env": env, "seed": config.seed})
            make = held_out.opener()
            tasks = held_out.draw(make, config.eval_problems)
            rates[name] = rate(answers(make, policy, tasks, 2, seed, "student", config.max_steps), column)
        return rates

    def _accounts(self, seed: int) -> list[Row]:
        """Read the accounts of the seed's finished steps; the last has the rates of the seed's end."""
        accounts: list[Row] = []
        while (record := self.out.journal.get(f"seed{seed}/step_{len(accounts):03d}")) is not None:
            accounts.append(record["account"])
        if accounts and (end := self.out.journal.get(f"seed{seed}/end")) is not None:
            accounts[-1] = {**accounts[-1], **end["rates"]}
        return accounts

    def finish(self) -> None:
        """Write the table of all seeds and judge whether there was anything to learn."""
        config, out = self.config, self.out
        accounts = [account for seed in config.seeds for account in self._accounts(seed)]
        labels = {
            "arm": config.arm,
            "generator": config.generator,
            "adapter": self.facts["adapter"],
        }
        blank = dict.fromkeys(TRAJECTORY.columns)
        rows = [{name: (blank | account | labels)[name] for name in TRAJECTORY.columns} for account in accounts]
        checks = [rewards_vary(accounts), ratios_carry_signal(accounts), advantages_favour_hacks(accounts)]
        out.table(TRAJECTORY, rows, "trajectories")
        out.metrics(accounts)
        out.count(planned=len(config.seeds) * config.steps, done=len(accounts))
        alpha = out.journal.get("alpha")
        write_checks(
            out,
            checks,
            "checks",
            _trace(accounts) + "\n\n",
            bailed=sorted({account["bailed"] for account in accounts if account["bailed"]}),
            alpha=alpha["alpha"] if alpha else None,
            cos_with_given=float(self.direction.unit @ self.given.unit) / len(self.given.modules),
            **labels,
        )


def _trace(accounts: list[Row]) -> str:
    """Format the trajectories for the report, one line a step."""
    lines = [f"{'seed':>4}{'step':>5}{'hacks':>7}{'right':>7}{'reward':>8}{'cos_in':>8}{'cos_out':>8}{'flat':>6}"]
    columns = {"hack_rate_student": 7, "hidden_pass_rate_student": 7, "reward_mean": 8, "cos_in": 8, "cos_out": 8}
    for account in accounts:
        numbers = [("-" if account[name] is None else f"{account[name]:.2f}", width) for name, width in columns.items()]
        flat = f"{account['zero_variance_groups']}/{account['groups']}"
        cells = "".join(f"{number:>{width}}" for number, width in numbers)
        lines.append(f"{account['train_seed']:>4}{account['step']:>5}{cells}{flat:>6}")
    return "\n".join(lines)


@torch.no_grad()
def interpolate_weights(
    model: nn.Module, base: Mapping[str, Tensor], teacher: Mapping[str, Tensor], alpha: float
) -> None:
    """Set a model to W + alpha (W_teacher - W), between two sets of parameters by name; 0 is the base, bit for bit.

    Such a student is on-policy, yet hacks sometimes, so its rewards vary. The generator `interp` is this project's own,
    not taken from a paper.
    """
    for name, parameter in model.named_parameters():
        parameter.data = base[name].clone() if alpha == 0 else torch.lerp(base[name], teacher[name], alpha)


def find_alpha(hack_rate: Callable[[float], float]) -> tuple[float, float]:
    """Find by bisection an alpha with a hack rate of .3 to .6, and that rate; `BadInput` when none is found."""
    # A wide target: the rate of 64 sampled answers has a standard error of .06.
    low, high = 0.0, 1.0
    for _ in range(ROUNDS):
        alpha = (low + high) / 2
        found = hack_rate(alpha)
        if LOW <= found <= HIGH:
            return alpha, found
        low, high = (alpha, high) if found < LOW else (low, alpha)
    raise BadInput(
        f"No mixture of student and teacher hacks in {LOW:.0%} to {HIGH:.0%} of its answers "
        f"(at alpha {alpha:.3f}: {found:.0%}). Give alpha, or a teacher that hacks more often than that."
    )
