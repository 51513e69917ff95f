"""Acting by tool calls: declared to a server, carried out one after another, and mistakes are the model's."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from support.environments import GuessEnv
from support.server import Reply, answer, serving

from stages import collect, replay_teachers
from stages.envs.base import Observation, TakesCalls
from stages.envs.boundary import carry_out
from stages.errors import UsageError
from stages.formats.transcripts import Transcripts
from stages.messages import Spoken, ToolCall, write
from stages.runs import runner
from stages.runs.kinds import ROLLOUT, STEP
from stages.runs.run import Run


class CallsEnv(GuessEnv):
    """Letters are said through a tool; `stop` ends the episode."""

    tools = (
        {
            "name": "say",
            "description": "Say a letter.",
            "parameters": {
                "type": "object",
                "properties": {"letter": {"type": "string", "enum": ["a", "b"]}, "times": {"type": "integer"}},
                "required": ["letter"],
            },
        },
        {"name": "stop", "description": "Finish.", "parameters": {"type": "object", "properties": {}}},
    )

    def __init__(self) -> None:
        super().__init__(turns=99)
        self.wrong = 0

    def use_tools(self) -> None:
        """Nothing else is understood anyway."""

    def call(self, name: str, arguments: Mapping[str, Any]) -> Observation:
        """Say the letter, or stop."""
        if name == "stop":
            return Observation("bye", commands=("stop",), stop="answered")
        self._said.append(arguments["letter"] * arguments.get("times", 1))
        return Observation(f"said {arguments['letter']}", commands=(f"say {arguments['letter']}",), returncode=0)

    def malformed(self, error: str) -> Observation:
        """Count it."""
        self.wrong += 1
        return Observation(f"[{error}]", parse_error=error)


def calls(*made: tuple[str, str], text: str = "") -> str:
    return write(Spoken(text, tuple(ToolCall(name, arguments) for name, arguments in made)))


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("shout", "{}", "There is no tool 'shout'; there is say, stop."),
        ("say", '{"letter": ', "not valid JSON"),
        ("say", '["a"]', "no JSON object"),
        ("say", "{}", "needs the argument 'letter'"),
        ("say", '{"letter": "a", "loud": true}', "has no argument 'loud'; it has letter, times"),
        ("say", '{"letter": 1}', "has to be of type string"),
        ("say", '{"letter": "a", "times": true}', "has to be of type integer"),
        ("say", '{"letter": "c"}', "has to be one of ['a', 'b']"),
    ],
)
def test_a_wrong_call_is_answered_and_the_others_are_carried_out(name: str, arguments: str, words: str) -> None:
    env = CallsEnv()
    env.reset(env.tasks("train", 1, 0)[0])
    assert isinstance(env, TakesCalls)
    seen = carry_out(env, calls((name, arguments), ("say", '{"letter": "b"}')))
    assert words in str(seen.parse_error) and env.wrong == 1
    assert seen.commands == ("say b",) and seen.results == (f"[{seen.parse_error}]", "said b")
    assert seen.content == "\n".join(seen.results) and seen.returncode == 0 and seen.stop is None


def test_after_the_end_nothing_is_carried_out() -> None:
    env = CallsEnv()
    env.reset(env.tasks("train", 1, 0)[0])
    seen = carry_out(env, calls(("stop", "{}"), ("say", '{"letter": "b"}')))
    assert seen.stop == "answered" and seen.commands == ("stop",) and "Not carried out" in seen.results[1]


def native(*made: tuple[str, Any], text: str | None = None) -> dict[str, Any]:
    body = answer("")
    body["choices"][0]["message"] = {
        "role": "assistant",
        "content": text,
        "tool_calls": [
            {"id": f"x{n}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for n, (name, arguments) in enumerate(made)
        ],
    }
    return body


def collected(root: Path, url: str, tool_calls: str) -> Run:
    config = collect.Config(
        env={"name": f"{__name__}:CallsEnv"},
        policy={"model": "m", "base_url": url, "tool_calls": tool_calls},
        tasks=1,
        samples=1,
    )
    return Run(runner.execute("collect", {}, config, root=root).path)


def test_native_calls_and_calls_in_a_familys_format_are_recorded_alike(tmp_path: Path) -> None:
    """The second server has no parser of calls: what the model writes comes as text."""
    turns = [
        [("say", '{"letter": "a"}'), ("say", '{"letter": "b", "times": 2}')],
        [("say", '{"letter": 5}')],
        [],
        [("stop", "{}")],
    ]

    def parsed(body: dict, n: int) -> Reply:
        made = turns[n]
        return Reply(body=native(*made, text="Hm.") if made else answer("Hm."))

    def unparsed(body: dict, n: int) -> Reply:
        blocks = [f'<tool_call>\n{{"name": "{name}", "arguments": {given}}}\n</tool_call>' for name, given in turns[n]]
        return Reply(body=answer("\n".join(["Hm.", *blocks]) + "<|im_end|>" * bool(blocks)))

    runs = []
    for name, reply in (("native", parsed), ("qwen3", unparsed)):
        with serving(reply) as server:
            runs.append(collected(tmp_path / name, server.url, name))
            asked = server.requests
        assert [tool["function"]["name"] for tool in asked[0]["tools"]] == ["say", "stop"]
        _, said, one, two = asked[1]["messages"]
        assert [call["function"]["name"] for call in said["tool_calls"]] == ["say", "say"] and said["content"] == "Hm."
        assert [one["tool_call_id"], two["tool_call_id"]] == [call["id"] for call in said["tool_calls"]]
        assert (one["role"], one["content"], two["content"]) == ("tool", "said a", "said b")
        assert [m["role"] for m in asked[3]["messages"]][-3:] == ["tool", "assistant", "user"]
    first, second = (run.rows(STEP) for run in runs)
    told = ("action", "commands", "parse_error", "observation", "new_messages_json", "state_sha256", "reward")
    assert [[row[name] for name in told] for row in first] == [[row[name] for name in told] for row in second]
    assert [row["commands"] for row in first] == [["say a", "say b"], [], [], ["stop"]]
    assert "type string" in first[1]["parse_error"] and "found none" in first[2]["parse_error"]
    (rollout,) = runs[0].rows(ROLLOUT)
    assert rollout["reward"] == pytest.approx(1 / 3) and rollout["error_type"] is None
    assert [tool["name"] for tool in json.loads(rollout["tools_json"])] == ["say", "stop"]
    failed = set(runs[0].manifest.summary["gate_failed"])
    assert failed == {"actions well-formed"}  # two of four were not


def test_arguments_that_are_an_object_and_names_that_are_missing_are_read(tmp_path: Path) -> None:
    def reply(body: dict, n: int) -> Reply:
        return Reply(body=native(("say", {"letter": "a"}), (None, "")) if n == 0 else native(("stop", None)))

    with serving(reply) as server:
        rows = collected(tmp_path, server.url, "native").rows(STEP)
        assert len(server.requests) == 2
    assert rows[0]["commands"] == ["say a"] and "no tool ''" in rows[0]["parse_error"]


def test_an_environment_without_tools_is_refused(tmp_path: Path) -> None:
    with serving(lambda body, n: Reply(body=answer("a"))) as server:
        config = collect.Config(
            env={"name": "support.environments:GuessEnv"},
            policy={"model": "m", "base_url": server.url, "tool_calls": "native"},
        )
        with pytest.raises(UsageError, match="guess declares no tools"):
            runner.execute("collect", {}, config, root=tmp_path)


def test_teachers_and_other_programs_get_the_tools_that_the_student_had(tmp_path: Path) -> None:
    def stops(body: dict, n: int) -> Reply:
        return Reply(body=native(("stop", "{}")))

    with serving(stops) as server:
        rollouts = collected(tmp_path, server.url, "native")
        student = server.requests[-1]["tools"]
    with serving(stops) as server:
        table = [{"name": "one", "model": "one", "base_url": server.url, "max_tokens": 64, "price": "unknown"}]
        runner.execute("replay-teachers", {"rollouts": rollouts}, replay_teachers.Config(teachers=table), root=tmp_path)
        assert student and all(body["tools"] == student for body in server.requests)
    (transcript,) = Transcripts(rollouts)
    assert transcript.tools == [dict(tool) for tool in CallsEnv.tools]
