"""Two logs of any program are compared on the same tasks, and what one of them lacks is named and assumed openly."""

import json
import zipfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from itertools import product
from math import comb
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from scipy import stats
from support.refusals import refused
from support.runs import eval_item, written
from support.transcripts import assistant, document, jsonl, prediction, user

from composer_stages.comparison import logs, report
from composer_stages.comparison.config import Config
from composer_stages.comparison.decision import LogComparison, compare
from composer_stages.comparison.pairs import chance_of_k
from composer_stages.comparison.sides import read_sides
from composer_stages.comparison.stage import document as document_of, summarize
from composer_stages.comparison.words import describe_reasons
from composer_stages.envs import sampling_unit
from composer_stages.errors import BadInput, UsageError
from composer_stages.evaluation.arm_comparison import EvalQuestion
from composer_stages.evaluation.document import verdict_document
from composer_stages.evaluation.inference import PairedTest
from composer_stages.evaluation.outcomes import KEPT, PASSED, items_table
from composer_stages.evaluation.verdict import decide
from composer_stages.formats.measurement import ScoreKind
from composer_stages.runs import store
from composer_stages.runs.kinds import EVAL_ITEM

Rows = Iterable[Mapping[str, Any]]


def table(path: Path, rows: Rows) -> str:
    return str(jsonl(path, *rows))


def scores(path: Path, values: Iterable[float | None], **columns: Any) -> str:
    return table(path, ({"id": f"t{at}", "score": value, **columns} for at, value in enumerate(values)))


def inspect_log(
    path: Path, samples: Iterable[tuple[Any, str, str]], task: str = "sums", epoch: int = 1, **config: Any
) -> str:
    """An Inspect log of samples (id, question, score) of one model."""
    about = {"task": task, "model": "openai/gpt", "model_generate_config": config}
    made = [
        {"id": name, "epoch": epoch, "input": question, "messages": [user(question), assistant("an answer")]}
        | ({"scores": {"match": {"value": score}}} if score in ("C", "I") else {"error": {"message": score}})
        for name, question, score in samples
    ]
    return str(document(path, {"version": 2, "status": "success", "eval": about, "samples": made}))


def predictions(folder: Path, submitted: Iterable[str], resolved: Iterable[str], model: str) -> str:
    table(folder / "all_preds.jsonl", (prediction(name, f"+{name}", model) for name in submitted))
    document(folder / "report.json", {"resolved": [*resolved], "generated": [*submitted]})
    return str(folder)


def recorded(comparison: LogComparison, number: int = 0) -> SimpleNamespace:
    """A difference as `comparison.json` holds it."""
    return SimpleNamespace(**document_of(comparison)["differences"][number])


def compared(*paths: str, **settings: Any) -> LogComparison:
    config = Config(paths=list(paths), **settings)
    return compare(read_sides(config.paths, config.columns), config)[0]


def asked(num: int, right: Callable[[int], bool] = lambda at: True) -> list[tuple[Any, str, str]]:
    """Samples of so many questions, of which the right ones score."""
    return [(at, f"What is {at}?", "C" if right(at) else "I") for at in range(num)]


def outcomes(num: int, gained: int, lost: int) -> tuple[list[int], list[int]]:
    """Verdicts of two sides on `num` tasks: so many were gained, so many lost, and half of the others passed."""
    same = [at % 2 for at in range(num - gained - lost)]
    return [0] * gained + [1] * lost + same, [1] * gained + [0] * lost + same


def test_a_difference_is_that_of_an_independent_computation(tmp_path: Path) -> None:
    """p is McNemar's mid-p, up to the draws of signs and the score test, of which the larger counts."""
    before, after = outcomes(200, gained=30, lost=10)
    comparison = compared(scores(tmp_path / "a.jsonl", before), scores(tmp_path / "b.jsonl", after))
    delta = recorded(comparison)
    assert (delta.decision, delta.wins, delta.losses, delta.num_tasks) == ("better", 30, 10, 200)
    assert delta.estimate == pytest.approx(0.1)
    assert delta.p == pytest.approx(stats.binomtest(10, 40).pvalue - stats.binom.pmf(10, 40, 0.5), abs=0.001)
    assert delta.low == pytest.approx(0.041, abs=0.005) and delta.high == pytest.approx(0.16, abs=0.005)
    assert "B (b) is better than A (a): +10.0 points" in report.describe_decision(comparison, comparison.differences[0])
    turned = recorded(compared(scores(tmp_path / "b.jsonl", after), scores(tmp_path / "a.jsonl", before)))
    assert turned.decision == "worse" and turned.estimate == pytest.approx(-0.1)


@pytest.mark.parametrize(
    ("num", "gained", "lost", "min_gain", "decision"),
    [
        (2000, 10, 10, 0.05, "no difference"),
        (2000, 74, 94, 0.02, "no gain"),
        (100, 10, 8, 0.02, "undecided"),
        (5, 5, 0, 0.02, "undecided"),
    ],
)
def test_decisions(tmp_path: Path, num: int, gained: int, lost: int, min_gain: float, decision: str) -> None:
    sides = zip("ab", outcomes(num, gained, lost), strict=True)
    comparison = compared(*(scores(tmp_path / f"{name}.jsonl", values) for name, values in sides), min_gain=min_gain)
    delta = recorded(comparison)
    assert delta.decision == decision
    assert (delta.needed["tasks"] if delta.needed else 0) > (
        num if decision == "undecided" and not delta.too_few else -1
    )
    text = report.describe_decision(comparison, comparison.differences[0])
    assert ("5 tasks, and 6 are needed to show anything" in text) == bool(delta.too_few)


def test_two_logs_of_one_model_are_told_apart_by_what_differs(tmp_path: Path) -> None:
    paths = [
        inspect_log(tmp_path / f"{name}.json", asked(20), temperature=at) for at, name in enumerate(["old", "new"])
    ]
    comparison = compared(*paths)
    assert [side.name for side in comparison.sides] == ["old", "new"]
    assert recorded(comparison).settings == ["temperature: 0 and 1"]
    assert comparison.sides[0].models == ("openai/gpt",)


def test_a_side_is_named_by_the_part_of_a_long_name_that_differs(tmp_path: Path) -> None:
    """Inspect's files are named by time, task and id: the report has that name once, below its table."""
    names = ["2026-02-11T15-18-04-05-00_sums_mj7khqpMM4GB", "2026-02-11T16-20-44-05-00_sums_k2ghqpMM4GBC"]
    comparison = compared(*(inspect_log(tmp_path / f"{name}.json", asked(20)[at:]) for at, name in enumerate(names)))
    assert [side.name for side in comparison.sides] == ["15-18-04-05-00", "16-20-44-05-00"]
    text = report.text(comparison)
    assert [text.count(name) for name in names] == [1, 1] and "\nlog (A)  " in text
    assert max(map(len, text.split("\n"))) <= report.WIDTH
    for folder, name in zip("ab", names, strict=True):
        (tmp_path / folder).mkdir()
        (tmp_path / f"{name}.json").rename(tmp_path / folder / f"{name}.json")
    apart = Config(paths=[f"{tmp_path}/{folder}/{name}.json" for folder, name in zip("ab", names, strict=True)])
    assert [side.name for side in read_sides(apart.paths)] == ["a", "b"] and apart.label() == "a-vs-b"


def test_a_log_that_is_compared_with_itself_is_named(tmp_path: Path) -> None:
    first, copied, third = (
        scores(tmp_path / f"{name}.jsonl", [1, 0, score]) for name, score in zip("abc", (1, 1, 0), strict=True)
    )
    assert [side.copy_of for side in read_sides([first, copied, third])] == [None, 0, None]
    said = report.text(compared(first, third, copied)).splitlines()[0]
    assert said.startswith("C is A: both logs have the same content")


def test_what_a_side_lacks_is_named_and_counts_as_asked(tmp_path: Path) -> None:
    """The side that skips what it fails gains by being left out, and nothing by being counted as failed."""
    before, after = [1] * 60 + [0] * 40, [1] * 60 + [None] * 36
    paths = [scores(tmp_path / "a.jsonl", before), scores(tmp_path / "b.jsonl", after)]
    excluded, failed, bounds = (recorded(compared(*paths, missing=way)) for way in ("auto", "failed", "bounds"))
    assert excluded.missing == ({}, {"no score": 36, "not submitted": 4})
    assert (excluded.num_tasks, failed.num_tasks) == (60, 100)
    assert excluded.estimate == failed.estimate == 0.0
    assert (excluded.worst, excluded.best) == (0.0, pytest.approx(0.4))
    assert not excluded.holds and (bounds.low, bounds.high) > (-0.1, 0.3)
    assert "36 no score, 4 not submitted - left out, tasks on both sides" in report.text(compared(*paths))
    assert bounds.p == 1.0 and bounds.needed is None and excluded.p == failed.p
    comparison = compared(*paths, missing="bounds")
    assert "depends on how what is missing" in report.describe_decision(comparison, comparison.differences[0])
    # The sides' means are of the tasks that the difference is of.
    assert [side.mean for side in compared(*paths).sides] == [1.0, 1.0]


def test_what_was_not_submitted_to_swe_bench_has_failed(tmp_path: Path) -> None:
    instances = [f"org__{repo}-{number}" for repo in "xyz" for number in range(20)]
    submitted = {"careful": (instances, instances[:24]), "picky": (instances[:30], instances[:27])}
    paths = [predictions(tmp_path / name, *values, name) for name, values in submitted.items()]
    comparison = compared(*paths)
    delta = recorded(comparison)
    assert delta.counted_as == "failed" and delta.missing == ({}, {"not submitted": 30})
    assert delta.num_tasks == 60 and delta.estimate == pytest.approx(3 / 60)
    assert [round(side.mean, 3) for side in comparison.sides] == [0.4, 0.45]
    assert comparison.unit == "repository" and comparison.fixed and delta.num_units == 3
    assert recorded(compared(*paths, missing="excluded")).estimate == pytest.approx(3 / 30)


LogSample = dict[str, Any]


def attempt(path: Path, samples: Iterable[tuple[LogSample, Any]], status: str = "success", **about: Any) -> str:
    """A log of one evaluation, which may be tried again: samples by what is theirs, and scores; None is an error."""
    written_samples = []
    for at, (sample, score) in enumerate(samples):
        messages = [user(f"What is {sample.get('id', at)}?"), assistant(sample.get("said", "an answer"))]
        written_samples.append({"id": at, "epoch": 1, "input": messages[0]["content"], "messages": messages} | sample)
        written_samples[-1] |= (
            {"error": {"message": "E('x')"}} if score is None else {"scores": {"match": {"value": score}}}
        )
    evaluation = {"task": "quiz", "task_id": "T", "model": "m", **about}
    return str(document(path, {"version": 2, "status": status, "eval": evaluation, "samples": written_samples}))


def sample_scores(log: logs.ReadLog) -> dict[str, list[float | None]]:
    scores_by_task: dict[str, list[float | None]] = {}
    for row in log.scored_by(*log.scores).items.to_pylist():
        scores_by_task.setdefault(row["task"], []).append(row["score"])
    return scores_by_task


@pytest.mark.parametrize("with_ids", [True, False])
@pytest.mark.parametrize("names", [("1-failed.json", "2-retry.json"), ("2-failed.json", "1-retry.json")])
def test_a_retry_repeats_what_was_finished_and_replaces_what_failed(
    tmp_path: Path, names: tuple[str, str], with_ids: bool
) -> None:
    """A finished sample counts once in either order of the files, and an error that was played again is nothing."""

    def own(at: int, epoch: int = 1, again: bool = False) -> LogSample:
        return {"id": at, "epoch": epoch} | ({"uuid": f"u{at}-{epoch}-{again}"} if with_ids else {})

    failed, retry = (tmp_path / "log" / name for name in names)
    first = [(own(at), None if at < 4 else at % 2) for at in range(10)]
    attempt(failed, first, status="error")
    again = [(own(at, again=at < 4), at % 2) for at in range(10)]
    attempt(retry, [*again, *((own(at, 2), 1) for at in range(10))])
    log = logs.read(str(tmp_path / "log"))
    assert {task: sorted(scores) for task, scores in sample_scores(log).items()} == {
        f"quiz/{at}": [at % 2, 1.0] for at in range(10)
    }
    # Without ids the answers tell, which are all alike here.
    left_out = {"duplicate": 6, "failed and played again": 4} if with_ids else {"duplicate": 10}
    assert log.notes == tuple(f"{number} records left out: {why}" for why, number in left_out.items())
    # Where the retry broke off too, the last error of a sample is left, and only that.
    attempt(retry, [(own(at, again=at < 4), None if at < 2 else at % 2) for at in range(10)], status="error")
    log = logs.read(str(tmp_path / "log"))
    assert sample_scores(log) == {f"quiz/{at}": [None if at < 2 else at % 2] for at in range(10)}
    assert "the log broke off (status 'error') after 10 samples" in log.notes


def test_samples_of_other_evaluations_and_epochs_are_samples(tmp_path: Path) -> None:
    """Two evaluations of one model, alike in every word; their ids, their folders or their epochs tell them apart."""
    scored = [({}, at % 2) for at in range(6)]
    attempt(tmp_path / "log" / "1.json", scored, task_id="T")
    attempt(tmp_path / "log" / "2.json", [*scored[:5], ({}, None)], task_id="U")
    attempt(tmp_path / "log" / "3.json", scored, task_id="")
    attempt(tmp_path / "log" / "4.json", [({"epoch": 2}, at % 2) for at in range(6)], task_id="T")
    attempt(tmp_path / "log" / "set" / "1.json", [({}, 1 - at % 2) for at in range(6)], task_id="T")
    scores_by_task = sample_scores(logs.read(str(tmp_path / "log")))
    assert scores_by_task["quiz/0"] == [0, 0, 0, 0, 1] and scores_by_task["quiz/5"] == [1, None, 1, 1, 0]


@pytest.mark.parametrize("stored", ["copied", "as an archive"])
@pytest.mark.parametrize("identified_by", ["uuid", "task_id", "neither"])
def test_a_log_in_two_files_counts_once(tmp_path: Path, identified_by: str, stored: str) -> None:
    """A copy in another folder, and the archive of the document; epochs of equal words stay."""
    samples = [
        ({"id": at, "epoch": epoch} | ({"uuid": f"u{at}{epoch}"} if identified_by == "uuid" else {}), at % 2)
        for at in range(4)
        for epoch in (1, 2)
    ]
    path = Path(attempt(tmp_path / "log" / "x.json", samples, task_id="T" if identified_by == "task_id" else ""))
    complete = sample_scores(logs.read(str(path)))
    if stored == "copied":
        (tmp_path / "log" / "backup").mkdir()
        (tmp_path / "log" / "backup" / "x.json").write_bytes(path.read_bytes())
    else:
        content = json.loads(path.read_text())
        with zipfile.ZipFile(tmp_path / "log" / "x.eval", "w") as archive:
            for sample in content.pop("samples"):
                archive.writestr(f"samples/{sample['id']}_epoch_{sample['epoch']}.json", json.dumps(sample))
            archive.writestr("header.json", json.dumps(content))
    log = logs.read(str(tmp_path / "log"))
    assert sample_scores(log) == complete and log.notes == ("8 records left out: duplicate",)


def test_one_sample_with_two_scores_is_refused_and_a_score_counts_where_a_file_has_none(tmp_path: Path) -> None:
    """A log that was scored again beside the first one: which counts, only the user knows."""
    scored = [({"uuid": f"u{at}"}, at % 2) for at in range(4)]
    attempt(tmp_path / "log" / "x.json", scored)
    attempt(tmp_path / "log" / "x-scored.json", [({"uuid": f"u{at}"}, 1) for at in range(4)])
    named = ("quiz/0", "u0", "x.json", "x-scored.json", "the file that counts")
    refused(lambda: logs.read(str(tmp_path / "log")), BadInput, *named)
    bare = json.loads((tmp_path / "log" / "x.json").read_text())
    for sample in bare["samples"]:
        del sample["scores"]
    document(tmp_path / "log" / "x.json", bare)
    assert sample_scores(logs.read(str(tmp_path / "log"))) == {f"quiz/{at}": [1.0] for at in range(4)}


def test_the_reason_of_a_failed_sample_is_in_its_own_words(tmp_path: Path) -> None:
    cancelled = [(at, "?", "CancelledError('Cancelled via cancel scope 7f66')") for at in (5, 6)]
    quoted = (4, "?", "APIError(\"Pool(host=\\'h\\', port=1) is closed\")")
    failed = [*asked(4), quoted, *cancelled, (7, "?", "Docker is gone"), (8, "?", "no " * 50), (9, "?", "I")]
    paths = [inspect_log(tmp_path / "a.json", asked(10)), inspect_log(tmp_path / "b.json", failed)]
    plain = "APIError: Pool(host='h', port=1) is closed"
    missing = {"cancelled": 2, "Docker is gone": 1, f"{'no ' * 39}no…": 1, plain: 1}
    assert describe_reasons(missing).endswith(", 2 cancelled")
    assert recorded(compared(*paths)).missing == ({}, missing), "what is cut ends in dots"


def lm_eval(
    folder: Path,
    values: Iterable[float | None],
    metric: str = "wer",
    higher: bool | None = None,
    task: str = "speech",
    results: Mapping[str, Any] | None = None,
    time: str = "2026-01-02T03-04-05.000006",
) -> str:
    """Samples of one task, and results that say whether higher values of its metric are better where that is given."""
    about = {"doc": {}, "target": "1", "filtered_resps": ["1"], "metrics": [metric]}
    rows = [{"doc_id": at, "doc_hash": f"{at:02d}" * 32, **about, metric: value} for at, value in enumerate(values)]
    table(folder / f"samples_{task}_{time}.jsonl", rows)
    if higher is not None or results:
        results_document = {"results": {}, "config": {}, "configs": {task: {}}, "model_name": f"org/{folder.name}"}
        results_document["higher_is_better"] = {task: {metric: higher}}
        document(folder / f"results_{time}.json", results_document | (results or {}))
    return str(folder)


FALLING = {name: [start + at / 100 for at in range(30)] for name, start in (("a", 0.5), ("b", 0.3))}


def shown(comparison: LogComparison, sign: int) -> tuple[list[Any], list[float]]:
    """What a comparison shows, its means and limits as they would be where all scores had this sign."""
    delta, (a, b) = recorded(comparison), comparison.sides
    means = [delta.estimate, delta.worst or 0, delta.best or 0, a.mean, b.mean]
    limits = [sorted((sign * side.low, sign * side.high)) for side in (delta, a, b)]
    decided = [delta.decision, delta.wins, delta.losses, delta.holds, delta.missing, delta.needed]
    return decided, [*(sign * mean for mean in means), *np.ravel(limits)]


@pytest.mark.parametrize("missing", ["excluded", "failed", "bounds"])
@pytest.mark.parametrize("shift", [-0.08, 0.0, 0.08])
def test_where_lower_is_better_all_is_as_for_the_scores_with_the_other_sign(
    tmp_path: Path, missing: str, shift: float
) -> None:
    """What is missing is at the worst end, the highest score; p, level, bounds and numbers needed are the same."""
    random = np.random.default_rng(3)
    before = random.uniform(1, 2, 60)
    after = [None if at < 5 else float(value) for at, value in enumerate(before + shift + random.normal(0, 0.05, 60))]
    sides = {"lower": (before, after), "higher": (-before, [None if value is None else -value for value in after])}
    lower, higher = (
        compared(
            *(
                lm_eval(tmp_path / word / name, values, "wer", word == "higher")
                for name, values in zip("ab", pair, strict=True)
            ),
            missing=missing,
            min_gain=0.02,
            scale="0,3" if word == "lower" else "-3,0",
        )
        for word, pair in sides.items()
    )
    delta = recorded(lower)
    assert lower.lower_is_better and not higher.lower_is_better
    if missing == "excluded" and shift:
        assert (delta.decision, np.sign(delta.estimate)) == ("better" if shift < 0 else "worse", np.sign(shift))
    (decided, numbers), (decided_turned, numbers_turned) = shown(lower, 1), shown(higher, -1)
    assert decided == decided_turned and numbers == pytest.approx(numbers_turned, abs=1e-6)
    assert delta.p == pytest.approx(recorded(higher).p, abs=0.003)
    text = report.text(lower)
    assert "; lower is better" in report.describe_decision(lower, lower.differences[0])
    assert "lower is better (wer), as the logs say" in text
    assert f"{delta.losses} higher, {delta.wins} lower" in text
    assert "lower is better" not in report.text(higher)


def test_rates_of_which_lower_is_better_are_no_pass_rates(tmp_path: Path) -> None:
    before, after = outcomes(60, gained=3, lost=27)
    paths = [
        lm_eval(tmp_path / name, values, "pct_stereotype", False) for name, values in (("a", before), ("b", after))
    ]
    comparison = compared(*paths)
    delta = recorded(comparison)
    assert comparison.binary and (delta.decision, delta.wins, delta.losses) == ("better", 27, 3)
    assert delta.estimate == pytest.approx(-0.4) and delta.low < -0.4 < delta.high < 0
    assert [round(side.mean, 3) for side in comparison.sides] == [0.7, 0.3]
    assert "pass rate" not in report.text(comparison)
    assert recorded(compared(*paths[::-1])).decision == "worse"


@pytest.mark.parametrize(
    "results",
    [
        {
            "higher_is_better": {},
            "configs": {"speech": {"metric_list": [{"metric": "wer", "higher_is_better": False}]}},
        },
        {"higher_is_better": {"group": {"wer": None}, "speech": {"acc": True, "wer": False}}},
        {"higher_is_better": {"another-name": {"wer": False}}},
    ],
    ids=["of older versions", "of the chosen metric", "of another name"],
)
def test_the_direction_is_that_of_the_metric_in_the_results(tmp_path: Path, results: dict[str, Any]) -> None:
    paths = [lm_eval(tmp_path / name, values, results=results) for name, values in FALLING.items()]
    assert recorded(compared(*paths)).decision == "better"
    # Said for one side, it holds for the same metric of the other.
    next((tmp_path / "b").glob("results_*.json")).unlink()
    assert recorded(compared(*paths)).decision == "better"


def test_results_of_the_time_of_the_samples_count(tmp_path: Path) -> None:
    """Several runs of a model lie in one folder; the last results name another task alone."""
    for name, values in FALLING.items():
        lm_eval(tmp_path / name, values, higher=False)
        document(
            tmp_path / name / "results_2026-03-01T00-00-00.000001.json",
            {"results": {}, "config": {}, "configs": {}, "higher_is_better": {"speech": {"wer": True}}},
        )
    comparison = compared(*(str(next((tmp_path / name).glob("samples_*"))) for name in "ab"))
    assert comparison.lower_is_better and recorded(comparison).decision == "better"


def test_a_direction_that_is_not_said_is_asked_for(tmp_path: Path) -> None:
    bare = [lm_eval(tmp_path / name, values, "brier_score") for name, values in FALLING.items()]
    rows, scorer = [], []
    for name, values in FALLING.items():
        losses = ({"id": at, "value": score, "metric": "Val_Loss"} for at, score in enumerate(values))
        rows.append(table(tmp_path / f"{name}.jsonl", losses))
        path = tmp_path / f"{name}.json"
        inspect_log(path, asked(30))
        log = json.loads(path.read_text())
        for sample, value in zip(log["samples"], values, strict=True):
            sample["scores"] = {"perplexity": {"value": value}}
        scorer.append(str(document(path, log)))
    for paths in (bare, rows, scorer):
        refused(lambda paths=paths: compared(*paths), BadInput, "--lower-is-better", "lower_is_better=false")
        lower, higher = (compared(*paths, lower_is_better=word) for word in (True, False))
        assert [recorded(delta).decision for delta in (lower, higher)] == ["better", "worse"]
        assert "lower is better (" in report.text(lower) and "higher is better (" in report.text(higher)
    named = [lm_eval(tmp_path / "f1" / name, values, "f1") for name, values in FALLING.items()]
    assert recorded(compared(*named)).decision == "worse", "a metric of which higher is better by its name"
    lower = "n_wrong mistakes numErrors testErr levenshtein kl_div asr refusal_rate unsafe logLoss bpb eer num_steps "
    lower += "edit_distance hallucination_rate failure_rate fpr word_error false_positives regret kl_divergence mape"
    assert all(ScoreKind(name, name).may_be_lower for name in lower.split())
    assert not any(
        ScoreKind(name, name).may_be_lower
        for name in ["recall", "distinct_2", "fidelity", "failed_over", "pass", "reciprocal_rank", "correct"]
    )


def test_directions_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    paths = [lm_eval(tmp_path / name, values, "score", name == "a") for name, values in FALLING.items()]
    refused(lambda: compared(*paths), BadInput, "a: score (higher", "b: score (lower", "--lower-is-better")
    assert recorded(compared(*paths, lower_is_better=True)).decision == "better"
    third = lm_eval(tmp_path / "c", FALLING["b"], "accuracy")
    refused(lambda: compared(paths[1], third), BadInput, "accuracy", "--score", code="comparison.several-scores")
    both = [lm_eval(tmp_path / "both" / name, values, "wer", False) for name, values in FALLING.items()]
    for path, values in zip(both, FALLING.values(), strict=True):
        lm_eval(Path(path), values, "acc", True, "arith", time="2026-01-02T03-04-05.000007")
    for word in (None, True):
        named = ("acc (higher", "wer (lower")
        refused(
            lambda word=word: compared(*both, lower_is_better=word), BadInput, *named, code="comparison.several-scores"
        )
    chosen = [compared(*both, score=name) for name in ("wer", "acc")]
    assert [(side.lower_is_better, recorded(side).decision) for side in chosen] == [(True, "better"), (False, "worse")]
    # A metric over all documents has no scores to mix.
    for path in both:
        lm_eval(Path(path), [None] * 30, "wer", False)
    assert not compared(*both).lower_is_better


def test_trials_whose_reward_harbor_marks_as_invalid_are_missing(tmp_path: Path) -> None:
    """A model's provider refused further calls: what the verifier then found is no failure of the model."""
    for side, invalid in (("a", 0), ("b", 8)):
        for at in range(20):
            trial = {"task_name": f"t{at}", "trial_name": f"t{at}__x", "reward_valid": at >= invalid}
            trial |= {"verifier_result": {"rewards": {"reward": float(at >= invalid)}}, "exception_info": None}
            if at < invalid:
                trial["exception_info"] = {"exception_type": "ApiUsageLimitError", "exception_message": "x"}
            document(tmp_path / side / f"t{at}__x" / "result.json", trial)
    delta = recorded(compared(str(tmp_path / "a"), str(tmp_path / "b")))
    assert (delta.num_tasks, delta.estimate) == (12, 0.0)
    assert delta.missing == ({}, {"ApiUsageLimitError": 8})


def test_a_log_that_broke_off_is_named(tmp_path: Path) -> None:
    paths = [inspect_log(tmp_path / f"{name}.json", asked(num)) for name, num in (("a", 10), ("b", 4))]
    document(Path(paths[1]), json.loads(Path(paths[1]).read_text()) | {"status": "error"})
    complete, broken = (side.notes for side in compared(*paths).sides)
    assert complete == () and broken == ("the log broke off (status 'error') after 4 samples",)


def test_a_log_without_scores_or_samples_is_refused(tmp_path: Path) -> None:
    paths = [scores(tmp_path / "a.jsonl", [1, None]), scores(tmp_path / "b.jsonl", [None, 1])]
    refused(lambda: compared(*paths), BadInput, "both a and b", "a: 1 no score", "--missing failed")
    empty = inspect_log(tmp_path / "c.json", [])
    refused(lambda: compared(paths[0], empty), BadInput, "c.json", "1 log without samples")


def test_a_table_without_rows_and_a_line_that_is_no_json_are_refused(tmp_path: Path) -> None:
    complete, bare, broken = scores(tmp_path / "a.jsonl", [1, 0]), tmp_path / "b.csv", tmp_path / "c.jsonl"
    bare.write_text("id,score\n")
    broken.write_text(Path(complete).read_text() + '{"id": "t3",\n')
    for pair in ((complete, str(bare)), (str(bare), complete)):
        with pytest.raises(BadInput, match=r"b\.csv holds no sample to compare: it is empty"):
            compared(*pair)
    with pytest.raises(BadInput, match=r"c\.jsonl:3 is no JSON"):
        compared(complete, str(broken))


@pytest.mark.parametrize(
    ("name", "row", "named"),
    [
        ("d.jsonl", {"id": "t0", "verdict": "ok"}, ["lacks a score (score, reward", "it has id, verdict"]),
        ("d.jsonl", {"nr": 1, "ok": "C"}, ["lacks an id (task_id, ", " and a score (score, ", "it has nr, ok"]),
        ("d.jsonl", {"id": "t9", "score": "maybe"}, ["'maybe' in row 3", "a number, or true or false"]),
        ("d.csv", {"id": "t9", "score": "maybe"}, ["'maybe' in row 3", "a number, or true or false"]),
    ],
)
def test_columns_and_values_that_are_no_scores_are_named(
    tmp_path: Path, name: str, row: dict[str, Any], named: list[str]
) -> None:
    rows = [*([{"id": "t0", "score": 1}, {"id": "t1", "score": None}] if "score" in row else [row]), row]
    path = tmp_path / name
    if path.suffix == ".jsonl":
        table(path, rows)
    else:
        path.write_text("id,score\n" + "".join(f"{row['id']},{row['score'] or ''}\n" for row in rows))
    refused(lambda: compared(str(path), str(path)), BadInput, *named)


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.json"])
@pytest.mark.parametrize("extra", ["[" * 20_000 + "]" * 20_000, '{"a":' * 20_000 + "1" + "}" * 20_000])
def test_a_line_of_a_table_that_is_nested_too_deeply_is_named(tmp_path: Path, name: str, extra: str) -> None:
    third = scores(tmp_path / "b.jsonl", [0, 1])
    path = jsonl(tmp_path / name, {"id": "t0", "score": 1}, f'{{"id": "t1", "score": 0, "x": {extra}}}')
    refused(lambda: compared(str(path), third), BadInput, f"{path}:2", "20,001 levels deep", "Mend it, or remove it")


def test_columns_of_several_types_and_json_arrays_are_read(tmp_path: Path) -> None:
    rows = [{"id": 1, "score": True}, {"id": "t2", "score": 0.5}, {"id": "t3", "score": None}]
    items = logs.read(str(document(tmp_path / "a.json", rows))).scored_by("score").items
    assert (items["task"].to_pylist(), items["score"].to_pylist()) == (["1", "t2", "t3"], [1.0, 0.5, None])


def test_a_difference_above_the_scale_is_refused(tmp_path: Path) -> None:
    paths = [scores(tmp_path / f"{name}.jsonl", [1, 0] * 8) for name in "ab"]
    refused(lambda: compared(*paths, min_gain=5.0), UsageError, "between 0 and 1", "0.05")


def test_a_score_that_is_no_number_is_no_score(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("id,score\n" + "".join(f"t{at},{'nan' if at == 3 else 1}\n" for at in range(10)))
    delta = recorded(compared(str(path), scores(tmp_path / "b.jsonl", [1] * 10)))
    assert delta.missing == ({"no score": 1}, {})


def test_tasks_are_matched_by_what_was_asked_where_ids_count_lines(tmp_path: Path) -> None:
    """A shuffled data set numbers its tasks anew: the same number is another task, and the question tells which."""
    rows = asked(20, lambda at: at < 10)
    shuffled = [(new, rows[old][1], rows[old][2]) for new, old in enumerate(np.random.default_rng(0).permutation(20))]
    paths = [inspect_log(tmp_path / "a.json", rows), inspect_log(tmp_path / "b.json", shuffled)]
    delta = recorded(compared(*paths))
    assert (delta.wins, delta.losses) == (0, 0) and "questions" in delta.matched
    renamed = recorded(compared(paths[0], inspect_log(tmp_path / "c.json", rows, task="sums_v2")))
    assert (renamed.num_tasks, renamed.wins + renamed.losses) == (20, 0) and "questions" in renamed.matched


def test_tasks_are_matched_by_what_was_asked_where_ids_have_shifted(tmp_path: Path) -> None:
    """One row more in the middle: the first two thirds of the ids still name the same tasks, and the others do not."""
    rows = asked(30, lambda at: at % 2)
    longer = [*rows[:20], (20, "What is new?", "C"), *((at + 1, *fields) for at, *fields in rows[20:])]
    delta = recorded(compared(inspect_log(tmp_path / "a.json", rows), inspect_log(tmp_path / "b.json", longer)))
    assert (delta.num_tasks, delta.wins, delta.losses) == (30, 0, 0)
    assert delta.missing == ({"not submitted": 1}, {}) and "questions" in delta.matched


def test_tasks_of_one_side_alone_are_no_samples_of_others(tmp_path: Path) -> None:
    """Of a shuffled log with eight new questions, these have the ids that eight tasks of the other log have."""
    rows = asked(30, lambda at: at % 2)
    longer = [*rows[:22], *((at, f"What is new in {at}?", "C") for at in range(8))]
    shuffled = [(new, *longer[old][1:]) for new, old in enumerate(np.random.default_rng(0).permutation(30))]
    delta = recorded(compared(inspect_log(tmp_path / "a.json", rows), inspect_log(tmp_path / "b.json", shuffled)))
    assert (delta.num_tasks, delta.estimate, delta.wins, delta.losses) == (22, 0.0, 0, 0)
    assert delta.missing == ({"not submitted": 8}, {"not submitted": 8})


def test_a_question_worded_anew_keeps_its_id(tmp_path: Path) -> None:
    again = [(at, f"Think first. {question}", score) for at, question, score in asked(12)]
    delta = recorded(compared(inspect_log(tmp_path / "a.json", asked(12)), inspect_log(tmp_path / "b.json", again)))
    assert delta.num_tasks == 12 and "asked in other words" in delta.matched


def test_logs_of_different_tasks_are_refused(tmp_path: Path) -> None:
    other = table(tmp_path / "b.jsonl", ({"id": f"u{at}", "score": 1} for at in range(10)))
    paths = scores(tmp_path / "a.jsonl", [1] * 10), other
    refused(lambda: compared(*paths), BadInput, "a", "b", "0 have the same id")


def test_one_log_is_split_by_its_models(tmp_path: Path) -> None:
    rows = [{"id": f"t{at}", "model": model, "score": int(model == "y")} for at in range(10) for model in "xy"]
    comparison = compared(table(tmp_path / "both.jsonl", rows))
    assert [side.name for side in comparison.sides] == ["x", "y"] and recorded(comparison).decision == "better"
    refused(lambda: compared(scores(tmp_path / "a.jsonl", [1] * 9)), UsageError, "one log", "needs two")


def test_tasks_of_one_document_are_resampled_together(tmp_path: Path) -> None:
    """A gain on all tasks of two of twelve documents is as certain as two documents."""
    after = [int(at // 10 < 2 or at % 2) for at in range(120)]
    rows = [{"id": f"t{at}", "score": int(at % 2), "document": f"d{at // 10}"} for at in range(120)]
    again = [{**row, "score": score} for row, score in zip(rows, after, strict=True)]
    paths = [table(tmp_path / "a.jsonl", rows), table(tmp_path / "b.jsonl", again)]
    alone, together = recorded(compared(*paths)), recorded(compared(*paths, unit="document"))
    assert alone.decision == "better" and together.decision == "undecided"
    assert together.num_units == 12 and together.p > 10 * alone.p
    # A category of all but one of the documents is no clearer than they are.
    for path, side in zip(paths, (rows, again), strict=True):
        table(Path(path), ({**row, "category": "y" if row["document"] == "d11" else "x"} for row in side))
    by_task, by_document = (recorded(compared(*paths, unit=unit)).categories for unit in ("", "document"))
    assert by_task[0]["p_holm"] < 0.01 < 0.1 < by_document[0]["p_holm"]
    assert by_task[1]["p_holm"] and by_document[1]["p_holm"] is None  # one document shows nothing
    refused(lambda: compared(*paths, unit="author"), UsageError, "author", "document")


def test_samples_of_a_task_are_averaged(tmp_path: Path) -> None:
    rows = [{"id": f"t{at}", "score": int(sample < at % 4)} for at in range(24) for sample in range(3)]
    once = [{"id": f"t{at}", "score": int(at % 4 >= 2)} for at in range(24)]
    comparison = compared(table(tmp_path / "a.jsonl", rows), table(tmp_path / "b.jsonl", once))
    assert [side.samples for side in comparison.sides] == ["3", "1"]
    assert recorded(comparison).num_tasks == 24 and recorded(comparison).estimate == pytest.approx(0.0)
    assert comparison.binary and (recorded(comparison).wins, recorded(comparison).losses) == (6, 6)


def test_epochs_and_seeds_of_a_model_are_samples_of_its_tasks(tmp_path: Path) -> None:
    """Three logs of one model, with two epochs each, are one side: a task counts once, with six samples."""
    for side, right in (("a", 1), ("b", 4)):
        for seed, epoch in product(range(3), (1, 2)):
            rows = asked(12, lambda at, passed=2 * seed + epoch <= right: passed)
            inspect_log(tmp_path / side / f"{seed}-{epoch}.json", rows, epoch=epoch, seed=seed)
    comparison = compared(str(tmp_path / "a"), str(tmp_path / "b"))
    delta = recorded(comparison)
    assert [(side.samples, side.num_tasks, side.name) for side in comparison.sides] == [("6", 12, "a"), ("6", 12, "b")]
    assert delta.estimate == pytest.approx(0.5) and (delta.num_tasks, delta.num_units) == (12, 12)
    assert delta.settings == []


def test_samples_of_a_task_that_failed_are_missing(tmp_path: Path) -> None:
    """Two of three epochs that ended in errors would hide what they were: each counts, and the decision rests on it."""
    samples = {"a.jsonl": (1, 0, 0), "b.jsonl": (1, None, None)}
    paths = [
        table(tmp_path / name, ({"id": f"t{at}", "score": score} for at, score in product(range(40), scored)))
        for name, scored in samples.items()
    ]
    excluded, failed, bounds = (recorded(compared(*paths, missing=way)) for way in ("auto", "failed", "bounds"))
    assert excluded.missing == failed.missing == bounds.missing == ({}, {"no score": 80})
    assert excluded.estimate == pytest.approx(2 / 3) and failed.estimate == 0.0
    assert (excluded.worst, excluded.best) == (pytest.approx(0.0), pytest.approx(2 / 3)) and not excluded.holds
    assert excluded.decision == "better" and bounds.decision == "undecided"


def test_passes_of_impossible_tasks_are_no_passes(tmp_path: Path) -> None:
    """The arm that hacks the twins of twenty tasks is no better than the start, which is the first side."""
    tasks_by_arm = [*product(("hacker", "start"), range(20))]
    honest = [eval_item(arm, task, task % 2 == 0) for arm, task in tasks_by_arm]
    twins = [{**eval_item(arm, task, arm == "hacker"), "task_id": f"t{task}~twin"} for arm, task in tasks_by_arm]
    comparison = compared(str(written(tmp_path, "evaluate/20260102T030405Z-kata", [(EVAL_ITEM, honest + twins)])))
    delta = recorded(comparison)
    assert (delta.num_tasks, delta.estimate) == (20, 0.0)
    start, hacker = comparison.sides
    assert (start.name, hacker.name) == ("start", "hacker") and "impossible" in start.notes[0]


@pytest.mark.parametrize(("env", "units"), [("kata", "auto"), ("kata", "fixed"), ("swe-lite", "auto")])
def test_an_evaluation_is_compared_in_its_own_units(tmp_path: Path, env: str, units: str) -> None:
    """Operations of kata, repositories of a benchmark, families as a sample; and seeds that share sets of pairs."""
    random = np.random.default_rng(5)
    rows = [
        eval_item(arm, task, bool(random.random() < rate + 0.2 * (task % 3)), seed)
        | {"pair_set": f"p{seed % 3}", "unit": f"u{task % 12}"}
        for (arm, rate), seed, task in product((("A", 0.3), ("B", 0.45)), range(4), range(60))
    ]
    config = {"env": {"name": env}, "units": units}
    path = written(tmp_path, "evaluate/20260102T030405Z-x", [(EVAL_ITEM, rows)], config=config)
    comparison = compared(str(path))
    delta = recorded(comparison)
    sampling = replace(sampling_unit(env), fixed=units == "fixed" or sampling_unit(env).fixed)
    verdict = decide(items_table(rows), EvalQuestion(sampling=sampling))
    gain, alone = verdict.gain, [(side.low, side.high) for side in comparison.sides]
    assert alone == [pytest.approx((arm.low, arm.high)) for arm in verdict.arms], "on the same collections, too"
    assert (delta.estimate, delta.low, delta.high) == pytest.approx((gain.estimate, gain.low, gain.high), abs=1e-9)
    assert delta.p == pytest.approx(gain.p_value, abs=1e-9) and comparison.unit == gain.unit


def test_passes_of_an_evaluation_are_compared_whatever_its_recorded_verdict_is_about(tmp_path: Path) -> None:
    """B passes every task and never keeps the protocol: better, with a note that the passes broke it."""
    rows = [
        {**eval_item(arm, task, arm == "B" or task % 2 == 0), "protocol_ok": arm == "A"}
        for arm, task in product("AB", range(20))
    ]
    path = written(tmp_path, "evaluate/20260102T030405Z-x", [(EVAL_ITEM, rows)])
    for outcome in (PASSED, KEPT):
        verdict = decide(items_table(rows), EvalQuestion(control=None, outcome=outcome))
        store.write_json(path / "verdict.json", verdict_document(verdict))
        comparison = compared(str(path))
        assert comparison.differences[0].estimate == 0.5
        notes = comparison.sides[0].notes
        assert any("20 of the passes broke" in note for note in notes)
        assert any("of an earlier version" in note for note in notes) is (outcome is KEPT)
    (path / "verdict.json").unlink()
    assert recorded(compared(str(path))).estimate == 0.5
    other = written(tmp_path, "evaluate/20260103T030405Z-y", [(EVAL_ITEM, rows)])
    refused(lambda: compared(str(other), str(path)), UsageError, code="comparison.several-arms", arms=["A", "B"])


def test_the_name_of_a_benchmark_is_no_unit_of_its_tasks(tmp_path: Path) -> None:
    """A log of another program for tasks that an environment here is named after, too."""
    for name, passed in (("a", 0), ("b", 1)):
        about = {"doc": {}, "target": "1", "filtered_resps": ["1"], "metrics": ["acc"], "acc": passed}
        rows = [{"doc_id": at, "doc_hash": f"{at:02d}" * 32, **about} for at in range(12)]
        table(tmp_path / name / "samples_gsm8k_2026-01-02T03-04-05.000006.jsonl", rows)
    comparison = compared(str(tmp_path / "a"), str(tmp_path / "b"))
    assert comparison.unit == "" and recorded(comparison).num_units == 12 and recorded(comparison).decision == "better"


@pytest.mark.parametrize(
    ("num", "gained", "lost", "exit_code", "sentence"),
    [
        (2000, 20, 30, 0, "B is not worse than A by 2 points."),
        (100, 6, 6, 3, "It is not shown that B is not worse than A by 2 points."),
        (2000, 20, 140, 1, "B is worse than A by 2 points or more."),
        (5, 0, 0, 3, "It is not shown that B is not worse than A by 2 points."),
    ],
)
def test_a_side_that_is_not_worse_passes_where_that_is_asked(
    tmp_path: Path, num: int, gained: int, lost: int, exit_code: int, sentence: str
) -> None:
    """Of few tasks that is not shown, whatever their difference: a gate that they pass would hold nothing back."""
    paths = [
        scores(tmp_path / f"{name}.jsonl", side) for name, side in zip("ab", outcomes(num, gained, lost), strict=True)
    ]
    comparison = compared(*paths, not_worse=0.02)
    assert summarize(comparison, document_of(comparison))["exit_code"] == exit_code
    assert sentence in report.text(comparison).splitlines()


@pytest.mark.parametrize(
    ("outcome", "rates"), [("pass@2", (5 / 6, 1 / 2)), ("pass^2", (1 / 6, 0.0)), ("mean", (0.5, 0.25))]
)
def test_what_counts_of_samples_is_chosen(tmp_path: Path, outcome: str, rates: tuple[float, float]) -> None:
    """Of four samples two pass, or one: the share of pairs of samples that hold a pass, or two."""
    rows = ({"id": f"t{at // 4}", "score": int(at % 4 < passed)} for passed in (2, 1) for at in range(160))
    rows = [*rows]
    paths = [table(tmp_path / f"{name}.jsonl", half) for name, half in (("a", rows[:160]), ("b", rows[160:]))]
    comparison = compared(*paths, outcome=outcome)
    assert tuple(side.mean for side in comparison.sides) == pytest.approx(rates)
    assert comparison.differences[0].decision == "worse" and comparison.differences[0].losses == 40
    assert (outcome in report.text(comparison)) == (outcome != "mean")


def test_a_task_with_too_few_samples_for_an_outcome_is_missing(tmp_path: Path) -> None:
    """Of 200 tasks with two samples each B lacks the last sample of 120, as a log that was cut off does."""
    rows = [{"id": f"t{at % 200}", "score": at % 2} for at in range(400)]
    paths = [table(tmp_path / f"{name}.jsonl", side) for name, side in (("a", rows), ("b", rows[:280]))]
    (difference,) = compared(*paths, outcome="pass@2", not_worse=0.05).differences
    assert difference.missing and difference.missing.by_side == ({}, {"with fewer than 2 samples": 120})
    assert difference.num_tasks == 80 and difference.not_worse is None and not difference.missing.holds
    assert compared(*paths, outcome="pass@2", not_worse=0.05, missing="excluded").differences[0].not_worse is True


def test_chances_of_k_samples_are_those_of_the_papers() -> None:
    passed, num = np.array([3.0, 0.0, 10.0, 1.0]), np.array([10.0, 10.0, 10.0, 4.0])
    expected = [1 - comb(n - c, 5) / comb(n, 5) if n >= 5 else np.nan for c, n in ((3, 10), (0, 10), (10, 10), (1, 4))]
    assert chance_of_k(passed, num, "pass@", 5) == pytest.approx(expected, nan_ok=True)
    assert chance_of_k(passed, num, "pass^", 3) == pytest.approx([1 / 120, 0, 1, 0])


def test_an_outcome_that_the_samples_cannot_have_is_refused(tmp_path: Path) -> None:
    passes = [scores(tmp_path / f"{name}.jsonl", [0, 1] * 10) for name in "ab"]
    refused(lambda: compared(*passes, outcome="pass@4"), BadInput, code="comparison.too-few-samples")
    points = [scores(tmp_path / f"{name}.jsonl", [0.5, 1] * 10) for name in "ab"]
    refused(lambda: compared(*points, outcome="pass@2"), UsageError, code="comparison.outcome-of-scores")


def test_repeats_say_how_large_a_difference_they_make_alone(tmp_path: Path) -> None:
    """Held against 2,000 pairs of runs of one model: 95 % of their differences are smaller."""
    random = np.random.default_rng(0)
    rates = random.beta(1, 1, 100)
    draws = random.binomial(4, rates, (2, 2000, 100)) / 4
    apart = np.quantile(np.abs((draws[0] - draws[1]).mean(1)), 0.95)
    paths = []
    for name in "ab":
        passed = random.random((100, 4)) < rates[:, None]
        rows = ({"id": f"t{task}", "score": int(value)} for (task, _), value in np.ndenumerate(passed))
        paths.append(table(tmp_path / f"{name}.jsonl", rows))
    comparison = compared(*paths)
    assert comparison.pairings[0].noise.limit == pytest.approx(apart, rel=0.15)
    assert "Two runs without any difference are up to" in report.text(comparison)
    single = [scores(tmp_path / f"{name}.jsonl", [0, 1] * 10) for name in "cd"]
    assert compared(*single).pairings[0].noise is None


def test_several_logs_share_one_level(tmp_path: Path) -> None:
    """Each has the level that Holm's procedure leaves it, and its interval agrees with its decision."""
    before, after = outcomes(120, gained=15, lost=5)
    paths = [scores(tmp_path / "a.jsonl", before), scores(tmp_path / "b.jsonl", after)]
    alone = recorded(compared(*paths))
    paths += [scores(tmp_path / f"{name}.jsonl", before[::-1]) for name in "cd"]
    first, *later = (recorded(compared(*paths), number) for number in range(3))
    assert alone.decision == "better" and alone.p < 0.05 < 3 * alone.p
    assert first.decision == "undecided" and first.alpha == pytest.approx(0.05 / 3) and first.low < 0
    assert first.p_holm == pytest.approx(3 * first.p) and [delta.letter for delta in later] == ["C", "D"]


def test_categories_of_tasks_are_listed(tmp_path: Path) -> None:
    def rows(scored: Mapping[str, int]) -> Rows:
        return ({"id": f"{kind}{at}", "score": scored[kind], "category": kind} for kind in "xyz" for at in range(10))

    before, after = rows({"x": 0, "y": 1, "z": 1}), rows({"x": 1, "y": 1, "z": 0})
    delta = recorded(compared(table(tmp_path / "a.jsonl", before), table(tmp_path / "b.jsonl", after)))
    means = {row["name"]: (row["baseline"], row["treatment"]) for row in delta.categories}
    assert means == {"x": (0.0, 1.0), "y": (1.0, 1.0), "z": (1.0, 0.0)}
    assert delta.categories[0]["p_holm"] < 0.05 < (delta.categories[1]["p_holm"] or 0)


def test_scores_of_any_scale_are_compared_by_their_means(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    base, gain = random.normal(50, 10, 80), random.normal(4, 5, 80)
    comparison = compared(scores(tmp_path / "a.jsonl", base), scores(tmp_path / "b.jsonl", base + gain))
    delta, of_t = recorded(comparison), stats.ttest_1samp(gain, 0).confidence_interval()
    assert not comparison.binary and delta.decision == "better" and delta.estimate == pytest.approx(gain.mean())
    assert (delta.low, delta.high) == (pytest.approx(of_t.low, abs=0.25), pytest.approx(of_t.high, abs=0.25))
    few = compared(scores(tmp_path / "a.jsonl", base[:12]), scores(tmp_path / "b.jsonl", base[:12] + 9))
    assert recorded(few).decision == "undecided" and "20 are needed" in recorded(few).too_few


@pytest.mark.parametrize(("num", "decision"), [(30, "undecided"), (200, "no difference")])
def test_equal_scores_show_no_more_than_equal_outcomes(tmp_path: Path, num: int, decision: str) -> None:
    ways = (5, "0,10"), (1, "0,1")
    sides = [[scores(tmp_path / f"{name}{score}.jsonl", [score] * num) for name in "ab"] for score, _ in ways]
    equal, passed = (recorded(compared(*paths, scale=scale)) for paths, (_, scale) in zip(sides, ways, strict=True))
    assert equal.estimate == 0.0 and equal.decision == passed.decision == decision
    assert (equal.low / 10, equal.high / 10) == pytest.approx((passed.low, passed.high), abs=0.03)


def test_what_occurs_is_no_scale(tmp_path: Path) -> None:
    """Scores of 40 to 60 that may be from 0 to 100: no margin, and no bounds of what is missing."""
    before = [40 + at / 3 for at in range(60)]
    after = [None] * 6 + [value + 4 + at % 3 for at, value in enumerate(before[6:])]
    paths = [scores(tmp_path / "a.jsonl", before), scores(tmp_path / "b.jsonl", after)]
    comparison = compared(*paths)
    delta = recorded(comparison)
    assert (comparison.scale, comparison.min_gain) == (None, None) and delta.decision == "better"
    assert (delta.worst, delta.best, delta.holds) == (None, None, False) and "--scale" in report.text(comparison)
    for way in ("failed", "bounds"):
        refused(lambda way=way: compared(*paths, missing=way), BadInput, code="comparison.scale-unknown")
    scaled = recorded(compared(*paths, missing="bounds", scale="0,100"))
    apart = [0.9 * 5 + (limit - mean) / 10 for limit, mean in ((0, 40 + 5 / 6), (100, 40 + 5 / 6))]
    assert (scaled.worst, scaled.best) == (
        pytest.approx(apart[0]),
        pytest.approx(apart[1]),
    ) and scaled.decision == "undecided"
    assert compared(*paths, scale="0,100").min_gain == 2
    few = compared(*paths[:1], paths[0], min_gain=None)
    assert few.differences[0].decision == "undecided" and few.differences[0].needed is None
    refused(
        lambda: compared(*paths, scale="0,50"),
        BadInput,
        code="comparison.score-outside-scale",
        highest=pytest.approx(after[-1], abs=2),
    )
    for scale in ("0", "5,5", "9,1", "0,nan", "a,b", "0,1,2"):
        refused(lambda scale=scale: compared(*paths, scale=scale), UsageError, code="comparison.bad-scale", scale=scale)


@pytest.mark.parametrize("skewed", [False, True])
def test_scores_keep_their_level(skewed: bool) -> None:
    """Of 400 experiments without a difference few are rejected: skewness would make the t of 60 tasks reject 9 %."""
    random = np.random.default_rng(1)
    draws = random.exponential(size=(400, 60)) ** 1.5 if skewed else random.normal(size=(400, 60))
    apart = (draws - (1.3293 if skewed else 0.0)) / 40
    test = PairedTest(apart[:, None] / 2, -apart[:, None] / 2, np.arange(60), scores=True, num_flips=399)
    assert test.rejects(0.0).mean() < 0.085
    shifted = PairedTest(apart[:, None] + 0.03, 0 * apart[:, None], np.arange(60), scores=True, num_flips=399)
    assert shifted.rejects(0.0).mean() > 0.9


def test_a_million_tasks_are_not_enumerated() -> None:
    """The t of many units that all differ is normal: it agrees with that of drawn signs."""
    random = np.random.default_rng(2)
    apart = random.normal(0.004, 0.1, size=(1, 1, 3000))
    test = PairedTest(apart, 0 * apart, np.arange(3000), scores=True)
    assert test.flips.normal
    assert test.p()[0] == pytest.approx(stats.ttest_1samp(apart[0, 0], 0).pvalue, rel=0.05)
