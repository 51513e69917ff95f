"""Instances of both shapes load from every kind of file, and a row of neither shape is named."""

import gzip
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from needs import REAL, needs
from support.refusals import refused
from support.sample_package import write
from support.transcripts import document, jsonl

from composer_stages.envs.repo import mirrors, trees
from composer_stages.envs.swe import instances
from composer_stages.envs.swe.instances import (
    CLASSIC,
    NEWER,
    is_newer,
    load,
    load_from_hub,
    patched_files,
    select_instances,
    touched_paths,
)
from composer_stages.errors import BadInput, InfrastructureError

SHARED = REAL / "swe-lite"
CLASSIC_ROW: dict[str, Any] = {name: f"some {name}" for name in CLASSIC} | {
    "instance_id": "a__b-1",
    "FAIL_TO_PASS": '["t.py::test_it"]',
    "PASS_TO_PASS": "[]",
}
NEWER_ROW = CLASSIC_ROW | {name: f"some {name}" for name in NEWER} | {"FAIL_TO_PASS": ["t.py::test_it"]}

GRADED = NEWER_ROW | {"log_parser": "parse_log_astropy", "eval_type": "pass_and_fail"}


def written(rows: list[Any], path: Path) -> Path:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
        return path
    return jsonl(path, *rows) if ".jsonl" in path.name else document(path, rows)


@pytest.mark.parametrize("name", ["rows.json", "rows.jsonl", "rows.jsonl.gz", "rows.parquet"])
@pytest.mark.parametrize("row", [CLASSIC_ROW, NEWER_ROW])
def test_both_shapes_load_from_every_file(name: str, row: dict[str, Any], tmp_path: Path) -> None:
    other = row | {"instance_id": "a__b-2"}
    assert load(written([row, other], tmp_path / name)) == [row, other]
    assert is_newer(row) == (row is NEWER_ROW)
    fewer = {key: value for key, value in row.items() if key not in ("hints_text", "created_at", "patch")}
    assert load(written([fewer], tmp_path / name)) == [fewer], "nothing depends on these columns"
    (tmp_path / "rows.json").write_text(json.dumps({"a__b-1": row}))
    assert load(tmp_path / "rows.json") == [row]


@pytest.mark.parametrize(("splits", "chosen"), [(("dev", "test"), "dev"), (("train",), "train"), (("test",), None)])
def test_a_data_set_is_read_in_a_split_that_it_has(splits: tuple[str, ...], chosen: str | None, tmp_path: Path) -> None:
    """SWE-bench Lite, SWE-Gym and SWE-bench Verified."""
    for name in splits:
        jsonl(tmp_path / f"{name}.jsonl", CLASSIC_ROW | {"instance_id": name})
    files = [{"split": name, "path": f"{name}.jsonl"} for name in splits]
    card = json.dumps({"configs": [{"config_name": "default", "data_files": files}]})  # YAML holds JSON
    (tmp_path / "README.md").write_text(f"---\n{card}\n---\n")
    if chosen:
        assert [row["instance_id"] for row in load_from_hub(str(tmp_path), ("dev", "train"))] == [chosen]
    else:
        refused(lambda: load_from_hub(str(tmp_path), ("dev", "train")), BadInput, code="envs.no-split", splits=["test"])


def test_a_row_of_neither_shape_is_named_with_what_it_lacks(tmp_path: Path) -> None:
    row = {key: value for key, value in CLASSIC_ROW.items() if key not in ("test_patch", "version")}
    with pytest.raises(
        BadInput, match=r"row a__b-1, .* needs test_patch, version, the newer one test_patch, image, eval_script"
    ):
        load(written([CLASSIC_ROW, row], tmp_path / "rows.jsonl"))
    with pytest.raises(BadInput, match=r"row number 1, .* needs repo, instance_id"):
        load(written([{"org": "a", "base": {"sha": "1"}}], tmp_path / "rows.jsonl"))
    newer = {key: value for key, value in NEWER_ROW.items() if key not in ("image", "version")}
    with pytest.raises(BadInput, match="the newer one image"):
        load(written([newer], tmp_path / "rows.jsonl"))


def test_an_id_that_comes_twice_is_refused(tmp_path: Path) -> None:
    path = written([NEWER_ROW, NEWER_ROW], tmp_path / "rows.jsonl")
    refused(lambda: load(path), BadInput, code="envs.swe.repeated-id", number=2, row_id="a__b-1")


@pytest.mark.parametrize("value", ["['t.py::test_it']", "{}", "[1]", 3])
def test_lists_that_are_none_are_named(value: Any, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="row a__b-1: PASS_TO_PASS is not a list of test names"):
        load(written([CLASSIC_ROW | {"PASS_TO_PASS": value}], tmp_path / "rows.json"))


@pytest.mark.parametrize(
    ("change", "code", "values"),
    [
        ({"FAIL_TO_PASS": "[]"}, "nothing-to-pass", {}),
        ({"FAIL_TO_PASS": ["AppTest.testAdd"]}, "no-python-tests", {}),
        (GRADED | {"log_parser": "parse_log_jest"}, "unknown-grading", {"column": "log_parser"}),
        (GRADED | {"eval_type": "fail_only"}, "unknown-grading", {"column": "eval_type", "value": "fail_only"}),
    ],
)
def test_rows_that_would_be_graded_wrongly_are_named(change: dict[str, Any], code: str, values: dict[str, Any]) -> None:
    rows = [GRADED, CLASSIC_ROW | change | {"instance_id": "a__b-2"}]
    assert select_instances(rows, ["a__b-1"], "rows") == rows[:1]
    refused(lambda: select_instances(rows, [], "rows"), BadInput, code=f"envs.swe.{code}", row="a__b-2", **values)


def test_what_is_no_file_of_rows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no file of instances"):
        load(tmp_path / "missing.jsonl")
    (tmp_path / "torn.jsonl").write_text(json.dumps(CLASSIC_ROW) + '\n{"repo": "a/')
    with pytest.raises(BadInput, match="line 2"):
        load(tmp_path / "torn.jsonl")
    (tmp_path / "deep.jsonl").write_text('{"instance_id": "a", "x": ' + "[" * 300 + "]" * 300 + "}")
    with pytest.raises(BadInput, match=r"line 1, .*301 levels deep"):
        load(tmp_path / "deep.jsonl")
    (tmp_path / "cut.json.gz").write_bytes(gzip.compress(json.dumps([CLASSIC_ROW] * 9).encode())[:-9])
    with pytest.raises(BadInput, match=r"cut\.json\.gz is damaged"):
        load(tmp_path / "cut.json.gz")
    (tmp_path / "mark.json").write_text(json.dumps([CLASSIC_ROW]), encoding="utf-8-sig")
    assert load(tmp_path / "mark.json") == [CLASSIC_ROW]
    with pytest.raises(BadInput, match="is not an instance"):
        load(written([[1, 2]], tmp_path / "rows.json"))
    (tmp_path / "rows.parquet").write_text("no table")
    with pytest.raises(BadInput, match="as Parquet"):
        load(tmp_path / "rows.parquet")


@needs("real")
@pytest.mark.parametrize(("name", "count"), [("lite-test", 300), ("lite-dev", 23), ("verified-100", 100)])
def test_all_real_rows_load(name: str, count: int) -> None:
    rows = load(SHARED / f"swe-bench-{name}.jsonl.gz")
    assert len(rows) == count and len({row["instance_id"] for row in rows}) == count
    assert not any(is_newer(row) for row in rows) and instances.check_rows(rows, name) == rows


PATCHED = {
    "binary changed": "printf '\\0\\2\\1' > data.bin",
    "binary added": "printf '\\0\\3' > new.bin",
    "mode alone": "chmod 755 run.sh",
    "removed": "rm a.txt",
    "folder removed": "rm -r deep",
    "empty added": "touch empty",
    "empty removed": "rm void",
    "renamed": "mv a.txt b.txt",
    "renamed and changed": "mv a.txt b.txt; echo more >> b.txt",
    "copied": "cp a.txt c.txt; echo more >> a.txt",
    "quoted names": "printf x > 'a blank.txt'; printf y > \"$(printf 'tab\\tquote\\\"')\"; printf z > é.txt; rm ü.txt",
    "quoted name moved": "mv ü.txt ö.txt",
    "link added": "ln -s a.txt link",
    "link in place of a file": "rm run.sh; ln -s a.txt run.sh",
    "lines like heads": "printf -- '--- a/x\\n+++ b/y\\nrename from z\\n' >> a.txt",
    "bytes that are no UTF-8": "printf 'caf\\351\\n' > latin.txt",
    "line ends": "printf 'one\\r\\ntwo' > crlf.txt",
}


@pytest.mark.parametrize("prefix", ["", "a/b/"])
@pytest.mark.parametrize("what", PATCHED)
def test_every_patch_of_git_applies_also_inside_of_a_work_tree(
    what: str, prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*words: str) -> str:
        return subprocess.run(
            ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-c", "core.autocrlf=false", *words],
            cwd=tmp_path,
            check=True,
            capture_output=True,
            text=True,
        ).stdout

    base, after = tmp_path / "base" / prefix, tmp_path / "after"
    base.mkdir(parents=True)
    (base / "deep" / "er").mkdir(parents=True)
    for path, data in {
        "a.txt": b"1\n2\n3\n4\n",
        "data.bin": b"\0\1\2",
        "run.sh": b"echo\n",
        "void": b"",
        "ü.txt": b"u\n",
    }.items():
        (base / path).write_bytes(data)
    (base / "deep" / "er" / "x").write_text("x\n")
    shutil.copytree(tmp_path / "base", after)
    subprocess.run(["bash", "-e", "-c", PATCHED[what]], cwd=after / prefix, check=True)
    git("init", "--quiet")
    git("--work-tree=base", "add", "--all")
    git("commit", "--quiet", "-m", "x")
    git("--work-tree=after", "add", "--all")
    patch = subprocess.run(
        ["git", "diff", "--cached", "--binary", "-M", "-C"], cwd=tmp_path, check=True, capture_output=True
    ).stdout.decode(errors="surrogateescape")
    assert patch
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "base"))  # inside of a work tree, where TMPDIR may be
    changed = patched_files(tmp_path / "base", patch)
    shutil.copytree(tmp_path / "base", tmp_path / "done", ignore=shutil.ignore_patterns("composer-of-*"))
    trees.apply(changed, tmp_path / "done")
    assert {
        path: file for path, file in trees.changes(after, tmp_path / "done").items() if file is None or file.data
    } == {}
    assert set(changed) <= set(touched_paths(patch))


def test_a_patch_that_git_cannot_read_ends_the_rollout_alone(tmp_path: Path) -> None:
    with pytest.raises(InfrastructureError):
        touched_paths("no patch")
    assert touched_paths("") == ()


ATTRIBUTES = "*.bat text eol=crlf\n*.id ident\n"


@pytest.mark.parametrize(
    "case", ["line ends", "ident", "submodule", "no line break at its end", "a name of other bytes"]
)
def test_a_patch_applies_as_in_a_checkout(tmp_path: Path, case: str) -> None:
    """Without the attributes above a file, or the folder of a submodule, `git apply` refuses what SWE-bench applies."""
    files = {".gitattributes": ATTRIBUTES, "tests/run.bat": "a\nb\n", "tests/x.id": "# $Id$\nx\n", "old.py": "x\n" * 9}
    source = write(tmp_path / "source", files)
    inner = write(source / "sub", {"a": "1"})
    trees.commit(inner)
    base = trees.commit(source)
    (base_tree := tmp_path / "base").mkdir()
    mirrors.check_out(source / ".git", base, base_tree)
    if case == "submodule":
        (inner / "a").write_text("2")
        trees.git(inner, "commit", "--quiet", "--all", "-m", "Next")
    elif case == "a name of other bytes":
        (source / "old.py").rename(os.fsdecode(bytes(source) + b"/caf\xe9.py"))
    else:
        name, text = ("x.id", "# $Id$\ny\n") if case == "ident" else ("run.bat", "a\r\nc\r\n")
        (source / "tests" / name).write_text(text, newline="")
    trees.git(source, "add", "--all", ".")
    patch = trees.git(source, "diff", "--cached", "-M")
    changed = patched_files(base_tree, patch.rstrip("\n") if case == "no line break at its end" else patch)
    moved = {"old.py": None, os.fsdecode(b"caf\xe9.py"): b"x\n" * 9}
    expected = {"submodule": {}, "a name of other bytes": moved, "ident": {"tests/x.id": b"y\n"}}
    data = {path: file and file.data for path, file in changed.items()}
    if case == "ident":
        data = {path: (content or b"").rpartition(b"$\n")[2] for path, content in data.items()}
    assert data == expected.get(case, {"tests/run.bat": b"a\r\nc\r\n"})
