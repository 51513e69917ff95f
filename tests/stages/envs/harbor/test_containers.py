"""Harbor tasks in real containers: every kind, hostile verifiers and agents, images that cannot be had.

Podman runs them on a base image that is made of this machine's files, without a registry.
"""

import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
from support import container_image
from support.grades import play
from support.harbor import BASE, KINDS, python_task, separate_task

from composer_stages.envs.bash import fenced
from composer_stages.errors import BadInput, InfrastructureError
from tests.stages.envs.harbor.test_env import (  # noqa: F401 - they are played once more, with `runs_in` below
    test_a_verifier_that_hangs_ends_in_its_time_and_is_not_run_again,
    test_what_is_no_reward_is_null_with_the_reason,
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Podman with the base image, or a skip with the reason."""
    with container_image.podman_for_harbor(tmp_path_factory.mktemp("image")) as missing:
        if missing:
            pytest.skip(missing)
        yield


@pytest.fixture
def runs_in() -> str:
    """What the tasks run in."""
    return "podman"


@pytest.mark.parametrize("kind", KINDS)
def test_the_solution_passes_and_nothing_does_not(made: Any, kind: str) -> None:
    env, task = made(KINDS[kind]())
    env.reset(task)
    assert env.sandbox == "container"
    assert [env.step(action).stop for action in env.solution()][-1] == "submitted"
    grade = env.grade()
    assert (grade.reward, grade.hidden_pass, grade.hacked, grade.protocol_ok) == (1.0, True, False, True)
    assert grade.work.image and grade.work.image.startswith("localhost/composer-harbor:")
    nothing = play(env, task)
    assert (nothing.reward, nothing.hidden_pass, nothing.error) == (0.0, False, None)


def test_a_working_folder_that_the_image_lacks_is_made(made: Any) -> None:
    """Docker makes it; podman refuses `run --workdir` of such a folder."""
    files = {**python_task(), "environment/Dockerfile": f"FROM {BASE}\nCOPY sums.py /app/\n"}
    files["task.toml"] += 'workdir = "/new/folder"\n'
    env, task = made(files)
    env.reset(task)
    assert env.step(fenced("pwd")).content.startswith("/new/folder")


def test_no_container_is_left(made: Any) -> None:
    env, task = made(separate_task())
    play(env, task, "true")
    env.close()
    listed = subprocess.run(["podman", "ps", "--all", "--format", "{{.Names}}"], capture_output=True, text=True).stdout
    assert not [name for name in listed.split() if name.startswith("composer-")]


def test_a_reward_that_the_agent_wrote_is_deleted_before(made: Any) -> None:
    env, task = made(python_task())
    grade = play(env, task, "echo 1 > /logs/verifier/reward.json")
    assert (grade.reward, grade.hacked) == (0.0, True)


def test_only_declared_regular_files_reach_a_separate_verifier(made: Any) -> None:
    script = "#!/bin/bash\nfind /app /logs /tests ! -type d | sort; echo 1 > /logs/verifier/reward.txt\n"
    env, task = made({**separate_task(), "tests/test.sh": script})
    grade = play(
        env,
        task,
        "echo x > report.txt; echo x > other; mkdir -p /tests; echo x > /tests/mine",
        "mkdir /logs/artifacts/d; echo y > /logs/artifacts/d/f; ln -s /tests/test.sh /logs/artifacts/link",
    )
    found = (grade.work.test_log or "").split("[reward")[0].split()
    assert found == ["/app/report.txt", "/logs/artifacts/d/f", "/logs/artifacts/lines", "/tests/test.sh"]


def test_output_and_artifacts_are_bounded(made: Any) -> None:
    env, task = made(separate_task())
    env.reset(task)
    seen = env.step(fenced("yes | head -c 300000000"))
    assert seen.returncode == 0 and seen.raw_chars < 2 << 20
    env.step(fenced("truncate -s 300M report.txt"))
    grade = env.grade()
    assert grade.reward == 0.0 and "more than 256 MiB" in (grade.work.test_log or "")


def test_images_that_cannot_be_had_or_built_are_named(made: Any) -> None:
    files = python_task()
    with pytest.raises(BadInput, match="the image localhost:1/none:1 is not here and cannot be fetched: "):
        made({**files, "environment/Dockerfile": "FROM localhost:1/none:1\n"})
    env, task = made({**files, "environment/Dockerfile": f"FROM {BASE}\nRUN echo why; false\n"})
    with pytest.raises(InfrastructureError, match="could not be built"):
        env.reset(task)
