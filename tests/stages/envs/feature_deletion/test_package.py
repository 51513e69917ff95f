"""A package is copied without what gives the answer away, and nothing of it is run."""

import io
import os
import re
import tarfile
import zipfile
from pathlib import Path

import pytest
from support.archives import tar
from support.sample_package import write

from composer_stages.envs.feature_deletion.package import declared_dependencies, import_hint, resolve_modules, unpack
from composer_stages.errors import BadInput


def paths(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}


def test_history_caches_and_built_copies_stay_behind(tmp_path: Path) -> None:
    leftovers = (
        ".git/HEAD",
        "submodule/.git",
        "shelf/__pycache__/words.cpython-311.pyc",
        ".mypy_cache/3.11/shelf.json",
        "old.pyc",
    )
    built = (
        "build/lib/shelf/words.py",
        "shelf.egg-info/SOURCES.txt",
        ".tox/py/shelf.py",
        "dist/shelf.whl",
        "venv/lib/s.py",
    )
    kept = {"shelf/words.py", "shelf/build/x.py"}
    source = write(tmp_path / "source", dict.fromkeys([*leftovers, *built, *kept], "x = 1\n"))
    (root := tmp_path / "root").mkdir()
    (source / os.fsdecode(b"shelf/caf\xe9.txt")).write_text("a name that is no UTF-8")
    kept.add(os.fsdecode(b"shelf/caf\xe9.txt"))
    unpack(source, root)
    assert {path for path in paths(root) if "dist-info" not in path} == kept


def test_a_package_has_its_name_from_its_metadata_or_its_file(shelf: Path, tmp_path: Path) -> None:
    for name, files in {
        "some.thing_2.0": {"a-1/PKG-INFO": b"Name: some.thing\nVersion: 2.0\n", "a-1/some/t.py": b"x = 1\n"},
        "one_3": {"a/pyproject.toml": b"[project]\nname = 'one'\nversion = '3'\n"},
    }.items():
        (root := tmp_path / name).mkdir()
        package = unpack(tar(tmp_path / "x.tar.gz", *files.items()), root)
        assert package.label == name == f"{package.name}_{package.version}"
        assert f"Version: {package.version}" in next(root.glob("*.dist-info/METADATA")).read_text()
    (tmp_path / "two").mkdir()
    with zipfile.ZipFile(tmp_path / "two-0.1.zip", "w") as file:
        file.writestr("two/two.py", "x = 1\n")
    assert unpack(tmp_path / "two-0.1.zip", tmp_path / "two").label == "two_0.1"
    (tmp_path / "bare").mkdir()
    assert "shelf/words.py" in paths(unpack(shelf / "shelf", tmp_path / "bare").root), "it stays importable"


def test_links_in_an_archive_become_copies_and_lead_nowhere(tmp_path: Path) -> None:
    """Long names over links lead out once they are resolved: CVE-2025-4517, which `filter="data"` lets through."""
    outside, root, part = tmp_path / "outside", tmp_path / "root", "d" * 247
    outside.write_text("mine")
    root.mkdir()
    steps = "abcdefghijklmnop"
    with tarfile.open(tmp_path / "x.tar", "w") as file:

        def add(name: str, kind: bytes, link: str = "", data: bytes = b"") -> None:
            member = tarfile.TarInfo(name)
            member.type, member.linkname, member.size = kind, link, len(data)
            file.addfile(member, io.BytesIO(data))

        for index, step in enumerate(steps):
            above = "/".join([part] * index)
            add(f"{above}/{part}" if above else part, tarfile.DIRTYPE)
            add(f"{above}/{step}" if above else step, tarfile.SYMTYPE, part)
        long = "/".join(steps) + "/" + "l" * 254
        add(long, tarfile.SYMTYPE, "../" * len(steps))
        add("escape", tarfile.SYMTYPE, f"{long}/../../outside")
        add("hard", tarfile.LNKTYPE, "escape")
        add("hard", tarfile.REGTYPE, data=b"theirs")
        add("pkg/real.py", tarfile.REGTYPE, data=b"x = 1")
        add("pkg/link.py", tarfile.SYMTYPE, "real.py")
        add("pkg/same.py", tarfile.LNKTYPE, "pkg/real.py")
        add("pkg/passwd", tarfile.SYMTYPE, "/etc/passwd")
    package = unpack(tmp_path / "x.tar", root)
    assert outside.read_text() == "mine"
    assert not any(path.is_symlink() for path in package.root.rglob("*"))
    assert [(root / "pkg" / name).read_text() for name in ("link.py", "same.py")] == ["x = 1"] * 2
    assert not (root / "pkg" / "passwd").exists()


@pytest.mark.parametrize(("name", "version"), [("a", "1/../../x"), ("../../x", "1"), ("a", "1\n x"), ("/a/b", "..")])
def test_declared_name_is_never_a_path(name: str, version: str, tmp_path: Path) -> None:
    root = tmp_path / "deep" / "root"
    root.mkdir(parents=True)
    stated = f"Name: {name}\nVersion: {version}\n".encode()
    package = unpack(tar(tmp_path / "x.tar.gz", ("p/PKG-INFO", stated), ("p/t.py", b"")), root)
    assert "/" not in package.name + package.version and "\n" not in package.version
    of_name = f"{re.sub('[-_.]+', '_', package.name)}-{package.version}.dist-info"
    assert [path.name for path in root.iterdir() if path.is_dir()] == [of_name]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["deep", "x.tar.gz"]


@pytest.mark.parametrize("name", ["missing", "notes.txt"])
def test_unpack_refuses_other_files(name: str, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("no package")
    with pytest.raises(BadInput, match="neither a folder nor an archive"):
        unpack(tmp_path / name, tmp_path)


PYPROJECT = """
[project]
name = "x"
dependencies = ["Typing_Extensions>=4", "attrs"]
optional-dependencies.test = ["pytest-mock[dev] ; python_version > '3'"]
[dependency-groups]
dev = ["freezegun==1.0", {include-group = "other"}]
"""
INFO = "Metadata-Version: 2.1\nName: x\nRequires-Dist: hypothesis (>=6) ; extra == 'test'\n"
CFG = "[options]\ninstall_requires =\n    six>1\n[options.extras_require]\ntest =\n    mock\n    nose2\n"


@pytest.fixture
def package(tmp_path: Path) -> Path:
    return write(tmp_path, {"pyproject.toml": PYPROJECT, "PKG-INFO": INFO, "setup.cfg": CFG})


def test_dependencies_are_read_from_all_metadata(package: Path) -> None:
    assert declared_dependencies(package) == {
        *("Typing_Extensions", "attrs", "pytest-mock", "freezegun", "hypothesis", "six", "mock", "nose2")
    }


def test_distribution_of_a_module_is_never_guessed(package: Path) -> None:
    known, unknown = resolve_modules(["yaml.loader", "pytest_mock", "freezegun.api", "nowhere"], package)
    assert known == {"yaml": "PyYAML", "pytest_mock": "pytest-mock", "freezegun": "freezegun"}
    assert unknown == ["nowhere"]
    (bare := package / "bare").mkdir()
    said = import_hint(["nowhere_to_be_found"], bare)
    assert "holds nowhere_to_be_found; the package declares nothing" in said and '["nowhere' not in said
    assert import_hint(["yaml"], bare).startswith("Add --set env.requirements='[\"PyYAML\"]'")
