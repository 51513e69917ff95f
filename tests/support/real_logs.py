"""Programs that make small logs with the programs that we read, in an environment of each: the argument is a folder.

Those of `COUNTED` print a line of JSON for each number that the program itself counts: the log below the folder, the
settings of the comparison, the number, and why it is another one than our mean (empty: it is the same).
"""

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
(here / "few.json").write_text(json.dumps(rows[:5]))
for name, (kind, texts, metrics) in TASKS.items():
    file = here / ("few.json" if name == "words" else "rows.json")
    task = {"task": name, "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(file)}}}
    task |= {"test_split": "test", "output_type": kind, "doc_to_text": "{{q}}", **texts}
    task["metric_list"] = [{"metric": metric} for metric in metrics]
    (here / f"{name}.yaml").write_text(json.dumps(task))  # which is YAML
for weighs in (True, False):
    metrics = [{"metric": "acc", "aggregation": "mean", "weight_by_size": weighs}]
    group = {"group": f"all_{weighs}", "task": ["choice", "words"] if weighs else ["all_True"]}
    group["aggregate_metric_list"] = metrics
    (here / f"all_{weighs}.yaml").write_text(json.dumps(group))
from lm_eval.__main__ import cli_evaluate
sys.argv = ["lm_eval", "run", "--model", "dummy", "--include_path", str(here), "--tasks"]
sys.argv += ["rolling,all_False"]
sys.argv += ["--log_samples", "--output_path", str(here / "out")]
cli_evaluate()
"""

_HARBOR = """
import json, sys
from datetime import UTC, datetime
from pathlib import Path
from uuid import uuid4
from harbor.metrics.mean import Mean
from harbor.models.job.result import JobResult, JobStats
from harbor.models.task.id import LocalTaskId
from harbor.models.trial.config import TaskConfig, TrialConfig
from harbor.models.trial.result import AgentInfo, ExceptionInfo, ModelInfo, TrialResult
from harbor.models.verifier.result import VerifierResult

now, here = datetime.now(UTC), Path(sys.argv[1])
agent = AgentInfo(name="agent", version="1", model_info=ModelInfo(name="m"))
VALID = [({"reward": i % 2}, None) for i in range(8)] + [({"reward": 0.25}, "AgentTimeoutError")]
JOBS = {
    "one": [*VALID, ({"reward": 1}, "ApiRateLimitError"), (None, "SandboxBuildFailedError")],
    "parts": [({"right": i % 2, "style": i / 8}, None) for i in range(8)],
}
for job, ends in JOBS.items():
    trials = []
    for i, (rewards, failure) in enumerate(ends):
        about = {"exception_message": "x", "exception_traceback": "", "occurred_at": now}
        trial = {"task_name": f"t{i}", "trial_name": f"t{i}__x", "trial_uri": "file:///t", "source": "bench"}
        trial |= {"task_id": LocalTaskId(path=Path(f"t{i}")), "task_checksum": "0", "agent_info": agent}
        trial |= {"config": TrialConfig(task=TaskConfig(path=Path(f"t{i}")))}
        trial |= {"verifier_result": rewards and VerifierResult(rewards=rewards)}
        trial |= {"exception_info": failure and ExceptionInfo(exception_type=failure, **about)}
        trials.append(TrialResult(**trial))
    stats = JobStats.from_trial_results(trials, n_total_trials=len(trials))
    numbers = Mean().compute([trial.verifier_result.rewards for trial in trials if trial.reward_valid])
    stats.evals["agent__m__bench"].metrics = [numbers]
    models = {"": JobResult(id=uuid4(), started_at=now, n_total_trials=len(trials), stats=stats)}
    for name, model in (models | {trial.trial_name: trial for trial in trials}).items():
        (here / job / name).mkdir(parents=True, exist_ok=True)
        (here / job / name / "result.json").write_text(model.model_dump_json(indent=4))
    for name, number in numbers.items():
        print(json.dumps([job, {} if name == "mean" else {"score": name}, number, ""]))
"""
_VERIFIERS = """
import json, sys
from pathlib import Path
from verifiers.v1.configs.agent import AgentConfig
from verifiers.v1.episode import Episode
from verifiers.v1.graph import MessageNode
from verifiers.v1.task import WireTaskData
from verifiers.v1.trace import AgentInfo, Error, Reward, Trace, TraceTask
from verifiers.v1.types import AssistantMessage, UserMessage
from verifiers.v1.utils.format import format_mean

here = Path(sys.argv[1])
episodes = []
for i in range(12):
    task = TraceTask(type="Sum", data=WireTaskData(idx=i, prompt=f"{i}?"), key=f"sum/{i}")
    nodes = [MessageNode(message=UserMessage(content=f"{i}?"), sampled=False)]
    nodes.append(MessageNode(parent=0, message=AssistantMessage(content="a"), sampled=True))
    rewards = {"right": Reward(score=float(i % 3 > 0), weight=0.5), "short": Reward(score=0.2)}
    failed = {"ok": i < 10, "errors": [Error(type="ToolError", message="x")] * (i > 10)}
    traces = [
        Trace(task=task, agent=AgentInfo(config=AgentConfig(), name=name, trainable=not more), nodes=nodes)
        .model_copy(update={"is_completed": True, "ok": True} | ({} if more else {"rewards": rewards, **failed}))
        for name, more in (("solver", False), ("judge", True))
    ]
    episodes.append(Episode(task=task, ok=i < 10, traces=traces))
(here / "traces.jsonl").write_text("".join(episode.model_dump_json() + "\\n" for episode in episodes))
done = [trace for episode in episodes for trace in episode.traces]
scored = [trace for trace in done if trace.agent.trainable] or done
mean = format_mean(scored, lambda trace: trace.reward, digits=12).split()[0]
print(json.dumps(["traces.jsonl", {"score": "reward"}, float(mean), ""]))
"""
_TAU2 = """
import json, sys
from pathlib import Path
from tau2.data_model.simulation import Results
from tau2.metrics.agent_metrics import compute_metrics

here = Path(sys.argv[1])
talk = [{"role": role, "content": "x"} for role in ("assistant", "user", "assistant")]
user = {"implementation": "u", "llm": "u", "global_simulation_guidelines": ""}
info = {"git_commit": "0", "num_trials": 3, "max_steps": 9, "max_errors": 9, "user_info": user}
info |= {"agent_info": {"implementation": "a", "llm": "m"}}
info |= {"environment_info": {"domain_name": "retail", "policy": ""}}
criteria = {"actions": [], "reward_basis": ["DB"]}
tasks = [
    {"id": str(at), "user_scenario": {"instructions": "x"}, "evaluation_criteria": criteria} for at in range(8)
]
for name, fewer, skips in (("even", 0, 0), ("uneven", 2, 0), ("skipped", 0, 2)):
    simulations = []
    for at in range(8):
        for trial in range(3 - (at < fewer)):
            about = {"id": f"{at}-{trial}", "task_id": str(at), "start_time": "0", "end_time": "1", "duration": 1.0}
            about |= {"agent_cost": 0.0, "trial": trial, "seed": trial, "messages": talk}
            about |= {"reward_info": {"reward": float((at + trial) % 3 > 0 and at >= skips)}}
            about |= {"termination_reason": "agent_error" if at < skips else "user_stop", "skipped": at < skips}
            simulations.append(about)
    results = Results.model_validate({"info": info, "tasks": tasks, "simulations": simulations})
    results.save(here / f"{name}.json")
    metrics = compute_metrics(results)
    summary = {"domain": "retail", "num_simulations": len(simulations), "metrics": metrics.as_dict()}
    (here / f"{name}_results.json").write_text(json.dumps(summary))
    why = {"even": "", "uneven": "weighting", "skipped": "recorded"}[name]
    print(json.dumps([f"{name}.json", {}, metrics.avg_reward, why]))
    for k, number in metrics.pass_hat_ks.items() if name == "even" else ():
        print(json.dumps([f"{name}.json", {"outcome": f"pass^{k}"}, number, ""]))
"""
_EVALPLUS = """
import contextlib, io, json, re, sys
from pathlib import Path
from evalplus.evaluate import evaluate

words = ("pass", "fail", "timeout")
for name, more in (("both", ("pass", "fail")), ("base", (None,))):
    tasks = {}
    for at in range(12):
        ends = [(words[(at * 7 + i * 5) % 3], more[(at + i) % len(more)]) for i in range(11)]
        tasks[f"HumanEval/{at}"] = [
            {"task_id": f"HumanEval/{at}", "solution": f"x = {i}", "base_status": base, "plus_status": plus}
            for i, (base, plus) in enumerate(ends)
        ]
    folder = Path(sys.argv[1], name)
    folder.mkdir()
    about = {"date": "2026-01-01 00:00", "hash": "0", "eval": tasks}
    (folder / "eval_results.json").write_text(json.dumps(about))
    with contextlib.redirect_stdout(io.StringIO()) as said:
        evaluate("humaneval", samples=str(folder), base_only=name == "base")
    kinds = ["base"] * 2 + ["plus"] * 2
    for kind, (k, number) in zip(kinds, re.findall(r"pass@(\\d+):\\s+([\\d.]+)", said.getvalue())):
        print(json.dumps([name, {"score": kind, "outcome": f"pass@{k}"}, float(number), ""]))
"""
_SWE_BENCH = """
import json, os, sys
from pathlib import Path
from swebench.harness.constants import RUN_EVALUATION_LOG_DIR
from swebench.harness.reporting import make_run_report

os.chdir(sys.argv[1])
ids = [f"own__proj-{at}" for at in range(12)]
about = {"model_name_or_path": "org/m", "model_patch": "diff"}
predictions = {name: {"instance_id": name, **about} for name in ids[:11]}
predictions[ids[9]]["model_patch"] = ""
Path("all_preds.jsonl").write_text("".join(json.dumps(each) + "\\n" for each in predictions.values()))
# Four resolved, one not, one with an empty report, one whose disk was full, two not, one without a patch or a report.
for at, name in enumerate(ids[:11]):
    folder = Path(RUN_EVALUATION_LOG_DIR, "run", "org__m", name)
    folder.mkdir(parents=True)
    if at == 6:
        (folder / "run_instance.log").write_text("Error: No space left on device\\n")
        (folder / "test_output.txt").write_text("OSError: [Errno 28] No space left on device\\n")
    elif at < 9:
        text = "" if at == 5 else json.dumps({name: {"resolved": at < 4, "patch_exists": True}})
        (folder / "report.json").write_text(text)
report = json.loads(Path(make_run_report(predictions, [{"instance_id": name} for name in ids], "run")).read_text())
counted = report["submitted_instances"] - report["infra_failure_instances"]
print(json.dumps([".", {}, report["resolved_instances"] / counted, ""]))
"""
COUNTED = {
    "harbor": _HARBOR,
    "verifiers-0.4": _VERIFIERS,
    "tau2": _TAU2,
    "evalplus": _EVALPLUS,
    "swebench-5": _SWE_BENCH,
}
"""By what a test of it needs (tests/needs.py)."""
