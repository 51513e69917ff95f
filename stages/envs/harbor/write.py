"""Tasks of other environments written as folders in Harbor's format (schema 1.4); task_folder.py reads them.

    task.toml            limits, and under [metadata] family, split and where the task is from
    instruction.md       the prompt
    environment/         a Dockerfile and testbed/, the files to start from
    tests/               test.sh, the verifier, and what an agent must not see: hidden files, originals, test names
    solution/            solve.sh, which writes the files of the task's own solution

The verifier (stages/envs/repo/guest/composer_verify.py) restores tests and test configuration, runs the tests as
another user, and takes outcomes from the plugin that Composer itself uses. What it does not do: run a pass once more
with rewritten tests, since expected values would have to be in the container.
"""

import json
import re
import shlex
import stat
from collections.abc import Callable, Iterable
from contextlib import closing
from pathlib import Path
from typing import Any, cast

from composer_stages import envs
from composer_stages.envs.base import Task
from composer_stages.envs.repo import trees
from composer_stages.envs.repo.grading import GUEST
from composer_stages.envs.repo.guest.composer_rules import LIBRARY, is_protected
from composer_stages.envs.repo.session import write_script
from composer_stages.envs.repo.task import Export, Packs, RepoTask
from composer_stages.errors import BadInput, InfrastructureError, UsageError
from composer_stages.runs import store
from composer_stages.terms import TWIN

FORMAT = "harbor"
ORGANISATION = "composer"
WORKDIR = "/testbed"
BASE_IMAGE = "python:3.11-slim"
RUNNER = "pytest==8.4.2"
LONGEST_NAME = 100
AGENT_S = 1800.0
VERIFIER_SLACK_S = 60.0
TEST_SCRIPT = '#!/bin/bash\nexec python3 -I -S "$(dirname "$0")/composer_verify.py"\n'


def write_tasks(
    env: str, options: dict[str, Any], tasks: Iterable[Task], folder: Path, base_image: str, tell: Callable[[str], None]
) -> None:
    """Write one folder a task below `folder`; `tell` is called with the name of each.

    UsageError for an environment whose tasks cannot leave, or where the folder holds something.
    """
    environment = envs.load(env, options)
    if not isinstance(environment, Packs):
        raise UsageError("envs.harbor.env-cannot-export", env=env)
    if folder.exists() and any(folder.iterdir()):
        raise UsageError("envs.harbor.folder-not-empty", folder=folder)
    names: set[str] = set()
    with closing(environment):
        for task in tasks:
            name = folder_name(task.task_id, names)
            environment.reset(task)
            try:
                packed = cast(Packs, environment).packed()
            except InfrastructureError as error:
                raise BadInput("envs.harbor.task-cannot-be-exported", task_id=task.task_id, error=error) from None
            write_task(task, packed, folder / name, base_image)
            tell(name)


def folder_name(task_id: str, names: set[str]) -> str:
    """Return a folder name that Harbor accepts and that differs from all `names`, ignoring case; add it to them."""
    name = re.sub(r"\.{2,}", ".", re.sub(r"[^A-Za-z0-9._-]+", "-", task_id)).strip("._-")
    if not name or len(name) > LONGEST_NAME or name.casefold() in names:
        name = f"{name[:LONGEST_NAME]}-{store.digest(task_id)[:8]}".lstrip("-")
    names.add(name.casefold())
    return name


def write_task(task: Task, packed: RepoTask, folder: Path, base_image: str) -> None:
    """Write the folder of one task."""
    if task.task_id.endswith(TWIN):
        raise BadInput("envs.harbor.impossible-variant", task_id=task.task_id)
    export = packed.export or Export()
    with trees.scratch() as empty:
        files = trees.changes(empty, packed.delivered)
    existing = {path for path, file in files.items() if file and not stat.S_ISDIR(file.mode)}
    modules = {*packed.modules, *LIBRARY.findall(f"{task.prompt} {packed.commands}")}
    originals = {
        path: files[path] for path in existing - {*packed.source} if is_protected(path, existing, packed.tests, modules)
    }
    grading = {
        "workdir": WORKDIR,
        "command": export.command,
        "arguments": export.arguments,
        "fail_to_pass": packed.lists.fail_to_pass,
        "pass_to_pass": packed.lists.pass_to_pass,
        "skips_fail": packed.lists.skip_fails,
        "timeout_s": export.timeout_s,
        "existing": sorted(existing),
        "source": sorted(packed.source),
        "modules": sorted(modules),
        "tests": sorted(packed.tests),
        "removed": sorted(path for path, file in packed.hidden.items() if file is None),
    }
    guests = {path.name: _text(path.read_text()) for path in sorted(GUEST.glob("*.py"))}
    written: trees.Changes = {
        "task.toml": _text(_task_toml(task, export, folder.name)),
        "instruction.md": _text(task.prompt),
        "environment/Dockerfile": _text(_dockerfile(export, bool(files), base_image)),
        **{f"environment/testbed/{path}": file for path, file in files.items()},
        "tests/test.sh": _text(TEST_SCRIPT, executable=True),
        "tests/task.json": _text(json.dumps(grading, indent=1) + "\n"),
        **{f"tests/{name}": file for name, file in guests.items()},
        **{f"tests/originals/{path}": file for path, file in originals.items()},
        **{f"tests/hidden/{path}": file for path, file in packed.hidden.items()},
    }
    if packed.solution is not None:
        script = f"#!/bin/bash\nset -e\ncd {WORKDIR}\n{write_script(packed.solution())}\n"
        written["solution/solve.sh"] = _text(script, executable=True)
    folder.mkdir(parents=True)
    trees.apply({path: file for path, file in written.items() if file is not None}, folder)


def _text(text: str, *, executable: bool = False) -> trees.TreeFile:
    return trees.TreeFile(text.encode(), trees.EXECUTABLE if executable else trees.REGULAR)


def _dockerfile(export: Export, has_files: bool, base_image: str) -> str:
    """Return a Dockerfile; an image that has pytest already is not changed, so that it needs no network."""
    lines = [f"FROM {base_image}"]
    if not export.command:
        lines.append(f'RUN python3 -c "import pytest" 2>/dev/null || pip install --no-cache-dir {RUNNER}')
    if export.requirements:
        lines.append(f"RUN pip install --no-cache-dir {shlex.join(export.requirements)}")
    lines += [f"ENV PYTHONPATH={WORKDIR}:{WORKDIR}/src PYTHONDONTWRITEBYTECODE=1", f"WORKDIR {WORKDIR}"]
    if has_files:
        lines.append(f"COPY testbed/ {WORKDIR}/")
    return "\n".join(lines) + "\n"


def _task_toml(task: Task, export: Export, name: str) -> str:
    """Return the configuration. Harbor's readers ignore what is under [metadata]."""
    sections: dict[str, dict[str, Any]] = {
        "task": {
            "name": f"{ORGANISATION}/{name}",
            "description": next((line for line in task.prompt.splitlines() if line.strip()), "")[:200],
            "keywords": [task.env],
        },
        "metadata": {"task_id": task.task_id, "family": task.family, "split": task.split, "environment": task.env},
        "metadata.provenance": {key: value for key, value in export.provenance.items() if value not in ("", None)},
        "agent": {"timeout_sec": AGENT_S},
        # Without a network, as these tasks are played by Composer: a solution may be on a package index.
        "environment": {"network_mode": "no-network", "workdir": WORKDIR},
        "verifier": {"timeout_sec": export.timeout_s + VERIFIER_SLACK_S},
    }
    lines = ['schema_version = "1.4"']
    for title, values in sections.items():
        if values:
            lines += ["", f"[{title}]", *(f"{key} = {_toml(value)}" for key, value in values.items())]
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    """Format a text, number, truth value or list as TOML: JSON with the characters escaped that TOML forbids."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
