"""import: bring rollouts of other programs into the records of this one.

Answers: are another program's rollouts as clean as ours? Reads files of known formats, writes `tasks`, `rollouts`,
`steps` and `origins`, the counts of every file, and the collection checks. A fact that a source does not record is null
and named; a record that cannot be read is dropped, named and counted. The unit is a rollout.

Several files may hold one rollout: predictions next to their trajectories, one table stored twice, a copied file or
line. The ids of such rollouts differ, since they come from their files; an import recognises them by their place and
content. A rollout that counts twice would make every interval of an evaluation too narrow.

Workers can read files ahead (`WorkerFiles`). A worker leaves a unit for every trajectory and drop, and one for the file
itself, written last; without the last the file is read again. Whether a rollout is a duplicate, and its number among
those of its task, only the import decides, file after file.
"""

from composer_stages.formats.config import Config
from composer_stages.runs.kinds import ORIGIN, ROLLOUT, STEP, TASK
from composer_stages.runs.stage import Stage, later

STAGE = Stage(
    name="import",
    version=13,
    example="""\
>>> imported = composer.import_traces(paths=["logs/sums.json"], quiet=True)
>>> len(imported.rollouts())
2""",
    config=Config,
    outputs={"tasks": TASK, "rollouts": ROLLOUT, "steps": STEP, "origins": ORIGIN},
    **later("composer_stages.formats.importing", "plan", "run", "work"),
)
