"""The address of the servers that Composer runs itself: this machine alone."""

import socket

from composer_stages.errors import UsageError

HOST = "127.0.0.1"
HOSTS = [HOST, "localhost"]
"""Names that a request may give its server. Others were bound to this machine anew by a web page (DNS rebinding)."""


def bound(port: int) -> socket.socket:
    """Return a socket that has a port of this machine, 0 for a free one; `UsageError` where another program has it.

    Nobody can connect before it listens.
    """
    if not 0 <= port < 2**16:
        raise UsageError("cli.no-port", port=port)
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((HOST, port))
    except OSError as error:
        listener.close()
        raise UsageError("cli.port-taken", port=port, reason=error.strerror) from None
    return listener
