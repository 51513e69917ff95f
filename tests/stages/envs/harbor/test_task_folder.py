"""Task folders of Harbor: what is read, and the sentence with file, key and reason for each that is refused."""

import os
import re
import time
import tracemalloc
from pathlib import Path

import pytest
from support.harbor import KINDS, Files, python_task, separate_task, steps_task
from support.sample_package import write

from composer_stages.envs.harbor import task_folder
from composer_stages.envs.harbor.task_folder import HarborTask, load, remove_canary
from composer_stages.errors import BadInput


def one(root: Path, files: Files) -> HarborTask:
    """The only task below a folder."""
    (task,), problems = load(str(write(root / "task", files).parent))
    assert not problems
    return task


def problems(root: Path, files: Files) -> list[str]:
    """Why a task cannot be used."""
    tasks, found = load(str(write(root / "tasks" / "a", files).parent))
    assert not tasks
    return found


def test_steps_inherit_from_the_task_and_have_their_own(tmp_path: Path) -> None:
    files = steps_task()
    third_step = '\n[[steps]]\nname = "third"\n[steps.verifier]\ntimeout_sec = 5\nenvironment_mode = "separate"\n'
    files["task.toml"] += third_step
    files |= {"steps/third/instruction.md": "x", "tests/test.sh": "#!/bin/sh\n", "solution/solve.sh": "#!/bin/sh\n"}
    first, second, third = one(tmp_path, files).steps
    assert [first.name, second.name, third.name] == ["first", "second", "third"]
    assert (first.tests, third.tests) == (("tests", "steps/first/tests"), ("tests",))
    assert (first.solution, third.solution) == ("steps/first/solution", "solution")
    assert (second.workdir, first.workdir, first.min_reward) == ("steps/second/workdir", None, 1.0)
    assert [step.verifier_timeout_s for step in (first, second, third)] == [60, 60, 5]
    assert first.separate is None and third.separate is not None and third.separate.context == "environment"


def test_the_image_of_a_separate_verifier_is_its_own_that_of_the_tests_or_a_fresh_one(tmp_path: Path) -> None:
    files = separate_task()
    (fresh,) = one(tmp_path / "a", files).steps
    (beside,) = one(tmp_path / "b", {**files, "tests/Dockerfile": "FROM x"}).steps
    own = files["task.toml"] + '\n[verifier.environment]\ndocker_image = "x"\n'
    (named,) = one(tmp_path / "c", {**files, "task.toml": own}).steps
    found = [(one.separate.context, one.separate.own_tests) for one in (fresh, beside, named) if one.separate]
    assert found == [("environment", False), ("tests", True), ("tests", True)]
    assert named.separate and named.separate.settings.docker_image == "x"


def test_older_schemas_say_the_same_in_other_words(tmp_path: Path) -> None:
    older = (
        'version = "1.0"\n[environment]\nmemory = "2G"\nstorage = "512M"\nallow_internet = false\n'
        '[verifier.env]\nA = "${B:-c}"\n'
    )
    task = one(tmp_path, {**python_task(), "task.toml": older})
    settings = task.container.settings
    assert (task.name, settings.memory_mb, settings.storage_mb) == ("task", 2048, 512)
    assert settings.network_mode == "no-network"
    assert task.steps[0].verifier_env == {"A": "c"}, "no variable of this machine"


REFUSED = {
    "no valid TOML": ("[environment", "no valid TOML"),
    "a type": ('[environment]\ncpus = 1\nmemory_mb = "many"\n', "environment.memory_mb: "),
    "a negative time": ("[agent]\ntimeout_sec = -1\n", "agent.timeout_sec: "),
    "a version": ('schema_version = "2.0"\n', "schema_version is '2.0'; read are 1.0, 1.1"),
    "a variable of this machine": ('[environment.env]\nK = "${API_KEY}"\n', "environment.env: K is to have"),
    "GPUs": ("[environment]\ngpus = 2\n", "environment.gpus: it needs 2 GPUs"),
    "Windows": ('[environment]\nos = "Windows"\n', "environment.os: it needs windows"),
    "MCP": ('[environment]\n[[environment.mcp_servers]]\nname = "a"\n', "environment.mcp_servers: it needs MCP"),
    "some hosts": (
        '[environment]\nnetwork_mode = "allowlist"\nallowed_hosts = ["a.b"]\n',
        "environment.network_mode: it needs some hosts",
    ),
    "another phase": ('[agent]\nnetwork_mode = "no-network"\n', "agent.network_mode: it needs another network"),
    "a service": ('[[verifier.collect]]\ncommand = "x"\nservice = "db"\n', "verifier.collect.0.service: it needs"),
    "an artifact above": ('artifacts = ["/app/../etc"]\n', "artifacts.0.source: '/app/../etc' is not a path"),
    "a step above": ('[[steps]]\nname = "a"\n[[steps]]\nname = "../b"\n', "steps.1.name: '../b' is not a name"),
    "contradicting modes": (
        '[verifier]\nenvironment_mode = "shared"\n[verifier.environment]\ncpus = 1\n',
        "verifier: environment_mode",
    ),
    "a split": ('[metadata]\nsplit = "test"\n', "metadata.split: 'test' is no split"),
}


FILES = {
    "no instruction": ({"instruction.md": None}, "a/instruction.md: there is no such file"),
    "an empty one": ({"instruction.md": "<!-- canary x -->\n\n"}, "a/instruction.md: it is empty"),
    "no configuration": ({"task.toml": None}, "a/task.toml: there is no such file"),
    "no tests": ({"tests/test.sh": None}, "a/tests: there is no test.sh"),
    "no environment": ({"environment/Dockerfile": None}, "neither environment/Dockerfile nor"),
    "a conversation": ({"trajectory.json": "{}"}, "trajectory.json is a conversation before the instruction"),
    "two services": (
        {"environment/docker-compose.yaml": "services: {main: {build: .}, db: {image: x}}"},
        "a/environment/docker-compose.yaml: it needs the services db",
    ),
    "settings of a service": (
        {"environment/docker-compose.yaml": "services: {main: {build: ., privileged: true}}"},
        "it sets 'privileged' of main",
    ),
    "no compose file": ({"environment/docker-compose.yaml": "services: [a\n"}, "no valid compose file"),
}


@pytest.mark.parametrize("case", [*REFUSED, *FILES])
def test_a_folder_that_cannot_be_used_is_refused_with_the_file_and_the_reason(tmp_path: Path, case: str) -> None:
    text, reason = REFUSED.get(case, (None, ""))
    changed, reason = ({"task.toml": text}, reason) if text else FILES[case]
    files = {path: text for path, text in {**python_task(), **changed}.items() if text is not None}
    (problem,) = problems(tmp_path, files)
    assert problem.startswith("tasks/a/task.toml" if text else "tasks/a") and reason in problem


def test_compose_files_that_are_data_of_a_task_are_no_settings(tmp_path: Path) -> None:
    db = "services: {db: {image: x}}"
    places = ("environment/app/docker-compose.yaml", "environment/docker-compose.yml", "solution/docker-compose.yaml")
    write(tmp_path / "task", {**python_task(), **dict.fromkeys(places, db)})
    assert [len(found) for found in load(str(tmp_path))] == [1, 0]


def test_all_bad_tasks_are_named_and_no_good_one_is_lost(tmp_path: Path) -> None:
    for number in range(60):
        files = python_task(f"sums-{number}")
        if number % 10 == 0:
            files["task.toml"] = "[environment]\ngpus = 1\n"
        write(tmp_path / f"set{number % 3}" / f"v{number}", files)
    write(tmp_path / "again", python_task("sums-1"))
    (tmp_path / "set0" / "notes").mkdir()
    tasks, found = load(str(tmp_path))
    assert len(tasks) == 54 and len(found) == 7
    assert sum("GPUs" in one for one in found) == 6
    assert any("the task has the name 'own/sums-1' of" in one for one in found)


def test_a_path_that_is_none_is_refused_and_an_instruction_is_told_without_its_canary(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="there is no such folder"):
        load(str(tmp_path / "none"))
    assert remove_canary("<!-- a canary -->\n# CANARY GUID\n\n# Title\nx") == "# Title\nx"
    assert remove_canary("# Title\n# canary\n") == "# Title\n# canary\n"


def test_nothing_is_read_through_links_or_pipes(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("key")
    task = write(tmp_path / "tasks" / "a", python_task())
    (task / "tests" / "inner.py").symlink_to("test_sums.py")
    assert len(load(str(tmp_path / "tasks"))[0]) == 1, "a link within the folder is one of its files"
    (task / "tests" / "key").symlink_to(secret)
    (task / "environment" / "above").symlink_to("../../..")
    (task / "tests" / "inner").symlink_to("../environment")
    (task / "tests" / "through").symlink_to("inner/above")
    os.mkfifo(task / "pipe")
    (task / "instruction.md").unlink()
    (task / "instruction.md").symlink_to(secret)
    tasks, found = load(str(tmp_path / "tasks"))
    assert not tasks
    assert sum("out of the task's folder" in one for one in found) == 4
    assert any("a/pipe: it is neither a file nor a folder" in one for one in found)
    assert not any("secret" in one and "link" not in one for one in found)


def test_trees_that_are_too_deep_or_too_large_end_soon(tmp_path: Path) -> None:
    task = write(tmp_path / "tasks" / "large", python_task())
    with (task / "environment" / "hole").open("wb") as file:
        file.truncate(3 << 40)
    deep = write(tmp_path / "tasks" / "deep", python_task()) / "tests"
    for _ in range(150):
        deep /= "d"
    deep.mkdir(parents=True)
    loop = write(tmp_path / "tasks" / "loop", python_task())
    (loop / "tests" / "again").symlink_to(".")
    started = time.monotonic()
    tasks, found = load(str(tmp_path / "tasks"))
    assert time.monotonic() - started < 5
    assert [task.folder.name for task in tasks] == ["loop"], "a link to its own folder is followed by nobody"
    assert len(found) == 2 and "Folders lie more than 100 deep" in found[0] and "2048 MiB" in found[1]


def test_compose_files_that_grow_when_read_do_no_harm(tmp_path: Path) -> None:
    lines = ["a: &a [x, x, x, x, x, x, x, x, x]"]
    lines += [
        f"{name}: &{name} [{', '.join([f'*{above}'] * 9)}]" for above, name in zip("abcdefgh", "bcdefghi", strict=True)
    ]
    files = {**python_task(), "environment/docker-compose.yaml": "\n".join([*lines, "services: {main: {build: .}}"])}
    started = time.monotonic()
    assert one(tmp_path, files).name == "own/sums-1"
    assert time.monotonic() - started < 5


def test_a_digest_changes_with_any_file(tmp_path: Path) -> None:
    task = one(tmp_path, python_task())
    for mode, equal in ((0o755, False), (0o644, True)):
        (task.folder / "tests" / "test_sums.py").chmod(mode)
        assert (task_folder.read(task.folder).digest == task.digest) is equal


def test_many_folders_are_read_within_bounds(tmp_path: Path) -> None:
    for number in range(140):
        files = KINDS[list(KINDS)[number % len(KINDS)]](f"task-{number}", f"family-{number % 30}")
        if number % 10 == 0:
            files["task.toml"] = '[environment]\ngpus = "many"\n' if number % 20 else "[environment\n"
        write(tmp_path / f"set{number % 7}" / f"t{number}", files)
    tracemalloc.start()
    started = time.process_time()
    tasks, found = load(str(tmp_path))
    seconds, (_, most) = time.process_time() - started, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (len(tasks), len(found)) == (126, 14) and len({task.name for task in tasks}) == 126
    assert all(re.match(r"[^:]+/t\d*0/task\.toml: ", one) for one in found)
    assert sum("no valid TOML" in one for one in found) == sum("environment.gpus" in one for one in found) == 7
    assert seconds < 12 and most < 20e6
