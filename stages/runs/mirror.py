"""A run that lies in a bucket while it goes on: written into a folder here, and what is durable there sent after it.

Every few seconds what changed is sent: units, then everything else, then the ledger, then the manifest. So what lies in
the bucket is a run folder as a kill would leave it, at most that much older, and `--resume` on another machine goes on
from it. Whoever begins last owns the run: a machine that comes back to life finds that and stops.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

from stages.errors import ComposerError, InfrastructureError, UsageError
from stages.runs import remote, store
from stages.runs.artifact import Out
from stages.runs.bucket import Bucket, Desk
from stages.runs.hub_bucket import HubBucket
from stages.runs.ledger import NAME as LEDGER
from stages.runs.remote import MANIFEST

EVERY_S = 5.0
"""Between two looks at what changed: so much work a machine that is lost takes with it."""
OWNER = "owner.json"
PASSING = "scratch/"
"""What lies here goes on only where it was begun."""
Stamp = tuple[int, int]
"""When a file was last written, in ns, and its size."""
NEVER: Stamp = (0, -1)


class Mirror:
    """The place of one run in a bucket, and the folder below `cache` in which it is written."""

    def __init__(self, url: str, stage: str, cache: Path, every_s: float = EVERY_S) -> None:
        self.url = url.rstrip("/")
        self.folder = remote.place(self.url, stage, cache)
        self._bucket = _desk(self.url)
        self._owner, self._sent = uuid4().hex, dict[str, Stamp]()
        self._over, self._every_s = threading.Event(), every_s

    def bring(self) -> None:
        """Have here what is there, unless this machine was the last to write it: then the folder is newer."""
        owner = self._bucket.read(OWNER)
        if owner is not None and owner == store.read_bytes(self.folder / OWNER):
            return
        there = self._bucket.read(MANIFEST)
        if there is None or (owner is None and there == store.read_bytes(self.folder / MANIFEST)):
            return
        remote.bring(self._bucket, self.folder, there, but=[OWNER])

    @contextmanager
    def following(self, out: Out, *, units: bool) -> Iterator[None]:
        """Send what the block writes, `UsageError` once another process took the run.

        units: whether the stage goes on from its units alone; then they are sent while the block lasts and however it
        ends. Else the run is sent once it is complete.
        """
        self._bucket.write(OWNER, self._owner.encode())
        store.write_sealed(self.folder / OWNER, self._owner.encode())
        self._sent = {key: NEVER for key in self._bucket.keys("") if key != OWNER}  # to be sent anew, or deleted
        sender = threading.Thread(target=self._send_now_and_then, args=[out], name="mirror")
        if units:
            sender.start()
        try:
            yield
        except BaseException as error:
            if units:
                try:
                    self._end(sender, out)
                except ComposerError as other:
                    error.add_note(str(other))
            raise
        self._end(sender, out)

    def _end(self, sender: threading.Thread, out: Out) -> None:
        self._over.set()
        if sender.is_alive():
            sender.join()
        if not self._send():
            raise UsageError(
                f"{self.url} was taken over by another process, so this one stopped. "
                "Leave the run to that one, or end it and --resume here."
            )
        over = out.manifest.status == "complete" or not self.folder.exists()
        if over and self._owns():  # sending takes its time: another process may have begun meanwhile
            self._bucket.delete([OWNER])

    def _owns(self) -> bool:
        return self._bucket.read(OWNER) == self._owner.encode()

    def _send_now_and_then(self, out: Out) -> None:
        while not self._over.wait(self._every_s):
            with suppress(InfrastructureError):  # tried again; at the end it is raised
                if not self._send():
                    out.stop.set()
                    return

    def _send(self) -> bool:
        """Bring the bucket up to what is here now; False once another process has begun to write there."""
        if not self._owns():
            return False
        here = dict(sorted(self._files().items(), key=lambda item: (_rank(item[0]), item[1])))
        for name, stamp in here.items():
            if self._sent.get(name) != stamp:
                with suppress(FileNotFoundError):  # sealed or deleted meanwhile
                    self._bucket.send(self.folder / name, name)
                    self._sent[name] = stamp
        gone = sorted(self._sent.keys() - here.keys())
        self._bucket.delete(gone)
        for name in gone:
            del self._sent[name]
        return True

    def _files(self) -> dict[str, Stamp]:
        """What is to lie in the bucket."""
        found: dict[str, Stamp] = {}
        for path in self.folder.rglob("*"):
            name = path.relative_to(self.folder).as_posix()
            if name == OWNER or name.startswith(PASSING) or "/." in f"/{name}":
                continue
            with suppress(FileNotFoundError):
                if path.is_file() and not path.is_symlink():
                    found[name] = path.stat().st_mtime_ns, path.stat().st_size
        return found


def _desk(url: str) -> Desk:
    place = remote.open_shelf(url)
    if not isinstance(place, Bucket | HubBucket):
        raise UsageError(
            f"{url} takes finished runs only, since every write to a dataset is a commit. Give --out "
            "hf://buckets/OWNER/NAME/RUN, or `composer publish RUN` there once it is finished."
        )
    return place


def _rank(name: str) -> int:
    """Units first, so that nothing there knows of a unit that is not; a ledger may know more than they, never less."""
    if name in (LEDGER, MANIFEST):
        return 2 + (LEDGER, MANIFEST).index(name)
    return 0 if name.startswith("steps/") else 1
