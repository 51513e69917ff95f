"""Votes on arrays are the votes that one counts by hand, state after state, with exact fractions."""

import subprocess
import sys
from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
from hypothesis import HealthCheck, given, settings, strategies as st
from needs import needs

from composer_stages import extract_pairs
from composer_stages.envs.base import Task
from composer_stages.pairs.actions import canonical
from composer_stages.pairs.blocks import CanonicalForms, SortedRows, StateBlock, equal_rows
from composer_stages.pairs.evidence import passed_by_rollout
from composer_stages.pairs.stage import Extraction
from composer_stages.pairs.states import AnsweredState, AnsweredStates, patterns, recorded_classes, vote
from composer_stages.runs import runner, store
from composer_stages.runs.kinds import PAIR, ROLLOUT, STEP, TASK
from composer_stages.runs.run import Run
from tests.stages.pairs.answered import ACTIONS, drawn

TEACHERS = ("v", "t", "u")
WHOLE = st.sampled_from(ACTIONS)
STATE = st.tuples(
    st.lists(st.tuples(WHOLE, st.booleans()), min_size=1, max_size=3),
    st.lists(st.tuples(st.sampled_from(range(len(TEACHERS))), st.none() | WHOLE), max_size=8),
)
Drawn = list[tuple[list[tuple[str, bool]], list[tuple[int, str | None]]]]


def block(drawn_states: Drawn, begin: int = 0) -> StateBlock:
    """The same as tables, as they come from DuckDB."""
    steps, answers = [], []
    for n, (students, given_answers) in enumerate(drawn_states, begin):
        for step, (action, truncated) in enumerate(students):
            place = {"n": n, "state_sha256": f"s{n}", "rollout_id": f"r{n}", "task_id": "t", "step": step}
            steps.append(place | {"has_ids": False, "action": action, "truncated": truncated, "by_teacher": False})
        answer = {"n": n, "served": "m", "cost_usd": 0.1}
        answers += [{**answer, "teacher": TEACHERS[who], "whole": text} for who, text in given_answers]
    columns = [("n", pa.int64()), ("teacher", pa.string()), ("whole", pa.string()), ("served", pa.string())]
    told = pa.Table.from_pylist(answers, pa.schema([*columns, ("cost_usd", pa.float64())]))
    return StateBlock.from_tables(begin, begin + len(drawn_states), TEACHERS, pa.Table.from_pylist(steps), told)


def by_hand(students: list[tuple[str, bool]], answers: list[tuple[int, str | None]]) -> tuple[Counter[Any], set[Any]]:
    """Reasons for no pair, and pairs as (rule, chosen, rejected, votes of both)."""
    said = [[text for who, text in answers if who == teacher] for teacher in range(len(TEACHERS))]
    votes, reasons, pairs = Counter[str](), Counter[Any](), set()
    shares = [Counter(form for text in texts if text is not None and (form := canonical(text))) for texts in said]
    for texts, share in zip(said, shares, strict=True):
        votes.update({form: Fraction(number, len(texts)) for form, number in share.items()})
    winner = next((form for form, number in votes.items() if number > Fraction(len(TEACHERS), 2)), None)
    for action, truncated in students:
        found = set()
        own = canonical(action)
        if winner is not None and own != winner:
            chosen = next(text for texts in said for text in texts if text is not None and canonical(text) == winner)
            found = {("majority_over_student", chosen, action, votes[winner], votes[own] if own else 0)}
        elif winner is not None:
            for form, (texts, share) in ((f, one) for one in zip(said, shares, strict=True) for f in one[1]):
                if share[form] > share[winner] and not any(canonical(rejected) == form for _, _, rejected, *_ in found):
                    text = next(text for text in texts if text is not None and canonical(text) == form)
                    found.add(("student_over_minority", action, text, votes[winner], votes[form]))
        missing = 2 * sum(any(text is not None for text in texts) for texts in said) <= len(TEACHERS)
        why = ["student_truncated"] * truncated or ["not_asked"] * (not answers) or ["missing_answers"] * missing
        why = why or ["no_majority"] * (winner is None) or ["unanimous"] * (not found)
        reasons.update(why)
        pairs |= set() if why else found
    return reasons, pairs


@given(st.lists(STATE, min_size=1, max_size=6))
def test_votes_on_arrays_are_the_votes_by_hand(drawn_states: Drawn) -> None:
    whole = block(drawn_states, begin=3)
    seen = list[int]()
    for alike, pattern in patterns(whole, whole.classes_by_text()):
        for state, rows in zip(alike.states.tolist(), alike.rows.tolist(), strict=True):
            seen.append(state)
            reasons, pairs = by_hand(*drawn_states[state])
            texts = [whole.actions[row].as_py() for row in rows]
            found = [(one.preference, texts[one.chosen], texts[one.rejected]) for one in pattern.pairs]
            told = {(one.rule, *sides, one.votes_chosen, one.votes_rejected) for one, *sides in found}
            assert Counter(pattern.reasons) == reasons
            assert told == {
                (*names, *(round(float(number), 9) for number in votes)) for *names, a, b in pairs for votes in [(a, b)]
            }
            assert len(found) == len(told) == pattern.shared
    assert sorted(seen) == list(range(len(drawn_states))), "every state once"


@settings(max_examples=40)
@given(st.lists(STATE, min_size=1, max_size=6))
def test_recorded_votes_give_the_classes_of_texts(drawn_states: Drawn) -> None:
    """Where nothing had to be run, what `vote` wrote into the journal says the same as the texts."""
    whole, records = block(drawn_states), []
    for students, answers in drawn_states:
        steps = [{"action": action, "truncated": truncated} for action, truncated in students]
        said = {name: [text for who, text in answers if TEACHERS[who] == name] for name in TEACHERS}
        told = vote(AnsweredState("d", steps, said), None, None)  # type: ignore[arg-type]
        records.append(orjson.loads(store.encode(told)))
    one, other = (
        [(pattern, alike.states.tolist()) for alike, pattern in patterns(whole, classes)]
        for classes in (whole.classes_by_text(), recorded_classes(whole, records))
    )
    assert one == other


def test_pairs_do_not_depend_on_the_size_of_blocks(tmp_path: Path) -> None:
    runs = drawn(tmp_path, 1)
    tasks = {
        row["task_id"]: Task(row["task_id"], "e", "s", row["family"], "", {}) for row in runs["rollouts"].rows(TASK)
    }
    passed = passed_by_rollout(runs["rollouts"].rows(ROLLOUT))
    found = []
    with AnsweredStates(runs["rollouts"], runs["teacher_actions"], tmp_path) as states:
        for most in (8192, 7):
            extraction = Extraction(states, runs["teacher_actions"], passed)
            votes = ((block, block.classes_by_text()) for block in states.blocks(most))
            rows = [row for batch in extraction.drop(extraction.pairs(votes, tasks), None) for row in batch.to_pylist()]
            found.append((rows, extraction.dropped, extraction.account.rules, extraction.account.texts()))
    assert found[0] == found[1] and len(found[0][0]) == 80
    run = Run(runner.execute("extract-pairs", runs, extract_pairs.Config(compare="canonical"), root=tmp_path).path)
    assert run.rows(PAIR) == found[0][0] and run.manifest.summary["dropped"] == +found[0][1]
    assert {row["rule"] for row in run.rows(PAIR)} == {"majority_over_student", "student_over_minority"}
    # Those that the outcome of a rollout contradicts are no others: one that took the rejected action, however spelled.
    config = extract_pairs.Config(compare="canonical", outcome="ignore")
    every = Run(runner.execute("extract-pairs", runs, config, root=tmp_path).path)

    def done(row: dict[str, Any], side: str) -> tuple[str, str]:
        return row["state_sha256"], canonical(row[side]) or row[side]

    took = {done(row, "action") for row in runs["rollouts"].rows(STEP) if passed[row["rollout_id"]]}
    kept = [
        row for row in every.rows(PAIR) if row["rule"] == "student_over_minority" or done(row, "rejected") not in took
    ]
    assert kept == run.rows(PAIR) and len(every.rows(PAIR)) == 99


def test_blocks_are_the_states_one_after_the_other(tmp_path: Path) -> None:
    given_runs = drawn(tmp_path, 2)
    with AnsweredStates(given_runs["rollouts"], given_runs["teacher_actions"], tmp_path) as states:
        one_by_one = list(states)
        (whole,) = states.blocks()
        digests = [state.digest for state in one_by_one]
        assert list(states.digests()) == digests == whole.first_step_column("state_sha256").to_pylist()
    assert whole.steps["action"].to_pylist() == [step["action"] for state in one_by_one for step in state.steps]
    said = [text for state in one_by_one for texts in state.teachers.values() for text in texts]
    assert whole.answers["whole"].to_pylist() == said


ROWS = st.lists(st.tuples(st.integers(0, 9), st.text("ab", max_size=3)), max_size=40)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ROWS, st.integers(1, 200), st.integers(1, 100), st.sets(st.integers(1, 10)))
def test_sorted_rows_do_not_depend_on_batches(
    tmp_path: Path, rows: list[tuple[int, str]], run_bytes: int, piece_bytes: int, ends: set[int]
) -> None:
    columns = {"n": [n for n, _ in rows], "nth": list(range(len(rows)))[::-1], "text": [text for _, text in rows]}
    schema = pa.schema([("n", pa.int64()), ("nth", pa.int64()), ("text", pa.string())])
    batches = pa.table(columns, schema).to_batches(max_chunksize=7)
    reader = pa.RecordBatchReader.from_batches(schema, batches)
    stored = SortedRows(tmp_path / "rows", reader, run_bytes=run_bytes, piece_bytes=piece_bytes)
    expected = sorted((n, -at, text) for at, (n, text) in enumerate(rows))
    bounds = [*sorted(ends), 10]
    for _ in range(2):
        parts = [part.to_pydict() for part in stored.parts(bounds)]
        found = [row for part in parts for row in zip(part["n"], part["text"], strict=True)]
        assert found == [(n, text) for n, _, text in expected]
        for begin, end, part in zip([0, *bounds], bounds, parts, strict=False):
            assert all(begin <= n < end for n in part["n"])


def test_forms_are_numbered_alike_in_every_block_until_too_many_are_known() -> None:
    forms = CanonicalForms(max_texts=3)
    first = forms.numbers(pa.array(["```bash\nls\n```", "```bash\nls  -l\n```", "nothing"], pa.string()))
    names = forms.names
    assert first.tolist() == [0, 1, -1] and names == ["ls", "ls -l"]
    again = forms.numbers(pa.array(["```bash\nls -l\n```"], pa.string()))
    assert names == ["ls", "ls -l"], "a block keeps the names that it was numbered by"
    assert forms.names == ["ls -l"] and again.tolist() == [0]
    assert forms.numbers(pa.array(["```bash\nls -l\n```", "```bash\ncd\n```"], pa.string())).tolist() == [0, 1]


@needs("pandas")
def test_voting_does_not_import_pandas(tmp_path: Path) -> None:
    """Pyarrow does wherever pandas is installed: 0.35 s of processor time."""
    runs = drawn(tmp_path, 0)
    code = f"""
import sys
from pathlib import Path
from composer_stages.envs.base import Task
from composer_stages.pairs.stage import pair_rows
from composer_stages.pairs.states import AnsweredStates, patterns
from composer_stages.runs.run import Run
from composer_stages.runs.kinds import TASK
from composer_stages.runs.tables import leave_pandas_out

leave_pandas_out()
rollouts, answers = Run(Path({str(runs["rollouts"].path)!r})), Run(Path({str(runs["teacher_actions"].path)!r}))
tasks = {{row["task_id"]: Task(row["task_id"], "e", "s", row["family"], "") for row in rollouts.rows(TASK)}}
with AnsweredStates(rollouts, answers, Path({str(tmp_path)!r})) as states:
    (block,) = states.blocks()
    classes = block.classes_by_text()
    assert len(pair_rows(block, classes, list(patterns(block, classes)), tasks)[0])
assert "pandas" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@settings(max_examples=40)
@given(st.lists(st.tuples(st.integers(-1, 2), st.integers(0, 1)), min_size=1, max_size=20))
def test_equal_rows_are_found(rows: list[tuple[int, int]]) -> None:
    found = [tuple(part.tolist()) for part in equal_rows(np.array(rows, dtype=np.int32))]
    assert sorted(found) == sorted({tuple(i for i, row in enumerate(rows) if row == one) for one in rows})
