"""An OpenEnv server of one of our environments as a program: `python -m stages.integrations.openenv_server FILE`.

Runs under an interpreter that has openenv, which need not be Composer's own. FILE is JSON: {"env", "options", "tasks",
"max_steps", "sessions"}. The address is the first line on stdout; the server ends when its standard input does.
"""

import json
import socket
import sys
import threading
from pathlib import Path

import uvicorn

from stages import envs
from stages.envs.base import Task
from stages.integrations.openenv import app


def main() -> None:
    """Serve until the process that started this one closes its standard input, or is gone."""
    asked = json.loads(Path(sys.argv[1]).read_text())
    served = app(
        lambda: envs.load(asked["env"], asked["options"]),
        [Task(**task) for task in asked["tasks"]],
        max_steps=asked["max_steps"],
        sessions=asked["sessions"],
    )
    listener = socket.create_server(("127.0.0.1", 0))
    # A client thinks for minutes between two steps and answers no ping meanwhile; it ends when its connection does.
    server = uvicorn.Server(uvicorn.Config(served, log_level="warning", ws_ping_interval=None))
    threading.Thread(target=_end_with_input, args=(server,), daemon=True).start()
    print(f"http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
    server.run([listener])


def _end_with_input(server: uvicorn.Server) -> None:
    sys.stdin.read()
    server.should_exit = True


if __name__ == "__main__":
    main()
