"""The actions of an agent in a shell, the observation of a command, and the faulty turns of a shell rollout.

An action is one assistant message, free text around exactly one fenced block:

```bash
python3 test_solution.py
```

Faults are an unknown command, a wrong file, and an edit after which the tests fail. Commands are matched, not executed:
quoted text and the bodies of here-documents are data, except those of a Python program, which may write files itself.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from composer_stages.data_files import load_toml
from composer_stages.envs.base import Observation, TurnFault
from composer_stages.errors import Refusal
from composer_stages.messages import answer_text
from composer_stages.sandbox import CommandResult
from composer_stages.words import Sentence

FENCE = "```"
SUBMIT = "submit"
BLOCK = f"{FENCE}bash\n{{command}}\n{FENCE}"
CLOSED = re.compile(r"^```bash[ \t]*\n(.*?)^```[ \t]*$", re.MULTILINE | re.DOTALL)
OPENED = re.compile(r"^```bash[ \t]*$", re.MULTILINE)
TOOLS: tuple[dict[str, Any], ...] = tuple(load_toml(__package__, "tools.toml")["tools"])


class ActionError(Refusal, ValueError):
    """The message has not exactly one action; the text names what was found and what is expected."""


def parse_bash(text: str) -> str:
    """Return the command of the only ```bash block of an answer; raise ActionError for none or several."""
    text = answer_text(text)
    commands = CLOSED.findall(text)
    if OPENED.search(CLOSED.sub("", text)):
        raise ActionError("envs.bash-block-unclosed")
    if len(commands) != 1:
        raise ActionError("envs.bash-blocks", num_blocks=len(commands))
    if not commands[0].strip():
        raise ActionError("envs.bash-block-empty")
    return commands[0].strip("\n")


def fenced(command: str) -> str:
    """Return a message that holds one command in a ```bash block."""
    return BLOCK.format(command=command)


def make_observation(command: str, result: CommandResult, max_chars: int) -> Observation:
    """Return the observation of a command: its output, elided beyond `max_chars`, and a line with its exit code."""
    content, left_out = elide(result.output, max_chars)
    reason = "time" if result.timed_out else result.killed_for
    newline = "\n" if content and not content.endswith("\n") else ""
    return Observation(
        f"{content}{newline}[exit {result.returncode}{f': {reason}' if reason else ''}]",
        commands=(command,),
        returncode=result.returncode,
        timed_out=result.timed_out,
        duration_s=result.duration_s,
        raw_chars=len(result.output),
        elided_chars=left_out,
    )


def elide(output: str, max_chars: int) -> tuple[str, int]:
    """Return head and tail of an output longer than `max_chars`, and the number of characters elided between them."""
    if len(output) <= max_chars:
        return output, 0
    half = max_chars // 2
    left_out = len(output) - 2 * half
    return f"{output[:half]}\n[{left_out} characters left out]\n{output[-half:]}", left_out


MASKED = re.compile(r"\b\d+(?:\.\d+)?\s?(?:s|ms|seconds?)\b|\b0x[0-9a-f]{6,}\b")
"""Parts of an observation that differ between equal runs: durations and memory addresses, as test reports have."""


def mask_durations(text: str) -> str:
    """Replace durations and memory addresses in the text of an observation."""
    return MASKED.sub("", text)


def same_observation(first: str, second: str) -> bool:
    """Return whether two observations differ in nothing but durations and memory addresses."""
    return first == second or mask_durations(first) == mask_durations(second)


NO_FILE = re.compile(
    r"(\S+?): No such file or directory|can't open file '([^']+)'|No such file or directory: '([^']+)'"
)
NO_COMMAND = re.compile(r"(\S+): (?:command )?not found")

HEREDOC = re.compile(
    r"^(?P<line>[^\n]*<<-?\s*(?P<quote>['\"]?)(?P<word>\w+)(?P=quote)[^\n]*)\n(?P<body>.*?)^\s*(?P=word)$",
    re.MULTILINE | re.DOTALL,
)
QUOTED = re.compile(r"'[^']*'|\"(?:[^\"\\]|\\.)*\"", re.DOTALL)
NO_REDIRECT = re.compile(r"\d*>&\d?-?|&?\d*>>?\s*/dev/\w+|2>>?\s*\S+")
"""Redirections that are no edit: joined streams, the null device, a file of errors."""
REDIRECT = re.compile(r"(?<![-=<])>{1,2}\|?\s*[^\s&>|;]")
LOG = re.compile(r"\|&?\s*tee\b[^|]*|&?\d*>{1,2}\|?\s*[^\s&>|]+")
"""Redirections of the output of tests: no edit of the tested project."""
PIPELINES = re.compile(r"&&|\|\||[;\n]")
EDITORS = re.compile(
    r"(?:^|[&|(]|(?:\b(?:sudo|xargs(?:\s+-\S+(?:\s+\d+)?)*|then|do|else)|\s-exec(?:dir)?)\s)\s*"
    r"(?:tee|patch|cp|mv|rm|ed|sed\s+(?:[^;&|\n]*?\s)?(?:-\w*i|--in-place)|perl\s+(?:-\S+\s+)*-\w*i"
    r"|git\s+(?:apply|am|checkout|restore|revert|reset|stash|mv|rm|cherry-pick|merge))(?![\w-]*\w)"
)
PYTHON = re.compile(r"\bpython[\d.]*\b")
WRITES = re.compile(
    r"open\([^)]*,\s*(?:mode\s*=\s*)?['\"][rb+]*[wax+]|\.write_(?:text|bytes)\(|\bos\.(?:rename|replace|remove)\(|\bshutil\."
)
TESTS = re.compile(
    r"\b(?:pytest|unittest|tox|nox|nosetests|make|ctest|go\s+(?:test|build|vet|run)|cargo\s+\w+|(?:npm|yarn|pnpm)\s+(?:run\s+)?test"
    r"|mvn|gradlew?)(?![\w.-]*\w)|\bpython[\d.]*\s+(?:-\w+\s+)*\S*test\w*\.py\b|\bmanage\.py\s+test\b"
    r"|(?:(?:^|[;&|(\n])\s*|\b(?:ba)?sh\s+(?:-\w+\s+)*)\./\S*test\S*"
)


def edits_files(command: str) -> bool:
    """Return whether a command changes files, judged by its text."""
    shell, programs = _split_heredocs(command)
    # Quoted text is a program only where Python is called; elsewhere it is data, such as the message of a commit.
    if PYTHON.search(shell) and any(WRITES.search(program) for program in programs):
        return True
    # Each pipeline for itself: `pytest > log` is no edit, while `pytest; echo x > a.py` is.
    for pipeline in PIPELINES.split(shell):
        remainder = LOG.sub(" ", pipeline) if TESTS.search(pipeline) else pipeline
        if REDIRECT.search(NO_REDIRECT.sub(" ", remainder)) or EDITORS.search(remainder):
            return True
    return False


def runs_tests(command: str) -> bool:
    """Return whether a command builds or tests the project, judged by its text."""
    return bool(TESTS.search(_split_heredocs(command)[0]))


def _split_heredocs(command: str) -> tuple[str, list[str]]:
    """Split a command into the shell code and its data (here-documents and quoted strings)."""
    bodies = [match["body"] for match in HEREDOC.finditer(command)]
    shell = HEREDOC.sub(lambda match: match["line"], command)
    return QUOTED.sub("''", shell), bodies + QUOTED.findall(shell)


def find_faults(observations: Sequence[Observation]) -> list[TurnFault]:
    """Return the faulty turns of a rollout, each once."""
    by_turn: dict[int, TurnFault] = {}
    last_edit: int | None = None
    for index, observation in enumerate(observations):
        if any(map(edits_files, observation.commands)):
            last_edit = index  # before the check: one command may edit and test, and the edit is then its own
        error = observation.content
        fault: TurnFault | None = None
        if observation.returncode in (None, 0):
            continue
        if missing := NO_COMMAND.search(error):
            advice = Sentence("envs.no-command", command_=missing[1])
            fault = TurnFault(index, "unknown_command", error, advice)
        elif missing := NO_FILE.search(error):
            name = next(filter(None, missing.groups()), "")
            fault = TurnFault(index, "wrong_file", error, Sentence("envs.no-file", name=name))
        elif last_edit is not None and any(map(runs_tests, observation.commands)):
            fault = TurnFault(last_edit, "failing_test", error, Sentence("envs.failed-tests", error=error.strip()))
        if fault is not None:
            by_turn.setdefault(fault.turn, fault)
    return list(by_turn.values())


class ShellEnvironment(ABC):
    """The methods by which the agent of an environment acts in a shell; a subclass runs the command.

    Implements TakesCalls and ReportsFaults. `_system`: the system message of an opening; `opening_by_calls`: that for
    calls of tools. `well_formed`: whether all actions of the rollout could be run; `reset` of a subclass sets it.
    """

    tools = TOOLS
    opening_by_calls: str
    well_formed = True
    _system: str

    @abstractmethod
    def run_command(self, command: str) -> Observation:
        """Run one command, or hand in on `submit`."""

    def step(self, text: str) -> Observation:
        """Run the command of one assistant message."""
        try:
            command = parse_bash(text)
        except ActionError as error:
            return self.malformed(str(error))
        return self.run_command(command)

    def use_tools(self) -> None:
        """Take calls of `bash` and `submit` as actions."""
        self._system = self.opening_by_calls

    def call(self, name: str, arguments: Mapping[str, Any]) -> Observation:
        """Run one call of `bash` or `submit`."""
        return self.run_command(SUBMIT if name == SUBMIT else arguments["command"])

    def malformed(self, error: str) -> Observation:
        """Return the observation of an action that cannot be run."""
        self.well_formed = False
        return Observation(f"[{error}]", parse_error=error)

    def faults(self, observations: Sequence[Observation]) -> list[TurnFault]:
        """Return at most one fault a turn."""
        return find_faults(observations)
