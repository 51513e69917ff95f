"""Hugging Face Jobs, over their REST API through huggingface_hub. Artifacts are in a bucket that the job mounts.

HF_ENDPOINT names another server of the same API. The service restarts a failed or preempted job, up to `attempts`
launches in all; each continues where the one before stopped, since the chain runs with --resume.
"""

import base64
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from pydantic import Field
from tenacity import RetryCallState, Retrying, retry_if_exception, stop_after_attempt

from composer_cli.executors.base import RUNNING, JobSettings, JobState, SubmittedChain, key_values, script
from composer_stages.data_files import load_toml
from composer_stages.errors import InfrastructureError, UsageError
from composer_stages.redaction import keep_secret, redacted

MOUNTED = "/artifacts"
LABEL = "composer"
"""The label that finds a job after the answer to its creation was lost."""
UNPACK_AND_RUN = 'printf %s "$COMPOSER_SCRIPT" | base64 -d > /tmp/composer.sh && exec sh /tmp/composer.sh'
"""The script travels in a variable: commands of several lines were reported to arrive as one."""
TRIES = 6
LONGEST_PAUSE_S = 120.0
STATUSES: dict[str, str] = load_toml(__package__, "statuses.toml")["hf-jobs"]
Answer = TypeVar("Answer")


class HfJobsSettings(JobSettings):
    """A job of Hugging Face Jobs."""

    image: str = Field(min_length=1)
    """Docker image that holds Composer, or Python where `setup` installs Composer."""
    bucket: str = Field(pattern=r"^[\w.-]+/[\w.-]+$")
    """OWNER/NAME of the bucket in which artifacts are kept."""
    flavor: str = "cpu-basic"
    """The machine: a10g-small, a100-large, h200, ..."""
    timeout: str = Field(default="4h", pattern=r"^\d+(\.\d+)?[smhd]?$")
    """Longest time of one launch, in s, m, h or d."""
    attempts: int = Field(default=3, ge=1)
    """Launches in all, the first included."""
    namespace: str = ""
    """Whose job it is; empty for the owner of the token."""
    python: str = "python"
    """The interpreter in the image."""


class HfJobs:
    """Submits, queries and cancels jobs through huggingface_hub's client."""

    settings, shares_files = HfJobsSettings, False

    def spec(self, chain: SubmittedChain, where: HfJobsSettings) -> dict[str, Any]:
        """Return the arguments of `run_job`, without the values of keys."""
        return {
            "image": where.image,
            "command": ["sh", "-c", UNPACK_AND_RUN],
            "keys": list(chain.keys),
            "flavor": where.flavor,
            "timeout": where.timeout,
            "attempts": where.attempts,
            "name": chain.name,
            "labels": {LABEL: chain.name},
            "volumes": [{"type": "bucket", "source": where.bucket, "mountPath": MOUNTED}],
            "script": script(chain, where, python=where.python, artifacts=MOUNTED),
        }

    def submit(self, chain: SubmittedChain, where: HfJobsSettings) -> dict[str, Any]:
        """Create the job, but no second one after the answer to a request was lost: its label finds the first."""
        from huggingface_hub import Volume

        secrets, api = key_values(chain.keys), _api()
        # Kept with the job: the token that asks for its state later may be of another user.
        namespace = where.namespace or _request(lambda: api.whoami()["name"])
        spec = self.spec(chain, where)
        options = {name: value for name, value in spec.items() if name not in ("keys", "script", "volumes")}
        in_doubt: list[Exception] = []

        # A request that failed may have created the job: then its label finds it. 429 is refused before any work.
        def create() -> Any:
            if in_doubt and (created := next(iter(api.list_jobs(labels=spec["labels"], namespace=namespace)), None)):
                return created
            try:
                return api.run_job(
                    **options,
                    volumes=[Volume(**volume) for volume in spec["volumes"]],
                    env={"COMPOSER_SCRIPT": base64.b64encode(spec["script"].encode()).decode()},
                    secrets=secrets,
                    namespace=namespace,
                )
            except Exception as error:
                if _status(error) != 429:
                    in_doubt.append(error)
                raise

        job = _request(create)
        return {"id": job.id, "namespace": namespace, "url": job.url}

    def state(self, job: Mapping[str, Any]) -> JobState:
        """Return the state that the service reports."""
        reported = _request(lambda: _api().inspect_job(job_id=job["id"], namespace=job["namespace"]))
        return JobState(STATUSES.get(str(reported.status.stage), RUNNING), reported.status.message or "")

    def log(self, job: Mapping[str, Any], follow: bool) -> Iterator[str]:
        """Yield the lines of the service's log."""
        api, which = _api(), {"job_id": job["id"], "namespace": job["namespace"]}
        # A followed log is a stream, which a second request would begin anew; only whole answers are asked for again.
        if not follow:
            yield from _request(lambda: list(api.fetch_job_logs(**which)))
            return
        with _refusals_as_sentences():
            yield from api.fetch_job_logs(**which, follow=True)

    def cancel(self, job: Mapping[str, Any]) -> None:
        """Ask the service to stop the job's container."""
        _request(lambda: _api().cancel_job(job_id=job["id"], namespace=job["namespace"]))


def _api() -> Any:
    from huggingface_hub import HfApi, get_token

    token = get_token()
    if not token:
        raise UsageError("cli.no-hub-token")
    keep_secret(token)
    return HfApi(endpoint=_endpoint(), token=token, library_name="composer")


def _endpoint() -> str:
    from huggingface_hub import constants

    # The library reads the variable once, when it is imported.
    return os.environ.get("HF_ENDPOINT") or constants.ENDPOINT


def _request(call: Callable[[], Answer]) -> Answer:
    """Return the service's answer, after a few more requests when it is busy, fails or cannot be reached.

    Raises `UsageError` for what the service refuses, `InfrastructureError` where it does not answer.
    """
    from huggingface_hub.errors import HTTPError as Unreachable  # type: ignore[attr-defined]  # of its HTTP client

    # Busy (429), failing (5xx), or without an answer, which has no status.
    is_transient = retry_if_exception(
        lambda error: isinstance(error, Unreachable) and ((_status(error) or 500) >= 500 or _status(error) == 429)
    )
    again = Retrying(retry=is_transient, wait=_pause, stop=stop_after_attempt(TRIES), reraise=True)
    with _refusals_as_sentences():
        return again(call)


@contextmanager
def _refusals_as_sentences() -> Iterator[None]:
    """Turn the service's refusals and failures into `UsageError` and `InfrastructureError`."""
    from huggingface_hub.errors import HTTPError as Unreachable  # type: ignore[attr-defined]  # of its HTTP client

    try:
        yield
    except Unreachable as error:
        status = _status(error)
        reason = redacted(str(getattr(error, "server_message", None) or error).strip().split("\n")[0])
        if status in (401, 403):
            raise UsageError("cli.hub-refuses-token", endpoint=_endpoint(), reason=reason) from None
        if status is not None and status < 500 and status != 429:
            raise UsageError("cli.hub-refuses-job", endpoint=_endpoint(), status=status, reason=reason) from None
        raise InfrastructureError("cli.hub-failed", endpoint=_endpoint(), status=status, reason=reason) from None


def _status(error: BaseException) -> int | None:
    response = getattr(error, "response", None)
    return None if response is None else int(response.status_code)


def _pause(state: RetryCallState) -> float:
    """Return the seconds until the next request: what the service asks for, else 1, 2, 4, ..."""
    error = state.outcome.exception() if state.outcome else None
    retry_after = getattr(getattr(error, "response", None), "headers", {}).get("Retry-After", "")
    backoff_s = float(2 ** (state.attempt_number - 1))
    return min(float(retry_after) if retry_after.isdigit() else backoff_s, LONGEST_PAUSE_S)
