"""What several files hold counts once; what only resembles it counts as often as it is there."""

from pathlib import Path
from typing import Any

import pytest
from support.foreign import PATCH, document, jsonl

from stages import import_traces
from stages.formats import files, readers
from stages.formats.base import INSTANCE, family_of
from stages.formats.reading import FileCount
from stages.formats.reports import Sidecars
from stages.import_traces import Config
from stages.runs import runner
from stages.runs.kinds import ROLLOUT
from stages.runs.run import Manifest, Run, RunWriter

IDS = ["a__b-1", "a__b-2"]


def prediction(instance: str, patch: str = PATCH, model: str = "m") -> dict[str, Any]:
    return {"instance_id": instance, "model_name_or_path": model, "model_patch": patch}


def trajectory(folder: Path, instance: str, patch: str | None = PATCH, model: str | None = "m") -> Path:
    said = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "```bash\nls\n```"}]
    told = {"mini_version": "1", "exit_status": "Submitted", "submission": patch}
    info = {**told, "config": {"model": {"model_name": model}}} if model else told
    return document(folder / f"{instance}.traj.json", {"messages": said, "info": info, "instance_id": instance})


def imported(root: Path, *paths: Path, on: str | None = None) -> Run:
    config = Config(paths=[str(path) for path in paths])
    return Run(runner.execute("import", {}, config, root=root / "artifacts", on=on).path)


def sources(run: Run) -> list[str]:
    return sorted(row["source"] for row in run.rows(ROLLOUT))


def test_predictions_beside_their_trajectories_count_once(tmp_path: Path) -> None:
    for instance in IDS:
        trajectory(tmp_path / "in" / "trajs", instance, PATCH + "\n")
    jsonl(tmp_path / "in" / "all_preds.jsonl", *map(prediction, IDS))
    run = imported(tmp_path, tmp_path / "in")
    assert sources(run) == ["mini-swe-agent"] * 2 and run.manifest.counts["dropped_duplicate"] == 2
    assert run.manifest.counts["traces"] == 4


def test_json_beside_jsonl_counts_once(tmp_path: Path) -> None:
    jsonl(tmp_path / "in" / "preds.jsonl", *map(prediction, IDS))
    document(tmp_path / "in" / "preds.json", {i: prediction(i) for i in IDS})
    assert len(imported(tmp_path, tmp_path / "in").rows(ROLLOUT)) == 2
    rows = [{"instance_id": i, "messages": [{"role": "assistant", "content": i}], "resolved": True} for i in IDS]
    jsonl(tmp_path / "chat" / "data.jsonl", *rows)
    document(tmp_path / "chat" / "data.json", rows)
    assert len(imported(tmp_path, tmp_path / "chat").rows(ROLLOUT)) == 2


def test_other_models_other_patches_and_other_runs_count_for_themselves(tmp_path: Path) -> None:
    trajectory(tmp_path / "in" / "trajs", IDS[0])
    jsonl(tmp_path / "in" / "other.jsonl", prediction(IDS[0], "another patch", "n"))
    jsonl(tmp_path / "in" / "elsewhere" / "all_preds.jsonl", prediction(IDS[0]))
    jsonl(tmp_path / "in" / "again" / "all_preds.jsonl", prediction(IDS[0], PATCH, "n"))
    assert sources(imported(tmp_path, tmp_path / "in")) == ["mini-swe-agent", *["swebench-preds"] * 3]


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("django__django-11019", "django/django"),
        ("scikit-learn__scikit-learn-10297", "scikit-learn/scikit-learn"),
        ("getmoto__moto.694ce1f4.pr_7331", "getmoto/moto"),
        ("Project-MONAI__MONAI.a09c1f08.lm_rewrite__1a2b3c4d", "Project-MONAI/MONAI"),
        ("pandas-dev__pandas.95280573", "pandas-dev/pandas"),
    ],
)
def test_ids_of_swe_bench_and_swe_smith_name_their_repository(name: str, family: str) -> None:
    assert INSTANCE.fullmatch(name) and family_of(name) == family
    found = INSTANCE.match(f"{name}.gemini-3-pro.traj")
    assert found is not None and found.group().startswith(name)
    assert not INSTANCE.fullmatch("a_file__of_mine") and family_of("x__y") == "x__y"


@pytest.mark.slow
def test_what_workers_read_counts_as_in_one_process(tmp_path: Path) -> None:
    """Samples of a task over several files, duplicates, secrets, damaged lines, reports, and a file of no format."""
    folder = tmp_path / "in"
    for instance in IDS:
        trajectory(folder / "trajs", instance, PATCH + "\n")
        trajectory(folder / "again", instance, "another patch")
    jsonl(folder / "all_preds.jsonl", *map(prediction, IDS), prediction("a__b-3", "password=hunter2hunter2"))
    document(folder / "m.run.json", {"resolved_ids": [IDS[0]], "unresolved_ids": [IDS[1]]})
    rows = [{"instance_id": i, "messages": [{"role": "assistant", "content": i * 3}], "resolved": True} for i in IDS]
    for name in ("one", "two"):
        jsonl(folder / name / "data.jsonl", *rows).open("a").write("{torn\n")
    document(folder / "two" / "odd.json", {"nobody": "knows"})
    here, there = imported(tmp_path / "here", folder), imported(tmp_path / "there", folder, on="processes:2")
    assert there.manifest.content == here.manifest.content
    assert there.manifest.counts == here.manifest.counts and there.manifest.summary == here.manifest.summary
    assert (there.path / "report.txt").read_text() == (here.path / "report.txt").read_text()
    assert here.manifest.counts["dropped_duplicate"] > 2 and here.manifest.summary["reports"]["judged"] > 1


def test_a_file_that_a_worker_did_not_finish_is_read_again(tmp_path: Path) -> None:
    path = trajectory(tmp_path / "in", IDS[0])
    (source,), (reader,) = files.find([str(path)]), readers("mini-swe-agent")
    record = Manifest(composer="", stage="import", stage_version=2, fingerprint="")
    out, count = RunWriter(tmp_path / "run", record, cache=tmp_path), FileCount(source.label, "", source.sha256)
    import_traces.read_into_journal(source, reader, Sidecars(), out)
    left = list(
        import_traces.read_rollouts(source, None, Sidecars(), count, out)
    )  # without a reader the file would be dropped
    assert count.traces == count.records == 1 and isinstance(left[0], import_traces.ReadRollout)
    torn = RunWriter(tmp_path / "torn", record, cache=tmp_path)
    torn.write_all([(f"{import_traces.unit_of(source)}/1", {"drop": {}}, False)])
    assert list(import_traces.read_rollouts(source, reader, Sidecars(), FileCount("", "", ""), torn)) == left
