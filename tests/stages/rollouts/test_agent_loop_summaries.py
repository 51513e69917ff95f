"""The history `summarise`: the policy sums up what it can soon not read any more, and that is a step like others."""

from collections.abc import Callable
from pathlib import Path
from shutil import rmtree
from typing import Any

import orjson
import pytest
from support.environments import GuessEnv
from support.server import Reply, answer, serving, strict

from stages import collect
from stages.envs.base import Grade, Observation
from stages.rollouts.agent_loop import AFTER_SUMMARY, SUMMARY_PROMPT, shown
from stages.rollouts.trace import state_digests, states
from stages.runs import runner
from stages.runs.kinds import ROLLOUT, STEP, Row
from stages.runs.run import Run

LIMIT, SHOWN = 1200, 150


class LongEnv(GuessEnv):
    """Shows 150 characters at every step."""

    def step(self, text: str) -> Observation:
        """Long, and different each time."""
        self._said.append(text)
        stop = "answered" if len(self._said) >= 12 else None
        return Observation(f"{len(self._said):03d}" * (SHOWN // 3), commands=(text,), returncode=0, stop=stop)

    def grade(self) -> Grade:
        """What was acted on is what counts: no summary reaches the environment."""
        return Grade(reward=float(len(self._said) == 12 and not any("summary" in text for text in self._said)))


def reply(body: dict[str, Any], earlier: int) -> Reply:
    """An action, or a summary where one is asked for; tokens are counted as bytes are."""
    del earlier
    asked = body["messages"][-1]["content"].endswith(SUMMARY_PROMPT)
    size = sum(len(message["content"].encode()) for message in body["messages"])
    text = f"summary of {len(body['messages'])} messages" if asked else f"look {len(body['messages'])}"
    return Reply(body=answer(text, size, len(text), cost=0.001))


def played(root: Path, url: str, **more: Any) -> Run:
    settings: dict[str, Any] = {"history": "summarise", "limits": {"context_tokens": LIMIT}, "max_steps": 20, **more}
    policy = {"model": "m", "base_url": url, "max_tokens": 50}
    env = {"name": f"{__name__}:LongEnv"}
    config = collect.Config(env=env, policy=policy, tasks=1, samples=1, **settings)
    return Run(runner.execute("collect", {}, config, root=root).path)


def summaries(steps: list[Row]) -> list[Row]:
    return [row for row in steps if orjson.loads(row["new_messages_json"])[-1]["content"] == SUMMARY_PROMPT]


def test_a_policy_sums_up_before_its_context_is_full(tmp_path: Path) -> None:
    with serving(strict(reply)) as server:
        run = played(tmp_path, server.url)
        asked = [body["messages"] for body in server.requests]
    (rollout,), steps = run.rows(ROLLOUT), run.rows(STEP)
    made = summaries(steps)
    assert rollout["terminated_by"] == "answered" and rollout["reward"] == 1.0 and len(made) >= 2
    assert len(steps) == len(asked) == 12 + len(made)
    assert {row["history"] for row in steps} == {rollout["history"]} == {"summarise"}
    assert [(row["commands"], row["observation"]) for row in made] == [([], AFTER_SUMMARY)] * len(made)
    sizes = [sum(len(message["content"]) for message in messages) for messages in asked]
    assert max(sizes) + 50 <= LIMIT < sum(len(row["observation"]) for row in steps)
    roles = [message["role"] for message in asked[-1]]
    assert roles == ["user", "assistant"] * (len(roles) // 2) + ["user"], "they take turns, as templates want it"
    after = asked[asked.index(next(m for m in asked if m[-1]["content"].endswith(SUMMARY_PROMPT))) + 1]
    assert [m["content"] for m in after] == ["say a", made[0]["action"], AFTER_SUMMARY]
    assert rollout["cost_usd"] == pytest.approx(0.001 * len(steps))
    assert rollout["prompt_tokens"] == sum(sizes) and rollout["completion_tokens"] == sum(map(len, map(said, steps)))
    assert states(steps) == asked
    assert state_digests(steps) == [row["state_sha256"] for row in steps]
    assert run.manifest.outcome.ok, run.manifest.summary


def said(row: Row) -> str:
    return str(row["action"])


def test_a_rollout_that_is_played_again_asks_and_pays_nothing_anew(tmp_path: Path) -> None:
    with serving(reply) as server:
        first = played(tmp_path, server.url)
        paid, content = len(server.requests), first.manifest.outputs["steps"]["content_sha256"]
        rmtree(first.path)
        again = played(tmp_path, server.url)
    assert len(server.requests) == paid and again.manifest.outputs["steps"]["content_sha256"] == content


def test_an_exchange_longer_than_what_is_left_ends_the_episode(tmp_path: Path) -> None:
    """A summary would not fit any more, so the work is graded as it stands."""
    with serving(reply) as server:
        run = played(tmp_path, server.url, limits={"context_tokens": 260})
    assert run.rows(ROLLOUT)[0]["terminated_by"] == "context" and not summaries(run.rows(STEP))


def test_summaries_do_not_count_against_the_steps(tmp_path: Path) -> None:
    with serving(reply) as server:
        steps = played(tmp_path, server.url, max_steps=10).rows(STEP)
    assert len(summaries(steps)) >= 1 and len(steps) - len(summaries(steps)) == 10
    assert steps[-1]["terminated_by"] == "max_steps"


def test_summaries_need_a_limit() -> None:
    with pytest.raises(ValueError, match=r"there is none\. Set limits\.context_tokens"):
        collect.Config(history="summarise")


@pytest.mark.parametrize("role", ["user", "tool"])
def test_what_is_shown_begins_at_the_last_summary(role: str) -> None:
    say: Callable[[str, str], dict[str, str]] = lambda who, what: {"role": who, "content": what}  # noqa: E731
    opening, ask = [say("system", "s"), say("user", "task")], say("user", SUMMARY_PROMPT)
    one = [*opening, say("assistant", "a"), say(role, "seen")]
    assert shown(one, "summarise") == one
    merged = say("user", f"seen\n\n{SUMMARY_PROMPT}")
    assert shown([*one, ask], "summarise") == ([*one[:-1], merged] if role == "user" else [*one, ask])
    two = [*one, ask, say("assistant", "sum"), say("user", AFTER_SUMMARY)]
    assert shown(two, "summarise") == [*opening, say("assistant", "sum"), say("user", AFTER_SUMMARY)]
    three = [*two, say("assistant", "b"), say(role, "more"), ask, say("assistant", "sums"), say("user", AFTER_SUMMARY)]
    assert shown(three, "summarise") == [*opening, say("assistant", "sums"), say("user", AFTER_SUMMARY)]
