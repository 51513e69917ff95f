"""Which turn is faulty, what the hint says, where it is placed, and a model that writes it."""

from pathlib import Path

import pytest
from support.environments import GuessEnv
from support.models import tiny_tokenizer
from support.server import Reply, answer, kept_in, serving

from composer_stages.envs.answered import AnsweredEnv, Question
from composer_stages.envs.base import Grade, Observation, Split, Task, TurnFault
from composer_stages.messages import following_ids, opening_ids
from composer_stages.policy.base import PolicyConfig, Sample
from composer_stages.policy.endpoint import EndpointPolicy
from composer_stages.rollouts.agent_loop import LiveRollout, Step
from composer_stages.runs.ledger import Budget
from composer_stages.training.channels import hints
from composer_stages.training.channels.hints import Hint, hinted_turn, reprompted, spread, write_hints

TOKENIZER = tiny_tokenizer()
TASK = Task("t", "e", "train", "f", "fix it")


def rollout(*turns: tuple[str, Observation]) -> LiveRollout:
    """A rollout whose prompts extend each other, as the agent loop builds them."""
    found = LiveRollout(TASK, 0, 0, messages=[{"role": "user", "content": "fix it"}])
    held: list[int] = []
    for index, (command, observation) in enumerate(turns):
        new = found.messages[found.steps[-1].num_messages if found.steps else 0 :]
        prompt = opening_ids(TOKENIZER, found.messages) if not held else held + following_ids(TOKENIZER, new[1:])
        ids = TOKENIZER(command + "<|im_end|>", add_special_tokens=False)["input_ids"]
        sample = Sample(text=command, prompt_ids=prompt, completion_ids=ids, logprobs=[-1.0] * len(ids))
        found.steps.append(Step(new, len(found.messages), "", sample, observation, index))
        found.messages = [
            *found.messages,
            {"role": "assistant", "content": command},
            {"role": "user", "content": observation.content},
        ]
        held = prompt + ids
    return found


def faults(found: LiveRollout) -> list[TurnFault]:
    """As GuessEnv, a shell, reports them."""
    return hints.faults(found, GuessEnv())


def from_templates(found: LiveRollout) -> list[Hint]:
    return [hint for hint in write_hints([(found, fault) for fault in faults(found)], None) if hint is not None]


def ran(command: str, output: str = "", code: int = 0) -> tuple[str, Observation]:
    return command, Observation(f"{output}[exit {code}]", commands=(command,), returncode=code)


@pytest.mark.parametrize(
    ("turn", "kind", "words"),
    [
        (ran("fixx it", "bash: line 1: fixx: command not found\n", 127), "unknown_command", "no command fixx"),
        (ran("cat sol.py", "cat: sol.py: No such file or directory\n", 1), "wrong_file", "no file sol.py"),
        (ran("python3 x.py", "python3: can't open file 'x.py'\n", 2), "wrong_file", "no file x.py"),
        (
            ("hello", Observation("[expected one block]", parse_error="expected one block")),
            "malformed",
            "expected one block",
        ),
    ],
)
def test_a_fault_is_hinted_at_its_own_turn(turn: tuple[str, Observation], kind: str, words: str) -> None:
    (hint,) = from_templates(rollout(ran("ls"), turn, ran("ls")))
    assert (hint.turn, hint.kind) == (1, kind)
    assert words in hint.text


def test_a_failing_test_is_the_fault_of_the_edit_before_it() -> None:
    turns = [
        ran("cat solution.py"),
        ran("sed -i s/a/b/ solution.py"),
        ran("python3 test_solution.py", "FAIL f(1, 2): 3, not 2\n", 1),
    ]
    (hint,) = from_templates(rollout(*turns))
    assert hint.turn == 1 and "FAIL f(1, 2): 3, not 2" in hint.text


def answered(content: str, hidden_pass: bool | None, stop: str | None = "answered", turns: int = 1) -> LiveRollout:
    found = rollout(*[("5", Observation(content, stop=stop))] * turns)
    found.grade = Grade(None if hidden_pass is None else float(hidden_pass), hidden_pass=hidden_pass)
    return found


def test_a_wrong_answer_is_hinted_with_what_the_environment_says() -> None:
    assert from_templates(answered("5 is wrong; the answer is 6.", hidden_pass=False)) == [
        Hint(0, "wrong_answer", "5 is wrong; the answer is 6.", "Hint: 5 is wrong; the answer is 6.")
    ]


class Capitals(AnsweredEnv):
    name, source = "capitals", "an atlas"

    def questions(self, split: Split, count: int, seed: int) -> list[Question]:
        return [Question("1", "Capital of Peru?", "Lima")]


def test_a_hint_before_an_answer_names_the_right_answer() -> None:
    """ "Hint: 'Quito' is wrong; ..." stood before anything had been answered, and made worse teachers."""
    environment = Capitals()
    (task,) = environment.tasks("train", 1, 0)
    environment.reset(task)
    found = rollout(("Quito", environment.step("Quito")))
    found.task, found.grade = task, environment.grade()
    (fault,) = hints.faults(found, environment)
    assert fault.error == environment.correction("Quito", Question("1", "", "Lima"))
    (hint,) = [one for one in write_hints([(found, fault)], None) if one is not None]
    assert hint.text == "(Answer: Lima)"


MALFORMED = rollout(("no", Observation("no block", parse_error="no block", stop="answered")))
MALFORMED.grade = Grade(0.0, hidden_pass=False)
KINDS: dict[str, tuple[LiveRollout, list[str]]] = {
    "nothing said": (answered("", hidden_pass=False), []),
    "right": (answered("5 is wrong", hidden_pass=True), []),
    "not graded": (answered("5 is wrong", hidden_pass=None), []),
    "not at its end": (answered("5 is wrong", hidden_pass=False, stop=None), []),
    "nothing answered": (answered("5 is wrong", hidden_pass=False, turns=0), []),
    "malformed, and wrong": (MALFORMED, ["malformed"]),
    "clean": (rollout(ran("cat solution.py"), ran("python3 test_solution.py", "ok\n")), []),
    "no edit that could be at fault": (rollout(ran("python3 test_solution.py", "FAIL\n", 1)), []),
}


@pytest.mark.parametrize("case", KINDS)
def test_each_fault_gets_one_hint(case: str) -> None:
    found, kinds = KINDS[case]
    assert [hint.kind for hint in from_templates(found)] == kinds


def test_the_hint_stands_in_the_message_before_the_faulty_turn() -> None:
    played = rollout(ran("ls"), ran("fixx it", "fixx: command not found\n", 127), ran("ls"))
    turn = hinted_turn(TOKENIZER, played, Hint(1, "unknown_command", "", "Hint: no."))
    assert turn is not None
    assert turn.tree.prompt == played.steps[1].sample.prompt_ids
    assert turn.tree.branches == turn.hinted.branches == (played.steps[1].sample.completion_ids,)
    before = [*(played.steps[0].sample.prompt_ids or []), *(played.steps[0].sample.completion_ids or [])]
    assert turn.hinted.prompt[: len(before)] == before, "what was sampled is not rendered again"
    rendered = [*played.messages[:2], {"role": "user", "content": f"{played.messages[2]['content']}\nHint: no."}]
    assert turn.hinted.prompt == opening_ids(TOKENIZER, rendered)


def test_a_hint_at_the_first_turn() -> None:
    turn = hinted_turn(
        TOKENIZER, rollout(ran("fixx", "fixx: command not found\n", 127)), Hint(0, "unknown_command", "", "Hint: no.")
    )
    assert turn is not None
    assert turn.hinted.prompt == opening_ids(TOKENIZER, [{"role": "user", "content": "fix it\nHint: no."}])


def test_a_model_writes_the_hint_from_action_and_error(tmp_path: Path) -> None:
    with serving(lambda body, n: Reply(body=answer("Look at the names."))) as server:
        policy = EndpointPolicy(PolicyConfig(model="m", base_url=server.url), budget=Budget(), cache=kept_in(tmp_path))
        found = rollout(ran("fixx it", "fixx: command not found\n", 127))
        written = write_hints([(found, fault) for fault in faults(found)], policy)
    assert [(h.turn, h.text, h.source) for h in written if h] == [(0, "Hint: Look at the names.", "m")]
    asked = server.requests[0]["messages"][0]["content"]
    assert "fixx it" in asked and "command not found" in asked


def test_a_failed_call_of_the_hint_model_gives_no_hint(tmp_path: Path) -> None:
    with serving(lambda body, n: Reply(500, {"error": {"message": "x"}})) as server:
        config = PolicyConfig(model="m", base_url=server.url, max_attempts=1)
        policy = EndpointPolicy(config, budget=Budget(), cache=kept_in(tmp_path))
        found = rollout(ran("fixx", "fixx: command not found\n", 127))
        assert write_hints([(found, fault) for fault in faults(found)], policy) == [None]


def test_malformed_actions_and_wrong_answers_are_faults_in_any_environment() -> None:
    found = rollout(ran("fixx", "fixx: command not found\n", 127), ("no", Observation("x", parse_error="no block")))
    assert [fault.kind for fault in hints.faults(found, object())] == ["malformed"]


def test_turns_are_spread_evenly() -> None:
    assert spread(list(range(10)), 4) == [0, 2, 5, 7] and spread([1, 2], 4) == [1, 2]


def rewarded(reward: float | None, sample: int, said: str, task: str = "t") -> LiveRollout:
    found = rollout(ran(said))
    found.task, found.sample_idx = Task(task, "e", "train", "f", "fix it"), sample
    found.grade = Grade(reward)
    return found


def test_a_rollout_is_shown_another_success_of_its_group() -> None:
    group = [rewarded(0.0, 0, "bad"), rewarded(1.0, 1, "<think>hm</think>good"), rewarded(0.5, 2, "fine")]
    other = [rewarded(None, 0, "lost", "u"), rewarded(0.4, 1, "weak", "u")]
    rows = reprompted([*group, *other], TOKENIZER, 0.5)
    assert [(r.rollout.sample_idx, r.source) for r in rows] == [
        (0, group[1].rollout_id),
        (1, group[2].rollout_id),
        (2, group[1].rollout_id),
    ], "the first success that is not the rollout itself; no success, no row"
    row = rows[0].row
    text = TOKENIZER.decode(row.hinted.prompt)
    assert "fix it\nCorrect solution:\n\ngood" in text and "hm" not in text
    assert text.endswith("\n\nCorrectly solve the original question.<|im_end|>\n<|im_start|>assistant\n")
    assert row.tree.branches == row.hinted.branches and row.logprobs is not None
    assert sum(row.mask or ()) == len(row.logprobs)


def test_a_long_demonstration_is_cut_to_the_longest_prompt() -> None:
    group = [rewarded(0.0, 0, "bad"), rewarded(1.0, 1, "x" * 20_000)]
    (found,) = reprompted(group, TOKENIZER, 0.5)
    assert len(found.row.hinted.prompt) <= 10_240 and found.demonstration.startswith("xxx")
