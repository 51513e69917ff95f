"""Ask once whether the Hugging Face hub answers, before a library waits for it.

Libraries of the hub try each file again for half a minute, with a line on stderr for every attempt (huggingface_hub
2.4). Here the hub is asked once, for a few seconds. Where it does not answer, what an earlier command fetched is used,
and one sentence names what was not fetched.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from composer_stages.errors import BadInput
from composer_stages.runs.activity import activity
from composer_stages.words import Sentence

ANSWER_S = 3.0
"""Seconds within which the hub must answer."""
LOOKUP_S = 5.0
"""The same including the name's look-up, which takes no limit of its own."""
REMEMBERED_S = 60.0
"""Seconds for which a hub that does not answer is not asked again."""

_asked: dict[str, tuple[float, str | None]] = {}


def unreachable(endpoint: str | None = None) -> str | None:
    """Return why the hub cannot be used now, None where it answers; an answer counts for the rest of the process.

    endpoint: None for the one of the environment (HF_ENDPOINT). A user's HF_HUB_OFFLINE counts as an unreachable hub.
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    url = endpoint or constants.ENDPOINT
    at, reason = _asked.get(url, (0.0, ""))
    if reason is None or (reason and time.monotonic() - at < REMEMBERED_S):
        return reason
    with activity(f"contacting {url}"):
        reason = _ask(url)
    _asked[url] = time.monotonic(), reason
    return reason


def _ask(url: str) -> str | None:
    """Return why a server does not answer a request; None where it does."""
    answers: list[str | None] = []

    def ask() -> None:
        from huggingface_hub.utils import get_session  # type: ignore[attr-defined]

        try:
            with get_session().stream("GET", url, timeout=ANSWER_S) as response:  # the page itself is not read
                broken = response.status_code >= 500
            answers.append(f"{url} answers with status {response.status_code}" if broken else None)
        except Exception as error:  # of the name's look-up, the connection or the protocol: no common base class
            first = (str(error).strip().splitlines() or [type(error).__name__])[0]
            answers.append(f"{url} cannot be reached: {first}")

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(LOOKUP_S)
    return answers[0] if answers else Sentence("runs.hub-too-slow", url=url, lookup_s=LOOKUP_S)


def source(model: str, revision: str | None = None) -> str:
    """Return what to load a model of the hub from: its id, or what was fetched before where the hub does not answer.

    `BadInput` where the hub does not answer and nothing was fetched.
    """
    reason = unreachable()
    if reason is None:
        return model
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return str(snapshot_download(model, revision=revision, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        raise BadInput("runs.model-not-found", model=model, reason=reason) from None


@contextmanager
def offline_if_unreachable() -> Iterator[None]:
    """Let libraries of the hub use only what they fetched before, until the block ends, where the hub does not answer.

    A library then raises its error at once, and a data set in its cache is read without the hub.
    """
    if unreachable() is None:
        yield
        return
    import datasets.config
    from huggingface_hub import constants

    places: list[Any] = [constants, datasets.config]  # datasets copies the setting when it is imported
    before = [module.HF_HUB_OFFLINE for module in places]
    try:
        for module in places:
            module.HF_HUB_OFFLINE = True
        yield
    finally:
        for module, value in zip(places, before, strict=True):
            module.HF_HUB_OFFLINE = value
