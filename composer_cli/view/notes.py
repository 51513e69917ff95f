"""Notes and tags of rollouts, in files beside the runs: `notes/STAGE/FOLDER/DIGEST.json` below the artifacts folder.

A finished run is sealed and never changes, so that nothing is written into its folder. A note is a file of its own,
which appears complete or not at all, and is saved only over the text that its writer has seen.
"""

import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import orjson

from composer_stages.errors import UsageError
from composer_stages.runs import store

FOLDER = "notes"
MOST_CHARACTERS, MOST_TAGS, LONGEST_TAG = 10_000, 20, 40
SAVING = threading.Lock()
"""Held from reading the present note to writing the next: pages are answered in several threads."""
SEPARATORS = re.compile(r"[\s,]+")


class NoteChanged(UsageError):
    """The note was saved by another page since it was read."""


@dataclass(frozen=True)
class Note:
    """Notes and tags that people gave to one rollout."""

    text: str = ""
    tags: tuple[str, ...] = ()

    def digest(self) -> str:
        """Return the digest by which a form names the note that it showed."""
        return store.digest([self.text, list(self.tags)])

    @classmethod
    def of_form(cls, text: str, tags: str) -> "Note":
        """Return the note of a form's fields, tags separated by spaces or commas; `UsageError` names what is too much.

        Browsers send line ends as CR LF.
        """
        unique_tags = list(dict.fromkeys(filter(None, SEPARATORS.split(tags))))
        text = text.replace("\r\n", "\n").strip()
        if len(text) > MOST_CHARACTERS:
            raise UsageError("cli.note-too-long", most=MOST_CHARACTERS, characters=len(text))
        if len(unique_tags) > MOST_TAGS:
            raise UsageError("cli.too-many-tags", most=MOST_TAGS, tags=len(unique_tags))
        if long := next((tag for tag in unique_tags if len(tag) > LONGEST_TAG), None):
            raise UsageError("cli.tag-too-long", most=LONGEST_TAG, beginning=long[:LONGEST_TAG], characters=len(long))
        return cls(text, tuple(unique_tags))


class Notes:
    """The notes on the rollouts of one run; `name`: the run's, `stage/folder`."""

    def __init__(self, root: Path, name: str) -> None:
        self._name, self._folder = name, root / FOLDER / name

    def all(self) -> dict[str, Note]:
        """Return every note by the id of its rollout. A file that is no note (edited by hand, torn) is left out."""
        by_rollout = {}
        for path in sorted(self._folder.glob("*.json")):
            content = _content(path)
            if content is not None:
                by_rollout[content[0]] = content[1]
        return by_rollout

    def of(self, rollout_ids: Sequence[str]) -> dict[str, Note]:
        """Return the notes on these rollouts."""
        contents = {rollout_id: _content(self._path(rollout_id)) for rollout_id in rollout_ids}
        return {rollout_id: content[1] for rollout_id, content in contents.items() if content is not None}

    def save(self, rollout_id: str, note: Note, seen: str) -> None:
        """Write the note on a rollout, or remove it where nothing is left of it.

        seen: the digest of the note that the writer was shown; `NoteChanged` where there is another one by now.
        """
        path = self._path(rollout_id)
        with SAVING:
            self._save(path, rollout_id, note, seen)

    def _save(self, path: Path, rollout_id: str, note: Note, seen: str) -> None:
        if path.exists() and _content(path) is None:
            raise UsageError("cli.unreadable-note", path=path)
        present = self.of([rollout_id]).get(rollout_id, Note())
        if present == note:
            return
        if present.digest() != seen:
            raise NoteChanged("cli.note-changed", rollout_id=rollout_id, text=note.text, tags=note.tags)
        if note == Note():
            path.unlink(missing_ok=True)
            return
        content = {"run": self._name, "rollout_id": rollout_id, "text": note.text, "tags": list(note.tags)}
        store.write_json(path, content)

    def _path(self, rollout_id: str) -> Path:
        # A digest, because an id may hold any characters and be of any length.
        return self._folder / f"{store.digest(rollout_id)[:40]}.json"


def _content(path: Path) -> tuple[str, Note] | None:
    """Return the rollout and the note of a file; None where there is none, or nothing that is a note."""
    try:
        fields = orjson.loads(store.read_bytes(path) or b"")
        return str(fields["rollout_id"]), Note(str(fields["text"]), tuple(map(str, fields["tags"])))
    except (OSError, ValueError, LookupError, TypeError):
        return None
