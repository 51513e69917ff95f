"""frameworks: collect through TRL, read what prime-rl or verifiers wrote, and hold both to the same checks.

Answers: whose rollouts are cleaner? A framework is a way to get rollouts. Side `trl` is TRL's rollout function as
`train` uses it, without an optimiser step, kept by our recorder in `steps/*.jsonl.gz`; with `through=openenv` its
environments are those of an OpenEnv server on loopback. Side `other` is a file of prime-rl or verifiers; without a file
it is the rollouts of `trl` in that format, which measures the format and not prime-rl, so that neither side is called
cleaner. Both are held to the collection checks and to what training needs of a rollout, which these checks can pass
over as not recorded. Writes `comparison.json` and the table in `report.txt`. The unit is a rollout through TRL.
"""

from composer_stages.integrations.config import Config
from composer_stages.runs.stage import Stage, later

STAGE = Stage(
    name="frameworks",
    version=1,
    example="""\
>>> composer.frameworks.settings()["policy.temperature"]
1.0""",
    config=Config,
    **later("composer_stages.integrations.frameworks", "plan", "run"),
    limit_setting="tasks",
)
