"""Parts of presets that are chains of stages."""

import json

POLICY = 'policy = {{ model = "{model}", base_url = "{url}", concurrency = 1 }}'


def entry(stage: str, name: str, *lines: str, reads: tuple[str, ...] = (), parallel: str = "") -> str:
    """One stage of a chain."""
    head = f'[[stage]]\nstage = "{stage}"\nname = "{name}"\nfrom = {json.dumps(reads)}\nparallel = "{parallel}"\n'
    return "\n".join([head + "[stage.config]", *lines, ""])


SMALL = ("SCRIPTED", "tasks = 2", "samples = 2")
"""Settings of a collection of four rollouts."""
SILENT = """
from composer_stages.envs.kata.env import KataEnv
from composer_stages.envs.base import Observation
class Silent(KataEnv):
    def step(self, text):
        return Observation('...', parse_error='nothing is ever right', stop='submitted')
"""
"""A module with an environment in which nothing is ever right."""
