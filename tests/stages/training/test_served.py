"""Training against a server: its adapter follows each step and is checked, stale rollouts are corrected and counted."""

import asyncio
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from support import trainings
from support.engine import Engine, running
from support.environments import GuessEnv
from support.models import save_tiny
from support.refusals import refused
from support.trainings import metrics_of
from transformers import AutoModelForCausalLM

from composer_stages import evaluate
from composer_stages.envs.base import Task
from composer_stages.errors import ComposerError, UsageError
from composer_stages.messages import Message
from composer_stages.policy import adapters, ask_all
from composer_stages.policy.base import PolicyConfig, Sample, Turn
from composer_stages.policy.local import LocalPolicy, load_model
from composer_stages.policy.vllm import VllmPolicy
from composer_stages.rollouts import trace
from composer_stages.rollouts.agent_loop import LiveRollout, Rules
from composer_stages.rollouts.config import InFlight
from composer_stages.runs import runner
from composer_stages.runs.kinds import CHECKPOINT, EVAL_ITEM, STEP, TRAINING_REWARD, Row
from composer_stages.runs.run import Run
from composer_stages.training import weights
from composer_stages.training.distributed import Student
from composer_stages.training.rollouts import RolloutQueue, Schedule
from composer_stages.training.scoring import Tree, score, token_log_probs

ENV = "support.environments:DistinctEnv"
"""Its rewards move the policy in every step."""
SIZE = {"steps": 3, "prompts_per_step": 2, "generations": 4, "learning_rate": 3e-2}
ROUNDED = {"sync_tolerance": 0.4}
"""Of a server whose log-probs are .1 nats off on average, in each batch otherwise: coarser than 16 bits."""
WHOLE: dict[str, Any] = {"adapter": {"rank": 0}, "optimisation": {"learning_rate": 3e-3}}
"""All weights are trained."""


def trained(root: Path, engine: Engine, tiny: Path, said: list[str] | None = None, **more: Any) -> Run:
    """A training on the engine; `said` gets what it says."""
    policy = {"base_url": engine.url, "max_tokens": 12, **more.pop("policy", {})}
    size, adapter = SIZE | more.pop("optimisation", {}), {"rank": 4} | more.pop("adapter", {})
    more.setdefault("env", {"name": ENV})
    config = trainings.settings(f"vllm:{tiny}", policy=policy, optimisation=size, adapter=adapter, **more)
    told = [] if said is None else said
    return Run(runner.execute("train", {}, config, root=root, listener=lambda what, *_: told.append(what)).path)


def versions(run: Run) -> list[int]:
    """Of the policy behind each step of each rollout, in the order of training."""
    return [json.loads(row["sampling_json"])["policy_version"] for row in run.rows(STEP)]


@dataclass
class Followed:
    """A training, the weights that its server sampled from, and the evaluation of its checkpoint there."""

    run: Run
    sampled: list[str]
    most: int
    left: list[str]
    items: list[Row]
    evaluated: list[str]


@pytest.fixture(scope="module")
def followed(tiny: Path, artifacts: Path) -> Followed:
    with running(tiny) as engine:
        run = trained(artifacts, engine, tiny)
        asked = [body["model"] for path, body in engine.requests if "max_tokens" in body and "logprobs" in body]
        most, left = engine.most, list(engine.adapters)
        env = {"name": ENV, "split": "eval"}
        compare = evaluate.Config(env=env, tasks=2, baseline="start", treatment="A", control=None)
        again = Run(runner.execute("evaluate", {"arms": run}, compare, root=artifacts).path)
        return Followed(run, list(dict.fromkeys(asked)), most, left, again.rows(EVAL_ITEM), list(engine.adapters))


def test_every_step_samples_from_the_newest_weights(followed: Followed) -> None:
    assert [name.partition("-")[2] for name in followed.sampled] == ["", "version-0", "version-1", "version-2"]
    assert followed.most == 2 and not followed.left, "versions that nobody samples from take memory"
    assert versions(followed.run) == sorted(versions(followed.run)) and set(versions(followed.run)) == {0, 1, 2}
    assert all(line["sampling/sync_moved"] > 1e-3 for line in metrics_of(followed.run)[1:])
    for line in metrics_of(followed.run):
        assert line["sampling/sync_difference"] < 1e-4
        assert line["sampling/stale_rollouts"] == 0 and line["sampling/sampling_logp_difference/max"] < 1e-4
        assert line["sampling/importance_sampling_ratio/mean"] == pytest.approx(1, abs=1e-4)
        assert line["sampling/importance_sampling_ratio/clipped"] == 0


def test_the_checkpoint_has_the_last_weights_of_the_server(tmp_path: Path, tiny: Path, followed: Followed) -> None:
    assert not [item for item in followed.items if item["error_type"]] and "adapter-" in "".join(followed.evaluated)
    folder = followed.run.folder(CHECKPOINT)
    assert adapters.is_adapter(str(folder))
    assert json.loads((folder / "composer_base.json").read_text())["model"] == str(tiny)
    tree = Tree([5, 6, 7], ([8, 9, 10],))
    after, before = (
        load_model(PolicyConfig(model=str(path)), listener=lambda *told: None)[0].eval() for path in (folder, tiny)
    )
    with torch.no_grad():
        changed = token_log_probs(after, score(after, [tree])) - token_log_probs(before, score(before, [tree]))
    assert changed.abs().max() > 1e-3


COARSE = {"optimisation": ROUNDED | {"learning_rate": 3e-3}}
UNFIT: dict[str, tuple[dict[str, int], dict[str, Any], str, dict[str, Any]]] = {
    "keeps its adapter": ({"deaf": 1}, {}, "training.server-has-other-weights", {"step": 1}),
    "keeps all its weights": ({"deaf": 1}, WHOLE, "training.server-has-other-weights", {"step": 1}),
    "is late": ({"late": 1, "noisy": 200}, COARSE, "training.server-has-old-weights", {"step": 1, "playing": False}),
    "loads no weights": ({"closed": 1}, WHOLE, "policy.weights-not-loaded", {}),
    "has raw log-probs": ({"raw": 1}, {"policy": {"temperature": 0.5}}, "training.server-logprobs-raw", {}),
}


@pytest.mark.parametrize("fault", UNFIT)
def test_a_server_that_does_not_follow_stops_the_run(tmp_path: Path, tiny: Path, fault: str) -> None:
    faults, more, code, values = UNFIT[fault]
    with running(tiny, **faults) as engine:
        refused(lambda: trained(tmp_path, engine, tiny, **more), ComposerError, code=code, **values)


def test_a_server_of_another_model_stops_the_run_before_the_first_rollout(tmp_path: Path, tiny: Path) -> None:
    other = save_tiny(tmp_path / "other", seed=1)
    with running(other) as engine:
        with pytest.raises(ComposerError, match="After step 0 the server at "):
            trained(tmp_path, engine, tiny)
        assert {body["model"] for _, body in engine.requests if "logprobs" in body} == {"base"}


@pytest.mark.slow
def test_the_tolerance_is_a_setting_and_steps_too_small_to_tell_are_named_once(tmp_path: Path, tiny: Path) -> None:
    said = list[str]()
    with running(tiny, noisy=200) as engine:
        with pytest.raises(ComposerError, match=r"0\.001 is allowed"):
            trained(tmp_path / "strict", engine, tiny)
        run = trained(tmp_path, engine, tiny, said, optimisation=ROUNDED | {"learning_rate": 1e-7})
    assert sum("a server that is a step behind" in what for what in said) == 1
    assert all(0.01 < line["sampling/sync_difference"] < 0.4 for line in metrics_of(run))
    assert "sampling/sync_moved" not in metrics_of(run)[0] and metrics_of(run)[1]["sampling/sync_moved"] < 1e-4


@pytest.fixture(scope="module")
def ahead_by_one(tiny: Path, artifacts: Path) -> Run:
    """A training whose rollouts are sampled one step before they are trained on; its checkpoints are kept."""
    with running(tiny) as engine:
        return trained(artifacts, engine, tiny, optimisation={"max_staleness": 1, "keep_every": 1})


def test_rollouts_ahead_are_corrected_and_counted(ahead_by_one: Run) -> None:
    lines = metrics_of(ahead_by_one)
    stale = [line["sampling/stale_rollouts"] for line in lines]
    assert stale[0] == 0 and all(stale[1:]), "those of a step begin one step earlier"
    assert all(0 < line["sampling/staleness"] <= 1 for line in lines[1:])
    ratios = [line["sampling/importance_sampling_ratio/max"] for line in lines]
    assert ratios[0] == pytest.approx(1, abs=1e-4) and max(ratios[1:]) > 1.001 and max(ratios) <= 3.0
    assert set(versions(ahead_by_one)) == {0, 1}, "no rollouts are played behind the last step"


def test_the_logged_ratio_is_that_of_the_weights_then_and_now(tmp_path: Path, ahead_by_one: Run) -> None:
    """TRL's ratio against one from the run: log-probs under the checkpoint of a step, and those of sampling."""
    of_step = {row["rollout_id"]: row["training_step"] for row in ahead_by_one.rows(TRAINING_REWARD)}
    for step in (1, 2):
        checkpoint = PolicyConfig(model=str(ahead_by_one.path / "checkpoints" / f"step_{step:06d}"))
        now, _ = load_model(checkpoint, listener=print)
        ratios = []
        for rollout_id, rows in trace.by_rollout(ahead_by_one.rows(STEP)).items():
            if of_step[rollout_id] == step:
                for prompt, row in zip(trace.prompt_ids(rows), rows, strict=True):
                    tree = Tree(prompt or [], (row["completion_token_ids"],))
                    with torch.no_grad():
                        logps = token_log_probs(now, score(now, [tree]))
                    ratios.append((logps - torch.tensor(row["logprobs"])).exp().clamp(max=3))
        ratio, line = torch.cat(ratios), metrics_of(ahead_by_one)[step]
        clipped = (ratio == 3).float().mean().item()
        assert line["sampling/importance_sampling_ratio/clipped"] == pytest.approx(clipped)
        for name, value in (("min", ratio.min()), ("mean", ratio.mean()), ("max", ratio.max())):
            assert line[f"sampling/importance_sampling_ratio/{name}"] == pytest.approx(value.item(), abs=1e-4)
        assert (ratio - 1).abs().max() > 1e-3


def test_all_weights_are_replaced_each_step_and_restored_at_the_end(tmp_path: Path, tiny: Path) -> None:
    before = AutoModelForCausalLM.from_pretrained(tiny).state_dict()
    with running(tiny, sticky=1) as engine:
        run = trained(tmp_path, engine, tiny, **WHOLE)
        places = [body["kwargs"]["weights_path"] for path, body in engine.requests if path == "/collective_rpc"]
        resets = sum(path.startswith("/reset_prefix_cache") for path, _ in engine.requests)
        after = engine.base.state_dict()
    # Once more than there are versions, as the server kept its cached prefixes once.
    assert [Path(place).name for place in places] == [
        "version-000000",
        *(f"version-{n:06d}" for n in range(3)),
        tiny.name,
    ]
    assert resets == len(places)
    assert engine.in_memory == [True] * 4 + [False], "the model that it began with is a folder"
    assert not in_memory(), "what no server reads any more takes no memory"
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert not Path(places[0]).parent.exists(), "versions are scratch"
    assert versions(run) == sorted(versions(run)) and set(versions(run)) == {0, 1, 2}
    for line in metrics_of(run):
        assert line["sampling/sync_difference"] < 1e-5 and line["sampling/stale_rollouts"] == 0
        assert line["sampling/sampling_logp_difference/max"] < 1e-4
    ended = AutoModelForCausalLM.from_pretrained(run.folder(CHECKPOINT)).state_dict()
    assert any((ended[name] - value).abs().max() > 1e-3 for name, value in before.items())


def in_memory() -> list[str]:
    """This process' files of weights without a name."""
    return [name for fd in Path("/proc/self/fd").iterdir() if "memfd:model-" in (name := os.path.realpath(fd))]


def test_a_server_that_cannot_read_this_process_memory_gets_files(tmp_path: Path, tiny: Path) -> None:
    said = list[str]()
    with running(tiny, apart=1) as engine:
        more = {"adapter": {"rank": 0}, "policy": {"max_attempts": 1}, "optimisation": {"steps": 2}}
        trained(tmp_path, engine, tiny, said, **more)
        assert engine.in_memory == [True] + [False] * 3 and not engine.paused
    assert sum("weights travel by files" in what and "Cannot find any model weights" in what for what in said) == 1
    assert not in_memory()


def test_a_later_version_that_the_server_does_not_read_ends_the_training(tmp_path: Path, tiny: Path) -> None:
    """It is no question of memory then, and answers under way must not go on from weights that are half replaced."""
    said = list[str]()
    with running(tiny) as engine:
        replaced = engine.collective_rpc

        def full(body: dict[str, Any]) -> tuple[int, Any]:
            later = "version-000001" in body["kwargs"]["weights_path"]
            return (500, {"error": {"message": "CUDA out of memory"}}) if later else replaced(body)

        engine.collective_rpc = full  # type: ignore[method-assign]
        with pytest.raises(ComposerError, match="CUDA out of memory"):
            trained(tmp_path, engine, tiny, said, adapter={"rank": 0}, policy={"max_attempts": 1})
    assert not any("by files" in what for what in said) and not in_memory()


def test_a_file_in_memory_that_cannot_be_written_takes_none(tmp_path: Path) -> None:
    (tmp_path / "model-0").touch()
    with pytest.raises(FileExistsError):
        weights.save_in_memory({"a": torch.ones(9)}, tmp_path / "model-0")
    assert not in_memory()


def test_an_answer_under_way_goes_on_with_the_new_weights(tmp_path: Path, tiny: Path) -> None:
    """Each token has the log-prob of the weights that it was sampled with, the answer the version of the first."""
    other = save_tiny(tmp_path / "other", seed=1)
    with running(tiny) as engine:
        config = PolicyConfig(model=f"vllm:{tiny}", base_url=engine.url, max_tokens=12)
        sampler = VllmPolicy.open(config, cache=tmp_path, budget=None, listener=print)  # type: ignore[arg-type]
        sampler.sample_from(None, 3)
        engine.faults["spanning"] = 5
        with ThreadPoolExecutor(1) as thread:
            asked = thread.submit(ask_all, sampler, [Turn([{"role": "user", "content": "question"}], 0)] * 8)
            while sum("logprobs" in body for _, body in engine.requests) < 1 + 8 or engine.held < engine.under_way:
                time.sleep(0.01)
            sampler.replace_weights(str(other))
            sampler.sample_from(None, 4)
            spanning = [sample for sample in asked.result() if len(sample.completion_ids or []) > 5]
        assert spanning and not engine.paused and engine.replaced == 1
    old, new = (AutoModelForCausalLM.from_pretrained(path).eval() for path in (tiny, other))
    for sample in spanning:
        tree = Tree(sample.prompt_ids or [], (sample.completion_ids or [],))
        before, after = (token_log_probs(loaded, score(loaded, [tree])).detach() for loaded in (old, new))
        assert sample.policy_version == 3 and (before - after).abs().min() > 1e-4
        expected = torch.cat([before[:5], after[5:]])
        torch.testing.assert_close(torch.tensor(sample.logprobs), expected, atol=1e-5, rtol=0)


def test_a_second_training_on_the_same_server_stops_the_run(tmp_path: Path, tiny: Path) -> None:
    """Its weights would be those that the rollouts are sampled from, from then on."""
    with running(tiny) as engine:
        load, seen = engine.collective_rpc, list[str]()

        def overtaken(body: dict[str, Any]) -> tuple[int, Any]:
            answer = load(body)
            seen.append(body["kwargs"]["weights_path"])
            return answer

        def replaced(body: dict[str, Any]) -> tuple[int, Any]:
            # Between the comparison after step 1 and the end of its rollouts.
            if len(seen) == 2 and "prompt_logprobs" not in body:
                with torch.no_grad():
                    engine.base.lm_head.weight.mul_(0.5)
            return complete(body)

        complete = engine.completions
        engine.collective_rpc, engine.completions = overtaken, replaced  # type: ignore[method-assign]
        with pytest.raises(ComposerError, match=r"While step 1 was played, .* Give each training of all weights"):
            trained(tmp_path, engine, tiny, **WHOLE)
        assert seen[-1] == str(tiny), "it is given back"


def test_a_tied_head_is_not_replaced_on_a_cpu(tmp_path: Path, tiny: Path) -> None:
    tied = save_tiny(tmp_path / "tied")
    settings = json.loads((tied / "config.json").read_text())
    (tied / "config.json").write_text(json.dumps(settings | {"tie_word_embeddings": True}))
    with running(tiny) as engine, pytest.raises(UsageError, match="one table for embeddings and output head"):
        trained(tmp_path, engine, tied, **WHOLE)


@pytest.mark.parametrize("memory", [True, False])
def test_weights_are_written_in_several_files_in_the_type_they_compute_in(
    tmp_path: Path, tiny: Path, memory: bool
) -> None:
    with running(tiny) as engine:
        config = PolicyConfig(model=f"vllm:{tiny}", base_url=engine.url)
        sampler = VllmPolicy.open(config, cache=tmp_path, budget=None, listener=print)  # type: ignore[arg-type]
    own = AutoModelForCausalLM.from_pretrained(tiny)
    student = Student(LocalPolicy(own, sampler.tokenizer, config), mixed=True)
    sync = weights.WholeSync(sampler, tmp_path, [1, 2], student, start="", file_bytes=4000)
    sync._in_memory = memory
    sync._write(tmp_path / "version")
    files = sorted((tmp_path / "version").iterdir())
    assert {file.is_symlink() for file in files} == {memory} and len(in_memory()) == memory * len(files)
    found = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert len(files) > 3 and found.keys() == dict(own.named_parameters()).keys()
    assert all(torch.equal(found[name], value.bfloat16()) for name, value in own.named_parameters())
    sync._remove(tmp_path / "version")
    assert not in_memory()


class Running:
    """In the place of a server's process that was started here."""

    restarts = 0

    def alive(self) -> bool:
        return True


@pytest.mark.parametrize("rank", [0, 4])
def test_a_server_of_its_own_sleeps_while_a_step_trains(tmp_path: Path, tiny: Path, rank: int) -> None:
    with running(tiny) as engine:
        config = PolicyConfig(
            model=f"vllm:{tiny}", base_url=engine.url, server={"args": {"enable-sleep-mode": True}}, max_tokens=8
        )
        sampler = VllmPolicy.connect(config, engine.url, listener=print, server=Running())  # type: ignore[arg-type]
        own = AutoModelForCausalLM.from_pretrained(tiny)
        student = Student(LocalPolicy(own, sampler.tokenizer, config))
        sync: weights.WeightSync
        if rank:
            student.base = adapters.describe_base(config.in_process(), own)
            student.model = get_peft_model(own, LoraConfig(r=rank, target_modules="all-linear"))
            sync = weights.AdapterSync(sampler, tmp_path, [5, 6, 7, 8], student)
        else:
            sync = weights.WholeSync(sampler, tmp_path, [5, 6, 7, 8], student, start=str(tiny))
        levels = []
        for step in range(2):
            sync.follow(step)
            sync.played(step, [])
            levels.append(engine.asleep)
            with torch.no_grad():
                for parameter in student.model.parameters():
                    if parameter.requires_grad:
                        parameter.add_(0.01)
        assert "sampling/sync_moved" in sync.follow(2) and not engine.asleep
        assert levels == ([1, 1] if rank else [2, 2])
        sync.played(2, [])
        sync.end()
        assert engine.requests[-1][0].startswith("/sleep"), "what sleeps and ends with the run is not asked again"


class Versions:
    """In the place of a server's weights: the number of steps that it has followed."""

    def __init__(self) -> None:
        self.version, self.ended = -1, False

    def follow(self, step: int) -> dict[str, float]:
        self.version = step
        return {}

    def played(self, step: int, rollouts: Any) -> None:
        pass

    def end(self) -> None:
        self.ended = True


HELD = 3600.0
"""Seconds of a turn that does not end in a test."""


class Versioned:
    """A policy on a server: answers with the newest weights, after the seconds that a task's rollouts take a turn."""

    capture_level, batch_size = "tokens", 8
    config = PolicyConfig(model="versioned")

    def __init__(self, weights: Versions, slow: dict[str, float]) -> None:
        self.weights, self.slow, self.asked = weights, slow, Counter[str]()
        self.under_way = list[int]()
        """The versions that are being sampled from."""

    @property
    def version(self) -> int:
        return self.weights.version

    async def ask(self, turn: Turn) -> Sample:
        question, version = turn.messages[0]["content"], self.version
        self.asked[question] += 1
        self.under_way.append(version)
        try:
            await asyncio.sleep(self.slow.get(question, 0.0))
        finally:
            self.under_way.remove(version)
        return Sample(text="a", policy_version=version)

    async def drain(self) -> None:
        pass


class AskingEnv(GuessEnv):
    """Every task asks a question of its own."""

    def reset(self, task: Task) -> list[Message]:
        super().reset(task)
        return [{"role": "user", "content": task.task_id}]


class Kept(dict[str, LiveRollout]):
    """In the place of a run's journal: the rollouts that ended, by id."""

    async def ended(self, rollout: LiveRollout) -> None:
        self[rollout.rollout_id] = rollout

    def kept(self, planned: LiveRollout) -> LiveRollout | None:
        return self.get(planned.rollout_id)


def queue(
    max_staleness: int,
    make: Callable[[], Any] = AskingEnv,
    reuse: int = 1,
    steps: int = 6,
    journal: Kept | None = None,
    **slow: float,
) -> tuple[RolloutQueue, Versions]:
    """A queue over steps of one group of two rollouts. slow: seconds that a turn of a task's rollouts takes."""
    weights_of = Versions()
    schedule = Schedule(GuessEnv().tasks("train", steps, 0), groups=1, generations=2, seed=0, reuse=reuse)
    policy = Versioned(weights_of, {name.replace("_", "-"): seconds for name, seconds in slow.items()})
    rollouts = RolloutQueue(
        make,
        policy,
        schedule,
        weights_of,
        rules=Rules(2),
        in_flight=InFlight(rollouts=8),
        max_staleness=max_staleness,
        journal=journal,
    )
    return rollouts, weights_of


def ids(rollouts: Sequence[LiveRollout]) -> list[str]:
    return [rollout.rollout_id for rollout in rollouts]


def test_without_staleness_a_step_is_its_own_rollouts_in_their_order() -> None:
    rollouts, followed = queue(0, guess_1=0.05)
    for step in range(6):
        played, metrics = rollouts.take(step)
        assert ids(played) == ids(rollouts.schedule.process_rollouts(step))
        assert metrics["sampling/stale_rollouts"] == metrics["sampling/groups_given_up"] == 0
    rollouts.close()
    assert followed.ended and rollouts.policy.asked.total() == 6 * 2 * 2, "nothing is played behind the last step"


@pytest.mark.parametrize("depth", [1, 2])
def test_no_token_that_is_trained_on_is_older_than_allowed(depth: int) -> None:
    rollouts, followed = queue(depth, guess_1=0.15, guess_4=0.1)
    taken = list[str]()
    for step in range(6):
        played, metrics = rollouts.take(step)
        taken += ids(played)
        assert len({rollout.task.task_id for rollout in played}) == 1, "groups stay together"
        versions = [turn.sample.policy_version for rollout in played for turn in rollout.steps]
        assert all(version is not None and 0 <= step - version <= depth for version in versions)
        assert metrics["sampling/staleness"] <= depth
    rollouts.close()
    assert len(set(taken)) == len(taken) == 12, "nothing is trained on twice"
    assert followed.ended


def test_stragglers_hold_back_no_step_and_are_given_up_by_age() -> None:
    rollouts, _ = queue(1, steps=50, guess_0=HELD, guess_3=HELD)
    seen = []
    for step in range(40):
        seen.append(rollouts.take(step))
        held = [number for number in rollouts.state()["open"] if number in (0, 3)]  # type: ignore[index]
        while rollouts.policy.under_way != [step, step] * len(held):  # what is too old for the next step is broken off
            time.sleep(0.001)
    rollouts.close()
    assert [played[0].task.task_id for played, _ in seen[:6]] == [f"guess-{number}" for number in (1, 2, 4, 5, 6, 7)]
    assert [metrics["sampling/groups_given_up"] for _, metrics in seen[:4]] == [0, 1, 1, 0]
    assert rollouts.policy.asked["guess-0"] == 2, "its second turns are not asked any more"


def test_resume_keeps_finished_rollouts_and_trains_on_each_once() -> None:
    journal = Kept()
    before, _ = queue(2, journal=journal)
    taken = [rollout_id for step in range(3) for rollout_id in ids(before.take(step)[0])]
    checkpoint = before.state()
    lost = ids(before.take(3)[0])  # after the checkpoint, so that the step is taken again
    before.close()
    ended = Counter(rollout.task.task_id for rollout in journal.values())
    after, _ = queue(2, journal=journal)
    after.load(checkpoint)
    again = [rollout_id for step in range(3, 6) for rollout_id in ids(after.take(step)[0])]
    after.close()
    assert len({*taken, *again}) == len(taken) + len(again) == 12, "nothing is trained on twice"
    assert set(lost) <= set(again) and ended.total() > len(taken)
    assert not [task for task, number in ended.items() if number == 2 and after.policy.asked[task]]


def test_recorded_rollouts_are_given_up_by_age() -> None:
    journal = Kept()
    before, _ = queue(1, journal=journal)
    [before.take(step) for step in range(2)]
    before.close()
    after, _ = queue(1, journal=journal)
    after.load({"open": [], "next": 1})  # as after an attempt that gave up many groups, and so was further ahead
    played, metrics = after.take(5)
    after.close()
    assert {turn.sample.policy_version for rollout in played for turn in rollout.steps} == {5}
    assert metrics["sampling/groups_given_up"] >= 1


def test_an_infrastructure_error_is_raised_in_the_waiting_step() -> None:
    made = [0]

    def make() -> GuessEnv:
        made[0] += 1
        if made[0] > 4:  # the rollouts of the first two steps
            raise UsageError("broken")
        return GuessEnv()

    rollouts, followed = queue(1, make)
    with pytest.raises(UsageError, match="broken"):
        [rollouts.take(step) for step in range(6)]
    rollouts.close()
    assert followed.ended


def test_rollouts_that_several_steps_train_on_are_played_once() -> None:
    rollouts, _ = queue(2, reuse=2)
    tasks = [{rollout.task.task_id for rollout in rollouts.take(step)[0]} for step in (0, 2, 4)]
    rollouts.close()
    assert set.union(*tasks) == {"guess-0", "guess-1", "guess-2"} and rollouts.policy.asked.total() == 3 * 2 * 2
