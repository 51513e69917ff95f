"""A chain is submitted from Python as from the command line, and listed among the runs."""

from pathlib import Path

import pytest

import composer_post_training as composer
from composer_cli.executors.base import EXECUTORS

PRESET = """
[[stage]]
stage = "collect"
[stage.config]
policy = { model = "reference" }
"""


def test_a_submitted_chain_is_a_job_among_the_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(EXECUTORS, "paper", "support.executors:Paper")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.toml").write_text(PRESET)
    (tmp_path / "desk").mkdir()
    chosen = {
        "collect.tasks": 3,
        "collect.env": {"options": {}},
        "on.folder": str(tmp_path / "desk"),
        "on": {"env": {}},
    }
    job = composer.run("mine.toml", chosen, on="paper", max_cost=1)
    assert isinstance(job, composer.Job) and (job.on, job.status, job.log()) == (
        "paper",
        "queued",
        "first line\nsecond line\n",
    )
    script = (tmp_path / "desk" / job.name).read_text()
    assert "--set collect.tasks=3 --set 'collect.env={\"options\"={}}' --max-cost 1" in script and "on." not in script
    (row,) = composer.runs()
    assert (row["run"], row["stage"], row["status"], row["device"]) == (job.name, "run", "queued", "paper")
    with pytest.raises(composer.UsageError, match=rf"is queued as {job.name}\. `job\('{job.name}'\).cancel\(\)` stops"):
        composer.run("mine.toml", chosen, on="paper", max_cost=1)
    with pytest.raises(composer.BadInput, match=r"is a submitted job, not a run\. `job\("):
        composer.find(job.name)
    monkeypatch.chdir("/")
    again = composer.job(job.name[:-3], tmp_path / "artifacts")
    again.cancel()
    assert job.status == "cancelled" and "on the pile" in repr(job) and "<table>" in job._repr_html_()
    with pytest.raises(composer.UsageError, match="is over: cancelled"):
        again.cancel()
    with pytest.raises(composer.BadInput, match="No job 'other' was submitted"):
        composer.job("other", tmp_path / "artifacts")


@pytest.mark.parametrize(
    ("chosen", "words", "message"),
    [
        ({}, {"on": "slrum"}, r"^There is no executor 'slrum'\. Did you mean slurm\?"),
        ({}, {"on": "slurm", "clean": True}, "^clean=True would delete at every launch"),
        ({"on.partition": "gpu"}, {"on": "slurm"}, "no setting on.partition"),
        ({"evaluate.control": None}, {"on": "slurm"}, "^evaluate.control = None cannot be written as KEY=VALUE"),
        ("collect.tasks=3", {}, "^chosen = 'collect.tasks=3': it should be a dictionary"),
    ],
)
def test_what_cannot_be_submitted_is_refused(chosen: object, words: dict, message: str, tmp_path: Path) -> None:
    with pytest.raises(composer.UsageError, match=message):
        composer.run("demo", chosen, artifacts=tmp_path, **words)
    assert not list(tmp_path.iterdir())
