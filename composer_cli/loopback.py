"""The address of the servers that Composer runs itself: this machine alone, unless another is asked for."""

import errno
import socket

from composer_stages.errors import UsageError

HOST = "127.0.0.1"
HOSTS = [HOST, "localhost"]
"""Names that a request may give its server. Others were bound to this machine anew by a web page (DNS rebinding)."""


def bound(port: int, host: str = HOST) -> socket.socket:
    """Return a socket that has a port of this machine, 0 for a free one; `UsageError` where another program has it.

    Nobody can connect before it listens.
    """
    if not 0 <= port < 2**16:
        raise UsageError("cli.no-port", port=port)
    listener = None
    try:
        [(family, *_, name), *_] = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        listener = socket.socket(family)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(name)
    except OSError as error:
        if listener is None or error.errno == errno.EADDRNOTAVAIL:
            raise UsageError("cli.no-host", host=host, reason=error.strerror) from None
        listener.close()
        raise UsageError("cli.port-taken", port=port, reason=error.strerror) from None
    return listener


def address(listener: socket.socket) -> str:
    """Return where a program of this machine finds the server of a socket."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": HOST, "::": "::1"}.get(host, host)  # noqa: S104 - of a socket that is bound already
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
