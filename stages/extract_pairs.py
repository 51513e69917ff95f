"""extract-pairs: turn disagreement between teachers and student into preference pairs.

Answers: is there signal? Reads rollouts and teacher actions; writes `pairs`, their `states`, and a reason for every
step without a pair. Two actions are equal when their canonical forms are or, where the environment can tell, when
running them from a copy of the recorded state gives the same outcome. The unit is a state.

With `signal.rollouts` the actions of every pair are played from the recorded state, the policy continues, and the
outcomes are the verdict: SIGNAL, NO SIGNAL, UNDECIDED. They are the `continuations`, each a unit. Without, the verdict
is a heuristic about votes and failed rollouts, and named so.

Imported rollouts need no teachers: several models, or several rollouts of one, on the same task vote and are judged by
their rewards in every state that they share. The unit is a task then. They cannot be continued.
"""

from composer_stages.pairs.config import Config
from composer_stages.runs.kinds import CONTINUATION, ORIGIN, PAIR, STATE, STEP, TEACHER_ACTION
from composer_stages.runs.run import Slot
from composer_stages.runs.stage import Stage, later

STAGE = Stage(
    name="extract-pairs",
    version=6,
    example="""\
>>> pairs = composer.extract_pairs(rollouts, answers, quiet=True)
>>> pairs.manifest.status
'complete'""",
    config=Config,
    inputs={"rollouts": Slot(STEP), "teacher_actions": Slot(TEACHER_ACTION, unless=(ORIGIN,))},
    outputs={"pairs": PAIR, "states": STATE, "continuations": CONTINUATION},
    **later("composer_stages.pairs.stage", "plan", "run", "work"),
    **later("composer_stages.pairs.report", "judge"),
)
