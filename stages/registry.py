"""Tables of what ships with this project and of what installed packages add to it, by name.

A package adds an entry by an entry point of the table's group, in its pyproject.toml:

    [project.entry-points."composer.environments"]
    riddles = "composer_riddles:Riddles"

Nothing of a package is imported before its entry is read; what cannot be imported is a refusal where it is used.
"""

import warnings
from collections.abc import Callable, Iterator, MutableMapping
from functools import cached_property
from importlib.metadata import EntryPoint, entry_points
from typing import Generic, TypeVar

from composer_stages.errors import UsageError
from composer_stages.words import Sentence

EntryT = TypeVar("EntryT")


class Registry(MutableMapping[str, EntryT], Generic[EntryT]):
    """A table of entries by name, in the order in which they ship; those of installed packages follow.

    group: the group of entry points. shipped: the entries of this project. kind: what an entry has to be. entry: makes
    an entry of an entry point; by default its object is the entry, which is imported for that.
    """

    def __init__(
        self,
        group: str,
        shipped: dict[str, EntryT],
        entry: Callable[[EntryPoint], EntryT] = EntryPoint.load,
        kind: type = object,
    ) -> None:
        self.group, self._kind = group, kind
        self._entries, self._entry = dict(shipped), entry
        self._shipped = frozenset(shipped)

    @cached_property
    def _installed(self) -> dict[str, EntryPoint]:
        """The entry points of installed packages by name; none takes the name of a shipped entry."""
        points = dict[str, EntryPoint]()
        for point in sorted(entry_points(group=self.group), key=lambda point: (point.name, _package(point))):
            holder = points.get(point.name)
            if point.name in self._shipped or (holder and holder.value != point.value):
                package = _package(holder) if holder else "Composer"
                _warn(
                    Sentence("name-taken", package=_package(point), holder=package, group=self.group, name=point.name)
                )
            else:
                points[point.name] = point
        return points

    @cached_property
    def _usable(self) -> list[str]:
        """The names of installed entries that can be made; a warning names each other one."""
        usable = list[str]()
        for name in self._installed:
            try:
                self[name]
                usable.append(name)
            except UsageError as error:
                _warn(str(error))
        return usable

    def __getitem__(self, name: str) -> EntryT:
        if name not in self._entries:
            point = self._installed[name]
            try:
                entry = self._entry(point)
                if not isinstance(entry, self._kind):
                    raise TypeError(f"it is a {type(entry).__name__}, and no {self._kind.__name__}")  # noqa: TRY301
                self._entries[name] = entry
            except Exception as error:  # a package may raise anything
                raise UsageError(
                    "entry-not-imported",
                    group=self.group,
                    name=name,
                    package=_package(point),
                    target=point.value,
                    error=f"{type(error).__name__}: {error}",
                ) from error
        return self._entries[name]

    def __setitem__(self, name: str, entry: EntryT) -> None:
        self._entries[name] = entry

    def __delitem__(self, name: str) -> None:
        del self._entries[name]

    def __iter__(self) -> Iterator[str]:
        yield from [name for name in self._entries if name not in self._installed]
        yield from self._usable

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, name: object) -> bool:
        return name in self._entries or name in self._installed

    def added(self) -> list[str]:
        """Return the names of entries that are no part of this project."""
        return [name for name in self if name not in self._shipped]

    def ships(self, name: str) -> bool:
        """Return whether an entry of this name is part of this project."""
        return name in self._shipped


def _warn(text: str) -> None:
    warnings.warn(text, stacklevel=4)


def _package(point: EntryPoint) -> str:
    return point.dist.name if point.dist else point.value
