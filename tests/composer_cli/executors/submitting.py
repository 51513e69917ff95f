"""What the tests of all executors share: a small chain, its model, and how its job and its content are looked at."""

import json
import threading
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

from support.command_line import repair
from support.server import Reply

KEY = "sk-0123456789abcdef"
"""What the model's server is asked with, by the variable TEACHING_KEY."""
Composer = Callable[..., CompletedProcess[str]]


def chain(url: str, sandbox: str = "bubblewrap") -> str:
    """A preset with one small collection."""
    policy = f'{{ model = "scripted", base_url = "{url}", api_key_env = "TEACHING_KEY", concurrency = 1 }}'
    settings = f'tasks = 2\nsamples = 2\nsandbox = "{sandbox}"\npolicy = {policy}\n'
    return f'[[stage]]\nstage = "collect"\n[stage.config]\n{settings}'


class Held:
    """A scripted model that answers the first few requests, and the others when it is let."""

    def __init__(self) -> None:
        self.let, self.first = threading.Event(), 1000

    def __call__(self, asked: dict[str, Any], earlier: int) -> Reply:
        if earlier >= self.first:
            self.let.wait(60)
        return repair(asked, earlier)


def name_of(done: CompletedProcess[str]) -> str:
    """The name of the job that was submitted with --json."""
    assert done.returncode == 0, done.stderr + done.stdout
    name: str = json.loads(done.stdout)["job"]["name"]
    return name


def job(composer: Composer, name: str) -> dict[str, Any]:
    """How a job stands, as `composer status` says."""
    return next(one for one in json.loads(composer("status", "--json").stdout)["jobs"] if one["job"] == name)


def digests(folder: Path) -> dict[str, str]:
    """The content of the finished collection in an artifacts folder."""
    manifest = json.loads((folder / "collect" / "latest" / "manifest.json").read_text())
    assert manifest["status"] == "complete"
    return {name: out["content_sha256"] for name, out in manifest["outputs"].items()}


def here(composer: Composer, folder: Path) -> dict[str, str]:
    """The digests of the same chain in this process; `folder` holds its preset."""
    done = composer("run", "--preset", folder / "small.toml", at="here")
    assert done.returncode == 0, done.stderr
    return digests(folder / "here")


def holding(secret: str, *folders: Path) -> list[Path]:
    """The files below folders that hold a secret; there must be some files at all."""
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    assert len(files) > 5
    return [path for path in files if secret.encode() in path.read_bytes()]
