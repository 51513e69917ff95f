"""The runner on a real stage: up to date, refusals with their ways out, locks, damage, resume, interruption."""

import errno
import os
import shutil
import signal
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import duckdb
import pytest
import safetensors.torch
import torch
from filelock import FileLock
from huggingface_hub import constants
from support.limits import file_size_limit
from support.models import on_hub, save_tiny
from support.refusals import refused
from support.runs import written

from composer_stages import collect
from composer_stages.errors import BadInput, ComposerError, UsageError
from composer_stages.runs import runner, store
from composer_stages.runs.catalog import assign_inputs, check_inputs
from composer_stages.runs.run import Inputs, Manifest, Run, RunWriter, read_manifest, write_manifest
from composer_stages.runs.runner import Result
from composer_stages.runs.stage import load_stage
from composer_stages.stopping import Interrupted

ENV = "support.environments:GuessEnv"


def config(tiny: Path, **more: object) -> collect.Config:
    return collect.Config(env={"name": ENV}, policy={"model": str(tiny), "max_tokens": 40}, tasks=3, samples=2, **more)


def run(root: Path, tiny: Path, **options: object) -> Result:
    seed = options.pop("seed", 0)
    return runner.execute("collect", {}, config(tiny, seed=seed), root=root, **options)  # type: ignore[arg-type]


def test_the_same_work_is_done_once(tmp_path: Path, tiny: Path) -> None:
    first, second = run(tmp_path, tiny), run(tmp_path, tiny)
    assert first.fresh and not second.fresh
    assert first.path == second.path and second.reason == "up to date"
    assert (tmp_path / "collect" / "latest").resolve() == first.path.resolve()
    assert run(tmp_path, tiny, seed=1).path != first.path


def test_rerunning_a_deleted_run_gives_the_same_content(tmp_path: Path, tiny: Path) -> None:
    first = run(tmp_path / "a", tiny).path
    second = run(tmp_path / "b", tiny).path
    one, other = Run(first), Run(second)
    assert one.manifest.content == other.manifest.content
    assert (first / "tasks.parquet").read_bytes() == (second / "tasks.parquet").read_bytes()


def test_latest_is_mended_where_a_kill_left_it_on_the_older_run(tmp_path: Path, tiny: Path) -> None:
    """A process that was killed between the last manifest and `latest` never pointed to its run, nor did a rerun."""
    older, newer = run(tmp_path, tiny).path, run(tmp_path, tiny, seed=1).path
    latest = tmp_path / "collect" / "latest"
    latest.unlink()
    latest.symlink_to(older.name)
    assert not run(tmp_path, tiny, seed=1).fresh
    assert latest.resolve() == newer.resolve()
    assert not run(tmp_path, tiny).fresh
    assert latest.resolve() == newer.resolve(), "an older run that is up to date is not the latest"
    latest.unlink()
    assert not run(tmp_path, tiny).fresh
    assert latest.resolve() == older.resolve()


def test_runs_of_a_stage_that_end_at_once_do_not_meet(tmp_path: Path) -> None:
    """Entries of a chain in parallel made the link under one name, and one ended with `File exists`."""
    failed: list[BaseException] = []

    def point(name: str) -> None:
        (tmp_path / name).mkdir()
        try:
            for _ in range(300):
                runner._point_latest(tmp_path / name, tmp_path)
        except BaseException as error:
            failed.append(error)

    both = [threading.Thread(target=point, args=(name,)) for name in ("one", "other")]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join()
    assert not failed
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "one", "other"]


def test_a_latest_that_cannot_be_pointed_is_no_wrong_path(tmp_path: Path, tiny: Path) -> None:
    (tmp_path / "collect" / "latest" / "mine").mkdir(parents=True)
    with pytest.raises(ComposerError, match=r"is complete, but .*latest cannot be made a link to it \(") as raised:
        run(tmp_path, tiny)
    assert raised.value.exit_code == 5
    (tmp_path / "collect" / "latest" / "mine").rmdir()
    (tmp_path / "collect" / "latest").rmdir()
    done = run(tmp_path, tiny)
    assert not done.fresh and (tmp_path / "collect" / "latest").resolve() == done.path.resolve()


@pytest.mark.parametrize("step", ["_check_writable", "_begin", "_close", "_point_latest"])
def test_a_disk_that_fails_outside_the_stage_is_reported_as_one(
    step: str, tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Around the stage too: a read-only disk ended in `.reserve cannot be read or written. Check the path`, exit 2."""
    kept = getattr(runner, step)

    def failing(*given: object) -> None:
        if step == "_begin":
            kept(*given)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(tmp_path / ".reserve"))

    monkeypatch.setattr(runner, step, failing)
    with pytest.raises(ComposerError, match=r"The disk is full or cannot be written: .*--resume") as raised:
        run(tmp_path, tiny)
    assert raised.value.exit_code == 5
    monkeypatch.setattr(runner, step, kept)
    assert run(tmp_path, tiny, resume=True).status == "complete"


def test_a_changed_model_folder_is_another_run(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model", seed=0)
    first = run(tmp_path / "artifacts", folder).path
    save_tiny(folder, seed=1)
    assert run(tmp_path / "artifacts", folder).path != first


def test_a_hub_model_that_moved_on_does_not_finish_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = "a" * 40, "b" * 40
    point = on_hub(tmp_path / "hub", [first, second])
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)

    def press(what: str, done: int, total: int) -> None:
        if done == 1:
            os.kill(os.getpid(), signal.SIGINT)

    point(first)
    root, asked = tmp_path / "artifacts", config(Path("of/hub")).model_dump()
    asked["policy"]["lockstep"] = 1
    call = partial(runner.execute, "collect", {}, collect.Config(**asked), root=root)
    with pytest.raises(Interrupted):
        call(listener=press)
    point(second)
    refused(lambda: call(resume=True), BadInput, code="runs.model-changed", model="of/hub", changed=["revision"])
    point(first)
    assert Run(call(resume=True).path).manifest.models["policy"]["revision"] == first


def test_an_unfinished_run_names_the_ways_out(tmp_path: Path, tiny: Path) -> None:
    path = run(tmp_path, tiny).path
    unfinished = read_manifest(path)
    unfinished.status = "failed"
    write_manifest(path, unfinished)
    with pytest.raises(UsageError, match=r"--resume.*--clean.*--out"):
        run(tmp_path, tiny)
    assert run(tmp_path, tiny, resume=True).reason == "resumed"


def test_a_run_is_resumed_where_its_artifacts_were_moved(tmp_path: Path, tiny: Path) -> None:
    def curriculum(root: Path, **options: bool) -> Result:
        given = Run(run(root, tiny).path)
        chosen = load_stage("curriculum").config(min_rollouts=1)
        return runner.execute("curriculum", {"tasks": given, "rollouts": given}, chosen, root=root, **options)

    path = curriculum(tmp_path / "old").path
    unfinished = read_manifest(path)
    unfinished.status = "failed"
    write_manifest(path, unfinished)
    (tmp_path / "old").rename(tmp_path / "new")
    inputs = Run(curriculum(tmp_path / "new", resume=True).path).manifest.inputs
    assert {Path(ref.path).parents[1] for refs in inputs.values() for ref in refs} == {tmp_path / "new"}


def test_half_written_files_of_a_killed_attempt_are_swept_away(tmp_path: Path, tiny: Path) -> None:
    """They stayed in the folder for good, beside the whole ones."""
    path = run(tmp_path, tiny).path
    unfinished = read_manifest(path)
    unfinished.status = "running"
    write_manifest(path, unfinished)
    torn = [path / ".rollouts.parquet.4711.tmp", path / "steps" / ".000000.jsonl.gz.4711.tmp"]
    kept = [path / ".of.a.user.tmp", path / "notes.4711.tmp"]
    for file in (*torn, *kept):
        file.write_bytes(b"half")
    run(tmp_path, tiny, resume=True)
    assert not any(file.exists() for file in torn) and all(file.exists() for file in kept)


def test_half_written_files_of_a_killed_attempt_are_in_no_output(tmp_path: Path) -> None:
    """A store of gradients is linked from scratch: its digest was another one after a kill within its first file."""
    out = RunWriter(tmp_path, Manifest(composer="", stage="s", stage_version=1, fingerprint=""), cache=tmp_path)
    scratch = out.scratch("gradients")
    (scratch / "rows.bin").write_bytes(b"rows")
    out.checkpoint(lambda target: shutil.copytree(scratch, target, dirs_exist_ok=True), "whole")
    (scratch / ".index.json.4711.tmp").write_bytes(b"{ ")
    out.checkpoint(lambda target: shutil.copytree(scratch, target, dirs_exist_ok=True), "killed")
    assert out.manifest.outputs["killed"]["sha256"] == out.manifest.outputs["whole"]["sha256"]
    assert [path.name for path in (tmp_path / "killed").iterdir()] == ["rows.bin"]


def test_damage_is_seen_and_mended_from_the_steps(tmp_path: Path, tiny: Path) -> None:
    path = run(tmp_path, tiny).path
    whole = (path / "rollouts.parquet").read_bytes()
    (path / "rollouts.parquet").unlink()
    with pytest.raises(UsageError, match=r"rollouts\.parquet is missing"):
        run(tmp_path, tiny)
    assert run(tmp_path, tiny, resume=True).fresh
    assert (path / "rollouts.parquet").read_bytes() == whole


def test_a_foreign_folder_is_not_touched(tmp_path: Path, tiny: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("x")
    with pytest.raises(UsageError, match="not empty and is not a run folder"):
        run(tmp_path, tiny, out=tmp_path / "mine")
    assert (tmp_path / "mine" / "thesis.tex").read_text() == "x"


def test_a_folder_with_another_run_says_what_differs(tmp_path: Path, tiny: Path) -> None:
    run(tmp_path, tiny, out=tmp_path / "here")
    with pytest.raises(UsageError, match="seed: 0 there, 1 asked"):
        run(tmp_path, tiny, out=tmp_path / "here", seed=1)


def test_a_folder_in_use_is_refused(tmp_path: Path, tiny: Path) -> None:
    with FileLock(tmp_path / ".here.lock"), pytest.raises(UsageError, match="in use by another process"):
        run(tmp_path, tiny, out=tmp_path / "here")


def test_a_link_is_in_use_with_its_folder_and_the_folder_here_is_taken(
    tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "store" / "real").mkdir(parents=True)
    (tmp_path / "link").symlink_to("store/real")
    with runner.locked(tmp_path / "link"), pytest.raises(UsageError, match="in use by another process"):
        run(tmp_path, tiny, out=tmp_path / "store" / "real")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert run(tmp_path, tiny, out=Path()).fresh and not list(tmp_path.glob("here/.*lock"))


def test_the_same_work_is_in_use_whatever_time_is_in_its_folders_name(tmp_path: Path, tiny: Path) -> None:
    """Two processes that are started together name their folders a second apart."""
    folder = runner.resolve_run("collect", Inputs({}), config(tiny), root=tmp_path).folder
    earlier = folder.with_name(f"20200101T000000Z-{folder.name.partition('-')[2]}")
    with runner.locked(earlier), pytest.raises(UsageError, match="in use by another process"):
        run(tmp_path, tiny)
    assert not list(tmp_path.glob("collect/2*"))
    other = folder.with_name(f"{folder.name[:-6]}000000")
    with runner.locked(other):
        assert run(tmp_path, tiny).fresh


def test_ctrl_c_keeps_what_is_finished(tmp_path: Path, tiny: Path) -> None:
    def press(what: str, done: int, total: int) -> None:
        if total:  # once: a second Ctrl-C stops at once
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Interrupted) as stopped:
        run(tmp_path, tiny, listener=press)
    assert stopped.value.notice.startswith("Nothing was finished yet"), "the first batch was asked to stop"
    path = next((tmp_path / "collect").glob("2*"))
    assert read_manifest(path).status == "interrupted"
    assert run(tmp_path, tiny, resume=True).status == "complete"


def test_inputs_find_their_slots_and_misfits_are_named(tmp_path: Path, tiny: Path) -> None:
    collected = Run(run(tmp_path, tiny).path)
    stage = load_stage("replay-teachers")
    assert assign_inputs(stage, [collected]) == {"rollouts": [collected]}
    with pytest.raises(BadInput, match="needs a run that holds steps"):
        assign_inputs(stage, [])
    with pytest.raises(BadInput, match="but 2 were given"):
        assign_inputs(stage, [collected, collected])
    with pytest.raises(
        BadInput, match=r"no use for it\. It reads pairs \(made by `composer extract-pairs`\), directions"
    ):
        assign_inputs(load_stage("train"), [collected])
    with pytest.raises(BadInput, match=r"checkpoints \(made by `composer train`\)"):
        assign_inputs(load_stage("evaluate"), [collected])


def test_a_stopped_training_is_named_as_such_and_a_run_of_no_use_by_its_stage(tmp_path: Path) -> None:
    stopped = written(tmp_path, "train/20260102T030405Z-a", status="interrupted")
    (stopped / "metrics.jsonl").write_text("{}\n" * 9)
    failed = written(tmp_path, "collect/20260102T030405Z-a", status="failed", counts={"planned": 4})
    evaluate, pairs = load_stage("evaluate"), load_stage("extract-pairs")
    named = ("is interrupted, not complete: 9 of 20 steps done", "`composer train ...` with --resume")
    refused(lambda: assign_inputs(evaluate, [Run(stopped)]), BadInput, *named)
    refused(lambda: assign_inputs(evaluate, [Run(failed)]), BadInput, "a run of collect (tasks, rollouts, steps)")
    refused(lambda: assign_inputs(pairs, [Run(failed)]), BadInput, "failed, not complete: 0 of 4 rollouts", "--resume")


def test_unfinished_inputs_are_refused(tmp_path: Path, tiny: Path) -> None:
    collected = Run(run(tmp_path, tiny).path)
    collected.manifest.status = "interrupted"
    with pytest.raises(BadInput, match="is interrupted, not complete"):
        check_inputs(Inputs({"rollouts": collected}))


def test_unknown_stage_names_the_stages() -> None:
    with pytest.raises(UsageError, match="collect, replay-teachers"):
        load_stage("colect")


def test_a_missing_model_folder_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="There is no model folder"):
        run(tmp_path, Path("/nowhere/model"))


def test_after_an_attempt_that_finished_nothing_the_command_simply_runs(tmp_path: Path, tiny: Path) -> None:
    """A server that was not there, a full disk, a kill: the same command, or another one for the same --out, runs."""
    path = run(tmp_path / "a", tiny).path
    failed = read_manifest(path)
    failed.status, failed.outputs = "failed", {}
    for left in ("failed", "running"):
        out = tmp_path / left
        (out / "logs").mkdir(parents=True)
        (out / "steps").mkdir()
        (out / "steps" / "000000.jsonl.open").write_bytes(store.checked(b'{"failed":true,"unit":"kata-1"}') + b"\n")
        failed.status = left  # type: ignore[assignment]
        write_manifest(out, failed)
        checked = runner.preflight("collect", {}, config(tiny), root=tmp_path / "b", out=out)
        assert checked and "is complete" not in checked[0]
        assert run(tmp_path / "b", tiny, out=out).fresh
    out = tmp_path / "other"
    out.mkdir()
    write_manifest(out, failed)
    assert run(tmp_path / "b", tiny, out=out, seed=1).fresh
    assert read_manifest(out).attempts == 1


@pytest.mark.parametrize("left", ["steps/000000.jsonl.open", "ledger.jsonl", "scratch/trainer/weights", "mine.txt"])
def test_what_an_attempt_left_is_never_deleted_without_being_asked(left: str, tmp_path: Path, tiny: Path) -> None:
    failed = read_manifest(run(tmp_path / "a", tiny).path)
    failed.status, failed.outputs = "failed", {}
    out = tmp_path / "out"
    (out / left).parent.mkdir(parents=True)
    (out / left).write_text('{"unit": "kata-1", "call": 1}\n')
    write_manifest(out, failed)
    with pytest.raises(UsageError, match="holds a different run"):
        run(tmp_path / "b", tiny, out=out, seed=1)
    assert (out / left).exists()
    if left != "ledger.jsonl":  # money that was paid is no work of this folder: it stays in its ledger
        checked = runner.preflight("collect", {}, config(tiny), root=tmp_path / "b", out=out)
        assert checked[0].startswith(f"{out} holds this run (") and "--resume does" in checked[0]
        with pytest.raises(UsageError, match="already holds this run"):
            run(tmp_path / "b", tiny, out=out)


SAVES: dict[str, Callable[[Path], object]] = {
    "torch": lambda path: torch.save(torch.zeros(100_000), path),
    "safetensors": lambda path: safetensors.torch.save_file({"a": torch.zeros(100_000)}, path),
    "duckdb": lambda path: duckdb.sql(f"COPY (SELECT hash(range) FROM range(100000)) TO '{path}.parquet'"),
}


@pytest.mark.parametrize("save", SAVES.values(), ids=SAVES)
def test_libraries_whose_errors_have_no_errno_report_a_full_disk(
    save: Callable[[Path], object], tmp_path: Path
) -> None:
    with file_size_limit(50_000), pytest.raises((RuntimeError, safetensors.SafetensorError, duckdb.Error)) as raised:
        save(tmp_path / "file")
    assert not isinstance(raised.value, OSError)
    shown = runner._disk_full(raised.value, tmp_path)
    assert shown is not None and str(shown).startswith("The disk is full or cannot be written: ")
    assert len(str(shown).splitlines()) == 1 and shown.exit_code == 5
    assert runner._disk_full(ValueError("the file has 3 columns"), tmp_path) is None
