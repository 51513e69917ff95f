"""Opens a port on loopback, says at which address, and serves until Ctrl-C."""

import secrets
import socket
from collections.abc import Callable
from pathlib import Path

import uvicorn

from composer_cli.view.app import build
from stages.errors import UsageError

HOST = "127.0.0.1"


def serve(root: Path, port: int, tell: Callable[[str], None]) -> None:
    """Serve the runs below `root` until interrupted; `tell` is called with the address once it can be asked.

    port: 0 for one that is free. Raises `UsageError` where the port is taken.
    """
    token = secrets.token_urlsafe(16)
    with _listening(port) as listener:
        address = f"http://{HOST}:{listener.getsockname()[1]}/{token}/"
        config = uvicorn.Config(
            build(root, token), log_level="warning", access_log=False, server_header=False, lifespan="off"
        )
        tell(address)
        try:
            uvicorn.Server(config).run(sockets=[listener])
        except KeyboardInterrupt:
            return  # it is how one ends it


def _listening(port: int) -> socket.socket:
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((HOST, port))
    except (OSError, OverflowError) as error:
        listener.close()
        raise UsageError(
            f"Port {port} cannot be used ({error}). Choose another with --port, or leave it out."
        ) from None
    listener.listen(128)
    return listener
