"""`./dev` with a scripted interpreter and package installer: when it installs, when it does not, and what it says."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
INTERPRETER = f"""#!/bin/sh
[ "$1" = -c ] && exec {sys.executable} "$@"
rm -rf .venv && mkdir -p .venv/bin && cp installer .venv/bin/python
"""
INSTALLER = """#!/bin/sh
echo "$@" >>installed
[ -e slow ] && sleep 0.5
[ -e broken ] && echo "the registry is down" >&2 && exit 1
[ -e unusable ] && [ "$1" = -c ] && [ -n "$2" ] && echo "no module named torch" >&2 && exit 1
echo "Collecting everything"
printf '#!/bin/sh\\necho "just $@"\\n' >.venv/bin/just && chmod +x .venv/bin/just
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with a scripted `python` and `pip`."""
    shutil.copy(ROOT / "dev", tmp_path)
    for name, text in {"python": INTERPRETER, "installer": INSTALLER}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "constraints.txt").write_text("torch==2.13.0\n")
    (tmp_path / "pyproject.toml").write_text("")
    return tmp_path


def start(checkout: Path, *words: str, python: str = "python") -> subprocess.Popen[str]:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    environment = {"PATH": "/usr/bin:/bin", "PYTHON": str(checkout / python)}
    return subprocess.Popen([str(checkout / "dev"), *words], text=True, env=environment, **pipes)


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, errors = process.communicate(timeout=30)
    return process.returncode, out, errors


def installations(checkout: Path) -> int:
    return (checkout / "installed").read_text().count("-e .[readme]")


def test_it_installs_once_and_hands_its_words_to_just(checkout):
    code, out, errors = finish(start(checkout, "demo", "--json"))
    assert (code, out) == (0, "just demo --json\n") and "Installing into .venv" in errors
    assert finish(start(checkout, "test")) == (0, "just test\n", "")
    assert installations(checkout) == 1
    assert "-c constraints.txt -e .[readme]" in (checkout / "installed").read_text()


@pytest.mark.parametrize("file", ["constraints.txt", "pyproject.toml"])
def test_it_installs_again_when_a_file_it_is_made_from_changed(checkout, file):
    finish(start(checkout))
    (checkout / file).write_text("# changed\n")
    assert "Installing" in finish(start(checkout))[2] and installations(checkout) == 2


def test_two_at_once_install_once(checkout):
    (checkout / "slow").touch()
    both = [start(checkout, "demo"), start(checkout, "test")]
    assert [finish(process)[:2] for process in both] == [(0, "just demo\n"), (0, "just test\n")]
    assert installations(checkout) == 1


def test_a_failed_installation_says_why_and_goes_on_without_what_was_half_unpacked(checkout):
    (checkout / "broken").touch()
    code, out, errors = finish(start(checkout, "demo"))
    assert code == 1 and not out and "the registry is down" in errors
    packages = checkout / ".venv/lib/python3.11/site-packages"
    for name in ("whole", "half"):
        (packages / f"{name}-1.dist-info").mkdir(parents=True)
    (packages / "whole-1.dist-info/INSTALLER").write_text("pip\n")
    (checkout / "broken").unlink()
    code, out, errors = finish(start(checkout, "demo"))
    assert (code, out) == (0, "just demo\n") and "begun before" in errors
    assert [path.name for path in packages.iterdir()] == ["whole-1.dist-info"]
    (checkout / "pyproject.toml").write_text("# changed\n")
    assert "begun before" not in finish(start(checkout))[2] and not packages.exists()


def test_what_was_installed_and_does_not_work_is_installed_anew(checkout):
    (checkout / "unusable").touch()
    code, out, errors = finish(start(checkout, "demo"))
    assert code == 1 and not out and "no module named torch" in errors
    (checkout / "unusable").unlink()
    code, out, errors = finish(start(checkout, "demo"))
    assert (code, out) == (0, "just demo\n") and "begun before" not in errors
    (checkout / ".venv/made-from").write_text("")  # a full disk
    (checkout / "unusable").touch()
    assert finish(start(checkout, "demo"))[:2] == (1, "")


@pytest.mark.parametrize(
    ("settings", "exported"),
    [
        ({}, {"UV_TORCH_BACKEND": "auto"}),
        (
            {
                "PIP_EXTRA_INDEX_URL": "https://a/simple https://b/simple",
                "PIP_FIND_LINKS": "/my wheels",
                "PIP_RETRIES": "3",
            },
            {"UV_INDEX": "https://a/simple https://b/simple", "UV_FIND_LINKS": "/my,wheels"},
        ),
        ({"PIP_INDEX_URL": "https://a/simple", "PIP_CERT": "/c.pem"}, {"UV_DEFAULT_INDEX": "https://a/simple"}),
        ({"PIP_PROXY": "http://proxy"}, None),
    ],
)
def test_uv_is_told_the_indexes_of_pip_or_not_used(tmp_path, settings, exported):
    script = (ROOT / "dev").read_text().partition("<<'END'\n")[2].partition("\nEND\n")[0]
    environment = {"PATH": "/usr/bin:/bin", "PIP_CONFIG_FILE": "/dev/null", "HOME": str(tmp_path), **settings}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert done.returncode == (exported is None)
    words = dict(line.removeprefix("export ").split("=", 1) for line in done.stdout.splitlines())
    told = {name: value.strip("'") for name, value in words.items() if name not in ("UV_CONSTRAINT", "SSL_CERT_FILE")}
    assert told == ({} if exported is None else {"UV_INDEX_STRATEGY": "unsafe-best-match"} | exported)


def test_an_extra_is_installed_once(checkout):
    for _ in range(2):
        assert finish(start(checkout, "extra", "ray"))[0] == 0
    assert (checkout / "installed").read_text().count("-e .[ray]") == 1


@pytest.mark.parametrize("interpreter", ["#!/bin/sh\nexit 1\n", None])
def test_an_interpreter_that_will_not_do_is_a_sentence(checkout, interpreter):
    (checkout / "python").unlink()
    if interpreter:
        (checkout / "python").write_text(interpreter)
        (checkout / "python").chmod(0o755)
    code, _, errors = finish(start(checkout, "demo"))
    assert code == 2 and "CPython 3.11 or newer" in errors.splitlines()[-1]


def interpreter(path: Path, *, finds_gpu: bool) -> None:
    """An interpreter whose torch finds a GPU or none, and that says which it is and what it runs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'#!/bin/sh\n[ "$1" = -c ] && exit {int(not finds_gpu)}\necho {path.parent.name} "$@"\n')
    path.chmod(0o755)


@pytest.mark.parametrize(
    ("own", "ours", "taken"), [(True, True, "own"), (True, False, "own"), (False, True, "bin"), (False, False, "bin")]
)
def test_a_gpu_s_interpreter_is_taken_without_installing(checkout: Path, own: bool, ours: bool, taken: str) -> None:
    interpreter(checkout / "own" / "python", finds_gpu=own)
    interpreter(checkout / ".venv" / "bin" / "python", finds_gpu=ours)
    code, out, _ = finish(start(checkout, "gpu", "speed", "--size", "8B", python="own/python"))
    assert (code, out) == (0, f"{taken} benchmarks/gpu.py speed --size 8B\n")
    assert not (checkout / "installed").exists()
