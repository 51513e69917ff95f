"""Generated parts of the documents are up to date, words of reports are explained, and every link has a target."""

import re
import runpy
import sys
from pathlib import Path

import pytest
from cogapp import Cog
from needs import needs

from composer_stages import STAGES
from composer_stages.evaluation import report
from composer_stages.evaluation.outcomes import PRIMARY
from composer_stages.pairs import evidence
from composer_stages.rollouts import collection_checks
from tests.docs.documents import DOCUMENTS, FENCE, ROOT

LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(#[^)\s]+)?\)")
PLAIN = {
    *("pass@1", "95 % interval", "tasks", "rollouts", "errors", "USD", "tokens"),
    *("agrees", "with student", "USD/backed"),
}
"""Columns of reports that need no entry: words of the field, and those that the report itself explains."""


def test_generated_parts_are_up_to_date(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("sys.path", [*sys.path])  # which cog changes
    types = (ROOT / "composer_post_training").glob("*.py*")
    paths = [str(path) for path in (*types, *DOCUMENTS) if "[[[cog" in path.read_text()]
    code = Cog().main(["cog", "--check", *paths])
    assert code == 0, f"{capfd.readouterr()} Run `./dev cog`."


def test_the_reference_lists_commands_and_what_is_said_of_records() -> None:
    reference = runpy.run_path(str(ROOT / "docs" / "commands.py"))
    assert "### composer collect" in reference["commands"]()
    assert "`rollout/" in reference["kinds"]() and "hidden tests pass" in reference["kinds"]()


def test_the_picture_shows_stages_that_exist() -> None:
    shown = set(re.findall(r'class="stage"[^>]*>([^<]+)<', (ROOT / "docs" / "images" / "arrows.svg").read_text()))
    assert shown and shown <= STAGES.keys()


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_has_a_target(path: Path) -> None:
    """As files of the repository, since the code host shows them too; the site rewrites its links (docs/pages.py)."""
    for target, anchor in LINK.findall(path.read_text()):
        page = path.parent / target if target else path
        assert page.exists(), f"{path}: {target}"
        assert not anchor or page.suffix != ".md" or anchor[1:] in anchors(page), f"{path}: {target}{anchor}"


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as the code host and mkdocs name them."""
    heads = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text()), re.M)
    return {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in heads}


@needs("mkdocs")
def test_the_reference_holds_every_package() -> None:
    site = runpy.run_path(str(ROOT / "docs" / "pages.py"))
    assert set(site["PACKAGES"]) == {path.parent.name for path in (ROOT / "stages").glob("*/__init__.py")}


def test_the_glossary_is_in_alphabetical_order_and_explains_the_words_of_reports() -> None:
    text = (ROOT / "docs" / "glossary.md").read_text()
    terms = re.findall(r"^\| \*\*(.+?)\*\* \|", text, re.M)
    assert terms == sorted(terms, key=str.lower) and len(terms) > 30
    explained = {word for term in terms for word in term.split(", ")}
    missing = {*report.HEAD, *(one.head for one in PRIMARY.values()), *evidence.AUDIT_HEAD} - explained - PLAIN
    assert missing == set(), "docs/glossary.md explains none of these words of a report"


def test_every_collection_check_is_explained() -> None:
    rows = [line for line in (ROOT / "docs" / "verdicts.md").read_text().splitlines() if line.startswith("| ")]
    explained = {name for row in rows for name in re.split(r"; |, (?=rollouts scored)", row.split(" | ")[0][2:])}
    assert {check.name for check in collection_checks.CollectionChecks().checks(0)} - explained == set()
