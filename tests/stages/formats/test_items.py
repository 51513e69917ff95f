"""Logs of programs that record scores by item and no transcript, or one of their own: every item with its score."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.transcripts import assistant, document, jsonl, payloads, read, system, tool, user

from composer_stages.comparison import logs


def formats(path: Path) -> set[str]:
    return {payload["rollout"]["source"] for payload in payloads(path)}


def sample(number: int, **more: Any) -> dict[str, Any]:
    """A line of lm-evaluation-harness."""
    about = {"doc_id": number, "doc": {"question": f"{number}?"}, "target": "1", "resps": [["1"]]}
    return {**about, "filtered_resps": ["1"], "doc_hash": f"{number:064x}", **more}


def test_samples_of_lm_evaluation_harness(tmp_path: Path) -> None:
    time = "2026-01-02T03-04-05.000006"
    rows = [
        sample(at, filter=name, metrics=["exact_match"], exact_match=float(name == "strict" and at))
        for at in range(2)
        for name in ("strict", "loose")
    ]
    jsonl(tmp_path / "org__model" / f"samples_gsm8k_{time}.jsonl", *rows)
    about = {"results": {}, "configs": {}, "config": {"model": "hf"}, "model_name": "org/model", "n-shot": {"gsm8k": 5}}
    document(tmp_path / "org__model" / f"results_{time}.json", about)
    for path in (tmp_path, tmp_path / "org__model" / f"samples_gsm8k_{time}.jsonl"):
        rollouts, drops, _ = read(path)
        scores = [rollout.measured.scores for rollout in rollouts]
        assert formats(path) == {"lm-eval"} and [rollout.reward for rollout in rollouts] == [None, None]
        assert scores == [{"exact_match,strict": float(at), "exact_match,loose": 0.0} for at in range(2)]
        assert {(rollout.model, rollout.family) for rollout in rollouts} == {("org/model", "gsm8k")}
        assert [rollout.task_id for rollout in rollouts] == [f"gsm8k/{at:064x}"[:22] for at in range(2)]
        assert not drops and rollouts[0].error is None


def test_a_metric_over_all_items_is_no_score(tmp_path: Path) -> None:
    jsonl(tmp_path / "samples_tags.jsonl", sample(0, metrics=["f1"], f1=["a", ["b"]]), sample(1, acc=1.0))
    rollouts, _, _ = read(tmp_path)
    assert [(rollout.reward, rollout.unscored) for rollout in rollouts] == [(None, True), (1.0, True)]


def test_results_of_tau_bench(tmp_path: Path) -> None:
    booking = assistant(None, tool_calls=[{"function": {"name": "book", "arguments": "{}"}}])
    talk = [system("Be kind."), user("Book it."), booking, tool("done"), assistant("It is booked.")]
    info = {"task": {"instruction": "You want a flight."}}
    first = [{"task_id": 3, "reward": 1.0, "info": info, "traj": talk, "trial": at} for at in range(2)]
    rollouts, _, _ = read(path := document(tmp_path / "gpt-airline.json", first))
    assert [(rollout.task_id, rollout.reward) for rollout in rollouts] == [("airline/3", 1.0)] * 2
    assert formats(path) == {"tau-bench"}
    assert len(rollouts[0].turns) == 2 and "book" in rollouts[0].turns[0].action

    other = [{**first[0], "info": {"task": {"instruction": "You want a refund."}}}]
    ids = {
        read(document(tmp_path / f"tool-calling-{at}.json", runs))[0][0].task_id
        for at, runs in enumerate((first, other))
    }
    assert len(ids) == 2, "both domains number their tasks from 0, and the default name of a file tells none"

    simulation = {"id": "s", "task_id": "7", "trial": 0, "seed": 5, "messages": talk, "reward_info": {"reward": 0.0}}
    second = {
        "info": {"environment_info": {"domain_name": "retail"}, "agent_info": {"llm": "gpt", "llm_args": {}}},
        "tasks": [],
        "simulations": [simulation, {**simulation, "id": "t", "reward_info": None, "termination_reason": "error"}],
    }
    rollouts, _, _ = read(document(tmp_path / "tau2.json", second))
    summaries = [(rollout.task_id, rollout.model, rollout.reward) for rollout in rollouts]
    assert summaries == [("retail/7", "gpt", 0.0), ("retail/7", "gpt", None)]


def test_simulations_of_tau2_in_files_of_their_own(tmp_path: Path) -> None:
    """As `Results.save(format="dir")` writes them, one by voice."""
    info = {"environment_info": {"domain_name": "retail"}, "agent_info": {"llm": "m"}}
    document(tmp_path / "results.json", {"info": info, "tasks": [], "simulation_index": None})
    spoken: list[Any] = [[{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}], None]
    for at, messages in enumerate(spoken):
        simulation = {
            "id": f"s{at}",
            "task_id": at,
            "trial": 0,
            "termination_reason": "user_stop",
            "messages": messages,
        }
        document(tmp_path / "simulations" / f"s{at}.json", simulation | {"reward_info": {"reward": 1.0 - at}})
    rollouts, drops, _ = read(tmp_path)
    assert [(r.task_id, r.model, r.reward, len(r.turns)) for r in rollouts] == [
        ("retail/0", "m", 1.0, 1),
        ("retail/1", "m", 0.0, 0),
    ]
    assert not drops and rollouts[1].error is None


def test_results_of_evalplus_pass_only_with_the_added_tests(tmp_path: Path) -> None:
    statuses = {"HumanEval/0": ("pass", "pass"), "HumanEval/1": ("pass", "fail"), "HumanEval/2": ("fail", None)}
    tasks = {
        name: [{"task_id": name, "solution": "x = 1", "base_status": base, "plus_status": plus}]
        for name, (base, plus) in statuses.items()
    }
    for name in ("org--model_vllm_temp_0.0.eval_results.json", "org--model_vllm_temp_0.0/eval_results.json"):
        path = document(tmp_path / name, {"date": "2026-01-01", "hash": "0", "eval": tasks})
        assert {rollout.model for rollout in read(path)[0]} == {"org/model"}
    rollouts, _, _ = read(path)
    assert formats(path) == {"evalplus"} and [rollout.reward for rollout in rollouts] == [1.0, 0.0, 0.0]
    assert rollouts[0].env == "HumanEval"


def helm(path: Path, name: str, splits: Mapping[str, str], **scores: float) -> None:
    """A run of HELM: instances with their split, of which all but the first score 0."""
    rows = []
    for at, (instance, split) in enumerate(splits.items()):
        values = {"num_prompt_tokens": 9.0, **{metric: 0.0 if at else value for metric, value in scores.items()}}
        stats = [{"name": {"name": key, "split": split}, "mean": value} for key, value in values.items()]
        rows.append({"instance_id": instance, "train_trial_index": 0, "stats": stats})
    document(path / "per_instance_stats.json", [*rows, {**rows[0], "perturbation": {"name": "typos"}}])
    spec = {"name": name, "scenario_spec": {}, "adapter_spec": {"model": "org/model"}}
    document(path / "run_spec.json", spec)
    document(path / "stats.json", [{"name": {"name": "exact_match"}, "mean": 0.5}])


def test_statistics_of_helm(tmp_path: Path) -> None:
    """Each subject numbers its instances anew, and no table of HELM's has a validation split beside a test one."""
    for subject in ("law", "art"):
        name = f"mmlu:subject={subject},model=org_model"
        helm(tmp_path / name, name, {"id1": "test", "id2": "test", "id3": "valid"}, exact_match=1.0)
    helm(tmp_path / "quac:model=x", "quac:model=x", {"id1": "valid"}, exact_match=0.0, f1_score=0.25)
    helm(tmp_path / "boolq:model=x", "boolq:model=x", {"id1": "valid"}, exact_match=0.0, quasi_exact_match=1.0)
    rollouts, drops, _ = read(tmp_path)
    rewards = {f"mmlu:subject={subject}/id{at}": 2.0 - at for subject in ("art", "law") for at in (1, 2)}
    assert {rollout.task_id: rollout.reward for rollout in rollouts} == {**rewards, "quac/id1": 0.25, "boolq/id1": 1.0}
    about = {(rollout.model, rollout.env) for rollout in rollouts}
    assert formats(tmp_path) == {"helm"} and about == {("org/model", name) for name in ("mmlu", "quac", "boolq")}
    assert Counter(drop.reason for drop in drops) == {"perturbed": 4, "other_split": 2, "unknown_format": 4}


def test_each_class_of_metrics_of_helm_writes_an_entry_for_an_instance(tmp_path: Path) -> None:
    """Entries with statistics of the run alone counted as samples without a score, and a run had two main metrics."""

    def entry(at: int, **means: float) -> dict[str, Any]:
        part = {"split": "test", "sub_split": "ab"[at % 2]}
        stats = [{"name": {"name": name, **part}, "mean": mean} for name, mean in means.items()]
        return {"instance_id": f"id{at}", "train_trial_index": 0, "stats": stats}

    rows = [
        *(entry(at, num_prompt_tokens=9.0) for at in range(4)),
        *(entry(at, f1_score=at / 4) for at in range(4)),
        *(entry(at, toxic_frac=0.0) for at in range(4)),
    ]
    document(tmp_path / "per_instance_stats.json", rows)
    document(tmp_path / "run_spec.json", {"name": "x:model=m", "scenario_spec": {}, "adapter_spec": {"model": "m"}})
    of_run = [("f1_score", 0.375, {}), ("f1_score", 0.5, {"sub_split": "b"})]
    document(
        tmp_path / "stats.json",
        [
            {"name": {"name": name, "split": "test", **part}, "count": 1, "sum": 1, "mean": m}
            for name, m, part in of_run
        ],
    )
    rollouts, drops, _ = read(tmp_path)
    assert [rollout.reward for rollout in rollouts] == [0.0, 0.25, 0.5, 0.75] and not drops
    assert rollouts[0].log is not None and [told.value for told in rollouts[0].log.reported] == [0.375]
    assert len(logs.read(str(tmp_path)).items) == 4


@pytest.mark.parametrize("with_run", [True, False])
def test_results_of_terminal_bench(tmp_path: Path, with_run: bool) -> None:
    """A run's file is read rather than those of its trials: a trial that broke down has none."""
    ends = ((True, "agent_timeout"), (False, "unset"), (None, "parse_error"), (None, "unknown_agent_error"))
    trials = [
        {"task_id": name, "trial_name": f"{name}.1-of-1", "is_resolved": resolved, "failure_mode": failure}
        for name, (resolved, failure) in zip("abcd", ends, strict=True)
    ]
    run = tmp_path / "run"
    for trial in trials[:-1]:
        document(run / str(trial["task_id"]) / str(trial["trial_name"]) / "results.json", trial)
    document(run / "run_metadata.json", {"run_id": "run", "agent_name": "agent", "model_name": "org/model"})
    if with_run:
        document(run / "results.json", {"results": trials, "resolved_ids": ["a"]})
    rollouts, drops, _ = read(tmp_path)
    assert formats(tmp_path) == {"terminal-bench"} and not drops
    assert {rollout.model for rollout in rollouts} == {"org/model"}
    assert [(rollout.task_id, rollout.reward) for rollout in rollouts][:3] == [("a", 1.0), ("b", 0.0), ("c", None)]
    assert len(rollouts) == 3 + with_run and rollouts[2].error == ("parse_error", "c.1-of-1 has no verdict")
    assert rollouts[0].terminated_by == "agent_timeout" and rollouts[0].error is None


@pytest.mark.parametrize("version", ["0.6", "0.10"])
def test_details_of_lighteval(tmp_path: Path, version: str) -> None:
    folder = tmp_path / "details" / "org" / "model" / "2026-01-02T03-04-05.000006"
    folder.mkdir(parents=True)
    rows = [
        {"full_prompt": f"{at}?", "example": f"{at}?", "metrics": {"acc": float(at)}}
        if version == "0.6"
        else {"doc": {"query": f"{at}?"}, "model_response": {"text": ["1"]}, "metric": {"acc": float(at)}}
        for at in range(2)
    ]
    pq.write_table(pa.Table.from_pylist(rows), folder / "details_arc|0_2026-01-02T03-04-05.000006.parquet")
    rollouts, _, _ = read(tmp_path)
    assert formats(tmp_path) == {"lighteval"} and [rollout.reward for rollout in rollouts] == [0.0, 1.0]
    assert {(rollout.env, rollout.model) for rollout in rollouts} == {("arc|0", "org/model")}
    assert rollouts[0].task_id != rollouts[1].task_id


def test_trials_of_harbor_without_a_trajectory_are_items(tmp_path: Path) -> None:
    def trial(name: str, **more: Any) -> None:
        about = {"task_name": name, "trial_name": f"{name}__x", "source": "bench", "verifier_result": None, **more}
        about["agent_info"] = {"name": "agent", "model_info": {"name": "model"}}
        document(tmp_path / "job" / f"{name}__x" / "result.json", about)

    trial("one", verifier_result={"rewards": {"reward": 1.0}})
    trial("two", exception_info={"exception_type": "AgentTimeout", "exception_message": "too slow"})
    trial("three", verifier_result={"rewards": {"reward": 0.0}})
    steps = [{"source": "user", "message": "Go."}, {"source": "agent", "message": "Gone."}]
    trajectory = {"schema_version": "ATIF-v1.6", "agent": {"model_name": "model"}, "steps": steps}
    document(tmp_path / "job" / "three__x" / "agent" / "trajectory.json", trajectory)
    rollouts, _, _ = read(tmp_path / "job")
    by_task = {rollout.task_id: rollout for rollout in rollouts}
    assert len(rollouts) == 3 and by_task["one"].reward == 1.0 and by_task["one"].model == "model"
    assert by_task["two"].error == ("AgentTimeout", "too slow") and by_task["two"].reward is None
    assert by_task["three"].reward == 0.0 and len(by_task["three"].turns) == 1
