"""The Python inside is the base of the running one, wherever that lies."""

import ast
import os
import subprocess
import sys
from pathlib import Path

from stages.sandbox import Sandbox
from stages.sandbox.bubblewrap import base_python, compiled, guest_folder


def test_base_python_is_no_venv() -> None:
    assert not base_python().is_symlink() and os.access(base_python(), os.X_OK)
    assert not (base_python().parent.parent / "pyvenv.cfg").exists()


def test_it_comes_first_on_path_and_sees_no_packages(box: Sandbox) -> None:
    script = "import sys; print(sys.base_prefix == sys.prefix, sys.version_info[:3], sys.flags.isolated)"
    said = f"True {tuple(sys.version_info[:3])} 0\n"
    assert box.run(f"python3 -c '{script}'; python -c '{script}'").output == 2 * said
    assert box.run("readlink -f $(which python3)").output == f"{base_python()}\n"
    packages = "import os, site; print(sum(([*os.walk(path)][:1] for path in site.getsitepackages()), []))"
    assert "site-packages" in (said := box.run(f"python3 -c '{packages}'").output) or "dist-packages" in said
    assert all(not folders and not files for _, folders, files in ast.literal_eval(said))


def test_standard_library_is_whole(box: Sandbox) -> None:
    modules = "json re ctypes sqlite3 unittest multiprocessing subprocess venv ssl"
    available = " ".join(name for name in modules.split() if _has(name))
    assert box.run(f'for m in {available}; do python3 -c "import $m" || echo no $m; done').output == ""


def test_multiprocessing_works(box: Sandbox) -> None:
    (Path(box.work) / "pool.py").write_text(
        "from multiprocessing import Pool\nif __name__ == '__main__':\n    print(Pool(2).map(abs, [-1, -2]))\n"
    )
    assert box.run("python3 pool.py").output == "[1, 2]\n"


def _has(name: str) -> bool:
    try:
        __import__(name)
    except ImportError:
        return False
    return True


def test_a_supervisor_starts_without_what_would_double_its_start() -> None:
    script = f"import sys; sys.path.insert(0, {str(guest_folder())!r}); import supervisor; print(*sys.modules)"
    done = subprocess.run([base_python(), "-sS", "-c", script], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "supervisor" in loaded
    assert loaded & {"signal", "enum", "functools", "collections", "ctypes", "contextlib", "typing", "re"} == set()


def test_what_sandboxes_show_is_compiled_outside_of_them(tmp_path: Path) -> None:
    """Inside it is read-only, and each run of pytest compiled pytest again."""
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "one.py").write_text("x = 1\n")
    assert compiled(tmp_path) == tmp_path and [*(tmp_path / "inner" / "__pycache__").glob("one.*.pyc")]
    assert compiled(tmp_path / "inner" / "one.py").is_file() and compiled(tmp_path / "none") == tmp_path / "none"
