"""Rollouts and teachers' answers to their states, drawn at random, with everything that may be odd about them."""

import random
from pathlib import Path
from typing import Any

from support.runs import written

from composer_stages.runs import store
from composer_stages.runs.kinds import ROLLOUT, STEP, TASK, TEACHER_ACTION
from composer_stages.runs.run import InputRef, Run

TEACHERS = ("t", "u", "v")


def command(text: str) -> str:
    """An action that runs this."""
    return f"```bash\n{text}\n```"


ACTIONS = [command("ls"), command("ls "), command("cat 'a'"), command("cat a"), command("make  x"), "no command"]
"""Six texts in three classes, and one that is malformed."""


def drawn(root: Path, seed: int, *, rollouts: int = 120, most_steps: int = 5) -> dict[str, Run]:
    """The two runs that `extract-pairs` reads."""
    chance = random.Random(seed)
    steps, told, answers, states = [], [], [], dict[str, dict[str, Any]]()
    for number in range(rollouts):
        task, name = f"task-{number // 4}", f"{task_word(number)}-{number}"
        said, length = "Mend it.", chance.randint(1, most_steps)
        for step in range(length):
            action = chance.choice(ACTIONS)
            state = store.digest([task, said])
            row = {"rollout_id": name, "task_id": task, "step": step, "num_steps": length, "state_sha256": state}
            cut = {"action": action, "truncated": chance.random() < 0.1, "observation": "ok"}
            ids = {"prompt_delta_token_ids": [step], "completion_token_ids": [7], "prefix_ok": False}
            news = {"new_messages_json": store.encode([{"role": "user", "content": said}]).decode()}
            steps.append(row | cut | news | (ids if number % 2 else {}))
            states.setdefault(state, row)
            said = f"{said} {chance.randrange(2)}"
        told.append({"rollout_id": name, "task_id": task, "hidden_pass": chance.choice([True, False, None])})
    for state, row in states.items():
        for teacher in TEACHERS:
            asked = chance.randrange(4) if chance.random() < 0.95 else 0
            answers += [row | _answer(teacher, n, chance) | {"unit_id": f"{state}-{teacher}-{n}"} for n in range(asked)]
    chance.shuffle(answers)
    tasks = [{"task_id": f"task-{i}", "family": f"f{i % 2}", "data_json": "{}"} for i in range(rollouts // 4 + 1)]
    played = {"config": {"env": {"name": "kata"}}}  # where a text without a command is no action
    first = Run(written(root, "collect/one", [(TASK, tasks), (ROLLOUT, told), (STEP, steps)], **played))
    asked = InputRef(stage="collect", path=str(first.path), fingerprint="0", content=first.manifest.content)
    second = written(root, "replay-teachers/two", [(TEACHER_ACTION, answers)], inputs={"rollouts": [asked]})
    return {"rollouts": first, "teacher_actions": Run(second)}


def task_word(number: int) -> str:
    """Names that do not sort as numbers do."""
    return "ab"[number % 2]


def _answer(teacher: str, sample: int, chance: random.Random) -> dict[str, Any]:
    failed = chance.random() < 0.05
    cost = None if failed or chance.random() < 0.02 else chance.random() / 1000
    said = {
        "action": None if failed else ACTIONS[0] if chance.random() < 0.65 else chance.choice(ACTIONS),
        "finish_reason": "length" if chance.random() < 0.05 else "stop",
        "error_type": "timeout" if failed else None,
    }
    served = chance.choice([None, "", f"{teacher}-1", f"{teacher}-2", "same"])
    return said | {"teacher": teacher, "sample_idx": sample, "model": teacher, "served_model": served, "cost_usd": cost}
