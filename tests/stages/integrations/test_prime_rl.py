"""PRIME-RL's custom loss, the algorithm with hints, and how PRIME-RL comes to know both.

The stand-ins of its loader and its packages follow the documented contract; where prime-rl is installed, its own
classes take all of it.
"""

import asyncio
import importlib
import importlib.util
import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from needs import needs, where
from parity.drift import Clone

from composer_stages import integrations
from composer_stages.errors import BadInput, UsageError
from composer_stages.integrations.prime_rl_hints import HintSettings, hint_ids, hinted, hints, main
from composer_stages.losses.prime_rl import TRUST_REGION, DefaultOptions, PackedTokens, default_loss, policy_sum
from tests.stages.integrations import prime_rl

RECORDED = json.loads(Path(__file__).with_name("prime_rl_step.json").read_text())
TOML = Path(integrations.__file__).with_name("rl.toml")
PACKAGE = {
    "prime_rl/__init__.py": "",
    "prime_rl/orchestrator/__init__.py": "",
    "prime_rl/orchestrator/algo.py": "class GRPOAlgorithm: ...\nALGORITHM_CLASSES = {'grpo': GRPOAlgorithm}\n",
    "prime_rl/entrypoints/__init__.py": "",
    "prime_rl/entrypoints/orchestrator.py": (
        "import sys\nfrom prime_rl.orchestrator.algo import ALGORITHM_CLASSES\n"
        "def main(): print(sys.argv[1:], [c.__name__ for c in ALGORITHM_CLASSES['grpo'].__mro__],"
        " ALGORITHM_CLASSES['grpo'].settings)\n"
    ),
    "prime_rl/entrypoints/rl.py": (  # upstream starts it so: entrypoints/rl.py:284-303
        "import os, sys\nfrom subprocess import Popen\n"
        "def main():\n    print(sys.argv, flush=True)\n"
        "    env = {**os.environ, 'COMPOSER_HINT_WEIGHT': '0.25'}\n"
        "    sys.exit(Popen(['orchestrator', '@', 'orchestrator.json'], env=env).wait())\n"
    ),
}


def test_rl_starts_an_orchestrator_that_knows_the_algorithm(tmp_path: Path) -> None:
    for name, text in PACKAGE.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    command = [sys.executable, "-m", "composer_post_training.prime_rl", "rl", "@", "rl.toml"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, env=env, cwd=Path(__file__).parents[3], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rl, orchestrator = done.stdout.splitlines()
    assert rl == "['rl', '@', 'rl.toml']"
    assert orchestrator.startswith("['@', 'orchestrator.json'] ['HintedGRPOAlgorithm', 'HintedScores', 'GRPOAlgorithm'")
    assert "weight=0.25" in orchestrator


@pytest.mark.parametrize("words", [[], ["trainer"], ["--help"]])
def test_other_programs_are_refused(words: list[str]) -> None:
    with pytest.raises(UsageError, match="start one of rl, orchestrator"):
        main(words)


def test_the_shipped_configuration_keeps_the_default_loss_and_names_what_we_read() -> None:
    table = tomllib.loads(TOML.read_text())
    assert table["trainer"]["loss"] == {"type": "default"}
    assert table["orchestrator"]["algo"] == {"type": "grpo"}
    assert HintSettings.read(table["orchestrator"]["env_vars"]) == HintSettings(0.5, "auto")


@needs("prime-rl")
def test_prime_rl_itself_takes_configuration_and_algorithm(monkeypatch: pytest.MonkeyPatch) -> None:
    import verifiers.v1 as vf
    from prime_rl.configs.rl import RLConfig
    from prime_rl.orchestrator import algo
    from prime_rl.orchestrator.trajectories import trace_to_samples
    from verifiers.v1.graph import MessageNode
    from verifiers.v1.types import AssistantMessage, ToolMessage, UserMessage

    from composer_stages.integrations.prime_rl_hints import register

    config = RLConfig.model_validate(tomllib.loads(TOML.read_text())).orchestrator
    monkeypatch.setitem(algo.ALGORITHM_CLASSES, "grpo", algo.ALGORITHM_CLASSES["grpo"])
    register()
    pool = prime_rl.Pool()
    algorithm: Any = algo.build_algorithm(config.algo, pool)
    algorithm.renderer = prime_rl.Renderer()
    kinds = {"user": UserMessage, "assistant": AssistantMessage, "tool": partial(ToolMessage, tool_call_id="t")}
    traces = []
    for trace in prime_rl.group():
        nodes = [
            MessageNode(
                message=kinds[node.message.role](content=node.message.content),
                **{name: getattr(node, name) for name in ("parent", "sampled", "token_ids", "mask", "logprobs")},
            )
            for node in trace.nodes
        ]
        task = vf.TraceTask(type="Task", data=vf.TaskData(idx=0, prompt=None))
        agent = vf.AgentInfo(config=vf.AgentConfig())
        rewards = {"passed": {"score": trace.reward}}
        traces.append(vf.Trace(task=task, agent=agent, nodes=nodes, rewards=rewards, ok=True))
    about = {"env": vf.EnvInfo(id="e", name="e"), "group": vf.GroupInfo(id="g")}
    episodes = [vf.Episode(**about, task=t.task, traces=[t]) for t in traces]

    async def score() -> None:
        for episode in episodes:
            await algorithm.finalize_episode(episode)
        await algorithm.finalize_group(episodes)

    asyncio.run(score())
    samples = [sample for trace in traces for sample in trace_to_samples(trace, env_name="e")]
    expected = RECORDED["hinted"]["streams"]
    assert [s.ref_kl_weights for s in samples] == [[2 * w for w in expected["ref_kl_weights"][:12]], None]
    assert samples[0].ref_logprobs == expected["ref_logprobs"][:12]
    assert samples[0].advantages == expected["advantages"][:12]
    assert samples[1].ref_logprobs is None


COMMAND = "bash: pyest: command not found"


def test_hints_follow_shell_errors() -> None:
    wrong, right = prime_rl.group()
    assert hints(wrong) == {1: "Hint: there is no command pyest here."}
    assert hints(right) == {}


def test_an_environments_hints_replace_derived_hints() -> None:
    trace = prime_rl.conversation(100, observed=COMMAND, reward=0.0)
    trace.info = {"hints": [{"turn": 1, "hint": "read the file first"}, {"turn": 7, "hint": "never"}]}
    assert hints(trace) == {3: "read the file first"}


def test_the_faulty_turn_is_scored_behind_the_hint_and_no_other() -> None:
    traces = prime_rl.group()
    pool = prime_rl.scored(traces, weight=0.5)
    faulty = traces[0].nodes[1]
    block = hint_ids(prime_rl.Renderer(), "Hint: there is no command pyest here.")
    assert pool.asked == [[100, 101, 102, *block, 110, 111, 112, 113]]
    scores = asyncio.run(prime_rl.Pool().score(pool.asked[0]))
    assert faulty.reference_logprobs == scores[-3:]
    assert faulty.loss_weights == {"ref_kl": [0.0, 0.5, 0.5, 0.5]}
    others = [node for trace in traces for node in trace.nodes if node is not faulty]
    assert all(node.reference_logprobs is None and node.loss_weights is None for node in others)
    assert faulty.advantages == [0.5] * 3, "GRPO's own credit goes to the same tokens"


def test_stamping_keeps_other_weights_of_a_node() -> None:
    trace = prime_rl.group()[0]
    trace.nodes[1].loss_weights = {"ce": [0.1, 0.0, 0.0, 0.0]}
    prime_rl.scored([trace])
    assert trace.nodes[1].loss_weights == {"ce": [0.1, 0.0, 0.0, 0.0], "ref_kl": [0.0, 1.0, 1.0, 1.0]}


def test_a_turn_that_two_branches_share_is_scored_once() -> None:
    trace = prime_rl.group()[0]
    trace.nodes.append(prime_rl.Node(1, prime_rl.said("user", "and now?"), [300], [False]))
    assert len(trace.branches) == 2
    assert len(prime_rl.scored([trace]).asked) == 1


@pytest.mark.parametrize("change", [{"has_error": True}, {"agent": SimpleNamespace(trainable=False)}])
def test_untrained_traces_are_not_scored(change: dict[str, Any]) -> None:
    trace = prime_rl.group()[0]
    for name, value in change.items():
        setattr(trace, name, value)
    assert prime_rl.scored([trace]).asked == []


def test_a_renderer_that_rewrites_messages_is_refused() -> None:
    class Rewriting(prime_rl.Renderer):
        def render_ids(self, messages: list[dict[str, str]], add_generation_prompt: bool = False) -> list[int]:
            return [len(messages), *super().render_ids(messages)]

    with pytest.raises(UsageError, match="a hint has no tokens of its own"):
        hint_ids(Rewriting(), "Hint")


def test_a_truncated_score_is_refused() -> None:
    class Short(prime_rl.Pool):
        async def score(self, ids: list[int]) -> list[float]:
            return (await super().score(ids))[:-1]

    algorithm: Any = hinted(prime_rl.Grpo, HintSettings())(None, Short())
    algorithm.renderer = prime_rl.Renderer()
    with pytest.raises(BadInput, match="scored 15 of 16 tokens behind a hint"):
        asyncio.run(algorithm.score_episode(SimpleNamespace(traces=prime_rl.group())))


@pytest.mark.parametrize("said", ["0", "-1", "nan", "inf", "much"])
def test_a_weight_is_a_positive_number(said: str) -> None:
    with pytest.raises(UsageError, match=f"COMPOSER_HINT_WEIGHT is '{said}'"):
        HintSettings.read({"COMPOSER_HINT_WEIGHT": said})


# --- the step of the trainer


def packed_step(streams: dict[str, Any]) -> tuple[float, list[float]]:
    """Loss and gradient of a packed step: our loss, and upstream's ref_kl (prime-rl 559b447 loss.py:199-243)."""
    numbers = {
        name: torch.tensor(values, dtype=torch.float64) for name, values in streams.items() if name != "loss_mask"
    }
    mask, rl, kl = torch.tensor(streams["loss_mask"]), numbers["rl_weights"], numbers["ref_kl_weights"]
    trainer = torch.tensor(prime_rl.trainer_logprobs(streams["inference_logprobs"]), dtype=torch.float64)
    trainer.requires_grad_()

    def tokens(members: torch.Tensor, weights: torch.Tensor) -> PackedTokens:
        given = numbers["inference_logprobs"], numbers["advantages"]
        return PackedTokens(trainer, *given, members, weights=weights)

    gap = (numbers["ref_logprobs"] - trainer).detach()
    fallen = trainer.exp() - numbers["inference_logprobs"].exp() < -TRUST_REGION
    of_rewards = default_loss(tokens(mask & (rl != 0), rl)).loss / max(int((mask & (rl != 0)).sum()), 1)
    of_hints = policy_sum(tokens(kl != 0, kl), gap, fallen, 1e-3) / max(int((kl != 0).sum()), 1)
    loss = of_rewards + of_hints
    return loss.item(), torch.autograd.grad(loss, trainer)[0].tolist()


def flattened(traces: list[prime_rl.Trace]) -> dict[str, Any]:
    """The streams of the traces' branches one behind the other, absent ones by their fill (batch.py STREAM_FILL)."""
    branches = [branch for trace in traces for branch in trace.branches]
    nodes = [node for branch in branches for node in branch.nodes]
    size = [len(branch.token_ids) for branch in branches]
    return {
        "sequence_lengths": size,
        "loss_mask": [own for node in nodes for own in node.mask],
        "inference_logprobs": [value for branch in branches for value in branch.logprobs],
        "advantages": [value for branch in branches for value in branch.advantages or []],
        "rl_weights": [1.0] * sum(size),
        "ref_kl_weights": [w for n in nodes for w in (n.loss_weights or {}).get("ref_kl", [0.0] * len(n.mask))],
        "ref_logprobs": [v for branch in branches for v in branch.reference_logprobs or [0.0] * len(branch.token_ids)],
    }


def filled(streams: dict[str, Any]) -> dict[str, Any]:
    """Upstream's streams with absent ones by their fill."""
    size = sum(streams["sequence_lengths"])
    fills = {"rl_weights": 1.0, "ref_kl_weights": 0.0, "ref_logprobs": 0.0}
    return {name: [fills[name]] * size if value is None else value for name, value in streams.items()}


def group(case: str) -> list[prime_rl.Trace]:
    """The rollouts of a recorded case, scored."""
    traces = prime_rl.group()
    for trace in traces:
        trace.reward = 1.0 if case == "equal rewards" else trace.reward
    prime_rl.scored(traces, weight=0.5)
    return traces


@pytest.mark.parametrize("case", ["hinted", "beside opsd", "equal rewards"])
def test_the_loss_reproduces_upstreams_step(case: str) -> None:
    recorded = RECORDED[case]
    loss, gradient = packed_step(filled(recorded["streams"]))
    assert loss == pytest.approx(recorded["loss"], rel=1e-10)
    assert gradient == pytest.approx(recorded["gradient"], rel=1e-10, abs=1e-12)


def test_stamped_nodes_are_packed_by_upstream() -> None:
    assert flattened(group("hinted")) == filled(RECORDED["hinted"]["streams"])


def test_the_hint_adds_to_the_gradient_of_its_own_tokens_alone() -> None:
    traces = prime_rl.group()
    prime_rl.scored(traces)
    plain = flattened(traces) | {"ref_kl_weights": [0.0] * 24}
    without, (_, with_hint) = packed_step(plain)[1], packed_step(flattened(group("hinted")))
    changed = [i for i, (a, b) in enumerate(zip(without, with_hint, strict=True)) if a != b]
    assert changed == [4, 5, 6]


def opsd(stamp: Any) -> list[Any]:
    """A sample of upstream's opsd: no advantages, a reference log-prob for every token."""
    tokens = {"token_ids": [1, 2, 3, 4], "mask": [False, True, True, True], "logprobs": [0.0, -0.3, -0.2, -0.9]}
    sample = prime_rl.record(**tokens, env_name="demonstrations", ref_logprobs=[0.0, -0.1, -0.4, -0.5])
    stamp(sample, "ref_kl")
    return [sample]


def by_upstream(clone: Clone) -> dict[str, Any]:
    """All recorded cases anew."""
    found = {}
    for case in ("hinted", "beside opsd", "equal rewards"):
        packed, result = prime_rl.upstream_step(clone, group(case), opsd if case == "beside opsd" else lambda stamp: [])
        found[case] = {"streams": {name: getattr(packed, name) for name in RECORDED[case]["streams"]}, **result}
    return found


@needs("prime-rl-clone")
def test_upstreams_loss_gives_the_recorded_step() -> None:
    folder, _, commit = where("prime-rl-clone").partition("@")
    found = by_upstream(Clone(Path(folder), commit or None))
    for case, recorded in RECORDED.items():
        assert found[case]["streams"] == recorded["streams"]
        assert found[case]["loss"] == pytest.approx(recorded["loss"], rel=1e-10)
        assert found[case]["gradient"] == pytest.approx(recorded["gradient"], rel=1e-10, abs=1e-12)


# --- the custom loss


def load(config: dict[str, Any]) -> Callable[[Any], Any]:
    """The function a [trainer.loss] table names: split at the last dot, import, bind kwargs."""
    module, _, name = config["import_path"].rpartition(".")
    fn = getattr(importlib.import_module(module), name)
    return lambda inputs: fn(inputs, **config.get("kwargs", {}))


def random_inputs(**changed: Any) -> Any:
    """A LossInputs as prime-rl 559b447 declares it."""
    stream = torch.Generator().manual_seed(0)
    names = ("trainer_logprobs", "inference_logprobs", "ref_logprobs", "advantages")
    values = {name: -torch.rand(12, dtype=torch.float64, generator=stream) * 3 for name in names}
    values["trainer_logprobs"].requires_grad_()
    return SimpleNamespace(**values, loss_mask=torch.arange(12) > 3, **{"loss_weights": None, **changed})


def of_may() -> Any:
    """As prime-rl 618de8a declares it: another name of the reference, and no weights."""
    values = vars(random_inputs())
    del values["loss_weights"]
    return SimpleNamespace(teacher_logprobs=values.pop("ref_logprobs"), **values)


def loss_table(**kwargs: float) -> dict[str, Any]:
    return {"type": "custom", "import_path": "composer_stages.integrations.prime_rl.composed_loss", "kwargs": kwargs}


def without_reference() -> Any:
    """Where no other sample of the pack has reference log-probs."""
    inputs = random_inputs()
    inputs.ref_logprobs = None
    return inputs


@pytest.mark.parametrize(
    "inputs", [random_inputs(), random_inputs(loss_weights=torch.arange(12.0).double()), without_reference(), of_may()]
)
def test_the_custom_loss_is_the_default_loss_exactly(inputs: Any) -> None:
    given = inputs.trainer_logprobs, inputs.inference_logprobs, inputs.advantages, inputs.loss_mask
    expected = default_loss(PackedTokens(*given, weights=getattr(inputs, "loss_weights", None)), DefaultOptions())
    found = load(loss_table())(inputs)
    assert torch.equal(found.loss, expected.loss)
    assert found.metrics and all(value.ndim == 0 for value in found.metrics.values()), "they are stacked by prime-rl"


def test_hint_weight_is_refused_in_a_custom_loss() -> None:
    with pytest.raises(UsageError, match=r"hint_weight is 0\.5, but prime-rl keeps the tokens of its reference KL"):
        load(loss_table(hint_weight=0.5))(random_inputs())


@needs("prime-rl")
def test_the_custom_loss_runs_in_prime_rl() -> None:
    from prime_rl.trainer.rl import loss as theirs

    read = {"trainer_logprobs", "inference_logprobs", "advantages", "loss_mask"}
    assert {f.name for f in fields(theirs.LossInputs)} >= read
    assert isinstance(load(loss_table())(random_inputs()), theirs.LossOutputs)
