"""Does trace-replay preference training add at least 2 points over GRPO, and is it more than imitation? Registered.

docs/experiments/teacher-pairs.md states hypotheses, arms, decision rule and power, and was committed before the
evaluation. `./dev experiment teacher-pairs` runs it (about two and a half hours on two idle cores) and resumes where it
stopped; it keeps its runs in artifacts/experiments/teacher-pairs. The outcomes of all rollouts are then in
docs/experiments/teacher-pairs.parquet, a row for each arm, training seed and task, from which

    python benchmarks/teacher_pairs.py result

computes every published number again: the record, the tables in the document, and the figure. `power` simulates what
the design finds.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import records
from scipy.special import ndtri, stdtrit

from stages.envs import SamplingUnit, sampling_unit
from stages.evaluation.arm_settings import ArmDifference, settings_differences
from stages.evaluation.inference import holm, top_error
from stages.evaluation.outcomes import items_table
from stages.evaluation.report import arms_chart
from stages.evaluation.verdict import EvalQuestion, EvalVerdict, PairedDifference, compare, decide, points
from stages.runs.kinds import EVAL_ITEM
from stages.runs.run import Run

ROOT = Path(__file__).parents[1]
ARTIFACTS = ROOT / "artifacts" / "experiments" / "teacher-pairs"
DOCUMENT = ROOT / "docs" / "experiments" / "teacher-pairs.md"
TUNING = DOCUMENT.with_suffix(".json")
"""The learning rates that were tried and chosen, as `composer run --tune` wrote them."""
ITEMS, FIGURE = DOCUMENT.with_suffix(".parquet"), ROOT / "docs" / "images" / "teacher-pairs.svg"
REGISTRATION = "ee36b55"
"""The commit of the document as it was before the evaluation; a result without it is exploratory."""

COLLECTIONS, SEEDS_EACH, TASKS, EVAL_SEED = 6, 4, 360, 7
RATES = "1e-4,2e-4,4e-4,8e-4"
ARMS = {
    "A": "",
    "B": "dpo = 1.0, sft = 2.0",
    "C": "sft = 2.0",
    "E": "sdpo = 0.5, dpo = 1.0, sft = 2.0",
    "F": "grpo = 0.0, sft = 2.0",
    "D": "sdpo = 0.5",
}
"""The weights of each arm, GRPO's being 1 where it is not given, in the order of training."""
WORDS = {
    "A": "GRPO",
    "B": "GRPO + DPO + SFT on the chosen",
    "C": "GRPO + SFT on the chosen",
    "D": "GRPO + hint self-distillation",
    "E": "GRPO + hints + DPO + SFT",
    "F": "SFT on the chosen alone",
    "start": "before training",
}
SECONDARY = (("D", "A"), ("E", "A"), ("E", "D"), ("F", "A"), ("C", "A"), ("F", "C"))
"""Differences that share one level by Holm's correction."""
COLUMNS = ("arm", "train_seed", "pair_set", "task_id", "family", "unit", "sample_idx", "passed", "protocol_ok")


def preset(arms: Iterable[str] = tuple(ARMS), rates: Mapping[str, float] | None = None) -> str:
    """Return the experiment as a preset: collections with their pairs, all trainings, one evaluation.

    rates: learning rate by arm where it has been tuned.
    """
    about = 'about = "The registered experiment docs/experiments/teacher-pairs.md."'
    entries: list[str] = []

    def entry(stage: str, name: str, reads: list[str], config: str, more: str = 'parallel = "train"') -> None:
        entries.append(
            f'[[stage]]\nstage = "{stage}"\nname = "{name}"\nfrom = {reads!r}\n{more}\n[stage.config]\n{config}\n'
        )

    for number in range(COLLECTIONS):
        names = [f"{stage}-{number}" for stage in ("collect", "teachers", "pairs")]
        entry("collect", names[0], [], f"tasks = 160\nsamples = 1\nseed = {100 + number}")
        entry("replay-teachers", names[1], names[:1], "")
        entry("extract-pairs", names[2], names[:2], "")
    trained = []
    for arm in arms:
        weights, rate = ARMS[arm], f", learning_rate = {rates[arm]}" if rates else ""
        for seed in range(COLLECTIONS * SEEDS_EACH):
            on_pairs = "sft" in weights
            config = [f'arm = "{arm}"', f"seed = {seed}", f"weights = {{ {weights} }}"]
            config.append(f"optimisation = {{ steps = 20, prompts_per_step = 2, threads = 1{rate} }}")
            config += ["pairs = { per_step = 32 }"] if on_pairs else []
            trained.append(f"{arm}-{seed}")
            entry("train", trained[-1], [f"pairs-{seed // SEEDS_EACH}"] if on_pairs else [], "\n".join(config))
    question = f'tasks = {TASKS}\nseed = {EVAL_SEED}\ntemperature = 0.0\nunits = "fixed"'
    entry("evaluate", "evaluate", trained, question, 'on = "processes:2"')
    return "\n".join([about, "to_the_end = true", "", *entries])


def run(*left_out: str) -> None:
    """Run or resume the experiment, then write the table of outcomes and compute the result from it.

    left_out: arms to drop once all arms are tuned, as the registration allows before the evaluation.
    """
    ARTIFACTS.mkdir(parents=True, exist_ok=True)
    path = ARTIFACTS / "preset.toml"
    words = ["run", "--preset", str(path), "--resume", "--artifacts", str(ARTIFACTS)]
    if left_out:
        (record,) = (ARTIFACTS / "tuning").glob("*.json")
        path.write_text(preset([arm for arm in ARMS if arm not in left_out], tuned(record)["chosen"]))
    else:
        path.write_text(preset())
        words += ["--tune", f"optimisation.learning_rate={RATES}"]
    code = subprocess.run([sys.executable, "-m", "composer_cli", *words]).returncode
    if code not in (0, 1, 3):  # the verdicts
        sys.exit(code)
    runs = [Run(folder) for folder in sorted((ARTIFACTS / "evaluate").glob("2*"))]
    found = next(one for one in reversed(runs) if one.manifest.config["seed"] == EVAL_SEED)
    rows = [{name: item[name] for name in COLUMNS} for item in found.rows(EVAL_ITEM)]
    pq.write_table(pa.Table.from_pylist(rows), ITEMS, compression="zstd", use_dictionary=True)
    (record,) = (ARTIFACTS / "tuning").glob("*.json")
    TUNING.write_bytes(record.read_bytes())
    result()


def tuned(record: Path) -> dict[str, Any]:
    """Return a record of the tuning."""
    found: dict[str, Any] = json.loads(record.read_text())
    return found


def differences(items: pa.Table) -> tuple[ArmDifference, ...]:
    """Return what the evaluated arms differ in: channels, and the learning rates that the tuning chose."""
    chosen = tuned(TUNING)["chosen"]
    arms = {}
    for arm in sorted({*items["arm"].to_pylist()} - {"start"}):
        weights = dict(part.split(" = ") for part in ARMS[arm].split(", ") if part)
        shown = {f"weights.{name}": f"{float(weights.get(name, 0)):g}" for name in ("sdpo", "dpo", "sft")}
        arms[arm] = {0: {**shown, "optimisation.learning_rate": str(chosen[arm])}}
    return settings_differences(arms)


def sampling(*, fixed: bool) -> SamplingUnit:
    """Return the operations as what tasks are drawn from: these twelve alone, or a sample of possible ones."""
    return replace(sampling_unit("kata"), fixed=fixed)


def decided(items: pa.Table, *, fixed: bool) -> EvalVerdict:
    """Return the verdict about these operations, or about others."""
    return decide(items, EvalQuestion(sampling=sampling(fixed=fixed)), differences(items))


def result(table: Path = ITEMS, document: Path = DOCUMENT, figure: Path = FIGURE) -> None:
    """Compute every published number from the table of outcomes; writes into the document, the figure, the record."""
    items = read_items(table)
    verdicts = {
        "these twelve operations": decided(items, fixed=True),
        "other operations": decided(items, fixed=False),
    }
    main = verdicts["these twelve operations"]
    lines = [*arm_lines(main), "", *verdict_lines(verdicts), ""]
    lines += ["The arms differ in " + "; ".join(map(str, main.differences)) + ".", ""]
    lines += [*secondary_lines(items, sampling(fixed=True)), "", *protocol_lines(items)]
    text = document.read_text()
    begin, end = "<!-- result -->\n", "<!-- end of result -->"
    before, _, rest = text.partition(begin)
    document.write_text(before + begin + "\n".join(lines) + "\n" + end + rest.partition(end)[2])
    figure.write_bytes(arms_chart(main))
    claims = []
    for name, difference in (("B - A", main.gain), ("B - C", main.over_control)):
        if difference is not None:
            claims.append(
                records.measured(
                    f"{name}, points of pass@1, {difference.num_tasks} tasks of fixed operations, "
                    f"{difference.num_seeds} seeds on {difference.num_collections} sets of pairs",
                    100 * difference.estimate,
                    (100 * difference.low, 100 * difference.high),
                    n=difference.num_tasks,
                    registration=REGISTRATION or None,
                )
            )
    records.write(__file__, claims)
    print("\n".join(lines))


def sentence() -> str:
    """Return what the experiment shows in plain words, for README: computed from the table of outcomes."""
    items = read_items(ITEMS)
    verdict = decided(items, fixed=True)
    rates = {arm.arm: arm.pass_rate for arm in verdict.arms}
    shown = {arm: f"{100 * rate:.0f} %" for arm, rate in rates.items() if rate is not None}
    chosen = tuned(TUNING)["chosen"]
    rates_of = ", ".join(f"{arm} {chosen[arm]:g}" for arm in "ABC")
    question, kept = EvalQuestion(sampling=sampling(fixed=True)), with_protocol(items)
    imitation = compare(items, "C", "A", question)
    stricter = [compare(kept, "B", other, question) for other in "AC"]
    assert verdict.gain and verdict.over_control and imitation and stricter[0] and stricter[1]
    unsolved, of_them = unsolved_by_grpo(items)
    broke = {arm: len(broken(items, arm)) for arm in "BC"}
    return (
        f"*[A registered experiment](docs/experiments/teacher-pairs.md) on a toy, {verdict.gain.num_seeds} trainings "
        f"of a model of 0.46 M parameters in each arm: of {verdict.gain.num_tasks} held-out repair tasks, GRPO alone "
        f"(A) passes {shown['A']}, GRPO with imitation of the teachers' chosen actions (C) {shown['C']}, and with "
        f"preference pairs beside the imitation (B) {shown['B']}. C − A is {points(imitation.difference)}, of which "
        f"{of_them:.1f} points are three of twelve operations that GRPO never solves ({', '.join(unsolved)}); B − A is "
        f"{points(verdict.gain)}. B − C is {points(verdict.over_control)}: the preference loss gained less than 2 "
        f"points. A finding made after the result: it also broke the protocol in {broke['B']} of "
        f"{verdict.gain.num_seeds} trainings, imitation in {broke['C'] or 'none'}; scored as passed and protocol kept, "
        f"B − A is {points(stricter[0].difference)} and B − C {points(stricter[1].difference)}. Each arm has the "
        f"learning rate that equal tuning chose for it ({rates_of}), by one training for each rate. About larger "
        "models this says nothing.*"
    )


def with_protocol(items: pa.Table) -> pa.Table:
    """Return the items with another outcome: passed, and the protocol kept."""
    return items.set_column(
        items.column_names.index("passed"), "passed", pc.and_(items["passed"], items["protocol_ok"])
    )


def broken(items: pa.Table, arm: str) -> dict[int, float]:
    """Return the trainings of an arm that keep the protocol in less than half of their rollouts, with that share."""
    own = items.filter(pc.equal(items["arm"], arm)).group_by("train_seed").aggregate([("protocol_ok", "mean")])
    shares = dict(zip(own["train_seed"].to_pylist(), own["protocol_ok_mean"].to_pylist(), strict=True))
    return {seed: share for seed, share in sorted(shares.items()) if share < 0.5}


def unsolved_by_grpo(items: pa.Table) -> tuple[list[str], float]:
    """Return the operations of which A passes at most 1 %, and C some, with their share of C - A in points."""
    rates = items.group_by(["arm", "unit"]).aggregate([("passed", "mean")]).to_pylist()
    of = {(row["arm"], row["unit"]): row["passed_mean"] for row in rates}
    units = sorted({unit for _, unit in of})
    unsolved = [unit for unit in units if of["A", unit] < 0.015 and of["C", unit] > 0.5]
    return unsolved, 100 * sum(of["C", unit] - of["A", unit] for unit in unsolved) / len(units)


def read_items(table: Path) -> pa.Table:
    """Return the table of outcomes as items of an evaluation."""
    rows = pq.read_table(table).to_pylist()
    return items_table({**row, "error_type": None if row["passed"] is not None else "lost"} for row in rows)


def arm_lines(verdict: EvalVerdict) -> list[str]:
    """Return a table of the arms."""
    lines = ["| arm | trained by | pass@1 | 95 % interval | trainings |", "| --- | --- | --- | --- | --- |"]
    for arm in verdict.arms:
        rate = "-" if arm.pass_rate is None else f"{100 * arm.pass_rate:.1f} %"
        between = f"{100 * arm.low:.1f} to {100 * arm.high:.1f}"
        lines.append(f"| {arm.arm} | {WORDS[arm.arm]} | {rate} | {between} | {len(arm.train_seeds)} |")
    return lines


def verdict_lines(verdicts: dict[str, EvalVerdict]) -> list[str]:
    """Return the two planned comparisons, of these operations and of others."""
    lines = ["| about | B − A | B − C | verdict |", "| --- | --- | --- | --- |"]
    for about, verdict in verdicts.items():
        shown = [points(one) if one else "-" for one in (verdict.gain, verdict.over_control)]
        claim = f"{verdict.decision}: {verdict.claim}" if verdict.claim else verdict.decision
        lines.append(f"| {about} | {shown[0]} | {shown[1]} | {claim} |")
    return [*lines, "", verdicts["these twelve operations"].why]


def secondary_lines(items: pa.Table, sampling: SamplingUnit) -> list[str]:
    """Return the secondary differences with p-values after Holm's correction."""
    found: dict[str, PairedDifference] = {}
    for one, other in SECONDARY:
        if both := compare(items, one, other, EvalQuestion(sampling=sampling)):
            found[f"{one} − {other}"] = both.difference
    lines = ["| secondary | difference | p after Holm |", "| --- | --- | --- |"]
    for (name, difference), p in zip(found.items(), holm([d.p_value for d in found.values()]), strict=True):
        lines.append(f"| {name} | {points(difference)} | {p:.3g} |")
    return lines


def protocol_lines(items: pa.Table) -> list[str]:
    """Return what became of the protocol, which was recorded, and looked at after the result."""
    kept, question = with_protocol(items), EvalQuestion(sampling=sampling(fixed=True))
    lines = [
        "After the result, and not registered: the protocol.",
        "",
        "| arm | protocol kept | passed and protocol kept | trainings that keep it in less than half of rollouts |",
        "| --- | --- | --- | --- |",
    ]
    for arm in decide(kept, question, differences(items)).arms:
        seeds = ", ".join(f"seed {seed}: {100 * share:.0f} %" for seed, share in broken(items, arm.arm).items())
        rates = [f"{100 * (rate or 0):.1f} %" for rate in (arm.protocol_rate, arm.pass_rate)]
        lines.append(f"| {arm.arm} | {rates[0]} | {rates[1]} | {seeds or 'none'} |")
    lines += ["", "| passed and protocol kept | difference |", "| --- | --- |"]
    for one, other in (("B", "A"), ("B", "C"), ("C", "A")):
        if both := compare(kept, one, other, question):
            lines.append(f"| {one} − {other} | {points(both.difference)} |")
    return lines


def power(num: int = 4000) -> None:
    """Print with what probability the design finds true differences, given the standard deviations of the demo."""
    random = np.random.default_rng(0)
    of_collection = np.repeat(np.arange(COLLECTIONS), SEEDS_EACH)
    print("| true difference | B − A: a gain of 2 points | B − C: above 0 | B − C: below 2, imitation suffices |")
    print("| --- | --- | --- | --- |")
    for true in (-3, -1, 0, 2, 4, 6, 8):
        cells = []
        for of_seeds, of_tasks, question in ((5.5, 0.86, "least"), (3.5, 0.58, "above"), (3.5, 0.58, "below")):
            gains = true + of_seeds * random.normal(size=(num, COLLECTIONS * SEEDS_EACH))
            errors, top = top_error(gains, of_collection)
            means = gains.mean(1) + of_tasks * random.normal(size=num)
            halves = np.hypot(stdtrit(top - 1, 0.975) * errors, ndtri(0.975) * of_tasks)
            found = {"least": means - halves >= 2, "above": means - halves > 0, "below": means + halves < 2}
            share = found[question].mean()
            cells.append(f"{100 * share:.0f} ± {100 * (share * (1 - share) / num) ** 0.5:.1f} %")
        print(f"| {true:+d} | {' | '.join(cells)} |")


if __name__ == "__main__":
    word, *left_out = sys.argv[1:] or ["run"]
    commands: dict[str, Callable[..., None]] = {"run": run, "result": result, "power": power}
    commands[word](*left_out)
