"""Environments that cannot be played, as the text of a module."""

ENVS = """
from stages.envs.base import Task
from support.environments import GuessEnv

class Broken(GuessEnv):
    def __init__(self):
        raise ZeroDivisionError("oh")

class NoTasks(GuessEnv):
    def tasks(self, split, count, seed):
        return {}["no such key"]

class WrongTasks(GuessEnv):
    def tasks(self, split, count, seed):
        return ["a", "b"]

class Twice(GuessEnv):
    def tasks(self, split, count, seed):
        return super().tasks(split, 1, seed) * 2

class NoJson(GuessEnv):
    def tasks(self, split, count, seed):
        return [Task("a", "e", split, "f", "p", {"x": object()})]
"""
"""Each has a fault of its own."""
