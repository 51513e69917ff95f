"""Which module tests mean by the name of a standard one: by what they take from it."""

import pytest

from composer_stages.envs.repo.shadowed_modules import is_shadowed


@pytest.mark.parametrize(
    ("module", "text", "own"),
    [
        ("queue", "from queue import Ring", True),
        ("queue", "from queue import Queue, Ring", True),
        ("queue", "from queue import Queue", False),
        ("queue", "import queue\nassert queue.Ring()", True),
        ("queue", "import queue as q\nassert q.Ring()", True),
        ("queue", "import queue\nassert queue.Queue()", False),
        ("queue", "def test():\n    from queue.ring import Ring", True),
        ("queue", "import queue.ring", True),
        ("queue", "from .queue import Ring", False),
        ("queue", "from app.queue import Ring", False),
        ("queue", "import app as queue\nqueue.Ring()", False),
        ("queue", "from queue import *", False),
        ("email", "from email.message import Message", False),
        ("email", "from email.welcome import render", True),
        ("this", "from this import Ring", False),
        ("winreg", "from winreg import Ring", False),
        ("pytest", "from pytest import Ring", False),
    ],
)
def test_a_name_that_the_standard_module_lacks_means_the_work_folder(module: str, text: str, own: bool) -> None:
    assert is_shadowed(module, [b"import os", b"def", text.encode()]) is own
