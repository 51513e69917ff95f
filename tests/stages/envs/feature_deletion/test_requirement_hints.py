"""Modules that tests could not import, and the distributions that metadata names for them."""

from pathlib import Path

import pytest

from stages.envs.feature_deletion.package import declared_dependencies, import_hint, resolve_modules

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
    for name, text in {"pyproject.toml": PYPROJECT, "PKG-INFO": INFO, "setup.cfg": CFG}.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def test_what_a_package_declares_is_read_from_all_its_metadata(package: Path) -> None:
    assert declared_dependencies(package) == {
        *("Typing_Extensions", "attrs", "pytest-mock", "freezegun", "hypothesis", "six", "mock", "nose2")
    }


def test_a_module_is_found_in_the_distribution_that_holds_it(package: Path) -> None:
    known, unknown = resolve_modules(["yaml.loader", "pytest_mock", "freezegun.api", "nowhere"], package)
    assert known == {"yaml": "PyYAML", "pytest_mock": "pytest-mock", "freezegun": "freezegun"} and unknown == [
        "nowhere"
    ]


def test_a_name_is_never_guessed(tmp_path: Path) -> None:
    said = import_hint(["nowhere_to_be_found"], tmp_path)
    assert "holds nowhere_to_be_found; the package declares nothing" in said and '["nowhere' not in said
    assert import_hint(["yaml"], tmp_path).startswith("Add --set env.requirements='[\"PyYAML\"]'")
