"""Groups of answers with advantages, and sources that share a model."""

from pathlib import Path
from typing import Any

from probe_faults.loophole_world import PlantedEnv

from composer_stages.policy.base import PolicyConfig
from composer_stages.probe.rows import with_advantages
from composer_stages.probe.settings import SourceConfig
from composer_stages.probe.sources import SourcePolicies, answers


class Models:
    """The parts of a run's writer that loading models needs; records the facts of each model."""

    def __init__(self, cache: Path) -> None:
        self.cache, self.found = cache, dict[str, Any]()

    def progress(self, what: str, done: int, total: int) -> None:
        """Ignore progress."""

    def model(self, name: str, **facts: Any) -> None:
        """Record the facts of a model."""
        self.found[name] = facts


def test_advantages_are_rewards_less_the_mean_of_their_problem() -> None:
    rewards = {"p": [1.0, 0.0, 0.0, 1.0], "q": [1.0, 1.0], "r": [0.0, 3.0, 0.0], "s": [0.25]}
    rows = [{"problem_id": problem, "reward": reward} for problem, some in rewards.items() for reward in some]
    judged, groups = with_advantages(rows)
    assert groups == list(rewards.values())
    assert [row["advantage"] for row in judged] == [0.5, -0.5, -0.5, 0.5, 0.0, 0.0, -1.0, 2.0, -1.0, 0.0]
    assert "advantage" not in rows[0] and with_advantages([]) == ([], [])


def test_sources_of_one_model_share_it_and_answer_by_seed(models: dict[str, PolicyConfig], tmp_path: Path) -> None:
    sources = [
        SourceConfig(name="teacher", policy=models["loophole"]),
        SourceConfig(name="teacher_nohint", policy=models["loophole"].model_copy(update={"temperature": 0.5})),
        SourceConfig(name="base", policy=models["honest"]),
    ]
    out = Models(tmp_path)
    loaded = SourcePolicies(sources, out)
    assert list(loaded.by_name) == list(out.found) == ["teacher", "teacher_nohint", "base"]
    teacher, plain, base = loaded.by_name.values()
    assert teacher.model is plain.model is not base.model and plain.config.temperature == 0.5
    assert loaded.tokenizer is teacher.tokenizer and out.found["base"]["lora"] == ""

    def played(seed: int) -> list[dict[str, Any]]:
        tasks = PlantedEnv().tasks("train", 3, 0)
        return answers(PlantedEnv, teacher, tasks, 4, seed, "teacher", max_steps=1)

    rows = played(0)
    assert len(rows) == 12 and {row["src_pool"] for row in rows} == {"teacher"}
    assert played(0) == rows and [row["completion_ids"] for row in played(1)] != [r["completion_ids"] for r in rows]
    checks = {check.name: check.status for check in loaded.guards([*rows, *[r | {"src_pool": "base"} for r in rows]])}
    assert len(checks) == 1
