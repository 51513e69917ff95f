"""The option of `./dev parity --against CLONE`."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --against: upstream's own functions are compared with the recorded numbers."""
    parser.addoption(
        "--against", metavar="CLONE", help="upstream's own functions: FOLDER, FOLDER@COMMIT or OWNER/NAME@COMMIT"
    )
