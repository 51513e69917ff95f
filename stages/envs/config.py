"""The settings of a stage's environment: name, split, options, sandbox."""

import traceback
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from composer_stages import envs
from composer_stages.envs import boundary, task_table
from composer_stages.envs.base import Environment, LeavesOut, Task, TellsGrounds
from composer_stages.errors import BadInput, ComposerError, UsageError
from composer_stages.runs import store
from composer_stages.runs.activity import Checking, Notice, activity
from composer_stages.runs.run import DRAWN, RunWriter
from composer_stages.runs.settings import Option, Settings, StageConfig, basic_of
from composer_stages.sandbox import probe
from composer_stages.terms import Ground
from composer_stages.words import Sentence


class EnvConfig(Settings):
    """An environment by name (`kata`) or import path (`mypkg.my_env:MyEnv`), with the options of its constructor."""

    text_sets: ClassVar[str | None] = "name"

    name: str = "kata"
    """A name in the table of environments, or `package.module:Class`."""
    split: Literal["train", "eval"] = "train"
    """The tasks to play: those for training, or those that are held out."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the environment's constructor; `env.KEY` is short for `env.options.KEY`."""
    curriculum: str = ""
    """A run of the stage curriculum: its tasks of the split, in its order, instead of those that are drawn."""
    require: Ground = "report"
    """`values`: a pass that rests on the report of a process that ran the agent's code has no reward (null, not 0)."""

    @model_validator(mode="before")
    @classmethod
    def _unknown_keys_are_options(cls, settings: Any) -> Any:
        if isinstance(settings, type) or hasattr(settings, "reset"):
            named = settings if isinstance(settings, type) else type(settings)
            raise ValueError(Sentence("envs.class-as-name", path=f"{named.__module__}:{named.__qualname__}"))
        if not isinstance(settings, dict) or not isinstance(options := settings.get("options", {}), dict):
            return settings
        # A plain dict and no model's extra fields: options are validated by the environment's constructor, not by
        # pydantic.
        fields = {key: value for key, value in settings.items() if key in cls.model_fields}
        further = {key: value for key, value in settings.items() if key not in cls.model_fields}
        if isinstance(name := settings.get("name"), str):
            name, further = envs.resolve_name(name, {**options, **further})
            return {**fields, "name": name, "options": further}
        return {**fields, "options": {**options, **further}} if further else settings

    def identity(self) -> dict[str, Any]:
        """Return the settings, with digests of a curriculum's tasks and of the file of a user's own environment."""
        settings, code = super().identity(), envs.code_sha256(self.name)
        content = envs.content_sha256(self.name, self.options)
        # The digest of its tasks in place of its path: a moved run is the same curriculum. Without one the key is
        # absent, so that fingerprints of runs without a curriculum stay what they were.
        del settings["curriculum"], settings["require"]
        return {
            **settings,
            **({"curriculum": task_table.identity(self.curriculum)} if self.curriculum else {}),
            **({"require": self.require} if self.require != "report" else {}),
            **({"code_sha256": code} if code else {}),
            **({"content_sha256": content} if content else {}),
        }

    def label(self) -> str:
        """Return the name for a run's label: without the dots and colons of an import path."""
        entry = envs.ENVIRONMENTS.get(self.name)
        word = self.options.get(entry.argument) if entry and entry.argument else None
        return (f"{self.name}-{word}" if word else self.name).replace(":", "-").replace(".", "-")


class HeldOutEnvConfig(EnvConfig):
    """The same with held-out tasks by default."""

    split: Literal["train", "eval"] = "eval"


class EnvStageConfig(StageConfig):
    """The configuration of a stage that acts in an environment."""

    env: Annotated[EnvConfig, basic_of("name", "options"), Option("NAME")] = EnvConfig()
    sandbox: str = "bubblewrap"
    """`none` runs the agent's commands unprotected on this machine; every row records it."""

    def label(self) -> str:
        """Return the environment's name."""
        return self.env.label()

    def opener(self) -> Callable[[], Environment]:
        """Return a factory of environments, after one was made and its sandbox ran a real command.

        Raises UsageError with file and line where the constructor fails.
        """
        options = self.env_options()
        try:
            first = envs.load(self.env.name, options)
        except (ComposerError, OSError):
            raise
        except Exception as error:
            raise UsageError("envs.env-not-constructed", name=self.env.name, reason=_describe_error(error)) from error
        # One instance is made here, so that a mistake in its options ends the stage before anything is paid for.
        first.close()
        if getattr(first, "sandbox", None) == self.sandbox:
            probe(self.sandbox)

        def opened() -> Environment:
            environment = envs.load(self.env.name, options)
            setattr(environment, "require", self.env.require)  # noqa: B010 - an attribute that it need not declare
            return environment

        return opened

    def env_options(self) -> dict[str, Any]:
        """Return the arguments of the environment's constructor, with the sandbox where it takes one."""
        return {**self.env.options, **({"sandbox": self.sandbox} if envs.has_option(self.env.name, "sandbox") else {})}

    def check(self) -> list[str]:
        """Make the environment, run a real command in its sandbox, draw its tasks, and report all three.

        An environment that does not ship with Composer is code of its author: it is found, and not imported.
        """
        if self._is_foreign():
            if (path := envs.foreign_file(self.env.name)) is None:
                raise UsageError("envs.no-module", name=self.env.name)
            unseen = Sentence("envs.dry-run-imports-nothing", name=self.env.name, path=path)
            return [unseen, *super().check()]
        make = self.opener()
        drawn = self.draw(make, getattr(self, "tasks", 1))
        sentence = Sentence("envs.tasks-drawn", name=self.env.name, num_tasks=len(drawn), split=self.env.split)
        sandbox = f", a command run under {self.sandbox}" if envs.has_option(self.env.name, "sandbox") else ""
        reasons = _report_reasons(make, drawn)
        grounds = Sentence(
            "envs.grounds-possible", num_tasks=len(drawn), reasons=reasons, most=task_table.MOST_REPORTED
        )
        return [sentence + sandbox, grounds, *self.remarks(drawn), *super().check()]

    def remarks(self, tasks: Sequence[Task]) -> list[str]:
        """Return remarks on these tasks before they are played, a clause each."""
        return []

    def draw(
        self, make: Callable[[], Environment], count: int, out: RunWriter | None = None, *, at_most: bool = False
    ) -> list[Task]:
        """Return the first `count` tasks of the split under the stage's seed; record in `out` what is left out.

        With `at_most`, and where nobody set `tasks`, so that `count` is a default, a split with fewer tasks gives all
        that it has. With `at_most` no remark is made. Raises `UsageError` where there is no task.
        """
        environment = make()
        try:
            with activity(Checking("preparing the tasks")):
                tasks = self._at_most(environment, count, at_most or self.counts_by_default())
            remarks = self.remarks(tasks)
            if isinstance(environment, LeavesOut) and (left_out := environment.left_out(self.env.split)):
                remarks.insert(0, f"{environment.name}: {left_out}")
                if out is not None:
                    out.set_summary(left_out=left_out)
            if out is not None:
                self._require_same_tasks(tasks, out)
                # An environment may have an option that names a run of tasks, too.
                if selected_by := task_table.selected_by([self.env.curriculum, *self.env.options.values()]):
                    out.set_summary(selected_by=selected_by)
            for remark in () if at_most else remarks:
                with activity(Notice(remark)):
                    pass
        except (ComposerError, OSError):
            raise
        except Exception as error:
            raise UsageError("envs.tasks-failed", name=self.env.name, reason=_describe_error(error)) from error
        finally:
            environment.close()
        if self.env.require == "values" and (reasons := _report_reasons(make, tasks)):
            most = task_table.MOST_REPORTED
            raise UsageError("envs.tasks-by-report", num_tasks=len(tasks), reasons=reasons, most=most)
        return tasks

    def _require_same_tasks(self, tasks: Sequence[Task], out: RunWriter) -> None:
        """Raise `BadInput` where the first attempt of a run drew other tasks: its rollouts are of those."""
        record, digest = out.scratch(DRAWN) / "tasks.json", store.digest([[t.task_id, t.prompt] for t in tasks])
        if record.is_file() and store.read_json(record) != digest:
            raise BadInput("envs.other-tasks", name=self.env.name)
        store.write_json(record, digest)

    def _at_most(self, environment: Environment, count: int, fewer: bool) -> list[Task]:
        try:
            return self._tasks(environment, count)
        except task_table.TooManyTasks as error:
            if not (fewer and error.most):
                raise
            return self._tasks(environment, error.most)

    def _tasks(self, environment: Environment, count: int) -> list[Task]:
        if self.env.curriculum:
            return task_table.read_tasks(self.env.curriculum, environment.name, self.env.split, count)
        if tasks := boundary.check_tasks(environment.tasks(self.env.split, count, self.seed), self.env.name):
            return tasks[:count]  # an environment may give all that it has, and what is played has its price
        raise UsageError("envs.no-task-of-split", name=self.env.name, split=self.env.split)

    def _is_foreign(self) -> bool:
        """Return whether the environment's code is not Composer's."""
        return ":" in self.env.name or (self.env.name in envs.ENVIRONMENTS and not envs.is_shipped(self.env.name))

    def with_tasks_drawn(self) -> StageConfig:
        """Return the settings with as many tasks as the split has, in place of a default that is larger."""
        if not self.counts_by_default() or self._is_foreign():
            return self
        return self.model_copy(update={"tasks": len(self.draw(self.opener(), getattr(self, "tasks", 1), at_most=True))})

    def tell_of_fewer(self, tasks: Sequence[Task], rollouts: int, out: RunWriter) -> None:
        """Report the number of rollouts where the split has fewer tasks than the default that the plan counts."""
        if len(tasks) < getattr(self, "tasks", 0):
            other_split = "eval" if self.env.split == "train" else "train"
            notice = Sentence(
                "envs.split-has-fewer",
                rollouts=rollouts,
                num_tasks=len(tasks),
                split=self.env.split,
                other_split=other_split,
            )
            out.progress(Notice(notice), 0, 0)

    def counts_by_default(self) -> bool:
        """Return whether the number of tasks is the default, so that a smaller split gives all of its tasks."""
        return "tasks" in type(self).model_fields and "tasks" not in self.model_fields_set


def _report_reasons(make: Callable[[], Environment], tasks: Sequence[Task]) -> dict[str, str]:
    """Return, by task, why a pass can be no more than a report; without those that can rest on values."""
    with closing(make()) as environment:
        if isinstance(environment, TellsGrounds):
            reasons = {task.task_id: environment.report_reason(task) for task in tasks}
        else:
            by_report = getattr(environment, "ground", None) == "report"
            reasons = dict.fromkeys((task.task_id for task in tasks if by_report), Sentence("envs.env-reports"))
    return {task_id: reason for task_id, reason in reasons.items() if reason}


def _describe_error(error: BaseException) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({frame.filename}, line {frame.lineno}, in {frame.name})"
