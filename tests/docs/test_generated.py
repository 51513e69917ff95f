"""What the program generates stands in the documents, every message is explained, and every link leads somewhere."""

import os
import re
import runpy
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest
from support.documents import BIN, DOCUMENTS, ROOT

import composer_post_training as composer
from composer_cli.app import click_command
from stages import STAGES
from stages.evaluation import report
from stages.pairs import extraction
from stages.rollouts import gate

LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(#[^)\s]+)?\)")
PLAIN = {
    *("pass@1", "95 % interval", "tasks", "rollouts", "errors", "USD", "tokens"),
    *("agrees", "with student", "USD/backed"),
}
"""Columns of reports that need no entry: words of the field, and those that the report itself explains."""


def test_generated_parts_are_as_the_program_says() -> None:
    tool = [BIN / "cog", "--check", *[path for path in DOCUMENTS if "[[[cog" in path.read_text()]]
    done = subprocess.run(tool, capture_output=True, text=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, f"{done.stdout}{done.stderr} Run `./dev docs`."


def test_every_command_is_documented() -> None:
    text = (ROOT / "docs" / "commands.md").read_text()
    assert [name for name in click_command().commands if f"`composer {name}`" not in text] == []


def test_the_picture_shows_stages_that_exist() -> None:
    shown = set(re.findall(r'class="stage"[^>]*>([^<]+)<', (ROOT / "docs" / "images" / "arrows.svg").read_text()))
    assert shown and shown <= STAGES.keys()


def test_every_message_of_the_program_is_explained_and_every_explanation_has_its_message() -> None:
    tool = runpy.run_path(str(ROOT / "docs" / "errors.py"))
    missing = [f"{message.place}: {message.text}" for message in tool["without_entry"]()]
    assert missing == [], (
        "docs/troubleshooting.md explains none of these; `python docs/errors.py --skeleton` gives rows"
    )
    assert tool["without_message"]() == [], "these rows of docs/troubleshooting.md fit no message any more"


@pytest.mark.parametrize(
    ("entry", "message", "fits"),
    [
        ("There is no stage …", "There is no stage …. The stages are: ….", True),
        ("There is no stage … are", "There is no stage …. The stages are: ….", True),
        ("The stages are … There is", "There is no stage …. The stages are: ….", False),
        ("There is no statue", "There is no stage …. The stages are: ….", False),
    ],
)
def test_an_entry_belongs_to_the_messages_that_hold_its_words(entry: str, message: str, fits: bool) -> None:
    assert runpy.run_path(str(ROOT / "docs" / "errors.py"))["belongs"](entry, message) == fits


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_leads_somewhere(path: Path) -> None:
    """As files of the repository, since the code host shows them too; the site rewrites its links (docs/pages.py)."""
    for target, _ in LINK.findall(path.read_text()):
        assert not target or (path.parent / target).exists(), f"{path}: {target}"


def test_the_python_reference_has_every_name_and_every_argument() -> None:
    text = (ROOT / "docs" / "python-reference.md").read_text()
    missing = [
        name for name in composer.__all__ if f"`composer.{name}`" not in text and f"### composer.{name}\n" not in text
    ]
    assert missing == []
    tool = runpy.run_path(str(ROOT / "docs" / "python_reference.py"))
    for owner, members in tool["MEMBERS"].items():
        own = {name for name in vars(getattr(composer, owner)) if not name.startswith("_")}
        assert own <= {*members}, f"docs/python_reference.py names no {own - {*members}} of {owner}"

    def call(first: int, second: int) -> None:
        """Add numbers. first: the first one."""

    with pytest.raises(ValueError, match="The docstring of call explains no second"):
        assert tool["Entry"]("call", call).meanings


@pytest.mark.skipif(find_spec("mkdocs") is None, reason="mkdocs is absent: the reference's packages were not compared")
def test_the_reference_holds_every_package() -> None:
    site = runpy.run_path(str(ROOT / "docs" / "pages.py"))
    assert set(site["PACKAGES"]) == {path.parent.name for path in (ROOT / "stages").glob("*/__init__.py")}


def test_the_glossary_is_in_alphabetical_order_and_explains_the_words_of_reports() -> None:
    text = (ROOT / "docs" / "glossary.md").read_text()
    terms = re.findall(r"^\| \*\*(.+?)\*\* \|", text, re.M)
    assert terms == sorted(terms, key=str.lower) and len(terms) > 30
    explained = {word for term in terms for word in term.split(", ")}
    missing = {*report.HEAD, *extraction.AUDIT_HEAD} - explained - PLAIN
    assert missing == set(), "docs/glossary.md explains none of these words of a report"


def test_the_guide_explains_every_check_of_the_collection_gate() -> None:
    rows = [line for line in (ROOT / "docs" / "guide.md").read_text().splitlines() if line.startswith("| ")]
    explained = {name for row in rows for name in re.split(r"; |, (?=rollouts scored)", row.split(" | ")[0][2:])}
    assert {check.name for check in gate.Gate().checks(0)} - explained == set()
