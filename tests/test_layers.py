"""Who may import whom, and who may open files. Every guard is also broken on purpose, in every file."""

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from stages import STAGES
from stages.runs.stage import load_stage

ROOT = Path(__file__).parents[1]
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
INTERFACES = ("composer_cli", "composer_post_training")
SOURCES = sorted(path for package in (*INTERFACES, "stages") for path in (ROOT / package).rglob("*.py"))
OPENERS = {"open", "read_text", "read_bytes", "write_text", "write_bytes"}
MAY_OPEN = {
    "composer_cli/settings.py": "settings that a user wrote",
    "stages/runs/": "artifacts: the files of a run",
    "stages/envs/": "trees, data sets and logs that a user names",
    "stages/sandbox/": "work folders and pipes",
    "stages/formats/": "files of other programs",
    "stages/integrations/": "what a server under another interpreter is told, and its log",
    "stages/tiny_models/": "the card of a small model, in its folder",
    "stages/probe/adapters/spectrum.py": "tensors of a run, mapped into memory",
    "stages/backends/resources.py": "limits of memory that the kernel shows",
    "stages/pairs/blocks.py": "rows that are sorted on disk, in a folder for what is temporary",
}
"""Where files are opened, and which. Everything else reads and writes through `stages.runs`."""


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    tool = Path(sys.executable).with_name("lint-imports")
    return subprocess.run(
        [tool, "--no-logo", "--no-cache"],
        cwd=folder,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(folder), "COLUMNS": "1000"},
    )


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The sources and the contracts, to be broken."""
    for package in (*INTERFACES, "stages"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def test_imports_go_in_one_direction():
    done = lint(ROOT)
    assert done.returncode == 0, done.stdout


def test_the_contracts_know_every_stage():
    """Each stage of the table is in the list of layers and, as it opens no files, in that of its contract."""
    modules = [entry.module for entry in STAGES.values()]
    of_probe = [module for module in modules if module.startswith("stages.probe.")]
    layers = {f"stages.{name}" for name in CONTRACTS[1]["layers"][0].split(" | ")}
    probe_layers = {f"stages.probe.{name}" for name in CONTRACTS[2]["layers"][0].split(" | ")}
    without_files = CONTRACTS[5]["source_modules"]
    missing = [
        f"add `{m.rpartition('.')[2]}` to the first of `layers`" for m in modules if m not in layers | probe_layers
    ]
    missing += [f'add "{module}" to `source_modules`' for module in modules if module not in without_files]
    assert not missing, f"In [tool.importlinter] of pyproject.toml: {'; '.join(missing)}."
    assert layers == {*modules, "stages.probe"} - {*of_probe} and probe_layers == {*of_probe}
    assert {*without_files} == {*INTERFACES, *modules}


def test_a_stage_has_the_name_of_its_entry():
    assert [load_stage(name).name for name in STAGES] == list(STAGES)


def upward(module: str) -> str | None:
    """A module that this one may not import: another stage, or one of a layer above; None for the command line."""
    if module.startswith(INTERFACES):
        return None
    if module in {stage.module for stage in STAGES.values()}:
        return "stages.collect" if module != "stages.collect" else "stages.train"
    return "stages.train" if module != "stages.train" else "stages.collect"


WRONG = {
    "another stage, or a layer above": upward,
    "the command line": lambda module: None if module.startswith(INTERFACES) else "composer_cli.options",
    "a terminal": lambda module: None if module.startswith(INTERFACES) else "typer",
    "a provider's client": lambda module: None if module == "stages.policy.client" else "openai",
    "a file format": lambda module: (
        "pyarrow" if module.startswith(INTERFACES) or module in {s.module for s in STAGES.values()} else None
    ),
}


def test_every_import_in_a_wrong_direction_is_found(copy: Path):
    """Every file gets all wrong imports at once, and each of them is named as an offender."""
    broken = []
    for path in SOURCES:
        module = module_of(path)
        if "guest" in module or module in ("stages", *INTERFACES):
            continue
        targets = [target for wrong in WRONG.values() if (target := wrong(module)) and target != module]
        broken += [f"{module} -> {target}" for target in targets]
        with (copy / path.relative_to(ROOT)).open("a") as file:
            file.write("".join(f"\nimport {target}\n" for target in targets))
    done = lint(copy)
    assert done.returncode == 1, done.stdout
    named = re.sub(r"\s+", " ", done.stdout)
    assert [line for line in broken if line not in named] == []


def test_files_are_opened_where_it_is_said():
    found = {str(path.relative_to(ROOT)): opens(path.read_text()) for path in SOURCES if "guest" not in path.parts}
    offenders = {file for file, calls in found.items() if calls and not file.startswith(tuple(MAY_OPEN))}
    assert offenders == set()
    idle = [place for place in MAY_OPEN if not any(calls for file, calls in found.items() if file.startswith(place))]
    assert idle == []


def test_an_opened_file_is_found():
    assert opens("with open('x') as f: f.read()") == opens("Path('x').open()") == ["open"]
    assert opens("Path('x').write_text('y')") == ["write_text"]


def opens(source: str) -> list[str]:
    """The calls in a source that open, read or write a file."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call) and not _other(node)]
    names = [ast.unparse(call.func) for call in calls]
    through_others = ("store.", "os.", "formatter.")  # click's formatter of help texts
    return [c.rpartition(".")[2] for c in names if c.rpartition(".")[2] in OPENERS and not c.startswith(through_others)]


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
