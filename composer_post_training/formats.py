"""Formats of other programs: readers and writers of their files, and the table of formats.

[project.entry-points."composer.formats"]
mine = "my_package.mine"  # a module with READERS
"""

from composer_stages.formats import FORMATS as FORMATS, Format as Format
from composer_stages.formats.base import (
    Drop as Drop,
    ImportedTurn as ImportedTurn,
    Origin as Origin,
    Reader as Reader,
    Trajectory as Trajectory,
)
from composer_stages.formats.transcripts import (
    ExportedTranscript as ExportedTranscript,
    ExportedTurn as ExportedTurn,
    File as File,
    Writer as Writer,
    json_lines as json_lines,
    small_file as small_file,
)
from composer_stages.rollouts.missing import Fact as Fact
