"""A chain is submitted from Python as from the command line, and listed among the runs."""

from pathlib import Path

import pytest
from support.refusals import refused

import composer_post_training as composer
from composer_cli.executors.base import CANCELLED, COMPLETE, EXECUTORS, QUEUED, JobSettings, JobState, script

PRESET = """
[[stage]]
stage = "collect"
[stage.config]
policy = { model = "reference" }
"""


class Desk(JobSettings):
    """The settings of `Paper`."""

    folder: str
    """The folder of the service."""


class Paper:
    """An executor whose service is a folder: a job is queued until somebody writes how it ended."""

    settings, shares_files = Desk, True

    def spec(self, chain, where):
        return {"script": script(chain, where, python="python", artifacts="artifacts")}

    def submit(self, chain, where):
        page = Path(where.folder) / chain.name
        page.write_text(self.spec(chain, where)["script"])
        return {"page": str(page)}

    def state(self, job):
        ended = {"": QUEUED, "done": COMPLETE, "stopped": CANCELLED}
        stamp = Path(f"{job['page']}.stamp")
        return JobState(ended[stamp.read_text() if stamp.exists() else ""], "on the pile")

    def log(self, job, follow):
        yield from ("first line", "second line")

    def cancel(self, job):
        Path(f"{job['page']}.stamp").write_text("stopped")


def test_a_submitted_chain_is_a_job_among_the_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(EXECUTORS, "paper", f"{__name__}:Paper")
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
    submit_again = lambda: composer.run("mine.toml", chosen, on="paper", max_cost=1)  # noqa: E731
    refused(submit_again, composer.UsageError, f"`job('{job.name}').cancel()` stops")
    refused(lambda: composer.find(job.name), composer.BadInput, f"`job('{job.name}')")
    monkeypatch.chdir("/")
    again = composer.job(job.name[:-3], tmp_path / "artifacts")
    again.cancel()
    assert job.status == "cancelled" and "on the pile" in repr(job) and "<table>" in job._repr_html_()
    refused(again.cancel, composer.UsageError, "is over: cancelled")
    refused(lambda: composer.job("other", tmp_path / "artifacts"), composer.BadInput, "'other'")


@pytest.mark.parametrize(
    ("chosen", "words", "message"),
    [
        ({}, {"on": "slrum"}, "Did you mean 'slurm'?"),
        ({}, {"on": "slurm", "clean": True}, "clean=True would delete"),
        ({"on.partition": "gpu"}, {"on": "slurm"}, "no setting on.partition"),
        ({"evaluate.control": None}, {"on": "slurm"}, "evaluate.control = None"),
        ("collect.tasks=3", {}, "chosen = 'collect.tasks=3': it should be a dictionary"),
    ],
)
def test_chains_that_cannot_be_submitted_are_refused(chosen: object, words: dict, message: str, tmp_path: Path) -> None:
    refused(lambda: composer.run("demo", chosen, artifacts=tmp_path, **words), composer.UsageError, message)
    assert not list(tmp_path.iterdir())
