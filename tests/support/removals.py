"""Removals of features, by the names of what is removed."""

from composer_stages.envs.feature_deletion.definitions import definitions
from composer_stages.envs.feature_deletion.selection import Kind, Removal
from composer_stages.envs.feature_deletion.task_generator import TaskGenerator


def removal(generator: TaskGenerator, *names: str, kind: Kind = "function") -> Removal:
    """The removal of definitions by their names, in their order."""
    found = {d.qualname: d for path, text in generator.texts.items() for d in definitions(path, text)}
    return Removal(kind, "easy", "train", tuple(found[name] for name in names))
