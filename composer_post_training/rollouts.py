"""One rollout as a Python object, which shows itself as a conversation: as text where it is printed, and in a notebook.

Models and environments wrote what is shown. It is escaped in HTML, and characters that steer a terminal or the
direction of writing are spelt out.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from composer_cli.printing import escape_control_characters, escape_line
from composer_cli.show import rollout as shown_rollouts
from composer_cli.show import text
from stages.messages import Message
from stages.runs.display import plain
from stages.runs.kinds import Row

OPEN_LINES, OPEN_CHARACTERS = 15, 1500
"""Length up to which a text of a conversation is shown at once in a notebook; one click opens longer ones."""
BORDER = "border-left: 3px solid rgba(128, 128, 128, 0.5)"
ACTION_BORDER = "border-left: 3px solid rgba(64, 128, 255, 0.8)"


@dataclass(frozen=True, repr=False)
class Rollout:
    """One rollout: a policy's attempt at a task. `print` shows its conversation, and so does a notebook.

    Its `repr` is one line.

    >>> rollout = composer.find("collect").rollouts()[0]
    >>> rollout.reward, rollout.messages[0]["role"], rollout.row["terminated_by"]
    (1.0, 'system', 'submitted')
    >>> print(rollout)
    kata-train-0-00000#0@0: passed, reward 1
    ...
    """

    rollout_id: str
    """Its name, unique in its run."""
    outcome: Mapping[str, Any]
    """What is known of how it ended: `reward`, `hacked`, `num_steps`, `terminated_by`, `error_type` and others."""
    messages: list[Message]
    """The conversation: dictionaries with `role` and `content`."""
    steps: list[Row]
    """The steps by the columns of the table `steps`, such as `action` and `observation`."""
    row: Row
    """All columns of its table by name."""
    folder: Path
    """The folder of its run."""

    @property
    def task_id(self) -> str:
        """Return the name of its task."""
        return str(self.row["task_id"])

    @property
    def reward(self) -> float | None:
        """Return its reward, 1.0 or 0.0 where an evaluation recorded whether it passed; None where it has none."""
        reward = self.row["reward"] if "reward" in self.row else self.row["passed"]
        return None if reward is None else float(reward)

    def _shown(self) -> shown_rollouts.ShownRollout:
        return shown_rollouts.of_row(self.row, self.steps)

    def __repr__(self) -> str:
        shown = ("arm", "reward", "passed", "hacked", "terminated_by", "error_type")
        outcome = (f"{label} {plain(value)}" for label, value in self.outcome.items() if label in shown)
        facts = ", ".join([*outcome, f"{len(self.messages)} messages"])
        return f"<rollout {escape_line(f'{self.rollout_id}: {facts}')}>"

    def __str__(self) -> str:
        return text.transcript_text(self.folder, self._shown(), full=True)

    def _repr_html_(self) -> str:
        """Return the conversation for a notebook, without scripts and without anything from elsewhere."""
        one = self._shown()
        parts = [
            f"<p><b>{escape(escape_control_characters(one.title))}</b></p>",
            _table(one.opening(self.folder)),
            *(_block(title, text) for title, text in one.blocks()),
            "<p><b>grading</b></p>",
            _table(one.grading() or {"": "not graded"}),
            *(_block(title, text) for title, text in one.logs()),
        ]
        return f"<div>{''.join(parts)}</div>"


def _table(facts: Mapping[str, str]) -> str:
    cells = (
        f"<tr><td>{escape(escape_control_characters(name))}</td><td>{escape(escape_control_characters(text))}</td></tr>"
        for name, text in facts.items()
    )
    return f"<table>{''.join(cells)}</table>"


def _block(title: str, text: str) -> str:
    """Return a text with its title; a long one is folded."""
    lines = text.count("\n") + 1
    border = ACTION_BORDER if title.startswith("assistant") else BORDER
    shown = (
        f'<pre style="{border}; margin: 0.2em 0 0.8em; padding-left: 0.8em; white-space: pre-wrap; '
        f'overflow-wrap: anywhere">{escape(escape_control_characters(text))}</pre>'
    )
    head = f"<b>{escape(escape_control_characters(title))}</b>"
    if lines <= OPEN_LINES and len(text) <= OPEN_CHARACTERS:
        return f"<div>{head}{shown}</div>"
    return f"<details><summary>{head}, {lines:,} lines</summary>{shown}</details>"
