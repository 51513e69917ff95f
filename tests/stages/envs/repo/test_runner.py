"""Copies of a repository's packages among the programs of the machine are found, and are empty inside."""

from pathlib import Path

from support.sample_package import write

from composer_stages.envs.repo.runner import copies_on_host
from composer_stages.sandbox import View, open_sandbox


def test_vendored_packages_and_wheels_are_found_once_and_empty_inside(tmp_path: Path) -> None:
    vendored = ("sdk/vendor/abacus/__init__.py", "sdk/vendor/abacus/again/abacus/__init__.py", "sdk/json/__init__.py")
    texts = dict.fromkeys([*vendored, "sdk/vendor/other/__init__.py", "sdk/pip-1.whl"], "the answer\n")
    system = write(tmp_path / "shown", texts)
    for folder in (system / "abacus", tmp_path / "work"):
        folder.mkdir()
    hidden = copies_on_host({"abacus", "json"}, system)
    # No folder without code, no standard library.
    assert hidden == (system / "sdk/vendor/abacus", system / "sdk/pip-1.whl")
    with open_sandbox("bubblewrap", tmp_path / "work", view=View(readonly=[system], hidden=hidden)) as sandbox:
        place = system / "sdk/vendor"
        listing = sandbox.run(f"ls {place}/abacus; touch {place}/abacus/x; cat {place}/other/__init__.py")
    assert "Read-only file system" in listing.output and listing.output.endswith("the answer\n")
    assert "__init__.py\n" not in listing.output
