"""What a grade says, in a tuple that a test can compare."""

from stages.envs.base import Grade

Verdict = tuple[float | None, bool | None, bool | None, bool | None, bool | None]


def verdict(grade: Grade) -> Verdict:
    """Reward, whether hidden and visible tests pass, whether it is a hack, and whether the protocol was kept."""
    return grade.reward, grade.hidden_pass, grade.visible_pass, grade.hacked, grade.protocol_ok
