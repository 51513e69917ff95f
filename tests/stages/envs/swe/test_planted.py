"""Django and Sphinx from their source distributions, with a bug of ours: built, run and graded as SWE-bench's rows are.

Beside each row lie its gold patch, hidden tests of ours in the files of their own tests, and what became of every test.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from composer_stages.envs.bash import fenced
from composer_stages.envs.repo import trees
from composer_stages.envs.swe import instances, mini
from composer_stages.envs.swe.env import SweEnv
from composer_stages.envs.swe.specs import DJANGO, spec_of
from composer_stages.errors import UsageError
from composer_stages.swebench.lists import LISTS

ROWS = {row["repo"]: row for row in instances.load(Path(__file__).with_name("planted.jsonl"))}
APPLY = "cat > /tmp/gold <<'END OF PATCH'\n{patch}END OF PATCH\ngit apply /tmp/gold"
OTHER_END = {
    "django/django": "sed -i 's/return x.capitalize()/return x/' django/utils/text.py",
    "sphinx-doc/sphinx": "sed -i \"s/res = res + '.'$/res = res + 'x'/\" sphinx/util/matching.py",
}
"""An attempt that is no fix: one of the tests that passed before may break by it."""


def test_their_runners_are_those_of_the_benchmark() -> None:
    commands = {repo: spec_of(row).test_command for repo, row in ROWS.items()}
    assert commands["django/django"] == DJANGO and "pytest" in commands["sphinx-doc/sphinx"]


@pytest.mark.slow
@pytest.mark.timeout(3000)  # two environments are built, and pip is slow on a busy machine
@pytest.mark.parametrize("repo", sorted(ROWS))
def test_a_source_distribution_is_built_run_and_graded(repo: str, tmp_path: Path) -> None:
    row = ROWS[repo]
    try:
        sdist = mini.fetch_sdist(row, tmp_path)
    except UsageError as error:
        pytest.skip(f"{repo} was NOT built, run or graded: {error}")
    mirror = tmp_path / "repos" / repo.replace("/", "__")
    mirror.mkdir(parents=True)
    mini.plant(row, sdist, mirror)
    assert trees.commit(mirror) == row["base_commit"]
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps(row))
    fail, keep = (json.loads(row[name]) for name in LISTS)
    env = SweEnv(path=str(rows), repos=str(tmp_path / "repos"), venvs=str(tmp_path / "venvs"))
    try:
        (task,) = env.tasks("eval", 1, seed=0)
        tried: list[Any] = []
        for command in ("git log --oneline", OTHER_END[repo], APPLY.format(patch=row["patch"])):
            env.reset(task)
            assert env.step(fenced(command)).returncode == 0
            grade = env.grade()
            tried.append((grade.hidden_pass, grade.visible_pass, grade.hacked, grade.work.f2p_passed))
            kept = grade.work.p2p_passed
        assert tried[0] == (False, False, False, 0) and tried[1][0] is False
        assert tried[2] == (True, True, False, len(fail)) and kept == len(keep)
        assert env.requirements("eval").ready, "what was built is found again"
    finally:
        env.close()
