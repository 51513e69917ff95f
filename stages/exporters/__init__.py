"""Rollouts in the formats of other programs: one module a format, which writes files and says what is lost.

transcripts.py - rollouts read back from rows, and chat messages in OpenAI's form
trl.py - prompt and completion rows as Parquet
openenv.py - episodes and training traces
swebench_preds.py - predictions and the verdicts on them, one folder a model
verifiers.py - episodes of verifiers 0.4, with token ids
inspect_logs.py - logs that inspect_ai and its viewer open
merged.py - a trained adapter as a whole model, which is no format for rollouts
hub.py - any one run as a folder for the Hugging Face hub
cards.py - model cards and dataset cards
hub_push.py - such a folder into a repository
"""

from importlib import import_module

from stages.exporters.transcripts import Exporter

FORMATS = {
    "trl": "trl",
    "openenv": "openenv",
    "swebench-preds": "swebench_preds",
    "verifiers": "verifiers",
    "inspect": "inspect_logs",
}
"""What can be typed, and the module that writes it."""


def load(name: str) -> Exporter:
    """The exporter of a format."""
    return import_module(f"stages.exporters.{FORMATS[name]}")
