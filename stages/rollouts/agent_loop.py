"""Play rollouts of a policy in an environment: sample an action, execute it, until the rollout ends; then grade it.

In reading order: a rollout and its limits; one turn
(`next_turn`, `act`) and the grade (`grade`); two ways to play many rollouts; and `play_missing`, which plays those of a
stage and writes their units. `play` advances a batch in lock step, because the arithmetic of a local model depends on
the batch. `ConcurrentLoop` lets every rollout of a policy on a server advance at its own pace, so that a slow answer,
command or grader delays no other rollout; trainings play so, too (`composer_stages.training.rollouts.RolloutQueue`).

A bad rollout is data: the rollout ends with its error and the others continue. Only failures of the machinery (no
sandbox, wrong key, exhausted budget) are raised.
"""

import asyncio
import errno
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from composer_stages import endings
from composer_stages.envs import boundary
from composer_stages.envs.base import Environment, Grade, GradesTogether, HasSolutions, Observation, Task
from composer_stages.errors import ComposerError, InfrastructureError, UsageError
from composer_stages.layout import counted
from composer_stages.messages import Message, with_thought
from composer_stages.policy import ask_all, background
from composer_stages.policy.base import (
    IDLE,
    AsyncPolicy,
    CountsTokens,
    PlaysSolutions,
    Policy,
    ReusesPrefixes,
    Sample,
    Turn,
)
from composer_stages.rollouts.config import IN_FLIGHT, NO_LIMITS, InFlight, PlayingConfig, RolloutLimits
from composer_stages.rollouts.history import FULL, PROMPTS, SUMMARISE, SUMMARY_PROMPT, SUMMARY_REQUEST, visible_messages
from composer_stages.rollouts.trace import OUT_OF_STEPS, state_sha256
from composer_stages.runs import store
from composer_stages.runs.activity import activity
from composer_stages.runs.kinds import Row
from composer_stages.runs.run import RunWriter
from composer_stages.runs.stage import work_through
from composer_stages.runs.store import GroupCommit

SUMMARISE_FROM = 0.75
"""Share of the context limit from which a summary is requested: one exchange may take the rest."""
LIVE_INTERVAL_S = 1.0
"""Interval between two reports of the live rollouts."""
MOST_GRADED_TOGETHER = 32
"""Rollouts in one grading, for an environment that grades several at far less cost than one by one."""

NOT_RESTORED = "not_restored"
"""`LiveRollout.terminated_by` where a recorded state was not reached again: there is nothing to grade then."""
GIVEN_UP = "given_up"
"""`LiveRollout.terminated_by` where it was no longer needed: it is not graded."""
UNGRADED = (NOT_RESTORED, GIVEN_UP)

Result = TypeVar("Result")
FinishedUnit = tuple[str, Mapping[str, Any], bool]
"""Key, payload and whether the rollout failed."""


@dataclass(frozen=True)
class Rules:
    """How rollouts are played: the most steps, the limits, the history shown to the policy.

    `calls`: actions are tool calls. `solutions`: the policy plays the tasks' own solutions.
    """

    max_steps: int
    limits: RolloutLimits = NO_LIMITS
    history: str = FULL
    calls: bool = False
    solutions: bool = False

    @classmethod
    def of(cls, policy: Policy, max_steps: int, limits: RolloutLimits, history: str) -> "Rules":
        """Return the rules for a policy: whether it calls tools, and whether it plays the tasks' solutions."""
        if limits.context_tokens is not None and not policy.config.limits():
            raise UsageError(
                "rollouts.no-answer-limit", context_tokens=limits.context_tokens, model=policy.config.model
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


@dataclass(repr=False)
class LiveRollout:
    """One rollout of one task: identity, transcript, steps, grade.

    `history`: how much of the transcript the policy is shown; the transcript itself is recorded in full. `summarising`:
    the next answer is a summary. `tools`: those that the policy can call. `started`: on the monotonic clock. `prelude`
    plays what comes before the policy's first turn, for example the actions that lead to a recorded state. `solution`:
    the actions of the task's own solution, where the policy plays them. `clock`: of the answer that is awaited.
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
    prelude: "Callable[[LiveRollout, Environment, Rules], None] | None" = None
    solution: Sequence[str] = ()
    clock: asyncio.Timeout | None = None

    async def break_off(self) -> None:
        """Stop waiting for an answer; call it on the event loop that waits."""
        if self.clock is not None and not self.clock.expired():
            self.clock.reschedule(0.0)

    @property
    def rollout_id(self) -> str:
        """Return the content key: the same task, sample and seed give the same id."""
        return f"{self.task.task_id}#{self.sample_idx}@{self.seed}"

    def __repr__(self) -> str:
        ended = self.error[0] if self.error else self.terminated_by
        return f"<rollout {self.rollout_id}: reward {self.grade.reward}, {ended}, {len(self.steps)} steps>"


RolloutPair = tuple[LiveRollout, Environment]


def begin(rules: Rules, rollout: LiveRollout, environment: Environment) -> None:
    """Set up the environment and fill in the opening messages of the rollout."""
    rollout.started, rollout.history = time.monotonic(), rules.history
    if rules.calls:
        rollout.tools = boundary.declared_tools(environment)
    opening = _guarded(rollout, environment, lambda: boundary.check_opening(environment.reset(rollout.task)))
    rollout.messages = opening or []
    if rules.solutions and opening is not None and isinstance(environment, HasSolutions):
        rollout.solution = _guarded(rollout, environment, environment.solution) or ()
    if rollout.prelude is not None and rollout.terminated_by is None:
        rollout.prelude(rollout, environment, rules)


def next_turn(rollout: LiveRollout, policy: Policy, rules: Rules) -> Turn | None:
    """Return the next request: for an action, or for a summary near the context limit. None where a limit is reached.

    The seed of an answer is a function of the task, the sample, the seed of the rollout and the step only.
    """
    limits, max_tokens = rules.limits, max(policy.config.limits(), default=0)
    if limits.wall_s is not None and time.monotonic() - rollout.started >= limits.wall_s:
        rollout.terminated_by = "wall_time"
        return None
    if limits.cost_usd is not None and sum(step.sample.cost_usd for step in rollout.steps) >= limits.cost_usd:
        rollout.terminated_by = "cost"
        return None
    turn, rollout.summarising = _turn(rollout), False
    if limits.context_tokens is None:
        return turn
    tokens = prompt_tokens(rollout, turn, policy)
    if tokens is None:
        return turn
    if tokens + max_tokens > limits.context_tokens:
        rollout.terminated_by = "context"
        return None
    may_summarise = rollout.history == SUMMARISE and bool(rollout.steps) and not rollout.steps[-1].summary
    # Characters as a bound for the request's tokens: it is ASCII, and a token has at least one byte.
    with_request = tokens + len(SUMMARY_PROMPT) + max_tokens
    if may_summarise and SUMMARISE_FROM * limits.context_tokens < with_request <= limits.context_tokens:
        rollout.summarising, rollout.messages = True, [*rollout.messages, SUMMARY_REQUEST]
        return _turn(rollout)
    return turn


def _turn(rollout: LiveRollout) -> Turn:
    """Return the request for the next answer, with the token ids sampled so far where the policy sees all of them."""
    ids = None
    if rollout.history == FULL and rollout.steps and rollout.steps[-1].sample.prompt_ids is not None:
        last = rollout.steps[-1].sample
        ids = [*(last.prompt_ids or []), *(last.completion_ids or [])]
    # 15 hexadecimal digits are 60 bits: a positive number that every server's int64 holds.
    seed = int(store.digest([rollout.rollout_id, len(rollout.steps)])[:15], 16)
    step = len(rollout.steps)
    action = rollout.solution[step] if step < len(rollout.solution) else None
    messages = list(visible_messages(rollout.messages, rollout.history))
    return Turn(messages, seed, ids, rollout.tools, action, rollout.task)


def prompt_tokens(rollout: LiveRollout, turn: Turn, policy: Policy) -> int | None:
    """Return the number of tokens of a turn's prompt: exact where the policy has a tokenizer, else an upper bound.

    A server counted the last prompt and answer; the messages since have at most as many tokens as UTF-8 bytes. The
    bound is the bytes of all messages where a server does not count, or where the prompt does not extend the last one.
    None for an opening that was not counted: the server will report its length.
    """
    if isinstance(policy, CountsTokens):
        return policy.count_tokens(turn)
    if not rollout.steps:
        return None
    last = rollout.steps[-1]
    new, counted = turn.messages, 0
    extends = rollout.history == FULL or (rollout.history == SUMMARISE and not last.summary)
    # A teacher's count is of its own prompt in its own tokens.
    if last.sample.usage_by == "server" and last.sample.prompt_tokens and extends and last.sample.teacher is None:
        new = rollout.messages[last.num_messages + 1 :]
        counted = last.sample.prompt_tokens + last.sample.completion_tokens
    return counted + sum(len(message["content"].encode()) for message in new)


def act(rollout: LiveRollout, environment: Environment, turn: Turn, sample: Sample, rules: Rules) -> None:
    """Execute one sampled action, record the step, and set `terminated_by` where the rollout ends."""
    if sample.error_type == "context":
        rollout.terminated_by = "context"
        if not rollout.steps:  # nothing was played that could be graded: the task is too long for this model
            rollout.error = sample.error_type, sample.error or ""
        return
    if sample.error_type is not None:
        rollout.terminated_by, rollout.error = "model_error", (sample.error_type, sample.error or "")
        return
    # An answer that was cut or filtered is recorded but not executed: half a command may do what the whole would not.
    ends = {endings.CUT: "max_tokens", endings.FILTERED: endings.FILTERED}.get(sample.finish_reason)
    if ends is not None:
        observation: Observation | None = Observation("")
    elif sample.finish_reason == IDLE:
        observation = Observation("", stop=IDLE)
    elif rollout.summarising:
        observation = Observation(PROMPTS["after_summary"])
    else:
        step = partial(boundary.run_calls, environment, fault=sample.error) if rollout.tools else environment.step
        observation = _guarded(rollout, environment, lambda: boundary.check_observation(step(sample.text)))
    if observation is None:
        return
    last = rollout.steps[-1].sample if rollout.steps and rollout.history == FULL else None
    if last is not None and last.teacher != sample.teacher:
        last = None
    if last is not None and last.usage_by == sample.usage_by == "server" and sample.prompt_tokens <= last.prompt_tokens:
        # A conversation that grew has more tokens: a server that counts no more reads its end alone.
        sample = replace(sample, prompt_read=sample.prompt_tokens or None)
    if sample.teacher is None:  # of a teacher's thoughts the student has seen nothing
        sample = replace(sample, text=with_thought(sample.text, sample.reasoning))
    transcript, recorded = rollout.messages, rollout.steps[-1].num_messages if rollout.steps else 0
    digest, summary = state_sha256(turn.messages, rollout.tools), rollout.summarising
    new_messages = transcript[recorded:]
    rollout.steps.append(Step(new_messages, len(transcript), digest, sample, observation, turn.seed, summary))
    rollout.messages = [*transcript, {"role": "assistant", "content": sample.text}]
    if observation.stop is None and ends is None:
        results = [{"role": "tool", "content": result} for result in observation.results]
        rollout.messages += results or [{"role": "user", "content": observation.content}]
    if ends is not None:
        rollout.terminated_by = ends
    elif observation.stop is not None:
        rollout.terminated_by = observation.stop
    elif sum(not step.summary for step in rollout.steps) >= rules.max_steps:
        rollout.terminated_by = OUT_OF_STEPS


def grade(pairs: Sequence[RolloutPair], pool: ThreadPoolExecutor | None = None) -> None:
    """Grade every rollout without an error: in one call where the environment can, else one by one, in `pool`."""
    gradable = [pair for pair in pairs if pair[0].error is None and pair[0].terminated_by not in UNGRADED]
    if not gradable:
        return
    together = boundary.grade_together([environment for _, environment in gradable])
    calls = (
        [environment.grade for _, environment in gradable]
        if together is None
        else [partial(together.__getitem__, index) for index in range(len(gradable))]
    )

    def grade_one(pair: RolloutPair, call: Callable[[], Grade]) -> None:
        rollout, environment = pair
        verdict = _guarded(rollout, environment, lambda: boundary.check_grade(call(), environment))
        rollout.grade = verdict or Grade(reward=None)
        if verdict is not None and verdict.error_type is not None:
            rollout.error = (verdict.error_type, verdict.error or "")

    # list: map is lazy, and an exception of a worker is only raised when its result is read.
    list((map if pool is None else pool.map)(grade_one, gradable, calls))


def _guarded(rollout: LiveRollout, environment: Environment, call: Callable[[], Result]) -> Result | None:
    """Return the result of a call to the environment; end the rollout with the error where the call fails."""
    try:
        return call()
    except InfrastructureError as error:
        rollout.terminated_by, rollout.error = "env_error", (type(error).__name__, str(error))
    except (ComposerError, MemoryError):
        raise
    except (Exception, SystemExit) as error:  # exit() of an answer that a grader executes
        # A full disk is no fault of one rollout: all later ones would end the same way.
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        text = boundary.describe_error(error, environment, rollout.task.task_id)
        rollout.terminated_by, rollout.error = "env_error", (type(error).__name__, text)
    return None


def play(
    make: Callable[[], Environment],
    policy: Policy,
    rollouts: Sequence[LiveRollout],
    *,
    max_steps: int,
    limits: RolloutLimits = NO_LIMITS,
    history: str = FULL,
    in_flight: InFlight = IN_FLIGHT,
    before_turn: Callable[[], None] = lambda: None,
) -> list[LiveRollout]:
    """Play all rollouts in lock step and grade them; return the same objects, filled in."""
    rules = Rules.of(policy, max_steps, limits, history)
    environments = [make() for _ in rollouts]
    pairs = list(zip(rollouts, environments, strict=True))
    reusing = policy.reusing_prefixes() if isinstance(policy, ReusesPrefixes) else nullcontext()
    try:
        with _pools(in_flight) as (pool, gradings), reusing:
            list(pool.map(partial(begin, rules), rollouts, environments))
            while active := [pair for pair in pairs if pair[0].terminated_by is None]:
                before_turn()
                turns = [(*pair, turn) for pair in active if (turn := next_turn(pair[0], policy, rules)) is not None]
                with activity(f"sampling {counted(len(turns), 'answer')}"):
                    samples = [
                        sample
                        for start in range(0, len(turns), policy.batch_size)
                        for sample in ask_all(policy, [turn for _, _, turn in turns[start : start + policy.batch_size]])
                    ]
                list(pool.map(lambda entry, sample: act(entry[0], entry[1], entry[2], sample, rules), turns, samples))
            grade(pairs, gradings)
    finally:
        for rollout, environment in pairs:
            _guarded(rollout, environment, environment.close)
    return list(rollouts)


@contextmanager
def _pools(in_flight: InFlight) -> Iterator[tuple[ThreadPoolExecutor, ThreadPoolExecutor]]:
    """Provide a thread pool for commands and one for gradings."""
    with (
        ThreadPoolExecutor(in_flight.commands, "commands") as commands,
        ThreadPoolExecutor(in_flight.gradings, "gradings") as gradings,
    ):
        yield commands, gradings


RolloutsAhead = asyncio.Queue[LiveRollout | None]
"""Rollouts to play; None after the last one."""


def make_queue(rollouts: Iterable[LiveRollout]) -> RolloutsAhead:
    """Return a closed queue of these rollouts."""
    ahead: RolloutsAhead = asyncio.Queue()
    for rollout in (*rollouts, None):
        ahead.put_nowait(rollout)
    return ahead


@dataclass
class ConcurrentLoop:
    """Plays and grades rollouts independently of each other, on the event loop of the policy's servers.

    `policy` has `ask` and `drain` (`composer_stages.policy.base.AsyncPolicy`). `finished` gets a filled-in copy of each
    rollout after grading, in any order. `check` raises when nothing more is to be asked. `is_needed` is asked before a
    rollout is set up and before each turn; one that is no longer needed ends there and is not graded. `watch` gets the
    live rollouts once a second: rollout_id, steps, doing (one word), doing_s and wall_s in seconds.

    Commands and gradings block, so each kind has a pool of threads. A played rollout is replaced by the next at once
    and waits for a grader in `ungraded`, whose size bounds the waiting ones; None there ends the graders. `open` holds
    every environment that is not closed yet, `doing` the activity of its rollout and since when; both by `id(rollout)`.
    """

    make: Callable[[], Environment]
    policy: Any
    finished: Callable[[LiveRollout], Awaitable[None]]
    rules: Rules
    in_flight: InFlight
    check: Callable[[], None]
    is_needed: Callable[[LiveRollout], bool] = lambda rollout: True
    watch: Callable[[list[Row]], None] = lambda live: None
    commands: ThreadPoolExecutor = field(init=False)
    gradings: ThreadPoolExecutor = field(init=False)
    ungraded: "asyncio.Queue[RolloutPair | None]" = field(init=False)
    open: dict[int, RolloutPair] = field(init=False, default_factory=dict)
    doing: dict[int, tuple[str, float]] = field(init=False, default_factory=dict)

    async def play(self, ahead: RolloutsAhead) -> None:
        """Play and grade every rollout of a queue.

        When `check` raises, and after any error that does not belong to one rollout, all calls in flight are awaited,
        the environments are closed, and the error is raised. The given rollouts stay unchanged, so that finished ones
        take no memory.
        """
        self.ungraded = asyncio.Queue(self.in_flight.rollouts)
        with _pools(self.in_flight) as (self.commands, self.gradings):
            reporter = asyncio.create_task(self.report_live())
            try:
                graders = (self.grade_all() for _ in range(self.in_flight.gradings))
                await background.gather([self.play_all(ahead), *graders])
            finally:
                reporter.cancel()
                await asyncio.gather(reporter, return_exceptions=True)
                for rollout, environment in self.open.values():
                    await _in_pool(self.commands, partial(_guarded, rollout, environment, environment.close))
                await self.policy.drain()

    async def play_all(self, ahead: RolloutsAhead) -> None:
        """Play as many rollouts at once as may be in flight, then close the queue of the graders."""

        async def player() -> None:
            while (planned := await ahead.get()) is not None:
                self.check()
                # A fresh LiveRollout, so that the given ones stay empty and finished ones can be freed.
                fresh = LiveRollout(planned.task, planned.sample_idx, planned.seed, prelude=planned.prelude)
                if self.is_needed(fresh):
                    await self._play_one(fresh)
                else:
                    fresh.terminated_by = GIVEN_UP
                    await self.finished(fresh)
            ahead.put_nowait(None)  # for the next player

        await background.gather(player() for _ in range(self.in_flight.rollouts))
        await self.ungraded.put(None)

    async def _play_one(self, rollout: LiveRollout) -> None:
        """Play one rollout up to where it can be graded."""
        environment = await _in_pool(self.commands, self.make)
        key, wall_s = id(rollout), self.rules.limits.wall_s
        self.open[key] = rollout, environment
        self.doing[key] = "setting up", time.monotonic()
        await _in_pool(self.commands, partial(begin, self.rules, rollout, environment))
        while rollout.terminated_by is None:
            self.check()
            if not self.is_needed(rollout):
                rollout.terminated_by = GIVEN_UP
                break
            turn = next_turn(rollout, self.policy, self.rules)
            self.doing[key] = "asking", time.monotonic()
            if turn is None:
                break
            left_s = None if wall_s is None else max(wall_s - (time.monotonic() - rollout.started), 0.0)
            try:
                # expired() below tells our own limit from a TimeoutError of the client's.
                async with asyncio.timeout(left_s) as clock:
                    rollout.clock = clock
                    sample = await self.policy.ask(turn)
            except TimeoutError:
                if not clock.expired():
                    raise
                # The request that was sent is still paid for and kept.
                rollout.terminated_by = "wall_time" if self.is_needed(rollout) else GIVEN_UP
                break
            finally:
                rollout.clock = None
            self.doing[key] = "acting", time.monotonic()
            await _in_pool(self.commands, partial(act, rollout, environment, turn, sample, self.rules))
        self.doing[key] = "waiting for a grader", time.monotonic()
        # Blocks while the queue is full: players must not run ahead of the graders by more workspaces than that.
        await self.ungraded.put((rollout, environment))

    async def grade_all(self) -> None:
        """Grade rollouts until the queue is closed; in batches where the environment supports it."""

        def grade_and_end(batch: list[RolloutPair]) -> None:
            grade(batch)
            for rollout, environment in batch:
                _guarded(rollout, environment, environment.close)
                rollout.wall_s = time.monotonic() - rollout.started

        while (pair := await self.ungraded.get()) is not None:
            batch = [pair]
            most = MOST_GRADED_TOGETHER if isinstance(pair[1], GradesTogether) else 1
            while len(batch) < most and not self.ungraded.empty():
                more = self.ungraded.get_nowait()
                if more is None:  # the end mark is for every grader: put it back
                    await self.ungraded.put(None)
                    break
                batch.append(more)
            for rollout, _ in batch:
                self.doing[id(rollout)] = "being graded", time.monotonic()
            await _in_pool(self.gradings, partial(grade_and_end, batch))
            for rollout, _ in batch:
                del self.open[id(rollout)], self.doing[id(rollout)]
                await self.finished(rollout)
        await self.ungraded.put(None)  # for the next grader

    async def report_live(self) -> None:
        """Pass the activity of every live rollout to `watch`, once a second, until cancelled."""
        while True:
            now = time.monotonic()
            live = [(rollout, *self.doing[key]) for key, (rollout, _) in self.open.items() if key in self.doing]
            rows = [
                {
                    "rollout_id": rollout.rollout_id,
                    "steps": len(rollout.steps),
                    "doing": doing,
                    "doing_s": round(now - since, 1),
                    "wall_s": round(now - (rollout.started or now), 1),
                }
                for rollout, doing, since in live
            ]
            await _in_pool(None, partial(self.watch, rows))
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


def play_missing(
    make: Callable[[], Environment],
    policy: Policy,
    rollouts: Sequence[LiveRollout],
    *,
    key: Callable[[LiveRollout], str],
    payload: Callable[[LiveRollout], Mapping[str, Any]],
    config: PlayingConfig,
    out: RunWriter,
    noun: str,
    shared_value: Any = None,
) -> None:
    """Play every rollout whose unit (`key`) is not finished; write its `payload` after grading.

    A policy on a server (`AsyncPolicy`) plays rollouts independently of each other; any other, whose arithmetic
    depends on the batch, plays fixed batches in lock step. The workers of the run play first, where there are any; they
    get `shared_value` (`RunWriter.spread`).
    """

    async def independently() -> None:
        missing = [rollout for rollout in rollouts if not out.finished(key(rollout))]
        done = len(rollouts) - len(missing)
        written = GroupCommit[FinishedUnit](out.write_all)

        async def finished(rollout: LiveRollout) -> None:
            nonlocal done
            await written((key(rollout), payload(rollout), rollout.error is not None))
            done += 1
            out.progress(noun, done, len(rollouts))

        out.progress(noun, done, len(rollouts))
        loop = ConcurrentLoop(
            make,
            policy,
            finished,
            rules=Rules.of(policy, config.max_steps, config.limits, config.history),
            in_flight=config.in_flight,
            check=out.raise_if_stopped,
            watch=lambda live: out.live(live, done, len(rollouts)),
        )
        await loop.play(make_queue(missing))

    places = {id(rollout): index for index, rollout in enumerate(rollouts)}

    def in_batch(batch: list[LiveRollout]) -> Iterable[FinishedUnit]:
        started, before = time.monotonic(), places[id(batch[0])]

        def before_turn() -> None:
            out.raise_if_stopped()
            ended = sum(rollout.terminated_by is not None for rollout in batch)
            out.progress(noun, before + ended, len(rollouts))

        play(
            make,
            policy,
            batch,
            max_steps=config.max_steps,
            limits=config.limits,
            history=config.history,
            in_flight=config.in_flight,
            before_turn=before_turn,
        )
        # In lock step the wall time of a batch is divided equally among its rollouts.
        for rollout in batch:
            rollout.wall_s = (time.monotonic() - started) / len(batch)
            yield key(rollout), payload(rollout), rollout.error is not None

    if isinstance(policy, AsyncPolicy):
        out.spread([[key(rollout)] for rollout in rollouts], noun, shared_value)
        background.run(independently())
    else:
        work_through(rollouts, key, in_batch, policy=policy, out=out, noun=noun, shared_value=shared_value)
