"""A tree is there as long as anyone uses it, and few are kept longer."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from stages.envs.swe.instance_tasks import SharedTrees


@pytest.fixture
def shared() -> Iterator[SharedTrees]:
    kept = SharedTrees(idle=2)
    yield kept
    kept.close()


def fill(folder: Path) -> None:
    assert list(folder.iterdir()) == []
    (folder / "file").write_text("x")


def test_what_two_use_is_made_once_and_goes_with_the_second(shared: SharedTrees) -> None:
    first, second = shared.take("a", fill), shared.take("a", fill)
    assert first == second
    shared.give_back("a")
    for number in range(3):
        shared.take(number, fill)
        shared.give_back(number)
    assert first.exists()
    assert shared.take("a", fill) == first
    shared.give_back("a")
    shared.give_back("a")
    assert first.exists(), "among the last two that were used"


def test_what_could_not_be_made_is_tried_again(shared: SharedTrees) -> None:
    places = []

    def fail(folder: Path) -> None:
        places.append(folder)
        raise OSError("no space")

    with pytest.raises(OSError, match="no space"):
        shared.take("a", fail)
    assert not places[0].exists() and (shared.take("a", fill) / "file").exists()
