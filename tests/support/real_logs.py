"""Programs that make small logs with inspect_ai and lm-evaluation-harness: the argument is an empty folder."""

RUN_INSPECT = """
import sys
from inspect_ai import Epochs, Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.model import ModelOutput
from inspect_ai.scorer import Score, accuracy, mean, scorer
from inspect_ai.solver import solver

@solver
def say():
    async def solve(state, generate):
        state.output = ModelOutput.from_content("mock", "a")
        state.messages.append(state.output.message)
        if state.metadata["fails"]:
            raise ValueError("broke")
        return state
    return solve

def right(state):
    return float((int(state.sample_id) * 7 + state.epoch * 3) % 5 < 3)

@scorer(metrics=[accuracy()])
def letter():
    async def score(state, target):
        return Score(value="C" if right(state) else "P")
    return score

@scorer(metrics={"*": [mean()]})
def parts():
    async def score(state, target):
        return Score(value={"a": right(state), "b": float("nan") if state.epoch > 1 else 2.0})
    return score

EVALUATIONS = {
    "plain": (None, {}),
    "mode": (Epochs(3, "mode"), {}),
    "pass": (Epochs(3, ["pass_at_2", "mean"]), {}),
    "errors": (None, {"fail_on_error": False}),
    "scored": (None, {"fail_on_error": False, "score_on_error": True}),
}
for name, (epochs, more) in EVALUATIONS.items():
    rows = [Sample(id=i, input=f"{i}?", metadata={"fails": bool(more) and i < 3}) for i in range(12)]
    task = Task(name=name, dataset=rows, solver=say(), scorer=[letter(), parts()], epochs=epochs)
    for kind in ("json", "eval"):
        more |= {"log_dir": f"{sys.argv[1]}/{name}.{kind}", "log_format": kind, "display": "none"}
        (log,) = eval(task, model="mockllm/model", **more)
        assert log.status == "success", log.error
"""
RUN_LM_EVAL = """
import json, os, sys
from pathlib import Path

os.environ.update(HF_HOME=sys.argv[1] + "/hf", HF_DATASETS_OFFLINE="1")
here = Path(sys.argv[1])
rows = [
    {"q": f"{i}?", "choices": [str(i), "no"], "gold": 0, "text": f"some words {i} " * (1 + i % 3)} for i in range(12)
]
(here / "rows.json").write_text(json.dumps(rows))
TASKS = {
    "choice": ("multiple_choice", {"doc_to_choice": "{{choices}}", "doc_to_target": "gold"}, ["acc", "acc_norm"]),
    "rolling": (
        "loglikelihood_rolling",
        {"doc_to_text": "", "doc_to_target": "{{text}}"},
        ["word_perplexity", "byte_perplexity", "bits_per_byte"],
    ),
    "words": ("loglikelihood", {"doc_to_target": " {{choices[0]}}"}, ["perplexity", "acc"]),
}
for name, (kind, texts, metrics) in TASKS.items():
    task = {"task": name, "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": f"{here}/rows.json"}}}
    task |= {"test_split": "test", "output_type": kind, "doc_to_text": "{{q}}", **texts}
    task["metric_list"] = [{"metric": metric} for metric in metrics]
    (here / f"{name}.yaml").write_text(json.dumps(task))  # which is YAML
from lm_eval.__main__ import cli_evaluate
sys.argv = ["lm_eval", "run", "--model", "dummy", "--include_path", str(here), "--tasks", ",".join(TASKS)]
sys.argv += ["--log_samples", "--output_path", str(here / "out")]
cli_evaluate()
"""
