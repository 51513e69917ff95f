"""Features of a package as Harbor folders."""

from pathlib import Path

import pytest
from support.sample_package import SHELF, write

from composer_stages import export, make_tasks
from composer_stages.envs import load, task_table
from composer_stages.errors import UsageError
from composer_stages.runs import runner
from composer_stages.runs.kinds import TASK
from composer_stages.runs.run import Run
from tests.stages.envs.harbor.test_write import assert_equal_again, assert_verifiers_agree


def exported(package: Path, root: Path, **options: object) -> tuple[Run, Path]:
    """The tasks of a package, and the folder of those that were exported."""
    run = Run(runner.execute("tasks", {}, make_tasks.Config(package=str(package), **options), root=root).path)
    path = runner.execute("export", {"tasks": run}, export.Config(format="harbor"), root=root).path
    return run, path / "harbor"


@pytest.mark.slow
def test_features_are_read_again_as_they_were(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    try:
        load("swe-mini", {"cache": str(cache)}).tasks("eval", 6, 0)
        package = next((cache / "sdists").glob("toolz-*.tar.gz"))
    except UsageError as error:
        pytest.skip(f"nothing can be fetched on this machine: {error}")
    run, folder = exported(package, tmp_path / "runs", tasks=4, scope="covering")
    features = [task_table.read_task(row) for row in run.rows(TASK)]
    assert len(features) == 4
    assert_equal_again("feature-deletion", {"tasks": str(run.path)}, features, folder)


@pytest.mark.slow
def test_features_leave_with_solution_and_verifier(tmp_path: Path) -> None:
    assert_verifiers_agree(exported(write(tmp_path / "shelf-1.5", SHELF), tmp_path / "runs", tasks=3)[1], 3)
