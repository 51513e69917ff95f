"""Rows of tasks: what a row may hold, where rows come from, and how they are split into train and eval.

A row has a prompt; files to work on (texts in the row, an archive, or a commit of a git repository); and a test: calls
of functions and scripts with what they return, print or write, ids of pytest that must pass, or a command whose exit
code 0 passes. It may have hidden files, which the agent never sees
and which the test finds in place; a solution, which `--policy reference` plays; a time limit; a family; and a split.

All rows are checked before anything starts, and every one that cannot be used is reported with its line and the reason.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from composer_stages import json_text
from composer_stages.envs import folders
from composer_stages.envs.base import Split
from composer_stages.envs.repo import mirrors, trees
from composer_stages.envs.task_table import (
    HUB_SPLITS,
    MOST_REPORTED,
    hub_rows,
    no_such_field,
    numbered_lines,
    parse_line,
    read_parquet,
)
from composer_stages.envs.tasks import tables, values
from composer_stages.errors import BadInput, refusal
from composer_stages.runs import store
from composer_stages.runs.kinds import Row
from composer_stages.runs.settings import nearest_keys
from composer_stages.words import Sentence

UNLABELLED = {"id": "", "family": "", "split": None}
"""Fields that do not change what a task asks for, as they are in a row that does not set them."""
UNASKED = UNLABELLED.keys() | {"solution", "timeout_s"}
"""Fields in which two rows of one task may differ."""
RESERVED = frozenset({".git", ".hg", ".svn"})


def check_path(path: str) -> str:
    """Return a path below the task's folder; ValueError where it leads out of it, or into version control."""
    pure = PurePosixPath(path)
    if not path or "\0" in path or pure.is_absolute() or ".." in pure.parts or not pure.parts:
        raise ValueError(Sentence("envs.tasks.path-outside-folder", path=path[:80]))
    if "\\" in path:
        raise ValueError(Sentence("envs.tasks.backslash-in-path", path=path[:80]))
    if RESERVED & set(pure.parts):
        raise ValueError(Sentence("envs.tasks.version-control-file", path=path[:80]))
    if len(path.encode()) > folders.LONGEST_PATH or len(pure.parts) > folders.DEEPEST:
        raise ValueError(Sentence("envs.tasks.path-too-long", path=path[:80]))
    return str(pure)


def check_function(name: str) -> str:
    """Return the name of a function of a module; `ValueError` for anything else."""
    if not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*", name):
        raise ValueError(Sentence("envs.tasks.not-a-function"))
    return name


def check_test(test: str) -> str:
    """Return an id of pytest with the path that pytest reports; `ValueError` for an option or a path that leads out."""
    path, colons, name = test.partition("::")
    # With a dash in front it would be an option of pytest.
    if not test.strip() or test.startswith(("-", "/")) or "\0" in test:
        raise ValueError(Sentence("envs.tasks.not-a-pytest-id", test=test))
    return f"{check_path(path)}{colons}{name}"


def check_paths(files: Any) -> Any:
    """Return files by their paths; ValueError where two paths are one."""
    paths = Counter(str(PurePosixPath(str(path))) for path in (files if isinstance(files, dict) else ()))
    if twice := next((path for path, number in paths.items() if number > 1), None):
        raise ValueError(Sentence("envs.tasks.path-twice", path=twice[:80]))
    return files


SafePath = Annotated[str, AfterValidator(check_path)]


class CallRow(BaseModel):
    """A call of a function, and what it returns or raises."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    function: Annotated[str, AfterValidator(check_function)]
    """Its module and its name: package.module:function."""
    args: list[Any] = []
    """A value that JSON lacks is written as a Python literal, here and in the next two: {"$python": "{1: {2, 3}}"}."""
    kwargs: dict[str, Any] = {}
    returns: Any = None
    raises: str = Field(default="", pattern=r"^([A-Za-z_][\w.]*)?$")
    """The name of an exception or of a base of it, with or without its module."""

    @field_validator("args", "kwargs", "returns")
    @classmethod
    def _read(cls, value: Any) -> Any:
        try:
            return json_text.read_literals(value)
        except ValueError as error:
            raise ValueError(Sentence("envs.tasks.not-a-literal", error=error)) from None

    @model_validator(mode="after")
    def _check(self) -> "CallRow":
        # A table has both columns in every row, one of them null.
        if self.returns is not None if self.raises else "returns" not in self.model_fields_set:
            raise ValueError(Sentence("envs.tasks.returns-or-raises"))
        return self


class ScriptRow(BaseModel):
    """A command, and what it prints or writes."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    command: str = Field(min_length=1)
    """Words of a shell in the task's folder: python3 count.py --all."""
    stdin: str = ""
    stdout: str | None = None
    """Line ends, blanks before them and empty lines at the end do not count; what goes to stderr is not compared."""
    files: dict[SafePath, str] = {}
    """Path -> the text that the command leaves there, read through links inside the folder."""
    numbers: Literal["close", "text"] = "close"
    """Whether numbers with a decimal point may differ by 1e-6, as judges take it, or are compared as text."""
    exit_code: int | Literal["any"] = 0
    """That of the command."""

    @model_validator(mode="after")
    def _check(self) -> "ScriptRow":
        if "\0" in self.command:
            raise ValueError(Sentence("envs.tasks.nul-in-command"))
        if self.stdout is None and not self.files:
            raise ValueError(Sentence("envs.tasks.no-script-result"))
        return self


class TaskRow(BaseModel):
    """One task as a user writes it."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    id: str = Field(default="", max_length=200, pattern=r"^[\w.:+-]*$")
    """Unique among the rows; where it is left out a digest of the row without its family and split."""
    prompt: str = Field(min_length=1)
    files: dict[SafePath, str] = {}
    """Path -> text. Written over those of an archive or a commit."""
    archive: str = ""
    """A .tar, .tar.gz or .zip file, its path relative to the file of the rows."""
    git: str = ""
    """A local git repository, its path relative to the file of the rows, or an address to clone from."""
    commit: str = Field(default="", pattern=r"^([0-9a-f]{7,40})?$")
    calls: list[CallRow] = []
    """Calls whose results are compared outside of the sandbox, each in a process that is given its arguments alone."""
    script: list[ScriptRow] = []
    """Commands whose output and files are compared outside of the sandbox, each on a fresh copy of the files."""
    test: str = ""
    """A shell command in the task's folder; exit code 0 passes."""
    tests: list[Annotated[str, AfterValidator(check_test)]] = []
    """Ids of pytest that must pass, such as tests/test_a.py::test_b."""
    hidden: dict[SafePath, str] = {}
    """Files that are written for grading alone, over whatever the agent left there. Beside `calls` and `script` only
    where one of these names such a file."""
    solution: dict[SafePath, str | None] | None = None
    """Path -> text of the files of a solution, null for one that it deletes."""
    editable: list[SafePath] = []
    """Files that the agent may change although they look like tests or test configuration."""
    timeout_s: float = Field(default=60.0, gt=0, le=86_400)
    """Of one run of the test."""
    family: str = ""
    """Tasks that need the same knowledge; one family is never in both splits."""
    split: Split | None = None

    _paths = field_validator("files", "hidden", "solution", mode="before")(check_paths)

    @model_validator(mode="after")
    def _check(self) -> "TaskRow":
        ways = {"calls or script": self.calls or self.script, "tests": self.tests, "test": self.test.strip()}
        if len(used := [name for name, way in ways.items() if way]) != 1:
            raise ValueError(Sentence("envs.tasks.several-tests", tests=used))
        if self.archive and self.git:
            raise ValueError(Sentence("envs.tasks.archive-and-git"))
        if bool(self.git) != bool(self.commit):
            raise ValueError(Sentence("envs.tasks.git-without-commit"))
        if "\0" in self.test:
            raise ValueError(Sentence("envs.tasks.nul-in-test"))
        for paths in (self.files, self.hidden, self.solution or {}):
            if inside := [path for path in paths if any(str(above) in paths for above in PurePosixPath(path).parents)]:
                raise ValueError(Sentence("envs.tasks.file-inside-file", path=inside[0]))
        return self


def _problem(error: Mapping[str, Any]) -> str:
    """Return why a field of a row is refused; for an unknown key with the nearest field."""
    field = ".".join(str(part) for part in error["loc"] if part != "[key]") or "the row"  # pydantic marks keys so
    if error["type"] == "extra_forbidden":
        return no_such_field(field, TaskRow.model_fields, nearest_keys(TaskRow, field))
    of_row = not error["loc"] and error["type"] == "value_error"
    return refusal(error) if of_row else f"{field}: {refusal(error)}"


def load(path: str) -> list[Row]:
    """Return all rows of a file or a data set, checked and with their ids.

    BadInput names every row that cannot be used, up to `MOST_REPORTED` of `task_table`, with its line and the reason.
    """
    rows: list[Row] = []
    problems: list[str] = []
    seen: dict[str, str] = {}
    contents: dict[str, str] = {}
    for where, record in _read(path):
        if isinstance(record, BadInput):
            problems.append(f"{where}: {record}".removesuffix("."))
            continue
        try:
            json.dumps(json_text.exact(record), ensure_ascii=False).encode()
        except TypeError as error:  # of a table
            problems.append(Sentence("envs.tasks.not-json", where=where, error=error))
            continue
        except ValueError:
            # json.loads takes "\\ud800", which no file can hold.
            problems.append(Sentence("envs.tasks.not-text", where=where))
            continue
        try:
            # Without columns that are null: tables have every column in every row, and pandas writes NaN for null.
            written = {name: value for name, value in record.items() if value is not None and value == value}
            row = TaskRow.model_validate(written).model_dump()
        except ValidationError as error:
            problems.append(f"{where}: {'; '.join(map(_problem, error.errors(include_url=False)))}")
            continue
        row["calls"] = [call | {name: json_text.exact(call[name]) for name in values.EXACT} for call in row["calls"]]
        spaced = {**row, "prompt": row["prompt"].split()}
        content = store.digest({name: value for name, value in spaced.items() if name not in UNASKED})
        row["id"] = row["id"] or f"task-{store.digest(row | UNLABELLED)[:12]}"
        row["folder"] = str(Path(path).expanduser().absolute().parent)
        # Under two ids one task would count twice, and could be trained on and evaluated.
        if (first := contents.setdefault(content, where)) != where:
            problems.append(Sentence("envs.tasks.repeated-task", where=where, first=first))
        elif (first := seen.setdefault(row["id"], where)) != where:
            problems.append(Sentence("envs.tasks.repeated-id", where=where, row_id=row["id"], first=first))
        if missing := _find_missing_source(row):
            problems.append(f"{where}: {missing}")
        rows.append(row)
    if problems:
        raise BadInput("envs.tasks.unusable-rows", path=path, problems=problems, most=MOST_REPORTED)
    if not rows:
        raise BadInput("envs.tasks.no-rows", path=path)
    return rows


def _read(path: str) -> Iterator[tuple[str, Row | BadInput]]:
    """Yield each row, or its error, with its location: a line of a file, a row of a table or of a data set."""
    file = Path(path).expanduser()
    if "://" in path:
        raise BadInput("envs.tasks.path-is-address", path=path)
    if file.name.endswith((".jsonl", ".jsonl.gz", ".json.gz", ".ndjson")):
        for number, line in numbered_lines(file):
            try:
                yield f"line {number}", parse_line(line)
            except BadInput as error:
                yield f"line {number}", error
    elif file.suffix == ".parquet":
        table = read_parquet(file)
        for number, row in enumerate(table.to_pylist(), 1):
            yield f"row {number}", _parsed(row, table.schema)
    elif file.exists() or file.suffix or path.count("/") != 1:
        kind = "a folder" if file.is_dir() else "no .jsonl or .parquet file"
        raise BadInput("envs.tasks.not-a-row-file", path=path, kind=kind)
    else:
        for name, part in hub_rows(path, Sentence("envs.tasks.name-a-file")).items():
            for number, row in enumerate(part, 1):
                split = row.get("split") or HUB_SPLITS.get(name)
                yield f"{name}, row {number}", _parsed({**row, "split": split})


def _parsed(row: Row, types: Any = ()) -> Row | BadInput:
    try:
        return tables.parse_row(row, types)
    except BadInput as error:
        return error


def _find_missing_source(row: Mapping[str, Any]) -> str:
    """Return why the archive or repository of a row cannot be read here; an empty string where it can."""
    if row["archive"] and not (archive := source_path(row, "archive")).is_file():
        return Sentence("envs.tasks.no-archive", archive=archive)
    if row["archive"] and not row["archive"].endswith(trees.ARCHIVE_ENDINGS):
        return Sentence("envs.tasks.not-an-archive", archive=row["archive"], endings=trees.ARCHIVE_ENDINGS)
    if row["git"] and not mirrors.is_address(row["git"]) and not mirrors.git_directory(source_path(row, "git")):
        return Sentence("envs.tasks.no-repository", path=source_path(row, "git"))
    return ""


def source_path(row: Mapping[str, Any], name: str) -> Path:
    """Return the path of a row's archive or repository, relative to the file of the rows."""
    return Path(row["folder"]) / Path(row[name]).expanduser()
