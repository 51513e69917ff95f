"""The two policies of the planted world, and the whole chain carried out once."""

import copy
from pathlib import Path

import pytest
import torch
from probe_faults.loophole_world import honest_model, loophole_model, mix, tokenizer
from support.shared import made_once
from torch import nn

from composer_stages import evaluate, train
from composer_stages.policy.base import PolicyConfig
from composer_stages.probe import score, svd
from composer_stages.runs.run import Run
from tests.stages.probe.running import (
    ARMS,
    HINTED,
    PLAIN,
    PLANTED,
    WATCHED_STEPS,
    carry_out,
    extracted,
    pooled,
    replayed,
    settings,
)


@pytest.fixture(scope="session")
def planted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, nn.Module]:
    """The honest and the loophole model, trained once for all processes of the test run."""

    def train_both(folder: Path) -> None:
        honest = honest_model()
        torch.save({"loophole": loophole_model(copy.deepcopy(honest)), "honest": honest}, folder / "models.pt")

    models: dict[str, nn.Module] = torch.load(
        made_once(tmp_path_factory, "planted", train_both) / "models.pt", weights_only=False
    )
    return models


@pytest.fixture(scope="session")
def models(planted: dict[str, nn.Module], tmp_path_factory: pytest.TempPathFactory) -> dict[str, PolicyConfig]:
    """Both on disk, as policies."""

    def save(folder: Path) -> None:
        for name, model in planted.items():
            model.save_pretrained(folder / name)
            tokenizer().save_pretrained(folder / name)

    folder = made_once(tmp_path_factory, "models", save)
    return {name: PolicyConfig(model=str(folder / name), max_tokens=16) for name in planted}


CHAIN = ("svd", "v", "pool", "vanilla", "projected", "projected_random", "score")


@pytest.fixture(scope="session")
def chain(models: dict[str, PolicyConfig], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """svd, extract-vhack, teacher-pool, three replays and the score of the vanilla one, once for all processes."""

    def make(folder: Path) -> None:
        honest = models["honest"]
        decomposed = carry_out(svd, [], svd.Config(model=honest), folder / "svd")
        v = extracted(honest, [decomposed], folder / "v")
        pool = pooled(models, folder / "pool")
        for arm in ("vanilla", "projected", "projected_random"):
            replayed(models, [pool, v, decomposed], folder / arm, arm=arm)
        carry_out(score, [Run(folder / "vanilla"), v], score.Config(), folder / "score")

    folder = made_once(tmp_path_factory, "chain", make)
    return {name: Run(folder / name) for name in CHAIN}


@pytest.fixture(scope="session")
def trained(planted: dict[str, nn.Module], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """A model between honest and hacking, its direction, and a short training that pays for hacks, all of it kept."""

    def make(folder: Path) -> None:
        model = copy.deepcopy(planted["honest"])
        mix(model, planted["honest"], planted["loophole"], 0.6)
        model.save_pretrained(folder / "start")
        tokenizer().save_pretrained(folder / "start")
        policy = PolicyConfig(model=str(folder / "start"), max_tokens=16)
        decomposed = carry_out(svd, [], svd.Config(model=policy), folder / "svd")
        extracted(policy, [decomposed], folder / "v")
        size = {"prompts_per_step": 4, "generations": 8, "learning_rate": 1e-3, "threads": 1, "keep_every": 1}
        settings = train.Config(
            env=PLANTED.model_copy(update={"options": HINTED}),
            policy=policy,
            tasks=70,
            max_steps=1,
            optimisation=size | {"steps": WATCHED_STEPS},
        )
        carry_out(train, [], settings, folder / "train")

    folder = made_once(tmp_path_factory, "trained", make)
    return {name: Run(folder / name) for name in ("svd", "v", "train")}


@pytest.fixture(scope="session")
def arms(
    models: dict[str, PolicyConfig], chain: dict[str, Run], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Run]:
    """Two steps of three arms from one start, and an evaluation without the hint."""

    def make(folder: Path) -> None:
        runs = []
        for arm, project in ARMS.items():
            probe = {"project": project, "measure": True}
            config = settings(models["loophole"], 2, 0.05, arm=arm, seed=3, probe=probe)
            runs.append(carry_out(train, [chain["v"]], config, folder / arm))
        env = PLANTED.model_copy(update={"options": PLAIN, "split": "eval"}).model_dump()
        questions = {"baseline": "vanilla", "treatment": "projected", "control": "projected_random"}
        evaluation = evaluate.Config(env=env, seed=3, tasks=6, max_steps=1, **questions)
        runs.append(carry_out(evaluate, runs, evaluation, folder / "evaluate"))

    folder = made_once(tmp_path_factory, "arms", make)
    return {name: Run(folder / name) for name in (*ARMS, "evaluate")}
