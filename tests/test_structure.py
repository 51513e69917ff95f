"""Names and imports over all source files: a class name is used once, files import each other without a cycle."""

import ast
import functools
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for package in ("composer_post_training", "composer_cli", "stages")
    for path in sorted((ROOT / package).rglob("*.py"))
}
OF_EVERY_STAGE = {"Config"}
"""The settings of a stage have this name in each stage's module."""
FEW = 30


@functools.cache
def trees() -> dict[str, ast.Module]:
    """Return every module's syntax tree; not at import, since each process of a test run would parse all files."""
    return {module: ast.parse(path.read_text()) for module, path in SOURCES.items()}


def imported(module: str) -> set[str]:
    """The modules of ours that a module imports at its top or inside functions, but not for type checking alone."""
    found: set[str] = set()
    for node in _executed(trees()[module]):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            # `from stages.runs import store` imports the module stages.runs.store; of a name, the module that has it
            found |= {name if (name := f"{node.module}.{a.name}") in SOURCES else node.module for a in node.names}
    return found & SOURCES.keys() - {module}


def _executed(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if not (isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)):
            yield child
            yield from _executed(child)


@functools.cache
def imports() -> dict[str, set[str]]:
    """Return the modules that each module imports."""
    return {module: imported(module) for module in SOURCES}


def reachable(start: str) -> set[str]:
    """The modules that are imported by a module, directly or not."""
    found, waiting = set[str](), [start]
    while waiting:
        new = imports()[waiting.pop()] - found
        found |= new
        waiting += new
    return found


def test_a_class_name_is_used_once():
    places = defaultdict(list)
    for module, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(module)
    several = {name: modules for name, modules in places.items() if len(modules) > 1 and name not in OF_EVERY_STAGE}
    assert several == {}


def test_files_do_not_import_each_other_in_a_circle():
    reach = {module: reachable(module) for module in SOURCES}
    circles = {
        frozenset({module, *(other for other in reach[module] if module in reach[other])})
        for module in SOURCES
        if module in reach[module]
    }
    assert circles == set()


def test_few_modules_serve_one_neighbour_alone():
    """A module with one importer, in its own folder, is often part of that one."""
    importers = {module: [other for other in SOURCES if module in imports()[other]] for module in SOURCES}
    lonely = [
        module
        for module, others in importers.items()
        if len(others) == 1 and others[0].rpartition(".")[0] == module.rpartition(".")[0]
    ]
    assert len(lonely) < FEW, lonely
