"""Copies of a repository's packages among the programs of the machine are found, and are empty inside."""

from pathlib import Path

from stages.envs.repo.runner import copies_on_host
from stages.sandbox import View, open_sandbox


def test_vendored_packages_and_wheels_are_found_once(tmp_path: Path) -> None:
    for path in ("sdk/vendor/abacus/__init__.py", "sdk/vendor/abacus/again/abacus/__init__.py", "sdk/json/__init__.py"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch()
    (tmp_path / "sdk/pip-1.whl").touch()
    (tmp_path / "abacus").mkdir()
    found = copies_on_host({"abacus", "json"}, tmp_path)
    assert found == (tmp_path / "sdk/vendor/abacus", tmp_path / "sdk/pip-1.whl"), (
        "no folder without code, no standard library"
    )


def test_what_is_found_is_empty_inside(tmp_path: Path) -> None:
    shown, work = tmp_path / "shown", tmp_path / "work"
    for folder in (shown / "vendor/abacus", shown / "vendor/other", work):
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text("the answer\n")
    hidden = copies_on_host({"abacus"}, shown)
    with open_sandbox("bubblewrap", work, view=View(readonly=[shown], hidden=hidden)) as sandbox:
        found = sandbox.run(
            f"ls {shown}/vendor/abacus; touch {shown}/vendor/abacus/x; cat {shown}/vendor/other/__init__.py"
        )
    assert "Read-only file system" in found.output and found.output.endswith("the answer\n")
    assert "__init__.py\n" not in found.output
