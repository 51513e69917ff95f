"""Size and structure of a checkout, by one counting script for all repositories.

    python benchmarks/house.py [--roots PATH ...]

Counted are the Python files that git tracks, without tests, documents, benchmarks, examples and scripts. A line of code
is a line that is not blank, not a comment, not part of a docstring and not an import. A function's length runs from its
`def` to its last line, docstring included; methods and nested functions count. A comment line holds a `#` comment,
alone or behind code. A module with a single importer is imported by exactly one other file, which lies in the same
folder. A cycle is a group of files that import each other, imports inside functions included and those for type
checking not. These are indicators, not goals in themselves.
"""

import ast
import io
import statistics
import subprocess
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

import cases
from records import ROOT, Claim, measured

LEFT_OUT = {"test", "tests", "testing", "docs", "doc", "benchmarks", "benchmark", "examples", "example", "scripts"}
NO_CODE = (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER, tokenize.COMMENT)


@dataclass
class Counts:
    """What is counted of one checkout; `functions` and `lines` hold the length of each function and file."""

    code: int = 0
    comments: int = 0
    functions: list[int] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)
    imports_in_functions: int = 0


def python_files(root: Path) -> list[PurePosixPath]:
    listed = subprocess.run(["git", "-C", root, "ls-files", "*.py"], capture_output=True, text=True, check=True).stdout
    paths = [PurePosixPath(line) for line in listed.splitlines()]
    kept = [p for p in paths if not LEFT_OUT & set(p.parts[:-1]) and not p.name.startswith("test_")]
    return [p for p in kept if p.name != "conftest.py" and p != PurePosixPath("setup.py")]


def docstring_lines(tree: ast.Module) -> set[int]:
    found: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            found |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return found


def count(root: Path, paths: list[PurePosixPath]) -> Counts:
    counts = Counts()
    for path in paths:
        source = (root / path).read_text(encoding="utf-8")
        tree = ast.parse(source)
        left_out = docstring_lines(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                left_out |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                counts.functions.append((node.end_lineno or node.lineno) - node.lineno + 1)
                inner = ast.walk(node)
                counts.imports_in_functions += sum(isinstance(n, ast.Import | ast.ImportFrom) for n in inner)
        code: set[int] = set()
        comments: set[int] = set()
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type == tokenize.COMMENT:
                comments.add(token.start[0])
            elif token.type not in NO_CODE:
                code |= set(range(token.start[0], token.end[0] + 1))
        counts.code += len(code - left_out)
        counts.comments += len(comments)
        counts.lines.append(source.count("\n"))
    return counts


def import_graph(root: Path, paths: list[PurePosixPath]) -> dict[PurePosixPath, set[PurePosixPath]]:
    """Which file imports which, by absolute and relative imports; those under `if TYPE_CHECKING` are left out."""
    modules: dict[tuple[str, ...], PurePosixPath] = {}
    for path in paths:
        parts = path.with_suffix("").parts
        parts = parts[1:] if parts[0] == "src" else parts
        modules[parts[:-1] if parts[-1] == "__init__" else parts] = path
    graph: dict[PurePosixPath, set[PurePosixPath]] = {path: set() for path in paths}
    for name, path in modules.items():
        package = name if path.name == "__init__.py" else name[:-1]
        for target, names in imports(ast.parse((root / path).read_text(encoding="utf-8")), package):
            for word in names or [""]:
                found = modules.get((*target, word)) or modules.get(target)
                if found and found != path:
                    graph[path].add(found)
    return graph


def imports(tree: ast.AST, package: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], list[str]]]:
    """Each import as (module, imported names)."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            yield from ((tuple(alias.name.split(".")), []) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            yield (*base, *(node.module or "").split(".")) if node.module else base, [a.name for a in node.names]
        else:
            yield from imports(node, package)


def cycles(graph: dict[PurePosixPath, set[PurePosixPath]]) -> list[list[PurePosixPath]]:
    """Groups of files that import each other: strongly connected components of more than one file."""
    cases.needed("networkx", by=cases.EXTRA.format("train"))
    import networkx

    return [
        sorted(group) for group in networkx.strongly_connected_components(networkx.DiGraph(graph)) if len(group) > 1
    ]


def single_importers(graph: dict[PurePosixPath, set[PurePosixPath]]) -> list[PurePosixPath]:
    importers: dict[PurePosixPath, list[PurePosixPath]] = {path: [] for path in graph}
    for path, targets in graph.items():
        for target in targets:
            importers[target].append(path)
    return sorted(p for p, by in importers.items() if len(by) == 1 and by[0].parent == p.parent)


def sizes(roots: tuple[str, ...] = (".",)) -> Iterator[Claim]:
    """Counts of each checkout. roots: their folders."""
    print("| checkout | files | lines of code | functions | median function | comment lines | median / longest file |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for folder in roots:
        root = Path(folder).resolve()
        paths = python_files(root)
        counts, graph = count(root, paths), import_graph(root, paths)
        print(
            f"| {root.name} | {len(paths)} | {counts.code:,} | {len(counts.functions):,} "
            f"| {statistics.median(counts.functions):g} | {counts.comments:,} "
            f"| {statistics.median(counts.lines):g} / {max(counts.lines)} |"
        )
        groups = cycles(graph)
        print(
            f"{root.name}: {len(single_importers(graph))} modules with a single importer in their folder, "
            f"{counts.imports_in_functions} imports inside functions."
        )
        for group in groups:
            print(f"  cycle: {', '.join(map(str, group))}")
        found = {
            "files": len(paths),
            "lines of code": counts.code,
            "lines of a function, median": statistics.median(counts.functions),
            "import cycles among files": len(groups),
        }
        for what, value in found.items():
            yield measured(f"{'Composer' if root == ROOT else root.name}: {what}", value, n=len(paths))


CASES = {"sizes": sizes}


if __name__ == "__main__":
    cases.main(__file__, CASES)
