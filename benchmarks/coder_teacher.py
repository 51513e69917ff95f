"""Do a larger teacher's answers help a coder beyond GRPO? Registered in docs/experiments/coder-teacher.md.

`./dev experiment coder-teacher` runs it on one GPU by benchmarks/experiment.py; the registered rule is decided here.
The outcomes of all answers are kept in docs/experiments/coder-teacher.parquet, what the trainings recorded of
themselves in coder-teacher.json, and `python benchmarks/experiment.py coder-teacher result` computes every number of
the page from them.
"""

from pathlib import Path

import records
from experiment import Experiment, comparison_lines, difference_of, put

from composer_stages.envs import sampling_unit
from composer_stages.evaluation.arm_comparison import EvalQuestion
from composer_stages.evaluation.difference import Decision, Difference
from composer_stages.evaluation.inference import MIN_GAIN
from composer_stages.evaluation.outcomes import KEPT, START
from composer_stages.evaluation.report import arms_chart
from composer_stages.evaluation.verdict import decide
from composer_stages.evaluation.words import points
from composer_stages.runs import store

EXPERIMENT = Experiment.named("coder-teacher")
QUESTION = EvalQuestion("A", "C", START, sampling=sampling_unit("code"), outcome=KEPT)


def finding(found: Difference) -> str:
    """Return what follows from C - A by the registered rule."""
    if found.decision is Decision.BETTER:
        size = (
            "by at least 2 points" if found.low > MIN_GAIN else "by less than 2 points" if found.high < MIN_GAIN else ""
        )
        return f"the teacher's answers help {size}".rstrip()
    if found.decision in (Decision.WORSE, Decision.NO_GAIN):
        return "the teacher's answers do not help" + (": a loss is shown" if found.decision is Decision.WORSE else "")
    return "undecided" + ("" if found.mde is None else f"; 80 % power for {100 * found.mde:.1f} points")


def result(
    table: Path = EXPERIMENT.items, document: Path = EXPERIMENT.document, figure: Path = EXPERIMENT.figure
) -> None:
    """Compute every published number from the table of outcomes; writes into the document, the figure, the record."""
    items, record = EXPERIMENT.read_items(table), store.read_json(table.with_suffix(".json"))
    verdict, courses = decide(items, QUESTION), record["trainings"]
    primary = difference_of(items, [("C", "A")], QUESTION)
    lines = [*EXPERIMENT.outcome_lines(items, "temperature 0"), ""]
    lines += ["| primary, passed and protocol kept | difference | follows |", "| --- | --- | --- |"]
    lines += [f"| {name} | {points(one)} | {finding(one)} |" for name, one in primary.items()]
    secondary = difference_of(items, [("A", START), ("C", START)], QUESTION)
    lines += ["", *comparison_lines("secondary, passed and protocol kept", secondary)]
    ended = {(one["arm"], one["seed"]) for one in courses}
    failed = [
        f"{arm} {seed}" for seed in range(EXPERIMENT.seeds) for arm in EXPERIMENT.arms if (arm, seed) not in ended
    ]
    left = [f"{one['arm']} {one['seed']} at {one['collapsed']}" for one in courses if one["collapsed"]]
    lines += ["", f"Trainings that did not end: {', '.join(failed) or 'none'}; that left their course: "]
    lines[-1] += f"{', '.join(left) or 'none'}. The arms also differ in the problems that they see."
    lines += ["", *EXPERIMENT.course_lines(courses)]
    lines += ["", f"All of it took {record['processor_hours']:.1f} processor hours beside the GPU."]
    put(document, lines)
    figure.write_bytes(arms_chart(verdict))
    what = "Qwen2.5-Coder-0.5B, {}: points of problems passed with the protocol kept, {} held-out problems"
    both = (primary | secondary).items()
    records.write(
        "experiment-coder-teacher", [EXPERIMENT.claim(what.format(name, one.num_tasks), one) for name, one in both]
    )
    print("\n".join(lines))
