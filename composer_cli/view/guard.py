"""Who may ask, and what a page may do: whoever knows the token, by this machine's own name, and nothing but show.

The token is the first part of every address. A page of another site does not know it, and cannot learn it: names that
were bound to this machine anew are refused by the host header, and no address leaves a page as a referrer.
"""

import secrets
from collections.abc import Callable
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.responses import PlainTextResponse

HOSTS = ["127.0.0.1", "localhost"]
POLICY = (
    "default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self'; connect-src 'self'; form-action 'self'; "
    "base-uri 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
REFUSED = "This address lacks the token that `composer view` printed. Open the whole address from there.\n"


class Guard:
    """An ASGI application around another, which sees addresses without the token."""

    def __init__(self, app: Any, token: str) -> None:
        self._app, self._prefix = app, f"/{token}"

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """Answer, or refuse with 403 before anything of the address is looked at."""
        if scope["type"] != "http":
            return
        if not secrets.compare_digest(scope["path"][: len(self._prefix) + 1].encode(), f"{self._prefix}/".encode()):
            await PlainTextResponse(REFUSED, 403, headers=HEADERS)(scope, receive, send)
            return
        await self._app({**scope, "root_path": self._prefix}, receive, _with_headers(send))


def _with_headers(send: Callable[[Any], Any]) -> Callable[[Any], Any]:
    async def sending(message: Any) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message).update(HEADERS)
        await send(message)

    return sending
