import shutil
from pathlib import Path
from typing import Any

import pytest
from support.command_line import call
from support.runs import rewritten

from composer_stages.errors import BadInput, UsageError
from composer_stages.runs import catalog
from composer_stages.runs.run import Run


def test_a_run_is_found_by_folder_name_part_and_stage(made: Path):
    run = (made / "collect" / "latest").resolve()
    for text in (
        str(run),
        run.name,
        f"collect/{run.name}",
        run.name[-6:],
        "collect",
        str(made / "collect"),
        str(made / "collect" / "latest"),
    ):
        assert catalog.find(made, text).resolve() == run, text


def test_a_folder_called_like_a_stage_hides_no_run(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "collect").mkdir()
    assert catalog.find(made, "collect") == (made / "collect" / "latest").resolve()
    assert catalog.find(made, "./collect") == Path("collect")


def test_what_cannot_be_looked_at_hides_no_run_and_an_unreadable_folder_is_named(made: Path, tmp_path: Path):
    shutil.copytree(made, tmp_path / "all", symlinks=True)
    (tmp_path / "all" / "collect" / "mine").symlink_to("mine")
    assert len(catalog.folders(tmp_path / "all")) == len(catalog.folders(made)) > 1
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(UsageError, match="loop cannot be read"):
        catalog.folders(tmp_path / "loop")
    assert catalog.folders(tmp_path / "nothing") == []


def test_rows_of_a_copied_run_are_told(made: Path, tmp_path: Path):
    run = (made / "collect" / "latest").resolve()
    for name in (run.name, "backup"):
        shutil.copytree(run, tmp_path / "collect" / name)
    asked = ("query", "select count(*) from rollouts")
    assert f"backup is a copy of {run.name}" in " ".join(call(tmp_path, *asked).stderr.split())
    assert "copy" not in call(tmp_path, "query", "select run, count(*) from rollouts group by run").stderr


def test_unknown_and_ambiguous_runs_are_refused(made: Path, tmp_path: Path):
    with pytest.raises(BadInput, match="no run 'zebra'"):
        catalog.find(made, "zebra")
    with pytest.raises(BadInput, match="3 runs fit"):
        catalog.find(made, "2")
    assert "no manifest.json" in call(made, "show", tmp_path).stderr


def test_without_from_the_latest_fitting_runs_are_read_and_named(made: Path):
    told: list[str] = []
    found = catalog.choose("extract-pairs", [], made, told.append)
    assert {name: found.one(name).manifest.stage for name in found} == {
        "rollouts": "collect",
        "teacher_actions": "replay-teachers",
    }
    assert "which replay-teachers/" in told[0] and "(the latest;" in told[1] and len(told) == 2


def test_a_run_of_answers_adds_the_rollouts_that_it_reads(made: Path):
    told: list[str] = []
    found = catalog.choose("extract-pairs", ["replay-teachers"], made, told.append)
    assert found.one("rollouts").manifest.stage == "collect" and len(told) == 1
    assert f"extract-pairs: reads {found.one('rollouts').path} (which replay-teachers/" in told[0]
    both = catalog.choose("extract-pairs", ["collect", "replay-teachers"], made, told.append)
    assert both.one("rollouts").path == found.one("rollouts").path and len(told) == 1, "nothing was chosen unasked"
    with pytest.raises(BadInput, match="needs a run that holds steps"):
        catalog.choose("replay-teachers", ["replay-teachers"], made, told.append)
    assert len(told) == 1


def copied(run: Path, to: Path, **facts: Any) -> Path:
    """Another run of these files, the latest of its stage."""
    shutil.copytree(run, to)
    rewritten(to / "manifest.json", lambda fields: fields | facts)
    (to.parent / "latest").unlink(missing_ok=True)
    (to.parent / "latest").symlink_to(to.name)
    return to


def test_rollouts_of_a_training_are_read_only_where_it_is_named(own_runs: Path):
    first = (own_runs / "collect" / "latest").resolve()
    training = copied(first, own_runs / "train" / "20990101T000000Z-kata-B-s1-abcdef", stage="train")
    told: list[str] = []
    assert catalog.choose("replay-teachers", [], own_runs, told.append).one("rollouts").path == first
    assert told == [f"replay-teachers: reads {first} (the latest; --from chooses another)"]
    assert catalog.choose("replay-teachers", ["train"], own_runs, print).one("rollouts").path == training
    shutil.rmtree(own_runs / "collect")
    with pytest.raises(BadInput, match=rf"such as the training {training}\.$"):
        catalog.choose("replay-teachers", [], own_runs, print)


@pytest.mark.parametrize("policy", ["reference", "noop"])
def test_scripted_rollouts_are_skipped(own_runs: Path, policy: str):
    first = (own_runs / "collect" / "latest").resolve()
    config = Run(first).manifest.config
    facts = {"config": {**config, "policy": {**config["policy"], "model": policy}}}
    checked = copied(first, own_runs / "collect" / "20990101T000000Z-kata-abcdef", **facts)
    assert catalog.choose("replay-teachers", [], own_runs, print).one("rollouts").path == first
    assert catalog.choose("replay-teachers", ["collect"], own_runs, print).one("rollouts").path == checked
    imported = own_runs / "import" / "20260101T000000Z-x-abcdef"
    copied(first, imported, stage="import")
    shutil.rmtree(first)
    assert catalog.choose("replay-teachers", [], own_runs, print).one("rollouts").path == imported, (
        "of another stage, and older"
    )
    shutil.rmtree(own_runs / "import")
    assert catalog.choose("replay-teachers", [], own_runs, print).one("rollouts").path == checked


def test_pairs_come_from_the_rollouts_that_were_answered(own_runs: Path):
    first, answers = ((own_runs / stage / "latest").resolve() for stage in ("collect", "replay-teachers"))
    outputs = Run(first).manifest.outputs
    outputs["steps"]["content_sha256"] = "0" * 64
    newer = copied(first, own_runs / "collect" / "20990101T000000Z-kata-abcdef", outputs=outputs, fingerprint="ab" * 32)
    found = catalog.choose("extract-pairs", [], own_runs, print)
    assert [run.path for run in found.runs()] == [first, answers]
    done = call(own_runs, "extract-pairs", "--dry-run", "--from", "collect", "--from", "replay-teachers")
    assert done.returncode == 4 and f"not those of {newer}. Give both: --from " in done.stderr
    words = done.stderr.partition("Give both: ")[2].partition(". Or rerun")[0].split()
    assert len(words) == 4 and call(own_runs, "extract-pairs", "--dry-run", *words).returncode == 0


def test_optional_inputs_are_not_chosen_by_default(made: Path):
    assert catalog.choose("train", [], made, print) == {}
