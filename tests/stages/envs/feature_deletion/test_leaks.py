"""Copies of removed code are found wherever an agent could read them, and hidden where they can be."""

import py_compile
import tarfile
import textwrap
import zipfile
from pathlib import Path

import pytest

from stages.envs.feature_deletion import leaks
from stages.envs.feature_deletion.definitions import definitions
from stages.envs.feature_deletion.selection import Removal
from stages.envs.repo import trees
from stages.sandbox import View, open_sandbox

PATH = "pkg/maths.py"
SOURCE = textwrap.dedent(
    """\
    def mean(values):
        collected_values = list(values)
        # an empty list has no mean
        if not collected_values:
            raise ValueError("no values were given")
        number_of_values = len(collected_values)
        return sum(collected_values) / number_of_values
    """
)
BODY = SOURCE.partition("\n")[2]
KEY = f"{PATH}:mean:1"


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with copies of every kind, and code that only looks like one."""
    folder = tmp_path_factory.mktemp("planted")
    (folder / "vendored.py").write_text(f"import os\n\nclass A:\n    def average(v):\n{textwrap.indent(BODY, '    ')}")
    (folder / "commented.txt").write_text("".join(f"# {line}\n" for line in BODY.splitlines()))
    (folder / "similar.py").write_text("def mean(values):\n    collected_values = list(values)\n    return 0\n")
    with zipfile.ZipFile(folder / "pkg.whl", "w") as file:
        file.writestr(PATH, SOURCE)
    (folder / "pkg").mkdir()
    (folder / "source").write_text(SOURCE)
    with tarfile.open(folder / "pkg-1.tar.gz", "w:gz") as file:
        file.add(folder / "source", "source.py")
    (folder / "broken.whl").write_bytes(b"PK no archive")
    py_compile.compile(str(folder / "source"), str(folder / "pkg/__pycache__/maths.cpython-311.pyc"))
    (folder / "source").unlink()
    return folder


def test_copies_of_every_kind_are_found(planted: Path) -> None:
    found = leaks.find_copies("bubblewrap", {PATH: SOURCE}, planted, roots=[planted])
    below = {str(Path(path).relative_to(planted)) for path in found.pop(KEY)}
    archives = {f"pkg.whl!{PATH}", "pkg-1.tar.gz!source.py"}
    assert below == {"vendored.py", "commented.txt", *archives, "pkg/__pycache__/maths.cpython-311.pyc"}
    assert found == {}


def test_what_python_itself_needs_is_not_hidden_but_reported() -> None:
    import textwrap as module

    text = Path(module.__file__).read_text()
    survey = leaks.survey_copies("bubblewrap", {"pkg/wrap.py": text}, None, [Path(module.__file__)])
    assert not any(path.samefile(module.__file__) for path in survey.hidden)
    part = next(d for d in definitions("pkg/wrap.py", text) if d.qualname == "indent")
    assert survey.of(Removal("function", "easy", "train", (part,)))


def test_hidden_copies_cannot_be_read(planted: Path, tmp_path: Path) -> None:
    place = planted / "vendored.py"
    with open_sandbox("bubblewrap", tmp_path, view=View(readonly=[planted], hidden=[place])) as sandbox:
        assert (
            "collected_values"
            not in sandbox.run(f"cat {place}; cp {place} x; cat x; python3 -c 'open({str(place)!r}).read()'").output
        )


def parts(text: str, *names: str) -> Removal:
    return Removal("function", "easy", "train", tuple(d for d in definitions(PATH, text) if d.qualname in names))


def copies_within(files: dict[str, str], removal: Removal) -> list[str]:
    searched = leaks.PackageShingles({path: trees.TreeFile(text.encode()) for path, text in files.items()})
    return searched.copies(removal, removal.writes({PATH: files[PATH]}))


def test_the_delivered_tree_is_searched_without_what_was_removed() -> None:
    assert copies_within({PATH: SOURCE, "readme.md": "mean\n"}, parts(SOURCE, "mean")) == []
    assert copies_within({PATH: SOURCE, "build/lib/maths.py": SOURCE}, parts(SOURCE, "mean")) == ["build/lib/maths.py"]
    twice = SOURCE + SOURCE.replace("mean", "average")
    assert copies_within({PATH: twice}, parts(twice, "mean")) == [PATH]
    assert copies_within({PATH: twice}, parts(twice, "mean", "average")) == []
