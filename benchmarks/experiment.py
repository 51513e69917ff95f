"""Registered experiments: one driver, a file of settings for each (benchmarks/experiments/NAME.toml).

    python benchmarks/experiment.py NAME [run [ARM ...] | seed N ... | tune | pilot | preset | result]

`./dev experiment NAME` is `run`: the rates are tuned, then all arms are trained and evaluated; typed again it goes on
where it stopped, as each training is a unit of work. It keeps its runs in artifacts/experiments/NAME, writes the
outcomes of all rollouts into docs/experiments/NAME.parquet, and `result`, which benchmarks/NAME.py defines, computes
every published number from that table. ARM: arms that are dropped, as a registration allows before the evaluation.
`preset` prints the chain.

A file of settings holds `collection`, stages that are done once for each collection of pairs; `train`, settings that
all arms share; `arms` with what each is in words, which stages of its collection it reads, and its own settings; and
`evaluate`. `[tuning]` names learning rates: with `arm` that arm is trained `seeds` times at each, on collections of
their own, and all arms take the rate that passes most (`tune` stops there); without it every arm takes its own, by one
training each. Without the table all take the rate of `train`.

An arm with `rounds` repeats the collection and its training, each round with the student of the round before; `collect`
and `by_round` are settings of its collections. An arm with `tokens_of` imitates as many tokens as that arm trains on
with the same seed: its pairs a step are chosen so. `pilot` runs one seed of all arms, small, on training tasks.

Without tuning an experiment is run seed by seed: all arms of a seed are trained, play the held-out tasks, and the
outcomes are kept unread in docs/experiments/NAME/, so that a machine that is lost takes one seed with it. `seed N ...`
runs these alone, for processes or machines that share the work; `run` does those that are missing and pools all.
"""

import ctypes
import importlib
import json
import os
import resource
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import records

from composer_stages.evaluation.arm_comparison import EvalQuestion, compare
from composer_stages.evaluation.difference import Difference
from composer_stages.evaluation.inference import holm
from composer_stages.evaluation.outcomes import (
    AT_ZERO,
    KEPT,
    PASSED,
    PROTOCOL,
    START,
    items_table,
    select_arm,
    task_mean,
)
from composer_stages.evaluation.verdict import EvalVerdict
from composer_stages.evaluation.words import points
from composer_stages.policy.base import PolicyConfig
from composer_stages.policy.local import open_tokenizer
from composer_stages.runs import store
from composer_stages.runs.kinds import EVAL_ITEM, PAIR, ROLLOUT, STEP, TASK
from composer_stages.runs.run import Run

ROOT = Path(__file__).parents[1]
TUNING_SEED = 2_000_003
"""Of tuning tasks and of tuning collections, which nothing else counts up to."""
COLLECTION_SEED = 100
USED = "processor.jsonl"
"""Processor seconds of each sitting."""
PR_SET_CHILD_SUBREAPER, ENDING_S = 36, 10.0
OF_DRIVER = ("words", "from", "rounds", "by_round", "collect", "tokens_of")
"""Keys of an arm that are no settings of its training."""
PILOT_TASKS, PILOT_STEPS, PILOT_PROMPTS = 8, 3, 2
LAST = 3
"""Steps at the beginning and at the end of a training whose means are kept."""
COURSE = {"reward": "reward", "entropy": "entropy", "tokens": "completions/mean_length"}
COLUMNS = ("arm", "train_seed", "pair_set", "task_id", "family", "unit", "sample_idx", "passed", "protocol_ok")


@dataclass(frozen=True)
class Training:
    """One training: its arm, its label in the evaluation, its seed, its collection, and its learning rate."""

    arm: str
    seed: int
    collection: int
    rate: float | None = None
    label: str = ""

    @property
    def title(self) -> str:
        """Return its name in the chain."""
        return f"{self.label or self.arm}-{self.seed}"


@dataclass(frozen=True)
class Experiment:
    """A registered design. columns: of the items that are published."""

    name: str
    registration: str
    seeds: int
    collections: int
    collection: Sequence[Mapping[str, Any]]
    train: Mapping[str, Any]
    arms: Mapping[str, Mapping[str, Any]]
    evaluate: Mapping[str, Any]
    tuning: Mapping[str, Any] = field(default_factory=dict)
    columns: Sequence[str] = COLUMNS
    collection_seed: int = COLLECTION_SEED
    first_seed: int = 0
    at_once: bool = True
    """Whether trainings run side by side, and two processes evaluate."""
    limit: Mapping[str, float] = field(default_factory=dict)
    """`hours` of processors until which another seed is begun, and the `seeds` that are trained in any case."""
    beside: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Trainings that are measured and not evaluated, for each seed: like arms."""

    @classmethod
    def named(cls, name: str) -> "Experiment":
        """Read the settings of an experiment."""
        path = Path(__file__).parent / "experiments" / f"{name}.toml"
        return cls(name=name, **tomllib.loads(path.read_text("utf-8")))

    @property
    def artifacts(self) -> Path:
        """Return the folder of its runs."""
        return ROOT / "artifacts" / "experiments" / self.name

    @property
    def document(self) -> Path:
        """Return its page; the table of outcomes and the record of the tuning have the same stem."""
        return ROOT / "docs" / "experiments" / f"{self.name}.md"

    @property
    def items(self) -> Path:
        """Return the table of outcomes."""
        return self.document.with_suffix(".parquet")

    @property
    def figure(self) -> Path:
        """Return the figure of the arms."""
        return ROOT / "docs" / "images" / f"{self.name}.svg"

    @cached_property
    def chosen(self) -> dict[str, float]:
        """Return the learning rate of each arm that the tuning chose."""
        found: dict[str, float] = store.read_json(self.document.with_suffix(".json"))["chosen"]
        return found

    def trainings(self, arms: Iterable[str], rates: Mapping[str, float] | None = None) -> list[Training]:
        """Return all trainings, seed after seed, so that what is finished early is whole seeds."""
        each = self.seeds // self.collections
        return [
            Training(arm, self.first_seed + number, number // each, rates[arm] if rates else None)
            for number in range(self.seeds)
            for arm in arms
        ]

    def preset(
        self,
        trainings: Sequence[Training],
        question: Mapping[str, Any] | None = None,
        *,
        evaluated: bool = True,
        per_step: Mapping[int, int] | None = None,
    ) -> str:
        """Return a chain as TOML: the collections that are read, the trainings, one evaluation.

        question: settings of the evaluation over the experiment's own. per_step: pairs a step by seed, where an arm has
        `tokens_of`.
        """
        parallel = {"parallel": "train"} if self.at_once else {}
        lines = [f"about = {toml(f'The registered experiment docs/experiments/{self.name}.md.')}", "to_the_end = true"]

        def entry(stage: str, name: str, reads: Iterable[str], config: Mapping[str, Any], **more: Any) -> None:
            given = {"stage": stage, "name": name, "from": list(reads), **more, "config": config}
            lines.append("\n[[stage]]\n" + "\n".join(f"{key} = {toml(value)}" for key, value in given.items()))

        for number in sorted({one.collection for one in trainings}):
            for part in self.collection:
                seeded = {"seed": self.collection_seed + number} if part["stage"] == "collect" else {}
                reads = [f"{other}-{number}" for other in part.get("from", ())]
                config = {**part.get("config", {}), **seeded}
                entry(part["stage"], f"{part['stage']}-{number}", reads, config, **parallel)
        for one in trainings:
            own = dict(self.arms.get(one.arm) or self.beside[one.arm])
            reads = [f"{stage}-{one.collection}" for stage in own.get("from", ())]
            rate = {} if one.rate is None else {"learning_rate": one.rate}
            config = {**self.train, **{key: value for key, value in own.items() if key not in OF_DRIVER}}
            config |= {"arm": one.label or one.arm, "seed": one.seed}
            config["optimisation"] = {**self.train["optimisation"], **own.get("optimisation", {}), **rate}
            if per_step and "tokens_of" in own:
                config["pairs"] = {"per_step": per_step[one.seed]}
            if "rounds" not in own:
                entry("train", one.title, reads, config, **parallel)
                continue
            rounds = {"rounds": own["rounds"], **parallel}
            for part in self.collection:
                name, reads = f"{part['stage']}-{one.title}", [f"{other}-{one.title}" for other in part.get("from", ())]
                if part["stage"] != "collect":
                    entry(part["stage"], name, reads, part.get("config", {}), **rounds)
                    continue
                seeded = {**part["config"], **own["collect"], "seed": one.seed}
                entry("collect", name, reads, seeded, before=[one.title], by_round=own["by_round"], **rounds)
            so_far = [f"extract-pairs-{one.title}"]
            entry("train", one.title, [], config, before=[one.title], so_far=so_far, **rounds)
        reads = [f"{one.title}-{rounds}" if (rounds := self.rounds(one.arm)) else one.title for one in trainings]
        if evaluated:
            on = {"on": "processes:2"} if self.at_once else {}
            reads = [name for name, one in zip(reads, trainings, strict=True) if one.arm in self.arms]
            entry("evaluate", "evaluate", reads, {**self.evaluate, **(question or {})}, **on)
        return "\n".join(lines) + "\n"

    def rounds(self, arm: str) -> int:
        """Return the number of rounds of an arm, 0 for one that has none."""
        return int(self.arms.get(arm, {}).get("rounds", 0))

    # --- tuning

    def tuning_preset(self, rates: Sequence[float]) -> str:
        """Return the chain that tunes: trainings at each rate on collections of their own, and on training tasks."""
        first = TUNING_SEED - COLLECTION_SEED
        trainings = [
            Training(self.tuning["arm"], seed, first + seed, rate, f"{rate:g}")
            for seed in range(self.tuning["seeds"])
            for rate in rates
        ]
        labels = [one.label for one in trainings]
        question = {"env": {**self.evaluate["env"], "split": "train"}, "seed": TUNING_SEED - 1, "with_start": False}
        question |= {"tasks": self.tuning["tasks"], "baseline": labels[0], "treatment": labels[1], "control": labels[2]}
        return self.preset(trainings, question)

    def tune(self) -> dict[str, float]:
        """Run the tuning where one rate is for all arms, further where the best is at an edge; return it by arm.

        What was tried is kept beside the page.
        """
        rates = sorted(self.tuning["rates"])
        while True:
            self.run_chain(self.tuning_preset(rates), self.artifacts / "tuning")
            items = items_table(newest(self.artifacts / "tuning" / "evaluate").rows(EVAL_ITEM))
            tried = {rate: by_seed(select_arm(items, f"{rate:g}{AT_ZERO}")) for rate in rates}
            means = {rate: fmean(found.values()) for rate, found in tried.items()}
            if len({*means.values()}) == 1:
                sys.exit(f"All rates pass {100 * means[rates[0]]:.1f} % of the tuning tasks, so none can be chosen.")
            best = max(rates, key=means.__getitem__)
            if best not in (rates[0], rates[-1]):
                break
            rates = sorted([*rates, best / 2 if best == rates[0] else best * 2])
        kept = {
            "rates": {f"{rate:g}": found for rate, found in tried.items()},
            "chosen": dict.fromkeys(self.arms, best),
        }
        store.write_json(self.document.with_suffix(".json"), kept)
        return self.chosen

    # --- running

    def run(self, left_out: Sequence[str]) -> None:
        """Run or resume the experiment, without the arms that are left out, and write the table of outcomes."""
        arms = [arm for arm in self.arms if arm not in left_out]
        if not self.tuning:
            self.run_seeds([*arms, *self.beside])
            return
        if "arm" in self.tuning:
            self.run_chain(self.preset(self.trainings(arms, self.tune())), self.artifacts)
            record = store.read_json(self.document.with_suffix(".json")) | self.record(self.artifacts)
            store.write_json(self.document.with_suffix(".json"), record)
        elif left_out:  # all arms have been tuned
            self.run_chain(self.preset(self.trainings(arms, self.tuned_apart())), self.artifacts)
        else:
            rates = ",".join(f"{rate:g}" for rate in self.tuning["rates"])
            self.run_chain(
                self.preset(self.trainings(arms)), self.artifacts, "--tune", f"optimisation.learning_rate={rates}"
            )
            self.tuned_apart()
        write_outcomes(self.outcomes(self.artifacts), self.items)

    def run_seeds(self, arms: Sequence[str]) -> None:
        """Run the seeds whose outcomes are not kept yet, then pool those of all.

        A seed beyond those of the limit is begun only while all kept ones have used no more hours than it says.
        """
        for seed in range(self.first_seed, self.first_seed + self.seeds):
            hours = sum(store.read_json(path)["processor_hours"] for path in self.parts.glob("*.json"))
            if self.limit and seed - self.first_seed >= self.limit["seeds"] and hours > self.limit["hours"]:
                break
            if not self.part(seed).exists():
                self.run_seed(arms, seed)
        records = [store.read_json(path) for path in sorted(self.parts.glob("*.json"))]
        pooled = {"trainings": [one for record in records for one in record["trainings"]]}
        pooled |= {"processor_hours": sum(record["processor_hours"] for record in records)}
        pooled |= {"commits": sorted({commit for record in records for commit in record["commits"]})}
        store.write_json(self.document.with_suffix(".json"), pooled)
        write_outcomes(pa.concat_tables(map(pq.read_table, sorted(self.parts.glob("*.parquet")))), self.items)

    def run_seed(self, arms: Sequence[str], seed: int) -> None:
        """Run or resume all of one seed and keep its outcomes; the control before training is played by the first."""
        folder = self.artifacts / f"seed-{seed}"
        self.train_seed(arms, seed, folder, {"with_start": seed == self.first_seed})
        self.parts.mkdir(exist_ok=True)
        store.write_json(self.part(seed).with_suffix(".json"), self.record(folder))
        write_outcomes(self.outcomes(folder), self.part(seed))

    def train_seed(self, arms: Sequence[str], seed: int, artifacts: Path, question: Mapping[str, Any]) -> None:
        """Train first the arms of a seed that give others their number of tokens, then all, and evaluate them."""
        own = [one for one in self.trainings(arms) if one.seed == seed]
        per_step: dict[int, int] = {}
        if self.giving():
            first = [one for one in own if one.arm in self.arms and "tokens_of" not in self.arms[one.arm]]
            self.run_chain(self.preset(first, evaluated=False), artifacts)
            per_step[seed] = self.pairs_per_step(seed, artifacts)
        self.run_chain(self.preset(own, question, per_step=per_step), artifacts)

    @property
    def parts(self) -> Path:
        """Return the folder of the outcomes of seeds that are run one by one."""
        return self.document.with_suffix("")

    def part(self, seed: int) -> Path:
        """Return the table of the outcomes of a seed; the record of its trainings has the same stem."""
        return self.parts / f"{seed}.parquet"

    def record(self, artifacts: Path) -> dict[str, Any]:
        """Return what the trainings in a folder of artifacts recorded, with processor hours and commits."""
        commits = {Run(path).manifest.code["commit"] for path in (artifacts / "train").glob("2*")}
        record = {"trainings": self.courses(artifacts), "processor_hours": hours_used(artifacts)}
        return record | {"commits": sorted(commits)}

    def outcomes(self, artifacts: Path) -> pa.Table:
        """Return the outcomes of the newest evaluation in a folder of artifacts, in the columns that are published."""
        rows = newest(artifacts / "evaluate", seed=self.evaluate["seed"]).rows(EVAL_ITEM)
        return pa.Table.from_pylist([{name: row[name] for name in self.columns} for row in rows])

    def giving(self) -> set[str]:
        """Return the arms that give others their number of tokens."""
        return {own["tokens_of"] for own in self.arms.values() if "tokens_of" in own}

    def pairs_per_step(self, seed: int, artifacts: Path) -> int:
        """Return how many pairs a step make the tokens of an imitating arm those of the arm that gives them.

        By the mean length of the chosen answers of the seed's own collection, in tokens with the end.
        """
        (arm,) = self.giving()
        like = newest(artifacts / "train", arm=arm, seed=seed)
        samples = self.collection[0]["config"]["samples"]
        rollouts = newest(artifacts / "collect", seed=self.collection_seed + seed - self.first_seed, samples=samples)
        pairs = next(
            run
            for run in map(Run, sorted((artifacts / "extract-pairs").glob("2*"), reverse=True))
            if run.manifest.inputs["rollouts"][0].content == rollouts.manifest.content
        )
        tokenizer = open_tokenizer(PolicyConfig(model=self.train["policy"]["model"]), listener=lambda *what: None)
        lengths = [len(tokenizer(pair["chosen"])["input_ids"]) + 1 for pair in pairs.rows(PAIR)]
        return max(round(tokens_trained(like) / self.train["optimisation"]["steps"] / fmean(lengths)), 1)

    def pilot(self) -> None:
        """Run one seed of all arms in a few steps on tasks that nothing else uses; evaluate it on training tasks."""

        def small(own: Mapping[str, Any], **sizes: int) -> dict[str, Any]:
            return {**own, "optimisation": {**own.get("optimisation", {}), **sizes}}

        first, *others = self.collection
        alone = replace(
            self,
            seeds=1,
            collections=1,
            first_seed=TUNING_SEED,
            collection_seed=TUNING_SEED,
            collection=[{**first, "config": {**first["config"], "tasks": PILOT_TASKS}}, *others],
            train={**small(self.train, steps=PILOT_STEPS, prompts_per_step=PILOT_PROMPTS), "tasks": PILOT_TASKS},
            arms={arm: small(own, steps=1) if "rounds" in own else own for arm, own in self.arms.items()},
        )
        question = {"env": {**self.evaluate["env"], "split": "train"}, "seed": TUNING_SEED - 1, "tasks": PILOT_TASKS}
        alone.train_seed([*self.arms, *self.beside], TUNING_SEED, self.artifacts / "pilot", question)

    def courses(self, artifacts: Path) -> list[dict[str, Any]]:
        """Return what each training recorded of itself: means of its first and last steps, tokens, pairs, collapse.

        pairs_other: pairs from tasks that are no part of its curriculum; families_other: the families of these.
        """
        found = []
        for run in map(Run, sorted((artifacts / "train").glob("2*"))):
            if run.manifest.status != "complete":
                continue
            steps = list(map(json.loads, (run.path / "metrics.jsonl").read_text().splitlines()))
            row: dict[str, Any] = {"arm": run.manifest.config["arm"], "seed": run.manifest.config["seed"]}
            for name, part in (("first", steps[:LAST]), ("last", steps[-LAST:])):
                # Without GRPO's loss there is no entropy.
                known = {what: key for what, key in COURSE.items() if all(key in step for step in part)}
                row |= {f"{what}_{name}": fmean(step[key] for step in part) for what, key in known.items()}
            read = {slot: [Run(Path(ref.path)) for ref in refs] for slot, refs in run.manifest.inputs.items()}
            mixed = {task["task_id"] for of_tasks in read.get("curriculum", ()) for task in of_tasks.rows(TASK)}
            pairs = [pair for of_pairs in read.get("pairs", ()) for pair in of_pairs.rows(PAIR)]
            other = [pair for pair in pairs if mixed and pair["task_id"] not in mixed]
            # The tasks of an imitating arm are those of its collection.
            sources = [Run(Path(of.manifest.inputs["rollouts"][0].path)) for of in read.get("pairs", ())] or [run]
            tasks = sorted({one["task_id"] for of in sources for one in of.scan(ROLLOUT).rows(["task_id"])})
            row |= {"tasks": len(tasks), "task_set": store.digest(tasks)[:12], "round": len(read.get("pairs", ()))}
            row |= {"tokens_trained": tokens_trained(run)}
            row |= {key: value for step in steps for key, value in step.items() if key.startswith("gradient/cosine")}
            row |= {"pairs": len(pairs), "pairs_other": len(other)}
            row |= {"families_other": sorted({pair["family"] for pair in other})}
            row |= {"collapsed": run.manifest.summary.get("collapsed", ""), "num_tokens": steps[-1]["num_tokens"]}
            found.append({**row, "minutes": sum(step["step_time"] for step in steps) / 60})
        return found

    def tuned_apart(self) -> dict[str, float]:
        """Keep the record of `composer run --tune`; return the rate of each arm."""
        (record,) = (self.artifacts / "tuning").glob("*.json")
        self.document.with_suffix(".json").write_bytes(record.read_bytes())
        return self.chosen

    def run_chain(self, preset: str, artifacts: Path, *more: str) -> None:
        """Run or resume a chain in a folder of artifacts; exit where it fails, and not for its verdict."""
        artifacts.mkdir(parents=True, exist_ok=True)
        path = artifacts / "preset.toml"
        path.write_text(preset)
        words = ["run", "--preset", str(path), "--resume", "--artifacts", str(artifacts), *more]
        adopt()
        before = processor_seconds()
        code = subprocess.run([sys.executable, "-m", "composer_cli", *words]).returncode
        with (artifacts / USED).open("a") as lines:  # of this sitting, for the limit of a registration
            lines.write(json.dumps({"seconds": round(processor_seconds() - before), "code": code}) + "\n")
        if code not in (0, 1, 3):  # the verdicts
            sys.exit(code)

    # --- results

    def read_items(self, table: Path | None = None) -> pa.Table:
        """Return the table of outcomes, the published one by default, as items of an evaluation."""
        rows = pq.read_table(table or self.items).to_pylist()
        return items_table({"error_type": None if row["passed"] is not None else "lost", **row} for row in rows)

    def outcome_lines(self, items: pa.Table, title: str, end: str = "") -> list[str]:
        """Return a table of every recorded outcome of the arms whose names have this end, and its title."""
        heads = ["passed and protocol kept", "passed", "protocol kept", "cut", "tokens", "errors", "trainings"]
        lines = [f"| {title} | trained by | {' | '.join(heads)} |", "| --- " * (2 + len(heads)) + "|"]
        for arm in (START, *self.arms):
            rows = select_arm(items, arm + end)
            if not len(rows):
                continue
            rates = [task_mean(rows, outcome) or 0.0 for outcome in (KEPT, PASSED, PROTOCOL)] + [cut_share(rows)]
            counts = [f"{pc.mean(rows['sampled_tokens']).as_py():.1f}", pc.count(rows["error_type"]).as_py()]
            cells = [*(f"{100 * rate:.1f} %" for rate in rates), *counts, len(pc.unique(rows["train_seed"]))]
            lines.append(f"| {arm} | {self.words(arm)} | {' | '.join(map(str, cells))} |")
        return lines

    def course_lines(self, courses: Sequence[Mapping[str, Any]]) -> list[str]:
        """Return a table of what the trainings recorded of themselves, means over the trainings of an arm.

        Of a training in rounds: the first one's begin, the last one's end and pairs, and tokens and minutes of all.
        """
        heads = ["reward, first and last steps", "entropy, nats", "tokens an answer", "tokens in all"]
        heads += ["pairs", "minutes"]
        lines = [f"| training | {' | '.join(heads)} |", "| --- " * (1 + len(heads)) + "|"]
        for arm in self.arms:
            if own := [_whole_course(rounds) for rounds in rounds_by_seed(courses, arm)]:
                mean = {name: fmean(one[name] for one in own) for name, value in own[0].items() if type(value) is float}
                ends = [[mean.get(f"{what}_{end}") for end in ("first", "last")] for what in ("reward", "entropy")]
                both = ["-" if None in pair else "{:.2f} to {:.2f}".format(*pair) for pair in ends]
                tokens = f"{mean['tokens_first']:.1f} to {mean['tokens_last']:.1f}"
                pairs = f"{fmean(one['pairs'] for one in own):.0f}"
                cells = [*both, tokens, f"{mean['num_tokens']:,.0f}", pairs, f"{mean['minutes']:.1f}"]
                lines.append(f"| {arm} | {' | '.join(cells)} |")
        return lines

    def claim(self, text: str, found: Difference) -> records.Claim:
        """Return the record of a difference in points, under this registration."""
        return records.measured(
            f"{text}, {found.num_seeds} trainings of each",
            100 * found.estimate,
            (100 * found.low, 100 * found.high),
            n=found.num_tasks,
            unit="points",
            registration=self.registration or None,
        )

    def arm_lines(self, verdict: EvalVerdict) -> list[str]:
        """Return a table of the arms."""
        lines = ["| arm | trained by | pass@1 | 95 % interval | trainings |", "| --- | --- | --- | --- | --- |"]
        for arm in verdict.arms:
            rate = "-" if arm.pass_rate is None else f"{100 * arm.pass_rate:.1f} %"
            between = f"{100 * arm.low:.1f} to {100 * arm.high:.1f}"
            lines.append(f"| {arm.arm} | {self.words(arm.arm)} | {rate} | {between} | {len(arm.train_seeds)} |")
        return lines

    def words(self, arm: str) -> str:
        """Return what an arm is trained by."""
        return self.arms[arm]["words"] if arm in self.arms else "before training"


def hours_used(artifacts: Path) -> float:
    """Return the processor hours of all sittings that are recorded in a folder of artifacts."""
    used = [json.loads(line) for path in artifacts.rglob(USED) for line in path.read_text().splitlines()]
    return float(sum(one["seconds"] for one in used)) / 3600


def write_outcomes(table: pa.Table, path: Path) -> None:
    """Write a table of outcomes as it is published."""
    pq.write_table(table, path, compression="zstd", use_dictionary=True)


def tokens_trained(run: Run) -> int:
    """Return the tokens of answers in a training's losses: those that it sampled, or those that it imitated."""
    weights = run.manifest.config["weights"]
    if weights["grpo"] or weights["opd"]:
        return sum(row["completion_tokens"] for row in run.scan(STEP).rows(["completion_tokens"]))
    steps = map(json.loads, (run.path / "metrics.jsonl").read_text().splitlines())
    return round(sum(step.get("sft/denominator", 0) for step in steps))


def adopt() -> None:
    """Let processes whose parents have ended become children of this one: trainings outlive the command."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def processor_seconds() -> float:
    """Return what the processes below this one have used that have ended, those that end within seconds among them."""
    end = time.monotonic() + ENDING_S
    with suppress(ChildProcessError):
        while time.monotonic() < end:
            if os.waitpid(-1, os.WNOHANG) == (0, 0):
                time.sleep(0.1)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def newest(stage: Path, **settings: Any) -> Run:
    """Return the newest run in the folder of a stage that has these settings."""
    runs = (Run(folder) for folder in sorted(stage.glob("2*"), reverse=True))
    return next(run for run in runs if settings.items() <= run.manifest.config.items())


def by_seed(items: pa.Table) -> dict[str, float]:
    """Return the share of tasks that each training of one arm passes with the protocol kept, by its seed."""
    seeds = sorted({*items["train_seed"].to_pylist()})
    return {str(seed): task_mean(items.filter(pc.equal(items["train_seed"], seed)), KEPT) or 0.0 for seed in seeds}


def cut_share(rows: pa.Table) -> float:
    """Return the share of answers that reached the limit of tokens."""
    return float(pc.mean(pc.equal(pc.fill_null(rows["terminated_by"], ""), "max_tokens").cast("float64")).as_py())


def put(document: Path, lines: Sequence[str]) -> None:
    """Write lines between the marks of a page's result."""
    begin, end = "<!-- result -->\n", "<!-- end of result -->"
    before, _, rest = document.read_text().partition(begin)
    document.write_text(before + begin + "\n".join(lines) + "\n" + end + rest.partition(end)[2])


def rounds_by_seed(courses: Sequence[Mapping[str, Any]], arm: str) -> list[list[Mapping[str, Any]]]:
    """Return what each training of an arm recorded, one row for each of its rounds, in order."""
    found: dict[int, list[Mapping[str, Any]]] = {}
    for one in sorted((one for one in courses if one["arm"] == arm), key=lambda one: one.get("round", 0)):
        found.setdefault(one["seed"], []).append(one)
    return [*found.values()]


def _whole_course(rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what a training recorded over all of its rounds."""
    begin = {name: value for name, value in rounds[0].items() if name.endswith("_first")}
    sums = {name: sum(one[name] for one in rounds) for name in ("num_tokens", "minutes")}
    return {**rounds[-1], **begin, **sums}


def comparison_lines(title: str, found: Mapping[str, Difference]) -> list[str]:
    """Return a table of differences with their p-values after Holm's correction over them."""
    lines = [f"| {title} | difference | p after Holm |", "| --- | --- | --- |"]
    for (name, difference), p in zip(found.items(), holm([d.p_value for d in found.values()]), strict=True):
        lines.append(f"| {name} | {points(difference)} | {p:.3g} |")
    return lines


def beside(*told: tuple[Mapping[str, str], str]) -> str:
    """Return README's table of the experiments, a column for each, with what to know about them below it."""
    rows = {
        "": "passes, trained by",
        "start": "before training",
        "A": "A: GRPO",
        "C": "C: GRPO, and imitation of the actions that teachers' disagreement chose",
        "B": "B: as C, and the preference pairs",
        "C − A": "**C − A**",
        "B − A": "**B − A**",
        "B − C": "**B − C**",
    }
    lines = ["| " + " | ".join([title, *(cells[key] for cells, _ in told)]) + " |" for key, title in rows.items()]
    lines.insert(1, "| --- " * (1 + len(told)) + "|")
    return "\n".join([*lines, "", " ".join(caveat for _, caveat in told)])


def difference_of(
    items: pa.Table, pairs: Iterable[tuple[str, str]], question: EvalQuestion, *, power: bool = True
) -> dict[str, Difference]:
    """Return the differences of pairs of arms, by their names; without those of arms that were dropped.

    power: whether to simulate what such experiments would find, where nothing is decided.
    """
    outcome = None if power else question.outcome
    found = {f"{one} − {other}": compare(items, one, other, question, outcome) for one, other in pairs}
    return {name: both.difference for name, both in found.items() if both}


def toml(value: Any) -> str:
    """Return a value as TOML, tables inline."""
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{json.dumps(key)} = {toml(one)}" for key, one in value.items()) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(toml, value)) + "]"
    return json.dumps(value)


def main(name: str, word: str = "run", *arms: str) -> None:
    """Do what the command line asks for."""
    experiment = Experiment.named(name)
    if word == "preset":
        print(experiment.preset(experiment.trainings(experiment.arms)))
        return
    if word in ("tune", "pilot"):
        print(getattr(experiment, word)())
        return
    if word == "run":
        experiment.run(arms)
    if word == "seed":
        for seed in map(int, arms):
            experiment.run_seed([*experiment.arms, *experiment.beside], seed)
        return
    importlib.import_module(name.replace("-", "_")).result()


if __name__ == "__main__":
    main(*sys.argv[1:])
