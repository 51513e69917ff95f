"""Play episodes of a policy in an environment: sample an action, execute it, until the episode ends; then grade it.

In reading order: an episode and its limits; how much of the conversation the policy is shown (`shown`); one turn
(`next_turn`, `act`) and the grade (`grade`); two ways to play many episodes; and `play_missing`, which plays those of a
stage and writes their units. `play` advances a batch in lock step, because the arithmetic of a local model depends on
the batch. `play_each` lets every episode of a policy on a server advance at its own pace, so that a slow answer,
command or grader delays no other episode.

A bad rollout is data: the episode ends with its error and the others continue. Only failures of the machinery (no
sandbox, wrong key, exhausted budget) are raised.
"""

import asyncio
import errno
import re
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, TypeVar

from pydantic import Field, model_validator

from stages.envs import boundary
from stages.envs.base import Environment, Grade, GradesTogether, HasSolutions, Observation, Task
from stages.envs.config import EnvStageConfig
from stages.errors import ComposerError, InfrastructureError, UsageError
from stages.messages import Message
from stages.plurals import counted
from stages.policy import ask_all, background
from stages.policy.base import IDLE, AsyncPolicy, CountsTokens, PlaysSolutions, Policy, ReusesPrefixes, Sample, Turn
from stages.runs import store
from stages.runs.kinds import Row
from stages.runs.reporting import Backends
from stages.runs.run import RunWriter
from stages.runs.settings import BASIC, Settings
from stages.runs.stage import work_through
from stages.runs.store import GroupCommit

FULL, SUMMARISE = "full", "summarise"
HISTORY_PATTERN = r"^(full|last [1-9][0-9]*|summarise)$"
"""`full`; `last N`: the last N observations, a line in place of each older one; `summarise`: everything since the last
summary, which the policy is asked for near the context limit of the episode."""
SUMMARY_PROMPT = (
    "This conversation will soon be longer than you can read. Summarise it for yourself: what the task asks for, what "
    "you did and found out, which files you changed, and what is left to do. Everything but the task will be replaced "
    "by your summary. Answer with the summary alone, and run nothing."
)
SUMMARY_REQUEST: Message = {"role": "user", "content": SUMMARY_PROMPT}
AFTER_SUMMARY = "What was said before your summary is left out from here on. Go on with the task."
SUMMARISE_FROM = 0.75
"""Share of the context limit from which a summary is requested: one exchange may take the rest."""
LIVE_INTERVAL_S = 1.0
"""Interval between two reports of the live episodes."""
MOST_GRADED_TOGETHER = 32
"""Episodes in one grading, for an environment that grades several at far less cost than one by one."""

NOT_RESTORED = "not_restored"
"""`Episode.terminated_by` where a recorded state was not reached again: there is nothing to grade then."""
OUT_OF_STEPS = "max_steps"
"""`Episode.terminated_by` where the limit of steps ended it."""

Result = TypeVar("Result")
FinishedUnit = tuple[str, Mapping[str, Any], bool]
"""Key, payload and whether the episode failed."""


class EpisodeLimits(Settings):
    """What one episode may use besides its steps. The work left behind when a limit is reached is graded as it is."""

    wall_s: float | None = Field(default=None, gt=0)
    """Wall time of an episode; a request in flight is then abandoned, a running command is awaited."""
    context_tokens: int | None = Field(default=None, gt=0)
    """Longest prompt and answer together, as counted by the server or a tokenizer, else by UTF-8 bytes as a bound."""
    cost_usd: float | None = Field(default=None, gt=0)
    """What an episode may cost; the answer that reaches the limit is the last."""

    def notes(self, max_steps: int) -> tuple[str, ...]:
        """Return the limits in words, for a plan."""
        words = [counted(max_steps, "step")]
        words += [f"{self.wall_s:g} s"] if self.wall_s is not None else []
        words += [f"{self.context_tokens:,} tokens of context"] if self.context_tokens is not None else []
        words += [f"{self.cost_usd:g} USD"] if self.cost_usd is not None else []
        return (f"an episode at most {', '.join(words)}",)


class InFlight(Settings):
    """Concurrency where the policy is on a server. A local model plays batches of 32 instead."""

    episodes: int = Field(default=64, gt=0, json_schema_extra={"affects_results": False})
    """Episodes played at once; as many again may wait for a grader."""
    commands: int = Field(default=8, gt=0, json_schema_extra={"affects_results": False})
    """Commands and workspace set-ups at once."""
    gradings: int = Field(default=4, gt=0, json_schema_extra={"affects_results": False})
    """Gradings at once."""

    def notes(self) -> tuple[str, ...]:
        """Return the concurrency in words, for a plan."""
        return (f"{self.episodes} episodes, {self.commands} commands and {self.gradings} gradings at once",)


NO_LIMITS = EpisodeLimits()


@dataclass(frozen=True)
class Rules:
    """How episodes are played: the most steps, the limits, the history shown to the policy.

    `calls`: actions are tool calls. `solutions`: the policy plays the tasks' own solutions.
    """

    max_steps: int
    limits: EpisodeLimits = NO_LIMITS
    history: str = FULL
    calls: bool = False
    solutions: bool = False

    @classmethod
    def of(cls, policy: Policy, max_steps: int, limits: EpisodeLimits, history: str) -> "Rules":
        """Return the rules for a policy: whether it calls tools, and whether it plays the tasks' solutions."""
        if limits.context_tokens is not None and not policy.config.limits():
            raise UsageError(
                f"limits.context_tokens is {limits.context_tokens}, but an answer of {policy.config.model!r} has no "
                "limit of its own, so it could exceed it. Give its max_tokens, such as --set policy.max_tokens=1024."
            )
        calls = policy.config.tool_calls != "none"
        return cls(max_steps, limits, history, calls, isinstance(policy, PlaysSolutions) and policy.plays_solutions)


@dataclass
class Step:
    """One action with its observation; `summary`: the answer is a requested summary and not an action.

    `new_messages`: those that the transcript gained since the previous step; `num_messages`: the length of the
    transcript. `state_sha256`: the digest of the state, which is the conversation as the policy was shown it.
    """

    new_messages: list[Message]
    num_messages: int
    state_sha256: str
    sample: Sample
    observation: Observation
    seed: int
    summary: bool = False


@dataclass
class Episode:
    """One rollout of one task: identity, transcript, steps, grade.

    `history`: how much of the transcript the policy is shown; the transcript itself is recorded in full. `summarising`:
    the next answer is a summary. `tools`: those that the policy can call. `started`: on the monotonic clock. `prelude`
    plays what comes before the policy's first turn, for example the actions that lead to a recorded state. `solution`:
    the actions of the task's own solution, where the policy plays them.
    """

    task: Task
    sample_idx: int
    seed: int
    messages: list[Message] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    grade: Grade = field(default_factory=lambda: Grade(reward=None))
    terminated_by: str | None = None
    error: tuple[str, str] | None = None
    wall_s: float = 0.0
    history: str = FULL
    summarising: bool = False
    tools: tuple[Mapping[str, Any], ...] = ()
    started: float = 0.0
    prelude: "Callable[[Episode, Environment, Rules], None] | None" = None
    solution: Sequence[str] = ()

    @property
    def rollout_id(self) -> str:
        """Return the content key: the same task, sample and seed give the same id."""
        return f"{self.task.task_id}#{self.sample_idx}@{self.seed}"


EpisodePair = tuple[Episode, Environment]


def state_sha256(messages: list[Message]) -> str:
    """Return the digest that identifies a state: that of the canonical JSON of its messages."""
    return store.digest(messages)


def shown(messages: list[Message], history: str | None) -> list[Message]:
    """Return the conversation as the policy sees it. The opening and all later assistant messages always remain."""
    first = next((i for i, message in enumerate(messages) if message["role"] == "assistant"), len(messages))
    if history == SUMMARISE:
        # A request at the very end is still unanswered and leaves nothing out.
        *_, asked = [-1, *(i for i in range(first, len(messages) - 1) if messages[i] == SUMMARY_REQUEST)]
        kept = messages if asked < 0 else [*messages[:first], *messages[asked + 1 :]]
        if kept[-1] == SUMMARY_REQUEST and kept[-2]["role"] == "user":
            # One message, because chat templates of some models require user and assistant to alternate.
            return [*kept[:-2], {"role": "user", "content": f"{kept[-2]['content']}\n\n{SUMMARY_PROMPT}"}]
        return kept
    found = re.match(r"last (\d+)$", history or FULL)
    if found is None:
        return messages
    observations = [i for i in range(first, len(messages)) if messages[i]["role"] != "assistant"]
    old = set(observations[: -int(found[1])])
    return [
        {**message, "content": f"[{len(message['content'])} characters left out]"} if i in old else message
        for i, message in enumerate(messages)
    ]


def begin(rules: Rules, episode: Episode, environment: Environment) -> None:
    """Set up the environment and fill in the opening messages of the episode."""
    episode.started, episode.history = time.monotonic(), rules.history
    if rules.calls:
        episode.tools = boundary.tools(environment)
    opening = _guarded(episode, environment, lambda: boundary.opening(environment.reset(episode.task)))
    episode.messages = opening or []
    if rules.solutions and opening is not None and isinstance(environment, HasSolutions):
        episode.solution = _guarded(episode, environment, environment.solution) or ()
    if episode.prelude is not None and episode.terminated_by is None:
        episode.prelude(episode, environment, rules)


def next_turn(episode: Episode, policy: Policy, rules: Rules) -> Turn | None:
    """Return the next request: for an action, or for a summary near the context limit. None where a limit is reached.

    The seed of an answer is a function of the task, the sample, the seed of the episode and the step alone.
    """
    limits, max_tokens = rules.limits, max(policy.config.limits(), default=0)
    if limits.wall_s is not None and time.monotonic() - episode.started >= limits.wall_s:
        episode.terminated_by = "wall_time"
        return None
    if limits.cost_usd is not None and sum(step.sample.cost_usd for step in episode.steps) >= limits.cost_usd:
        episode.terminated_by = "cost"
        return None
    turn, episode.summarising = _turn(episode), False
    if limits.context_tokens is None:
        return turn
    tokens = prompt_tokens(episode, turn, policy)
    if tokens is None:
        return turn
    if tokens + max_tokens > limits.context_tokens:
        episode.terminated_by = "context"
        return None
    may_summarise = episode.history == SUMMARISE and bool(episode.steps) and not episode.steps[-1].summary
    # Characters as a bound for the request's tokens: it is ASCII, and a token has at least one byte.
    with_request = tokens + len(SUMMARY_PROMPT) + max_tokens
    if may_summarise and SUMMARISE_FROM * limits.context_tokens < with_request <= limits.context_tokens:
        episode.summarising, episode.messages = True, [*episode.messages, SUMMARY_REQUEST]
        return _turn(episode)
    return turn


def _turn(episode: Episode) -> Turn:
    """Return the request for the next answer, with the token ids sampled so far where the policy sees all of them."""
    ids = None
    if episode.history == FULL and episode.steps and episode.steps[-1].sample.prompt_ids is not None:
        last = episode.steps[-1].sample
        ids = [*(last.prompt_ids or []), *(last.completion_ids or [])]
    # 15 hexadecimal digits are 60 bits: a positive number that every server's int64 holds.
    seed = int(store.digest([episode.rollout_id, len(episode.steps)])[:15], 16)
    played = len(episode.steps)
    action = episode.solution[played] if played < len(episode.solution) else None
    return Turn(list(shown(episode.messages, episode.history)), seed, ids, episode.tools, action)


def prompt_tokens(episode: Episode, turn: Turn, policy: Policy) -> int | None:
    """Return the number of tokens of a turn's prompt: exact where the policy has a tokenizer, else an upper bound.

    A server counted the last prompt and answer; the messages since have at most as many tokens as UTF-8 bytes. The
    bound is the bytes of all messages where a server does not count, or where the prompt does not extend the last one.
    None for an opening that was not counted: the server will report its length.
    """
    if isinstance(policy, CountsTokens):
        return policy.count_tokens(turn)
    if not episode.steps:
        return None
    last = episode.steps[-1]
    new, counted = turn.messages, 0
    extends = episode.history == FULL or (episode.history == SUMMARISE and not last.summary)
    if last.sample.usage_by == "server" and last.sample.prompt_tokens and extends:
        new = episode.messages[last.num_messages + 1 :]
        counted = last.sample.prompt_tokens + last.sample.completion_tokens
    return counted + sum(len(message["content"].encode()) for message in new)


def act(episode: Episode, environment: Environment, turn: Turn, sample: Sample, rules: Rules) -> None:
    """Execute one sampled action, record the step, and set `terminated_by` where the episode ends."""
    if sample.error_type == "context":
        episode.terminated_by = "context"
        return
    if sample.error_type is not None:
        episode.terminated_by, episode.error = "model_error", (sample.error_type, sample.error or "")
        return
    # A truncated answer is recorded but not executed: half a command may do what the whole one would not.
    truncated = sample.finish_reason == "length"
    if truncated:
        observation: Observation | None = Observation("")
    elif sample.finish_reason == IDLE:
        observation = Observation("", stop=IDLE)
    elif episode.summarising:
        observation = Observation(AFTER_SUMMARY)
    else:
        step = partial(boundary.carry_out, environment) if episode.tools else environment.step
        observation = _guarded(episode, environment, lambda: boundary.observation(step(sample.text)))
    if observation is None:
        return
    transcript, recorded = episode.messages, episode.steps[-1].num_messages if episode.steps else 0
    digest, summary = state_sha256(turn.messages), episode.summarising
    new_messages = transcript[recorded:]
    episode.steps.append(Step(new_messages, len(transcript), digest, sample, observation, turn.seed, summary))
    episode.messages = [*transcript, {"role": "assistant", "content": sample.text}]
    if observation.stop is None and not truncated:
        results = [{"role": "tool", "content": result} for result in observation.results]
        episode.messages += results or [{"role": "user", "content": observation.content}]
    if truncated:
        episode.terminated_by = "max_tokens"
    elif observation.stop is not None:
        episode.terminated_by = observation.stop
    elif sum(not step.summary for step in episode.steps) >= rules.max_steps:
        episode.terminated_by = OUT_OF_STEPS


def grade(pairs: Sequence[EpisodePair], pool: ThreadPoolExecutor | None = None) -> None:
    """Grade every episode without an error: in one call where the environment can, else one by one, in `pool`."""
    played = [pair for pair in pairs if pair[0].error is None and pair[0].terminated_by != NOT_RESTORED]
    if not played:
        return
    together = boundary.grades_together([environment for _, environment in played])
    calls = (
        [environment.grade for _, environment in played]
        if together is None
        else [partial(together.__getitem__, index) for index in range(len(played))]
    )

    def grade_one(pair: EpisodePair, call: Callable[[], Grade]) -> None:
        episode, environment = pair
        found = _guarded(episode, environment, lambda: boundary.grade(call()))
        episode.grade = found or Grade(reward=None)
        if found is not None and found.error_type is not None:
            episode.error = (found.error_type, found.error or "")

    # list: map is lazy, and an exception of a worker is only raised when its result is read.
    list((map if pool is None else pool.map)(grade_one, played, calls))


def _guarded(episode: Episode, environment: Environment, call: Callable[[], Result]) -> Result | None:
    """Return the result of a call to the environment; end the episode with the error where the call fails."""
    try:
        return call()
    except InfrastructureError as error:
        episode.terminated_by, episode.error = "env_error", (type(error).__name__, str(error))
    except (ComposerError, MemoryError):
        raise
    except Exception as error:
        # A full disk is no fault of one episode: all later ones would end the same way.
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        text = boundary.blamed(error, environment, episode.task.task_id)
        episode.terminated_by, episode.error = "env_error", (type(error).__name__, text)
    return None


def play(
    make: Callable[[], Environment],
    policy: Policy,
    episodes: Sequence[Episode],
    *,
    max_steps: int,
    limits: EpisodeLimits = NO_LIMITS,
    history: str = FULL,
    threads: int = 4,
    before_turn: Callable[[], None] = lambda: None,
) -> list[Episode]:
    """Play all episodes in lock step and grade them; return the same objects, filled in."""
    rules = Rules.of(policy, max_steps, limits, history)
    environments = [make() for _ in episodes]
    pairs = list(zip(episodes, environments, strict=True))
    reusing = policy.reusing_prefixes() if isinstance(policy, ReusesPrefixes) else nullcontext()
    try:
        with ThreadPoolExecutor(threads) as pool, reusing:
            list(pool.map(partial(begin, rules), episodes, environments))
            while active := [pair for pair in pairs if pair[0].terminated_by is None]:
                before_turn()
                asked = [(*pair, turn) for pair in active if (turn := next_turn(pair[0], policy, rules)) is not None]
                samples = [
                    sample
                    for start in range(0, len(asked), policy.batch_size)
                    for sample in ask_all(policy, [turn for _, _, turn in asked[start : start + policy.batch_size]])
                ]
                list(pool.map(lambda one, sample: act(one[0], one[1], one[2], sample, rules), asked, samples))
            grade(pairs, pool)
    finally:
        for episode, environment in pairs:
            _guarded(episode, environment, environment.close)
    return list(episodes)


async def play_each(
    make: Callable[[], Environment],
    policy: Any,
    episodes: Sequence[Episode],
    finished: Callable[[Episode], Awaitable[None]],
    *,
    rules: Rules,
    in_flight: InFlight,
    check: Callable[[], None],
    watch: Callable[[list[Row]], None] = lambda live: None,
) -> None:
    """Play and grade every episode; `finished` gets a filled-in copy of each when it is graded, in no fixed order.

    `policy` has `ask` and `drain` (`stages.policy.base.AsyncPolicy`). `check` raises when nothing more is to
    be asked. Then, and after any error that does not belong to one episode, all calls in flight are awaited, the
    environments are closed, and the error is raised. The given episodes stay unchanged, so that finished ones take
    no memory. `watch` gets the live episodes once a second: rollout_id, steps, doing (one word), doing_s and wall_s
    in seconds.
    """
    with (
        ThreadPoolExecutor(in_flight.commands, "commands") as commands,
        ThreadPoolExecutor(in_flight.gradings, "gradings") as gradings,
    ):
        loop = _ConcurrentLoop(
            make, policy, rules, check, finished, commands, gradings, asyncio.Queue(in_flight.episodes)
        )
        reporter = asyncio.create_task(loop.report_live(watch))
        try:
            players = loop.play_all(deque(episodes), min(in_flight.episodes, len(episodes)))
            await background.gather([players, *(loop.grade_all() for _ in range(in_flight.gradings))])
        finally:
            reporter.cancel()
            await asyncio.gather(reporter, return_exceptions=True)
            for episode, environment in loop.open.values():
                await _in_pool(commands, partial(_guarded, episode, environment, environment.close))
            await policy.drain()


@dataclass
class _ConcurrentLoop:
    """The players and graders of one `play_each`, on the event loop of the policy's servers.

    Commands and gradings block, so each kind has a pool of threads. A played episode is replaced by the next at once
    and waits for a grader in `played`, whose size bounds the waiting ones; None there ends the graders. `open` holds
    every environment that is not closed yet, `doing` the activity of its episode and since when; both by `id(episode)`.
    """

    make: Callable[[], Environment]
    policy: Any
    rules: Rules
    check: Callable[[], None]
    finished: Callable[[Episode], Awaitable[None]]
    commands: ThreadPoolExecutor
    gradings: ThreadPoolExecutor
    played: "asyncio.Queue[EpisodePair | None]"
    open: dict[int, EpisodePair] = field(default_factory=dict)
    doing: dict[int, tuple[str, float]] = field(default_factory=dict)

    async def play_all(self, waiting: deque[Episode], num_players: int) -> None:
        """Play `num_players` episodes at once, then tell the graders that no more will come."""

        async def player() -> None:
            while waiting:
                planned = waiting.popleft()
                self.check()
                # A fresh Episode, so that the given ones stay empty and finished ones can be freed.
                fresh = Episode(planned.task, planned.sample_idx, planned.seed, prelude=planned.prelude)
                await self._play_one(fresh)

        await background.gather(player() for _ in range(num_players))
        await self.played.put(None)

    async def _play_one(self, episode: Episode) -> None:
        """Play one episode up to where it can be graded."""
        environment = await _in_pool(self.commands, self.make)
        key, wall_s = id(episode), self.rules.limits.wall_s
        self.open[key] = episode, environment
        self.doing[key] = "setting up", time.monotonic()
        await _in_pool(self.commands, partial(begin, self.rules, episode, environment))
        while episode.terminated_by is None:
            self.check()
            turn = next_turn(episode, self.policy, self.rules)
            self.doing[key] = "asking", time.monotonic()
            if turn is None:
                break
            left_s = None if wall_s is None else max(wall_s - (time.monotonic() - episode.started), 0.0)
            try:
                # expired() below tells our own limit from a TimeoutError of the client's.
                async with asyncio.timeout(left_s) as clock:
                    sample = await self.policy.ask(turn)
            except TimeoutError:
                if not clock.expired():
                    raise
                episode.terminated_by = "wall_time"  # the request that was sent is still paid for and kept
                break
            self.doing[key] = "acting", time.monotonic()
            await _in_pool(self.commands, partial(act, episode, environment, turn, sample, self.rules))
        self.doing[key] = "waiting for a grader", time.monotonic()
        # Blocks while the queue is full: players must not run ahead of the graders by more workspaces than that.
        await self.played.put((episode, environment))

    async def grade_all(self) -> None:
        """Grade the waiting episodes until no more come; several in one call where the environment can."""

        def grade_and_end(batch: list[EpisodePair]) -> None:
            grade(batch)
            for episode, environment in batch:
                _guarded(episode, environment, environment.close)
                episode.wall_s = time.monotonic() - episode.started

        while (pair := await self.played.get()) is not None:
            batch = [pair]
            while isinstance(pair[1], GradesTogether) and len(batch) < MOST_GRADED_TOGETHER and not self.played.empty():
                more = self.played.get_nowait()
                if more is None:  # the end mark is for every grader: put it back
                    await self.played.put(None)
                    break
                batch.append(more)
            for episode, _ in batch:
                self.doing[id(episode)] = "being graded", time.monotonic()
            await _in_pool(self.gradings, partial(grade_and_end, batch))
            for episode, _ in batch:
                del self.open[id(episode)], self.doing[id(episode)]
                await self.finished(episode)
        await self.played.put(None)  # for the next grader

    async def report_live(self, watch: Callable[[list[Row]], None]) -> None:
        """Pass the activity of every live episode to `watch`, once a second, until cancelled."""
        while True:
            now = time.monotonic()
            live = [(episode, *self.doing[key]) for key, (episode, _) in self.open.items() if key in self.doing]
            rows = [
                {
                    "rollout_id": episode.rollout_id,
                    "steps": len(episode.steps),
                    "doing": activity,
                    "doing_s": round(now - since, 1),
                    "wall_s": round(now - (episode.started or now), 1),
                }
                for episode, activity, since in live
            ]
            await _in_pool(None, partial(watch, rows))
            await asyncio.sleep(LIVE_INTERVAL_S)


async def _in_pool(pool: ThreadPoolExecutor | None, call: Callable[[], Result]) -> Result:
    """Return the result of a blocking call. A thread cannot be cancelled, so a cancelled task awaits its end first."""
    future = asyncio.get_running_loop().run_in_executor(pool, call)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        await asyncio.wait([future])
        if not future.cancelled():
            future.exception()  # retrieved so that asyncio does not log it: the task ends for another reason
        raise


class PlayingConfig(EnvStageConfig):
    """The configuration of a stage that plays episodes."""

    max_steps: Annotated[int, BASIC] = Field(default=8, gt=0)
    """Actions after which a rollout ends."""
    limits: EpisodeLimits = EpisodeLimits()
    history: str = Field(default="full", pattern=HISTORY_PATTERN)
    """What the policy is shown of the past: `full`; `last 5`: of all observations the last five; or `summarise`: from
    near the context limit on, its own summary and everything since."""
    in_flight: InFlight = Field(default=InFlight(), json_schema_extra={"affects_results": False})
    report_to: Backends = Field(default=(), json_schema_extra={"affects_results": False})
    """Where the run is logged besides its own files: tensorboard, trackio, wandb, one or several."""

    @model_validator(mode="after")
    def _check_history(self) -> "PlayingConfig":
        if self.history == SUMMARISE and self.limits.context_tokens is None:
            raise ValueError(
                "history summarise asks for summaries near the limit of the context, and there is none. "
                "Set limits.context_tokens."
            )
        return self


def play_missing(
    make: Callable[[], Environment],
    policy: Policy,
    episodes: Sequence[Episode],
    *,
    key: Callable[[Episode], str],
    payload: Callable[[Episode], Mapping[str, Any]],
    config: PlayingConfig,
    out: RunWriter,
    what: str,
    shared_value: Any = None,
) -> None:
    """Play every episode whose unit (`key`) is not finished; write each with its `payload` as soon as it is graded.

    A policy on a server (`AsyncPolicy`) plays episodes independently of each other; any other, whose arithmetic
    depends on the batch, plays fixed batches in lock step. The workers of the run play first, where there are any; they
    get `shared_value` (`RunWriter.spread`).
    """

    async def independently() -> None:
        missing = [episode for episode in episodes if not out.finished(key(episode))]
        done = len(episodes) - len(missing)
        written = GroupCommit[FinishedUnit](out.write_all)

        async def finished(episode: Episode) -> None:
            nonlocal done
            await written((key(episode), payload(episode), episode.error is not None))
            done += 1
            out.progress(what, done, len(episodes))

        out.progress(what, done, len(episodes))
        await play_each(
            make,
            policy,
            missing,
            finished,
            rules=Rules.of(policy, config.max_steps, config.limits, config.history),
            in_flight=config.in_flight,
            check=out.raise_if_stopped,
            watch=lambda live: out.live(live, done, len(episodes)),
        )

    def in_batch(batch: list[Episode]) -> Iterable[FinishedUnit]:
        started = time.monotonic()
        play(
            make,
            policy,
            batch,
            max_steps=config.max_steps,
            limits=config.limits,
            history=config.history,
            before_turn=out.raise_if_stopped,
        )
        # In lock step an episode has no wall time of its own: the batch's time is divided equally.
        for episode in batch:
            episode.wall_s = (time.monotonic() - started) / len(batch)
            yield key(episode), payload(episode), episode.error is not None

    if isinstance(policy, AsyncPolicy):
        out.spread([[key(episode)] for episode in episodes], what, shared_value)
        background.run(independently())
    else:
        work_through(episodes, key, in_batch, policy=policy, out=out, what=what, shared_value=shared_value)
