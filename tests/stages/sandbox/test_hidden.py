"""What a sandbox does not show although it lies in a folder that it shows."""

import sys
from pathlib import Path

from stages.sandbox import View, open_sandbox


def test_a_hidden_file_cannot_be_read(work: Path, tmp_path: Path) -> None:
    shown = tmp_path / "shown"
    shown.mkdir()
    for name in ("answer.py", "other.py"):
        (shown / name).write_text("content\n")
    read = f"cat {shown}/answer.py {shown}/other.py"
    with open_sandbox("bubblewrap", work, view=View(readonly=[shown])) as sandbox:
        assert sandbox.run(read).output == "content\ncontent\n"
    with open_sandbox("bubblewrap", work, view=View(readonly=[shown], hidden=[shown / "answer.py"])) as sandbox:
        result = sandbox.run(read)
        assert result.output.count("content") == 1 and result.returncode != 0
        assert sandbox.run(f"umount {shown}/answer.py").returncode != 0


def test_the_wheels_that_python_brings_are_hidden(work: Path) -> None:
    bundled = Path(sys.base_prefix) / f"lib/python3.{sys.version_info.minor}/ensurepip/_bundled"
    with open_sandbox("bubblewrap", work) as sandbox:
        assert sandbox.run(f"ls {bundled} | wc -l").output.strip() == "0"
        assert sandbox.run("python3 -m ensurepip --root /tmp/x").returncode != 0
