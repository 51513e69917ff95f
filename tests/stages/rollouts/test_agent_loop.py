"""Rollouts of a policy in an environment: batches, requests to a server, limits, tool calls, summaries, mistakes."""

import asyncio
import json
import math
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FunctionType
from typing import Any, ClassVar

import orjson
import pytest
from support.environments import GuessEnv
from support.server import Reply, answer, serving, strict
from support.transcripts import action, assistant, call, system, user

from composer_stages import collect, replay_teachers
from composer_stages.envs.base import Grade, Observation, Task
from composer_stages.envs.boundary import run_calls
from composer_stages.errors import UsageError
from composer_stages.formats.transcripts import Transcripts
from composer_stages.policy import background
from composer_stages.policy.base import PolicyConfig, Sample, Turn
from composer_stages.policy.local import LocalPolicy
from composer_stages.rollouts.agent_loop import ConcurrentLoop, LiveRollout, Rules, make_queue, play
from composer_stages.rollouts.collection_checks import check
from composer_stages.rollouts.config import NO_LIMITS, InFlight, RolloutLimits
from composer_stages.rollouts.history import PROMPTS, SUMMARY_PROMPT, visible_messages
from composer_stages.rollouts.recording import payload, step_rows
from composer_stages.rollouts.trace import state_digests, states
from composer_stages.runs import runner, store
from composer_stages.runs.kinds import ROLLOUT, STEP, Row
from composer_stages.runs.run import Inputs, Run
from composer_stages.runs.stage import load_stage
from composer_stages.stopping import Interrupted


def rollouts(count: int, seed: int = 0) -> list[LiveRollout]:
    return [LiveRollout(task, 0, seed) for task in GuessEnv().tasks("train", count, 0)]


def collected(root: Path, url: str, env: str, tasks: int = 1, samples: int = 1, **more: Any) -> Run:
    """Rollouts of a policy on a server in an environment of this file, or of `support.environments`."""
    name = f"{__name__ if env in globals() else 'support.environments'}:{env}"
    policy = {"model": "m", "base_url": url, **more.pop("policy", {})}
    config = collect.Config(env={"name": name}, policy=policy, tasks=tasks, samples=samples, **more)
    return Run(runner.execute("collect", {}, config, root=root).path)


class Says:
    """A policy that always says the same."""

    config, capture_level, batch_size = PolicyConfig(), "text", 8

    def sample(self, turns: list[Turn]) -> list[Sample]:
        return [Sample(text="aaa") for _ in turns]

    def facts(self) -> dict[str, Any]:
        return {}


# What an environment raises or returns


class Own(GuessEnv):
    """Does in task guess-1 what a test tells it to: return a value, or call a function."""

    def __init__(self, method: str, does: Any) -> None:
        super().__init__(turns=1)
        self.method, self.does = method, does

    def _odd(self, method: str, usual: Any) -> Any:
        if self.method != method or self._task is None or self._task.task_id != "guess-1":
            return usual
        return self.does() if callable(self.does) else self.does

    def reset(self, task: Task) -> Any:
        return self._odd("reset", super().reset(task))

    def step(self, text: str) -> Any:
        return self._odd("step", super().step(text))

    def grade(self) -> Any:
        return self._odd("grade", super().grade())


class OwnTogether(Own):
    """Grades all at once, and breaks where one of them would."""

    def grade_together(self, rollouts: list[Any]) -> list[Any]:
        return [rollout.grade() for rollout in rollouts]


def broken() -> Any:
    return {}["no such key"]


def ended() -> Any:
    sys.exit(3)


def played_by(env: type[Own], method: str, does: Any) -> tuple[LiveRollout, LiveRollout]:
    """A rollout of each kind: a sound one and the odd one; the others are sound as well."""
    first, odd, last = play(lambda: env(method, does), Says(), rollouts(3), max_steps=3)
    assert (first.error, last.error) == (None, None) and first.grade.reward == 1.0
    return first, odd


@pytest.mark.parametrize("env", [Own, OwnTogether])
@pytest.mark.parametrize("method", ["reset", "step", "grade"])
@pytest.mark.parametrize(("does", "error"), [(broken, "KeyError"), (ended, "SystemExit")])
def test_an_exception_ends_one_rollout_and_names_line_task_and_owner(
    does: FunctionType, error: str, method: str, env: type[Own]
) -> None:
    _, odd = played_by(env, method, does)
    assert odd.error is not None and odd.grade.reward is None
    kind, text = odd.error
    line = does.__code__.co_firstlineno + 1
    assert kind == error and f"{__file__}, line {line}, in {does.__name__}, task guess-1" in text
    assert f"{__name__}:{env.__name__}, not of Composer" in text


@pytest.mark.parametrize(
    ("method", "value", "shown_value"),
    [
        ("grade", Grade(reward=math.nan), "reward=nan"),
        ("grade", Grade(reward="1"), "reward='1'"),
        ("grade", Grade(reward=True), "reward=True"),
        ("grade", Grade(reward=1e39), "reward=1e+39"),
        ("grade", Grade(reward=10**400), "reward=1000"),
        ("grade", Grade(reward=1.0, hidden_pass=1), "hidden_pass=1"),
        ("grade", 1.0, "returned 1.0"),
        ("grade", Grade(reward=1.0, work="?"), "work='?'"),
        ("step", "text", "returned 'text'"),
        ("step", Observation(None), "content=None"),
        ("step", Observation("x", stop=True), "stop=True"),
        ("step", Observation("x", returncode="0"), "returncode='0'"),
        ("reset", "hello", "returned 'hello'"),
        ("reset", [], "returned []"),
        ("reset", [{"role": "user"}], "returned [{'role': 'user'}]"),
    ],
)
def test_an_invalid_value_of_an_environment_ends_one_rollout(method: str, value: Any, shown_value: str) -> None:
    _, odd = played_by(Own, method, value)
    assert odd.error is not None and odd.grade.reward is None
    assert shown_value in odd.error[1] and "task guess-1" in odd.error[1] and "not of Composer" in odd.error[1]


def test_a_whole_number_is_a_reward() -> None:
    played = played_by(Own, "grade", Grade(reward=1))[1]
    assert played.grade.reward == 1.0 and repr(played) == "<rollout guess-1#0@0: reward 1.0, answered, 1 steps>"


# The local sampler, and the end of the context


def local(tiny: Path, cache: Path) -> LocalPolicy:
    return LocalPolicy.open(PolicyConfig(model=str(tiny), max_tokens=24), cache=cache, listener=lambda *told: None)


def test_lock_step_samples_all_active_rollouts_in_order(tiny: Path, tmp_path: Path) -> None:
    """Its arithmetic depends on the batch: ids and log-probs are those of a plain loop, to the bit."""
    policy, tasks = local(tiny, tmp_path), GuessEnv().tasks("train", 5, 0)
    played = play(lambda: GuessEnv(3), policy, rollouts(5, seed=7), max_steps=3)

    envs, said, over = [GuessEnv(3) for _ in tasks], [[] for _ in tasks], [False] * len(tasks)
    chats = [env.reset(task) for env, task in zip(envs, tasks, strict=True)]
    with policy.reusing_prefixes():  # as `play` does
        for step in range(3):
            active = [i for i in range(len(tasks)) if not over[i]]
            seeds = {i: int(store.digest([f"{tasks[i].task_id}#0@7", step])[:15], 16) for i in active}
            held = {i: [*said[i][-1].prompt_ids, *said[i][-1].completion_ids] if said[i] else None for i in active}
            samples = policy.sample([Turn(list(chats[i]), seeds[i], held[i]) for i in active]) if active else []
            for i, sample in zip(active, samples, strict=True):
                said[i].append(sample)
                over[i] = sample.finish_reason == "length"
                if not over[i]:
                    chats[i] += [assistant(sample.text), user(envs[i].step(sample.text).content)]
    for rollout, expected in zip(played, said, strict=True):
        found = [step.sample for step in rollout.steps]
        ids, plain = ([(s.prompt_ids, s.completion_ids, s.logprobs) for s in each] for each in (found, expected))
        assert ids == plain
    assert len({len(rollout.steps) for rollout in played}) > 1, "some rollouts end before others, so batches shrink"


class Counting(Says):
    """A server that reports how long each prompt was, or that it does not fit, or nothing."""

    def __init__(self, tokens: int, usage: str) -> None:
        self.tokens, self.usage, self.turns = tokens, usage, []

    def sample(self, turns: list[Turn]) -> list[Sample]:
        self.turns += turns
        return [self._one(turn) for turn in turns]

    def _one(self, turn: Turn) -> Sample:
        prompt = self.tokens * len(turn.messages)
        if self.usage == "refuses" and prompt > 40:
            return Sample(error_type="context", error="too long")
        counted = {"prompt_tokens": prompt, "completion_tokens": 3} if self.usage == "server" else {}
        return Sample(text="aaa", usage_by="bound" if self.usage == "none" else "server", **counted)


@pytest.mark.parametrize(
    ("usage", "context_tokens", "steps"),
    [
        ("server", 200, 4),  # 10, 30, 50, 70 tokens of prompt, 3 of answer, 22 bytes of observation
        ("server", 30 + 3 + 22 + 64, 3),
        ("server", 30 + 3 + 22 + 64 - 1, 2),
        ("none", 5 + 3 + 22 + 64, 2),  # bytes: "say a", "aaa", the observation
        ("none", 5 + 3 + 22 + 64 - 1, 1),
        ("refuses", None, 2),
    ],
)
def test_a_rollout_at_the_context_limit_is_graded(usage: str, context_tokens: int | None, steps: int) -> None:
    limits = RolloutLimits(context_tokens=context_tokens)
    (rollout,) = play(lambda: GuessEnv(9), Counting(10, usage), rollouts(1), max_steps=4, limits=limits)
    assert rollout.error is None and rollout.grade.reward == 1.0
    assert (len(rollout.steps), rollout.terminated_by) == (steps, "max_steps" if steps == 4 else "context")


def test_a_policys_tokenizer_counts_the_prompt(tiny: Path, tmp_path: Path) -> None:
    policy = local(tiny, tmp_path)
    exact = policy.count_tokens(Turn(GuessEnv().reset(rollouts(1)[0].task), 0))
    for room, steps in ((exact + 24, 1), (exact + 23, 0)):
        limits = RolloutLimits(context_tokens=room)
        (rollout,) = play(lambda: GuessEnv(1), policy, rollouts(1), max_steps=1, limits=limits)
        assert len(rollout.steps) == steps and rollout.error is None
    assert rollout.terminated_by == "context"


def test_history_last_n_is_shown_and_recorded() -> None:
    policy = Counting(10, "server")
    (rollout,) = play(lambda: GuessEnv(4), policy, rollouts(1), max_steps=4, history="last 1")
    out, seen = "[22 characters left out]", "foo: command not found"
    assert [[m["content"] for m in turn.messages] for turn in policy.turns] == [
        ["say a"],
        ["say a", "aaa", seen],
        ["say a", "aaa", out, "aaa", seen],
        ["say a", "aaa", out, "aaa", out, "aaa", seen],
    ]
    assert [message["content"] for message in rollout.messages].count(seen) == 3
    rows = step_rows(rollout, policy)
    assert {row["history"] for row in rows} == {"last 1"}
    assert states(rows) == [turn.messages for turn in policy.turns]
    row = payload(rollout, policy, sandbox="none")["rollout"]
    assert all(c.ok for c in check([row], rows, 1) if c.name in ("state hash chain", "tuples complete"))


# Rollouts of a policy on a server, independent of each other


class Asked:
    """A policy on a server that takes its time for some tasks; counts what it is asked at once."""

    capture_level, batch_size = "text", 8
    config = PolicyConfig()

    def __init__(self, delay: Callable[[Turn], float] = lambda turn: 0.0) -> None:
        self.delay, self.now, self.most, self.drained = delay, 0, 0, False

    async def ask(self, turn: Turn) -> Sample:
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            await asyncio.sleep(self.delay(turn))
        finally:
            self.now -= 1
        return Sample(text="a", prompt_tokens=4, completion_tokens=1, cost_usd=0.25)

    async def drain(self) -> None:
        self.drained = True


class CountedEnv(GuessEnv):
    """Counts how many steps and gradings run at once, and which environments are open."""

    running: ClassVar[dict[str, int]] = {}
    most: ClassVar[dict[str, int]] = {}
    opened: ClassVar[set[int]] = set()
    lock: ClassVar[Any] = threading.Lock()
    slow_grade: ClassVar[str] = ""

    def _timed(self, what: str, seconds: float) -> None:
        with self.lock:
            self.running[what] = self.running.get(what, 0) + 1
            self.most[what] = max(self.most.get(what, 0), self.running[what])
        time.sleep(seconds)
        with self.lock:
            self.running[what] -= 1

    def reset(self, task: Task) -> Any:
        self.opened.add(id(self))
        return super().reset(task)

    def step(self, text: str) -> Observation:
        self._timed("steps", 0.01)
        return super().step(text)

    def grade(self) -> Grade:
        assert self._task is not None
        self._timed("gradings", 1.0 if self._task.task_id == self.slow_grade else 0.02)
        return super().grade()

    def close(self) -> None:
        self.opened.discard(id(self))


@pytest.fixture(autouse=True)
def _fresh() -> None:
    for counted in (CountedEnv.running, CountedEnv.most, CountedEnv.opened):
        counted.clear()
    CountedEnv.slow_grade = ""


def played(policy: Asked, count: int, *, limits: RolloutLimits = NO_LIMITS, turns: int = 3, **how: Any) -> list[Any]:
    """The rollouts in the order in which they were finished."""
    ended = how.pop("ended", [])

    async def keep(rollout: LiveRollout) -> None:
        ended.append(rollout)

    asked, rules = rollouts(count), Rules(10, limits)
    how = {"in_flight": InFlight(), "check": lambda: None, **how}
    loop = ConcurrentLoop(lambda: CountedEnv(turns), policy, keep, rules, **how)
    background.run(loop.play(make_queue(asked)))
    assert policy.drained and not any(rollout.steps for rollout in asked)
    return ended


def test_a_slow_answer_and_a_slow_grader_delay_no_other_rollout() -> None:
    slow = [True]
    ended = played(Asked(lambda turn: slow.pop() * 2.0 if slow else 0.0), 12, in_flight=InFlight(rollouts=2))
    assert [e.task.task_id for e in ended][-1] == "guess-0" and len(ended) == 12
    assert all(e.terminated_by == "answered" and len(e.steps) == 3 and e.grade.reward is not None for e in ended)
    CountedEnv.slow_grade = "guess-0"
    ended = played(Asked(), 12, in_flight=InFlight(rollouts=2, gradings=2))
    assert [e.task.task_id for e in ended][-1] == "guess-0" and len(ended) == 12


def test_concurrency_reaches_and_keeps_its_limits() -> None:
    policy = Asked(lambda turn: 0.03)
    played(policy, 24, in_flight=InFlight(rollouts=6, commands=3, gradings=2))
    assert CountedEnv.most == {"steps": 3, "gradings": 2} and 4 <= policy.most <= 6


def test_a_rollout_at_the_wall_time_limit_is_graded() -> None:
    ended = played(Asked(lambda turn: 0.1), 2, limits=RolloutLimits(wall_s=0.15), turns=9)
    assert [(e.terminated_by, e.error, len(e.steps)) for e in ended] == [("wall_time", None, 1)] * 2
    assert sorted(e.grade.reward or 0.0 for e in ended) == [0.0, 1.0]


def test_a_local_rollout_at_the_wall_time_limit_is_graded() -> None:
    class Slow(Says):
        def sample(self, turns: list[Turn]) -> list[Sample]:
            time.sleep(0.02)
            return super().sample(turns)

    (one,) = play(lambda: GuessEnv(9), Slow(), rollouts(1), max_steps=9, limits=RolloutLimits(wall_s=0.01))
    assert (one.terminated_by, one.error, len(one.steps), one.grade.reward) == ("wall_time", None, 1, 1.0)


def test_a_rollout_costs_no_more_than_one_answer_beyond_its_limit() -> None:
    ended = played(Asked(), 2, limits=RolloutLimits(cost_usd=0.6), turns=9)
    assert [(e.terminated_by, len(e.steps)) for e in ended] == [("cost", 3)] * 2


def test_unneeded_rollouts_are_given_up() -> None:
    ended = played(Asked(), 3, is_needed=lambda one: one.task.task_id == "guess-2")
    told = sorted((one.task.task_id, one.terminated_by, len(one.messages) > 0) for one in ended)
    assert told == [*((f"guess-{n}", "given_up", False) for n in (0, 1)), ("guess-2", "answered", True)]
    first = iter(["set up", "first turn"])
    (one,) = played(Asked(), 1, is_needed=lambda one: next(first, None) is not None)
    assert (one.terminated_by, len(one.steps), one.grade.reward) == ("given_up", 1, None)
    assert CountedEnv.opened == set()


def test_an_interrupt_between_turns_closes_every_environment() -> None:
    done: list[LiveRollout] = []

    def check() -> None:
        if len(done) >= 3:
            raise Interrupted

    with pytest.raises(Interrupted):
        played(Asked(lambda turn: 0.01), 40, check=check, in_flight=InFlight(rollouts=4), ended=done)
    assert 3 <= len(done) < 12 and CountedEnv.opened == set()


def test_a_fatal_error_ends_all_rollouts_and_closes_every_environment() -> None:
    class Refused(Asked):
        async def ask(self, turn: Turn) -> Sample:
            if turn.messages[0]["content"] == "say b":
                raise UsageError("the key was refused")
            return await super().ask(turn)

    with pytest.raises(UsageError):
        played(Refused(), 6)
    assert CountedEnv.opened == set()


def test_tables_are_equal_whatever_rollout_ended_first(tmp_path: Path) -> None:
    def reply(body: dict, n: int) -> Reply:
        said = "ab"[sum(len(message["content"]) for message in body["messages"]) % 2]
        return Reply(body=answer(said * (body["seed"] % 3 + 1)), delay_s=(n * 7 % 5) / 100)

    sizes = {"rollouts": 1, "commands": 1, "gradings": 1}, {"rollouts": 12, "commands": 4, "gradings": 3}
    with serving(reply) as server:
        one, other = (
            collected(tmp_path / str(i), server.url, "NumberedEnv", tasks=6, samples=2, in_flight=size).manifest.outputs
            for i, size in enumerate(sizes)
        )
    assert all(one[name]["content_sha256"] == other[name]["content_sha256"] for name in ("rollouts", "steps"))


# Tool calls


class CallsEnv(GuessEnv):
    """Letters are said through a tool; `stop` ends the rollout."""

    said: ClassVar = {"letter": {"type": "string", "enum": ["a", "b"]}, "times": {"type": "integer"}}
    saying: ClassVar = {"type": "object", "properties": said, "required": ["letter"]}
    tools = (
        {"name": "say", "description": "Say a letter.", "parameters": saying},
        {"name": "stop", "description": "Finish.", "parameters": {"type": "object", "properties": {}}},
    )

    def __init__(self) -> None:
        super().__init__(turns=99)
        self.wrong = 0

    def use_tools(self) -> None:
        """Nothing else is understood anyway."""

    def call(self, name: str, arguments: Mapping[str, Any]) -> Observation:
        if name == "stop":
            return Observation("bye", commands=("stop",), stop="answered")
        self._said.append(arguments["letter"] * arguments.get("times", 1))
        return Observation(f"said {arguments['letter']}", commands=(f"say {arguments['letter']}",), returncode=0)

    def malformed(self, error: str) -> Observation:
        self.wrong += 1
        return Observation(f"[{error}]", parse_error=error)


def carried_out(*made: tuple[str, str]) -> tuple[CallsEnv, Observation]:
    env = CallsEnv()
    env.reset(env.tasks("train", 1, 0)[0])
    return env, run_calls(env, action("", *made))


@pytest.mark.parametrize(
    ("name", "arguments", "names"),
    [
        ("shout", "{}", ("'shout'", "say, stop")),
        ("say", '{"letter": ', ("say", "JSON")),
        ("say", '["a"]', ("say", "object")),
        ("say", "{}", ("'letter'",)),
        ("say", '{"letter": "a", "loud": true}', ("'loud'", "letter, times")),
        ("say", '{"letter": 1}', ("'letter'", "string")),
        ("say", '{"letter": "a", "times": true}', ("'times'", "integer")),
        ("say", '{"letter": "c"}', ("'letter'", "['a', 'b']")),
    ],
)
def test_a_malformed_call_does_not_stop_other_calls(name: str, arguments: str, names: tuple) -> None:
    env, seen = carried_out((name, arguments), ("say", '{"letter": "b"}'))
    assert all(word in str(seen.parse_error) for word in names) and env.wrong == 1
    assert seen.commands == ("say b",) and seen.results == (f"[{seen.parse_error}]", "said b")
    assert seen.content == "\n".join(seen.results) and seen.returncode == 0 and seen.stop is None


@pytest.mark.parametrize(("times", "said"), [('"2"', "bb"), ('"two"', None), ('"2.5"', None), ('"True"', None)])
def test_a_text_that_stands_for_a_value_of_the_declared_type_is_that_value(times: str, said: str | None) -> None:
    """Calls in XML, as Qwen 3.5 writes them, have no other values."""
    env, seen = carried_out(("say", f'{{"letter": "b", "times": {times}}}'))
    assert (env._said, bool(seen.parse_error)) == ([said] if said else [], said is None)


def test_no_call_is_executed_after_the_end() -> None:
    _, seen = carried_out(("stop", "{}"), ("say", '{"letter": "b"}'))
    assert seen.stop == "answered" and seen.commands == ("stop",) and len(seen.results) == 2


def native(*made: tuple[str | None, Any], text: str | None = None) -> dict[str, Any]:
    """A server's answer with calls."""
    body = answer("")
    calls = [call(name, arguments, f"x{n}") for n, (name, arguments) in enumerate(made)]
    body["choices"][0]["message"] = assistant(text, tool_calls=calls)
    return body


def test_native_and_parsed_calls_are_recorded_alike(tmp_path: Path) -> None:
    """The second server has no parser of calls: what the model writes comes as text."""
    turns = [[("say", '{"letter": "a"}'), ("say", '{"letter": "b", "times": 2}')], [("say", '{"letter": 5}')]]
    turns += [[], [("stop", "{}")]]

    def parsed(body: dict, n: int) -> Reply:
        return Reply(body=native(*turns[n], text="Hm.") if turns[n] else answer("Hm."))

    def unparsed(body: dict, n: int) -> Reply:
        return Reply(body=answer(action("Hm.", *turns[n]) + "<|im_end|>" * bool(turns[n])))

    runs = []
    for name, reply in (("native", parsed), ("qwen3", unparsed)):
        with serving(reply) as server:
            runs.append(collected(tmp_path / name, server.url, "CallsEnv", policy={"tool_calls": name}))
            asked = server.requests
        assert [tool["function"]["name"] for tool in asked[0]["tools"]] == ["say", "stop"]
        _, said, one, two = asked[1]["messages"]
        assert [call["function"]["name"] for call in said["tool_calls"]] == ["say", "say"] and said["content"] == "Hm."
        assert [one["tool_call_id"], two["tool_call_id"]] == [call["id"] for call in said["tool_calls"]]
        assert (one["role"], one["content"], two["content"]) == ("tool", "said a", "said b")
        assert [m["role"] for m in asked[3]["messages"]][-3:] == ["tool", "assistant", "user"]
    first, second = (run.rows(STEP) for run in runs)
    recorded = ("action", "commands", "parse_error", "observation", "new_messages_json", "state_sha256", "reward")
    assert [[row[name] for name in recorded] for row in first] == [[row[name] for name in recorded] for row in second]
    assert [row["commands"] for row in first] == [["say a", "say b"], [], [], ["stop"]]
    assert "string" in first[1]["parse_error"] and "found none" in first[2]["parse_error"]
    (rollout,) = runs[0].rows(ROLLOUT)
    assert rollout["reward"] == pytest.approx(1 / 3) and rollout["error_type"] is None
    assert [tool["name"] for tool in json.loads(rollout["tools_json"])] == ["say", "stop"]
    assert set(runs[0].manifest.summary["failed_checks"]) == {"actions well-formed"}  # two of four were not


def test_object_arguments_and_missing_names_are_read(tmp_path: Path) -> None:
    replies = [native(("say", {"letter": "a"}), (None, "")), native(("stop", None))]
    with serving(lambda body, n: Reply(body=replies[n])) as server:
        rows = collected(tmp_path, server.url, "CallsEnv", policy={"tool_calls": "native"}).rows(STEP)
        assert len(server.requests) == 2
    assert rows[0]["commands"] == ["say a"] and "no tool ''" in rows[0]["parse_error"]


def test_an_environment_without_tools_is_refused(tmp_path: Path) -> None:
    with serving(lambda body, n: Reply(body=answer("a"))) as server, pytest.raises(UsageError, match="guess"):
        collected(tmp_path, server.url, "GuessEnv", policy={"tool_calls": "native"})


def test_teachers_and_exports_get_the_students_tools(tmp_path: Path) -> None:
    with serving(lambda body, n: Reply(body=native(("stop", "{}")))) as server:
        rollouts = collected(tmp_path, server.url, "CallsEnv", policy={"tool_calls": "native"})
        student, asked = server.requests[-1]["tools"], len(server.requests)
        table = [{"name": "one", "model": "one", "base_url": server.url, "max_tokens": 64, "price": "unknown"}]
        runner.execute("replay-teachers", {"rollouts": rollouts}, replay_teachers.Config(teachers=table), root=tmp_path)
        of_teacher = server.requests[asked:]
    assert student and of_teacher and all(body["tools"] == student for body in of_teacher)
    (transcript,) = Transcripts(rollouts)
    assert transcript.tools == [dict(tool) for tool in CallsEnv.tools]


# The history `summarise`: the policy sums up what it can soon not read any more, in a step of its own

LIMIT, SHOWN = 1200, 150


class LongEnv(GuessEnv):
    """Shows 150 characters at every step."""

    def step(self, text: str) -> Observation:
        self._said.append(text)
        stop = "answered" if len(self._said) >= 12 else None
        return Observation(f"{len(self._said):03d}" * (SHOWN // 3), commands=(text,), returncode=0, stop=stop)

    def grade(self) -> Grade:
        """What was acted on is what counts: no summary reaches the environment."""
        return Grade(reward=float(len(self._said) == 12 and not any("summary" in text for text in self._said)))


def summing_up(body: dict[str, Any], earlier: int) -> Reply:
    """An action, or a summary where one is asked for; tokens are counted as bytes are."""
    asked = body["messages"][-1]["content"].endswith(SUMMARY_PROMPT)
    size = sum(len(message["content"].encode()) for message in body["messages"])
    text = f"summary of {len(body['messages'])} messages" if asked else f"look {len(body['messages'])}"
    return Reply(body=answer(text, size, len(text), cost=0.001))


def summarised(root: Path, url: str, **more: Any) -> Run:
    settings = {"history": "summarise", "limits": {"context_tokens": LIMIT}, "max_steps": 20, **more}
    return collected(root, url, "LongEnv", policy={"max_tokens": 50}, **settings)


def summaries(steps: list[Row]) -> list[Row]:
    return [row for row in steps if orjson.loads(row["new_messages_json"])[-1]["content"] == SUMMARY_PROMPT]


def test_history_summarise_stays_within_the_context(tmp_path: Path) -> None:
    with serving(strict(summing_up)) as server:
        run = summarised(tmp_path, server.url)
        asked = [body["messages"] for body in server.requests]
    assert run.manifest.outcome.ok, run.manifest.summary
    (rollout,), steps = run.rows(ROLLOUT), run.rows(STEP)
    made = summaries(steps)
    assert rollout["terminated_by"] == "answered" and rollout["reward"] == 1.0 and len(made) >= 2
    assert len(steps) == len(asked) == 12 + len(made)
    assert {row["history"] for row in steps} == {rollout["history"]} == {"summarise"}
    assert [(row["commands"], row["observation"]) for row in made] == [([], PROMPTS["after_summary"])] * len(made)
    sizes = [sum(len(message["content"]) for message in messages) for messages in asked]
    assert max(sizes) + 50 <= LIMIT < sum(len(row["observation"]) for row in steps)
    roles = [message["role"] for message in asked[-1]]
    assert roles == ["user", "assistant"] * (len(roles) // 2) + ["user"], "they take turns, as templates want it"
    after = asked[asked.index(next(m for m in asked if m[-1]["content"].endswith(SUMMARY_PROMPT))) + 1]
    assert [m["content"] for m in after] == ["say a", made[0]["action"], PROMPTS["after_summary"]]
    assert rollout["cost_usd"] == pytest.approx(0.001 * len(steps))
    assert rollout["prompt_tokens"] == sum(sizes)
    assert rollout["completion_tokens"] == sum(len(row["action"]) for row in steps)
    assert states(steps) == asked
    assert state_digests(steps) == [row["state_sha256"] for row in steps]


def test_limits_hold_for_history_summarise(tmp_path: Path) -> None:
    """Where a summary would not fit, the work is graded as it is; summaries do not count against the steps."""
    with serving(summing_up) as server:
        full = summarised(tmp_path / "full", server.url, limits={"context_tokens": 260})
        steps = summarised(tmp_path / "steps", server.url, max_steps=10).rows(STEP)
    assert full.rows(ROLLOUT)[0]["terminated_by"] == "context" and not summaries(full.rows(STEP))
    assert len(summaries(steps)) >= 1 and len(steps) - len(summaries(steps)) == 10
    assert steps[-1]["terminated_by"] == "max_steps"
    with pytest.raises(ValueError, match=r"limits\.context_tokens"):
        collect.Config(history="summarise")


@pytest.mark.parametrize("role", ["user", "tool"])
def test_visible_messages_begin_at_the_last_summary(role: str) -> None:
    opening, ask, after = [system("s"), user("task")], user(SUMMARY_PROMPT), user(PROMPTS["after_summary"])
    one = [*opening, assistant("a"), {"role": role, "content": "seen"}]
    assert visible_messages(one, "summarise") == one
    merged = user(f"seen\n\n{SUMMARY_PROMPT}")
    assert visible_messages([*one, ask], "summarise") == ([*one[:-1], merged] if role == "user" else [*one, ask])
    two = [*one, ask, assistant("sum"), after]
    assert visible_messages(two, "summarise") == [*opening, assistant("sum"), after]
    three = [*two, assistant("b"), {"role": role, "content": "more"}, ask, assistant("sums"), after]
    assert visible_messages(three, "summarise") == [*opening, assistant("sums"), after]


@pytest.mark.parametrize("stage", ["collect", "evaluate"])
@pytest.mark.parametrize(("attempts", "steps"), [(1, "1 step"), (3, "3 steps"), (30, "8 steps")])
def test_a_plan_bounds_rollouts_by_the_answers_that_their_environment_takes(
    stage: str, attempts: int, steps: str
) -> None:
    arms = {"policies": {"A": {"model": "smollm2"}, "B": {"model": "smollm2"}}, "baseline": "A", "treatment": "B"}
    played = {"policy": {"model": "smollm2"}} if stage == "collect" else {**arms, "control": None}
    config = {"env": {"name": "skills", "options": {"attempts": attempts}}, **played}
    planned = load_stage(stage).plan(Inputs({}), load_stage(stage).config.model_validate(config))
    assert f"a rollout at most {steps}" in planned.notes
