"""Copies of removed code are found in the delivered tree."""

import textwrap

from stages.envs.feature_deletion import leaks
from stages.envs.feature_deletion.definitions import definitions
from stages.envs.feature_deletion.selection import Removal
from stages.envs.repo import trees

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
