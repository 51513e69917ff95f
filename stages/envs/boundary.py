"""Validation of an environment's return values and errors: the environment may be the user's own, with mistakes.

Also tool calls: checked against the declared tools, executed in order, mistakes of the model answered.
"""

import math
import struct
import sysconfig
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from numbers import Real
from pathlib import Path
from typing import Any, get_args

from composer_stages import json_text, messages
from composer_stages.envs.base import Environment, Grade, GradesTogether, Observation, TakesCalls, Task, Work
from composer_stages.errors import Refusal, UsageError
from composer_stages.layout import shortened
from composer_stages.messages import Message, ToolCall
from composer_stages.runs import store
from composer_stages.terms import Ground, whole_reward
from composer_stages.words import Sentence

COMPOSER = Path(__file__).resolve().parents[1]
LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
TASK_TEXTS = ("task_id", "env", "split", "family", "prompt")
FLAGS = ("hidden_pass", "visible_pass", "hacked", "protocol_ok")


class WrongValue(Refusal):
    """An environment returned a value that the protocol does not allow."""


def describe_error(error: BaseException, environment: Environment, task_id: str) -> str:
    """Describe an error: its message, line, task, and whether the environment's code or Composer's raised it."""
    name = f"{type(environment).__module__}:{type(environment).__qualname__}"
    frames = traceback.extract_tb(error.__traceback__)
    # The innermost line outside the libraries and Composer: an error inside json.loads is the fault of its caller.
    library_folders = (*LIBRARIES, str(COMPOSER))
    env_frames = [
        frame for frame in frames if not any(Path(frame.filename).is_relative_to(folder) for folder in library_folders)
    ]
    by_environment = (env_frames or isinstance(error, WrongValue)) and not name.startswith("composer_stages.")
    owner = f"code of the environment {name}, not of Composer" if by_environment else "Composer's own code"
    if isinstance(error, WrongValue):  # raised here about a returned value: no line of the environment's to name
        return f"{error} (task {task_id}; {owner})"
    frame = (env_frames or frames)[-1]
    first_line = (str(error).splitlines() or [""])[0]
    return f"{first_line} ({frame.filename}, line {frame.lineno}, in {frame.name}, task {task_id}; {owner})"


def check_opening(value: Any) -> list[Message]:
    """Check the value of `reset`: at least one message with role and content."""
    valid = isinstance(value, (list, tuple)) and all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in value
    )
    if not valid or not value:
        raise WrongValue("envs.reset-value", returned=_short(value))
    return list(value)


def check_observation(value: Any) -> Observation:
    """Check the value of `step`."""
    if not isinstance(value, Observation):
        raise WrongValue("envs.step-value", returned=_short(value))
    for name, kinds, words in (
        ("content", (str,), "text"),
        ("stop", (str, type(None)), "text or None"),
        ("parse_error", (str, type(None)), "text or None"),
        ("returncode", (int, type(None)), "a whole number or None"),
    ):
        if not isinstance(getattr(value, name), kinds):
            raise WrongValue("envs.observation-value", name=name, returned=_short(getattr(value, name)), kinds=words)
    return value


def check_grade(value: Any, environment: Environment) -> Grade:
    """Check the value of `grade`: the reward a finite number or None, every flag a bool or None.

    A pass without a ground gets that of the environment. A reward on another ground than the environment is set to
    require is null, and no pass.
    """
    if not isinstance(value, Grade):
        raise WrongValue("envs.grade-value", returned=_short(value))
    if not isinstance(value.work, Work):
        raise WrongValue("envs.grade-work", returned=_short(value.work))
    for name in FLAGS:
        if not isinstance(getattr(value, name), (bool, type(None))):
            raise WrongValue("envs.grade-flag", name=name, returned=_short(getattr(value, name)))
    if value.ground not in (None, *get_args(Ground)):
        raise WrongValue("envs.grade-ground", returned=_short(value.ground))
    if value.reward is None:
        return value
    reward: Any = value.reward
    # numpy's scalars are Real too. A NaN or an infinity would poison every mean that it enters.
    if isinstance(reward, bool) or not isinstance(reward, Real) or not _is_finite_in_float32(reward):
        raise WrongValue("envs.grade-reward", returned=_short(reward))
    value = replace(value, reward=whole_reward(float(reward)))
    ground = value.ground or getattr(environment, "ground", None)
    # A share of the full reward rests on the same report.
    if getattr(environment, "require", "report") == "values" and ground != "values" and float(reward) > 0:
        return replace(value, reward=None, hidden_pass=None, ground=ground, error=Sentence("envs.not-paid"))
    return replace(value, ground=ground if value.passed or (value.reward or 0) >= 1 else None)


def _is_finite_in_float32(number: Any) -> bool:
    """Return whether a number is finite in float32, in which training computes advantages."""
    with suppress(OverflowError):
        return math.isfinite(number) and bool(struct.pack("<f", number))
    return False


def grade_together(environments: list[Environment]) -> list[Any] | None:
    """Grade several rollouts by `grade_together`; None where the environment lacks it or it failed."""
    first = environments[0]
    if not isinstance(first, GradesTogether):
        return None
    # Mistakes of an environment's code: each rollout is then graded by itself, so that one bad rollout costs only its
    # own grade. InfrastructureError and OSError are no such mistakes and are raised.
    mistakes = ArithmeticError, AttributeError, LookupError, NameError, RuntimeError, SystemExit, TypeError, ValueError
    with suppress(*mistakes):
        grades = first.grade_together(environments)
        return grades if len(grades) == len(environments) else None
    return None


def declared_tools(environment: Environment) -> tuple[Mapping[str, Any], ...]:
    """Switch the environment to tool calls and return its tools; raise UsageError where it declares none."""
    if not isinstance(environment, TakesCalls):
        raise UsageError("envs.no-tools", environment=environment.name)
    environment.use_tools()
    return tuple(environment.tools)


def check_tasks(value: Any, name: str) -> list[Task]:
    """Check the value of `tasks`; raise UsageError for other types, data that is not JSON, and a repeated id."""
    if not isinstance(value, Sequence) or not all(isinstance(task, Task) for task in value):
        raise UsageError("envs.not-a-task-list", name=name, tasks=_short(value))
    seen: set[str] = set()
    for task in value:
        for field, kind in (*dict.fromkeys(TASK_TEXTS, str).items(), ("data", Mapping)):
            if not isinstance(content := getattr(task, field), kind):
                needed = "text" if kind is str else "a dictionary"
                raise UsageError("envs.task-field", name=name, field=field, content=_short(content), needed=needed)
        if task.task_id in seen:
            raise UsageError("envs.repeated-task", name=name, task_id=task.task_id)
        seen.add(task.task_id)
        try:
            store.encode([task.task_id, task.env, task.split, task.family, task.prompt, dict(task.data)])
        except (TypeError, ValueError) as error:
            raise UsageError("envs.task-not-json", name=name, task_id=task.task_id, error=error) from None
        if lost := next(json_text.changed_numbers(task.data), None):
            raise UsageError("envs.task-number-lost", name=name, task_id=task.task_id, number=lost)
    return list(value)


def _short(value: Any) -> str:
    return shortened(repr(value))


OVER = "[Not carried out: the rollout is over.]"
KINDS: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}


def run_calls(environment: Any, text: str, *, fault: str | None = None) -> Observation:
    """Execute the tool calls of an answer in order; `results` of the observation has one text a call.

    fault: why the server could not read the calls.

    Texts and commands are joined in order; the exit code is the last one, the mistake the first one.

    An answer without a call, an undeclared tool and arguments that do not fit the schema are mistakes of the model: the
    observation and its `parse_error` name the mistake.
    """
    if fault is not None:
        return environment.malformed(fault)
    calls = messages.read(text).calls
    if not calls:
        names = [tool["name"] for tool in environment.tools]
        return environment.malformed(Sentence("envs.no-call", tools=names))
    seen: list[Observation] = []
    for call in calls:
        if seen and seen[-1].stop is not None:
            seen.append(Observation(OVER, stop=seen[-1].stop))
            continue
        error, arguments = check_call(call, environment.tools)
        seen.append(environment.malformed(error) if error else environment.call(call.name, arguments))
    codes = [step.returncode for step in seen if step.returncode is not None]
    return Observation(
        "\n".join(step.content for step in seen),
        commands=tuple(command for step in seen for command in step.commands),
        parse_error=next((step.parse_error for step in seen if step.parse_error is not None), None),
        returncode=codes[-1] if codes else None,
        timed_out=any(step.timed_out for step in seen),
        duration_s=sum(step.duration_s for step in seen),
        raw_chars=sum(step.raw_chars for step in seen),
        elided_chars=sum(step.elided_chars for step in seen),
        stop=seen[-1].stop,
        results=tuple(step.content for step in seen),
    )


CONSTANTS = {"True": "true", "False": "false", "None": "null"}
"""How chat templates, which are Python, write JSON's constants."""


def _from_text(text: str, kinds: tuple[type, ...]) -> Any:
    """Return the value of one of these types that a text is in JSON; the text where it is none."""
    if str in kinds:
        return text
    with suppress(ValueError):
        value = json_text.strict_loads(CONSTANTS.get(text.strip(), text))
        return value if isinstance(value, kinds) else text
    return text


def check_call(call: ToolCall, tools: Sequence[Mapping[str, Any]]) -> tuple[str, dict[str, Any]]:
    """Check a tool call against its schema; return the mistake as a sentence ("" for none) and the arguments.

    Checked are these parts of JSON schema: required and unknown properties, types of the top level, `enum`. A text
    that stands for a value of the declared type is that value: families that write calls as XML have no other.
    """
    tool = next((tool for tool in tools if tool["name"] == call.name), None)
    if tool is None:
        return Sentence("envs.no-such-tool", tool=call.name, tools=[tool["name"] for tool in tools]), {}
    try:
        arguments = json_text.strict_loads(call.arguments)
    except ValueError as error:
        return Sentence("envs.arguments-not-json", tool=call.name, error=error), {}
    if not isinstance(arguments, dict):
        return Sentence("envs.arguments-not-an-object", tool=call.name), {}
    schema = tool.get("parameters") or {}
    properties, others = schema.get("properties") or {}, schema.get("additionalProperties")
    if missing := [name for name in schema.get("required", ()) if name not in arguments]:
        return f"{call.name} needs the argument {missing[0]!r}.", {}
    for name, written in arguments.items():
        if name not in properties and not (others or schema.get("patternProperties")):
            return Sentence("envs.no-such-argument", tool=call.name, name=name, arguments=list(properties)), {}
        given = properties.get(name, others)
        declared: Mapping[str, Any] = given if isinstance(given, dict) else {}  # `true` takes every value
        types = declared.get("type") or []
        types = [types] if isinstance(types, str) else types
        known = [KINDS[each] for each in types if each in KINDS]
        kinds = tuple(chain.from_iterable(known)) if len(known) == len(types) else ()
        value = _from_text(written, kinds) if isinstance(written, str) and kinds else written
        if isinstance(value, float) and value.is_integer() and int in kinds and float not in kinds:
            value = int(value)  # 5.0 is an integer of JSON schema
        arguments[name] = value
        # bool is a subclass of int in Python, but no number in JSON schema.
        if kinds and (not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds)):
            return Sentence("envs.argument-type", name=name, tool=call.name, type=" or ".join(types)), {}
        if "enum" in declared and value not in declared["enum"]:
            return Sentence("envs.argument-choice", name=name, tool=call.name, choices=declared["enum"]), {}
    return "", arguments
