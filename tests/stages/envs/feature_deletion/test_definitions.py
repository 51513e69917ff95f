"""What is left of a function or class when its code is removed."""

import ast
from pathlib import Path

import pytest

from composer_stages.envs.feature_deletion.definitions import STUB, Definition, Keep, apply_edits, definitions
from tests.stages.envs.feature_deletion.conftest import PACKAGES

EVERYTHING, ONLY_SIGNATURE, NOTHING = Keep(True, True), Keep(False, True), Keep(False, False)

MODULE: str = PACKAGES["definitions"]


def named(text: str, name: str) -> Definition:
    return next(d for d in definitions("m.py", text) if d.qualname == name)


def removed(name: str, keep: Keep, text: str = MODULE) -> str:
    return apply_edits(text, named(text, name).edits(keep))


def test_definitions_of_functions_methods_and_classes() -> None:
    found = [one.qualname for one in definitions("m.py", MODULE)]
    assert found == ["area", "later", "Box", "Box.__init__", "Box.empty", "Box.nothing"]
    assert named(MODULE, "Box.nothing").edits(EVERYTHING) == [] and named(MODULE, "Box.nothing").code == []
    assert named(MODULE, "area").code == ["return width * height"], "neither docstring nor comments"
    assert definitions("m.py", "def f(:\n") == []


def test_edits_replace_the_body_alone() -> None:
    before, after = MODULE.split("    # why\n    return width * height\n")
    assert removed("area", EVERYTHING) == f"{before}    {STUB}\n{after}"
    left = removed("area", ONLY_SIGNATURE)
    assert "square metres" not in left and "height: int = 2" in left and "-> int:\n    raise" in left
    assert "@functools.cache\ndef area(*args, **kwargs):\n    raise NotImplementedError\n" in removed("area", NOTHING)
    # One line gets a body, and columns count bytes.
    assert f"async def later():\n    {STUB}\n" in removed("later", EVERYTHING)
    assert f"async def later(*args, **kwargs):\n    {STUB}\n" in removed("later", NOTHING)
    assert removed("f", EVERYTHING, 'def f(): "ä"; return "ö"\n') == f'def f():\n    "ä"\n    {STUB}\n'


def test_edits_of_a_class() -> None:
    easy, hard = removed("Box", EVERYTHING), removed("Box", NOTHING)
    assert "sides = 6" in easy and easy.count(STUB) == 2 and '"Is nothing in it?"' in easy and "        ...\n" in easy
    assert "sides" not in hard and "class Box(dict):\n    def __init__(self, *args, **kwargs):\n        raise" in hard
    module: dict[str, object] = {}
    exec(easy, module)
    with pytest.raises(NotImplementedError):
        module["Box"](1, 2)  # type: ignore[operator]


@pytest.mark.parametrize("name", ["textwrap.py", "queue.py", "reprlib.py"])
@pytest.mark.parametrize("keep", [EVERYTHING, ONLY_SIGNATURE, NOTHING])
def test_every_removal_from_the_standard_library_parses(name: str, keep: Keep) -> None:
    text = (Path(ast.__file__).parent / name).read_text()
    for definition in definitions(name, text):
        edits = definition.edits(keep)
        assert not edits or STUB in apply_edits(text, edits)
        ast.parse(apply_edits(text, edits))


def test_a_file_with_line_ends_that_only_python_counts_is_left_out() -> None:
    text = "a = 1\n\n\ndef add(a, b):\n    total = a + b\n    return total\n"
    assert [one.qualname for one in definitions("m.py", text.replace("\n", "\r\n"))] == ["add"]
    assert not definitions("m.py", text.replace("\n", "\r")) and not definitions("m.py", "\r" + text)
