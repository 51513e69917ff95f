"""Whether a trajectory's fields have the types that rows need, since sources hold any JSON.

The types are those of the dataclasses in `base.py`, checked strictly: no text for a number, no bool for a number.
"""

from pydantic import TypeAdapter, ValidationError

from stages.importers.base import Trajectory

_TRAJECTORY = TypeAdapter(Trajectory)


def check(trajectory: Trajectory) -> Trajectory:
    """The same trajectory; `TypeError` names the first field that has a wrong type, and its value."""
    try:
        _TRAJECTORY.validate_python(trajectory)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(map(str, first["loc"]))
        raise TypeError(f"{field} is {first['input']!r:.60}") from None
    return trajectory
