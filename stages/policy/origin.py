"""Who answers behind an address: what keeps a bought answer from being given in the name of another model.

An address and a model's name say little: a newly trained checkpoint may be served under both. An answer's origin is the
digest of the address, of what the server's list of models and llama.cpp's `/props` tell of the model (no times), and of
the model and the `system_fingerprint` that the answer itself names. Bought answers are reused by other runs only where
the server answers with the same origin now.
"""

import re
import time
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import orjson

from composer_stages.policy.bills import parse
from composer_stages.policy.client import CallError, Client, RetryableError
from composer_stages.runs import store

LISTED = ("root", "parent", "owned_by", "owner", "meta", "digest", "quantization", "hugging_face_id")
"""Fields of a row of a list of models that tell which weights are behind its name."""
PROPS = ("model_path", "model_alias", "chat_template", "build_info", "modalities")
PROPS_S = 5.0
NAME = "origins.jsonl"
Served = tuple[str | None, str | None]
"""The model and the fingerprint that an answer names."""


async def described(client: Client, model: str) -> dict[str, Any]:
    """Return what a server tells of a model without being asked for an answer; empty where it tells nothing.

    `RetryableError` where its list of models may be there later.
    """
    try:
        rows = await client.models() or []
    except RetryableError:
        raise
    except CallError:
        rows = []
    row = next((row for row in rows if row["id"] == model), rows[0] if len(rows) == 1 else {})
    fields = {name: row[name] for name in LISTED if row.get(name) is not None}
    if fields.get("owned_by", "llamacpp") == "llamacpp":
        with suppress(CallError, ValueError):
            root = re.sub(r"/v\d+$", "", str(client.config.base_url).partition("?")[0].rstrip("/"))
            config = client.config.model_copy(update={"base_url": root})
            response = await Client(config).get("/props", timeout_s=PROPS_S)
            props = orjson.loads(response.body) if response.status == 200 else {}
            fields |= {name: props[name] for name in PROPS if isinstance(props, dict) and name in props}
    return fields


def served(body: bytes) -> Served:
    """Return the model and the fingerprint that a response names, without any other look at it."""
    with suppress(ValueError, AttributeError, RecursionError):
        fields = parse(body)
        model, fingerprint = (fields.get(name) for name in ("model", "system_fingerprint"))
        return (model if isinstance(model, str) else None, fingerprint if isinstance(fingerprint, str) else None)
    return None, None


class Origins:
    """The origins of one server's answers to a run: those seen now, and by earlier attempts, whose file is `folder`'s.

    since: when the run's first attempt began to ask. reused: how many answers other runs bought; times: when the first
    and the last of them came.
    """

    def __init__(self, base_url: str, folder: Path) -> None:
        self._base_url, self._path = base_url, folder / NAME
        self.described: dict[str, Any] = {}
        self._origins: dict[Served, str] = {}
        self.reused, self.times = 0, list[float]()
        self.known, self.since = set[str](), time.time()
        with suppress(OSError, ValueError):
            lines = [orjson.loads(line) for line in self._path.read_bytes().splitlines()]
            own = [line for line in lines if line["base_url"] == base_url]
            self.known, self.since = {line["origin"] for line in own}, min([self.since, *(line["at"] for line in own)])

    def of(self, body: bytes) -> str:
        """Return the origin of a response as it came, in 16 hexadecimal digits."""
        named = served(body)
        if named not in self._origins:
            self._origins[named] = store.digest([self._base_url, self.described, *named])[:16]
        return self._origins[named]

    def see(self, origin: str) -> None:
        """Remember that the server answers so now, also for a resumed run."""
        if origin not in self.known:
            self.known.add(origin)
            store.make_folder(self._path.parent)
            line = {"base_url": self._base_url, "origin": origin, "at": self.since}
            store.append_lines(self._path, [orjson.dumps(line)])

    def count(self, at: float) -> None:
        """Count an answer that another run bought at a time in seconds since 1970."""
        self.reused += 1
        self.times = [min([at, *self.times]), max([at, *self.times])]

    def facts(self) -> dict[str, Any]:
        """Return for the manifest what the server tells, and how many answers were reused from when."""
        days = [f"{datetime.fromtimestamp(at).astimezone():%Y-%m-%d %H:%M}" for at in self.times]
        facts = {"server": self.described} if self.described else {}
        return {**facts, **({"reused": self.reused, "reused_from": days} if self.reused else {})}
