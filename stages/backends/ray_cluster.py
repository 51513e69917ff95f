"""Workers on a Ray cluster, one a core: plain tasks, which Ray begins again where a node or a process dies.

Not Ray Data: its reader's actors are not begun again when their node dies (Ray 2.60, `read_parquet`).
"""

import logging
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from stages.backends.engine import TRIES, Done, Job
from stages.errors import InfrastructureError, UsageError

WAKE_S = 0.2


class RayCluster:
    """The cluster at an address; without one, that of RAY_ADDRESS, or one that is started on this machine."""

    def __init__(self, address: str | None = None) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        try:
            import ray
        except ImportError:
            raise UsageError(
                "Ray is not installed here. `pip install 'composer-post-training[ray]'`, or use --on processes:N."
            ) from None
        self._ray: Any = ray
        if not ray.is_initialized():
            try:
                ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
            except (ConnectionError, RuntimeError, ValueError) as error:
                where = address or os.environ.get("RAY_ADDRESS", "of this machine")
                raise InfrastructureError(
                    f"The Ray cluster {where} cannot be reached: {str(error).splitlines()[0]}"
                ) from None
        self.workers = max(1, int(ray.cluster_resources().get("CPU", 1)))

    def close(self) -> None:
        """Nothing: the cluster stays for whatever this process does next."""

    def map(self, function: Callable[[Job], Done], jobs: Iterable[Job]) -> Iterator[tuple[Job, Done]]:
        """As every engine does."""
        task = self._ray.remote(num_cpus=1, max_retries=TRIES - 1)(function)
        waiting, working = iter(jobs), dict[Any, Job]()
        try:
            while True:
                while len(working) < self.workers and (job := next(waiting, None)) is not None:
                    working[task.remote(job)] = job
                if not working:
                    return
                for ready in self._ray.wait(list(working), timeout=WAKE_S)[0]:
                    done = self._ray.get(ready)
                    yield working.pop(ready), done
        except self._ray.exceptions.RayError as error:
            raise InfrastructureError(
                f"The Ray cluster lost a job for good: {str(error).splitlines()[0]} "
                "What was finished is saved; go on with --resume."
            ) from error
        finally:
            for reference in working:
                self._ray.cancel(reference, force=True)
