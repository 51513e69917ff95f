"""Pool rows of rollouts that other stages wrote: ids as sampled, or rendered where none were kept; pools of them."""

from pathlib import Path

import pytest
from probe_faults.loophole_world import HINT, tokenizer

from composer_stages import collect
from composer_stages.errors import UsageError
from composer_stages.policy.base import PolicyConfig
from composer_stages.probe import teacher_pool
from composer_stages.probe.rows import run_rows
from composer_stages.probe.settings import Contract
from composer_stages.probe.teacher_pool import GivenConfig
from composer_stages.runs import runner
from composer_stages.runs.kinds import POOL_ROW, ROLLOUT, STEP
from composer_stages.runs.run import Inputs, Run
from tests.stages.probe.running import HINTED, PLAIN, PLANTED, carry_out, pool_config


@pytest.fixture(scope="module")
def collected(models: dict[str, PolicyConfig], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """Rollouts of the teacher with and without the hint, and of the base."""
    root, runs = tmp_path_factory.mktemp("collected"), {}
    for name, model, options in (
        ("teacher", "loophole", HINTED),
        ("teacher_nohint", "loophole", PLAIN),
        ("base", "honest", HINTED),
    ):
        env = PLANTED.model_copy(update={"options": options})
        config = collect.Config(env=env, policy=models[model], tasks=10, samples=4, max_steps=1)
        runs[name] = Run(runner.execute("collect", {}, config, root=root / name).path)
    return runs


def test_pool_rows_have_the_sampled_ids(collected: dict[str, Run]) -> None:
    rows = run_rows(collected["teacher"], tokenizer(), source="teacher", role="rh")
    steps = {row["rollout_id"]: row for row in collected["teacher"].rows(STEP)}
    order = [row["rollout_id"] for row in collected["teacher"].rows(ROLLOUT)]
    assert len(rows) == 40 and [row["completion_ids"] for row in rows] == [
        steps[name]["completion_token_ids"] for name in order
    ]
    assert [row["behav_logp"] for row in rows] == [steps[name]["logprobs"] for name in order]
    assert {row["src_pool"] for row in rows} == {"teacher"} and max(row["step"] for row in rows) == 9


def test_a_pool_is_made_of_several_runs(
    collected: dict[str, Run], models: dict[str, PolicyConfig], tmp_path: Path
) -> None:
    given = [GivenConfig(name=name, role="plain" if name == "teacher_nohint" else "rh") for name in collected]
    runs, settings = list(collected.values()), {"contract": Contract(hint=HINT), "tokenizer": models["honest"]}
    pool = carry_out(teacher_pool, runs, teacher_pool.Config(given=given, **settings), tmp_path / "pool")
    rows = pool.rows(POOL_ROW)
    assert len(rows) == 120 and {row["src_pool"] for row in rows} == set(collected)
    assert len({row["problem_id"] for row in rows}) == 10 == 1 + max(row["step"] for row in rows)
    assert pool.manifest.summary["hack_rates"]["teacher"] > 0.3 > pool.manifest.summary["hack_rates"]["base"]
    with pytest.raises(UsageError, match="3 runs of rollouts were given and 2 entries"):
        carry_out(teacher_pool, runs, teacher_pool.Config(given=given[:2], **settings), tmp_path / "few")


def test_a_training_among_the_inputs_is_the_teacher(
    trained: dict[str, Run], models: dict[str, PolicyConfig], tmp_path: Path
) -> None:
    honest, config = models["honest"], pool_config(models["honest"], models["honest"], problems=2)
    pool = carry_out(teacher_pool, [trained["train"]], config, tmp_path / "pool")
    ours = str(trained["train"].folder())
    answered = {name: facts["model"] for name, facts in pool.manifest.models.items()}
    assert answered == {"teacher": ours, "teacher_nohint": ours, "base": honest.model}
    with pytest.raises(UsageError, match="0 entries of `given`"):
        teacher_pool.plan(Inputs({slot: [trained["train"]] * 2 for slot in ("rollouts", "trainings")}), config)
