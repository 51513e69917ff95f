"""A checkout on Python's path: the folder's name and the package's are one set of modules."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROGRAM = """
from stages.envs.base import Task
import stages.envs.base, composer_stages.envs.base, sys
from stages import collect, errors
import composer_stages
assert Task is composer_stages.envs.base.Task and stages is composer_stages
assert stages.envs.base is composer_stages.envs.base and errors is composer_stages.errors
assert composer_stages.envs.base.__spec__.name == "composer_stages.envs.base" == stages.envs.base.__name__
try:
    import stages.no_such_module
except ModuleNotFoundError as error:
    print(error)
"""


def test_the_folder_by_its_own_name_is_the_package() -> None:
    """Else an environment that imports `stages.envs.base` would return tasks of a class that nothing here knows."""
    ended = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (0, "No module named 'composer_stages.no_such_module'\n"), ended.stderr
