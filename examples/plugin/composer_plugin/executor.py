"""paper: a notebook on the desk, from which somebody will run the chain by hand."""

from collections.abc import Iterator, Mapping
from typing import Any

from composer_post_training.executors import QUEUED, JobSettings, JobState, SubmittedChain, script


class Page(JobSettings):
    """A page of the notebook."""

    number: int = 1


class Paper:
    """Writes a chain on a page: `--on paper --set on.number=7`."""

    settings, shares_files = Page, True

    def spec(self, chain: SubmittedChain, where: Page) -> dict[str, Any]:
        """Return what would be written."""
        return {"page": where.number, "script": script(chain, where, python="python", artifacts="artifacts")}

    def submit(self, chain: SubmittedChain, where: Page) -> dict[str, Any]:
        """Return the handle of the job: the page."""
        return {"page": where.number}

    def state(self, job: Mapping[str, Any]) -> JobState:
        """Return that the chain waits for somebody."""
        return JobState(QUEUED, f"on page {job['page']}")

    def log(self, job: Mapping[str, Any], follow: bool) -> Iterator[str]:
        """Yield what was printed so far."""
        yield "Nobody has run it yet."

    def cancel(self, job: Mapping[str, Any]) -> None:
        """Do nothing: the page stays."""
