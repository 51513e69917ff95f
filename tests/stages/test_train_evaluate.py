"""train and evaluate on a scripted environment: pairs where they are needed, arms that can be compared, a verdict."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
from pydantic import ValidationError
from support.models import save_tiny
from support.server import Reply, answer, serving
from support.trainings import ENV, SMALL, metrics_of, trained
from transformers import AutoModelForCausalLM

from stages import evaluate, extract_pairs, replay_teachers, train
from stages.errors import BadInput, UsageError
from stages.evaluation.verdict import EXIT_CODES
from stages.policy.adapters import CheckpointInfo
from stages.policy.base import PolicyConfig
from stages.runs import runner
from stages.runs.kinds import CHECKPOINT, EVAL_ITEM, HINT, ROLLOUT, STEP, TRAINING_REWARD
from stages.runs.run import Inputs, Run
from stages.training.channels import CHANNELS


@pytest.fixture
def pairs(tmp_path: Path, collected: Callable[..., Run]) -> Run:
    """Pairs from text alone: three teachers on a server, all of one mind."""
    rollouts = collected()
    with serving(lambda body, n: Reply(body=answer("```bash\nabc\n```"))) as server:
        table = [{"name": name, "model": name, "base_url": server.url, "max_tokens": 99} for name in "xyz"]
        config = replay_teachers.Config(teachers=table)
        answers = Run(runner.execute("replay-teachers", {"rollouts": rollouts}, config, root=tmp_path).path)
    inputs = {"rollouts": rollouts, "teacher_actions": answers}
    return Run(runner.execute("extract-pairs", inputs, extract_pairs.Config(compare="canonical"), root=tmp_path).path)


def test_arms_train_and_are_judged(tmp_path: Path, tiny: Path, pairs: Run) -> None:
    a = trained(tmp_path, tiny, "A")
    b = trained(tmp_path, tiny, "B", pairs, weights={"dpo": 1.0, "sft": 1.0})
    c = trained(tmp_path, tiny, "C", pairs, weights={"sft": 1.0})
    AutoModelForCausalLM.from_pretrained(b.folder(CHECKPOINT))
    metrics = [orjson.loads(line) for line in (b.path / "metrics.jsonl").read_bytes().splitlines()]
    assert len(metrics) == 2 and metrics[0]["dpo/denominator"] > 0 and "sft/loss" in metrics[0]
    assert b.manifest.outputs["checkpoint"]["sha256"] != c.manifest.outputs["checkpoint"]["sha256"]

    config = evaluate.Config(env={"name": ENV, "split": "eval"}, tasks=5)
    run = Run(runner.execute("evaluate", {"arms": [a, b, c]}, config, root=tmp_path).path)
    items = run.rows(EVAL_ITEM)
    assert {item["arm"] for item in items} == {"start", "A", "B", "C"} and len(items) == 20
    verdict = orjson.loads((run.path / "verdict.json").read_bytes())
    assert verdict["decision"] in {"INVALIDATED", "PARTIAL", "UNDERPOWERED"}, "one seed validates nothing"
    outcome = run.manifest.outcome
    assert outcome.exit_code == EXIT_CODES[verdict["decision"]] and outcome.ok
    assert all(item["sampled_tokens"] > 0 for item in items)
    told: list[tuple[str, int, int]] = []
    pilot, said = evaluate.study([run], config, lambda *ready: told.append(ready))
    assert told == [("designs", done, 7) for done in range(1, 7)]
    assert pilot["rates"]["pass_rate"][1] == "pilot" and pilot["rates"]["seed_sd"][1] == "assumed"
    assert pilot["pilots"] == (f"evaluate/{run.path.name}",) and f"pilot: evaluate/{run.path.name}" in said
    assert "What to add first" in said
    assert verdict["decision"] in (run.path / "report.txt").read_text()
    assert (run.path / "chart.svg").read_bytes().startswith(b"<?xml")


def test_the_same_training_gives_the_same_bytes(tmp_path: Path, tiny: Path) -> None:
    runs = [trained(tmp_path / name, tiny, "A") for name in "ab"]
    weights = [(run.folder(CHECKPOINT) / "model.safetensors").read_bytes() for run in runs]
    assert weights[0] == weights[1]


def test_a_preference_weight_needs_pairs(tmp_path: Path, tiny: Path) -> None:
    with pytest.raises(UsageError, match=r"weights\.dpo is 1, but no pairs were given"):
        trained(tmp_path, tiny, "B", weights={"dpo": 1.0})


def test_pairs_that_nothing_uses_are_refused(tmp_path: Path, tiny: Path, pairs: Run) -> None:
    with pytest.raises(UsageError, match="no channel uses them"):
        trained(tmp_path, tiny, "A", pairs)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"weights": {"taid": 1.0}}, "need a teacher"),
        ({"hints": {"source": "llm"}}, "hints.llm"),
        ({"policy": {"temperature": 0.0}}, "no advantage"),
        ({"policy": {"base_url": "http://x"}}, "cannot be trained"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        train.Config(**settings)


def test_any_micro_batch_is_the_same_step(tmp_path: Path, tiny: Path, pairs: Run) -> None:
    """More micro-batches than pairs too; every channel, gradient norms and cosines among them."""
    teacher = save_tiny(tmp_path / "teacher", seed=5)

    def row(**micro: int) -> dict[str, Any]:
        config = train.Config(
            env={"name": ENV},
            policy={"model": str(tiny), "max_tokens": 12},
            tasks=4,
            optimisation={**SMALL, "steps": 1, "gradient_cosine_every": 1, **micro},
            weights=dict.fromkeys(CHANNELS, 1.0),
            pairs={"per_step": 2},
            hints={"per_step": 3},
            teacher={"model": str(teacher)},
        )
        folder = tmp_path / "-".join(["whole", *micro, *map(str, micro.values())])
        return metrics_of(Run(runner.execute("train", {"pairs": pairs}, config, root=folder).path))[0]

    whole = row()
    for micro in ({"micro_batch": 1}, {"micro_batch": 2}, {"max_tokens_per_micro_batch": 40}):
        cut = row(**micro)
        for name in (n for n in whole if n.partition("/")[0] in {*CHANNELS, "gradient"} or n in ("loss", "grad_norm")):
            assert cut[name] == pytest.approx(whole[name], rel=1e-3, abs=2e-4), (name, micro)
        assert {f"gradient/norm/{name}" for name in ("grpo", *CHANNELS)} <= cut.keys()


def test_rollouts_and_rewards_are_tables_of_the_run(tmp_path: Path, tiny: Path) -> None:
    run = trained(tmp_path, tiny, "A")
    rollouts, rewards = run.rows(ROLLOUT), run.rows(TRAINING_REWARD)
    assert len(rollouts) == len(rewards) == 2 * 2 * 4 and {row["source"] for row in rollouts} == {"train"}
    assert [row["rollout_id"] for row in rollouts] == [row["rollout_id"] for row in rewards]
    assert {row["rollout_id"] for row in run.rows(STEP)} == {row["rollout_id"] for row in rollouts}
    for step, logged in enumerate(metrics_of(run)):
        paid = [row["reward"] for row in rewards if row["training_step"] == step]
        assert sum(paid) / len(paid) == pytest.approx(logged["reward"], abs=1e-6)
    assert run.rows(HINT) == []


@pytest.mark.parametrize("form", ["exo_pair", "robust", "aot", "nonsense"])
def test_forms_that_the_options_cannot_express_are_refused(form: str) -> None:
    with pytest.raises(ValidationError, match="loss_type"):
        train.Config(pairs={"loss_type": form})


def test_gradient_cosines_are_reported(tmp_path: Path, tiny: Path, pairs: Run) -> None:
    small = {**SMALL, "gradient_cosine_every": 1}
    config = train.Config(
        env={"name": ENV},
        policy={"model": str(tiny), "max_tokens": 20},
        tasks=4,
        arm="B",
        optimisation=small,
        weights={"dpo": 1.0, "sft": 1.0, "sdpo": 1.0},
    )
    run = Run(runner.execute("train", {"pairs": pairs}, config, root=tmp_path).path)
    row = orjson.loads((run.path / "metrics.jsonl").read_bytes().splitlines()[0])
    assert {name for name in row if name.startswith("gradient/norm/")} == {
        f"gradient/norm/{n}" for n in ("grpo", "dpo", "sft", "sdpo")
    }
    assert -1.0 <= row["gradient/cosine/dpo~sft"] <= 1.0


def test_one_arm_twice_is_refused(tmp_path: Path, tiny: Path) -> None:
    a = trained(tmp_path, tiny, "A")
    with pytest.raises(BadInput, match="given twice"):
        evaluate.plan(Inputs({"arms": [a, a]}), evaluate.Config(env={"name": ENV, "split": "eval"}))


def test_a_checkpoint_says_what_was_trained(tmp_path: Path, tiny: Path) -> None:
    a = trained(tmp_path, tiny, "A")
    info = CheckpointInfo.of(a)
    assert (info.arm, info.train_seed, info.env, info.split) == ("A", 0, ENV, "train")
    assert info.start == PolicyConfig(model=str(tiny), max_tokens=20)
    assert set(info.task_ids) == {f"guess-{i}" for i in range(4)}
    (a.path / "checkpoint.json").unlink()
    with pytest.raises(BadInput, match=r"no checkpoint\.json"):
        evaluate.plan(Inputs({"arms": a}), evaluate.Config(env={"name": ENV, "split": "eval"}))


def test_arms_of_different_starts_are_refused(tmp_path: Path, tiny: Path) -> None:
    a = trained(tmp_path, tiny, "A")
    b = trained(tmp_path, a.folder(CHECKPOINT), "B")
    with pytest.raises(BadInput, match="did not start from the same model"):
        evaluate.plan(Inputs({"arms": [a, b]}), evaluate.Config(env={"name": ENV, "split": "eval"}))


def test_choosing_an_environment_does_not_choose_its_training_tasks() -> None:
    assert evaluate.Config().env.split == "eval"
    assert evaluate.Config(env={"name": ENV}).env.split == "eval"
    assert evaluate.Config(env={"name": ENV, "turns": 3}).env.options == {"turns": 3}


def test_tasks_that_an_arm_was_trained_on_are_refused(tmp_path: Path, tiny: Path) -> None:
    a = trained(tmp_path, tiny, "A")
    config = evaluate.Config(env={"name": ENV, "split": "train"}, tasks=6)
    alone = "treatment is to be the arm 'B', and the arms here are start, A.*--set baseline=start --set treatment=A"
    for do in (evaluate.plan, lambda inputs, config: runner.execute("evaluate", inputs, config, root=tmp_path)):
        with pytest.raises(UsageError, match=alone):
            do(Inputs({"arms": a}), config)
    config = config.model_copy(update={"baseline": "start", "treatment": "A"})
    with pytest.raises(UsageError, match=r"4 of 6 tasks, for example guess-\d, are among those that arm .A. was"):
        runner.execute("evaluate", {"arms": a}, config, root=tmp_path)
    assert not list((tmp_path / "evaluate").glob("2*"))


@pytest.mark.parametrize(("env", "equal"), [("IndifferentEnv", True), ("GuessEnv", False)])
def test_rewards_that_are_all_equal_are_said(tmp_path: Path, tiny: Path, env: str, equal: bool) -> None:
    config = train.Config(
        env={"name": f"support.environments:{env}"},
        policy={"model": str(tiny), "max_tokens": 8},
        tasks=2,
        optimisation={**SMALL, "steps": 1},
    )
    run = Run(runner.execute("train", {}, config, root=tmp_path).path)
    said = "No group had two different rewards: nothing was learned" in (run.path / "report.txt").read_text()
    assert said == equal == run.manifest.summary["all_rewards_equal"]
