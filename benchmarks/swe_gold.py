"""Are instances of SWE-bench resolved with the gold patch and unresolved without it, on local checkouts?

    python benchmarks/swe_gold.py FILE REPOS INSTANCE... [--venvs DIR]

Every instance is played twice through the environment `swe-lite`: once nothing is changed, once the agent's only action
applies the gold patch. Both go through the very grading that a rollout gets. One line an instance: whether the
hidden and the visible tests pass in both, whether a pass was called a hack, and seconds, the first of which include
building the environment.
"""

import sys
import time
from collections.abc import Iterator

import cases
from records import Claim, measured

from stages.envs.base import Grade, Task
from stages.envs.bash import fenced
from stages.envs.repo.guest.composer_rules import PASSING
from stages.envs.swe.env import SweEnv
from stages.errors import InfrastructureError

HEAD = """\
| instance | patch | hidden | visible | FAIL_TO_PASS passed | PASS_TO_PASS passed | seconds |
| --- | --- | --- | --- | --- | --- | --- |"""
APPLY = "cat > /tmp/patch <<'END-OF-PATCH'\n{patch}END-OF-PATCH\ngit apply --whitespace=nowarn /tmp/patch"


def gold(rows: str, repos: str, instances: tuple[str, ...], venvs: str = "") -> Iterator[Claim]:
    """Whether each instance is unresolved without its gold patch and resolved with it.

    rows: a file of instances. repos: a folder with a git mirror of each repository. venvs: of virtual environments.
    """
    env = SweEnv(path=rows, repos=repos, venvs=venvs, instances=instances)
    print(HEAD)
    for task in sorted(env.tasks("eval", len(instances), seed=0), key=lambda task: instances.index(task.task_id)):
        claim = f"{task.task_id}: unresolved without the gold patch, resolved with it"
        yield measured(claim, int(_shown(env, task)), n=2, goal="= 1")


def _shown(env: SweEnv, task: Task) -> bool:
    played = []
    for patch in ("", task.data["patch"]):
        started = time.monotonic()
        grade = _graded(env, task, patch)
        played.append((grade.hidden_pass, grade.visible_pass, grade.hacked))
        seconds = time.monotonic() - started
        print(
            f"| {task.task_id} | {'gold' if patch else 'empty'} | {_words(grade)} | {_tests(env)} | {seconds:.0f} |",
            flush=True,
        )
    return played == [(False, False, False), (True, True, False)]


def _graded(env: SweEnv, task: Task, patch: str) -> Grade:
    try:
        env.reset(task)
        if patch:
            observation = env.step(fenced(APPLY.format(patch=patch)))
            assert observation.returncode == 0, observation.content
        return env.grade()
    except InfrastructureError as error:
        print(f"{task.task_id}: {error}", file=sys.stderr)
        return Grade(None, error_type="no environment")
    finally:
        env.close()


def _words(grade: Grade) -> str:
    """Both verdicts, or why there are none."""
    words = {True: "resolved", False: "unresolved", None: grade.error_type}
    return f"{words[grade.hidden_pass]} | {words[grade.visible_pass]}"


def _tests(env: SweEnv) -> str:
    """How many tests of each list passed in the strict run."""
    if env.verdict is None:
        return "- | -"
    lists, statuses = env.verdict.lists, env.verdict.statuses
    groups = (lists.fail_to_pass, lists.pass_to_pass)
    return " | ".join(f"{sum(statuses.get(name) in PASSING for name in names)} of {len(names)}" for names in groups)


CASES = {"gold": gold}


if __name__ == "__main__":
    cases.main(__file__, CASES)
