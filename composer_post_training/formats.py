"""Formats of other programs: readers and writers of their files, and the table of formats.

FORMATS["mine"] = Format("my_package.mine", written=True)  # its READERS, and its WRITER
"""

from stages.formats import FORMATS, Format
from stages.formats.base import Drop, ImportedTurn, Origin, Reader, Trajectory
from stages.formats.transcripts import ExportedTranscript, ExportedTurn, File, Writer, json_lines, small_file
from stages.rollouts.missing import Fact

__all__ = [
    "FORMATS",
    "Drop",
    "ExportedTranscript",
    "ExportedTurn",
    "Fact",
    "File",
    "Format",
    "ImportedTurn",
    "Origin",
    "Reader",
    "Trajectory",
    "Writer",
    "json_lines",
    "small_file",
]
