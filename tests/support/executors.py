"""An executor whose service is a folder: a job is queued until somebody writes how it ended."""

from pathlib import Path

from composer_cli.executors.base import CANCELLED, COMPLETE, QUEUED, JobSettings, JobState, script


class Desk(JobSettings):
    """Where jobs are put down."""

    folder: str
    """The folder of the service."""


class Paper:
    """A pile of paper on a desk."""

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
