"""A small package with tests, written for ours: functions that call each other, a class, all kinds of assertion."""

import textwrap
from collections.abc import Mapping
from pathlib import Path

SHELF = {
    "PKG-INFO": "Metadata-Version: 2.1\nName: shelf\nVersion: 1.5\n",
    "shelf/__init__.py": """\
        from importlib.metadata import version

        from shelf.books import Shelf, spine_label
        from shelf.words import initials, shorten, titled

        __version__ = version("shelf")
        """,
    "shelf/words.py": '''\
        """Words on spines."""


        def titled(text):
            """Every word with a capital, but for small ones inside."""
            small_words = ("of", "and", "the")
            words_in_order = text.lower().split()
            capitals = [word.capitalize() for word in words_in_order]
            return " ".join(c if i == 0 or c.lower() not in small_words else c.lower() for i, c in enumerate(capitals))


        def initials(author):
            """The first letters, each with a dot."""
            letters_of_names = [name[0].upper() for name in author.split() if name]
            if not letters_of_names:
                raise ValueError("an author has at least one name")
            return ".".join(letters_of_names) + "."


        def shorten(text, width=12):
            """At most `width` characters, the last of them an ellipsis if something is missing."""
            # a comment inside
            longest_allowed = max(width, 1)
            if len(text) <= longest_allowed:
                return text
            return text[: longest_allowed - 1] + "\\u2026"
        ''',
    "shelf/books.py": '''\
        """Books on shelves."""

        from shelf.words import initials, shorten, titled


        def spine_label(title, author):
            """What stands on the spine."""
            title_on_spine = shorten(titled(title))
            author_on_spine = initials(author)
            return f"{title_on_spine} ({author_on_spine})"


        class Shelf:
            """Books in order."""

            def __init__(self, capacity=3):
                self.capacity_of_shelf = capacity
                self.books_on_shelf = []

            def add(self, title):
                """Put a book on the shelf, if there is room."""
                if len(self.books_on_shelf) >= self.capacity_of_shelf:
                    raise OverflowError("the shelf is full")
                self.books_on_shelf.append(titled(title))
                self.books_on_shelf.sort()

            def __len__(self):
                return len(self.books_on_shelf)
        ''',
    "tests/test_words.py": """\
        import pytest

        from shelf import initials, shorten, titled


        @pytest.mark.parametrize(("text", "want"), [("war and peace", "War and Peace"), ("the trial", "The Trial")])
        def test_titled(text, want):
            assert titled(text) == want


        def test_initials():
            assert initials("leo tolstoy") == "L.T."


        def test_no_author():
            with pytest.raises(ValueError):
                initials("")


        def test_shorten():
            assert len(shorten("a very long title")) == 12
            assert shorten("short") == "short"
        """,
    "tests/test_books.py": """\
        import unittest

        import shelf


        class TestShelf(unittest.TestCase):
            def test_order(self):
                one = shelf.Shelf()
                one.add("the trial")
                one.add("emma")
                self.assertEqual(one.books_on_shelf, ["Emma", "The Trial"])

            def test_full(self):
                one = shelf.Shelf(1)
                one.add("emma")
                self.assertRaises(OverflowError, one.add, "ulysses")
                self.assertEqual(len(one), 1)

            def test_label(self):
                self.assertEqual(shelf.spine_label("emma", "jane austen"), "Emma (J.A.)")


        def test_version():
            assert shelf.__version__ == "1.5"
        """,
}


def write(root: Path, files: Mapping[str, str]) -> Path:
    """Files below a folder; scripts are executable."""
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(textwrap.dedent(text))
        (root / path).chmod(0o755 if text.startswith("#!") else 0o644)
    return root
