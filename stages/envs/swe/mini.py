"""The environment `swe-mini`: bugs of our own in small packages, in SWE-bench's shape, without engine, clones or keys.

Its rows lie beside this file: a bug that we planted in a released package, which the tests beside it do not notice,
and tests of ours that do. No code of the packages is among them but the context of the patches: the source
distributions are fetched once, by pip, and held against their SHA-256.
"""

from collections.abc import Sequence
from pathlib import Path

from stages.envs.base import Split, Task
from stages.envs.swe import instances, mini_sources
from stages.envs.swe.env import SweEnv
from stages.envs.swe.instance_runtime import InstanceRuntime
from stages.errors import BadInput
from stages.runs.records import Row

ROWS = Path(__file__).with_name("mini.jsonl")
CACHE = Path.home() / ".cache" / "composer" / "swe-mini"


class SweMiniEnv(SweEnv):
    """Implements Environment and ComparesOutcomes.

    `path`: a file of rows in the shape of `mini.jsonl`, which is the default; the column `split` says on which side of
    a split a row lies, and no package lies on both. `instances`: only these ids. `cache`: the folder for what is
    fetched and built once, ~/.cache/composer/swe-mini by default. `max_chars`: of a longer output the agent sees head
    and tail.
    """

    name = "swe-mini"

    def __init__(
        self,
        sandbox: str = "bubblewrap",
        path: str = "",
        instances: Sequence[str] = (),
        cache: str = "",
        max_chars: int = 10_000,
    ) -> None:
        self._cache = Path(cache).absolute() if cache else CACHE
        super().__init__(
            sandbox,
            path or str(ROWS),
            instances=instances,
            repos=str(self._cache / mini_sources.REPOS),
            venvs=str(self._cache / mini_sources.VENVS),
            runs_in="local",
            max_chars=max_chars,
        )

    def tasks(self, split: Split, count: int, seed: int) -> list[Task]:
        """The first `count` instances under a seed; what they need is fetched and built here, if it is not there."""
        found = super().tasks(split, count, seed)
        for task in found:
            mini_sources.prepare(task.data, self._cache)
        return found

    def _rows(self, split: Split) -> list[Row]:
        rows = instances.load(Path(self._path))
        for row in rows:
            if lacking := [name for name in mini_sources.COLUMNS if not row.get(name)]:
                raise BadInput(
                    f"{self._path}, row {row['instance_id']}, has no {', '.join(lacking)}. Rows of swe-mini name their "
                    "source distribution; for others use `--env swe-lite`."
                )
        return [row for row in rows if row["split"] == split]

    def _possible(self, rows: list[Row]) -> list[Row]:
        return rows

    def _opened(self, row: Row) -> InstanceRuntime:
        mini_sources.prepare(row, self._cache)
        return super()._opened(row)
