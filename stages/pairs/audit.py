"""What each teacher was worth: pairs that it backed, pairs that need it, and whose minority votes were right.

Outcomes judge pairs where they are known: a pair that prefers the majority to the student is right on a rollout that
failed, one that prefers the student to a minority on a rollout that passed. How many would be right by chance is shown
by giving each task the outcomes of another.
"""

from array import array
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import combinations
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from tabulate import tabulate

from stages.pairs.blocks import NOTHING, Alike, Array, Block, Classes, Labels, Numbering, Shuffles, equal_rows, numbers
from stages.pairs.states import LOST, decided
from stages.pairs.voting import STUDENT, Ballot, Preference, decide
from stages.runs import store
from stages.runs.records import Row

Names = Sequence[str | None]
DRAWS = 999


@dataclass(frozen=True)
class JudgedState:
    """What was done in one state: by the student in each recorded step, by each teacher in each sample.

    Classes of actions go by names, None for nothing usable.
    """

    students: Names
    teachers: Mapping[str, Names]

    def ballots(self, without: str | None = None) -> Iterator[Ballot]:
        """One a recorded step in which the student did something, perhaps without one of the teachers."""
        teachers = {name: names for name, names in self.teachers.items() if name != without}
        classes = {name: name for names in (self.students, *teachers.values()) for name in names if name is not None}
        for own in self.students:
            yield Ballot(own or "", teachers, {"": None, **classes})

    def says(self, teacher: str) -> str | None:
        """What a teacher does most often."""
        known = Counter(name for name in self.teachers.get(teacher, ()) if name is not None)
        return known.most_common(1)[0][0] if known else None


@dataclass(frozen=True)
class TeacherAudit:
    """One teacher: pairs that it backs, pairs that are lost and won without it, and its votes against the majority.

    minority: states in which it did otherwise than the majority. joined: rollout steps in which the student did the
    same as it there; joined_passed: those of them on rollouts that passed; opposed and opposed_passed are the same for
    a student that did as the majority. usd_per_backed: its price for each pair that it backs; None where not known.
    """

    teacher: str
    backed: int
    lost_without: int
    won_without: int
    minority: int
    joined: int
    joined_passed: int
    opposed: int
    opposed_passed: int
    usd_per_backed: float | None

    def as_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return asdict(self)


@dataclass(frozen=True)
class Alignment:
    """Pairs that outcomes can judge, the share that they call right, the same by chance, and the p-value."""

    pairs: int
    right: float
    by_chance: float
    p_value: float


def preferences(state: JudgedState, without: str | None = None) -> list[tuple[Preference, int]]:
    """All preferences of a state, each with the step that it judges, as the votes on names of classes give them."""
    return [(found, step) for step, ballot in enumerate(state.ballots(without)) for found in decide(ballot)[0]]


@dataclass(frozen=True)
class Worth:
    """What a teacher is worth in a state: pairs that are lost and won without it, and that it backs.

    sides: of each recorded step, "joined" where the student did the same as it against the majority, "opposed" where
    the student did as the majority, else None; None at all where it was not in a minority.
    """

    lost: int
    won: int
    backed: int
    sides: tuple[str | None, ...] | None


def worth(state: JudgedState, teacher: str) -> Worth:
    """A teacher's worth in one state."""
    found = [preference for preference, _ in preferences(state)]
    everybody = {_sides(preference) for preference in found}
    without = {_sides(preference) for preference, _ in preferences(state, without=teacher)}
    backed = sum(_backs(teacher, state, preference) for preference in found)
    said, winner = state.says(teacher), _winner(found[-1]) if found else None
    sides = None
    if winner is not None and said is not None and said != winner:
        names = {said: "joined", winner: "opposed"}
        sides = tuple(None if own is None else names.get(own) for own in state.students)
    return Worth(len(everybody - without), len(without - everybody), backed, sides)


class Audit:
    """What each teacher was worth, some states after the other."""

    def __init__(self, teachers: Iterable[str]) -> None:
        self._counts = {name: Counter[str]() for name in teachers}

    def add(self, worths: Sequence[Worth], known: Sequence[int], passed: Sequence[int], times: int = 1) -> None:
        """So many states in which each teacher is worth the same.

        known: of each recorded step, in how many of them its rollout has a known outcome; passed: in how many it did
        pass.
        """
        for counts, one in zip(self._counts.values(), worths, strict=True):
            counts["lost"] += one.lost * times
            counts["won"] += one.won * times
            counts["backed"] += one.backed * times
            counts["minority"] += times if one.sides is not None else 0
            for step, side in enumerate(one.sides or ()):
                if side is not None:
                    counts[side] += known[step]
                    counts[f"{side}_passed"] += passed[step]

    def lines(self, spent: Mapping[str, float | None]) -> list[TeacherAudit]:
        """One line a teacher. spent: USD of each teacher's answers."""
        return [_line(name, counts, spent.get(name)) for name, counts in self._counts.items()]


def _line(teacher: str, counts: Counter[str], usd: float | None) -> TeacherAudit:
    return TeacherAudit(
        teacher,
        counts["backed"],
        counts["lost"],
        counts["won"],
        counts["minority"],
        counts["joined"],
        counts["joined_passed"],
        counts["opposed"],
        counts["opposed_passed"],
        None if usd is None or not counts["backed"] else usd / counts["backed"],
    )


def _sides(preference: Preference) -> tuple[str, str, str]:
    return preference.rule, preference.chosen, preference.rejected


def _winner(preference: Preference) -> str:
    """What the majority does: by either rule it is what was chosen."""
    return preference.chosen


def _backs(teacher: str, state: JudgedState, preference: Preference) -> bool:
    """It did what was chosen over the student, or is rejected in favour of the student."""
    if preference.rejected_by == STUDENT:
        return state.says(teacher) == preference.chosen
    return state.says(teacher) == preference.rejected


class Judgement:
    """How often outcomes call pairs right: a rollout and a side a pair."""

    def __init__(self, passed: Mapping[str, bool | None]) -> None:
        self._passed = passed
        self._rollouts: dict[str, int] = {}
        self._tasks: dict[str, int] = {}
        self._task_of, self._outcome_of = array("q"), array("b")
        self._wanted = np.zeros((2, 0), dtype=np.int64)
        """How many pairs each rollout [.., R] makes right by failing, and by passing."""

    def meet(self, rollouts: Sequence[str], tasks: Sequence[str]) -> Array:
        """A number of each of these rollouts, `NOTHING` without a known outcome. tasks: where each is met."""
        for rollout, task in zip(rollouts, tasks, strict=True):
            if self._passed.get(rollout) is not None and rollout not in self._rollouts:
                self._rollouts[rollout] = len(self._rollouts)
                self._task_of.append(self._tasks.setdefault(task, len(self._tasks)))
                self._outcome_of.append(bool(self._passed[rollout]))
        if len(self._outcome_of) > (places := self._wanted.shape[1]):
            self._wanted = np.pad(self._wanted, ((0, 0), (0, 2 * len(self._outcome_of) - places)))
        return np.array([self._rollouts.get(rollout, NOTHING) for rollout in rollouts], dtype=np.int64)

    def add(self, where: Array, wants: bool) -> None:
        """A pair on each of these rollouts, by their numbers; wants: the outcome that makes it right."""
        np.add.at(self._wanted[int(wants)], where[where != NOTHING], 1)

    def outcomes(self) -> Array:
        """Whether the rollouts so far passed, by their numbers."""
        return np.array(self._outcome_of, dtype=bool)

    def alignment(self, *, draws: int = DRAWS, seed: int = 0) -> Alignment | None:
        """What outcomes say; None where no pair lies on a rollout with a known outcome."""
        outcome = self.outcomes()
        failing, passing = self._wanted[:, : len(outcome)]
        pairs = int(failing.sum() + passing.sum())
        if not pairs:
            return None
        steps = np.zeros(len(outcome), dtype=np.int64)
        shuffles = Shuffles(Labels(np.zeros((len(outcome), 1)), np.array(self._task_of), steps, ()))
        random = np.random.default_rng(seed)

        def share(passed: Array) -> float:
            return float(np.where(passed, passing, failing).sum() / pairs)

        right = share(outcome)
        null = np.array([share(outcome[shuffles.draw(random)]) for _ in range(draws)])
        p_value = (1 + int((null >= right - 1e-9).sum())) / (draws + 1)
        return Alignment(pairs, right, float(null.mean()), p_value)


# ---- agreement
# Whether teachers agree more than by chance, and are against the student more than against each other.
#
# Two questions, each with a test that is exact for its null and has tasks as its clusters:
#
# kappa - agreement of teachers beyond what it would be if each answered another task's state of the same step.
# Null: what
#     teachers do in a state is independent given the step. Kappa is (observed - chance) / (1 - chance), after Cohen
#     (1960), chance taken from the rearrangements rather than from products of margins.
# roles - how often a majority of the others is against the student, as against a teacher that takes its place.
# Null: the
#     student is like one of the teachers, so that in each task any of them could have had its role.
#
# The first alone holds where everybody, the student included, knows the task; the second alone where the student is
# merely odd. A student that is as good as each teacher passes the second only by its level, and yet their majority may
# know better than either: where outcomes are known, `audit.alignment` tells that.

LEVEL = 0.01
AGREEMENT_DRAWS = 999
LEAST_TASKS = 6
"""With fewer, too few rearrangements differ for a p-value of `LEVEL`."""


@dataclass(frozen=True)
class Kappa:
    """Agreement of teachers, what it is by chance, kappa, and the one-sided p-value."""

    agreement: float
    chance: float
    kappa: float
    p_value: float


@dataclass(frozen=True)
class Roles:
    """The share of states with a majority against the student, the mean of teachers in its place, the p-value."""

    against_student: float
    against_teacher: float
    p_value: float


@dataclass(frozen=True)
class Signal:
    """Both tests, and each teacher's agreement with the student and with the other teachers."""

    kappa: Kappa
    roles: Roles
    teachers: dict[str, tuple[float, float]]


def signal(labels: Labels, *, draws: int = AGREEMENT_DRAWS, seed: int = 0) -> Signal | None:
    """Both tests on the actions of a run; None where two teachers or `LEAST_TASKS` tasks are not there."""
    if len(labels.teachers) < 2 or labels.num_tasks < LEAST_TASKS:
        return None
    random = np.random.default_rng(seed)
    equal = agreements(labels)
    others = [
        (equal[0, t], np.mean([equal[min(t, u), max(t, u)] for u in range(1, len(labels.teachers) + 1) if u != t]))
        for t in range(1, len(labels.teachers) + 1)
    ]
    told = {name: (float(own), float(rest)) for name, (own, rest) in zip(labels.teachers, others, strict=True)}
    return Signal(kappa(labels, draws, random), roles(labels, draws, random), told)


def agreements(labels: Labels) -> dict[tuple[int, int], float]:
    """The share of states in which two columns (0 is the student) did the same."""
    columns = range(labels.actions.shape[1])
    return {
        (a, b): float(_equal(labels.actions[:, a], labels.actions[:, b]).mean()) for a, b in combinations(columns, 2)
    }


def kappa(labels: Labels, draws: int, random: np.random.Generator) -> Kappa:
    """Agreement of teachers beyond chance; each but the first is rearranged on its own."""
    teachers, shuffles = labels.actions[:, 1:], Shuffles(labels)
    observed = _mean_agreement(teachers)
    columns = range(1, teachers.shape[1])
    by_chance = np.empty(draws)
    for draw in range(draws):
        moved = [teachers[shuffles.draw(random), column] for column in columns]
        by_chance[draw] = _mean_agreement(np.column_stack([teachers[:, 0], *moved]))
    chance = float(by_chance.mean())
    beyond = (observed - chance) / (1 - chance) if chance < 1 else 0.0
    return Kappa(observed, chance, beyond, _p_value(by_chance, observed))


def roles(labels: Labels, draws: int, random: np.random.Generator) -> Roles:
    """How often a majority of the others is against the student, beside any of the teachers in its place."""
    odd = np.stack([_outvoted(labels.actions, role) for role in range(labels.actions.shape[1])])  # [R, N]
    counts = np.stack([np.bincount(labels.task, weights=one, minlength=labels.num_tasks) for one in odd])  # [R, tasks]
    tasks = np.arange(labels.num_tasks)
    exchanged = np.array([counts[random.integers(0, len(odd), size=len(tasks)), tasks].sum() for _ in range(draws)])
    return Roles(float(odd[0].mean()), float(odd[1:].mean()), _p_value(exchanged, float(counts[0].sum())))


def _outvoted(actions: Array, role: int) -> Array:
    """The states [N] in which more than half of the others did one thing, and this one did another."""
    others = [column for column in range(actions.shape[1]) if column != role]
    outvoted = np.zeros(len(actions), dtype=bool)
    for column in others:
        behind = sum(_equal(actions[:, column], actions[:, other]).astype(np.int64) for other in others)
        outvoted |= (behind > len(others) / 2) & (actions[:, column] != actions[:, role])
    return outvoted


def _equal(a: Array, b: Array) -> Array:
    return (a == b) & (a != NOTHING)


def _mean_agreement(actions: Array) -> float:
    columns = range(actions.shape[1])
    return float(np.mean([_equal(actions[:, a], actions[:, b]).mean() for a, b in combinations(columns, 2)]))


def _p_value(null: Array, observed: float) -> float:
    """With the + 1 of a valid permutation test; sums of floats are compared with room for rounding."""
    return (1 + int((null >= observed - 1e-9).sum())) / (len(null) + 1)


Verdict = Literal["SIGNAL", "NO SIGNAL", "TOO LITTLE DATA"]


def verdict(found: Signal | None, p_outcomes: float | None = None) -> Verdict:
    """What the tests say; TOO LITTLE DATA where they cannot be made. p_outcomes: of the outcomes' judgement, if any.

    Teachers must agree beyond chance; and either the student is outvoted more than a teacher, or outcomes call the
    pairs right more than by chance. Two ways to pass have half the level each.
    """
    if found is None:
        return "TOO LITTLE DATA"
    ways = [p_value for p_value in (found.roles.p_value, p_outcomes) if p_value is not None]
    return "SIGNAL" if found.kappa.p_value <= LEVEL and min(ways) <= LEVEL / len(ways) else "NO SIGNAL"


# ---- patterns
# What follows from who did the same as whom: found once, for all states of a run in which that is the same.

MOST_NUMBERS = 4_000_000
Places = tuple[int, ...]


@dataclass(frozen=True)
class Found:
    """A pair: whose step it judges, and where in the pattern its sides stand first."""

    step: int
    chosen: int
    rejected: int
    preference: Preference
    chosen_by: tuple[str, ...]


@dataclass(frozen=True)
class Pattern:
    """What is decided in a state. reasons: why a step gives no pair; shared: among how many pairs its cost is shared.

    worths: of each teacher; wanted: all preferences among classes, each with the step that it judges; says: the places
    of what the student did first, and of what each teacher does most often, `NOTHING` for nothing.
    """

    reasons: tuple[str, ...]
    pairs: tuple[Found, ...]
    duplicates: int
    shared: int
    worths: tuple[Worth, ...]
    wanted: tuple[tuple[Preference, int], ...]
    says: Places


def patterns(block: Block, classes: Classes) -> Iterator[tuple[Alike, Pattern]]:
    """The states of a block, those with one pattern together."""
    truncated = np.zeros(len(block.actions), dtype=bool)
    truncated[: len(block.steps)] = numbers(block.steps["truncated"])
    class_of = np.where(truncated, NOTHING, classes.class_of)
    for alike in (part for one in block.alike() for part in one.parts(MOST_NUMBERS)):
        length, students = alike.rows.shape[1], alike.students
        cut, lost = truncated[alike.rows[:, :students]], classes.lost[alike.states, None]
        told = np.hstack([_first_equal(block.text_of[alike.rows]), _first_equal(class_of[alike.rows]), cut, lost])
        for same in equal_rows(np.ascontiguousarray(told, dtype=np.int32)):
            row, shape = told[same[0]].tolist(), (students, alike.samples)
            texts, kind, flags = row[:length], row[length : 2 * length], row[2 * length :]
            found = _pattern(block.teachers, shape, tuple(texts), tuple(kind), tuple(flags[:-1]), flags[-1])
            yield Alike(alike.states[same], alike.rows[same], *shape), found


def _first_equal(values: Array) -> Array:
    """The first place [S, L] in each row [S, L] that holds the same; `NOTHING` stays so."""
    first = (values[:, :, None] == values[:, None, :]).argmax(axis=2)
    return np.where(values == NOTHING, NOTHING, first)


@lru_cache(16_384)
def _pattern(
    names: tuple[str, ...],
    shape: tuple[int, tuple[int, ...]],
    texts: Places,
    classes: Places,
    truncated: Places,
    lost: int,
) -> Pattern:
    students, samples = shape
    ends = students + np.cumsum(samples, dtype=int)
    said = {name: range(end - number, end) for name, number, end in zip(names, samples, ends.tolist(), strict=True)}
    reasons, votes = list[str](), list[Found]()
    for step in range(students):
        reason, found = _step(step, said, texts, classes, bool(truncated[step]), bool(lost))
        reasons += [] if reason is None else [reason]
        votes += found
    sides = [(one.chosen, one.rejected) for one in votes]
    kept = dict(zip(reversed(sides), reversed(votes), strict=True))
    did = {name: [_name(classes[place]) for place in of] for name, of in said.items()}
    judged = JudgedState([_name(classes[place]) for place in range(students)], did)
    says = [judged.students[0], *(judged.says(name) for name in names)]
    return Pattern(
        tuple(reasons),
        tuple(one for side, one in zip(sides, votes, strict=True) if kept[side] is one),
        len(votes) - len(kept),
        len(kept),
        tuple(worth(judged, name) for name in names),
        tuple(preferences(judged)),
        tuple(NOTHING if most is None else int(most) for most in says),
    )


def _step(
    step: int, said: dict[str, range], texts: Places, classes: Places, truncated: bool, lost: bool
) -> tuple[str | None, list[Found]]:
    """The pairs of one recorded step, or why it gives none."""
    if lost:
        return LOST, []
    if truncated:
        return "student_truncated", []
    if not any(said.values()):
        return "not_asked", []
    teachers = tuple((name, tuple(_name(texts[place]) for place in of)) for name, of in said.items())
    class_of = {texts[place]: classes[place] for of in said.values() for place in of} | {texts[step]: classes[step]}
    order = dict.fromkeys(text for text in (texts[step], *(texts[p] for of in said.values() for p in of)) if text >= 0)
    found, reason = decided(str(texts[step]), teachers, tuple(_name(class_of[text]) for text in order))
    return reason, [Found(step, int(one.chosen), int(one.rejected), one, by) for one, by in found]


def _name(place: int) -> str | None:
    return None if place == NOTHING else str(place)


# ---- evidence
# What speaks for the pairs of a run: signal and its verdict, agreement with outcomes, an audit of teachers.

Judged = tuple[Verdict, dict[str, Any], str]
MOST_STATES = 50_000
"""A thousand rearrangements of more take minutes, and would find differences of no interest."""
PASSED = ["rollout_id", "gt_pass", "reward"]
"""The columns of rollouts that say whether they passed."""
AUDIT = ("teacher", "agrees", "with student", "backs", "lost", "won", "minority", "right", "wrong", "USD/backed")


def outcomes(rollouts: Iterable[Row]) -> dict[str, bool | None]:
    """Whether each rollout passed: its verdict, else a reward above 0, else not known."""
    return {
        row["rollout_id"]: row["gt_pass"]
        if row["gt_pass"] is not None
        else None
        if row["reward"] is None
        else row["reward"] > 0
        for row in rollouts
    }


def spent(answers: Iterable[pa.RecordBatch]) -> dict[str, float | None]:
    """What each teacher's answers cost in USD; None where the price of one of them is not known."""
    sums: dict[str, float | None] = {}
    for batch in answers:
        coded = batch["teacher"].dictionary_encode()
        teacher, cost, failed = numbers(coded.indices), batch["cost_usd"], batch["error_type"].is_valid()
        unknown = numbers(pc.and_not(cost.is_null(), failed))
        for code, name in enumerate(coded.dictionary.to_pylist()):
            own, so_far = teacher == code, sums.get(name, 0.0)
            known = so_far is not None and not unknown[own].any()
            # one after the other, so that it does not matter how rows come
            sums[name] = float(np.cumsum([so_far or 0.0, *numbers(cost.fill_null(0.0))[own]])[-1]) if known else None
    return sums


class Evidence:
    """What speaks for pairs, block after block.

    passed: whether each rollout did. teachers: in order. The student counts with its first recorded step of a state,
    so that everybody speaks once in it. tested: states [S] of a block that signal is tested on, as is every state that
    was chosen blindly.
    """

    def __init__(self, teachers: Sequence[str], passed: Mapping[str, bool | None]) -> None:
        self._audit, self._judgement = Audit(teachers), Judgement(passed)
        self._labels = Numbering(teachers)

    def add(self, block: Block, classes: Classes, told: Sequence[tuple[Alike, Pattern]], tested: Array) -> None:
        """One block with its patterns."""
        rollout = self._rollouts(block)
        outcome = np.append(self._judgement.outcomes(), False)[rollout]
        actions = np.full((block.size, 1 + len(block.teachers)), NOTHING, dtype=np.int64)
        for alike, pattern in told:
            own = alike.rows[:, : alike.students]
            known = rollout[own] != NOTHING
            passed = outcome[own] & known
            worths, times = pattern.worths, len(alike.states)
            self._audit.add(worths, known.sum(axis=0).tolist(), passed.sum(axis=0).tolist(), times)
            for preference, step in pattern.wanted:
                self._judgement.add(rollout[own[:, step]], preference.rejected_by != STUDENT)
            for column, place in enumerate(pattern.says):
                if place != NOTHING:
                    actions[alike.states, column] = classes.class_of[alike.rows[:, place]]
        tasks, steps = block.broadcast_from_rank0("task_id"), numbers(block.broadcast_from_rank0("step"))
        self._labels.add(actions[tested], classes.names, tasks.filter(pa.array(tested)).to_pylist(), steps[tested])

    def _rollouts(self, block: Block) -> Array:
        """A number of each step's rollout, `NOTHING` where its outcome is not known."""
        coded = block.steps["rollout_id"].combine_chunks().dictionary_encode()
        index = numbers(coded.indices)
        _, first = np.unique(index, return_index=True)
        met = block.at[first]
        tasks = block.broadcast_from_rank0("task_id").take(pa.array(met)).to_pylist()
        return self._judgement.meet(coded.dictionary.to_pylist(), tasks)[index]

    def verdict(self, spent: Mapping[str, float | None]) -> Judged:
        """Verdict, numbers for the manifest, and lines for the report. spent: USD of each teacher's answers."""
        found, aligned = signal(self._labels.labels()), self._judgement.alignment()
        audits = self._audit.lines(spent)
        said = verdict(found, aligned.p_value if aligned else None)
        numbers = {
            "signal": found and {"kappa": vars(found.kappa), "roles": vars(found.roles)},
            "alignment": aligned and vars(aligned),
            "teachers": [line.as_dict() for line in audits],
        }
        lines = [f"{said}: {_why(found)}", *_aligned(aligned), "", _table(audits, found), ""]
        return said, numbers, "\n".join(lines)


def blocks(states_per_task: Mapping[str, int], most: int = MOST_STATES) -> Collection[str]:
    """Tasks to test signal on: all, or where they have more states than `most`, a random part of them.

    By the digests of their names, so that equal work tests on the same ones.
    """
    left, chosen = most, set[str]()
    for task in sorted(states_per_task, key=store.digest):
        left -= states_per_task[task]
        if left < 0 and len(chosen) >= LEAST_TASKS:
            break
        chosen.add(task)
    return chosen


def _why(found: Signal | None) -> str:
    if found is None:
        return f"two teachers and {LEAST_TASKS} tasks are needed for a test at {LEVEL:g}"
    first, second = found.kappa, found.roles
    return (
        f"teachers agree in {first.agreement:.1%} of states, {first.chance:.1%} by chance "
        f"(kappa {first.kappa:.2f}, p = {first.p_value:.3f}); a majority of the others is against the student in "
        f"{second.against_student:.1%}, against a teacher in its place in {second.against_teacher:.1%} "
        f"(p = {second.p_value:.3f})"
    )


def _aligned(found: Alignment | None) -> list[str]:
    if found is None:
        return ["outcomes judge no pair"]
    return [
        f"outcomes call {found.right:.1%} of {found.pairs} preferences right, {found.by_chance:.1%} by chance "
        f"(p = {found.p_value:.3f})"
    ]


def _table(audits: Sequence[TeacherAudit], found: Signal | None) -> str:
    """backs: pairs; lost, won: pairs without the teacher; right, wrong: its minority votes, by the outcome."""
    cells = []
    for line in audits:
        own, rest = found.teachers[line.teacher] if found else (None, None)
        right = line.joined_passed + line.opposed - line.opposed_passed
        wrong = line.joined + line.opposed - right
        counts = (line.backed, line.lost_without, line.won_without, line.minority, right, wrong)
        cells.append((line.teacher, rest, own, *counts, line.usd_per_backed))
    formats = ("", ".2f", ".2f", *[""] * 6, ".4f")
    return tabulate(cells, AUDIT, tablefmt="plain", floatfmt=formats, missingval="-")
