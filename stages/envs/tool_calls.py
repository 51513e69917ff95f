"""Carrying out tool calls: checked against what the environment declares, several in one answer, mistakes answered."""

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from stages import messages
from stages.envs.base import Observation
from stages.messages import ToolCall

OVER = "[Not carried out: the episode is over.]"
KINDS: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
}


def carry_out(environment: Any, text: str) -> Observation:
    """What came of an answer's calls in an environment that TakesCalls, one after another, each with one of `results`.

    An answer without a call, a tool that nobody declared and arguments that do not fit are the model's mistakes: what
    comes back says so, and `parse_error` too.
    """
    calls = messages.read(text).calls
    if not calls:
        names = " or ".join(tool["name"] for tool in environment.tools)
        return environment.malformed(f"Expected a call of {names}, found none.")
    seen: list[Observation] = []
    for call in calls:
        if seen and seen[-1].stop is not None:
            seen.append(Observation(OVER, stop=seen[-1].stop))
            continue
        error, arguments = checked(call, environment.tools)
        seen.append(environment.malformed(error) if error else environment.call(call.name, arguments))
    return joined(seen)


def checked(call: ToolCall, tools: Sequence[Mapping[str, Any]]) -> tuple[str, dict[str, Any]]:
    """What is wrong with a call, in a sentence, or nothing; and its arguments.

    Of JSON schema these are checked: required and unknown properties, types of the top level, `enum`.
    """
    schema = next((tool["parameters"] for tool in tools if tool["name"] == call.name), None)
    if schema is None:
        return f"There is no tool {call.name!r}; there is {', '.join(tool['name'] for tool in tools)}.", {}
    try:
        given = orjson.loads(call.arguments)
    except orjson.JSONDecodeError as error:
        return f"The arguments of {call.name} are not valid JSON ({error}).", {}
    if not isinstance(given, dict):
        return f"The arguments of {call.name} are no JSON object.", {}
    known = schema.get("properties", {})
    if missing := [name for name in schema.get("required", ()) if name not in given]:
        return f"{call.name} needs the argument {missing[0]!r}.", {}
    for name, value in given.items():
        if name not in known:
            return f"{call.name} has no argument {name!r}; it has {', '.join(known) or 'none'}.", {}
        kinds = KINDS.get(known[name].get("type", ""))
        if kinds and (not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds)):
            return f"The argument {name!r} of {call.name} has to be of type {known[name]['type']}.", {}
        if "enum" in known[name] and value not in known[name]["enum"]:
            return f"The argument {name!r} of {call.name} has to be one of {known[name]['enum']}.", {}
    return "", given


def joined(seen: Sequence[Observation]) -> Observation:
    """Several observations as one: texts and commands in order, the last exit code, the first mistake."""
    codes = [one.returncode for one in seen if one.returncode is not None]
    return Observation(
        "\n".join(one.content for one in seen),
        commands=tuple(command for one in seen for command in one.commands),
        parse_error=next((one.parse_error for one in seen if one.parse_error is not None), None),
        returncode=codes[-1] if codes else None,
        timed_out=any(one.timed_out for one in seen),
        duration_s=sum(one.duration_s for one in seen),
        raw_chars=sum(one.raw_chars for one in seen),
        elided_chars=sum(one.elided_chars for one in seen),
        stop=seen[-1].stop,
        results=tuple(one.content for one in seen),
    )
