"""The programs that run in the sandbox. None of them holds an expected value.

An answer may rely on what the recorded graders imported and defined before it. A process in the sandbox starts in 4 ms,
those imports take 16 ms: only names that occur in a program are imported.
"""

import importlib
import re
from functools import cache

from stages.envs.leetcode_rh.answers import TestFunction

MODULES = ("collections", "datetime", "functools", "math", "random", "string")
STAR_MODULES = ("typing", "functools", "collections", "itertools", "heapq", "bisect", "string", "operator", "math")
"""All that these export is there by name; of equal names the last one counts."""
NODES = '''
inf = float("inf")


class ListNode:
    def __init__(self, val=0, next=None):
        self.val, self.next = val, next


class TreeNode:
    def __init__(self, val=0, left=None, right=None):
        self.val, self.left, self.right = val, left, right


def list_node(values):
    first = None
    for value in reversed(values):
        first = ListNode(value, first)
    return first


def tree_node(values):
    """Level by level; None where there is no node."""
    nodes = [None if value is None else TreeNode(value) for value in values]
    below = iter(nodes[1:])
    for node in nodes:
        if node is not None:
            node.left, node.right = next(below, None), next(below, None)
    return nodes[0] if nodes else None


def is_same_list(one, other):
    while one and other and one.val == other.val:
        one, other = one.next, other.next
    return not one and not other


def is_same_tree(one, other):
    if not one or not other:
        return not one and not other
    return one.val == other.val and is_same_tree(one.left, other.left) and is_same_tree(one.right, other.right)
'''
STUB = """
class Solution:
    def {method}(self, *args, **kwargs):
        return 0
"""
RETURNED = "returned"
RETURNS = '''
def returned(kind, positional, named):
    """What the solution returns, a list or tree node as a list of its values."""
    def made(value):
        return globals()[value[0]](value[1]) if value[0] != "plain" else value[1]

    def values(node):
        while node:
            yield node.val
            node = node.next

    def levels(node):
        found = [node]
        for node in found:
            if node:
                found += [node.left, node.right]
        while found and not found[-1]:
            found.pop()
        return [node.val if node else None for node in found]

    result = Solution().{method}(*map(made, positional), **{{name: made(value) for name, value in named.items()}})
    return result if kind == "plain" else list(values(result)) if kind == "list_node" else levels(result)
'''
PASSED = "passed"
PASSES = '''
def passed():
    """Do the tests end well, as a program that only calls them would?"""
    try:
        {call}
    except SystemExit as end:
        return end.code is None or end.code == 0
    return True
'''


def real_tests(code: str, method: str) -> str:
    """A program whose function `returned` calls the answer's solution."""
    return _program(code, RETURNS.format(method=method))


def own_tests(code: str, tests: TestFunction) -> str:
    """A program whose function `passed` runs the answer's tests on its own solution."""
    return _program(code, PASSES.format(call=tests.call))


def tests_on(solution: str, tests: TestFunction) -> str:
    """A program whose function `passed` runs the test function alone, cut out of the answer, on another solution."""
    method = f"Solution.{tests.name} = {tests.name}" if tests.is_method else ""
    return _program(solution, tests.source, method, PASSES.format(call=tests.call))


def stub(method: str) -> str:
    """A solution that answers 0 whatever it is asked."""
    return STUB.format(method=method)


def _program(*parts: str) -> str:
    code = "\n".join(parts)
    words = set(re.findall(r"\w+", code))
    modules = [f"import {name}" for name in MODULES if name in words]
    names = [f"from {module} import {name}" for name, module in _exported().items() if name in words]
    return "\n".join([*modules, *names, NODES, code])


@cache
def _exported() -> dict[str, str]:
    """Every name that star imports give, with the module it comes from."""
    exported: dict[str, str] = {}
    for name in STAR_MODULES:
        module = importlib.import_module(name)
        public = getattr(module, "__all__", None) or [word for word in vars(module) if not word.startswith("_")]
        exported |= dict.fromkeys(public, name)
    return exported
