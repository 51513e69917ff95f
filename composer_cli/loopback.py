"""The address of the servers that Composer runs itself: this machine alone."""

import socket

from stages.errors import UsageError

HOST = "127.0.0.1"
HOSTS = [HOST, "localhost"]
"""Names that a request may give its server. Others were bound to this machine anew by a web page (DNS rebinding)."""


def bound(port: int) -> socket.socket:
    """Return a socket that has a port of this machine, 0 for a free one; `UsageError` where another program has it.

    Nobody can connect before it listens.
    """
    if not 0 <= port < 2**16:
        raise UsageError(f"Port {port} is none: ports are 1 to 65535, and --port 0 takes one that is free.")
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((HOST, port))
    except OSError as error:
        listener.close()
        raise UsageError(
            f"Port {port} cannot be used ({error.strerror}). Choose another with --port, or leave it out."
        ) from None
    return listener
