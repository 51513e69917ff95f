"""The stages and the packages they use. A stage is a function from run folders to a run folder.

Modules are stages and are named by verbs, packages are named by nouns. A stage's module ends in `STAGE = Stage(...)`
(stages/runs/stage.py): its settings, inputs, outputs, plan and run. Stages never import each other; they exchange data
only through run folders on disk.

registry.py - tables of what ships and of what installed packages add by entry points
errors.py   - the errors that end a stage, each with an exit code
words.py    - the sentences of errors and remarks, from words.toml files, for the command line and for Python
checkout.py - the folder's own name, `stages`, for the same modules
data_files.py - the data files of packages: prompts, tables, queries and templates
json_text.py - JSON of other programs: text that is not too deep, and numbers kept exactly
layout.py  - tables with aligned columns, durations and ages, as text
stopping.py - what signals do: the first asks work to stop, the second ends it
redaction.py - keys of servers are kept out of everything that is written or shown
terms.py - what environments declare and evaluations read: sampling units, twins, grounds of a pass
endings.py - why an answer ended, by the words of servers, and what that means for it
messages.py - the messages of environments and policies: tool calls in their text, and their token ids
thoughts.py - thoughts in answers and content parts: what is neither executed nor graded
backends/   - several processes, and the communication between them
runs/       - a run on disk: artifacts, store, manifest, inputs, records, the runner
rollouts/   - the agent loop, its rows, and the collection checks
policy/     - models that answer: in this process, or behind a server
teachers/   - asking teachers for their actions in recorded states
envs/       - environments
sandbox/    - the isolated execution of commands
pairs/      - preference pairs from disagreement
losses/     - loss kernels, each checked against upstream's numbers
gradients/  - gradients of every row by what is trained of a model's Linears
training/   - the trainer and its channels
diloco/     - replicas of a training that share only a bucket
swebench/   - instances and test logs of SWE-bench as files
evaluation/ - statistics and verdict of arms
arms/       - the arms of an evaluation, played
comparison/ - evaluation logs of any program, compared task by task
formats/    - rollouts in the files of other programs, read and written
integrations/ - environments and losses inside TRL, OpenEnv, mini-swe-agent, prime-rl
probe/      - the gradient probe: its stages and their packages
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from composer_stages.data_files import load_toml
from composer_stages.registry import Registry
from composer_stages.words import words_of_stage

if __name__ == "stages":
    from composer_stages.checkout import alias

    alias()

Group = Literal["pipeline", "beside", "probe"]


@dataclass(frozen=True)
class StageEntry:
    """A stage of stages.toml: its module, the help text of its command, and its positional arguments.

    The rest of a stage is `STAGE` in its module, which is imported only when the stage is used: `composer --help` lists
    the stages without importing them. `group` is `pipeline` for the stages of the pipeline in their order, `beside`
    for the other commands, `probe` for those after `composer probe`. A positional argument sets the setting of its
    name; `run` is a run to read, `paths` takes all arguments. `read_by` is the stage that usually comes next.
    """

    module: str
    help: str
    group: Group = "pipeline"
    positionals: Sequence[str] = ()
    usage: str = ""
    read_by: str = ""


SHIPPED = load_toml(__package__, "stages.toml")
STAGES = Registry("composer.stages", {name: StageEntry(**entry) for name, entry in SHIPPED.items()}, kind=StageEntry)
"""Every stage by its name, in order. Whatever lists stages derives from this: commands, help, presets.

An entry point of `composer.stages` names a `StageEntry`, as `StageEntry(__name__, "Count steps.", "beside")` in the
stage's module.
"""


def stages_of(group: Group) -> tuple[str, ...]:
    """Return the stages of a group, in order."""
    return tuple(name for name, stage in STAGES.items() if stage.group == group)


def stage_order(stage: str) -> int:
    """Return the position of a stage in the order; one that this version does not know comes last."""
    return list(STAGES).index(stage) if stage in STAGES else len(STAGES)


def command_words(stage: str) -> str:
    """Return a stage's command: `composer probe teacher-pool` for probe-teacher-pool."""
    return " ".join(("composer", *words_of_stage(stage)))
