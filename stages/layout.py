"""Text for people: control characters spelled out, aligned tables, shortened texts, counted nouns, times, graphs."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from os.path import commonprefix
from unicodedata import combining, east_asian_width

LEFT, RIGHT = "left", "right"


STEERING = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # C0 but tab and newline, DEL, C1
    "\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069"  # direction of writing, separators of lines
    "\ud800-\udfff]"  # halves of characters, which no output can encode
)


def escape_control_characters(text: str) -> str:
    r"""Return the text with `\x1b` for an escape character, and so on; newlines and tabs stay.

    Escaped are the characters that steer a terminal or hide in a text.
    """

    def escape(match: re.Match[str]) -> str:
        code = ord(match[0])
        return "\\r" if code == 13 else f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"

    return STEERING.sub(escape, text)


def escape_line(text: str) -> str:
    r"""Return the escaped text on one line: newlines become `\n`."""
    return escape_control_characters(text).replace("\n", "\\n")


def width(text: str) -> int:
    """Return the columns that a text takes in a terminal, where wide characters take two and accents none."""
    if text.isascii():
        return len(text)
    return sum(0 if combining(character) else 2 if east_asian_width(character) in "FW" else 1 for character in text)


def aligned(rows: Iterable[Sequence[object]], head: Sequence[str] = (), sides: Sequence[str] | None = None) -> str:
    """Return a table as text, its columns two spaces apart, without trailing spaces.

    sides: LEFT or RIGHT for each column; without them, columns of numbers alone stand to the right.
    """
    cells = [list(row) for row in rows]
    if sides is None:
        columns = zip(*cells, strict=True) if cells else [("",)] * len(head)
        sides = [RIGHT if all(map(_is_number, column)) else LEFT for column in columns]
    # In one line: a cell with a line break, such as an id of another program, would begin a row of its own.
    texts = [[escape_line(str(cell)) for cell in row] for row in ([head] if head else []) + cells]
    widths = [max(map(width, column)) for column in zip(*texts, strict=True)]

    def padded(cell: str, side: str, columns: int) -> str:
        space = " " * (columns - width(cell))
        return f"{space}{cell}" if side == RIGHT else f"{cell}{space}"

    return "\n".join("  ".join(map(padded, row, sides, widths)).rstrip() for row in texts)


def rate_with_interval(rate: float, low: float, high: float) -> str:
    """Return a rate and its interval, which are shares, in per cent: `25.0 % [4.6, 69.9]`."""
    return f"{100 * rate:.1f} % [{100 * low:.1f}, {100 * high:.1f}]"


def markdown_table(rows: Iterable[Sequence[object]], head: Sequence[str]) -> str:
    """Return a table in Markdown; nothing in the cells is escaped."""
    cells = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, row))} |" for row in cells)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def shortened(text: str, most: int = 60) -> str:
    """Return a text of at most so many characters, whose end is three dots where some are left out."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def without_middle(text: str, most: int) -> str:
    """Return a text of at most so many characters, its middle left out where it is longer: names differ at the ends."""
    return text if len(text) <= most else f"{text[: most // 2]}…{text[len(text) - (most - most // 2 - 1) :]}"


LEAST_SHARED = 24
"""Characters from which the beginning that all texts share is left out."""


def without_shared_start(texts: Sequence[str]) -> list[str]:
    """Return texts without the words at their beginning that all share, where these are long; empty ones stay empty."""
    different = {*filter(None, texts)}
    alike = commonprefix([*different]) if len(different) > 1 else ""  # noqa: RUF071 - these are no paths
    shared = alike.rpartition(" ")[0] or re.sub(r"[^\W_]*$", "", alike)
    return [text and f"…{text[len(shared) :]}" for text in texts] if len(shared) >= LEAST_SHARED else list(texts)


_CJK = "\u2e80-\ud7ff\uf900-\ufaff\uff00-\uff60\U00020000-\U0003ffff"
WORD = re.compile(rf"(\s*)([{_CJK}]|(?:`[^`]+`|[^\s{_CJK}])+)")
"""The space before a word, and the word: a character of a script without spaces, or with them a `command`."""


def folded(text: str, most: int) -> str:
    """Return a text without lines wider than so many columns: their last words go on below.

    Those of a table are further in. A word that is wider itself, such as an address, stays whole, and so does a command
    between backticks, which is copied.
    """
    lines = list[str]()
    for line in text.split("\n"):
        if width(line) <= most:
            lines.append(line)
            continue
        further = " " * (len(line) - len(line.lstrip()) + (4 if "  " in line.strip() else 0))
        lines.append("")
        for space, word in WORD.findall(line):
            if lines[-1] and width(f"{lines[-1]}{space}{word}") > most:
                lines.append(f"{further}{word}")
            else:
                lines[-1] += f"{space}{word}"
    return "\n".join(lines)


def signed(share: float) -> str:
    """Return a difference of shares in points, with its sign: "+4.2", and "-0.02" where "-0.0" would hide it."""
    in_points = 100 * share
    # Smaller values are those of rounding alone.
    return f"{in_points:+.1g}" if 5e-4 <= abs(in_points) < 0.05 else f"{in_points:+z.1f}"


def p_value(p: float) -> str:
    """Return a p-value in words: "p = 0.012", "p < 0.001"."""
    return "p < 0.001" if p < 0.001 else f"p = {p:.3f}"


def duration(seconds: float) -> str:
    """Return wall time for people: 24 ms, 2.4 s, 8 s, 3 min 20 s, 2 h 5 min."""
    if 0 < seconds < 0.995:
        return f"{float(f'{1000 * seconds:.2g}'):g} ms"
    if seconds < 9.95:
        return f"{float(f'{seconds:.2g}'):g} s"
    rounded = round(seconds)
    if rounded < 60:
        return f"{rounded} s"
    if rounded < 3600:
        return f"{rounded // 60} min {rounded % 60} s"
    return f"{rounded // 3600} h {rounded % 3600 // 60} min"


def age(seconds: float) -> str:
    """Return roughly how long ago: 40 s, 12 min, 5 h, 3 d; 0 s for a future time, after a clock was set back."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{int(seconds // size)} {unit}"
    return f"{max(int(seconds), 0)} s"


@dataclass
class Sparkline:
    """The course of a number as a line of blocks; where they become too many, each stands for the mean of more values.

    The lowest block is the least of 0 and the values, the highest the greatest of 1 and the values.
    """

    most: int = 40
    points: list[float] = field(default_factory=list)
    _size: int = 1
    """The values of a point."""
    _part: list[float] = field(default_factory=list)
    """The values of the next point."""

    def add(self, value: float) -> None:
        """Add the next value."""
        self._part.append(value)
        if len(self._part) == self._size:
            self.points.append(sum(self._part) / self._size)
            self._part = []
        if len(self.points) == self.most:
            self.points = [sum(self.points[at : at + 2]) / 2 for at in range(0, self.most, 2)]
            self._size *= 2

    def __str__(self) -> str:
        low, high = min([0.0, *self.points]), max([1.0, *self.points])
        return "".join("▁▂▃▄▅▆▇█"[min(int(8 * (value - low) / (high - low)), 7)] for value in self.points)


def plural(noun: str) -> str:
    """Return the plural of a noun: "families", "operations"."""
    return f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}s"


def singular(nouns: str) -> str:
    """Return the singular of what a plan counts, of which the first word is a noun: "run of rollouts"."""
    first, space, suffix = nouns.partition(" ")
    noun = f"{first[:-3]}y" if first.endswith("ies") else first.removesuffix("s")
    return f"{noun}{space}{suffix}"


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, which is given in the singular."""
    return f"{number:,} {noun if number == 1 else plural(noun)}"
