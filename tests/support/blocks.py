"""Python source and commands in processes that the server of fork_server.py forks, where all is imported already.

Where Composer is installed they are processes of their own, for what is imported here is the tree.
"""

import multiprocessing
import os
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

from support import fork_server

PRINTED = ".printed"
"""The file, in the folder of such a process, with all that it has printed."""
_context = multiprocessing.get_context("forkserver")


def start(job: str | Sequence[str], folder: Path, env: Mapping[str, str]) -> BaseProcess:
    """Run Python source, or the words after `composer`, in `folder`, in a process that has begun when this returns."""
    process = _context.Process(target=_run, args=(job, str(folder), dict(env)))
    process.start()
    return process


def execute(job: str | Sequence[str], folder: Path, env: Mapping[str, str], timeout_s: float = 600) -> tuple[int, str]:
    """`start`, and wait for its end; returns the exit code and all that was printed."""
    process = start(job, folder, env)
    process.join(timeout_s)
    if process.exitcode is None:
        process.kill()
        process.join()
    printed = folder / PRINTED
    code = process.exitcode if process.exitcode is not None else -1
    return code, printed.read_text(errors="replace") if printed.exists() else ""


def execute_installed(
    composer: Path, job: str | Sequence[str], folder: Path, env: Mapping[str, str], timeout_s: float = 600
) -> tuple[int, str]:
    """`execute` in an environment in which Composer is installed: by the Python beside its program, or by that."""
    command = [composer.with_name("python"), "-c", job] if isinstance(job, str) else [composer, *job]
    done = subprocess.run(
        command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout_s
    )
    return done.returncode, done.stdout


def _run(job: str | Sequence[str], folder: str, env: dict[str, str]) -> None:
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(env)
    printed = os.open(PRINTED, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(printed, 1)
    os.dup2(printed, 2)
    sys.path[:0] = [folder, *env.get("PYTHONPATH", "").split(os.pathsep)]
    multiprocessing.current_process()._config["daemon"] = False  # a command may start processes of its own
    fork_server.start()
    code = 0
    try:
        if isinstance(job, str):
            exec(compile(job, "block", "exec"), {"__name__": "__main__"})
        else:
            from composer_cli.app import main

            main(list(job))
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
