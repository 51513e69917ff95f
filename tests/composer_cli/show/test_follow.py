"""`composer show RUN --follow`: what rollouts do while they are played, and an end when the run ends."""

import json
import threading
import time
from pathlib import Path

from support.models import save_tiny
from support.runs import written
from support.server import Reply, answer, serving

from composer_cli.console import Views
from composer_cli.show.follow import follow, view
from composer_stages import collect, train
from composer_stages.runs import runner
from composer_stages.runs.activity import repeating
from composer_stages.runs.run import Run


def test_live_rollouts_are_seen_until_the_run_ends(tmp_path: Path) -> None:
    config = {"env": {"name": "support.environments:GuessEnv"}, "tasks": 3, "samples": 1}
    seen: list[str] = []
    folders: list[Path] = []

    def watch() -> None:
        ends = time.monotonic() + 60
        while not folders and time.monotonic() < ends:
            folders.extend(path.parents[2] for path in tmp_path.glob("collect/2*/scratch/live/units.json"))
            time.sleep(0.05)
        follow(folders[0], seen.append, every_s=0.2)

    with serving(lambda body, n: Reply(body=answer("a"), delay_s=0.8)) as server:
        wanted = collect.Config(**config, policy={"model": "m", "base_url": server.url})
        watcher = threading.Thread(target=watch)
        watcher.start()
        runner.execute("collect", {}, wanted, root=tmp_path)
        watcher.join(60)
    assert any("0 of 3 finished, 3 live" in text and "guess-0#0@0" in text and "asking" in text for text in seen)
    assert "complete" in seen[-1] and "no live rollouts" in seen[-1]
    assert Run(folders[0]).live() is None


def test_a_run_that_went_silent_says_since_when(tmp_path: Path) -> None:
    for status in ("running", "complete"):
        run = Run(written(tmp_path, f"train/20260102T030405Z-{status}", status=status))
        told = run.path / "scratch" / "live" / "units.json"
        told.parent.mkdir(parents=True)
        one = {"rollout_id": "t-1#0@598214116530573433", "steps": 1, "doing": "asking", "doing_s": 1.0, "wall_s": 2.0}
        told.write_text(json.dumps({"at": 1, "done": 1, "total": 4, "units": [one]}))
        shown = view(run)
        assert ("1 of 4 finished, 1 live, last heard of" in shown) == ("t-1#0@5982 " in shown) == (status == "running")


def test_a_training_is_seen_step_by_step(tmp_path: Path) -> None:
    tiny = save_tiny(tmp_path / "tiny")
    config = train.Config(
        env={"name": "support.environments:GuessEnv"},
        policy={"model": str(tiny), "max_tokens": 20},
        tasks=2,
        optimisation={"steps": 3, "prompts_per_step": 2, "generations": 2},
    )
    seen: list[str] = []

    def listener(what: str, done: int, total: int) -> None:
        seen.extend(view(Run(path.parent)) for path in tmp_path.glob("train/2*/manifest.json"))

    run = Run(runner.execute("train", {}, config, root=tmp_path, listener=listener).path)
    assert "No training step is finished yet." in seen[0]
    title, header, *rows = view(run).splitlines()
    assert title.endswith("complete") and header.split()[:5] == ["step", "reward", "tokens_per_s", "memory_gib", "loss"]
    assert [row.split()[0] for row in rows] == ["1", "2", "3"]


def test_views_of_runs_that_begin_and_end(made: Path, tmp_path: Path) -> None:
    path = (made / "collect" / "latest").resolve()
    places: list[Path | None] = [None, tmp_path / "missing", path]
    views = Views()
    with repeating(views.refresh, every_s=0.01):
        views.folders["collect"] = lambda: places.pop(0) if len(places) > 1 else places[0]
        ends = time.monotonic() + 10
        while not views.texts and time.monotonic() < ends:
            time.sleep(0.01)
        (text,) = views.texts.values()
        assert text.startswith(f"{path.name}: complete")
        views.remove("collect")
        assert views.texts == {}
