"""Rollouts in the files of other programs: one module a program, with its readers and its writer.

A reader turns records of a file into trajectories, a writer turns rollouts into files. A module declares them as
`READERS` and `WRITER`; formats.toml names the module of each format, which is imported when it is used.

What all formats share:

base.py - trajectories, dropped records, and `Reader`; fields.toml - names in the files of other programs
files.py - finding files, and reading them record by record
messages.py - chat messages of every dialect as role and text
measurement.py - what a log says that it measured, of a log and of a sample
reports.py - SWE-bench's reports, and other files that describe or judge trajectories
reading.py - detection of a file's format, completion and validation, and all trajectories of a file
secrets.py - secrets in texts, replaced by their kind
repeats.py - which rollouts of several files repeat earlier ones
rows.py - trajectories as task, rollout, step and origin rows
transcripts.py - rollouts read back from rows for writers, and `Writer`
importing.py - what `import` does; import_report.jinja - its report
config.py - its settings
hub.py - a run as a folder for the Hugging Face hub, and its upload

The formats:

atif.py - ATIF trajectories of Harbor and Terminal-Bench
chat_messages.py - rows of chat messages, as in public data sets
claude_code.py - Claude Code sessions
evalplus.py - EvalPlus' results
helm.py - HELM's statistics by instance
inspect_logs.py - Inspect logs, read and written
lighteval.py - LightEval's details
lm_eval.py - samples of lm-evaluation-harness
mini_swe_agent.py - mini-swe-agent `.traj.json`
nemo_gym.py - NeMo Gym rollouts
openenv.py - OpenEnv rollouts and training traces, read and written
openhands.py - OpenHands `output.jsonl`
swe_agent.py - SWE-agent `.traj`
swebench.py - SWE-bench predictions, read and written, and saved test logs
swebench_logs.py - saved logs of SWE-bench's harnesses, found and graded again
tau_bench.py - results of tau-bench and tau2
terminal_bench.py - results of Terminal-Bench before Harbor
trl.py - TRL's logged completions, read and written
verifiers.py - verifiers before 0.4, and verifiers 0.4 and PRIME-RL, read and written
"""

import hashlib
import warnings
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from composer_stages.data_files import load_toml
from composer_stages.errors import UsageError
from composer_stages.formats.base import Reader
from composer_stages.formats.transcripts import Writer
from composer_stages.registry import Registry


@dataclass(frozen=True)
class Format:
    """A format that a user can name, and its module."""

    module: str
    detected: bool = True
    """Whether `auto` tries its readers. Saved test logs are read only where they are asked for by name."""
    written: bool = False
    """Whether the module has a `WRITER`."""


FORMATS = Registry[Format](
    "composer.formats",
    {name: Format(**about) for name, about in load_toml(__package__, "formats.toml").items()},
    lambda point: point.load() if ":" in point.value else Format(point.value),
)
"""Every format by its name, in the order in which `auto` tries them.

An entry point of `composer.formats` is a module with READERS, or a `Format` if it has a WRITER, too.
"""
if TYPE_CHECKING:
    FormatName = str
else:
    FormatName = Literal["auto", *FORMATS]
"""A name of `FORMATS`, or `auto`."""


def readers(name: str) -> list[Reader]:
    """Return the readers of a format in the order of their detection; of all detected formats for `auto`."""
    if name != "auto":
        return _readers_of(name)
    detectable = list[Reader]()
    for detected in [each for each, spec in FORMATS.items() if spec.detected]:
        try:
            detectable += _readers_of(detected)
        except UsageError as error:  # of an installed package, which must not keep others from being read
            warnings.warn(str(error), stacklevel=2)
    return detectable


def _readers_of(name: str) -> list[Reader]:
    """Return the readers of one format; `UsageError` for an installed one whose module has none of its name."""
    module = FORMATS[name].module
    if FORMATS.ships(name):
        return [reader for reader in import_module(module).READERS if reader.name == name]
    try:
        declared = list(import_module(module).READERS)
    except Exception as error:  # a package may raise anything
        raise UsageError("formats.readers-not-imported", name=name, module=module, error=error) from error
    named = [reader for reader in declared if isinstance(reader, Reader) and reader.name == name]
    if not named:
        others = [getattr(reader, "name", reader) for reader in declared]
        raise UsageError("formats.no-reader-of-name", name=name, module=module, others=others)
    return named


def added_sha256() -> dict[str, dict[str, str]]:
    """Return the digest of the file of each format that is not shipped: a changed reader has other results.

    Part of the identity of what reads files, as `{"formats": {name: digest}}`; empty where there is no such format.
    """
    digests = dict[str, str]()
    for name in FORMATS.added():
        with suppress(ImportError):  # refused where it is read
            spec = find_spec(FORMATS[name].module)
            if spec and spec.origin:
                digests[name] = hashlib.sha256(Path(spec.origin).read_bytes()).hexdigest()
    return {"formats": digests} if digests else {}


def writer(name: str) -> Writer:
    """Return the writer of a format that is written."""
    format_writer: Writer = import_module(FORMATS[name].module).WRITER
    return format_writer
