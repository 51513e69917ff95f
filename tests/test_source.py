"""Rules for every source file: who opens files, which files a package lists, a class name is used once."""

import ast
import re
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

from composer_stages import STAGES
from composer_stages.runs.stage import load_stage

ROOT = Path(__file__).parents[1]
INTERFACES = ("composer_cli", "composer_post_training")
SOURCES = sorted(path for package in (*INTERFACES, "stages") for path in (ROOT / package).rglob("*.py"))
OPENERS = {"open", "read_text", "read_bytes", "write_text", "write_bytes"}
MAY_OPEN = {
    "stages/runs/": "artifacts: the files of a run, and settings that a user wrote",
    "stages/envs/": "trees, data sets and logs that a user names",
    "stages/sandbox/": "work folders and pipes",
    "stages/formats/": "files of other programs",
    "stages/swebench/": "instances of SWE-bench",
    "stages/integrations/": "what a server under another interpreter is told, and its log",
    "stages/policy/brought.py": "a file that is put together of its parts",
    "stages/policy/gguf.py": "GGUF files that a user names, and the card of the folder that is made of one",
    "stages/policy/origin.py": "which servers answered to earlier attempts of a run",
    "stages/gradients/tensors.py": "tensors of a run, mapped into memory",
    "stages/words.py": "the sentences of this program",
    "stages/data_files.py": "the data files of this program",
    "stages/normalize.py": "what a program with Data-Juicer's arguments kept",
    "composer_cli/view/page.py": "the style sheet that a saved report carries",
    "stages/backends/resources.py": "limits of memory that the kernel shows",
    "stages/pairs/blocks.py": "rows that are sorted on disk, in a folder for what is temporary",
}
"""Where files are opened, and which. Everything else reads and writes through `composer_stages.runs`."""


@cache
def tree_of(path: Path) -> ast.Module:
    """The syntax tree of a source file."""
    return ast.parse(path.read_text())


def test_a_class_name_is_used_once():
    places = defaultdict(set)
    for path in SOURCES:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ClassDef) and node.name != "Config":  # a stage's settings are called Config
                places[node.name].add(str(path.relative_to(ROOT)))
    assert {name: files for name, files in places.items() if len(files) > 1} == {}


def test_a_stage_has_the_name_of_its_entry():
    assert [load_stage(name).name for name in STAGES] == list(STAGES)


def test_files_are_opened_only_where_the_list_allows_it():
    found = {str(path.relative_to(ROOT)): opens(tree_of(path)) for path in SOURCES if "guest" not in path.parts}
    offenders = {file for file, calls in found.items() if calls and not file.startswith(tuple(MAY_OPEN))}
    assert offenders == set()
    idle = [place for place in MAY_OPEN if not any(calls for file, calls in found.items() if file.startswith(place))]
    assert idle == []


def test_an_opened_file_is_found():
    sources = ("with open('x') as f: f.read()", "Path('x').open()", "Path('x').write_text('y')")
    assert [opens(ast.parse(source)) for source in sources] == [["open"], ["open"], ["write_text"]]


def opens(tree: ast.Module) -> list[str]:
    """The calls in a source that open, read or write a file."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and not _other(node)]
    found = [(getattr(call.func, "attr", getattr(call.func, "id", "")), call) for call in calls]
    through_others = ("store.", "os.", "formatter.")  # click's formatter of help texts
    return [name for name, call in found if name in OPENERS and not ast.unparse(call.func).startswith(through_others)]


def _other(call: ast.Call) -> bool:
    """Whether it is an `open` method of a class of ours, such as a policy's, whose first argument is no mode."""
    method = isinstance(call.func, ast.Attribute) and call.func.attr == "open" and bool(call.args)
    return method and not isinstance(call.args[0], ast.Constant)


PACKAGES = sorted({path.parent for path in SOURCES if path.name == "__init__.py"})


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_map_of_a_package_names_its_files_and_no_others(package: Path):
    listed = mapped(ast.get_docstring(ast.parse((package / "__init__.py").read_text())) or "")
    files = {path.name for path in package.glob("*.py")} - {"__init__.py", "__main__.py"}
    folders = {f"{path.name}/" for path in package.iterdir() if any(path.glob("*.py"))}
    if package == ROOT / "stages":  # the stages are listed by their table
        files -= {f"{stage.module.rpartition('.')[2]}.py" for stage in STAGES.values()}
    assert {name for name in listed if name.endswith((".py", "/"))} - {"presets/", "__main__.py"} == files | folders


def mapped(docstring: str) -> set[str]:
    """The files and folders that stand before ` - ` in the lines of a docstring, several separated by commas."""
    entries = re.findall(r"^(\S+(?:, \S+)*) +- ", docstring, re.M)
    return {name for entry in entries for name in entry.split(", ")}


def test_a_missing_and_an_invented_file_are_found():
    assert mapped("A map.\n\na.py - one\nb/, c/ - two and three\nnot a file - x") == {"a.py", "b/", "c/"}
