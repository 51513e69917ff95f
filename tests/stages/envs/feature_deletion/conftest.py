"""A generator on a small package, and tasks made from it, for all tests of feature deletion."""

import pickle
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.removals import removal
from support.sample_package import SHELF, write
from support.shared import made_once

from composer_stages.envs.feature_deletion.env import FeatureDeletionEnv
from composer_stages.envs.feature_deletion.package import Package, unpack
from composer_stages.envs.feature_deletion.selection import Kind
from composer_stages.envs.feature_deletion.task_generator import TaskGenerator, with_source
from composer_stages.envs.repo import trees
from composer_stages.runs.kinds import Row

PACKAGES: dict[str, Any] = tomllib.loads(Path(__file__).with_name("packages.toml").read_text())


@pytest.fixture(scope="session")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package as a folder."""
    return write(tmp_path_factory.mktemp("shelf") / "shelf-1.5", SHELF)


@pytest.fixture(scope="session")
def package(shelf: Path, tmp_path_factory: pytest.TempPathFactory) -> Package:
    """The package, unpacked."""
    return unpack(shelf, tmp_path_factory.mktemp("unpacked"))


@pytest.fixture(scope="session")
def generator(package: Package) -> Iterator[TaskGenerator]:
    """A generator on it."""
    with TaskGenerator(package, "bubblewrap") as opened:
        yield opened


@pytest.fixture(scope="session")
def accepted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Row]:
    """The rows of a few removals by what is removed first, all made in one batch, once for all processes."""

    def make(folder: Path) -> None:
        generator = request.getfixturevalue("generator")
        kinds: dict[tuple[str, ...], Kind] = {("spine_label", "shorten"): "cluster", ("Shelf",): "class"}
        kinds |= {(name,): "function" for name in ("shorten", "initials")}
        made = generator.make([removal(generator, *names, kind=kind) for names, kind in kinds.items()])
        rows = {names[0]: tried.row for names, tried in zip(kinds, made, strict=True) if tried.row}
        assert trees.changes(generator.package.root, generator.worker.tree) == {}, "making leaves the tree as it was"
        (folder / "rows.pickle").write_bytes(pickle.dumps(rows))

    rows: dict[str, Row] = pickle.loads((made_once(tmp_path_factory, "accepted", make) / "rows.pickle").read_bytes())
    return rows


@pytest.fixture(scope="module")
def row(accepted: dict[str, Row], shelf: Path) -> Row:
    """The task of writing `initials` again."""
    return with_source(accepted["initials"], str(shelf), ())


@pytest.fixture
def env(shelf: Path) -> Iterator[FeatureDeletionEnv]:
    """An environment that plays tasks of the package."""
    environment = FeatureDeletionEnv(package=str(shelf))
    yield environment
    environment.close()
