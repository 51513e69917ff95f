"""Trees that several episodes read: made once, kept while anyone uses them, and a few longer."""

import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from pathlib import Path

from stages.envs.folder_writes import remove
from stages.envs.repo import trees


@dataclass
class _Shared:
    folder: Path
    users: int = 0
    made: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)


class SharedTrees:
    """Folders by key. Of those that nobody uses the `idle` that were used last stay; the others are deleted."""

    def __init__(self, idle: int) -> None:
        self._idle = idle
        self._lock = threading.Lock()
        self._trees: dict[Hashable, _Shared] = {}

    def take(self, key: Hashable, make: Callable[[Path], None]) -> Path:
        """The folder of a key, filled by `make` where there is none; `give_back` has to follow.

        What `make` raises passes through, and nothing is kept then.
        """
        with self._lock:
            shared = self._trees.pop(key, None) or _Shared(trees.make())
            self._trees[key] = shared  # the last in order is the last used
            shared.users += 1
        try:
            with shared.lock:
                if not shared.made:
                    make(shared.folder)
                    shared.made = True
        except BaseException:
            self.give_back(key)
            raise
        return shared.folder

    def give_back(self, key: Hashable) -> None:
        """Say that one user of a key's folder is done with it."""
        with self._lock:
            self._trees[key].users -= 1
            unused = [name for name, shared in self._trees.items() if shared.users == 0]
            unmade = [name for name in unused if not self._trees[name].made]
            gone = {*unmade, *unused[: max(0, len(unused) - self._idle)]}
            folders = [self._trees.pop(name).folder for name in gone]
        for folder in folders:
            remove(folder)

    def close(self) -> None:
        """Delete everything, at the end of the process."""
        with self._lock:
            folders = [shared.folder for shared in self._trees.values()]
            self._trees.clear()
        for folder in folders:
            remove(folder)
