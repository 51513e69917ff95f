"""What Tab offers in bash, zsh and fish, asked as the shells ask."""

import os
import subprocess
from pathlib import Path

import pytest
from support.command_line import command, environment
from support.matrices import few


def offered(artifacts: Path, shell: str, line: str) -> str:
    """What a shell is told to offer at the end of a line."""
    words = line.split(" ")
    asked = {
        "bash": {"COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)},
        "zsh": {"_TYPER_COMPLETE_ARGS": line},
        "fish": {"_TYPER_COMPLETE_ARGS": line, "_TYPER_COMPLETE_FISH_ACTION": "get-args"},
    }[shell]
    env = {**environment(artifacts), "_COMPOSER_COMPLETE": f"complete_{shell}", **asked}
    return subprocess.run(command(), capture_output=True, text=True, env=env, timeout=300).stdout


@pytest.mark.parametrize("shell", few(["bash", "zsh", "fish"], ["bash"]))
def test_runs_and_commands_are_offered(made: Path, shell: str) -> None:
    name = f"collect/{(made / 'collect' / 'latest').resolve().name}"
    assert name in offered(made, shell, "composer show collect/")
    assert "replay-teachers" in offered(made, shell, "composer rep")


def test_rollouts_of_the_run_are_offered(made: Path) -> None:
    found = offered(made, "bash", "composer show collect kata-train").split()
    assert len(found) == 4 and all(one.startswith("kata-train-0-") for one in found)
    assert not any(offered(made, "bash", f"composer show {run} ").strip() for run in ("extract-pairs", "no-such"))


@pytest.mark.parametrize(
    ("line", "one"),
    [
        ("composer collect --set policy.mo", "policy.model="),
        ("composer probe score --set ", "seed="),
        ("composer run --preset dem", "demo"),
        ("composer run --preset demo --set collect.tas", "collect.tasks="),
        ("composer collect --env lee", "leetcode-rh"),
        ("composer run --on sl", "slurm"),
        ("composer run --on h", "hf-jobs"),
        ("composer run --on m", "modal"),
        ("composer replay-teachers --from col", "collect/"),
    ],
)
def test_settings_presets_and_environments_are_offered(made: Path, line: str, one: str) -> None:
    assert one in offered(made, "bash", line)


def test_submitted_jobs_are_offered(tmp_path: Path) -> None:
    (tmp_path / "submitted" / "20260101T000000Z-demo-abcdef").mkdir(parents=True)
    (tmp_path / "submitted" / "20260101T000000Z-demo-abcdef" / "job.json").touch()
    for line in ("composer cancel 2026", "composer show 2026"):
        assert "20260101T000000Z-demo-abcdef" in offered(tmp_path, "bash", line)


def test_help_is_as_wide_as_the_terminal(tmp_path: Path) -> None:
    widest = []
    for width in (60, 100, 180):
        env = environment(tmp_path, COLUMNS=str(width))
        shown = subprocess.run(command("collect", "--help"), capture_output=True, text=True, env=env).stdout
        widest.append(max(map(len, shown.splitlines())))
        assert widest[-1] <= width
    assert widest[0] > 50 and widest[1] > 90 and widest[2] > 120


@pytest.mark.parametrize(
    ("variables", "coloured"),
    [
        ({}, False),
        ({"FORCE_COLOR": "1"}, True),
        ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, False),
        ({"NO_COLOR": ""}, False),
    ],
)
def test_colours_are_as_the_variables_say(made: Path, variables: dict[str, str], coloured: bool) -> None:
    kept = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR")}
    env = {**kept, "COMPOSER_ARTIFACTS": str(made), **variables}
    shown = subprocess.run(command("status"), capture_output=True, text=True, env=env).stdout
    assert ("\x1b[32mcomplete\x1b[0m" in shown) == coloured and "complete" in shown


def test_no_colour_comes_from_a_run(tmp_path: Path) -> None:
    env = {**environment(tmp_path / "artifacts"), "FORCE_COLOR": "1"}
    folder = tmp_path / "artifacts" / "collect" / "20260101T000000Z-\x1b[31mred-aaaaaa"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text("{}")
    shown = subprocess.run(command("status"), capture_output=True, text=True, env=env).stdout
    assert "\x1b[31mred" not in shown and "\\x1b[31mred" in shown
