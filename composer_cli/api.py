"""The stages as Python functions with the command line's words. Each returns its run, done now or up to date before.

from composer_cli.api import collect, extract_pairs, replay_teachers

rollouts = collect(policy={"model": "Qwen/Qwen3-8B"}, tasks=2)
rollouts.scan("rollouts").pandas()
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from composer_cli import launch, settings
from composer_cli.show import runs
from stages import STAGES, command_words
from stages.errors import BadInput, ComposerError, Incomplete, UsageError
from stages.runs import runner
from stages.runs.artifact import Inputs, Run
from stages.runs.config import StageConfig
from stages.runs.stage import Plan, load_stage

__all__ = [
    "BadInput",
    "ComposerError",
    "Incomplete",
    "Run",
    "UsageError",
    "collect",
    "evaluate",
    "export",
    "extract_pairs",
    "find",
    "import_traces",
    "replay_teachers",
    "tasks",
    "train",
]

Listener = Callable[[str, int, int], None]
"""Called with (what, units done, units in all); with 0 in all, `what` is a remark on the state of the work."""
ARTIFACTS = Path("artifacts")


class StageFunction:
    """One stage, to be called with its command's settings.

    Settings are given as `tasks=2`, `policy={"model": "m"}` or `**{"policy.model": "m"}`; `settings()` names them all.
    Raises the errors of the command: `UsageError`, `BadInput`, `Incomplete`.
    """

    def __init__(self, name: str) -> None:
        self.name, self.__doc__ = name, STAGES[name].help

    def __call__(
        self,
        *reads: Run,
        artifacts: Path | str = ARTIFACTS,
        out: Path | str | None = None,
        resume: bool = False,
        clean: bool = False,
        max_cost: float | None = None,
        listener: Listener | None = None,
        **chosen: Any,
    ) -> Run:
        """Run the stage, or find it done; returns its run.

        reads: the runs that it reads, as `--from`; the latest of the stages that write what it needs if left out.
        max_cost: USD, never more, over all attempts. The other words are those of the command.
        """
        config, inputs = self._configure(reads, artifacts, chosen)
        asked = launch.RunOptions(Path(artifacts), None, resume, clean, max_cost)
        where = launch.with_out(self.name, None if out is None else str(out), asked)
        result = runner.execute(
            self.name, inputs, config, **where.where(), max_cost=max_cost, listener=listener, mirror=where.mirror
        )
        return Run(result.path)

    def plan(self, *reads: Run, artifacts: Path | str = ARTIFACTS, **chosen: Any) -> Plan:
        """Return what would be done and at most what it would cost, as `--dry-run` prints."""
        config, inputs = self._configure(reads, artifacts, chosen)
        return load_stage(self.name).plan(inputs, config)

    def settings(self) -> dict[str, Any]:
        """Return every setting by its dotted key, with its default; None where there is none."""
        return {key: settings.default_of(field) for key, field in settings.known(load_stage(self.name).config)}

    def __repr__(self) -> str:
        return f"<{command_words(self.name)}: {self.__doc__}>"

    def _configure(
        self, reads: tuple[Run, ...], artifacts: Path | str, chosen: dict[str, Any]
    ) -> tuple[StageConfig, Inputs]:
        layers = [settings.nested(key, value) for key, value in chosen.items()]
        config: StageConfig = settings.build(self.name, load_stage(self.name).config, layers)
        named = [str(run.path) for run in reads]
        return config, runs.choose(self.name, named, Path(artifacts), lambda text: print(text, file=sys.stderr))


collect = StageFunction("collect")
replay_teachers = StageFunction("replay-teachers")
extract_pairs = StageFunction("extract-pairs")
train = StageFunction("train")
evaluate = StageFunction("evaluate")
import_traces = StageFunction("import")
export = StageFunction("export")
tasks = StageFunction("tasks")


def find(name: str, artifacts: Path | str = ARTIFACTS) -> Run:
    """Return a run by its folder, its name in `composer status`, part of it, or a stage's name for its latest."""
    return Run(runs.find(Path(artifacts), name))
