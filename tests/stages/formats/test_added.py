"""Formats of other packages: a reader of another name, or none, is refused, and a changed reader is other work."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from composer_stages import formats
from composer_stages.comparison.config import Config
from composer_stages.errors import UsageError
from composer_stages.formats import FORMATS, Format

SOURCE = """
from composer_post_training.formats import Reader
READERS = (Reader({name!r}, lambda record: False, lambda record, origin: ()),)
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that Python searches, with the module of one of two formats that are added."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "zoo_quizzes", raising=False)  # of the test before
    (tmp_path / "zoo_quizzes.py").write_text(SOURCE.format(name="quiz"))
    FORMATS["quizzes"], FORMATS["nowhere"] = Format("zoo_quizzes"), Format("zoo_nowhere")
    yield tmp_path
    del FORMATS["quizzes"], FORMATS["nowhere"]


def test_a_reader_has_the_name_of_its_format(site: Path) -> None:
    for name, code in (("quizzes", "formats.no-reader-of-name"), ("nowhere", "formats.readers-not-imported")):
        with pytest.raises(UsageError) as error:
            formats.readers(name)
        assert error.value.code == code
    with pytest.warns(UserWarning, match="zoo_nowhere"):
        assert len(formats.readers("auto")) > 10


def test_a_changed_reader_makes_another_run(site: Path) -> None:
    log = site / "log.jsonl"
    log.write_text("{}")
    before = Config(paths=[str(log)]).identity()
    (site / "zoo_quizzes.py").write_text(SOURCE.format(name="quizzes"))
    after = Config(paths=[str(log)]).identity()
    assert before != after and before["paths"] == after["paths"]
