"""What is chosen to be removed, and in which order."""

from pathlib import Path

import pytest
from support.sample_package import write

from composer_stages.envs.base import Split
from composer_stages.envs.feature_deletion import selection
from composer_stages.envs.feature_deletion.definitions import definitions
from composer_stages.envs.feature_deletion.package import Package
from composer_stages.envs.feature_deletion.selection import KEEP, WEIGHTS, Removal

Lines = dict[str, dict[int, frozenset[str]]]


@pytest.fixture
def texts(package: Package) -> dict[str, str]:
    return selection.read_sources(package.root)


@pytest.fixture
def lines(texts: dict[str, str]) -> Lines:
    """As if one test executed everything."""
    return {path: dict.fromkeys(range(1, text.count("\n") + 2), frozenset({"t"})) for path, text in texts.items()}


def drawn(texts: dict[str, str], lines: Lines, seed: int = 0, split: Split | None = None) -> list[Removal]:
    kinds, difficulties = tuple(WEIGHTS), tuple(KEEP)
    return selection.draw_removals(texts, lines, seed=seed, split=split, kinds=kinds, difficulties=difficulties)


def test_tests_documentation_and_other_encodings_are_no_source(tmp_path: Path) -> None:
    others = ("tests/test_a.py", "docs/conf.py", "setup.py", "shelf/test_b.py", "shelf/c.pyi", "examples/e.py")
    write(tmp_path, dict.fromkeys(["shelf/a.py", *others], "x = 1\n"))
    (tmp_path / "shelf/b.py").write_bytes("# -*- coding: latin-1 -*-\ns = 'ä'".encode("latin-1"))
    assert list(selection.read_sources(tmp_path)) == ["shelf/a.py"]


def test_order_of_removals_depends_on_the_seed(texts: dict[str, str], lines: Lines) -> None:
    one, again, other = (drawn(texts, lines, seed) for seed in (0, 0, 1))
    assert [r.identity for r in one] == [r.identity for r in again] != [r.identity for r in other]


def test_removals_are_functions_classes_and_clusters(texts: dict[str, str], lines: Lines) -> None:
    found = drawn(texts, lines)
    assert {removal.kind for removal in found} == {"function", "class", "cluster"}
    assert any("shelf/books.py:spine_label" in r.names and "shelf/words.py:shorten" in r.names for r in found)
    assert not any("shelf/books.py:Shelf.__len__" in r.names for r in found if r.kind == "function"), "getters are none"


def test_code_that_no_test_executes_is_not_removed(texts: dict[str, str], lines: Lines) -> None:
    found = drawn(texts, {**lines, "shelf/words.py": {}})
    assert found and not any(part.path == "shelf/words.py" for removal in found for part in removal.parts)


def test_the_splits_share_no_definition(texts: dict[str, str], lines: Lines) -> None:
    train, evaluation = (
        {(part.path, part.top) for removal in drawn(texts, lines, split=split) for part in removal.parts}
        for split in ("train", "eval")
    )
    assert train and evaluation and not train & evaluation


def test_call_graph_resolves_methods_by_class() -> None:
    text = "class A:\n def f(self): return self.g()\n def g(self): return 1\nclass B:\n def g(self): return 2\n"
    functions = [d for d in definitions("m.py", text) if d.kind == "function"]
    called = [[functions[i].qualname for i in callees] for callees in selection.call_graph(functions)]
    assert called == [["A.g"], [], []]
