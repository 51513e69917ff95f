"""The registry of environments: names, and how to load one.

base.py - the protocols of an environment, and the values that it exchanges
boundary.py - validation of an environment's return values and errors; tool calls checked and executed
bash.py - the text protocol of a bash action, and the faulty turns of a shell rollout; tools.toml - the tools of a shell
folders.py - folders with arbitrary content of an agent: walk, read, copy, write, delete; temporary folders
config.py - the settings of a stage's environment: name, split, options, sandbox
answered.py - an environment of questions with one right answer each
programs.py - the Python program of an answer
task_checks.py - checks that a task passes its solution, and fails no solution and forged ones
task_table.py - tasks from the table of a run, and rows of a JSON lines file of the user; fields.toml
kata/ - small code-repair tasks, generated, with small models that act in them
skills/ - short tasks with exact answers for small language models, own ones and those of reasoning-gym
gsm8k/ - grade-school maths from JSON lines or the hub, a reward for the right number
code/ - one function for each problem of MBPP, HumanEval, EvalPlus or rows of the user; hidden assertions decide
leetcode_rh/ - LeetCode problems whose prompt gives a loophole away; problems and recorded rollouts by path
repo/ - what environments share whose tasks are repositories: trees, sessions, test outcomes, verdicts
swe/ - repositories in SWE-bench's shape: trees, outcomes of the hidden and of the visible tests
tasks/ - tasks of the user's own, a row each: a prompt, files, a test
harbor/ - task folders in Harbor's format, played in containers or in bubblewrap
feature_deletion/ - tasks made from any tested package by removing a feature of it
"""

import ast
import hashlib
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, Literal

from composer_stages.envs.base import Environment
from composer_stages.errors import ComposerError, UsageError
from composer_stages.runs import store
from composer_stages.terms import ENVIRONMENTS as ENVIRONMENTS, Registered as Registered, SamplingUnit, declared_unit

PUBLIC = "composer_post_training.environments"
"""The module from which users import what environments are made of, and the classes of those that ship."""
METHODS = ("tasks", "reset", "step", "grade", "close")
"""Methods of an `Environment`. Nothing else is called, since a settings file may name any importable object."""
Attachment = Literal["models", "hack_pairs", "hint", "system"]


def register(name: str, entry: Registered) -> None:
    """Register an environment under a name; raise UsageError if another environment has the name."""
    if ENVIRONMENTS.setdefault(name, entry) != entry:
        raise UsageError("envs.name-taken", name=name, environment=ENVIRONMENTS[name].environment)


def resolve_name(name: str, options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Split `NAME:WORD` into the registered name and the option that the word sets; return name and options.

    `reasoning-gym:letter_counting` is `reasoning-gym` with the option task. UsageError where the option is given, too.
    """
    registered, _, word = name.partition(":")
    entry = ENVIRONMENTS.get(registered)
    if entry is None or entry.argument is None or not word:
        return name, dict(options)
    if options.get(entry.argument, word) != word:
        raise UsageError("envs.option-given-twice", name=name, option_=entry.argument, given=options[entry.argument])
    return registered, {**options, entry.argument: word}


def load(name: str, options: Mapping[str, Any]) -> Environment:
    """Construct an environment, given by its registered name or as "package.module:Class", with `options`."""
    name, options = resolve_name(name, options)
    factory = _load_class(name)
    parameters = inspect.signature(factory).parameters
    if unknown := sorted(set(options) - set(parameters)):
        raise UsageError("envs.no-such-option", name=name, option_=unknown[0], options=[*parameters])
    named = [p for p in parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    if needed := [p.name for p in named if p.default is p.empty and p.name not in options]:
        raise UsageError("envs.option-needed", name=name, options=needed)
    if is_shipped(name):
        defaults = {option: parameters[option].default for option in options}
        options = {option: _checked(name, option, value, defaults[option]) for option, value in options.items()}
    return factory(**options)


def _checked(name: str, option: str, value: Any, default: Any) -> Any:
    """Return the value of an option in the type of its default; `UsageError` for a list or a number that is none."""
    kind, least = type(default), 2 if option == "max_chars" else -(2**63)  # a head and a tail
    if kind is tuple:
        value = (value,) if isinstance(value, str) else value  # one text is one element
        if not isinstance(value, list | tuple) or not all(isinstance(each, str) for each in value):
            raise UsageError("envs.option-no-list", name=name, option_=option, value=value)
    if kind in (int, float) and not (type(value) in (int, kind) and least <= value < 2**63):
        raise UsageError("envs.option-no-number", name=name, option_=option, value=value, whole=kind is int)
    return value


def is_task_file(name: str) -> bool:
    """Return whether a name is that of a file of rows, which the environment `tasks` plays."""
    return name.endswith((".jsonl", ".parquet"))


def constructor_options(name: str) -> dict[str, str]:
    """Return the options of an environment's constructor with their defaults as Python writes them, "" for none.

    Those of a shipped one are read from the source, since its import takes its time; `sandbox` is a setting of its own.
    """
    if not ENVIRONMENTS.ships(name):
        parameters = inspect.signature(_load_class(name)).parameters.values()
        named = [each for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
        return {each.name: "" if each.default is each.empty else repr(each.default) for each in named}
    module, _, class_name = ENVIRONMENTS[name].environment.partition(":")
    source = Path(__file__).parents[1].joinpath(*module.split(".")[1:]).with_suffix(".py").read_text("utf-8")
    classes = {node.name: node.body for node in ast.parse(source).body if isinstance(node, ast.ClassDef)}
    functions = (node for node in classes[class_name] if isinstance(node, ast.FunctionDef))
    declared = next(node.args for node in functions if node.name == "__init__")
    options = zip(declared.args[1:], declared.defaults, strict=True)  # all have one
    return {option.arg: ast.unparse(default) for option, default in options if option.arg != "sandbox"}


def has_option(name: str, option: str) -> bool:
    """Return whether the constructor of an environment has an option, such as `sandbox`."""
    return option in inspect.signature(_load_class(name)).parameters


def most_steps(name: str, options: Mapping[str, Any], max_steps: int) -> int:
    """Return the steps of a rollout at most: fewer than `max_steps` where a shipped environment takes fewer answers."""
    if is_shipped(name) and hasattr(_load_class(name), "answers"):
        with suppress(ComposerError):  # settings that it refuses are named when it is opened
            return min(max_steps, getattr(load(name, options), "answers", None) or max_steps)
    return max_steps


def has_solutions(name: str) -> bool:
    """Return whether an environment implements `base.HasSolutions`."""
    return callable(getattr(_load_class(name), "solution", None))


def is_same_environment(first: str, second: str) -> bool:
    """Return whether two names, registered or import paths, denote one environment."""
    return _import_path(first) == _import_path(second)


def _import_path(name: str) -> str:
    """Return the import path of an environment's class; a public name of a shipped class becomes its own module's.

    Nothing is imported.
    """
    entry = ENVIRONMENTS.get(name)
    path = entry.environment if entry else name
    module, _, word = path.partition(":")
    if module != PUBLIC:
        return path
    shipped = (entry.environment for entry in ENVIRONMENTS.values() if entry.environment.startswith(f"{__name__}."))
    return next((target for target in shipped if target.partition(":")[2] == word), path)


def load_attachment(name: str, attachment: Attachment) -> Any:
    """Import an attachment of a registered environment; raise UsageError where it has none of that kind."""
    entry = ENVIRONMENTS.get(name)
    target = entry and getattr(entry, attachment)
    if entry and not target and not ENVIRONMENTS.ships(name):
        declared = getattr(_load_class(name), attachment, None)
        if declared:
            return declared
    if not target:
        having = (
            ", ".join(sorted(registered for registered, parts in ENVIRONMENTS.items() if getattr(parts, attachment)))
            or "none"
        )
        raise UsageError("envs.no-attachment", name=name, attachment=attachment, having=having)
    return _import_attribute(name, target)


def sampling_unit(name: str) -> SamplingUnit:
    """Return the sampling unit that an environment's class declares; families, as a sample, by default."""
    return declared_unit(name, _load_class(name))


def text_actions(name: str) -> bool:
    """Return whether an environment takes any text as an action, and not only commands and tool calls."""
    return bool(getattr(_load_class(name), "text_actions", False))


def code_sha256(name: str) -> str | None:
    """Return the SHA-256 of a user's environment file; None for a shipped environment or one without a file."""
    # Composer's own environments are not digested: a refactoring of them must not make every run a new one. One whose
    # questions are code declares their file by `content`.
    path = foreign_file(name)
    return hashlib.sha256(path.read_bytes()).hexdigest() if path is not None else None


def content_sha256(name: str, options: Mapping[str, Any]) -> str | None:
    """Return a digest of the files named in an environment's options; None where there are none.

    A shipped environment may declare them by a static method `content`, which takes its options; else they are the
    options that name a file. Of a user's own nothing is called for a fingerprint.
    """
    content = getattr(_load_class(name), "content", None) if is_shipped(name) else None
    if content is not None:
        return content(**options)
    files = sorted(key for key, value in options.items() if isinstance(value, str) and os.path.isfile(value))
    return store.digest({key: store.known_sha256(Path(options[key])) for key in files}) if files else None


def is_shipped(name: str) -> bool:
    """Return whether a name or import path denotes an environment that ships with Composer."""
    return name in ENVIRONMENTS and _import_path(name).startswith(f"{__name__}.")


def lists_tasks(name: str) -> bool:
    """Return whether an environment draws thousands of tasks cheaply; False for one that does not ship."""
    return is_shipped(name) and not ENVIRONMENTS[name].makes_tasks


def foreign_file(name: str) -> Path | None:
    """Return the file of a user's environment; None for a shipped environment or one without a file.

    Nothing is imported: `importlib.util.find_spec` would execute the packages around the module.
    """
    module, colon, _ = _import_path(name).partition(":")
    if not colon or is_shipped(name):
        return None
    _refuse_standard_library(name, module)  # a dry run, which imports nothing, refuses it as the run would
    _search_current_folder()
    loaded = getattr(sys.modules.get(module), "__file__", None)
    if loaded is not None:
        return Path(loaded)
    places: Sequence[str] | None = None  # those of sys.path
    spec = None
    for end in [at for at, character in enumerate(f"{module}.") if character == "."]:
        try:
            spec = PathFinder.find_spec(module[:end], places)
        except (ImportError, ValueError):
            return None
        if spec is None:
            return None
        places = list(spec.submodule_search_locations or [])
    return Path(spec.origin) if spec and spec.origin and Path(spec.origin).is_file() else None


def _load_class(name: str) -> Callable[..., Environment]:
    entry = ENVIRONMENTS.get(name)
    registered, colon, word = name.partition(":")
    if entry is None and (not colon or registered in ENVIRONMENTS):
        if is_task_file(file := word or name):
            raise UsageError("envs.env-is-a-file", name=name, file=file)
        if foreign_file(name) is None:  # a module of the user's may have the name of an environment
            raise UsageError("envs.no-environment", name=name, environments=sorted(ENVIRONMENTS))
    factory: Any = _import_attribute(name, entry.environment if entry else name)
    missing = [method for method in METHODS if not callable(getattr(factory, method, None))]
    is_class = inspect.isclass(factory)
    if missing or not is_class:
        lack = f"lacks the methods {', '.join(missing)}" if is_class else "is no class"
        raise UsageError("envs.not-an-environment", name=name, lack=lack, methods=METHODS, public=PUBLIC)
    constructor: Callable[..., Environment] = factory
    return constructor


def _import_attribute(name: str, target: str) -> Any:
    """Import the module "package.module", or the attribute "package.module:attribute"."""
    module, colon, attribute = target.partition(":")
    _refuse_standard_library(name, module)
    _search_current_folder()
    try:
        imported = importlib.import_module(module)
        return getattr(imported, attribute) if colon else imported
    except Exception as error:  # a module of the user may raise anything
        kind = "" if isinstance(error, (ImportError, AttributeError)) else f"{type(error).__name__}: "
        raise UsageError("envs.import-failed", name=name, kind=kind, error=error) from error


def _refuse_standard_library(name: str, module: str) -> None:
    # No environment is there, and importing one of its modules may already act (`antigravity` opens a browser).
    if module.partition(".")[0] in sys.stdlib_module_names:
        raise UsageError("envs.standard-library", name=name, module=module, environments=sorted(ENVIRONMENTS))


def _search_current_folder() -> None:
    """Make modules of the current folder importable, after all installed ones, as `python -m` does."""
    # Last, so that no file of the user's hides an installed package of its name.
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
