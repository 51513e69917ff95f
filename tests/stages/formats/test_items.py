"""Logs of programs that record scores by item and no transcript, or one of their own: every item with its score."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stages.formats import files, reading
from stages.formats.base import Drop, Trajectory
from stages.formats.reading import FileCount
from stages.formats.reports import Sidecars


def read(path: Path) -> tuple[list[Trajectory], list[Drop], set[str]]:
    sidecars, found, drops, formats = Sidecars(), list[Trajectory](), list[Drop](), set[str]()
    for source, reader in reading.detect_formats(files.find([str(path)]), "auto", sidecars).items():
        for item in reading.read(source, reader, sidecars, FileCount("", "", "")):
            if isinstance(item, Drop):
                drops.append(item)
            else:
                found.append(item.trajectory)
                formats.add(item.format)
    return found, drops, formats


def lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


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
    lines(tmp_path / "org__model" / f"samples_gsm8k_{time}.jsonl", rows)
    about = {"results": {}, "configs": {}, "config": {"model": "hf"}, "model_name": "org/model", "n-shot": {"gsm8k": 5}}
    (tmp_path / "org__model" / f"results_{time}.json").write_text(json.dumps(about))
    for given in (tmp_path, tmp_path / "org__model" / f"samples_gsm8k_{time}.jsonl"):
        found, drops, formats = read(given)
        assert formats == {"lm-eval"} and [one.reward for one in found] == [0.0, 1.0]
        assert {one.model for one in found} == {"org/model"} and {one.family for one in found} == {"gsm8k"}
        assert [one.task_id for one in found] == [f"gsm8k/{at:064x}"[:22] for at in range(2)]
        assert [drop.reason for drop in drops] == ["other_filter"] * 2 and found[0].error is None


def test_a_metric_over_all_items_is_no_score(tmp_path: Path) -> None:
    lines(tmp_path / "samples_tags.jsonl", [sample(0, metrics=["f1"], f1=["a", ["b"]]), sample(1, acc=1.0)])
    found, _, _ = read(tmp_path)
    assert [(one.reward, one.unscored) for one in found] == [(None, True), (1.0, True)]


def test_results_of_tau_bench(tmp_path: Path) -> None:
    talk = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Book it."},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "book", "arguments": "{}"}}]},
        {"role": "tool", "content": "done"},
        {"role": "assistant", "content": "It is booked."},
    ]
    info = {"task": {"instruction": "You want a flight."}}
    first = [{"task_id": 3, "reward": 1.0, "info": info, "traj": talk, "trial": at} for at in range(2)]
    (tmp_path / "gpt-airline.json").write_text(json.dumps(first))
    found, _, formats = read(tmp_path / "gpt-airline.json")
    assert formats == {"tau-bench"} and [(one.task_id, one.reward) for one in found] == [("airline/3", 1.0)] * 2
    assert len(found[0].turns) == 2 and "book" in found[0].turns[0].action

    simulation = {"id": "s", "task_id": "7", "trial": 0, "seed": 5, "messages": talk, "reward_info": {"reward": 0.0}}
    second = {
        "info": {"environment_info": {"domain_name": "retail"}, "agent_info": {"llm": "gpt", "llm_args": {}}},
        "tasks": [],
        "simulations": [simulation, {**simulation, "id": "t", "reward_info": None, "termination_reason": "error"}],
    }
    (tmp_path / "tau2.json").write_text(json.dumps(second))
    found, _, _ = read(tmp_path / "tau2.json")
    assert [(one.task_id, one.model, one.reward) for one in found] == [
        ("retail/7", "gpt", 0.0),
        ("retail/7", "gpt", None),
    ]


def test_results_of_evalplus_pass_only_with_the_added_tests(tmp_path: Path) -> None:
    statuses = {"HumanEval/0": ("pass", "pass"), "HumanEval/1": ("pass", "fail"), "HumanEval/2": ("fail", None)}
    tasks = {
        name: [{"task_id": name, "solution": "x = 1", "base_status": base, "plus_status": plus}]
        for name, (base, plus) in statuses.items()
    }
    path = tmp_path / "org--model_vllm_temp_0.0_eval_results.json"
    path.write_text(json.dumps({"date": "2026-01-01", "hash": "0", "eval": tasks}))
    found, _, formats = read(path)
    assert formats == {"evalplus"} and [one.reward for one in found] == [1.0, 0.0, 0.0]
    assert {one.model for one in found} == {"org/model"} and found[0].env == "HumanEval"


def test_statistics_of_helm(tmp_path: Path) -> None:
    def instance(name: str, value: float, **more: Any) -> dict[str, Any]:
        stats = [
            {"name": {"name": key}, "mean": mean} for key, mean in (("num_prompt_tokens", 9.0), ("exact_match", value))
        ]
        return {"instance_id": name, "train_trial_index": 0, "stats": stats, **more}

    rows = [instance("id1", 1.0), instance("id2", 0.0), instance("id1", 0.0, perturbation={"name": "typos"})]
    (tmp_path / "per_instance_stats.json").write_text(json.dumps(rows))
    spec = {"name": "mmlu:subject=law", "scenario_spec": {}, "adapter_spec": {"model": "org/model"}}
    (tmp_path / "run_spec.json").write_text(json.dumps(spec))
    found, drops, formats = read(tmp_path)
    assert formats == {"helm"} and [(one.task_id, one.reward) for one in found] == [
        ("mmlu/id1", 1.0),
        ("mmlu/id2", 0.0),
    ]
    assert found[0].model == "org/model" and [drop.reason for drop in drops] == ["perturbed"]


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
    found, _, formats = read(tmp_path)
    assert formats == {"lighteval"} and [one.reward for one in found] == [0.0, 1.0]
    assert {(one.env, one.model) for one in found} == {("arc|0", "org/model")} and found[0].task_id != found[1].task_id


def test_trials_of_harbor_without_a_trajectory_are_items(tmp_path: Path) -> None:
    def trial(name: str, **more: Any) -> None:
        about = {"task_name": name, "trial_name": f"{name}__x", "source": "bench", "verifier_result": None, **more}
        about["agent_info"] = {"name": "agent", "model_info": {"name": "model"}}
        (tmp_path / "job" / f"{name}__x").mkdir(parents=True)
        (tmp_path / "job" / f"{name}__x" / "result.json").write_text(json.dumps(about))

    trial("one", verifier_result={"rewards": {"reward": 1.0}})
    trial("two", exception_info={"exception_type": "AgentTimeout", "exception_message": "too slow"})
    trial("three", verifier_result={"rewards": {"reward": 0.0}})
    steps = [{"source": "user", "message": "Go."}, {"source": "agent", "message": "Gone."}]
    document = {"schema_version": "ATIF-v1.6", "agent": {"model_name": "model"}, "steps": steps}
    (tmp_path / "job" / "three__x" / "agent").mkdir()
    (tmp_path / "job" / "three__x" / "agent" / "trajectory.json").write_text(json.dumps(document))
    found, _, _ = read(tmp_path / "job")
    by_task = {one.task_id: one for one in found}
    assert len(found) == 3 and by_task["one"].reward == 1.0 and by_task["one"].model == "model"
    assert by_task["two"].error == ("AgentTimeout", "too slow") and by_task["two"].reward is None
    assert by_task["three"].reward == 0.0 and len(by_task["three"].turns) == 1
