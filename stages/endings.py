"""Why an answer ended: the words of servers, and what they mean for what may be done with the answer.

A whole answer is executed, votes and makes pairs. One that is cut (`CUT`) is recorded and graded as what is there. One
that was filtered (`FILTERED`) is graded as it stands. A call that the server could not read (`MALFORMED`) is the
model's mistake, which it is told. An answer that the server broke off (`BROKEN`) is none, and is asked for again. What
no table knows (`UNKNOWN`) is not taken as whole.
"""

import re
from functools import lru_cache

from composer_stages.data_files import load_toml

CUT, FILTERED, MALFORMED = "length", "content_filter", "malformed_call"
"""How rows write these endings, whatever the server's word was."""
BROKEN, FINISHED, UNKNOWN = "broken", "finished", "unknown"
NOT_WHOLE = (CUT, FILTERED, MALFORMED)
"""Values of `finish_reason` in rows of answers that are no whole action."""
_ENDING = {word: ending for ending, words in load_toml(__package__, "endings.toml").items() for word in words}
_PREFIX = re.compile(r"^(finish|stop|done)?reason(?=.)")


@lru_cache(256)
def ending_of(word: str) -> str:
    """Return what a server's word for the end of an answer means; `UNKNOWN` for a word of no table.

    Gemini's compatible server writes the kind before the word: `function_call_filter: MALFORMED_FUNCTION_CALL`.
    """
    kind, _, detail = word.partition(":")
    plain = (_PREFIX.sub("", re.sub(r"[^a-z0-9]", "", text.lower())) for text in (word, detail, kind))
    return next((_ENDING[text] for text in plain if text in _ENDING), UNKNOWN)
