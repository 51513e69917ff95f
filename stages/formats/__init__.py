"""Rollouts of other programs: one module a format, each of which turns foreign records into trajectories.

What all formats share:

archives.py - Inspect's `.eval` archives, sample by sample
base.py - what an importer gives: trajectories, what their source does not record, and dropped records
data_juicer.py - Data-Juicer recipes, run in an environment of their own
dealt.py - files that workers read, and how an import takes them up
duplicates.py - rollouts that several files hold
files.py - foreign files, record by record
import_report.py - what an import did, file by file
messages.py - chat messages of every dialect as role and text
reader.py - which format a file has, and everything in it
redaction.py - secrets out, nothing else touched
reports.py - SWE-bench's reports: for whom each speaks, and what it was used for
responses.py - Responses items as chat messages
rows.py - trajectories as task, rollout, step and origin rows
session.py - one import: file after file into the journal of a run
sidecars.py - run descriptions, verdicts on files and problem statements beside the files
spent.py - how long something took by its timestamps
validation.py - whether a trajectory's fields have the types that rows need

The formats:

atif.py - ATIF trajectories of Harbor and Terminal-Bench
chat_messages.py - rows of chat messages, as public data sets have them
claude_code.py - Claude Code sessions
claude_code_tree.py - the lines of such a session as branches
inspect_logs.py - Inspect logs
mini_swe_agent.py - mini-swe-agent `.traj.json`
moatless.py - moatless-tools
nemo_gym.py - NeMo Gym rollouts
openenv.py - OpenEnv episodes and training traces
openhands.py - OpenHands `output.jsonl`
openhands_events.py - OpenHands events as a conversation
spans.py - exported tracing spans
swe_agent.py - SWE-agent `.traj`
swe_logs.py - saved test logs, which are graded again; only when it is asked for by name
swebench_preds.py - SWE-bench predictions
trl_completions.py - TRL's logged completions
verifiers_results.py - verifiers before 0.4
verifiers_traces.py - verifiers 0.4 and PRIME-RL
"""

from importlib import import_module

from stages.formats.base import Importer
from stages.formats.transcripts import Exporter

FORMATS = {
    "verifiers": ("verifiers_traces", "verifiers"),
    "mini-swe-agent": ("mini_swe_agent",),
    "swe-agent": ("swe_agent",),
    "openhands": ("openhands",),
    "inspect": ("inspect_logs",),
    "nemo-gym": ("nemo_gym",),
    "trl": ("trl",),
    "openenv": ("openenv",),
    "moatless": ("moatless",),
    "spans": ("spans",),
    "swebench-preds": ("swebench_preds",),
    "messages": ("chat_messages",),
    "claude-code": ("claude_code",),
    "atif": ("atif",),
}
"""What can be typed, and the modules that read it."""


def load(name: str) -> list[Importer]:
    """The importers of a format; of all formats for `auto`."""
    modules = FORMATS[name] if name != "auto" else [module for group in FORMATS.values() for module in group]
    return [import_module(f"stages.formats.{module}") for module in modules]


# ---- __init__
# Rollouts in the formats of other programs: one module a format, which writes files and says what is lost.
#
# transcripts.py - rollouts read back from rows, and chat messages in OpenAI's form
# trl.py - prompt and completion rows as Parquet
# openenv.py - episodes and training traces
# swebench_preds.py - predictions and the verdicts on them, one folder a model
# verifiers.py - episodes of verifiers 0.4, with token ids
# inspect_logs.py - logs that inspect_ai and its viewer open
# merged.py - a trained adapter as a whole model, which is no format for rollouts
# hub.py - any one run as a folder for the Hugging Face hub
# cards.py - model cards and dataset cards
# hub_push.py - such a folder into a repository

EXPORTERS_FORMATS = {
    "trl": "trl",
    "openenv": "openenv",
    "swebench-preds": "swebench_preds",
    "verifiers": "verifiers",
    "inspect": "inspect_logs",
}
"""What can be typed, and the module that writes it."""


def exporters_load(name: str) -> Exporter:
    """The exporter of a format."""
    return import_module(f"stages.formats.{EXPORTERS_FORMATS[name]}")
