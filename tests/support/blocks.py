"""Executes blocks of documents, each in a process that the server of fork_server.py forks."""

import multiprocessing
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path

_context = multiprocessing.get_context("forkserver")


def execute(job: str | Sequence[str], folder: Path, env: Mapping[str, str], timeout_s: float = 600) -> tuple[int, str]:
    """Run Python source, or the words after `composer`, in `folder`; returns the exit code and all that was printed."""
    log = folder / ".printed"
    process = _context.Process(target=_run, args=(job, str(folder), dict(env), str(log)))
    process.start()
    process.join(timeout_s)
    if process.exitcode is None:
        process.kill()
        process.join()
    return process.exitcode if process.exitcode is not None else -1, log.read_text(
        errors="replace"
    ) if log.exists() else ""


def _run(job: str | Sequence[str], folder: str, env: dict[str, str], log: str) -> None:
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(env)
    printed = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(printed, 1)
    os.dup2(printed, 2)
    sys.path[:0] = [folder, *env.get("PYTHONPATH", "").split(os.pathsep)]
    multiprocessing.current_process()._config["daemon"] = False  # a command may start processes of its own
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
