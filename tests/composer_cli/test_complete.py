"""What Tab offers in bash, zsh and fish, asked as the shells ask."""

from collections.abc import Callable
from pathlib import Path

import pytest
from support.command_line import call, call_process

from composer_cli.executors.base import EXECUTORS


def offered(artifacts: Path, line: str, shell: str = "bash", run: Callable = call) -> str:
    """What a shell is told to offer at the end of a line."""
    asked = {
        "bash": {"COMP_WORDS": line, "COMP_CWORD": str(line.count(" "))},
        "zsh": {"_TYPER_COMPLETE_ARGS": line},
        "fish": {"_TYPER_COMPLETE_ARGS": line, "_TYPER_COMPLETE_FISH_ACTION": "get-args"},
    }[shell]
    return run(artifacts, _COMPOSER_COMPLETE=f"complete_{shell}", **asked).stdout


@pytest.mark.parametrize(("shell", "run"), [("bash", call_process), ("bash", call), ("zsh", call), ("fish", call)])
def test_runs_and_commands_are_offered(made: Path, shell: str, run: Callable) -> None:
    name = f"collect/{(made / 'collect' / 'latest').resolve().name}"
    assert name in offered(made, "composer show collect/", shell, run)
    assert "replay-teachers" in offered(made, "composer rep", shell, run)


def test_rollouts_of_the_run_are_offered(made: Path) -> None:
    found = offered(made, "composer show collect kata-train").split()
    assert len(found) == 4 and all(one.startswith("kata-train-0-") for one in found)
    assert not any(offered(made, f"composer show {run} ").strip() for run in ("extract-pairs", "no-such"))


@pytest.mark.parametrize(
    ("line", "one"),
    [
        ("composer collect --set policy.mo", "policy.model="),
        ("composer probe score --set ", "seed="),
        ("composer run --preset dem", "demo"),
        ("composer run --preset demo --set collect.tas", "collect.tasks="),
        ("composer collect --env gs", "gsm8k"),
        *((f"composer run --on {name[:2]}", name) for name in EXECUTORS),
        ("composer replay-teachers --from col", "collect/"),
    ],
)
def test_settings_presets_and_environments_are_offered(made: Path, line: str, one: str) -> None:
    assert one in offered(made, line)


def test_submitted_jobs_are_offered(tmp_path: Path) -> None:
    (tmp_path / "submitted" / "20260101T000000Z-demo-abcdef").mkdir(parents=True)
    (tmp_path / "submitted" / "20260101T000000Z-demo-abcdef" / "job.json").touch()
    for line in ("composer cancel 2026", "composer show 2026"):
        assert "20260101T000000Z-demo-abcdef" in offered(tmp_path, line)


def test_help_is_as_wide_as_the_terminal(tmp_path: Path) -> None:
    widest = []
    for width in (60, 100, 180):
        shown = call(tmp_path, "collect", "--help", COLUMNS=str(width)).stdout
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
def test_colours_are_as_the_variables_say(
    made: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], coloured: bool
) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    shown = call(made, "status", **variables).stdout
    assert ("\x1b[32mcomplete\x1b[0m" in shown) == coloured and "complete" in shown


def test_no_colour_comes_from_a_run(tmp_path: Path) -> None:
    folder = tmp_path / "artifacts" / "collect" / "20260101T000000Z-\x1b[31mred-aaaaaa"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text("{}")
    shown = call(tmp_path / "artifacts", "status", FORCE_COLOR="1").stdout
    assert "\x1b[31mred" not in shown and "\\x1b[31mred" in shown
