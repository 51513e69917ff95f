"""A chain that was submitted elsewhere (`composer.run(..., on="slurm")`) as a Python object: its state, log and end."""

from pathlib import Path

from composer_cli.executors import jobs
from composer_post_training.messages import errors_in_python, translate_message
from stages.runs.display import Table


class Job:
    """A submitted chain, as `run(..., on="slurm")` and `job` return it. It shows itself as a short table."""

    def __init__(self, record: jobs.SubmittedJob) -> None:
        self._record = record

    @property
    def name(self) -> str:
        """Return its name in `runs()`."""
        return self._record.name

    @property
    def on(self) -> str:
        """Return the service that it was submitted to, such as "slurm"."""
        return self._record.executor

    @property
    def status(self) -> str:
        """Return its state, as the service reports it now.

        One of "queued", "running", "complete", "failed", "interrupted", "cancelled" and "lost".
        Raises `InfrastructureError` where the service does not answer.
        """
        with errors_in_python():
            self._record = jobs.refreshed(self._record)
        return self._record.state.status

    def log(self) -> str:
        """Return what it has printed so far. Raises `InfrastructureError` where the service does not answer."""
        with errors_in_python():
            return "".join(f"{line}\n" for line in jobs.log(self._record, follow=False))

    def cancel(self) -> None:
        """Stop it; what it finished stays.

        Raises `UsageError` where it is over, `InfrastructureError` where the service does not answer.
        """
        with errors_in_python():
            self._record = jobs.cancel(Path(self._record.folder).parents[1], self.name)

    def _table(self) -> Table:
        status, record = self.status, self._record
        facts = {"on": self.on, "status": status, "reason": translate_message(record.state.detail)}
        facts |= {"submitted": record.submitted_at, "folder": record.folder}
        return Table(("job", self.name), [(label, value) for label, value in facts.items() if value])

    def __repr__(self) -> str:
        return repr(self._table())

    def _repr_html_(self) -> str:
        return self._table()._repr_html_()
