"""What ships and what installed packages declare are one table; a broken or greedy package is named and left out."""

from collections.abc import Mapping
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from composer_stages.errors import UsageError
from composer_stages.registry import Registry

GROUP = "composer.animals"


def installed(folder: Path, package: str, points: Mapping[str, str], group: str = GROUP) -> None:
    """Write what pip writes of a package with these entry points."""
    info = folder / f"{package}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    lines = [f"{name} = {target}" for name, target in points.items()]
    (info / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines, ""]))


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_an_installed_entry_follows_those_that_ship_and_is_imported_when_it_is_read(site: Path) -> None:
    installed(site, "zoo", {"cat": "zoo_animals:CAT"})
    (site / "zoo_animals.py").write_text("CAT = 'miaow'\n")
    animals = Registry(GROUP, {"dog": "woof"})
    assert "cat" in animals and [*animals] == ["dog", "cat"] and len(animals) == 2 and animals["cat"] == "miaow"
    assert animals.ships("dog") and not animals.ships("cat")
    animals["cow"] = "moo"
    assert [*animals.items()] == [("dog", "woof"), ("cow", "moo"), ("cat", "miaow")]
    assert Registry(GROUP, {}, lambda point: point.value)["cat"] == "zoo_animals:CAT"


def test_a_package_that_cannot_be_imported_stops_only_what_names_it(site: Path) -> None:
    installed(site, "zoo", {"cat": "zoo_of_nowhere:CAT", "cow": "math:pi"})
    animals = Registry[object](GROUP, {"dog": "woof"})
    with pytest.warns(UserWarning, match="zoo declares 'cat'"):
        assert [*animals] == ["dog", "cow"]
    with pytest.raises(UsageError) as error:
        animals["cat"]
    assert error.value.code == "entry-not-imported" and error.value.values["package"] == "zoo"
    with pytest.raises(KeyError):
        animals["horse"]


def test_an_entry_of_another_kind_is_refused_by_the_name_of_its_package(site: Path) -> None:
    installed(site, "zoo", {"cat": "math:pi", "module": "math", "cow": "string:digits"})
    animals = Registry(GROUP, {"dog": "woof"}, kind=str)
    with pytest.warns(UserWarning, match="it is a (float|module), and no str"):
        assert [*animals] == ["dog", "cow"] and animals.added() == ["cow"]
    with pytest.raises(UsageError) as error:
        animals["module"]
    assert error.value.values["target"] == "math"


@pytest.mark.parametrize("points", [{"one": {"dog": "math:e"}}, {"one": {"cat": "math:e"}, "two": {"cat": "math:pi"}}])
def test_no_package_takes_the_name_of_another(site: Path, points: Mapping[str, Mapping[str, str]]) -> None:
    for package, targets in points.items():
        installed(site, package, targets)
    animals = Registry[object](GROUP, {"dog": "woof"}, EntryPoint.load)
    with pytest.warns(UserWarning, match="a name that (Composer|one) has"):
        assert animals["dog"] == "woof" and ("cat" not in animals or animals["cat"] == 2.718281828459045)


def test_an_entry_without_a_target_of_its_group_is_not_read(site: Path) -> None:
    installed(site, "zoo", {"cat": "math:pi"}, group="other.animals")
    assert [*Registry[object](GROUP, {})] == []
