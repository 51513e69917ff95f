"""The sides of a comparison: each has a name, and the same tasks have one name on all of them."""

import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from composer_stages.comparison.logs import JUDGES, ReadLog, read
from composer_stages.comparison.tables import BENCHMARKS, EVERY_COLUMN, Columns
from composer_stages.errors import BadInput, UsageError
from composer_stages.evaluation.outcomes import START
from composer_stages.formats.measurement import REWARD, ScoreKind
from composer_stages.formats.reports import differing_folders, stem
from composer_stages.runs.tables import with_column
from composer_stages.terms import SamplingUnit
from composer_stages.words import Sentence

LEAST_SHARED = 0.1
"""The share of the smaller side's tasks below which two logs are of different tasks."""
LONGEST_STEM = 24
"""Characters of a file's name, without its endings, that a side has as its name."""
OF_ARMS = "composer evaluate"
"""The program whose models are the arms of an experiment."""
ENOUGH_SHARED = 0.5
"""The share from which ids, or their last parts, match tasks."""


def read_sides(paths: Sequence[str], columns: Columns = EVERY_COLUMN) -> list[ReadLog]:
    """Return the sides of a comparison, each with a name by which people can tell it from the others."""
    logs = [read(path, columns) for path in paths]
    # What tells the tasks of one table apart is a part of their ids in all of them.
    outer = tuple(dict.fromkeys(name for log in logs for name in log.id_columns[:-1]))
    stated = [log.settings if log.id_columns else {} for log in logs]
    stated_by_all = (name for name in BENCHMARKS if name not in outer and all(name in each for each in stated))
    outer += tuple(name for name in stated_by_all if len({each[name] for each in stated}) > 1)
    outer = () if columns.ids else outer
    # And so is what the numbers of one are shares of.
    counted = {pair: path for path, log in zip(paths[::-1], logs[::-1], strict=True) for pair in log.counts.items()}
    together = replace(columns, outer=outer, counted=tuple((*pair, path) for pair, path in counted.items()))
    logs = [
        read(path, together)
        if log.id_columns
        and ((log.id_columns[:-1] != outer and not columns.ids) or {name for name, _ in counted} - log.counts.keys())
        else log
        for path, log in zip(paths, logs, strict=True)
    ]
    if len(logs) == 1:
        if (row := pc.index(pc.is_null(logs[0].items["model"]), True).as_py()) >= 0 and logs[0].models:
            raise BadInput("comparison.row-without-model", path=paths[0], row=row + 1)
        models = logs[0].models
        if len(models) < 2:
            raise UsageError("comparison.one-log", path=paths[0], models=models)
        # An arm that was not trained is what the others are compared with.
        logs = [logs[0].of_model(model) for model in sorted(models, key=lambda model: model != START)]
    else:
        for at, log in enumerate(logs):
            if len(log.models) > 1 and log.programs == (OF_ARMS,):
                raise UsageError("comparison.several-arms", path=paths[at], arms=log.models)
            notes = [Sentence("comparison.several-models", models=log.models)] if len(log.models) > 1 else []
            alike = [earlier.digests for earlier in logs[:at]]
            copy_of = alike.index(log.digests) if log.digests in alike else None
            logs[at] = replace(log, notes=(*log.notes, *notes), copy_of=copy_of)
        for (path, log), (selecting, later) in permutations(zip(paths, logs, strict=True), 2):
            if log.selected_by & later.lineage:
                raise BadInput("comparison.selected-by-side", path=path, selecting=selecting)
    stems = [stem(Path(log.label)) for log in logs]
    # Of a long name the first part that differs: of Inspect's logs these are the date, the time, the task and an id.
    parts = zip(*(re.split(r"_|(?<=\d)T(?=\d)", name) for name in stems), strict=False)
    folders = differing_folders(paths)
    for names in (
        ["+".join(log.models) for log in logs],
        *([folders] if folders else []),
        *([] if max(map(len, stems)) <= LONGEST_STEM else parts),
        stems,
        [log.date for log in logs],
        [log.label for log in logs],
    ):
        if len(set(names)) == len(names) and all(names):
            return [replace(log, name=name) for log, name in zip(logs, names, strict=True)]
    return [replace(log, name=path) for log, path in zip(logs, paths, strict=True)]


def choose_score(logs: Sequence[ReadLog], names: Sequence[str] = ()) -> list[ReadLog]:
    """Return the sides with their scores: the named one, or the one of each side in order, else the one they share.

    Raises `BadInput` with what there is where a side lacks it, or where several are on all sides and no program calls
    one its result.
    """
    # A side without any score is measured in that of the others.
    scored = [log.scored for log in logs]
    listed = [
        (log.name, [str(kind) for name in of_log for kind in _kinds(log, name)])
        for log, of_log in zip(logs, scored, strict=True)
    ]
    if len(names) not in (0, 1, len(logs)):
        raise UsageError("comparison.scores-of-other-sides", number=len(names), sides=len(logs))
    if names:
        chosen = [*names] * len(logs) if len(names) == 1 else [*names]
        for at, (log, joined) in enumerate(zip(logs, chosen, strict=True)):
            of_judges = [joined] if joined in log.scores else joined.split(JUDGES)
            for number, name in enumerate(of_judges):
                meant = [each for each in log.scores if any(kind.called(name) for kind in _kinds(log, each))]
                if name not in log.scores and len(meant) != 1:
                    raise BadInput("comparison.no-such-score", score=name, name=log.name, logs=listed)
                of_judges[number] = name if name in log.scores else meant[0]
            chosen[at] = JUDGES.join(of_judges)
    else:
        having = [of_log for of_log in scored if of_log] or [[REWARD]]
        scored = [of_log or having[0] for of_log in scored]
        shared = [name for name in having[0] if all(name in of_log for of_log in having)]
        mains = [name for name in shared if all(kind.main for log in logs for kind in _kinds(log, name))]
        of_sides = [shared] * len(logs) if shared else scored
        if len(mains) == 1:
            of_sides = [mains] * len(logs)
        chosen = [of_log[0] for of_log in of_sides]
        metrics = {kind.metric for log, name in zip(logs, chosen, strict=True) for kind in _kinds(log, name)} - {""}
        if any(len(of_log) > 1 for of_log in of_sides) or (not shared and len(metrics) > 1):
            raise BadInput("comparison.several-scores", shared=shared, logs=listed, score=chosen[-1])
    return [
        log.judged_by(name.split(JUDGES)) if JUDGES in name and name not in log.scores else log.scored_by(name)
        for log, name in zip(logs, chosen, strict=True)
    ]


def _kinds(log: ReadLog, name: str) -> list[ScoreKind]:
    return sorted(log.kinds(name), key=str) or [ScoreKind(name)]


def told_apart(logs: Sequence[ReadLog]) -> list[ReadLog]:
    """Return the sides with tasks of their own for what any of them has several items of under one name.

    Of which two sides share none, items are samples of a task.
    """
    pairs = [log.items.filter(pc.is_valid(log.items["item"])).group_by(["task", "item"]).aggregate([]) for log in logs]
    several = set[str]()
    for of_log in pairs:
        counts = of_log.group_by("task").aggregate([("item", "count")])
        several.update(counts["task"].filter(pc.greater(counts["item_count"], 1)).to_pylist())
    of_several = [of_log.filter(pc.is_in(of_log["task"], pa.array([*several], pa.string()))) for of_log in pairs]
    of_sides = Counter(pair for of_log in of_several for pair in zip(*of_log.to_pydict().values(), strict=True))
    shared = {task for (task, _), number in of_sides.items() if number > 1}
    if not shared:
        return [*logs]
    apart = pa.array(sorted(shared), pa.string())
    parted = []
    for log in logs:
        named = pc.binary_join_element_wise(log.items["task"], log.items["item"], "#")
        tasks = pc.if_else(pc.is_in(log.items["task"], apart), pc.coalesce(named, log.items["task"]), log.items["task"])
        parted.append(replace(log, items=with_column(log.items, "task", tasks)))
    return parted


def sampling(logs: Sequence[ReadLog], unit: str) -> SamplingUnit | None:
    """Return what tasks are resampled in: a column, what all logs declare that do, or None for tasks alone."""
    if unit:
        return SamplingUnit(unit)
    declared = {log.sampling for log in logs if log.sampling}
    return declared.pop() if len(declared) == 1 else None


@dataclass(frozen=True)
class TaskMatch:
    """How the tasks of two sides were found to be the same.

    way: "" for their ids, "questions", or "bare" for the last part of their ids. num_reworded: tasks of the same id
    whose questions differ, of `num_worded` whose questions are known. alike: ids that the other side writes otherwise.
    """

    way: str = ""
    num_reworded: int = 0
    num_worded: int = 0
    alike: tuple[str, ...] = ()


def match(base: ReadLog, candidate: ReadLog) -> tuple[ReadLog, TaskMatch]:
    """Return the candidate side with its tasks under the names of the first, and how they were found.

    Raises `BadInput` where they are of different tasks.
    """
    keys = {"": [_ids(log) for log in (base, candidate)], "questions": [_questions(log) for log in (base, candidate)]}
    # What a program puts before an id tells nothing where no question contradicts it.
    worded = any(len(side) for side in keys["questions"])
    shared, share = dict[str, int](), dict[str, float]()
    for way in ("", "questions", "bare"):
        if way == "bare":
            all_ids, is_known = keys[""], worded or share[""] >= ENOUGH_SHARED
            keys[way] = [side[:0] if is_known else _bare(side, all_ids) for side in all_ids]
        first, second = keys[way]
        shared[way] = pc.count_distinct(second["task"].filter(pc.is_in(second["key"], first["key"]))).as_py()
        share[way] = shared[way] / (min(map(len, keys[way])) or 1)
    agreeing, both_worded = _agreeing(base, candidate)
    # Ids that count the tasks of one file name other tasks in another: questions then pair more tasks than ids do.
    by_number = base.numbered and candidate.numbered and agreeing < both_worded
    if by_number or (
        share["questions"] >= LEAST_SHARED and shared["questions"] * (both_worded or 1) > agreeing * shared[""]
    ):
        way = "questions"
    else:
        way = next((way for way in ("", "bare") if share[way] >= ENOUGH_SHARED), "")
    if share[way] < LEAST_SHARED:
        raise BadInput(
            "comparison.other-tasks",
            first=base.name,
            second=candidate.name,
            num_first=base.num_tasks,
            num_second=candidate.num_tasks,
            same_ids=shared[""],
            same_questions=shared["questions"],
            task_first=base.items["task"][0].as_py(),
            task_second=candidate.items["task"][0].as_py(),
            tables=bool(base.id_columns and candidate.id_columns),
            written=_written_otherwise(base, candidate),
        )
    if not way:
        return candidate, TaskMatch(way, both_worded - agreeing, both_worded, _alike(keys[""][0], keys[""][1], worded))
    first, second = keys[way]
    both = second.join(first, "key", join_type="inner", right_suffix="_base")
    at = pc.index_in(candidate.items["task"], both["task"])
    # An id that is another task's in the first.
    renamed = pc.binary_join_element_wise(candidate.items["task"], f"({candidate.name})", " ")
    # Of tasks that share a question, that of the same id.
    same = pc.is_in(_ids_with_questions(candidate), value_set=_ids_with_questions(base).combine_chunks())
    tasks = pc.coalesce(both["task_base"].take(at), pc.if_else(same, candidate.items["task"], None), renamed)
    return replace(candidate, items=with_column(candidate.items, "task", tasks)), TaskMatch(way)


def _alike(base: pa.Table, candidate: pa.Table, worded: bool) -> tuple[str, ...]:
    """Return ids of the first side alone that the other has in another writing.

    Raises `BadInput` where both count the same number of tasks, one from 0 on and one from 1, and nothing says which is
    which.
    """
    pairs = ((base["key"], candidate["key"]), (candidate["key"], base["key"]))
    alone = [sorted(ids.filter(pc.invert(pc.is_in(ids, others))).to_pylist()) for ids, others in pairs]
    if not worded and len(base) == len(candidate) and sorted(alone) == [["0"], [f"{len(base)}"]]:
        raise BadInput("comparison.ids-from-0-and-1", first=alone[0][0], second=alone[1][0])
    written = {_plain(name) for name in alone[1]}
    return tuple(name for name in alone[0] if _plain(name) in written)


def _plain(name: str) -> str:
    text = unicodedata.normalize("NFKC", name).casefold()
    return re.sub(r"\s+|(?<!\d)0+(?=\d)|\.0$", "", text)


def _ids(log: ReadLog) -> pa.Table:
    """Return every task with its id as the key."""
    tasks = pc.unique(log.items["task"])
    return pa.table({"key": tasks, "task": tasks})


def _ids_with_questions(log: ReadLog) -> pa.ChunkedArray:
    """Return the id and the question of each row, as one text."""
    return pc.binary_join_element_wise(log.items["question"], log.items["task"], " ")


def _bare(ids: pa.Table, of_sides: Sequence[pa.Table]) -> pa.Table:
    """Return every task with the last part of its id as the key; none where several have the same.

    Neither where all ids are a name and a number, which counts the tasks of what is named.
    """
    bare = pa.array([name.rpartition("/")[2] for name in ids["key"].to_pylist()], pa.string())
    counting = (pc.match_substring_regex(side["key"], r".+/[a-z]{0,3}\d+$") for side in of_sides)
    is_counted = all(pc.all(numbered).as_py() for numbered in counting)
    return ids[:0] if is_counted or pc.count_distinct(bare).as_py() < len(ids) else with_column(ids, "key", bare)


def _written_otherwise(base: ReadLog, candidate: ReadLog) -> tuple[str, str] | None:
    """Return two ids that differ in how they are written alone, where most do: `1` and `1.0`, `t7` and `T_007`."""

    def bare(task: str) -> tuple[str, str]:
        head = task.removesuffix(".0").rstrip("0123456789")
        number = task.removesuffix(".0")[len(head) :]
        return head.rstrip("-_ ").casefold(), number.lstrip("0") or number[:1]

    first, second = (
        {bare(task): task for task in pc.unique(log.items["task"]).to_pylist()} for log in (base, candidate)
    )
    apart = [(task, second[form]) for form, task in first.items() if form in second and second[form] != task]
    return apart[0] if len(apart) >= ENOUGH_SHARED * min(base.num_tasks, candidate.num_tasks) else None


def _questions(log: ReadLog) -> pa.Table:
    """Return every task with its question as the key; none where tasks share questions, which then identify none."""
    worded = log.items.filter(pc.is_valid(log.items["question"]))
    pairs = worded.group_by(["question", "task"]).aggregate([]).select(["question", "task"])
    alone = pairs.group_by("question", use_threads=False).aggregate([("task", "count"), ("task", "first")])
    alone = alone.filter(pc.equal(alone["task_count"], 1))
    if len(alone) < 0.9 * len(pairs) and not log.numbered:
        alone = alone[:0]
    return pa.table({"key": alone["question"], "task": alone["task_first"]})


def _agreeing(base: ReadLog, second: ReadLog) -> tuple[int, int]:
    """Return how many tasks of the same id have the same question, and of how many both questions are known."""
    sides = [
        log.items.filter(pc.is_valid(log.items["question"]))
        .group_by("task", use_threads=False)
        .aggregate([("question", "first")])
        for log in (base, second)
    ]
    both = sides[0].join(sides[1], "task", join_type="inner", right_suffix="_other")
    return int(pc.sum(pc.equal(both["question_first"], both["question_first_other"])).as_py() or 0), len(both)
