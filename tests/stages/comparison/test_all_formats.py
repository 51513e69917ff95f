"""Logs of every format: they compare as their imports do, and no damage is a crash or a silent answer."""

import copy
import gzip
import json
import random
import shutil
import traceback
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.refusals import refused
from support.score_logs import IMPORTED, TABLES, make
from support.transcripts import imported

from composer_stages.comparison import report
from composer_stages.comparison.config import Config
from composer_stages.comparison.decision import LogComparison, compare
from composer_stages.comparison.sides import read_sides
from composer_stages.errors import BadInput, ComposerError
from composer_stages.runs.kinds import ROLLOUT

A = [float(at % 2) for at in range(24)]
B = [*(float(at % 4 != 0) for at in range(23)), None]


def compared(*paths: Path) -> LogComparison:
    config = Config(paths=[*map(str, paths)])
    return compare(read_sides(config.paths, config.columns), config)[0]


def numbers(comparison: LogComparison) -> tuple[Any, ...]:
    """What must not differ between two ways to read the same samples."""
    difference = comparison.differences[0]
    sides = [(side.num_tasks, side.samples, side.num_scored, round(side.mean, 9)) for side in comparison.sides]
    missing = [sum(side.values()) for side in difference.missing.by_side] if difference.missing else []
    return round(difference.estimate, 9), difference.num_tasks, difference.wins, difference.losses, sides, missing


@pytest.mark.parametrize("name", IMPORTED)
def test_logs_and_their_imports_give_the_same_numbers(tmp_path: Path, name: str) -> None:
    paths = [make(tmp_path / side, name, scores) for side, scores in (("a", A), ("b", B))]
    logs = numbers(compared(*paths))
    assert logs[1] in (23, 24) and abs(logs[0]) > 0.2
    assert numbers(compared(*(imported(tmp_path / f"run-{path.name}", path).path for path in paths))) == logs


# Damage.


def cut_text(content: bytes) -> bytes:
    return content.rstrip()[: -max(len(content) // 5, 3)]


def cut_gzip(content: bytes) -> bytes:
    return gzip.compress(content)[:-20]


@pytest.mark.parametrize("end", [cut_text, cut_gzip])
@pytest.mark.parametrize("name", [*IMPORTED, *TABLES])
def test_a_log_that_was_cut_off_is_refused(tmp_path: Path, name: str, end: Callable[[bytes], bytes]) -> None:
    """Text files are cut within a line: what is left would be another, smaller set of tasks."""
    whole, cut = (make(tmp_path / side, name, A) for side in "ab")
    files = [cut] if cut.is_file() else [*filter(Path.is_file, cut.rglob("*"))]
    texts = [path for path in files if path.suffix in (".json", ".jsonl", ".csv")]
    for path in texts:
        path.write_bytes(end(path.read_bytes()))
    if texts:
        with pytest.raises(ComposerError) as refusal:
            compared(whole, cut)
        assert refusal.value.exit_code in (2, 4)


def test_an_import_of_a_log_that_was_cut_off_is_refused_too(tmp_path: Path) -> None:
    whole, cut = (make(tmp_path / side, "verifiers", A) for side in "ab")
    file = cut if cut.is_file() else next(cut.rglob("results.jsonl"))
    file.write_bytes(cut_text(file.read_bytes()))
    run = imported(tmp_path / "run", cut)
    assert 0 < len(run.rows(ROLLOUT)) < len(A)
    refused(lambda: compared(whole, run.path), BadInput, file.name, code="comparison.line-no-json")


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "unreadable"),
        (b'{"messages": [', "line-no-json"),
        (b"\x89PNG\r\n\x1a\n", "not-text"),
        (b"[" * 5000, "line-no-json"),
    ],
)
def test_a_damaged_file_beside_logs_is_refused_by_its_name(tmp_path: Path, content: bytes, code: str) -> None:
    """It may be a log of the side, whose tasks would count as missing."""
    whole, damaged = (make(tmp_path / side, "verifiers", A) for side in "ab")
    folder = damaged if damaged.is_dir() else damaged.parent
    assert compared(whole, folder).differences[0].num_tasks == len(A)
    (folder / "more.jsonl").write_bytes(content)
    refused(lambda: compared(whole, folder), BadInput, "more.jsonl", code=f"comparison.{code}")


Mutation = Callable[[random.Random, list[Any]], list[Any]]


def drop(draw: random.Random, records: list[Any]) -> list[Any]:
    """A record, or a key anywhere, is gone."""
    if draw.random() < 0.3:
        return [record for at, record in enumerate(records) if at != draw.randrange(len(records))]
    holder, key = draw.choice([*places(records)])
    del holder[key]
    return records


def duplicate(draw: random.Random, records: list[Any]) -> list[Any]:
    """A record, or a value of a list, is there twice."""
    lists = [holder[key] for holder, key in places(records) if isinstance(holder[key], list) and holder[key]]
    chosen = draw.choice([records, *lists])
    chosen.insert(draw.randrange(len(chosen) + 1), copy.deepcopy(draw.choice(chosen)))
    return records


def reorder(draw: random.Random, records: list[Any]) -> list[Any]:
    """Records, and the keys of each object, are in another order."""

    def shuffled(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: shuffled(value[key]) for key in draw.sample([*value], len(value))}
        return [shuffled(item) for item in value] if isinstance(value, list) else value

    return draw.sample(shuffled(records), len(records))


def retype(draw: random.Random, records: list[Any]) -> list[Any]:
    """A value is of another type."""
    holder, key = draw.choice([*places(records)])
    value = holder[key]
    others = [None, [value], {"value": value}, str(value), "", True, -1, 1e400, 2**70, "ERROR"]
    holder[key] = draw.choice([other for other in others if type(other) is not type(value)])
    return records


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every holder of a value, with its key."""
    for key, inner in [*(value.items() if isinstance(value, dict) else enumerate(value))]:
        yield value, key
        if isinstance(inner, dict | list):
            yield from places(inner)


MUTATIONS: list[Mutation] = [drop, duplicate, reorder, retype]


def mutate(folder: Path, draw: random.Random) -> str:
    """Change one file of a log in its own layout; returns what was done."""
    path = draw.choice(sorted(each for each in folder.rglob("*") if each.is_file()))
    mutation = draw.choice([*MUTATIONS, split])
    if mutation is split:
        split(path, draw)
    elif path.suffix == ".eval":
        with zipfile.ZipFile(path) as archive:
            members = [[name, json.loads(archive.read(name))] for name in archive.namelist()]
        chosen = draw.choice(members)
        chosen[1] = next(iter(mutation(draw, [chosen[1]])), None)
        with zipfile.ZipFile(path, "w") as archive:
            for name, content in members:
                archive.writestr(name, json.dumps(content))
    else:
        write(path, mutation(draw, load(path)))
    return f"{mutation.__name__} in {path.name}"


def load(path: Path) -> list[Any]:
    if path.suffix == ".parquet":
        return pq.read_table(path).to_pylist()
    if path.suffix == ".csv":
        return [line.split(",", 2) for line in path.read_text().splitlines()]
    text = path.read_text()
    return [json.loads(line) for line in text.splitlines()] if path.suffix == ".jsonl" else [json.loads(text)]


def write(path: Path, records: list[Any]) -> None:
    if path.suffix == ".parquet":
        rows = [record for record in records if isinstance(record, dict)]
        try:
            pq.write_table(pa.Table.from_pylist(rows), path)
        except (pa.ArrowException, TypeError, ValueError):  # values of several types, which Parquet has not
            texts = [{key: None if value is None else str(value) for key, value in row.items()} for row in rows]
            pq.write_table(pa.Table.from_pylist(texts), path)
    elif path.suffix == ".csv":
        path.write_text("".join(",".join(map(str, row if isinstance(row, list) else [row])) + "\n" for row in records))
    else:
        texts = [json.dumps(record) for record in records]
        path.write_text("\n".join(texts) + "\n" if path.suffix == ".jsonl" else "".join(texts[:1]))


def split(path: Path, draw: random.Random) -> None:
    """A file ends in the middle of a byte sequence, or its records are in two files."""
    if path.suffix == ".jsonl" and draw.random() < 0.5:
        records = load(path)
        at = draw.randrange(1, len(records))
        write(path, records[:at])
        write(path.with_name(f"second-{path.name}"), records[at:])
    else:
        content = path.read_bytes()
        path.write_bytes(content[: draw.randrange(1, len(content))])


def is_named(before: LogComparison, after: LogComparison) -> bool:
    """Whether a report says that something is other than in the whole log."""
    first, second = before.differences[0], after.differences[0]
    of_first, of_second = (
        [(s.num_tasks, s.samples, s.num_scored, s.notes) for s in each.sides] for each in (before, after)
    )
    return (
        of_first != of_second
        or (first.missing, first.num_tasks) != (second.missing, second.num_tasks)
        or (before.pairings[0].matched, before.pairings[0].settings)
        != (after.pairings[0].matched, after.pairings[0].settings)
        or (before.metrics, before.binary, before.unit) != (after.metrics, after.binary, after.unit)
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", [*IMPORTED, *TABLES])
def test_a_damaged_log_gives_the_same_answer_a_refusal_or_a_named_difference(tmp_path: Path, name: str) -> None:
    base, whole = (make(tmp_path / side, name, scores) for side, scores in (("a", A), ("b", B)))
    before = compared(base, whole)
    ends, wrong = {"same": 0, "refused": 0, "named": 0}, list[str]()
    for seed in range(200):
        draw, folder = random.Random(seed), tmp_path / f"m{seed}"
        shutil.copytree(whole if whole.is_dir() else whole.parent, folder)
        done = mutate(folder, draw)
        path = folder if whole.is_dir() or len([*folder.iterdir()]) > 1 else folder / whole.name
        try:
            after = compared(base, path)
            report.text(after)
        except ComposerError as refusal:
            ends["refused"] += 1
            if not str(refusal).endswith((".", "?", ")")):
                wrong.append(f"{seed} {done}: {refusal}")
        except Exception as error:  # what the test is about
            where = traceback.extract_tb(error.__traceback__)[-1]
            wrong.append(f"{seed} {done}: {error!r} in {Path(where.filename).name}:{where.lineno}")
        else:
            is_same = abs(after.differences[0].estimate - before.differences[0].estimate) < 1e-9
            ends["same" if is_same else "named"] += 1
            if not (is_same or is_named(before, after)):
                wrong.append(f"{seed} {done}: {report.describe_size(after, after.differences[0])} without a word")
        shutil.rmtree(folder)
    assert wrong == [], f"{len(wrong)} of {ends}:\n" + "\n".join(wrong)
