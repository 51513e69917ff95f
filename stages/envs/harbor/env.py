"""The environment `harbor`: tasks in Harbor's folder format, in containers or in bubblewrap, graded by their verifiers.

The agent works with bash on the machine that the task describes. `submit` ends a step: its verifier runs, and the agent
gets the instruction of the next step. The reward is that of the reward file, over several steps their mean, or the last
one where the task says so. A step that was not reached counts as 0; one whose min_reward is missed ends the task.
"""

import base64
import functools
import logging
import re
import shlex
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from composer_stages.data_files import load_toml
from composer_stages.envs import bash, folders
from composer_stages.envs.base import Grade, Observation, Split, Task, Work
from composer_stages.envs.bash import SUBMIT, ShellEnvironment, fenced, make_observation
from composer_stages.envs.folders import UnwieldyTree
from composer_stages.envs.harbor import machines, task_folder, verifying
from composer_stages.envs.harbor.machines import COMMAND_S, Machine, PlayedIn
from composer_stages.envs.harbor.task_folder import HarborStep, HarborTask
from composer_stages.envs.harbor.verifying import VerifierVerdict
from composer_stages.envs.task_table import DIVIDED_BY, MOST_REPORTED, check_eval_share, draw_rows, split_rows
from composer_stages.errors import BadInput, InfrastructureError, UsageError
from composer_stages.messages import Message
from composer_stages.runs import store
from composer_stages.runs.kinds import Row
from composer_stages.sandbox import containers
from composer_stages.terms import Ground
from composer_stages.words import Sentence

log = logging.getLogger(__name__)
PROMPTS = load_toml(__package__, "prompts.toml")
LONGEST_LOG = 1 << 20
SCRIPT_BYTES = 48 << 10
"""Base64 of a solution's files in one action; a command line takes 128 KiB."""
NAMED = re.compile(
    r"line \d+(, column \d+)?|(?<=RUN ).+(?= is not carried out)|(?<=image )\S+|(?<=services ).+(?=; only)"
    r"|(?<=needs )\d+|(?<=installs )\S+(?=,)|'[^']*'|\"[^\"]*\"|(?<=steps/)[^/]+|(?<=trajectory: )\S+"
)
"""What problems with the same reason name differently."""
RunsIn = Literal["auto", "docker", "podman", "bubblewrap"]


class HarborEnv(ShellEnvironment):
    """Implements Environment, TakesCalls, ReportsFaults, HasSize and HasSolutions.

    `path`: a folder of tasks, or one task. `runs_in`: "auto" is the engine that answers, else bubblewrap.
    `network`: "none", or "task" for what each task asks for, in containers. `limits`: whose time limits hold, those of
    the "task" or "ours" (300 s a command, the verifier's as the task has it). `skip_refused`: leave out the tasks that
    cannot be used or played here, and name them, instead of refusing all. `family`: the key of a task's metadata.
    Without splits in the metadata tasks are divided by family: `eval_share` of the families, drawn by `split_seed`.
    """

    name = "harbor"
    ground: Ground = "report"
    """A verifier that runs the agent's code reports what that code lets it, on whatever machine it runs."""
    opening_by_calls = PROMPTS["system_with_tools"]

    def __init__(
        self,
        sandbox: str = "bubblewrap",
        path: str = "",
        runs_in: RunsIn = "auto",
        network: Literal["none", "task"] = "none",
        limits: Literal["ours", "task"] = "ours",
        skip_refused: bool = False,
        family: str = "family",
        split_seed: int = 0,
        eval_share: float = 0.25,
        max_chars: int = 10_000,
    ) -> None:
        if not path:
            raise UsageError("envs.harbor.no-path")
        check_eval_share(eval_share)
        for key, value, allowed in (
            ("runs_in", runs_in, ("auto", *containers.ENGINES, "bubblewrap")),
            ("network", network, ("none", "task")),
            ("limits", limits, ("ours", "task")),
        ):
            if value not in allowed:
                raise UsageError("envs.harbor.unknown-choice", key=key, value=value, allowed=allowed)
        if sandbox == "none":
            raise UsageError("envs.harbor.needs-sandbox")
        self._place = PlayedIn(_find_engine(runs_in), network == "task")
        self._path, self._own_limits, self._skips = path, limits == "task", skip_refused
        self._family, self._split_seed, self._eval_share = family, split_seed, eval_share
        self.sandbox, self.max_chars, self._system = self._place.kind, max_chars, PROMPTS["system"]
        self._machine: Machine | None = None
        self._task: HarborTask | None = None

    @staticmethod
    def content(path: str = "", **options: Any) -> str | None:
        """Return a digest of all task folders, which a run's fingerprint contains: edited tasks are other tasks."""
        del options
        if not Path(path).expanduser().is_dir():
            return None
        tasks, problems = task_folder.load(path)
        return store.digest([[task.name, task.digest] for task in tasks] + problems)

    def tasks(self, split: Split, count: int, seed: int) -> list[Task]:
        """Return the first `count` tasks of a split in an order drawn from the seed, all of which can be played."""
        rows = draw_rows(self._path, self._rows(), split, count, seed)
        divisions = [{DIVIDED_BY: row[DIVIDED_BY]} if DIVIDED_BY in row else {} for row in rows]
        return [
            Task(row["id"], self.name, split, row["family"], row["prompt"], row["data"] | divided)
            for row, divided in zip(rows, divisions, strict=True)
        ]

    def size(self, split: Split) -> int:
        """Return the number of tasks of a split."""
        return len(self._rows()[split])

    def _rows(self) -> dict[Split, list[Row]]:
        """Return the rows of each split; BadInput names every task that cannot be used or played here."""
        playable, problems = task_folder.load(self._path, lambda task: machines.list_obstacles(task, self._place))
        if self._place.engine:
            missing = machines.find_missing_images(playable, self._place.engine)
            problems = [*problems, *missing]
            gone = {problem.partition(": ")[0] for problem in missing}
            playable = [task for task in playable if task.name not in gone]
        if problems and not self._skips:
            raise BadInput(
                "envs.harbor.unusable-tasks", path=self._path, refusals=_summarise_problems(problems, len(playable))
            )
        if problems:
            log.warning("%s: %s", self._path, _summarise_problems(problems, len(playable)))
        if not playable:
            raise BadInput("envs.harbor.no-tasks", path=self._path)
        return split_rows([self._row(task) for task in playable], self._split_seed, self._eval_share)

    def _row(self, task: HarborTask) -> Row:
        data = {"folder": str(task.folder), "digest": task.digest, "steps": len(task.steps)}
        data |= {"verifiers": ["separate" if step.separate else "shared" for step in task.steps]}
        family, prompt = task.family(self._family), task.steps[0].instruction
        return {"id": task.name, "family": family, "split": task.split, "prompt": prompt, "data": data}

    def reset(self, task: Task) -> list[Message]:
        """Start the task's machine, and wait until it is healthy."""
        self.close()
        folder = Path(task.data["folder"])
        try:
            self._task = harbor_task = task_folder.read(folder)
        except (task_folder.BadTask, OSError) as error:
            raise InfrastructureError("envs.harbor.task-unreadable", task_id=task.task_id, error=error) from None
        if harbor_task.digest != task.data["digest"]:
            raise InfrastructureError("envs.harbor.files-changed", folder=folder)
        self._label = task.task_id
        self._machine = machines.open_machine(harbor_task, harbor_task.container, self._place)
        self._workdir = self._machine.run("pwd", COMMAND_S).output.strip() or "/"
        if check := harbor_task.config.environment.healthcheck:
            machines.check_health(self._machine, check)
        self._verdicts: list[VerifierVerdict] = []
        self.well_formed, self._submitted, self._over = True, False, False
        self._failure: InfrastructureError | None = None
        self._begin(harbor_task.steps[0])
        return [
            {"role": "system", "content": self._system.format(folder=self._workdir)},
            {"role": "user", "content": harbor_task.steps[0].instruction},
        ]

    def _begin(self, step: HarborStep) -> None:
        """Set up a step: its files, its setup.sh, its health check; its time begins."""
        machine, task = self._open()
        if step.workdir:
            machine.upload(task.folder / step.workdir, self._workdir)
            if (task.folder / step.workdir / "setup.sh").exists():
                result = machine.run("bash ./setup.sh", COMMAND_S, user=step.agent_user)
                if result.returncode:
                    raise InfrastructureError("envs.harbor.setup-failed", step=step.name, output=result.output[-200:])
        if step.healthcheck:
            machines.check_health(machine, step.healthcheck)
        self._step, self._started = step, time.monotonic()

    def _open(self) -> tuple[Machine, HarborTask]:
        if self._machine is None or self._task is None:
            raise RuntimeError("reset() comes before step() and grade()")
        return self._machine, self._task

    def run_command(self, command: str) -> Observation:
        """Run a command, or end the step."""
        machine, _ = self._open()
        if command.strip() == SUBMIT:
            return self._submit(command)
        wall_s = COMMAND_S
        if self._own_limits and self._step.agent_timeout_s is not None:
            wall_s = self._started + self._step.agent_timeout_s - time.monotonic()
            if wall_s <= 0:
                return Observation(Sentence("envs.harbor.time-is-over"), commands=(command,), stop="wall_time")
        return make_observation(command, machine.run(command, wall_s, user=self._step.agent_user), self.max_chars)

    def _submit(self, command: str) -> Observation:
        """Verify a step before the last, and return the next step's instruction."""
        _, task = self._open()
        following = task.steps.index(self._step) + 1
        if following < len(task.steps):
            try:
                self._verdicts.append(self._verified())
                self._over = _misses_min_reward(self._step, self._verdicts[-1].rewards)
            except (InfrastructureError, OSError) as error:
                self._failure = error if isinstance(error, InfrastructureError) else InfrastructureError(str(error))
            if not self._over and self._failure is None:
                self._begin(task.steps[following])
                return Observation(self._step.instruction, commands=(command,), returncode=0)
        self._submitted = True
        return Observation("", commands=(command,), stop="submitted")

    def _verified(self) -> VerifierVerdict:
        """Run the verifier of the current step; too many artifacts give zero, as the agent made them."""
        machine, task = self._open()
        try:
            start = functools.partial(machines.open_machine, task, host=self._place)
            return verifying.verify(task, self._step, machine, start)
        except UnwieldyTree as error:
            log.warning("%s: %s", self._label, error)
            return VerifierVerdict({"reward": 0.0}, str(error), planted=False)

    def grade(self) -> Grade:
        """Run the verifier of the current step and return the task's reward; null with the reason where it has none."""
        machine, task = self._open()
        work = Work(image=machine.description, submission="" if self._submitted else None)
        protocol_ok = self.well_formed and self._submitted
        try:
            if self._failure is not None:
                raise self._failure
            verdicts = self._verdicts if self._over else [*self._verdicts, self._verified()]
        except (InfrastructureError, OSError) as error:
            return Grade(None, protocol_ok=protocol_ok, error_type=type(error).__name__, error=str(error), work=work)
        reached = len(verdicts) == len(task.steps) or self._over or _misses_min_reward(self._step, verdicts[-1].rewards)
        rewards = [verdict.rewards["reward"] for verdict in verdicts]
        if task.config.multi_step_reward_strategy == "final":
            reward = rewards[-1] if reached else 0.0
        else:
            reward = sum(rewards) / (len(rewards) if reached else len(task.steps))
        text, _ = bash.elide("".join(verdict.log for verdict in verdicts), LONGEST_LOG)
        planted = any(verdict.planted for verdict in verdicts)
        work = replace(work, test_log=text, metrics=_metrics(task, verdicts))
        return Grade(reward, reward >= 1, None, planted, protocol_ok, work=work)

    def solution(self) -> list[str]:
        """Return the messages that write each step's solution to /solution, run it, and submit."""
        _, task = self._open()
        actions = []
        for step in task.steps:
            if step.solution is None:
                raise InfrastructureError("envs.harbor.no-solution", task_id=self._label)
            actions += [fenced(script) for script in _write_commands(task.folder / step.solution)]
            env = {"DEBIAN_FRONTEND": "noninteractive", **task.config.solution.env}
            variables = " ".join(f"{key}={shlex.quote(value)}" for key, value in env.items())
            actions += [fenced(f"env {variables} /solution/{task_folder.SOLVE_SCRIPT}"), fenced(SUBMIT)]
        return actions

    def close(self) -> None:
        """End the machine; safe to call twice."""
        machine, self._machine = self._machine, None
        if machine is not None:
            machine.close()


def _summarise_problems(problems: Sequence[str], num_playable: int) -> Sentence:
    """Summarise problems: the number of playable tasks, the count of each reason, and the first problems."""
    counts = Counter(NAMED.sub("...", problem.partition(": ")[2]) for problem in problems)
    values = {"reasons": counts.most_common(MOST_REPORTED), "problems": problems, "most": MOST_REPORTED}
    return Sentence("envs.harbor.refused-tasks", num_playable=num_playable, **values)


def _find_engine(runs_in: RunsIn) -> str | None:
    """Return the program of the engine that a setting asks for; None for bubblewrap."""
    if runs_in == "bubblewrap":
        return None
    program = containers.find_engine()
    if runs_in == "auto":
        return program
    failure = containers.engine_failure(runs_in)
    if failure is not None:
        raise UsageError("envs.harbor.engine-missing", runs_in=runs_in, failure=failure)
    return runs_in


def _metrics(task: HarborTask, verdicts: Sequence[VerifierVerdict]) -> dict[str, float] | None:
    """Return the further numbers of the reward files, those of steps as STEP/NAME; None without any."""
    several = len(task.steps) > 1
    metrics = {
        f"{step.name}/{key}" if several else key: value
        for step, verdict in zip(task.steps, verdicts, strict=False)  # later steps may not have been reached
        for key, value in verdict.rewards.items()
        if several or key != "reward"
    }
    return metrics or None


def _misses_min_reward(step: HarborStep, rewards: Mapping[str, float]) -> bool:
    """Return whether a step's rewards are below its min_reward, which ends the task."""
    least = step.min_reward if isinstance(step.min_reward, Mapping) else {"reward": step.min_reward}
    return any(value is not None and rewards.get(key, float("-inf")) < value for key, value in least.items())


def _write_commands(folder: Path) -> list[str]:
    """Return commands that write a folder's files to /solution, each short enough for a command line."""
    commands, script = list[str](), "mkdir -p /solution && rm -rf /solution/*"
    for entry in folders.entries(folder):
        path = folder / entry.path
        if entry.is_folder or not path.is_file():
            continue
        name, data = shlex.quote(f"/solution/{entry.path}"), path.read_bytes()
        script += f'\nmkdir -p "$(dirname {name})" && : > {name}'
        for start in range(0, len(data), SCRIPT_BYTES * 3 // 4):
            piece = base64.encodebytes(data[start : start + SCRIPT_BYTES * 3 // 4]).decode()
            if len(script) + len(piece) > SCRIPT_BYTES:
                commands.append(script.strip())
                script = ""
            script += f"\nbase64 -d >> {name} <<'END'\n{piece}END"
        script += f"\nchmod {'755' if entry.status.st_mode & 0o100 or path.suffix == '.sh' else '644'} {name}"
    return [command for command in (*commands, script.strip()) if command]
