"""Instances in SWE-bench's shape: rows from files or the hub, the mirror of their repository, and their patches.

Rows have one of two shapes. The classic one has twelve columns, and repository and version decide how its tests are
run. The newer one (swebench 5) adds `image`, `eval_script`, `log_parser` and `eval_type`.
"""

import ast
import os
import re
import stat
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

from composer_stages.envs.repo import mirrors, trees
from composer_stages.envs.repo.trees import TreeFile
from composer_stages.envs.task_table import hub_rows
from composer_stages.errors import BadInput, InfrastructureError, UsageError
from composer_stages.runs.kinds import Row
from composer_stages.swebench.lists import LISTS, is_name_list, lists_of
from composer_stages.swebench.logs import NAMED_PARSERS
from composer_stages.swebench.rows import READABLE, read_records
from composer_stages.words import Sentence

CLASSIC = (
    *("repo", "instance_id", "base_commit", "patch", "test_patch", "problem_statement", "hints_text", "created_at"),
    *("version", "FAIL_TO_PASS", "PASS_TO_PASS", "environment_setup_commit"),
)
NEWER = ("image", "eval_script", "log_parser", "eval_type")
OPTIONAL = frozenset({"hints_text", "created_at", "environment_setup_commit", "patch"})
"""Columns that nothing here depends on: rows of neighbouring data sets lack them."""
OPTIONAL_WITH_SCRIPT = OPTIONAL | {"version"}
KNOWN = {"log_parser": sorted(NAMED_PARSERS), "eval_type": ["pass_and_fail"]}
"""Values of columns of the newer shape that can be graded here."""
LITE = "SWE-bench/SWE-bench_Lite"


def load(path: Path) -> list[Row]:
    """Load the instances of a file; `BadInput` names a row that fits neither shape with its missing columns."""
    if not path.is_file():
        raise BadInput("envs.swe.no-instances-file", path=str(path), readable=READABLE)
    return check_rows(list(read_records(path)), str(path))


def load_from_hub(name: str, splits: Sequence[str]) -> list[Row]:
    """Load the rows of the first of these splits that a data set of the hub has; errors name the alternatives."""
    (rows,) = hub_rows(name, Sentence("envs.swe.without-connection"), parts=splits).values()
    return check_rows(rows, name)


def select_instances(rows: list[Row], ids: Sequence[str], source: str) -> list[Row]:
    """Return the rows with these ids, all where there are no ids.

    `UsageError` for an id that `source` lacks; `BadInput` for a row that would be graded wrongly.
    """
    if unknown := sorted(set(ids) - {row["instance_id"] for row in rows}):
        raise UsageError("envs.swe.no-instance", instance=unknown[0], source=source)
    chosen = [row for row in rows if not ids or row["instance_id"] in ids]
    for row in chosen:
        values = {"where": source, "row": row["instance_id"]}
        if not lists_of(row).fail_to_pass:
            raise BadInput("envs.swe.nothing-to-pass", **values)
        if not is_newer(row) and ".py" not in f"{row['test_patch']} {row['FAIL_TO_PASS']}":
            raise BadInput("envs.swe.no-python-tests", **values)
        if column := next((name for name, usual in KNOWN.items() if is_newer(row) and row[name] not in usual), None):
            raise BadInput("envs.swe.unknown-grading", column=column, value=row[column], known=KNOWN[column], **values)
    return chosen


def check_rows(rows: Sequence[Any], where: str) -> list[Row]:
    """Return the rows; `BadInput` names the first that fits neither shape."""
    seen: set[str] = set()
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise BadInput("envs.swe.row-not-an-object", where=where, number=number, text=str(row)[:60])
        classic = [name for name in CLASSIC if row.get(name) is None and name not in OPTIONAL]
        newer = [name for name in (*CLASSIC, *NEWER) if row.get(name) is None and name not in OPTIONAL_WITH_SCRIPT]
        if classic and newer:
            name = row.get("instance_id", f"number {number}")
            raise BadInput("envs.swe.columns-missing", where=where, name=name, classic=classic, newer=newer, lite=LITE)
        # JSON text in SWE-bench's rows, lists in those of SWE-Gym and SWE-smith.
        if unread := next((name for name in LISTS if not is_name_list(row[name])), None):
            raise BadInput(
                "envs.swe.not-a-test-list",
                where=where,
                row=row["instance_id"],
                column=unread,
                text=str(row[unread])[:60],
            )
        if row["instance_id"] in seen:
            raise BadInput("envs.swe.repeated-id", where=where, number=number, row_id=row["instance_id"])
        seen.add(row["instance_id"])
    return list(rows)


def is_newer(row: Mapping[str, Any]) -> bool:
    """Return whether the row has the newer shape, which brings the script that runs its tests."""
    return all(row.get(name) for name in NEWER)


def find_mirror(folder: Path, repo: str) -> Path | None:
    """Return the git directory of `owner/name` below a folder, bare or checked out, or None.

    It is called owner__name, owner/name or name. Mirrors belong to the user and are only read.
    """
    owner, _, name = repo.partition("/")
    for stem in (f"{owner}__{name}", f"{owner}/{name}", name):
        for path in (folder / stem, folder / f"{stem}.git", folder / stem / "repo"):
            if git := mirrors.git_directory(path):
                return git
    return None


def require_mirror(folder: Path, repo: str) -> Path:
    """Return the git directory of `owner/name` below a folder; `UsageError` gives the command that makes it."""
    mirror = find_mirror(folder, repo)
    if mirror is None:
        raise UsageError("envs.swe.no-mirror", repo=repo, folder=folder)
    return mirror


def check_out(mirror: Path, commit: str, target: Path) -> None:
    """Write the files of a commit into an empty folder; `InfrastructureError` where the mirror lacks it."""
    try:
        mirrors.check_out(mirror, commit, target)
    except RuntimeError as error:
        raise InfrastructureError("envs.swe.commit-missing", mirror=mirror, commit=commit, error=error) from None


def patched_files(base: Path, patch: str) -> trees.Changes:
    """Return the files that a patch changes in a tree; `InfrastructureError` when it does not apply to `base`."""
    # Only the files of the patch are copied, into a folder without repository: `git apply` needs none.
    with trees.scratch() as room:
        work, file = room / "tree", room / "patch"
        work.mkdir()
        write_patch(file, patch)
        touched = touched_paths(patch)
        before = {path: trees.read(base, path) for path in touched}
        # Attributes say how files are written (text eol=crlf), and a submodule is a folder.
        above = {str(folder / ".gitattributes") for path in touched for folder in PurePosixPath(path).parents}
        around = {path: trees.read(base, path) for path in above - before.keys()}
        around |= {path: TreeFile(b"", FOLDER) for path in touched if not before[path] and (base / path).is_dir()}
        trees.apply({path: content for path, content in {**before, **around}.items() if content}, work)
        try:
            trees.git(work, "init", "--quiet", "--template=")  # else attributes are not read
            trees.git(work, "apply", "--whitespace=nowarn", str(file))
        except RuntimeError as error:
            raise InfrastructureError("envs.swe.patch-does-not-apply", error=error) from None
        after = {path: trees.read(work, path) for path in touched}
    return {path: after[path] for path in sorted(touched) if before[path] != after[path]}


def write_patch(path: Path, patch: str) -> None:
    """Write a patch as git reads it: with a line break at its end, which data sets strip, and bytes that are no UTF-8.

    SWE-bench writes one behind it (swebench 4.1, `harness/test_spec/python.py`, make_eval_script_list_py).
    """
    path.write_text(patch if patch.endswith("\n") else f"{patch}\n", newline="", errors="surrogateescape")


FOLDER = stat.S_IFDIR | 0o755
SOURCE = re.compile(r"^(?:rename|copy) from (.*?)\r?$", re.MULTILINE)


@cache
def touched_paths(patch: str) -> tuple[str, ...]:
    """Return the paths that a patch changes, removes or creates, and those that it renames or copies.

    As git reads them: binary files, modes alone and quoted names too. `InfrastructureError` for what it cannot read.
    """
    with trees.scratch() as room:
        write_patch(room / "patch", patch)
        try:
            listed = trees.git(room, "apply", "--numstat", "-z", "patch") if patch.strip() else ""
        except RuntimeError as error:
            raise InfrastructureError("envs.swe.patch-does-not-apply", error=error) from None
    named = [entry.split("\t", 2)[2] for entry in listed.split("\0") if entry]
    sources = [
        os.fsdecode(ast.literal_eval(f"b{name}")) if name.startswith('"') else name for name in SOURCE.findall(patch)
    ]
    return tuple(dict.fromkeys([*named, *sources]))
