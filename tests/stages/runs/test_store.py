"""Sealed files are whole or absent, equal lines give equal bytes, damage is named with file and line."""

import gzip
import os
import sys
import time
from pathlib import Path

import pytest
from support.limits import file_size_limit

from composer_stages.errors import BadInput
from composer_stages.runs import store
from composer_stages.runs.store import Journal


def test_equal_lines_give_equal_bytes(tmp_path: Path) -> None:
    for name in "ab":
        store.seal_lines(tmp_path / f"{name}.jsonl.gz", [b'{"x":1}', b'{"x":2}'])
    assert (tmp_path / "a.jsonl.gz").read_bytes() == (tmp_path / "b.jsonl.gz").read_bytes()
    assert list(store.read_lines(tmp_path / "a.jsonl.gz")) == [{"x": 1}, {"x": 2}]


@pytest.mark.parametrize("levels", [300, 2_000, 100_000])
def test_a_document_that_is_nested_too_deeply_is_named(tmp_path: Path, levels: int) -> None:
    """Among the documents are those of models and adapters that others made."""
    (tmp_path / "config.json").write_text("[" * levels + "]" * levels)
    with pytest.raises(BadInput, match=rf"config\.json is not valid JSON \(it is nested {levels:,} levels deep"):
        store.read_json(tmp_path / "config.json")


def test_what_is_no_file_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    """Such as /dev/stdout, which a rename would replace by a file."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    store.write_sealed(pipe, b"a page")
    assert os.read(reader, 99) == b"a page" and pipe.is_fifo()
    os.close(reader)


def test_a_cut_file_and_a_malformed_line_are_named(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    store.seal_lines(path, [b'{"x":"%d"}' % i for i in range(5000)])
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(BadInput, match=r"a\.jsonl\.gz is damaged after line"):
        list(store.read_lines(path))
    path.write_bytes(gzip.compress(b'{"x":1}\n{"x":\n'))
    with pytest.raises(BadInput, match="line 2, is not valid JSON"):
        list(store.read_lines(path))


def test_a_failed_append_leaves_no_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "a.open"
    store.append_lines(path, [b"whole"])
    with file_size_limit(20), pytest.raises(OSError, match="File too large"):
        store.append_lines(path, [b"x" * 100])
    assert path.read_bytes() == b"whole\n"


def test_units_come_one_after_the_other_each_with_its_last_record(tmp_path: Path) -> None:
    """Those of sealed files, of the open one without its torn tail, and of one that is sealed but not yet deleted."""
    journal = Journal(tmp_path, shard_size=2)
    for name, value in [("a", 0), ("b", 1), ("c", 2), ("a", 3), ("d", 4)]:
        journal.append([(name, {"value": value}, value == 0)])
    with (tmp_path / "000002.jsonl.open").open("ab") as file:
        file.write(b'{"unit": "torn')
    (tmp_path / "000001.jsonl.open").write_bytes(store.checked(b'{"unit":"c","value":2}') + b"\n")
    units = store.read_units(tmp_path)
    assert iter(units) is units
    assert [(unit["unit"], unit["value"]) for unit in units] == [("a", 3), ("b", 1), ("c", 2), ("d", 4)]
    assert list(store.read_units(tmp_path / "none")) == []


def test_a_folder_that_changed_has_another_digest_however_soon(tmp_path: Path) -> None:
    """Of equal size and with the old time of change put back: what is known of a file is never taken for it."""
    path = tmp_path / "weights"
    path.write_bytes(b"one")
    first, times = store.folder_sha256(tmp_path), path.stat()
    path.write_bytes(b"two")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    second = store.folder_sha256(tmp_path)
    time.sleep(store.CTIME_MARGIN_S + 0.1)
    assert first != second == store.folder_sha256(tmp_path) == store.folder_sha256(tmp_path)
    path.write_bytes(b"one")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert store.folder_sha256(tmp_path) == first


def test_a_file_that_rested_is_read_once_a_process(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(b"one")
    read, listening = [0], [True]

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if listening and event == "open" and arguments[0] == str(path):
            read[0] += 1

    sys.addaudithook(hook)
    store.folder_sha256(tmp_path)
    store.folder_sha256(tmp_path)
    fresh = read[0]
    time.sleep(store.CTIME_MARGIN_S + 0.1)
    store.folder_sha256(tmp_path)
    store.folder_sha256(tmp_path)
    listening.clear()
    assert (fresh, read[0]) == (2, 3)


HOSTILE = [
    *("", ".", "..", "../../etc", "a/b", "a\\b", "a\0b", "a\nb"),
    *(".hidden", "-rf", "x" * 5000, "\udcff", "é" * 300, " "),
]


@pytest.mark.parametrize("text", HOSTILE)
def test_any_text_becomes_the_name_of_one_visible_folder(tmp_path: Path, text: str) -> None:
    name = store.folder_name(text)
    (tmp_path / name).mkdir()
    assert [path.name for path in tmp_path.iterdir()] == [name] and not name.startswith((".", "-"))
    assert len(f"20260101T000000Z-{name}-abcdef.parquet".encode()) < 255


def test_a_plain_name_stays_and_two_spellings_of_a_letter_are_one() -> None:
    assert store.folder_name("gpt-4.1_mini") == "gpt-4.1_mini" and store.folder_name("google/gemini") == "google-gemini"
    assert store.folder_name("e\u0301") == store.folder_name("\u00e9")


def test_names_of_one_folder_differ_also_without_case() -> None:
    names = store.FolderNames()
    given = [names.name(text) for text in ("a/b", "a b", "A-B", "a-b-2", "a-b", *HOSTILE)]
    assert given[:5] == ["a-b", "a-b-2", "A-B-3", "a-b-2-2", "a-b-4"]
    assert len({name.casefold() for name in given}) == len(given)


def test_a_file_of_a_similar_name_is_proposed(tmp_path: Path) -> None:
    for name in ("study.md", "study.toml", "study.yaml"):
        (tmp_path / name).touch()
    for wrong, right in (("studdy.toml", "study.toml"), ("study.yml", "study.")):
        assert store.nearest(tmp_path / wrong).startswith(f" Did you mean '{tmp_path / right}")
    (tmp_path / "notest.jsonl").touch()
    assert {store.nearest(tmp_path / name) for name in ("x.toml", "nope.eval", "study.toml", "x", "a/b")} == {""}
