"""The Containerfile builds and runs by rootless podman, on a base image that is made here: no registry is asked."""

import os
import subprocess
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from needs import needs
from support import container_image
from support.transcripts import assistant, jsonl, user

ROOT = Path(__file__).parents[1]
pytestmark = [pytest.mark.slow, needs("podman")]
DEPENDENCIES = sysconfig.get_path("purelib")
"""What the base image of a user fetches, and the one made here lacks, is lent from this environment."""


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    context = tmp_path_factory.mktemp("base")
    base, tag = (f"localhost/composer-{name}:{os.getpid()}" for name in ("base", "whole"))
    building = [path for name in ("pip*", "setuptools*", "_distutils_hack") for path in Path(DEPENDENCIES).glob(name)]
    container_image.fill(context / "root", building, Path(DEPENDENCIES).glob("pyarrow/libarrow.so.*"))
    (context / "Containerfile").write_text(container_image.FILE)
    container_image.build(context, base)
    install = "--no-deps --no-index --no-build-isolation"
    container_image.build(
        ROOT, tag, "--network", "none", "--build-arg", f"BASE={base}", "--build-arg", f"INSTALL={install}"
    )
    yield tag
    subprocess.run(["podman", "rmi", "--force", tag, base], capture_output=True)


NESTED = ("--security-opt", "seccomp=unconfined", "--security-opt", "unmask=ALL")
"""What bubblewrap needs inside a container, as the Containerfile says."""


def say(image: str, folder: Path, *words: str, options: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    lent = ["--volume", f"{DEPENDENCIES}:/lent:ro", "--env", "PYTHONPATH=/lent", "--env", "OMP_NUM_THREADS=1"]
    command = ["podman", "run", "--rm", "--network", "none", "--volume", f"{folder}:/work", *options, *lent, image]
    return subprocess.run([*command, *words], capture_output=True, text=True, timeout=280)


def test_it_builds_and_runs_with_everything_inside(image: str, tmp_path: Path) -> None:
    helped = say(image, tmp_path)
    assert helped.returncode == 0 and "replay-teachers" in helped.stdout, helped.stderr
    version = say(image, tmp_path, "--version")
    assert "/usr/local/lib" in version.stdout and "/lent" not in version.stdout
    refused = say(image, tmp_path, "run", "--preset", "demo", "--dry-run")
    assert refused.returncode in (0, 2) and "Traceback" not in refused.stderr, refused.stderr
    planned = say(image, tmp_path, "run", "--preset", "demo", "--dry-run", options=NESTED)
    assert planned.returncode == 0 and "evaluate" in planned.stdout, planned.stderr


def test_runs_are_written_into_the_users_folder_and_belong_to_them(image: str, tmp_path: Path) -> None:
    row = {"instance_id": "a__b-1", "messages": [user("q"), assistant("a")], "resolved": True}
    jsonl(tmp_path / "in" / "rows.jsonl", row)
    done = say(image, tmp_path, "import", "in", "--json")
    assert done.returncode == 0, done.stderr
    (manifest,) = tmp_path.glob("artifacts/import/2*/manifest.json")
    assert manifest.stat().st_uid == os.getuid()
