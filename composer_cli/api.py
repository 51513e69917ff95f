"""The stages as Python functions, with the command line's words: each returns its run, done now or up to date before.

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
from stages.runs.artifact import Run
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
"""Called with (what, units done, units in all); with 0 in all, `what` is a remark on how things stand."""
ARTIFACTS = Path("artifacts")


class StageFunction:
    """One stage, to be called with its command's settings.

    They are given as `tasks=2`, `policy={"model": "m"}` or `**{"policy.model": "m"}`; `settings()` names them all.
    Raises what the command would say: `UsageError`, `BadInput`, `Incomplete`.
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
        """Carry the stage out, or find it done; returns its run.

        reads: the runs that it reads, as `--from`; the latest of the stages that write what it needs if left out.
        max_cost: USD, never more, over all attempts. The other words are those of the command.
        """
        config, inputs = self._config(chosen), self._inputs(reads, Path(artifacts))
        asked = launch.RunOptions(Path(artifacts), None, resume, clean, max_cost)
        where = launch.placed(self.name, None if out is None else str(out), asked)
        result = runner.execute(
            self.name, inputs, config, **where.where(), max_cost=max_cost, listener=listener, mirror=where.mirror
        )
        return Run(result.path)

    def plan(self, *reads: Run, artifacts: Path | str = ARTIFACTS, **chosen: Any) -> Plan:
        """What would be done and at most what it would cost, as `--dry-run` says."""
        return load_stage(self.name).plan(self._inputs(reads, Path(artifacts)), self._config(chosen))

    def settings(self) -> dict[str, Any]:
        """Every setting by its dotted key, with its default; None where there is none."""
        fields = settings.known(load_stage(self.name).config)
        return {
            key: None if field.is_required() else field.get_default(call_default_factory=True) for key, field in fields
        }

    def __repr__(self) -> str:
        return f"<{command_words(self.name)}: {self.__doc__}>"

    def _config(self, chosen: dict[str, Any]) -> Any:
        layers = [settings.nested(key, value) for key, value in chosen.items()]
        return settings.build(self.name, load_stage(self.name).config, layers)

    def _inputs(self, reads: tuple[Run, ...], root: Path) -> Any:
        def tell(text: str) -> None:
            print(text, file=sys.stderr)

        return runs.choose(self.name, [str(run.path) for run in reads], root, tell)


collect = StageFunction("collect")
replay_teachers = StageFunction("replay-teachers")
extract_pairs = StageFunction("extract-pairs")
train = StageFunction("train")
evaluate = StageFunction("evaluate")
import_traces = StageFunction("import")
export = StageFunction("export")
tasks = StageFunction("tasks")


def find(name: str, artifacts: Path | str = ARTIFACTS) -> Run:
    """A run by its folder, its name in `composer status`, part of it, or a stage's name for its latest."""
    return Run(runs.find(Path(artifacts), name))
