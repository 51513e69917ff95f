"""The program of an answer, in the forms in which models write one."""

import pytest

from composer_stages.envs.programs import find_error, find_program

RIGHT = "def f(x):\n    return x\n"
WRONG = "def f(x):\n    return 0\n"


def fenced(code: str, info: str = "python", mark: str = "```") -> str:
    return f"{mark}{info}\n{code}{mark}\n"


USES = "def f(x):\n    return helper(x)\n"
HELPER = "def helper(x):\n    return x\n"
ANSWERS = {
    "a block": fenced(RIGHT),
    **{f"language {info or 'none'}": fenced(RIGHT, info) for info in ("python3", "py", "", "{python}", "{.python}")},
    **{
        f"info {info}": fenced(RIGHT, info) for info in ("Python", 'python title="a.py"', "python {linenos=1}", " py3 ")
    },
    **{f"mark {mark}": fenced(RIGHT, mark=mark) for mark in ("~~~", "````", "~~~~~")},
    "a fence behind the last line": "```python\ndef f(x): return x```",
    "prompts": fenced(">>> def f(x):\n...     return x\n>>> f(1)\n1\n", "pycon"),
    "CRLF": fenced(RIGHT).replace("\n", "\r\n"),
    "no end": fenced(RIGHT).removesuffix("```\n"),
    "in a list": "1. Here:\n   ```python\n   def f(x):\n       return x\n   ```\n2. Done.",
    "in a bullet": "- Answer:\n\n  ```python\n  def f(x):\n      return x\n  ```",
    "in a quotation": "> ```python\n> def f(x):\n>     return x\n> ```",
    "title before": f"### Solution\n**answer.py**\n{fenced(RIGHT)}\nExplanation.",
    "answer tags": f"<answer>\n{fenced(RIGHT)}</answer>",
    "answer tags without fence": f"<answer>\n{RIGHT}</answer>",
    "answer tags in a line": f"<answer>{RIGHT}</answer>",
    "draft before": f"{fenced(WRONG)}That is wrong.\n{fenced(RIGHT)}",
    "draft in a thought": f"<think>\n{fenced(WRONG)}</think>\n{fenced(RIGHT)}",
    "draft behind a thought mark": f"<think>\n{fenced(RIGHT)}No.\n</think>\n{fenced(RIGHT)}",
    "a demonstration behind": f"{fenced(RIGHT)}Use it:\n{fenced('print(f(1))' + chr(10))}",
    "output behind": f"{fenced(RIGHT)}Output:\n{fenced('1' + chr(10), 'text')}",
    "a shell before": f"{fenced('pip install numpy' + chr(10), 'bash')}{fenced(RIGHT)}",
    "text alone": RIGHT,
    "prose around": f"Here is the function:\n\n{RIGHT}\nIt returns its argument.",
    "prose right behind": f"Sure! I define it so.\n{RIGHT}\nDone: that is f(x)!",
    "indented": "The function:\n\n    def f(x):\n        return x\n\nDone.",
    "helper before": f"{fenced(HELPER)}and\n{fenced(USES)}",
    "helper behind": f"{fenced(USES)}with\n{fenced(HELPER)}",
    "imports before": fenced("import math\n") + fenced("def f(x):\n    return math.floor(x)\n"),
    "a chain": fenced("from math import floor\n") + fenced(HELPER.replace("x\n", "floor(x)\n")) + fenced(USES),
    "a class and a name": fenced("class S:\n    def f(self, x):\n        return x\n") + fenced("f = S().f\n"),
    "under if": fenced(
        "import sys\nif sys.version_info > (3,):\n    def f(x):\n        return x\nelse:\n    f = None\n"
    ),
    "under try": fenced("try:\n    import no_such_module\nexcept ImportError:\n    def f(x):\n        return x\n"),
    "another name": fenced("def g(x):\n    return x\n\n\nf = g\n"),
    "an import": fenced("from copy import copy as f\n"),
    "an import by name": fenced("def g(x):\n    return x\nfrom copy import copy\nf: object = copy\n"),
    "a pair": fenced("f, g = (lambda x: x), None\n"),
    "fence in a docstring": fenced('def f(x):\n    """Say.\n\n    ```\n    f(1)\n    ```\n    """\n    return x\n'),
    "fence in a text at the margin": fenced('def f(x):\n  """\n```\nf(1)\n```\n  """\n  return x\n'),
    "blanks before a fence": "   ```python\n   def f(x):\n       return x\n   ```",
    "main": fenced(RIGHT + "\n\nif __name__ == '__main__':\n    print(f(input()))\n"),
    "decorated": fenced("import functools\n\n\n@functools.cache\ndef f(x):\n    return x\n"),
    "several drafts in prose": f"First:\n\n{WRONG}\nNo. Then:\n\n{RIGHT}\nDone.",
}


@pytest.mark.parametrize("name", ANSWERS)
def test_the_program_is_found_and_works(name: str) -> None:
    code = find_program(ANSWERS[name], "f")
    names: dict = {"__name__": "answer"}
    assert code is not None
    exec(code, names)  # of this test's own texts
    assert names["f"](3) == 3


WITHOUT = {
    "a call": (fenced("print(f(1))\n"), ""),
    "prose": ("The function f is easy.", ""),
    "another function": (fenced(HELPER), ""),
    "inside a function": (fenced("def g():\n    def f(x): pass\n"), ""),
    "in a thought": (f"<think>\n{fenced(RIGHT)}</think>\nI cannot.", ""),
    "main alone": (fenced("if __name__ == '__main__':\n    f = len\n"), ""),
    "declared": (fenced("f: object\n"), ""),
    "no Python": (fenced("def f(x:\n    return x\n"), "line 1: "),
    "cut": (fenced("def f(x):\n    return (x +\n"), "line 2: "),
}


@pytest.mark.parametrize("name", WITHOUT)
def test_an_answer_without_a_program_is_told_why(name: str) -> None:
    text, reason = WITHOUT[name]
    assert find_program(text, "f") is None
    assert find_error(text, "f").startswith(reason) and bool(find_error(text, "f")) is bool(reason)
