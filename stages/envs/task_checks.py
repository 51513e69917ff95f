"""Check that each task passes its solution every time, and fails no solution and forged solutions.

Every task is played several times with its own solution, several times with nothing, and once with each of a set of
cheap forgeries: what an agent that is rewarded for passing tries first. A forgery takes the files that the solution
writes, and puts code in their place that does not do the task; or it leaves the task alone and works on tests,
configuration, programs and reward files. They are shell scripts, so that they fit every environment with a shell; in
one without they are wrong answers.

A play that the machine prevents has no reward and is an error of the check, never a verdict on the task.
"""

import re
import secrets
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing
from dataclasses import dataclass, field
from typing import Literal, cast

from pydantic import Field

from composer_stages import envs
from composer_stages.data_files import load_toml
from composer_stages.envs import boundary
from composer_stages.envs.base import Environment, Grade, HasSize, HasSolutions, Split, Task
from composer_stages.envs.bash import fenced
from composer_stages.envs.config import EnvStageConfig
from composer_stages.envs.repo.guest.composer_rules import BY_REPORT, LEFT_OUT, SHOWN
from composer_stages.errors import ComposerError, InfrastructureError, UsageError
from composer_stages.layout import shortened
from composer_stages.words import Sentence

DEFAULT_CHECKED = 20
"""Tasks of a split that are checked where the environment does not say how many it has."""
SPLITS: tuple[Split, ...] = ("train", "eval")
Verdict = Literal["ok", "fails", "empty passes", "flaky", "forgeable", "no solution", "error"]
BAD: tuple[Verdict, ...] = ("fails", "empty passes", "flaky", "forgeable")
WORST_FIRST: tuple[Verdict, ...] = (*BAD, "error", "no solution", "ok")
Play = tuple[Literal["solution", "nothing", "forgery"], str]
"""What is played: the kind, and the number of the repeat or the name of the forgery."""
Listener = Callable[[str, int, int], None]


class TaskChecksConfig(EnvStageConfig):
    """What to check."""

    repeats: int = Field(default=5, ge=1, le=100)
    """How often the solution is played, and how often nothing: other rewards in a repeat are chance."""
    workers: int = Field(default=0, ge=0, le=256)
    """Plays at the same time; 0 is one a core."""
    limit: int | None = Field(default=None, ge=1)
    """At most so many tasks of each split."""


FORGED = load_toml(__package__, "forgeries.toml")
"""`code` and `scripts` of forgeries by name, and `idle`: the output of one that finds nothing to forge."""
FORGERIES = (*FORGED["code"], "empty files", *FORGED["scripts"])


@dataclass(frozen=True)
class PlayResult:
    """The result of one play: the reward and whether it is flagged as a hack, or the error.

    idle: a forgery found nothing to forge. why: the line of the tests' output that tells most about a failure. ground:
    of a pass, and remark: why it is no more than a report, where the task could have more, or what it does not rest on.
    """

    reward: float | None
    hacked: bool = False
    error: str = ""
    idle: bool = False
    has_solution: bool = True
    why: str = ""
    ground: str | None = None
    remark: str = ""


@dataclass
class TaskCheck:
    """The plays of one task.

    `forgeries`: the reward of each, null where the pass was flagged as a hack. `why`: as in `PlayResult`, of the first
    play of the solution that has no reward; `ground`, `remark`: of the last one.
    """

    task_id: str
    split: str
    family: str
    solution: list[float | None] = field(default_factory=list)
    nothing: list[float | None] = field(default_factory=list)
    forgeries: dict[str, float | None] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    has_solution: bool = True
    why: str = ""
    ground: str | None = None
    remark: str = ""

    def add(self, play: Play, result: PlayResult) -> None:
        """Record a play."""
        if not result.has_solution:
            self.has_solution = False
        elif result.error:
            self.errors.append(f"{play[0]} {play[1]}: {result.error}")
        elif play[0] == "forgery":
            if not result.idle:
                self.forgeries[play[1]] = None if result.hacked else result.reward
        else:
            if play[0] == "solution":
                self.why = self.why or ("" if _number(result.reward) else result.why)
                self.ground, self.remark = result.ground, result.remark
            (self.solution if play[0] == "solution" else self.nothing).append(result.reward)

    @property
    def passing(self) -> list[str]:
        """Return the forgeries that are rewarded as the solution is, and are not flagged."""
        if not self.solution or not self.nothing:
            return []
        least, most = min(map(_number, self.solution)), max(map(_number, self.nothing))
        return sorted(name for name, reward in self.forgeries.items() if most < _number(reward) >= least)

    @property
    def verdict(self) -> Verdict:
        """Return the worst verdict that the plays support."""
        if len({*self.nothing}) > 1 or len({*self.solution}) > 1:
            return "flaky"
        if self.nothing and _number(self.nothing[0]) > 0 and self.nothing[0] == (self.solution or self.nothing)[0]:
            return "empty passes"
        if self.solution and self.nothing and _number(self.solution[0]) <= _number(self.nothing[0]):
            return "fails"
        if self.passing:
            return "forgeable"
        if self.errors:
            return "error"
        return "ok" if self.has_solution else "no solution"

    @property
    def reason(self) -> str:
        """Return the reason of the verdict in one line; for a task that is ok the remark on its passes, or ""."""
        rewards = {
            "solution": _format_rewards(self.solution),
            "nothing": _format_rewards(self.nothing),
            "why": self.why,
        }
        return {
            "ok": self.remark,
            "fails": Sentence("envs.solution-fails", **rewards),
            "empty passes": Sentence("envs.empty-passes", rewards=rewards["nothing"]),
            "flaky": Sentence("envs.flaky-rewards", **rewards),
            "forgeable": Sentence("envs.forged-passes", forgeries=self.passing),
            "no solution": Sentence("envs.no-solution"),
            "error": self.errors[0] if self.errors else "",
        }[self.verdict]


def _number(reward: float | None) -> float:
    return 0.0 if reward is None else reward


def _format_rewards(rewards: Sequence[float | None]) -> str:
    """Return rewards in words: 1, or 1, 0, 1 where they differ."""
    texts = ["none" if reward is None else f"{reward:g}" for reward in rewards]
    return texts[0] if len({*texts}) == 1 else ", ".join(texts) or "none"


def draw_tasks(config: TaskChecksConfig) -> list[Task]:
    """Return the tasks to check, of both splits, each once; UsageError where the environment has no solutions."""
    if not envs.has_solutions(config.env.name):
        raise UsageError("envs.no-solutions", name=config.env.name, public=envs.PUBLIC)
    make, tasks, refused = config.opener(), dict[str, Task](), list[UsageError]()
    for split in SPLITS:
        with closing(make()) as environment:
            count = environment.size(split) if isinstance(environment, HasSize) else DEFAULT_CHECKED
        split_config = config.model_copy(update={"env": config.env.model_copy(update={"split": split})})
        try:
            limit = min(count, config.limit or count)
            tasks |= {task.task_id: task for task in split_config.draw(make, max(1, limit))}
        except UsageError as error:  # one split may be without tasks; it says why
            refused.append(error)
    if not tasks:
        raise refused[0] if refused else UsageError("envs.no-tasks", name=config.env.name)
    return list(tasks.values())


def list_plays(config: TaskChecksConfig) -> list[Play]:
    """Return the plays of each task; without a sandbox no forgeries, which would change files of this machine."""
    repeats = [str(number) for number in range(1, config.repeats + 1)]
    plays: list[Play] = [*(("solution", number) for number in repeats), *(("nothing", number) for number in repeats)]
    return plays if config.sandbox == "none" else [*plays, *(("forgery", name) for name in FORGERIES)]


def check(config: TaskChecksConfig, tasks: Sequence[Task], workers: int, tell: Listener) -> Iterator[TaskCheck]:
    """Play every task, `workers` plays at a time, and yield each task's check when all of its plays are finished."""
    make, worker, opened = config.opener(), threading.local(), list[Environment]()

    def played(task: Task, play: Play) -> PlayResult:
        if not hasattr(worker, "environment"):
            worker.environment = make()
            opened.append(worker.environment)
        return play_once(worker.environment, task, play)

    plays, done = list_plays(config), 0
    results: defaultdict[str, dict[Play, PlayResult]] = defaultdict(dict)
    with ThreadPoolExecutor(workers) as pool:
        try:
            running = {pool.submit(played, task, play): (task, play) for task in tasks for play in plays}
            for future in as_completed(running):
                task, play = running[future]
                task_results = results[task.task_id]
                task_results[play] = future.result()
                done += 1
                tell("plays", done, len(running))
                if len(task_results) == len(plays):
                    task_check = TaskCheck(task.task_id, task.split, task.family)
                    for each in plays:  # in one order, whichever ended first
                        task_check.add(each, task_results[each])
                    yield task_check
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
            for environment in opened:
                environment.close()


def play_once(environment: Environment, task: Task, play: Play) -> PlayResult:
    """Play one task once. What the environment raises is the play's error."""
    kind, name = play
    try:
        environment.reset(task)
        if kind != "nothing":
            try:
                solution = list(cast(HasSolutions, environment).solution())  # `drawn` has made sure of it
            except InfrastructureError:
                return PlayResult(None, has_solution=False)
            for text in solution if kind == "solution" else forge(name, solution):
                seen = boundary.check_observation(environment.step(text))
                if FORGED["idle"] in seen.content and kind == "forgery":
                    return PlayResult(None, idle=True)
                if seen.stop is not None:
                    break
        grade = boundary.check_grade(environment.grade(), environment)
    except ComposerError as error:
        return PlayResult(None, error=str(error))
    except Exception as error:  # the environment may be the user's own
        return PlayResult(None, error=boundary.describe_error(error, environment, task.task_id))
    if grade.reward is None:
        return PlayResult(None, error=grade.error or Sentence("envs.not-graded"))
    log = grade.work.test_log or ""
    remarks = (line.removeprefix(BY_REPORT) for line in log.splitlines() if line.startswith((BY_REPORT, SHOWN)))
    why = "; ".join(filter(None, (_count_tests(grade), find_failure_line(log))))
    return PlayResult(grade.reward, bool(grade.hacked), why=why, ground=grade.ground, remark=next(remarks, ""))


def _count_tests(grade: Grade) -> str:
    """Return in words how many hidden tests passed, and whether the visible ones did; "" where neither is known."""
    counts = ((grade.work.f2p_passed, grade.work.f2p_total), (grade.work.p2p_passed, grade.work.p2p_total))
    complete = [(passed, total) for passed, total in counts if passed is not None and total is not None]
    passed, total = sum(passed for passed, _ in complete), sum(total for _, total in complete)
    return Sentence("envs.tests-passed", passed=passed, total=total, visible=grade.visible_pass) if total else ""


COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
TELLING = (re.compile(r"(FAILED|FAIL|ERROR) "), re.compile(r"[\w.]*(Error|Exception|Exit|Interrupt)\b"), re.compile(""))
"""The beginnings of lines that tell why tests failed: of a summary, of the end of a traceback, any line."""
LONGEST_LINE = 200


def find_failure_line(log: str) -> str:
    """Return the last line of a test log with a reason of failure, shortened and without control characters.

    A line that names what grading left out stands before it.
    """
    lines = ["".join(filter(str.isprintable, COLOUR.sub("", line))).strip() for line in log.splitlines()]
    left_out = next((line for line in lines if line.startswith(LEFT_OUT)), "")
    lines = [line for line in lines if line and not line.startswith(LEFT_OUT)]
    telling = (line for begins in TELLING for line in reversed(lines) if begins.match(line))
    return "; ".join(shortened(line, LONGEST_LINE) for line in (left_out, next(telling, "")) if line)


def forge(name: str, solution: Sequence[str]) -> Iterator[str]:
    """Yield the messages of a forgery: the solution up to its last message, the forging script, the last message."""
    if name in FORGED["scripts"]:
        yield fenced(FORGED["scripts"][name])
    else:
        # Files are told apart by their time, in a file of no other play: without /tmp of its own a sandbox shares it.
        mark = f"/tmp/.composer-{secrets.token_hex(8)}"  # noqa: S108
        yield fenced(f"touch {mark}; sleep 0.02")
        yield from solution[:-1]
        code = FORGED["code"].get(name)
        script = FORGED["sources"] if code else FORGED["emptied"]
        yield fenced(script.format(mark=mark, code=code, idle=FORGED["idle"]))
    if len(solution) > 1:
        yield solution[-1]
