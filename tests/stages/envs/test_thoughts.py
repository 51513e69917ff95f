"""A thought is no action and no answer, in any environment."""

from collections.abc import Callable

import pytest
from needs import needs

from composer_stages.envs.answered import AnsweredEnv
from composer_stages.envs.base import Task
from composer_stages.envs.gsm8k.env import Gsm8kEnv
from composer_stages.envs.kata.env import KataEnv
from composer_stages.envs.programs import find_program
from composer_stages.envs.skills.env import SkillsEnv
from composer_stages.pairs.actions import canonical, canonical_answer, text_form

FORMS: dict[str, Callable[[str, str], str]] = {
    "think": lambda thought, answer: f"<think>\n{thought}\n</think>\n\n{answer}",
    "opened by the template": lambda thought, answer: f"{thought}\n</think>\n\n{answer}",
    "Magistral": lambda thought, answer: f"[THINK]{thought}[/THINK]{answer}",
    "GPT-OSS": lambda thought, answer: (
        f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant<|channel|>final<|message|>{answer}"
    ),
}
TASK = Task("t", "any", "eval", "f", "question", {"answer": "42", "check": {}, "shots": [], "system": "s"})
thinks = pytest.mark.parametrize("said", FORMS.values(), ids=FORMS)


@thinks
def test_no_draft_is_executed(said: Callable[[str, str], str]) -> None:
    env = KataEnv(sandbox="none")
    env.reset(env.tasks("train", 1, 0)[0])
    draft, action = "```bash\nsubmit\n```", "```bash\necho hello\n```"
    assert env.step(said(draft, "I need more.")).parse_error is not None
    observation = env.step(said(draft, action))
    env.close()
    assert (observation.commands, observation.stop) == (("echo hello",), None)
    assert canonical(said(draft, action)) == canonical(action)


@thinks
@pytest.mark.parametrize(
    ("env", "right"),
    [
        pytest.param(Gsm8kEnv(), "#### 42", marks=needs("math"), id="gsm8k"),
        pytest.param(SkillsEnv(shots=0, loose=True), "42", id="skills"),
    ],
)
def test_no_thought_is_graded(said: Callable[[str, str], str], env: AnsweredEnv, right: str) -> None:
    rewards = {}
    for thought, answer in (("#### 7, DONE", right), (right, "I do not know."), ("\\\\boxed{42}", "DONE is 7")):
        env.reset(TASK)
        env.step(said(thought, answer))
        rewards[answer] = env.grade()
    assert [grade.hidden_pass for grade in rewards.values()] == [True, False, False]
    assert rewards[right].protocol_ok and not rewards[right].hacked


@thinks
def test_no_draft_is_the_program(said: Callable[[str, str], str]) -> None:
    draft, final = (f"```python\ndef f():\n    return {number}\n```" for number in (1, 2))
    assert find_program(said(draft, final), "f") == "def f():\n    return 2\n"
    assert find_program(said(draft, "No."), "f") is None


@thinks
def test_votes_are_on_answers(said: Callable[[str, str], str]) -> None:
    assert text_form(said("7", "42")) == text_form("42") and canonical_answer(said("7", "42")) == canonical_answer("42")
