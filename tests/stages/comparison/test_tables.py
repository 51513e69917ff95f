"""Tables of ids and scores are read to the character, and what is doubtful in them is refused by its row or line."""

import bz2
import gzip
import lzma
import uuid
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.refusals import refused
from support.transcripts import assistant, document, jsonl, user

from composer_stages.comparison import logs, report
from composer_stages.comparison.config import Config
from composer_stages.comparison.decision import compare
from composer_stages.comparison.sides import read_sides
from composer_stages.errors import BadInput, UsageError

BIG = 12345678901234567000


def read(path: Path, **settings: Any) -> logs.ReadLog:
    return logs.read(str(path), Config(paths=[str(path)], **settings).columns)


def compared(*paths: Path, **settings: Any) -> tuple[int, float, str]:
    """The number of tasks that two tables share, the difference, and how tasks were matched."""
    config = Config(paths=[*map(str, paths)], **settings)
    comparison, tasks = compare(read_sides(config.paths, config.columns), config)
    return len(tasks), round(comparison.differences[0].estimate, 6), comparison.pairings[0].matched.way


def made(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    """A table in the format of its name; in CSV None is empty."""
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist([*rows]), path)
    elif path.suffix == ".csv":
        names = [*rows[0]]
        lines = [[("" if row[name] is None else str(row[name])) for name in names] for row in rows]
        quoted = [",".join(f'"{cell}"' if "," in cell or "\n" in cell else cell for cell in line) for line in lines]
        path.write_text("\n".join([",".join(names), *quoted]) + "\n")
    else:
        jsonl(path, *rows)
    return path


FORMATS = pytest.mark.parametrize("ending", ["csv", "jsonl", "parquet"])


@FORMATS
@pytest.mark.parametrize(
    "ids",
    [
        [str(BIG + at) for at in range(40)],
        [BIG // 1000 + at for at in range(40)],
        [f"{at:03}" for at in range(40)],
        [f"1.{at}" for at in range(10, 100, 10)],
        [
            *("1", "01", "1.0", "1e0", "+1"),
            *("2020-01-01", "2020-01-01 00:00:00"),
            *("true", "True", "nan", "None", "ü"),
        ],
    ],
    ids=["beyond 64 bits", "numbers", "leading zeros", "versions", "of one value"],
)
def test_an_id_is_the_text_of_its_cell(tmp_path: Path, ending: str, ids: list[Any]) -> None:
    path = made(tmp_path / f"a.{ending}", [{"id": name, "score": at % 2} for at, name in enumerate(ids)])
    log = read(path)
    assert log.items["task"].to_pylist() == [*map(str, ids)]
    assert log.scores["score"].to_pylist() == [at % 2 for at in range(len(ids))]


@pytest.mark.parametrize(
    ("written", "ids"),
    [
        (
            f'{{"id": {BIG * 10}, "score": 1}}\n{{"id": {BIG * 10 + 1}, "score": true}}',
            [f"{BIG * 10}", f"{BIG * 10 + 1}"],
        ),
        ('{"id": 1.10, "score": 1}\n{"id": 1.1, "score": 1}', ["1.10", "1.1"]),
        ('{"id": 1, "score": 1}\n{"id": 1.0, "score": 1}', ["1", "1.0"]),
        ('{"id": 1, "score": "1"}\n{"id": "t2", "score": 1.0}', ["1", "t2"]),
        ('[{"id": 1.10, "score": 1}, {"id": 007e1, "score": 1}]'.replace("007e1", "7e1"), ["1.10", "7e1"]),
        ('{"id": "2024-01-01", "score": 1}\n{"id": "2024-01-02", "score": 1}', ["2024-01-01", "2024-01-02"]),
        ('{"doc": {"id": 3}, "id": "x", "score": 1}\n{"doc": {"id": 4}, "id": "x", "score": 1}', ["x", "x"]),
    ],
)
def test_ids_of_json_keep_their_digits(tmp_path: Path, written: str, ids: list[str]) -> None:
    (tmp_path / "a.jsonl").write_text(written + "\n")
    assert read(tmp_path / "a.jsonl").items["task"].to_pylist() == ids


def test_a_path_within_an_object_is_an_id(tmp_path: Path) -> None:
    rows = [{"doc": {"id": at}, "id": "x", "score": at % 2} for at in range(4)]
    assert read(made(tmp_path / "a.jsonl", rows), id="doc.id").items["task"].to_pylist() == ["0", "1", "2", "3"]


def test_the_same_text_as_a_number_and_as_a_text_is_refused(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", {"id": "1", "score": 1}, {"id": "2", "score": 1}, {"id": 1, "score": 0})
    refused(lambda: read(path), BadInput, code="comparison.id-as-number-and-text", id="1", row=3)


@FORMATS
@pytest.mark.parametrize("empty", [None, "", "  "])
def test_an_empty_id_is_refused_with_its_row(tmp_path: Path, ending: str, empty: str | None) -> None:
    rows = [{"id": f"t{at}" if at != 7 else empty, "score": 1} for at in range(9)]
    path = made(tmp_path / f"a.{ending}", rows)
    refused(lambda: read(path), BadInput, code="comparison.empty-id", row=8, column="id")


@FORMATS
@pytest.mark.parametrize("column", ["benchmark", "subset", "task", "split", "config", "subject", "lang"])
def test_ids_that_repeat_are_told_apart_by_the_column_beside_them(tmp_path: Path, ending: str, column: str) -> None:
    """On both sides, also where the other one holds each id once."""
    rows = [{"id": at, column: name, "score": (at + (name == "y")) % 2} for name in "xy" for at in range(6)]
    first, whole = made(tmp_path / f"a.{ending}", rows[:6]), made(tmp_path / f"b.{ending}", rows)
    assert read(whole).id_columns == (column, "id") and read(first).id_columns == ("id",)
    assert compared(whole, first) == (6, 0.0, "")
    assert compared(whole, whole) == (12, 0.0, "")
    bare = made(tmp_path / f"c.{ending}", [{"id": at, "score": 1} for at in range(6)])
    refused(lambda: compared(whole, bare), UsageError, code="comparison.no-id-column", column=column, outer=column)
    assert compared(whole, bare, id="id") == (6, 0.5, ""), "the user's word counts"


def test_two_columns_never_make_one_id_of_two_tasks(tmp_path: Path) -> None:
    rows = [{"subset": subset, "id": name, "score": 1} for subset, name in (("a/b", "c"), ("a", "b/c"), ("a", "c"))]
    assert len({*read(made(tmp_path / "a.jsonl", rows), id="subset,id").items["task"].to_pylist()}) == 3


def test_seeds_and_what_does_not_tell_apart_are_samples_of_a_task(tmp_path: Path) -> None:
    rows = [{"id": at, "split": "test", "seed": seed, "score": (at + seed) % 2} for seed in range(3) for at in range(4)]
    log = read(made(tmp_path / "a.csv", rows))
    assert log.id_columns == ("id",) and log.num_tasks == 4 and len(log.items) == 12


def asked(path: Path, order: Sequence[int], score: Any, text: str = "What is {}?", **beside: Any) -> Path:
    """Questions under the numbers of their rows."""
    rows = [
        {
            "id": row,
            "question": text.format(at),
            "score": score(at),
            **{name: value(at) for name, value in beside.items()},
        }
        for row, at in enumerate(order)
    ]
    return made(path, rows)


@FORMATS
def test_numbers_beside_questions_are_matched_by_question(tmp_path: Path, ending: str) -> None:
    base = asked(tmp_path / f"a.{ending}", range(30), lambda at: at % 2)
    turned = asked(tmp_path / f"b.{ending}", range(29, -1, -1), lambda at: at % 2)
    assert compared(base, turned) == (30, 0.0, "questions")
    # One of them is another question: no number makes it the same task.
    other = asked(tmp_path / f"c.{ending}", [*range(29), 99], lambda at: at % 2)
    assert compared(base, other) == (29, 0.0, "questions")
    foreign = asked(tmp_path / f"d.{ending}", range(30), lambda at: at % 2, "Who is {}?")
    refused(lambda: compared(base, foreign), BadInput, code="comparison.other-tasks", same_ids=30, same_questions=0)
    assert compared(base, foreign, id="id") == (30, 0.0, "")
    program = document(
        tmp_path / "log.json",
        {
            "eval": {"task": "t", "model": "m", "scorers": [{"name": "match"}]},
            "status": "success",
            "samples": [
                {"id": at, "epoch": 1, "input": f"What is {at}?", "messages": [user(f"What is {at}?"), assistant("x")]}
                | {"scores": {"match": {"value": at % 2}}}
                for at in range(30)
            ],
        },
    )
    assert compared(program, turned, score=["match", "score"]) == (30, 0.0, "questions")


def test_tasks_that_share_a_question_stay_apart(tmp_path: Path) -> None:
    """Two of 30 questions are one text with other choices, which are in another order in the second table."""
    text = ["Which is true?" if at in (3, 20) else f"What is {at}?" for at in range(30)]
    sides = [
        made(
            tmp_path / f"{name}.jsonl",
            [
                {"id": row, "question": text[at], "choices": [f"a{at}", "b"], "score": at % 2}
                for row, at in enumerate(order)
            ],
        )
        for name, order in (("a", range(30)), ("b", range(29, -1, -1)))
    ]
    assert compared(*sides) == (30, 0.0, "questions")
    rows = [{"question": text[at], "choices": f"a{at}", "score": 1} for at in range(30)]
    bare = made(tmp_path / "a.csv", rows), made(tmp_path / "b.csv", rows[::-1])
    assert compared(*bare) == (30, 0.0, "") and read(bare[0]).id_columns == ("choices", "question")


def test_an_id_beside_several_questions_is_refused(tmp_path: Path) -> None:
    rows = [{"id": at % 5, "question": f"What is {at}?", "score": 1} for at in range(10)]
    path = made(tmp_path / "a.csv", rows)
    values = {"rows": [1, 6], "questions": ["What is 0?", "What is 5?"]}
    refused(lambda: read(path), BadInput, code="comparison.id-of-several-questions", id="0", **values)
    assert read(path, id="id").num_tasks == 5 and read(path, id="question").num_tasks == 10


@pytest.mark.parametrize(
    ("columns", "kinds"),
    [
        ({"score": 0.9, "correct": True}, ["score", "correct"]),
        ({"score": {"accuracy": 1, "style": 0.5, "why": "good"}}, ["score.accuracy", "score.style"]),
        ({"score": [1, 0.5]}, ["score.0", "score.1"]),
        ({"scores": {"rubric": {"accuracy": 1}}}, ["scores.rubric.accuracy"]),
    ],
)
def test_every_score_is_read_by_its_name(tmp_path: Path, columns: dict[str, Any], kinds: list[str]) -> None:
    for ending in ("jsonl", "parquet"):
        path = made(tmp_path / f"a.{ending}", [{"id": f"t{at}", **columns} for at in range(20)])
        assert [*read(path).scores] == kinds
        if len(kinds) > 1:
            refused(lambda path=path: compared(path, path), BadInput, code="comparison.several-scores", shared=kinds)
        for kind in kinds:
            assert compared(path, path, score=kind)[:2] == (20, 0.0)


def test_rows_that_ended_in_an_error_count_as_they_stand_and_are_named(tmp_path: Path) -> None:
    """Where a row has no score, the error is why; numbers, words of success and blanks are no errors."""
    errors, scores = ["timeout", "timeout", "none", "", "0.5", None], [0, None, 1, 1, 1, 1]
    rows = [{"id": f"t{at}", "score": scores[at % 6], "error": errors[at % 6]} for at in range(24)]
    log = read(str(jsonl(tmp_path / "a.jsonl", *rows)))
    assert [note.code for note in log.notes] == ["comparison.errors-counted"] and "4 samples" in log.notes[0]
    assert log.items["reason"].to_pylist()[:3] == ["timeout", "timeout", None]
    rows = [{"id": f"t{at}", "score": 0, "error": f"{at} " * 99} for at in range(24)]
    (note,) = read(str(jsonl(tmp_path / "b.jsonl", *rows))).notes
    assert "24 samples" in note and len(note) < 600, "many long errors are no pages of notes"
    assert log.items["state"].to_pylist()[:2] == ["scored with an error", None]


def test_a_column_or_path_of_any_name_is_the_score_where_it_is_named(tmp_path: Path) -> None:
    rows = [{"Nr": at, "marks": {"exam": {"total": at}}, "id": "x"} for at in range(20)]
    path = made(tmp_path / "a.jsonl", rows)
    assert compared(path, path, score="marks.exam.total", id="Nr") == (20, 0.0, "")
    refused(lambda: read(path), BadInput, code="comparison.no-table", ids=(), columns=["Nr", "marks", "id"])
    refused(
        lambda: read(path, id="nr", score="marks.exam.total"), UsageError, code="comparison.no-id-column", column="nr"
    )


def long_form(path: Path, gain: int, metrics: Mapping[str, Any], seeds: int = 1) -> Path:
    rows = [
        {"task_id": at, "metric": metric, "seed": seed, "value": value(at, gain)}
        for metric, value in metrics.items()
        for seed in range(seeds)
        for at in range(20)
    ]
    return made(path, rows)


@pytest.mark.parametrize("seeds", [1, 3])
def test_a_row_of_each_metric_is_a_score_of_each(tmp_path: Path, seeds: int) -> None:
    metrics = {"accuracy": lambda at, gain: (at % 2) | gain, "points": lambda at, gain: at - gain}
    a, b = (long_form(tmp_path / f"{name}.csv", gain, metrics, seeds) for name, gain in (("a", 0), ("b", 1)))
    refused(lambda: compared(a, b), BadInput, code="comparison.several-scores", shared=["accuracy", "points"])
    assert compared(a, b, score="accuracy")[:2] == (20, 0.5) and compared(a, b, score="points")[:2] == (20, -1.0)
    one = long_form(tmp_path / "c.csv", 1, {"accuracy": metrics["accuracy"]}, seeds)
    assert compared(a, one)[:2] == (20, 0.5), "the one that both have"
    loss = [
        long_form(tmp_path / f"{name}.csv", gain, {"val_loss": metrics["points"]})
        for name, gain in (("d", 0), ("e", 1))
    ]
    refused(lambda: compared(*loss), BadInput, code="comparison.direction-unknown", metrics=["val_loss"])
    refused(lambda: compared(one, loss[0]), BadInput, code="comparison.several-scores", shared=[])


@pytest.mark.parametrize(
    ("column", "values", "scores"),
    [
        ("key", ["tone", "correctness"], ["correctness", "tone"]),
        ("evaluator", ["tone", "correctness"], ["correctness", "tone"]),
        ("evaluator", [f"person {at}" for at in range(20)], ["score"]),
        ("measure", [1, 2], ["score"]),
        ("name", ["task {}"], ["score"]),
    ],
    ids=["key", "evaluator", "annotators of some tasks each", "numbers", "name of the task"],
)
def test_what_has_the_same_values_for_most_tasks_names_metrics(
    tmp_path: Path, column: str, values: list[Any], scores: list[str]
) -> None:
    per_task = 2
    rows = [
        {"id": f"t{at}", column: str(values[(at * (len(values) > 2) + k) % len(values)]).format(at), "score": k}
        for at in range(20)
        for k in range(per_task)
    ]
    log = read(made(tmp_path / "a.csv", rows))
    assert sorted(log.scores) == scores and len(log.items) == 20 * (1 if len(scores) == 2 else per_task)


def test_rows_that_are_counted_are_known_by_what_they_asked(tmp_path: Path) -> None:
    rows = [{"question_id": f"q{at}", "score": at % 2} for at in range(20)]
    a, b = (
        made(tmp_path / f"{name}.csv", [{"id": at, **row} for at, row in enumerate(of_side)])
        for name, of_side in (("a", rows), ("b", rows[::-1]))
    )
    log = read(a)
    assert compared(a, b)[:2] == (20, 0.0) and log.id_columns == ("question_id",)
    # Several rows of a question may be samples of it, or tasks of their own.
    repeated = [{"id": at, "question_id": f"q{at // 4}", "score": at % 2} for at in range(80)]
    log = read(made(tmp_path / "c.csv", repeated))
    assert log.id_columns == ("id",) and "question_id" in log.groups


def test_numbers_beside_a_benchmark_are_its_tasks_and_beside_a_task_its_samples(tmp_path: Path) -> None:
    for column in ("index", "problem_id"):
        rows = [{"task": name, column: at, "score": at % 2} for name in ("gsm8k", "math") for at in range(20)]
        log = read(made(tmp_path / f"{column}.csv", rows))
        assert log.id_columns == ("task", column) and log.num_tasks == 40
    samples = [{"task": f"t{at}", "index": k, "score": at % 2} for at in range(20) for k in range(4)]
    assert read(made(tmp_path / "samples.csv", samples)).num_tasks == 20


def test_a_list_of_named_values_has_scores_by_their_names(tmp_path: Path) -> None:
    parts = [[{"name": "tone", "value": 0.5}, {"name": "right", "value": at % 2}] for at in range(20)]
    rows = [{"id": at, "scores": of_row[:: 1 if at % 3 else -1]} for at, of_row in enumerate(parts)]
    log = read(made(tmp_path / "a.jsonl", rows))
    assert sorted(log.scored) == ["scores.right.value", "scores.tone.value"]
    assert log.scores["scores.right.value"].to_pylist() == [at % 2 for at in range(20)]


@pytest.mark.parametrize(
    ("column", "values"), [("approach", ("plain", "retrieval")), ("run", ("base", "tuned")), ("temperature", (0, 1))]
)
def test_rows_that_differ_in_an_unknown_column_are_refused(tmp_path: Path, column: str, values: Sequence[Any]) -> None:
    rows = [{"id": at, column: value, "score": at % 2} for at in range(9) for value in values]
    shown = ("a.csv", column, *map(str, values), f"id,{column}")
    refused(lambda: read(made(tmp_path / "a.csv", rows)), BadInput, *shown)
    assert read(tmp_path / "a.csv", id=f"id,{column}").num_tasks == 18


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("run", "run{1}"),
        ("seed_name", "seed {1:x}"),
        ("finished_at", "2026-0{1}-01"),
        ("answer_text", "{0}"),
        ("grade", "g{2}"),
        ("rank", "{1}"),
    ],
)
def test_repeats_may_differ_in_numbers_of_runs_and_in_how_they_went(tmp_path: Path, column: str, value: str) -> None:
    rows = [
        {"id": at, column: value.format(at, repeat + 1, (at * repeat) % 3 > 1), "score": at % 2}
        for at in range(9)
        for repeat in range(3)
    ]
    assert read(made(tmp_path / "a.csv", rows)).num_tasks == 9


@FORMATS
def test_a_score_of_points_is_its_share_of_the_highest(tmp_path: Path, ending: str) -> None:
    a, b = (
        made(tmp_path / f"{n}.{ending}", [{"id": i, "score": i % 2, "max_score": n} for i in range(20)])
        for n in (5, 10)
    )
    assert compared(a, b)[:2] == (20, -0.05)
    shares = made(tmp_path / f"s.{ending}", [{"id": i, "score": i / 40, "max_score": 5} for i in range(20)])
    assert read(shares).scores["score"].to_pylist()[10] == 0.25 and not read(shares).notes


@FORMATS
def test_numbers_of_successes_are_shares_of_what_is_beside_them(tmp_path: Path, ending: str) -> None:
    a, b = (
        made(tmp_path / f"{n}.{ending}", [{"id": i, "passed": n * (i % 2), "total": 2 * n} for i in range(20)])
        for n in (5, 10)
    )
    assert compared(a, b)[:2] == (20, 0.0) and any("total" in note for note in read(a).notes)
    other = made(tmp_path / f"o.{ending}", [{"id": i, "score": i % 5, "passed": i % 2, "total": 1} for i in range(20)])
    assert read(other).scores["score"].to_pylist()[:5] == [0, 1, 2, 3, 4] and not read(other).notes


QUOTED = 'id,score,note\nt0,1,"a, ""b""\nand c"\nt1,0,"{}"\n'


@pytest.mark.parametrize(
    ("content", "scores"),
    [
        (QUOTED.format("x").encode(), [1, 0]),
        (QUOTED.format("line\n" * 500_000).encode(), [1, 0]),
        (QUOTED.format("x").replace("\n", "\r\n").encode("utf-8-sig"), [1, 0]),
        (QUOTED.format("ü").encode("utf-16"), [1, 0]),
        (QUOTED.format("ü").encode("utf-16-le"), [1, 0]),
        (gzip.compress(QUOTED.format("ü").encode("utf-16")), [1, 0]),
        (b"\n\nid,score\n\nt0, TRUE \nt1,NaN\n\nt2,inf\nt3,-1e-3\nt4,\nt5,N/A", [1, None, None, -0.001, None, None]),
        (b"id,note,score,note\nt0,a,0.5,b\n", [0.5]),
        (b"id,score,,\nt0,0.5,,\n", [0.5]),
        (b"id,score\rt0,1\rt1,0", [1, 0]),
    ],
    ids=[
        *("quoted", "long", "bom", "utf-16", "utf-16 without mark", "gzip", "blank lines", "another column twice"),
        *("columns without a name", "lines of old Macs"),
    ],
)
def test_csv_is_read_whatever_wrote_it(tmp_path: Path, content: bytes, scores: list[float | None]) -> None:
    (tmp_path / "a.csv").write_bytes(content)
    log = read(tmp_path / "a.csv")
    assert log.scores["score"].to_pylist() == scores
    assert log.items["task"].to_pylist() == [f"t{at}" for at in range(len(scores))]


@pytest.mark.parametrize(
    ("content", "code", "values"),
    [
        ('id,score,note\nt0,1,"a\nb"\nt1,1,a, b\n', "other-columns", {"line": 4, "row": ["t1", "1", "a", " b"]}),
        ("id,score\nt0,1\nt1\n", "other-columns", {"line": 3, "number": 1}),
        ('id,score,note\nt0,1,"open\nt1,0,x\n', "bad-csv", {"line": 2}),
        ('id,score,note\nt0,1,x\nt1,0,"a" b\n', "bad-csv", {"line": 3}),
        ("id;score\nt0;0,5\n", "other-separator", {"head": "id;score", "row": ["t0;0", "5"]}),
        ("id\tscore\nt0\t1\n", "other-separator", {"head": "id\tscore"}),
        ('id,score\nt0,"0,5"\n', "bad-score", {"score": "0,5", "row": 1}),
        ("id,score\nt0,1\nt1,1.234.5\n", "bad-score", {"row": 2}),
        ("id,score\nt0,1\n\xff1,1\n", "not-text", {"line": 3}),
        ("id,score,score\nt0,1,0\n", "column-twice", {"column": "score"}),
        ("id,score,id\nt0,1,0\n", "column-twice", {"column": "id"}),
        ("id,score\n1.2345678901234568e+19,1\n", "rounded-id", {"row": 1, "id": "1.2345678901234568e+19"}),
        ("id,score\nt0,1\n1.23457E+18,1\n", "rounded-id", {"row": 2, "id": "1.23457E+18"}),
        ("id,metric,value\nt0,acc,1\nt0,,1\n", "empty-id", {"row": 2, "column": "metric"}),
        ("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\n", "unreadable", {}),
        ("id,score\n", "no-row", {}),
        ("id,score", "no-row", {}),
        ("", "no-row", {}),
    ],
)  # fmt: skip
def test_what_is_no_row_of_csv_is_refused_with_its_place(
    tmp_path: Path, content: str, code: str, values: dict[str, Any]
) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(content.encode("latin-1"))
    refused(lambda: read(path), BadInput, "a.csv", code=f"comparison.{code}", **values)


@pytest.mark.parametrize(
    ("lines", "code", "values"),
    [
        (['{"id": "t0", "score": 1}', '{"id": "t1", "score": 1, "score": 0}'], "column-twice", {"column": "score"}),
        (['{"id": "t0", "score": 1}', '{"score": 1}'], "empty-id", {"row": 2}),
        (['{"id": "t0", "score": 1}', "[1]"], "line-no-object", {"line": 2}),
        (['{"id": "t0", "score": 1}', '{"id": "t1", "score": 1'], "line-no-json", {"line": 2}),
        (['{"id": "t0", "score": {"why": "good"}}'], "no-table", {"columns": ["id", "score.why"]}),
    ],
)
def test_what_is_no_row_of_json_is_refused_with_its_place(
    tmp_path: Path, lines: list[str], code: str, values: dict[str, Any]
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(lines) + "\n")
    refused(lambda: read(path), BadInput, "a.jsonl", code=f"comparison.{code}", **values)


@pytest.mark.parametrize(
    ("document", "keys"),
    [
        ({"id": {"0": "t0", "1": "t1"}, "score": {"0": 1, "1": 0}}, ["id", "score"]),
        ({"id": ["t0", "t1"], "score": [1, 0]}, ["id", "score"]),
        ({"columns": ["id", "score"], "data": [["t0", 1]]}, ["columns", "data"]),
        ({"t0": True, "t1": False}, ["t0", "t1"]),
    ],
    ids=["by columns of pandas", "by columns", "of W&B", "by ids"],
)
def test_a_table_that_is_one_object_is_refused(tmp_path: Path, document: dict[str, Any], keys: list[str]) -> None:
    path = jsonl(tmp_path / "a.json", document)
    refused(lambda: read(path), BadInput, "a.json", "orient='records'", code="comparison.one-object", keys=keys)


@pytest.mark.parametrize(
    ("about", "tasks"),
    [
        (lambda side, at: {"id": at, "score": at % 2}, 20),
        (lambda side, at: {"id": f"{side}{at}", "score": at % 2}, 1),
        (lambda side, at: {"task_id": at, "score": at % 2, "target": "B"}, 20),
        (lambda side, at: {"task_id": at, "score": at % 2, "target": 1}, 20),
        (lambda side, at: {"task_id": at, "f1": at % 2}, 20),
        (lambda side, at: {"task_id": at, "scores": {"acc": at % 2}}, 20),
    ],
    ids=["ids of tasks", "ids of rows", "a target in words", "a target that is a number", "a metric", "scores"],
)
def test_scores_beside_chats_that_begin_alike(
    tmp_path: Path, about: Callable[[str, int], dict[str, Any]], tasks: int
) -> None:
    chat = {"messages": [user("Solve the task."), assistant("Done.")]}
    a, b = (made(tmp_path / f"{side}.jsonl", [about(side, at) | chat for at in range(20)]) for side in "ab")
    assert compared(a, b)[:2] == (tasks, 0)


def test_half_a_surrogate_pair_is_read(tmp_path: Path) -> None:
    rows = [{"id": f"\ud83d{at}", "score": at % 2, "question": f"\ude00 {at}", "error": "\ud83d"} for at in range(9)]
    path = made(tmp_path / "a.jsonl", rows)
    assert compared(path, path)[0] == 9 and read(path).items["task"][1].as_py() == "\\ud83d1"


@pytest.mark.parametrize("others", [["b.jsonl"], ["config.json"], ["b.jsonl", "config.json"]])
def test_a_table_among_files_of_a_folder_has_to_be_named(tmp_path: Path, others: list[str]) -> None:
    made(tmp_path / "a.jsonl", [{"id": 1, "score": 1}])
    for name in others:
        jsonl(tmp_path / name, {"seed": 1} if "config" in name else {"id": 1, "score": 0})
    tables = ["a.jsonl", *(name for name in others if "config" not in name)]
    refused(lambda: read(tmp_path), BadInput, code="comparison.several-tables", tables=tables)


@pytest.mark.parametrize(
    ("name", "score", "refuses"),
    [("mean", 0.65, True), (" Total ", 13, True), ("overall avg.", 65, True), ("mean", 1, False), ("t", 0.65, False)],
)
def test_a_row_of_totals_is_no_task(tmp_path: Path, name: str, score: float, refuses: bool) -> None:
    rows = [{"id": at, "score": int(at % 3 > 0)} for at in range(20)]
    a, b = made(tmp_path / "a.csv", rows), made(tmp_path / "b.csv", [*rows, {"id": name, "score": score}])
    if refuses:
        refused(lambda: compared(a, b), BadInput, "b.csv", code="comparison.total-row", id=name, score=score)
    else:
        assert compared(a, b)[0] == 20


def test_ids_that_are_bytes_are_their_text(tmp_path: Path) -> None:
    numbers = [uuid.UUID(int=2**127 + at) for at in range(3)]
    of_bytes = pa.array([number.bytes for number in numbers], pa.binary(16))
    tables = {"text": pa.array([b"a", b"b", b"c"]), "bytes": of_bytes, "uuid": of_bytes.cast(pa.uuid())}
    for name, column in tables.items():
        pq.write_table(pa.table({"id": column, "score": [1, 0, 1]}), tmp_path / f"{name}.parquet")
    assert read(tmp_path / "text.parquet").items["task"].to_pylist() == ["a", "b", "c"]
    assert read(tmp_path / "uuid.parquet").items["task"].to_pylist() == [*map(str, numbers)]
    refused(lambda: read(tmp_path / "bytes.parquet"), BadInput, "bytes.parquet", code="comparison.not-text")


@pytest.mark.parametrize("packed", [bz2.compress, lzma.compress, lambda rows: b"SQLite format 3\0" + rows])
def test_kinds_of_files_that_are_not_read_are_named(tmp_path: Path, packed: Callable[[bytes], bytes]) -> None:
    (tmp_path / "a.jsonl.x").write_bytes(packed(b'{"id": 1, "score": 1}'))
    refused(lambda: read(tmp_path / "a.jsonl.x"), BadInput, code="comparison.unread-kind")
    with zipfile.ZipFile(tmp_path / "a.csv.zip", "w") as archive:
        archive.writestr("a.csv", "id,score\n1,1\n")
    refused(lambda: read(tmp_path / "a.csv.zip"), BadInput, "zip", code="comparison.unread-kind")


@FORMATS
def test_one_file_of_both_sides_names_a_model_in_each_row(tmp_path: Path, ending: str) -> None:
    rows = [{"id": f"t{at}", "model": "ab"[at % 2] if at != 5 else None, "score": 1} for at in range(12)]
    path = made(tmp_path / f"a.{ending}", rows)
    refused(lambda: compared(path), BadInput, code="comparison.row-without-model", row=6)
    whole = made(
        tmp_path / f"b.{ending}", [{**row, "id": f"t{at // 2}", "model": "ab"[at % 2]} for at, row in enumerate(rows)]
    )
    assert compared(whole) == (6, 0.0, "")


def test_a_folder_with_one_table_is_that_table(tmp_path: Path) -> None:
    rows = [{"id": f"t{at}", "score": at % 2} for at in range(12)]
    first = made(tmp_path / "a.csv", rows)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "SCORES.CSV").write_bytes(first.read_bytes())
    (tmp_path / "b" / "README.md").write_text("about")
    assert compared(first, tmp_path / "b") == (12, 0.0, "")
    made(tmp_path / "b" / "more.csv", rows)
    named = ["SCORES.CSV", "more.csv"]
    refused(lambda: read(tmp_path / "b"), BadInput, code="comparison.several-tables", tables=named)
    (tmp_path / "b.txt").write_text("id,score\nt0,1\n")
    refused(lambda: read(tmp_path / "b.txt"), BadInput, ".csv", code="comparison.line-no-json", line=1)


def test_text_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    """Arrow reads such bytes as text; that they are none shows where an id is used."""
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"id": "t0", "score": 1}\n{"id": "caf\xe9", "score": 1}\n')
    refused(lambda: read(path), BadInput, "a.jsonl:2", code="comparison.not-text", line=2)
    ids = pa.Array.from_buffers(
        pa.string(), 2, [None, pa.array([0, 2, 6], pa.int32()).buffers()[1], pa.py_buffer(b"t0caf\xe9")]
    )
    pq.write_table(pa.table({"id": ids, "score": [1, 0]}), tmp_path / "a.parquet")
    refused(lambda: read(tmp_path / "a.parquet"), BadInput, "a.parquet", code="comparison.unreadable")


def test_a_document_that_ends_too_early_is_named_without_an_empty_quotation(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('[{"id": "t0", "score": 1},\n')
    refused(lambda: read(path), BadInput, "the text ends there", code="comparison.line-no-json", line=2)


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    packed = gzip.compress(b"id,score\n" + b"".join(b"t%d,1\n" % at for at in range(50)))
    for end in (2, 12, 40, len(packed) - 4):
        (tmp_path / "a.csv.gz").write_bytes(packed[:end])
        refused(lambda: read(tmp_path / "a.csv.gz"), BadInput, "a.csv.gz", code="comparison.unreadable")
    path = made(tmp_path / "a.parquet", [{"id": "t", "score": 1}] * 50)
    path.write_bytes(path.read_bytes()[:-20])
    refused(lambda: read(path), BadInput, "a.parquet")


@pytest.mark.parametrize(
    ("column", "ended", "well"),
    [
        *(("status", "error", "ok"), ("state", "cancelled", "done"), ("finish_reason", "timeout", "stop")),
        *(("termination_reason", "AgentTimeoutError", ""), ("status_code", 500, 200), ("timed_out", True, False)),
        *(("error", {"type": "X"}, {}), ("exception_type", "OSError", None)),
    ],
)
def test_what_ended_in_an_error_is_named_beside_its_score(tmp_path: Path, column: str, ended: Any, well: Any) -> None:
    rows = [{"id": at, "score": 0, column: ended if at < 5 else well} for at in range(20)]
    (note,) = read(made(tmp_path / "a.jsonl", rows)).notes
    assert note.startswith("5 samples counted")
    verdicts = [{"id": at, "score": at % 2, "status": ["failed", "passed"][at % 2]} for at in range(20)]
    assert not read(made(tmp_path / "b.jsonl", verdicts)).notes, "words that are verdicts"


@pytest.mark.parametrize(
    ("mark", "others", "refuses"),
    [
        *((-1, [0, 1], True), (-1, [3, 9], True), (999, [0, 1], True), (-1, [0, 100], True)),
        *((-1, [1], False), (-1, [0, 7], False), (-1, [-0.5, 1], False), (9, [0, 1], False)),
    ],
)
def test_a_value_that_marks_what_has_no_score_is_asked_about(
    tmp_path: Path, mark: int, others: list[float], refuses: bool
) -> None:
    values = [*others * 10, mark]
    a, b = (made(tmp_path / f"{n}.csv", [{"id": i, "score": v} for i, v in enumerate(values)]) for n in "ab")
    if refuses:
        refused(lambda: compared(a, b), BadInput, "--scale", code="comparison.mark", mark=mark, number=1)
    assert compared(a, b, scale="-1,999")[0] == len(values)
    reward = made(tmp_path / "c.csv", [{"id": i, "reward": v} for i, v in enumerate(values)])
    assert refuses or compared(a, reward)[0] == len(values)


def test_ids_in_other_writings_are_named_and_those_from_0_and_from_1_refused(tmp_path: Path) -> None:
    names = ["café", "A1", "01", "x y", "7"], ["cafe\u0301", "a1", "1", "xy", "7"]
    sides = [[*own, *map(str, range(100, 120))] for own in names]
    a, b = (
        made(tmp_path / f"{side}.csv", [{"id": name, "score": 1} for name in ids])
        for side, ids in zip("ab", sides, strict=True)
    )
    config = Config(paths=[str(a), str(b)])
    (pairing,) = compare(read_sides(config.paths), config)[0].pairings
    assert pairing.matched.alike == tuple(sorted(names[0][:4])), "none of them is matched"
    zero, first = (made(tmp_path / f"{k}.csv", [{"id": i + k, "score": 1} for i in range(30)]) for k in (0, 1))
    refused(lambda: compared(zero, first), BadInput, code="comparison.ids-from-0-and-1", first="0", second="30")
    shop, air = (
        made(tmp_path / f"{domain}.csv", [{"id": f"{domain}/{i}", "score": 1} for i in range(30)])
        for domain in ("shop", "air")
    )
    refused(lambda: compared(shop, air), BadInput, code="comparison.other-tasks", same_ids=0)
    assert compared(zero, air)[2] == "bare"


def test_weights_are_named_and_a_refusal_lists_every_column(tmp_path: Path) -> None:
    weighed = made(tmp_path / "a.csv", [{"id": i, "score": 1, "weight": i} for i in range(9)])
    assert "weight" in read(weighed).notes[0]
    nested = made(tmp_path / "b.jsonl", [{"question_id": i, "pass@1": 1.0, "graded_list": [True]} for i in range(9)])
    columns = ["question_id", "pass@1", "graded_list"]
    refused(lambda: read(nested), BadInput, "--score", code="comparison.no-table", columns=columns)


@pytest.mark.parametrize("column", ["split", "subject", "dataset_version", "num_fewshot"])
def test_a_column_that_says_of_each_file_another_thing_is_named_first(tmp_path: Path, column: str) -> None:
    a, b = (made(tmp_path / f"{n}.csv", [{"id": i, "score": i % 2, column: f"{n}x"} for i in range(20)]) for n in "ab")
    config = Config(paths=[str(a), str(b)])
    first = report.text(compare(read_sides(config.paths), config)[0]).split("\n\n")[0]
    assert f"{column}: ax and bx" in " ".join(first.split())


@pytest.mark.parametrize(
    ("one", "other", "example"),
    [
        ("{}", "{}.0", ("0", "0.0")),
        ("t{}", "T_{:03}", ("t0", "T_000")),
        ("shop/{}", "air/{}", None),
        ("{}", "q{}", None),
    ],
)
def test_ids_that_are_written_otherwise_are_shown(
    tmp_path: Path, one: str, other: str, example: tuple[str, str] | None
) -> None:
    a, b = (
        made(tmp_path / f"{name}.csv", [{"id": form.format(i), "score": i % 2} for i in range(30)])
        for name, form in (("a", one), ("b", other))
    )
    refused(lambda: compared(a, b), BadInput, code="comparison.other-tasks", written=example)


def test_the_same_numbers_are_other_tasks_in_another_benchmark(tmp_path: Path) -> None:
    a, b = (made(tmp_path / f"{n}.csv", [{"id": i, "score": 1, "benchmark": n} for i in range(20)]) for n in "ab")
    refused(lambda: compared(a, b), BadInput, "--id", code="comparison.other-tasks", same_ids=0)
    assert compared(a, b, id="id")[0] == 20


@pytest.mark.parametrize("total", ["total", "max_score"])
@FORMATS
def test_what_one_side_counts_is_counted_on_all(tmp_path: Path, ending: str, total: str) -> None:
    """A model that never passes two of five tests has no number above 1, and is no better for it."""
    score = "passed" if total == "total" else "score"
    rows = [[{"id": at, score: at % most, total: 5} for at in range(60)] for most in (6, 2)]
    a, b = (made(tmp_path / f"{name}.{ending}", table) for name, table in zip("ab", rows, strict=True))
    assert compared(a, b)[1] == pytest.approx(-0.4) and compared(b, a)[1] == pytest.approx(0.4)
    bare = made(tmp_path / f"bare.{ending}", [{"id": row["id"], score: row[score]} for row in rows[0]])
    kind = {"code": "comparison.points-of-another-kind", "score": score, "total": total}
    refused(lambda: compared(a, bare), BadInput, "bare", **kind, lacks=True)
    true = made(tmp_path / f"true.{ending}", [{"id": at, score: at % 2 > 0, total: 5} for at in range(60)])
    refused(lambda: compared(true, a), BadInput, "true", **kind, lacks=False)


def test_a_row_for_each_trial_is_beside_counts_of_trials(tmp_path: Path) -> None:
    counted = made(tmp_path / "a.csv", [{"id": at, "passed": at % 5, "n": 4} for at in range(40)])
    each = made(tmp_path / "b.csv", [{"id": at, "passed": int(at % 2)} for at in range(40) for _ in range(4)])
    assert compared(counted, each)[:2] == (40, 0.0)
    other = made(tmp_path / "c.csv", [{"id": at, "passed": at % 5, "total": 4} for at in range(40)])
    assert compared(counted, other)[:2] == (40, 0.0)


@pytest.mark.parametrize(
    ("first", "second"),
    [((0.0, 0.4, 1.0), (0, 0, 30)), ((0.0, 0.4, 1.0), (1, 4, 9)), ((0.0, 1.0), (0, 0, 100))],
    ids=["percent", "points of 10", "passed in percent"],
)
def test_shares_and_points_are_told_apart_where_most_are_0(
    tmp_path: Path, first: tuple[float, ...], second: tuple[float, ...]
) -> None:
    a, b = (
        made(tmp_path / f"{name}.csv", [{"id": at, "score": values[at % len(values)]} for at in range(60)])
        for name, values in (("a", first), ("b", second))
    )
    refused(lambda: compared(b, a), BadInput, code="comparison.scales-differ", first="a", second="b")


@pytest.mark.parametrize("column", ["config", "group", "source", "type"])
@pytest.mark.parametrize("word", ["seed", "Run ", "trial-", "epoch_"])
def test_numbered_repeats_in_a_column_of_benchmarks_are_asked_about(tmp_path: Path, column: str, word: str) -> None:
    rows = [{"id": at, "score": at % 2, column: f"{word}{number}"} for at in range(30) for number in range(5)]
    table = made(tmp_path / "a.csv", rows)
    refused(lambda: read(table), BadInput, code="comparison.rows-of-what", column=column)
    assert read(table, id=f"id,{column}").num_tasks == 150


@pytest.mark.parametrize(("docs", "alike"), [((6, 60), False), ((60, 6), False), ((6, 6), True)])
def test_units_are_the_same_on_both_sides(tmp_path: Path, docs: tuple[int, int], alike: bool) -> None:
    """Else which side is given first decided what is significant."""
    a, b = (
        made(tmp_path / f"{name}.csv", [{"id": at, "doc": f"{name}{at % num}", "score": at % 2} for at in range(60)])
        for name, num in zip("ab", docs, strict=True)
    )
    if alike:
        assert compared(a, b, unit="doc")[0] == 60
    else:
        refused(lambda: compared(a, b, unit="doc"), BadInput, code="comparison.other-units", first="a", name="b")
    rows = [{"id": at // 2, "doc": f"{at}", "repeat": at % 2, "score": 1} for at in range(60)]
    twice = made(tmp_path / "c.csv", rows)
    refused(lambda: compared(twice, a, unit="doc"), BadInput, "Task", code="comparison.other-units", name="c")


def test_a_file_of_failures_alone_is_refused(tmp_path: Path) -> None:
    """The Berkeley Function Calling Leaderboard lists who failed; without its first line all of a side had failed."""
    failed = [{"id": f"simple_{at}", "valid": False, "error_type": "t"} for at in range(4)]
    lines = [{"accuracy": 0.6, "correct_count": 6, "total_count": 10}, *failed]
    path = jsonl(tmp_path / "BFCL_v4_simple_score.json", *lines)
    refused(lambda: compared(path, path), BadInput, "failures alone", code="comparison.failures-alone")
