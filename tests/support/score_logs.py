"""A small log of scores in each format that records them: one sample a task, None for one without a score."""

import json
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from support.transcripts import assistant, document, jsonl, prediction, system, user

Values = Sequence[float | None]
TIME = "2026-01-02T03-04-05.000006"


def questions(scores: Values) -> list[tuple[int, str, float | None]]:
    """The number, the question and the score of each sample."""
    return [(at, f"What is {at}?", score) for at, score in enumerate(scores)]


def dialogue(question: str) -> list[dict[str, Any]]:
    """A question, and an answer to it."""
    return [user(question), assistant(f"An answer to {question}")]


def inspect_document(scores: Values) -> dict[str, Any]:
    """The document of an Inspect log."""
    samples = [
        {"id": at, "epoch": 1, "input": question, "target": "x", "messages": dialogue(question), "uuid": f"u{at}"}
        | ({"error": {"message": "E('x')"}} if score is None else {"scores": {"match": {"value": score}}})
        for at, question, score in questions(scores)
    ]
    about = {"task": "quiz", "task_id": "T", "model": "org/m", "scorers": [{"name": "match"}]}
    return {"version": 2, "status": "success", "eval": about, "plan": {}, "samples": samples}


def inspect_json(folder: Path, scores: Values) -> None:
    """An Inspect log as one document."""
    document(folder / "log.json", inspect_document(scores))


def inspect_eval(folder: Path, scores: Values) -> None:
    """An Inspect log as an archive with summaries."""
    pack(folder / "log.eval", inspect_document(scores))


def pack(path: Path, whole: dict[str, Any]) -> None:
    """The archive of an Inspect log."""
    samples = whole.pop("samples")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("header.json", json.dumps(whole))
        archive.writestr(
            "summaries.json", json.dumps([{k: v for k, v in s.items() if k != "messages"} for s in samples])
        )
        for sample in samples:
            archive.writestr(f"samples/{sample['id']}_epoch_1.json", json.dumps(sample))


def lm_eval(folder: Path, scores: Values) -> None:
    """A samples file of lm-evaluation-harness, and its results."""
    rows = [
        {"doc_id": at, "doc": {"question": question}, "target": "1", "filtered_resps": ["1"], "filter": "none"}
        | {"doc_hash": f"{at:02d}" * 32, "metrics": ["acc"]}
        | ({} if score is None else {"acc": score})
        for at, question, score in questions(scores)
    ]
    jsonl(folder / f"samples_quiz_{TIME}.jsonl", *rows)
    about = {
        "results": {},
        "configs": {"quiz": {}},
        "config": {},
        "model_name": "org/m",
        "higher_is_better": {"quiz": {"acc": True}},
    }
    document(folder / f"results_{TIME}.json", about)


def lighteval(folder: Path, scores: Values) -> None:
    """Details of LightEval."""
    rows = [
        {"doc": {"query": question}, "model_response": {"text": ["1"]}, "metric": {"acc": score}}
        for _, question, score in questions(scores)
    ]
    path = folder / "details" / "org" / "m" / TIME / f"details_quiz|0_{TIME}.parquet"
    path.parent.mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(rows), path)


def evalplus(folder: Path, scores: Values) -> None:
    """Results of EvalPlus: every task has a verdict."""
    passed = {0.0: "fail", 1.0: "pass", None: "fail"}
    tasks = {
        f"HumanEval/{at}": [
            {"task_id": f"HumanEval/{at}", "solution": f"x = {at}", "base_status": word, "plus_status": word}
        ]
        for at, word in enumerate(passed[score] for score in scores)
    }
    document(folder / "org--m_vllm_temp_0.0.eval_results.json", {"date": "2026-01-01", "hash": "0", "eval": tasks})


def helm(folder: Path, scores: Values) -> None:
    """A run of HELM."""
    rows = [
        {"instance_id": f"id{at}", "train_trial_index": 0}
        | {"stats": [{"name": {"name": "exact_match", "split": "test"}, "mean": score}] if score is not None else []}
        for at, score in enumerate(scores)
    ]
    document(folder / "quiz:model=m" / "per_instance_stats.json", rows)
    spec = {"name": "quiz:model=m", "scenario_spec": {}, "adapter_spec": {"model": "org/m"}}
    document(folder / "quiz:model=m" / "run_spec.json", spec)


def tau_bench(folder: Path, scores: Values) -> None:
    """Results of tau-bench: every task has a reward."""
    rows = [
        {"task_id": at, "reward": score or 0.0, "trial": 0, "info": {"task": {"instruction": question}}}
        | {"traj": [system("Be kind."), *dialogue(question)]}
        for at, question, score in questions(scores)
    ]
    document(folder / "gpt-airline.json", rows)


def tau2(folder: Path, scores: Values) -> None:
    """Results of tau2."""
    simulations = [
        {"id": f"s{at}", "task_id": f"{at}", "trial": 0, "seed": 5, "messages": dialogue(question)}
        | (
            {"reward_info": {"reward": score}}
            if score is not None
            else {"reward_info": None, "termination_reason": "error"}
        )
        for at, question, score in questions(scores)
    ]
    info = {"environment_info": {"domain_name": "retail"}, "agent_info": {"llm": "org/m", "llm_args": {}}}
    document(folder / "tau2.json", {"info": info, "tasks": [], "simulations": simulations})


def terminal_bench(folder: Path, scores: Values) -> None:
    """The results of a run of Terminal-Bench before Harbor."""
    trials = [
        {"task_id": f"t{at}", "trial_name": f"t{at}.1-of-1", "is_resolved": None if score is None else bool(score)}
        | {"failure_mode": "parse_error" if score is None else "unset", "id": f"trial-{at}"}
        for at, score in enumerate(scores)
    ]
    document(folder / "run" / "results.json", {"results": trials})
    document(folder / "run" / "run_metadata.json", {"run_id": "run", "agent_name": "agent", "model_name": "org/m"})


def harbor(folder: Path, scores: Values) -> None:
    """The trials of a job of Harbor."""
    for at, score in enumerate(scores):
        trial: dict[str, Any] = {
            "task_name": f"t{at}",
            "trial_name": f"t{at}__x",
            "source": "bench",
            "id": f"trial-{at}",
        }
        trial |= {"verifier_result": None if score is None else {"rewards": {"reward": score}}}
        trial |= {"exception_info": {"exception_type": "E", "exception_message": "x"} if score is None else None}
        trial |= {"agent_info": {"name": "agent", "model_info": {"name": "m"}}}
        document(folder / "job" / f"t{at}__x" / "result.json", trial)


def verifiers(folder: Path, scores: Values) -> None:
    """Results of verifiers before 0.4."""
    rows = [
        {"id": at, "example_id": at, "prompt": [user(question)], "completion": [assistant("x")], "answer": f"{at}"}
        | {"task": "default", "reward": score or 0.0}
        | ({"error": {"error": "ToolError", "message": "x"}} if score is None else {})
        for at, question, score in questions(scores)
    ]
    jsonl(folder / "results.jsonl", *rows)
    document(folder / "metadata.json", {"env_id": "quiz", "model": "org/m", "sampling_args": {}})


def nemo_gym(folder: Path, scores: Values) -> None:
    """Rollouts of NeMo Gym."""
    rows = [
        {"responses_create_params": {"input": [user(question)], "tools": []}, "reward": score or 0.0}
        | {"response": {"model": "org/m", "status": None, "output": [{"type": "message", "role": "assistant"}
           | {"content": [{"type": "output_text", "text": f"It is {at}."}]}]}}
        | ({"mask_sample": True, "error_kind": "timeout"} if score is None else {})
        for at, question, score in questions(scores)
    ]  # fmt: skip
    jsonl(folder / "quiz.rollouts.jsonl", *rows)


def openenv(folder: Path, scores: Values) -> None:
    """Episodes of OpenEnv."""
    rows = [
        {
            "episode_id": f"ep-{at}",
            "messages": dialogue(question),
            "task": {"task_id": f"t{at}"},
            "extra": {},
            "reward": score,
        }
        | {"done": True, "tool_trace": [], "metrics": {"turns": 1}, "verify_metrics": {}, "artifacts": {}}
        for at, question, score in questions(scores)
    ]
    jsonl(folder / "results.jsonl", *rows)
    document(folder / "metadata.json", {"env_id": "quiz", "model": "org/m"})


def trl(folder: Path, scores: Values) -> None:
    """Logged completions of TRL."""
    rows = [
        {
            "step": 1,
            "prompt": [user(question)],
            "completion": [assistant(f"It is {at}.")],
            "right": score,
            "advantage": 0.5,
        }
        for at, question, score in questions(scores)
    ]
    pq.write_table(pa.Table.from_pylist(rows), folder / "completions_00001.parquet")


def swe_bench(folder: Path, scores: Values) -> None:
    """Predictions, and a report of which were resolved; those without a score were not submitted."""
    names = [(f"org__repo{at % 3}-{at}", score) for at, score in enumerate(scores) if score is not None]
    jsonl(folder / "all_preds.jsonl", *(prediction(name, f"+{name}", "m") for name, _ in names))
    ids = {
        "submitted": [name for name, _ in names],
        "completed": [name for name, _ in names],
        "resolved": [name for name, score in names if score],
        "unresolved": [name for name, score in names if not score],
        **{key: [] for key in ("incomplete", "empty_patch", "error")},
    }
    report = {f"{key}_ids": of_key for key, of_key in ids.items()}
    report |= {f"{key}_instances": len(of_key) for key, of_key in ids.items()}
    document(folder / "m.run.json", {"total_instances": len(scores), **report, "schema_version": 2})


def rows_of(scores: Values) -> list[dict[str, Any]]:
    """The rows of a table."""
    return [{"id": f"t{at}", "score": score, "note": f"It, is {at}"} for at, score in enumerate(scores)]


def csv_table(folder: Path, scores: Values) -> None:
    """A table in CSV."""
    lines = [f'{row["id"]},{"" if row["score"] is None else row["score"]},"{row["note"]}"' for row in rows_of(scores)]
    (folder / "scores.csv").write_text("\n".join(["id,score,note", *lines]) + "\n")


def jsonl_table(folder: Path, scores: Values) -> None:
    """A table in JSON Lines."""
    jsonl(folder / "scores.jsonl", *rows_of(scores))


def parquet_table(folder: Path, scores: Values) -> None:
    """A table in Parquet."""
    pq.write_table(pa.Table.from_pylist(rows_of(scores)), folder / "scores.parquet")


IMPORTED: dict[str, Callable[[Path, Values], None]] = {
    "inspect .json": inspect_json,
    "inspect .eval": inspect_eval,
    "lm-eval": lm_eval,
    "lighteval": lighteval,
    "evalplus": evalplus,
    "helm": helm,
    "tau-bench": tau_bench,
    "tau2": tau2,
    "terminal-bench": terminal_bench,
    "harbor": harbor,
    "verifiers": verifiers,
    "nemo-gym": nemo_gym,
    "openenv": openenv,
    "trl": trl,
    "swe-bench": swe_bench,
}
"""Of the formats that `import` reads."""
TABLES: dict[str, Callable[[Path, Values], None]] = {"csv": csv_table, "jsonl": jsonl_table, "parquet": parquet_table}


def make(folder: Path, name: str, scores: Values) -> Path:
    """A log of this format; returns what `compare` is given."""
    folder.mkdir(parents=True)
    (IMPORTED | TABLES)[name](folder, scores)
    return next(folder.iterdir()) if name in TABLES else folder
