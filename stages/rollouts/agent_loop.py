"""The agent loop, one for all environments: sample, step, until the episode ends, then grade.

Here episodes of a batch advance in lock step, so that a local model samples them together; independent.py plays the
same turns each at its own pace. A bad rollout is data; only trouble with the machinery (no sandbox, wrong key, empty
budget) is raised.
"""

import asyncio
import errno
import re
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any, TypeVar

from pydantic import Field, model_validator

from stages.envs import boundary
from stages.envs.base import Environment, Grade, GradesTogether, Observation, Task
from stages.envs.boundary import carry_out
from stages.envs.config import EnvStageConfig
from stages.errors import ComposerError, InfrastructureError
from stages.messages import Message
from stages.policy import background
from stages.policy.background import Asks
from stages.policy.base import CountsTokens, Policy, Sample, Turn
from stages.runs import store
from stages.runs.artifact import Out
from stages.runs.config import Settings
from stages.runs.records import Row
from stages.runs.reporting import Backends
from stages.runs.stage import work_through
from stages.runs.store import Together

# ---- history
# History: how much of a conversation the policy is shown. What was said is recorded whole either way.

FULL, SUMMARISE = "full", "summarise"
PATTERN = r"^(full|last [1-9][0-9]*|summarise)$"
"""`full`; `last N`: of all observations the last N, of older ones a line in their place; `summarise`: since the last
summary, which the policy is asked for when the limit of an episode's context nears."""
REQUEST = (
    "This conversation will soon be longer than you can read. Summarise it for yourself: what the task asks for, what "
    "you did and found out, which files you changed, and what is left to do. Everything but the task will be replaced "
    "by your summary. Answer with the summary alone, and run nothing."
)
GO_ON = "What was said before your summary is left out from here on. Go on with the task."
NEAR = 0.75
"""A summary is asked for once that takes this share of the limit: one exchange may take the rest."""


def shown(messages: list[Message], history: str | None) -> list[Message]:
    """The conversation as the policy sees it. The opening always stays, and what the assistant said since."""
    first = next((i for i, message in enumerate(messages) if message["role"] == "assistant"), len(messages))
    if history == SUMMARISE:
        return _since_summary(messages, first)
    found = re.match(r"last (\d+)$", history or FULL)
    if found is None:
        return messages
    observed = [i for i in range(first, len(messages)) if messages[i]["role"] != "assistant"]
    old = set(observed[: -int(found[1])])
    return [_left_out(message) if i in old else message for i, message in enumerate(messages)]


def request() -> Message:
    """What asks for a summary."""
    return {"role": "user", "content": REQUEST}


def _since_summary(messages: list[Message], first: int) -> list[Message]:
    """The opening, the last summary and what came since; a request for one is the end of what stands before it.

    One message, because templates of some models want user and assistant to take turns.
    """
    *_, asked = [-1, *(i for i in range(first, len(messages) - 1) if messages[i] == request())]
    kept = messages if asked < 0 else [*messages[:first], *messages[asked + 1 :]]
    if kept[-1] == request() and kept[-2]["role"] == "user":
        return [*kept[:-2], {"role": "user", "content": f"{kept[-2]['content']}\n\n{REQUEST}"}]
    return kept


def _left_out(message: Message) -> Message:
    return {**message, "content": f"[{len(message['content'])} characters left out]"}


# ---- limits
# Limits: what ends an episode early, with its work graded, and how much goes on at once.


class EpisodeLimits(Settings):
    """What one episode may use beside its steps. What it left behind is graded as it stands when a limit is reached."""

    wall_s: float | None = Field(None, gt=0)
    """Wall time of an episode; a request that is under way then is given up, a command is waited for."""
    context_tokens: int | None = Field(None, gt=0)
    """Longest prompt and answer together, as counted by the server or a tokenizer, else by UTF-8 bytes as a bound."""
    cost_usd: float | None = Field(None, gt=0)
    """What an episode may cost; the answer that reaches it is its last."""

    def reached(
        self, seconds: float, cost_usd: float, prompt_tokens: Callable[[], int | None], max_tokens: int
    ) -> str | None:
        """The limit that ends an episode before its next answer: "wall_time", "cost" or "context"; None: it goes on.

        Arguments: what the episode has taken and cost, how long the next prompt is (None: nobody knows), and how long
        the answer to it may be.
        """
        if self.wall_s is not None and seconds >= self.wall_s:
            return "wall_time"
        if self.cost_usd is not None and cost_usd >= self.cost_usd:
            return "cost"
        if self.context_tokens is not None:
            tokens = prompt_tokens()
            if tokens is not None and tokens + max_tokens > self.context_tokens:
                return "context"
        return None

    def nears(self, prompt_tokens: int | None, max_tokens: int) -> bool:
        """Whether the limit of the context nears: a summary is asked for while that still fits."""
        if self.context_tokens is None or prompt_tokens is None:
            return False
        return NEAR * self.context_tokens < prompt_tokens + len(REQUEST) + max_tokens <= self.context_tokens

    def notes(self, max_steps: int) -> tuple[str, ...]:
        """The limits in words, for a plan."""
        words = [f"{max_steps} steps"]
        words += [f"{self.wall_s:g} s"] if self.wall_s is not None else []
        words += [f"{self.context_tokens:,} tokens of context"] if self.context_tokens is not None else []
        words += [f"{self.cost_usd:g} USD"] if self.cost_usd is not None else []
        return (f"an episode at most {', '.join(words)}",)


class InFlight(Settings):
    """How much goes on at once where the policy is on a server. A local model plays batches of 32 instead."""

    episodes: int = Field(64, gt=0, json_schema_extra={"affects_results": False})
    """Episodes being played; as many again may wait to be graded."""
    commands: int = Field(8, gt=0, json_schema_extra={"affects_results": False})
    """Commands, and workspaces being set up."""
    gradings: int = Field(4, gt=0, json_schema_extra={"affects_results": False})
    """Gradings."""

    def notes(self) -> tuple[str, ...]:
        """The numbers in words, for a plan."""
        return (f"{self.episodes} episodes, {self.commands} commands and {self.gradings} gradings at once",)


NO_LIMITS = EpisodeLimits()


@dataclass(frozen=True)
class Rules:
    """How episodes are played: at most so many steps, within limits, showing so much of the past (history.py).

    `calls`: actions are tool calls.
    """

    max_steps: int
    limits: EpisodeLimits = NO_LIMITS
    history: str = FULL
    calls: bool = False


# ---- turns
# What a policy is asked next in an episode: an action, or a summary where the limit of its context nears.


def next_turn(episode: "Episode", policy: Policy, rules: Rules) -> Turn | None:
    """What to ask next; None where a limit ends the episode."""
    turn = _turn(episode)
    length = cache(lambda: prompt_tokens(episode, turn, policy))
    episode.terminated_by = rules.limits.reached(
        time.monotonic() - episode.started,
        sum(step.sample.cost_usd for step in episode.steps),
        length,
        policy.config.max_tokens,
    )
    if episode.terminated_by is not None:
        return None
    may = episode.history == SUMMARISE and bool(episode.steps) and not episode.steps[-1].summary
    episode.summarising = may and rules.limits.nears(length(), policy.config.max_tokens)
    if not episode.summarising:
        return turn
    episode.messages = [*episode.messages, request()]
    return _turn(episode)


def _turn(episode: "Episode") -> Turn:
    seed = step_seed(episode, len(episode.steps))
    return Turn(list(shown(episode.messages, episode.history)), seed, episode.held_ids, episode.tools)


def prompt_tokens(episode: "Episode", turn: Turn, policy: Policy) -> int | None:
    """How many tokens a turn's prompt has: counted where a tokenizer is at hand, else at most so many.

    A server counted the last prompt and answer, and what came since has at most as many tokens as UTF-8 bytes; from a
    server that does not count, or where the prompt does not go on from the last one, the bytes of it all. None for an
    opening that nobody counted: the server will tell.
    """
    if isinstance(policy, CountsTokens):
        return policy.count_tokens(turn)
    if not episode.steps:
        return None
    last = episode.steps[-1]
    new, counted = turn.messages, 0
    goes_on = episode.history == FULL or (episode.history == SUMMARISE and not last.summary)
    if last.sample.usage_by == "server" and last.sample.prompt_tokens and goes_on:
        new = episode.messages[last.num_messages + 1 :]
        counted = last.sample.prompt_tokens + last.sample.completion_tokens
    return counted + sum(len(message["content"].encode()) for message in new)


def step_seed(episode: "Episode", step: int) -> int:
    """The seed of one answer: a function of task, sample, the episode's seed and the step alone."""
    return int(store.digest([episode.rollout_id, step])[:15], 16)


Answer = TypeVar("Answer")


@dataclass
class Step:
    """One action and what came of it; `summary`: it was a summary that the policy was asked for, and no action.

    `new_messages` are those that the transcript gained since the previous step, `num_messages` all of them; the state,
    whose digest this is, is what the policy was shown.
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
    """One rollout of one task: identity, transcript, steps, verdict.

    `history`: how much of it the policy was shown; `summarising`: what is asked for next is a summary. `tools`: what it
    could call. `started`: on the monotonic clock.
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

    @property
    def rollout_id(self) -> str:
        """Content key: the same task, sample and seed give the same id."""
        return f"{self.task.task_id}#{self.sample_idx}@{self.seed}"

    @property
    def held_ids(self) -> list[int] | None:
        """All token ids so far as they were sampled, or None when the policy has none to give, or is not shown all."""
        if self.history != FULL or not self.steps or self.steps[-1].sample.prompt_ids is None:
            return None
        last = self.steps[-1].sample
        return [*(last.prompt_ids or []), *(last.completion_ids or [])]


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
    """Play every episode to its end and grade it; returns the same objects, filled in."""
    rules = Rules(max_steps, limits, history, policy.config.tool_calls != "none")
    environments = [make() for _ in episodes]
    try:
        with ThreadPoolExecutor(threads) as pool:
            pairs = list(zip(episodes, environments, strict=True))
            list(pool.map(partial(begin, rules), episodes, environments))
            while active := [pair for pair in pairs if pair[0].terminated_by is None]:
                before_turn()
                _advance(active, policy, rules, pool)
            grade(pairs, pool)
    finally:
        for episode, environment in zip(episodes, environments, strict=True):
            end(episode, environment)
    return list(episodes)


def begin(rules: Rules, episode: Episode, environment: Environment) -> None:
    """Set the environment up."""
    episode.started, episode.history = time.monotonic(), rules.history
    if rules.calls:
        episode.tools = boundary.tools(environment)
    opening = _tried(episode, environment, lambda: boundary.boundary_messages(environment.reset(episode.task)))
    episode.messages = opening or []


def end(episode: Episode, environment: Environment) -> None:
    """Free what the environment holds."""
    _tried(episode, environment, environment.close)


def _tried(episode: Episode, environment: Environment, ask: Callable[[], Answer]) -> Answer | None:
    """What the environment answers; where it breaks, the episode ends with the error, and the others go on."""
    try:
        return ask()
    except InfrastructureError as error:
        _fail(episode, "env_error", type(error).__name__, str(error))
    except (ComposerError, MemoryError):
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        _fail(episode, "env_error", type(error).__name__, boundary.blamed(error, environment, episode.task.task_id))
    return None


def _fail(episode: Episode, terminated_by: str, error_type: str, error: str) -> None:
    episode.terminated_by, episode.error = terminated_by, (error_type, error)


def _advance(active: list[tuple[Episode, Environment]], policy: Policy, rules: Rules, pool: ThreadPoolExecutor) -> None:
    """One turn of every active episode that its limits let go on."""
    asked = [(*pair, turn) for pair in active if (turn := next_turn(pair[0], policy, rules)) is not None]
    turns = [turn for _, _, turn in asked]
    samples = [
        sample
        for start in range(0, len(turns), policy.batch_size)
        for sample in policy.sample(turns[start : start + policy.batch_size])
    ]

    def answered(asked: tuple[Episode, Environment, Turn], sample: Sample) -> None:
        act(*asked, sample, rules)

    list(pool.map(answered, asked, samples))


def act(episode: Episode, environment: Environment, turn: Turn, sample: Sample, rules: Rules) -> None:
    """Carry out one sampled action and decide whether the episode goes on."""
    if sample.error_type == "context":
        episode.terminated_by = "context"
        return
    if sample.error_type is not None:
        _fail(episode, "model_error", sample.error_type, sample.error or "")
        return
    truncated = sample.finish_reason == "length"
    if truncated:
        observation: Observation | None = Observation("")
    elif episode.summarising:
        observation = Observation(GO_ON)
    else:
        step = partial(carry_out, environment) if episode.tools else environment.step
        observation = _tried(episode, environment, lambda: boundary.observation(step(sample.text)))
    if observation is None:
        return
    _record(episode, turn, sample, observation)
    if truncated:
        episode.terminated_by = "max_tokens"
    elif observation.stop is not None:
        episode.terminated_by = observation.stop
    elif sum(not step.summary for step in episode.steps) >= rules.max_steps:
        episode.terminated_by = "max_steps"


def _record(episode: Episode, turn: Turn, sample: Sample, observation: Observation) -> None:
    seen = episode.steps[-1].num_messages if episode.steps else 0
    whole = episode.messages
    digest, summary = state_sha256(turn.messages), episode.summarising
    episode.steps.append(Step(whole[seen:], len(whole), digest, sample, observation, turn.seed, summary))
    episode.messages = [*whole, {"role": "assistant", "content": sample.text}]
    if observation.stop is None and sample.finish_reason != "length":
        results = [{"role": "tool", "content": result} for result in observation.results]
        episode.messages += results or [{"role": "user", "content": observation.content}]


def state_sha256(messages: list[Message]) -> str:
    """The digest that identifies a state: canonical JSON of all its messages."""
    return store.digest(messages)


def grade(pairs: list[tuple[Episode, Environment]], pool: ThreadPoolExecutor | None = None) -> None:
    """Grade every episode whose machinery worked: together where the environment can, else side by side in `pool`."""
    played = [(episode, environment) for episode, environment in pairs if episode.error is None]
    if not played:
        return
    together = boundary.grades_together([environment for _, environment in played])
    asks = (
        [environment.grade for _, environment in played]
        if together is None
        else [partial(together.__getitem__, index) for index in range(len(played))]
    )

    def one(pair: tuple[Episode, Environment], ask: Callable[[], Grade]) -> None:
        episode, environment = pair
        found = _tried(episode, environment, lambda: boundary.grade(ask()))
        episode.grade = found or Grade(reward=None)
        if found is not None and found.error_type is not None:
            episode.error = (found.error_type, found.error or "")

    list((map if pool is None else pool.map)(one, played, asks))


# ---- independent
# Episodes of a policy on a server: each at its own pace, so that a slow answer, command or grader delays no other.
#
# Sampling, commands and gradings of different episodes overlap. Everything runs on the event loop of the servers;
# commands and gradings block, so each has a pool of threads. An episode that is played makes room for the next at once
# and waits for a grader; where graders are slower than players, as many may wait as are played.

Result = TypeVar("Result")
Pair = tuple[Episode, Environment]
EVERY_S = 1.0
"""Between two looks at the live episodes."""
TOGETHER = 32
"""Most episodes in one grading, of an environment that grades several far more cheaply than one by one."""


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

    `policy` has `ask` and `drain` (`stages.policy.background.Asks`). `check` raises when nothing more is to be asked:
    then, and after an error that is nobody's own, what is in flight is waited for, everything is closed, and the error
    raised. The episodes that were given stay as they are, so that finished ones take no memory. `watch` gets the live
    episodes once a second: rollout_id, steps, doing (what, in a word), doing_s and wall_s in seconds.
    """
    with (
        ThreadPoolExecutor(in_flight.commands, "commands") as commands,
        ThreadPoolExecutor(in_flight.gradings, "gradings") as gradings,
    ):
        game = _Game(make, policy, rules, check, finished, commands, gradings, in_flight.episodes)
        shower = asyncio.create_task(game.show(watch))
        try:
            await background.together([game.play_all(episodes), *(game.grade_all() for _ in range(in_flight.gradings))])
        finally:
            shower.cancel()
            await asyncio.gather(shower, return_exceptions=True)
            await game.close()
            await policy.drain()


class _Game:
    """What the players and graders of one call share.

    `open` holds every environment that is not closed yet, `doing` what its episode does and since when.
    """

    def __init__(
        self,
        make: Callable[[], Environment],
        policy: Any,
        rules: Rules,
        check: Callable[[], None],
        finished: Callable[[Episode], Awaitable[None]],
        commands: ThreadPoolExecutor,
        gradings: ThreadPoolExecutor,
        width: int,
    ) -> None:
        self.make, self.policy, self.rules, self.check, self.finished = make, policy, rules, check, finished
        self.commands, self.gradings, self.width = commands, gradings, width
        self.played: asyncio.Queue[Pair | None] = asyncio.Queue(width)
        self.open: dict[int, Pair] = {}
        self.doing: dict[int, tuple[str, float]] = {}

    async def play_all(self, episodes: Sequence[Episode]) -> None:
        """Play so many at once, then tell every grader that no more come."""
        waiting = deque(episodes)

        async def player() -> None:
            while waiting:
                planned = waiting.popleft()
                self.check()
                await self.play(Episode(planned.task, planned.sample_idx, planned.seed))

        await background.together(player() for _ in range(min(self.width, len(waiting))))
        await self.played.put(None)

    async def play(self, episode: Episode) -> None:
        """One episode up to where it can be graded."""
        environment = await in_pool(self.commands, self.make)
        self.open[id(episode)] = episode, environment
        self.does(episode, "setting up")
        await in_pool(self.commands, partial(begin, self.rules, episode, environment))
        while episode.terminated_by is None:
            self.check()
            turn = next_turn(episode, self.policy, self.rules)
            self.does(episode, "asking")
            sample = None if turn is None else await self.answer(episode, turn)
            if turn is not None and sample is not None:
                self.does(episode, "acting")
                await in_pool(self.commands, partial(act, episode, environment, turn, sample, self.rules))
        self.does(episode, "waiting for a grader")
        await self.played.put((episode, environment))

    def does(self, episode: Episode, what: str) -> None:
        """Note what an episode does from now on."""
        self.doing[id(episode)] = what, time.monotonic()

    async def show(self, watch: Callable[[list[Row]], None]) -> None:
        """Tell once a second what every live episode does."""
        while True:
            now = time.monotonic()
            live = [(episode, *self.doing[key]) for key, (episode, _) in self.open.items() if key in self.doing]
            rows = [
                {
                    "rollout_id": episode.rollout_id,
                    "steps": len(episode.steps),
                    "doing": what,
                    "doing_s": round(now - since, 1),
                    "wall_s": round(now - (episode.started or now), 1),
                }
                for episode, what, since in live
            ]
            await in_pool(None, partial(watch, rows))
            await asyncio.sleep(EVERY_S)

    async def answer(self, episode: Episode, turn: Turn) -> Sample | None:
        """The policy's answer; None where the episode's time ran out before. What was sent is still paid and kept."""
        wall_s = self.rules.limits.wall_s
        left_s = None if wall_s is None else max(wall_s - (time.monotonic() - episode.started), 0.0)
        try:
            async with asyncio.timeout(left_s) as clock:
                return await self.policy.ask(turn)
        except TimeoutError:
            if not clock.expired():
                raise
            episode.terminated_by = "wall_time"
            return None

    async def grade_all(self) -> None:
        """Grade what waits until there is no more; several together where the environment can."""
        while (pair := await self.played.get()) is not None:
            batch = [pair]
            while isinstance(pair[1], GradesTogether) and len(batch) < TOGETHER and not self.played.empty():
                more = self.played.get_nowait()
                if more is None:
                    await self.played.put(None)
                    break
                batch.append(more)
            for episode, _ in batch:
                self.does(episode, "being graded")
            await in_pool(self.gradings, partial(_graded, batch))
            for episode, _ in batch:
                del self.open[id(episode)], self.doing[id(episode)]
                await self.finished(episode)
        await self.played.put(None)  # for the next grader

    async def close(self) -> None:
        """Free the environments of episodes that were not finished."""
        for episode, environment in self.open.values():
            await in_pool(self.commands, partial(end, episode, environment))


def _graded(batch: list[Pair]) -> None:
    grade(batch)
    for episode, environment in batch:
        end(episode, environment)
        episode.wall_s = time.monotonic() - episode.started


async def in_pool(pool: ThreadPoolExecutor | None, call: Callable[[], Result]) -> Result:
    """What a blocking call returns. It cannot be cancelled, so whoever is cancelled waits for its end first."""
    future = asyncio.get_running_loop().run_in_executor(pool, call)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        await asyncio.wait([future])
        if not future.cancelled():
            future.exception()  # looked at: whoever was cancelled has another reason to end
        raise


# ---- playing
# Playing the episodes of a stage: in batches with a local model, each at its own pace with a server; units of both.


class PlayingConfig(EnvStageConfig):
    """The configuration of a stage that plays episodes."""

    max_steps: int = Field(8, gt=0)
    """Actions after which a rollout ends."""
    limits: EpisodeLimits = EpisodeLimits()
    history: str = Field("full", pattern=PATTERN)
    """What the policy is shown of the past: `full`; `last 5`: of all observations the last five; or `summarise`: from
    near the limit of the context on, its own summary and what came since."""
    in_flight: InFlight = Field(InFlight(), json_schema_extra={"affects_results": False})
    report_to: Backends = Field((), json_schema_extra={"affects_results": False})
    """Where the run is logged besides its own files: tensorboard, trackio, wandb, one or several."""

    @model_validator(mode="after")
    def _summaries_have_an_occasion(self) -> "PlayingConfig":
        if self.history == SUMMARISE and self.limits.context_tokens is None:
            raise ValueError(
                "history summarise asks for summaries near the limit of the context, and there is none. "
                "Set limits.context_tokens."
            )
        return self

    @property
    def rules(self) -> Rules:
        """How episodes are played."""
        return Rules(self.max_steps, self.limits, self.history)


def play_missing(
    make: Callable[[], Environment],
    policy: Policy,
    episodes: Sequence[Episode],
    *,
    key: Callable[[Episode], str],
    payload: Callable[[Episode], Mapping[str, Any]],
    config: PlayingConfig,
    out: Out,
    what: str,
) -> None:
    """Play every episode whose unit (`key`) is not finished, and write one with its `payload` as soon as it is graded.

    A policy that can be asked many things at once plays episodes independently of each other; any other, whose
    arithmetic depends on the batch, plays fixed batches in lock step. Workers take them first, where the run has some.
    """

    def unit(episode: Episode) -> tuple[str, Mapping[str, Any], bool]:
        return key(episode), payload(episode), episode.error is not None

    async def each() -> None:
        missing = [episode for episode in episodes if not out.finished(key(episode))]
        done = len(episodes) - len(missing)
        written = Together[tuple[str, Mapping[str, Any], bool]](out.write_all)

        async def finished(episode: Episode) -> None:
            nonlocal done
            await written(unit(episode))
            done += 1
            out.progress(what, done, len(episodes))

        out.progress(what, done, len(episodes))
        await play_each(
            make,
            policy,
            missing,
            finished,
            rules=replace(config.rules, calls=policy.config.tool_calls != "none"),
            in_flight=config.in_flight,
            check=out.stop_here,
            watch=lambda live: out.live(live, done, len(episodes)),
        )

    def batched(batch: list[Episode]) -> Iterable[tuple[str, Mapping[str, Any], bool]]:
        started = time.monotonic()
        play(
            make,
            policy,
            batch,
            max_steps=config.max_steps,
            limits=config.limits,
            history=config.history,
            before_turn=out.stop_here,
        )
        for episode in batch:
            episode.wall_s = (time.monotonic() - started) / len(batch)
            yield unit(episode)

    if isinstance(policy, Asks):
        out.spread([[key(episode)] for episode in episodes], what)
        background.run(each())
    else:
        work_through(episodes, key, batched, policy=policy, out=out, what=what)
