"""Composer from Python: read what its stages wrote, and run them.

    import composer_post_training as composer

    composer.runs()                         # all runs below ./artifacts, as a table
    run = composer.find("collect")          # a run by its name, its folder, or its stage for the latest
    for rollout in run.rollouts():
        print(rollout.task_id, rollout.reward, rollout.messages)
    run.scan("steps").pandas()              # any table; .arrow() and .duckdb() too
    composer.find("evaluate").differences   # effects with their intervals and p-values
    composer.query("select avg(reward) from rollouts")
    composer.compare("a.eval", "b.eval").difference         # of evaluation logs of any program

    rollouts = composer.collect(policy={"model": "Qwen/Qwen3-8B"}, tasks=2)   # runs a stage, or finds it done
    composer.collect.plan(tasks=100)        # what it would do and cost at most
    composer.collect.settings()             # every setting with its default; help(composer.collect) explains them
    composer.run("demo")                    # runs a preset, or a TOML file of your own

Stages: collect, replay_teachers, extract_pairs, train, evaluate; import_traces, compare, export, tasks, curriculum,
normalize, frameworks; those of the gradient probe are functions of `probe`. Errors are `UsageError`, `BadInput` and
`Incomplete`, each a `ComposerError`. The page docs/python.md has an executed example of everything.

The modules of this package:

interface.py       - the functions, and the stages as functions
words.py - how a sentence names options, settings and commands in Python
results.py         - a run, a chain (submitted ones too) and a rollout that shows its conversation, as Python objects
stage_functions.py - a stage as a function: its arguments, signature and help
deferred.py        - names of a module that are imported when they are first used

What a package of your own builds on, each a module to import from. In the source tree, and nowhere else, the same
things lie in `composer_stages`; an installed Composer has no package of that name.

environments.py    - environments: what one is, questions with one right answer, the names after `--env`
grading.py         - verdicts on functions that a model wrote, executed in the sandbox
policies.py        - policies: models that answer, and the table of their kinds
channels.py        - loss channels of a training: rows, losses, metrics, and the table of channels
formats.py         - formats of other programs: readers, writers, and the table of formats
sandbox.py         - the sandbox in which commands of a model run
checks.py          - checks of the gradient probe
stages.py          - stages: what one is, what it reads and writes, and the table of stages
kinds.py           - the kinds of records that runs hold
settings.py        - groups of settings as dictionaries whose keys type checkers know
executors.py       - services to which a chain is submitted, behind `--on`
trl.py             - what a script that trains with TRL can add: channels, the alarm, pairs, environments
openenv.py         - environments as an OpenEnv server
mini_swe_agent.py  - environments for the agents of mini-swe-agent
prime_rl.py        - what prime-rl can add: GRPO with hints, our kernel of its loss
verifiers.py       - a taskset for the evaluation of verifiers
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from composer_post_training.interface import (
        BadInput,
        Chain,
        ComparedLogs,
        ComposerError,
        Difference,
        Differences,
        Evaluation,
        Incomplete,
        InfrastructureError,
        Job,
        Plan,
        ReadableRun,
        Rollout,
        Scan,
        Table,
        UsageError,
        collect,
        compare,
        curriculum,
        evaluate,
        export,
        extract_pairs,
        find,
        frameworks,
        import_traces,
        job,
        normalize,
        probe,
        query,
        replay_teachers,
        report,
        run,
        runs,
        tasks,
        train,
        view,
    )

__all__ = ["find", "job", "query", "report", "run", "runs", "view"]
__all__ += ["collect", "evaluate", "extract_pairs", "probe", "replay_teachers", "train"]
__all__ += ["compare", "curriculum", "export", "frameworks", "import_traces", "normalize", "tasks"]
__all__ += ["BadInput", "ComposerError", "Incomplete", "InfrastructureError", "UsageError"]
__all__ += ["Chain", "ComparedLogs", "Difference", "Differences", "Evaluation", "Job"]
__all__ += ["Plan", "ReadableRun", "Rollout", "Scan", "Table"]


def __dir__() -> list[str]:
    """Return the names of the interface alone, for `dir()` and completion."""
    return __all__


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Return a module of this package, a name of the interface, or the function of a stage added from outside."""
        # A module alone, without the interface, which needs all that reads runs: a server of environments under another
        # interpreter has little of it.
        if name not in __all__ and find_spec(f"{__name__}.{name}"):
            return import_module(f"{__name__}.{name}")
        return getattr(import_module(f"{__name__}.interface"), name)
