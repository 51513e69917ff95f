"""What gating saves: the share of the full run's pairs against the share of its cost, as a curve.

    python benchmarks/gating.py RUN teacher-a=1 teacher-b=1 teacher-c=10
    python benchmarks/gating.py FILE 6b_verification=1 175b_finetuning=4 175b_verification=20 --student 6b_finetuning
    python benchmarks/gating.py FOLDER gpt-4.1-nano=1 gpt-4.1-mini=4 gpt-4.1=20 --student qwen3-4b-instruct-2507

RUN is a folder of `replay-teachers` in which all teachers were asked. FILE holds answers of several models to the same
questions, as OpenAI's `example_model_solutions.jsonl` of GSM8K (also .gz) does; an action is then a command
that prints the final answer. FOLDER holds rollouts of several models at the same questions, MODEL.results.jsonl.gz
as verifiers writes them; an action is then what a model did first, the only state in which all were.
Any is served again at the given prices (USD an answer) by a local server, through every selection; pairs are extracted
by canonical form. Beside the curve stand two bounds, for asking the cheaper teachers everywhere and the dearest where
that is best: `known pairs` knows beforehand where its answer will make a pair, `known chances` knows how often it makes
one in states in which the same agree (and no more, which is what a selection can learn at best from who said the same
as whom).
"""

import gzip
import json
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import cases
from records import Claim, measured
from support.recorded_states import states_by_digest
from support.server import Reply, answer, serving

from stages import extract_pairs, import_traces, replay_teachers
from stages.layout import markdown_table
from stages.messages import Message, Spoken, ToolCall, write
from stages.pairs.actions import decide
from stages.pairs.states import AnsweredStates
from stages.policy import dialect
from stages.runs import runner, store
from stages.runs.kinds import PAIR, STEP, TEACHER_ACTION
from stages.runs.run import Run
from stages.teachers.selection import SelectionState

VALUES = (0.5, 1, 2, 5, 10, 20, 50, 100, 500)
"""USD a pair, in the unit of the prices."""
SHARES = (0.5, 0.8, 0.9, 0.95, 1.0)
ENOUGH = 0.95
GATES: list[tuple[str, dict[str, Any]]] = [
    ("all teachers", {}),
    ("disagreement", {"rule": "disagreement"}),
]
Said = dict[tuple[str, str], tuple[str, str | None]]


def gates(
    run: Path, prices: tuple[str, ...], student: str | None = None, usd_per_pair: tuple[float, ...] = VALUES
) -> Iterator[Claim]:
    """The curve of every gate, and its bounds.

    prices: TEACHER=USD an answer. student: of FILE and FOLDER, whose answers are judged.
    """
    usd = {name: float(price) for name, price in (item.split("=") for item in prices)}
    with tempfile.TemporaryDirectory() as folder:
        if files := sorted(run.glob("*.results.jsonl.gz")):
            rollouts, said = of_rollouts(files, str(student), [*usd], Path(folder))
        elif run.is_dir():
            rollouts, said = of_run(Run(run))
        else:
            rollouts, said = of_answers(run, str(student), Path(folder))
        valued = ((f"value, {each:g} a pair", {"rule": "value", "usd_per_pair": each}) for each in usd_per_pair)
        yield from curve(rollouts, said, usd, [*GATES, *valued], Path(folder), student or run.name)


def of_run(recorded: Run) -> tuple[Run, Said]:
    """The rollouts of a run of teachers, and what each teacher said with how it ended, by its name and the messages."""
    rollouts = Run(Path(recorded.manifest.inputs["rollouts"][0].path))
    digests = {
        digest: store.digest(dialect.conversation(state.messages, with_tools=False))
        for digest, state in states_by_digest(rollouts.rows(STEP)).items()
    }
    return rollouts, {
        (row["teacher"], digests[row["state_sha256"]]): (row["action"] or "", row["finish_reason"])
        for row in recorded.rows(TEACHER_ACTION)
    }


def of_answers(path: Path, student: str, folder: Path) -> tuple[Run, Said]:
    """The student's answers as imported rollouts of one step, and those of the other models as what teachers say."""
    rows = [json.loads(line) for line in (gzip.open if path.suffix == ".gz" else open)(path)]
    said: Said = {}
    with (folder / "student.jsonl").open("w") as file:
        for index, row in enumerate(rows):
            asked = [{"role": "user", "content": row["question"]}]
            answers = {name: final(told["solution"]) for name, told in row.items() if isinstance(told, dict)}
            said |= {(name, store.digest(asked)): (text, "stop") for name, text in answers.items()}
            file.write(one_step(str(index), asked, answers[student], row[student]["is_correct"], student))
    config = import_traces.Config(paths=[str(folder / "student.jsonl")])
    return Run(runner.execute("import", {}, config, root=folder).path), said


def of_rollouts(files: Sequence[Path], student: str, teachers: Sequence[str], folder: Path) -> tuple[Run, Said]:
    """The student's first actions as imported rollouts of one step, and the teachers' at the same questions."""
    by_model = {}
    for path in files:
        with gzip.open(path) as file:
            rows = [json.loads(line) for line in file]
        by_model[path.name.removesuffix(".results.jsonl.gz")] = {store.digest(row["prompt"]): row for row in rows}
    said: Said = {}
    with (folder / "student.jsonl").open("w") as file:
        for index, (asked, row) in enumerate(by_model[student].items()):
            for name in teachers:
                said[name, asked] = (first(by_model[name][asked]["completion"]), "stop")
            done = first(row["completion"])
            file.write(one_step(str(index), row["prompt"], done, row["reward"] > 0, student))
    config = import_traces.Config(paths=[str(folder / "student.jsonl")])
    return Run(runner.execute("import", {}, config, root=folder).path), said


def one_step(task_id: str, asked: list[Message], done: str, passed: bool, model: str) -> str:
    """A rollout of one answer, as a line."""
    told = [*asked, {"role": "assistant", "content": done}]
    return json.dumps({"messages": told, "task_id": task_id, "resolved": passed, "model": model}) + "\n"


def first(completion: list[dict[str, Any]]) -> str:
    """The first message with its calls; verifiers keeps each as JSON in a string."""
    said, *_ = completion
    calls = [json.loads(call)["function"] for call in said.get("tool_calls") or []]
    return write(Spoken(said["content"] or "", tuple(ToolCall(call["name"], call["arguments"]) for call in calls)))


def final(solution: str) -> str:
    """The answer in the last line, as a command, which is what actions are compared as."""
    return f"```bash\necho {solution.rpartition('A:')[2].strip()}\n```"


def curve(
    rollouts: Run,
    said: Said,
    prices: dict[str, float],
    gates: list[tuple[str, dict[str, Any]]],
    folder: Path,
    student: str,
) -> Iterator[Claim]:
    """Ask through every gate and print what each costs and leaves; student: its name in the record."""

    def reply(body: dict[str, Any], earlier: int) -> Reply:
        text, reason = said[body["model"], store.digest(body["messages"])]
        told = answer(text, cost=prices[body["model"]])
        told["choices"][0]["finish_reason"] = reason
        return Reply(body=told)

    points = []
    with serving(reply) as server:
        table = [
            {"name": name, "model": name, "base_url": server.url, "max_tokens": 4096, "usd_per_mtok_in": usd,
             "usd_per_mtok_out": usd}
            for name, usd in prices.items()
        ]  # fmt: skip
        for name, gate in gates:
            config = replay_teachers.Config(teachers=table, selection=gate, max_usd_per_rollout=1e9)
            root = folder / name
            answers = Run(runner.execute("replay-teachers", {"rollouts": rollouts}, config, root=root).path)
            inputs = {"rollouts": rollouts, "teacher_actions": answers}
            compared = extract_pairs.Config(compare="canonical")
            pairs = {
                row["pair_id"]
                for row in Run(runner.execute("extract-pairs", inputs, compared, root=root).path).rows(PAIR)
            }
            usd = sum(row["cost_usd"] for row in answers.rows(TEACHER_ACTION))
            points.append((name, usd, len(pairs), pairs))
            if not gate:
                limits = bounds(rollouts, answers, prices, Path(tempfile.mkdtemp(dir=folder)))
    _, full_cost, _, full = points[0]
    print(json.dumps(prices))
    print(
        markdown_table(
            [
                (name, f"{usd:.0f}", f"{usd / full_cost:.3f}", count, f"{len(pairs & full) / len(full):.3f}")
                for name, usd, count, pairs in points
            ],
            ("gate", "USD", "of the cost", "pairs", "of the pairs"),
        )
    )
    print()
    cells = [(name, *(f"{cost / full_cost:.3f}" for cost in costs)) for name, costs in limits.items()]
    print(markdown_table(cells, ("of the cost for", *(f"{share:.0%} of the pairs" for share in SHARES))))
    cheapest = min(usd for _, usd, _, pairs in points if len(pairs & full) >= ENOUGH * len(full))
    at_best = limits["known chances"][SHARES.index(ENOUGH)]
    what = f"student {student}: share of the cost for {ENOUGH:.0%} of {len(full)} pairs"
    yield measured(f"{what}, cheapest gate", cheapest / full_cost, n=len(full), goal="<= 0.5")
    yield measured(f"{what}, a gate that knows every chance", at_best / full_cost, n=len(full))


def bounds(rollouts: Run, answers: Run, prices: dict[str, float], folder: Path) -> dict[str, list[float]]:
    """What `SHARES` of all pairs cost at least, in USD, with the one or the other known beforehand."""
    order = sorted(prices, key=lambda name: prices[name])
    dearest, base, sure = prices[order[-1]], 0.0, 0
    gained: dict[tuple[object, ...], list[int]] = defaultdict(list)
    with AnsweredStates(rollouts, answers, folder) as states:
        for state in states:
            asked = [name for name in order if state.teachers[name]]
            told = SelectionState({name: [] for name in order}, state.steps, state.teachers)
            before = pairs_of(told, order[:-1])
            base, sure = base + sum(prices[name] for name in asked[:-1]), sure + before
            alike = (told.situation(order[:-1]), told.agreeing_teachers(order[:-1]))
            gained[alike].append(max(pairs_of(told, order) - before, 0))
    all_pairs = sure + sum(map(sum, gained.values()))
    alone = sorted((gain for gains in gained.values() for gain in gains), reverse=True)
    by_chance = sorted((sum(gains) / len(gains) for gains in gained.values() for _ in gains), reverse=True)
    return {
        name: [base + dearest * asked_for(curve_of, share * all_pairs - sure) for share in SHARES]
        for name, curve_of in (("known pairs", alone), ("known chances", by_chance))
    }


def pairs_of(state: SelectionState, asked: Sequence[str]) -> int:
    """How many pairs the answers of these teachers give."""
    return sum(len(decide(ballot)[0]) for ballot in state.ballots(asked))


def asked_for(gains: Sequence[float], wanted: float) -> int:
    """How many answers, those that bring most first, bring so many pairs."""
    brought = 0.0
    for number, gain in enumerate(gains):
        if brought >= wanted - 1e-9:
            return number
        brought += gain
    return len(gains)


CASES = {"gates": gates}


if __name__ == "__main__":
    cases.main(__file__, CASES)
