"""A page of HTML, taken apart."""

from html.parser import HTMLParser


class Elements(HTMLParser):
    """The tags of a page with their attributes, and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags, self.text = list[tuple[str, list[tuple[str, str | None]]]](), ""
        self.feed(text)

    @property
    def attributes(self) -> list[tuple[str, str | None]]:
        """Those of all tags."""
        return [one for _, attributes in self.tags for one in attributes]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Keep a tag."""
        self.tags.append((tag, attrs))

    def handle_data(self, data: str) -> None:
        """Keep a text."""
        self.text += data
