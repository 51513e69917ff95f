"""Encode values in the process that made them, and decode them in another, as the types that a caller sees.

JSON lines in which all but None, booleans and small integers are tagged lists. It is imported in sandboxes, too, and so
imports no more than it must; expected values never come there through it.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from typing import Any

    Decoders = Mapping[str, Callable[[list[Any], Callable[[Any], Any]], Any]]

DEEPEST = 100
"""Levels of a decoded value: deeper ones would exhaust the stack of whoever compares, prints or hashes them."""
MANY_KEYS = 1000
MOST_ITEMS = 100_000
"""Items that are taken from an iterator, which may have no end."""
SMALL = 2**63
VIEWS = {type({}.keys()): "keys", type({}.values()): "values", type({}.items()): "items"}
FIELDS: Mapping[str, Callable[[Any], list[Any]]] = {
    "builtins.complex": lambda value: [value.real, value.imag],
    "builtins.range": lambda value: [value.start, value.stop, value.step],
    "collections.deque": lambda value: [list(value), value.maxlen],
    "decimal.Decimal": lambda value: [str(value)],
    "fractions.Fraction": lambda value: [value.numerator, value.denominator],
    "datetime.date": lambda value: [value.year, value.month, value.day],
    "datetime.timedelta": lambda value: [value.days, value.seconds, value.microseconds],
    "pathlib.PosixPath": lambda value: [str(value)],
}
"""Type of the standard library -> what its values are made from."""
SUBCLASSES = {f"collections.{name}" for name in ("Counter", "OrderedDict", "defaultdict")}


class Foreign:
    """An object of any other type: true, and equal to nothing. It can be iterated once if the object can."""

    def __init__(self, type_name: str, items: list[Any] | None = None) -> None:
        self.type, self.items = type_name, items
        if items is not None:
            self._remaining = iter(items)

    def __iter__(self) -> Iterator[Any]:
        if self.items is None:
            raise TypeError(f"'{self.type}' object is not iterable")
        return self

    def __next__(self) -> Any:
        return next(self._remaining)

    def __repr__(self) -> str:
        return f"<{self.type}>" if self.items is None else f"<{self.type} of {self.items!r}>"


def encoded(value: Any) -> str:
    """Return a value as JSON; of a value of an unknown type the type's name."""
    # By identity of the type, and by the base type's own methods: a subclass may lie in its __repr__ or __eq__.
    kind = type(value)
    if value is None or kind is bool:
        return {None: "null", True: "true", False: "false"}[value]
    if kind is int:
        return int.__repr__(value) if -SMALL <= value < SMALL else f'["i","{int.__format__(value, "x")}"]'
    if kind is float:
        return '["f","' + float.__repr__(value) + '"]'
    if kind is str:
        # Hexadecimal, so that no character of the candidate's can end the line or the string.
        return '["s","' + value.encode("utf-8", "surrogatepass").hex() + '"]'
    if kind in CONTAINERS:
        return ",".join([f'["{CONTAINERS[kind]}"', *map(encoded, value)]) + "]"
    if kind is dict:
        return _encoded_dict(value)
    if kind is bytes or kind is bytearray:
        return '["b","' + value.hex() + '"]'
    if kind in VIEWS:
        return f'["v","{VIEWS[kind]}",{encoded(list(value))}]'
    if kind is Foreign:
        return _encoded_foreign(value.type, value.items)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if name in FIELDS and _is_known(name, kind):
        return f'["x",{encoded(name)},{encoded(FIELDS[name](value))}]'
    for base in BASES:
        if isinstance(value, base):
            fields = getattr(kind, "_fields", None) if base is tuple else None
            type_name = name if name in SUBCLASSES and _is_known(name, kind) else kind.__name__
            return f'["u",{encoded(type_name)},{_encoded_base(base, value)},{encoded(fields)}]'
    if kind.__module__ == "numpy" and getattr(value, "shape", None) == ():
        return encoded(value.item())
    is_iterator = hasattr(kind, "__next__") and kind.__module__ != "_io"
    return _encoded_foreign(kind.__name__, list(_first(value)) if is_iterator else None)


CONTAINERS: Mapping[type, str] = {list: "l", tuple: "t", set: "e", frozenset: "z"}
BASES: tuple[type, ...] = (dict, list, tuple, set, frozenset, int, float, str, bytes, complex)


def _encoded_dict(value: dict[Any, Any]) -> str:
    return ",".join(['["d"', *(f"[{encoded(key)},{encoded(item)}]" for key, item in dict.items(value))]) + "]"


def _encoded_base(base: Any, value: Any) -> str:
    """Encode a value of a subclass as one of its built-in base."""
    if base is dict:
        return _encoded_dict(value)
    if base is str:
        return encoded(str.__str__(value))
    if base is int or base is float or base is complex:
        return encoded(base.__pos__(value))
    return encoded(base(base.__iter__(value)))


def _encoded_foreign(name: str, items: list[Any] | None) -> str:
    return f'["o",{encoded(name)}]' if items is None else f'["o",{encoded(name)},{encoded(items)}]'


def _is_known(name: str, kind: type) -> bool:
    """Return whether a type is that of the standard library, and not one that is only called so."""
    module, _, attribute = name.rpartition(".")
    return getattr(sys.modules.get(module), attribute, None) is kind


def _first(iterator: Any) -> Iterator[Any]:
    for number, item in enumerate(iterator, 1):
        yield item
        if number == MOST_ITEMS:
            break


def class_names(error: type[BaseException]) -> list[str]:
    """Return the names of an exception's class and its bases: of built-in ones alone, of others behind their module."""
    import builtins

    return [
        base.__name__
        if getattr(builtins, base.__name__, None) is base
        else f"{getattr(base, '__module__', '')}.{base.__qualname__}"
        for base in type.mro(error)
    ]


def decoded(node: Any, decoders: Decoders | None = None, depth: int = 0) -> Any:
    """Return the value of a tagged tree, read by the decoder of each tag; any Exception of a tree of another form."""
    decoders = DECODERS if decoders is None else decoders
    if depth > DEEPEST:
        raise ValueError(f"more than {DEEPEST} levels")
    if not isinstance(node, list):
        if node is None or type(node) in (bool, int):  # json.loads would also give float and str, which have tags
            return node
        raise ValueError(f"{node!r} has no tag")
    return decoders[node[0]](node[1:], lambda part: decoded(part, decoders, depth + 1))


def refuse_chosen_hashes(keys: Sequence[Any]) -> None:
    """Raise ValueError where many keys have one hash: 4 MB of such integers would stop the host for minutes."""
    if len(keys) > MANY_KEYS and len(set(map(hash, keys))) < len(keys) // 2:
        raise ValueError("keys that were chosen to have one hash")


def _members(nodes: list[Any], read: Callable[[Any], Any]) -> list[Any]:
    members = [read(node) for node in nodes]
    refuse_chosen_hashes(members)
    return members


def _decoded_dict(nodes: list[Any], read: Callable[[Any], Any]) -> dict[Any, Any]:
    pairs = [(read(key), read(value)) for key, value in nodes]
    refuse_chosen_hashes([key for key, _ in pairs])
    return dict(pairs)


def _made(nodes: list[Any], read: Callable[[Any], Any]) -> Any:
    """Make a value of the standard library, of parts whose types cannot stand for more than was sent."""
    name, fields = read(nodes[0]), read(nodes[1])
    part_types = PARTS.get(name, (int,))
    if name not in FIELDS or any(type(part) not in part_types for part in fields):
        raise ValueError(f"{name!r} is not made of these")
    module, _, attribute = name.rpartition(".")
    value = getattr(__import__(module), attribute)(*fields)
    if name == "decimal.Decimal" and value.is_finite() and abs(value.adjusted()) > LARGEST_EXPONENT:
        raise ValueError("an integer of it would fill the memory")
    return value


PARTS: Mapping[str, tuple[type, ...]] = {
    "builtins.complex": (float,),
    "collections.deque": (list, int, type(None)),
    "decimal.Decimal": (str,),
    "pathlib.PosixPath": (str,),
}
"""Types of the parts, where these are not integers."""
LARGEST_EXPONENT = 10_000


def _subclass(nodes: list[Any], read: Callable[[Any], Any]) -> Any:
    """Make a value of a subclass: of the standard library's, or a named tuple; of any other the value of its base."""
    name, value, fields = map(read, nodes)
    if fields is not None and type(value) is tuple:
        properties = {key: _item(position) for position, key in enumerate(fields)}
        return type(name, (tuple,), {"_fields": tuple(fields), **properties})(value)
    if name not in SUBCLASSES or type(value) is not dict:
        return value
    import collections

    if name == "collections.defaultdict":
        return collections.defaultdict(None, value)
    return getattr(collections, name.rpartition(".")[2])(value)


def _item(position: int) -> property:
    return property(lambda row: row[position])


def _view(nodes: list[Any], read: Callable[[Any], Any]) -> Any:
    name, items = nodes[0], read(nodes[1])
    if type(items) is not list:
        raise ValueError("a view of no list")
    if name == "values":
        return dict(enumerate(items)).values()
    if name == "keys":
        refuse_chosen_hashes(items)
        return dict.fromkeys(items).keys()
    refuse_chosen_hashes([key for key, _ in items])
    return dict(items).items()


DECODERS: dict[str, Callable[[list[Any], Callable[[Any], Any]], Any]] = {
    "i": lambda nodes, _: int(nodes[0], 16),
    "f": lambda nodes, _: float(bytes(nodes[0], "ascii")),  # only text: of an integer the float may overflow
    "s": lambda nodes, _: bytes.fromhex(nodes[0]).decode("utf-8", "surrogatepass"),
    "b": lambda nodes, _: bytes.fromhex(nodes[0]),
    "l": lambda nodes, read: [read(node) for node in nodes],
    "t": lambda nodes, read: tuple(read(node) for node in nodes),
    "e": lambda nodes, read: set(_members(nodes, read)),
    "z": lambda nodes, read: frozenset(_members(nodes, read)),
    "d": _decoded_dict,
    "v": _view,
    "x": _made,
    "u": _subclass,
    "o": lambda nodes, read: Foreign(str(read(nodes[0])), *map(read, nodes[1:2])),
}
"""Tag -> what reads the rest of a list with this tag, given what reads a part of it."""
