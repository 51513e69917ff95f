"""Harbor tasks in bubblewrap: solutions pass, nothing does not, and no reward is what a verifier did not write."""

import io
import json
import re
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest
from support.grades import play
from support.harbor import KINDS, SHELL, WITHOUT_ENGINE, Files, for_training, python_task, separate_task, steps_task
from support.sample_package import write
from support.scripted_runs import nothing_done, played

from composer_stages.envs.base import HasSize, HasSolutions
from composer_stages.envs.bash import fenced
from composer_stages.envs.harbor.env import HarborEnv
from composer_stages.envs.harbor.verifying import parse_reward
from composer_stages.envs.task_table import TooManyTasks
from composer_stages.errors import BadInput, ComposerError, InfrastructureError, UsageError
from composer_stages.runs.kinds import ROLLOUT, TASK
from composer_stages.sandbox.bubblewrap import MACHINE


def with_test(script: str, files: Files | None = None) -> Files:
    """A task with another test script."""
    return {**(files or python_task()), "tests/test.sh": SHELL + script}


@pytest.mark.parametrize("kind", WITHOUT_ENGINE)
def test_the_solution_passes_and_nothing_does_not(made: Any, kind: str) -> None:
    env, task = made(KINDS[kind]())
    assert isinstance(env, HasSolutions) and isinstance(env, HasSize) and env.size("train") == 1
    opening = env.reset(task)
    assert "starts in /app" in opening[0]["content"] and opening[1]["content"] == task.prompt
    stops = [env.step(action).stop for action in env.solution()]
    assert stops[-1] == "submitted" and set(stops[:-1]) == {None}
    grade = env.grade()
    assert (grade.reward, grade.hidden_pass, grade.hacked, grade.protocol_ok) == (1.0, True, False, True)
    assert grade.work.image == "localhost/composer-harbor-base:latest (not built: bubblewrap)"
    if kind == "metrics":
        last = (grade.work.test_log or "").splitlines()[-1]
        assert json.loads(last.removeprefix("[reward.json] ")) == {"reward": 1.0, "lines": 1.0, "count": 3}
    nothing = play(env, task)
    assert (nothing.reward, nothing.hidden_pass, nothing.error) == (0.0, False, None)


def test_tests_and_solution_are_out_of_reach_of_the_agent(made: Any) -> None:
    for files in (python_task(), steps_task()):
        env, task = made(files)
        env.reset(task)
        names = "-name test.sh -o -name solve.sh -o -name check.sh"
        find = f"find / \\( -path /usr -o -path /proc \\) -prune -o \\( {names} \\) -print 2>/dev/null; ls -A /app"
        assert "test.sh" not in (seen := env.step(fenced(find)).content) and "solve.sh" not in seen
        env.step(fenced("echo one > one.txt"))
        env.step(fenced("submit"))
        assert "check.sh" not in env.step(fenced(find)).content, "also after the verifier of a step"


def test_a_second_step_follows_a_passed_one_alone(made: Any) -> None:
    env, task = made(steps_task())
    env.reset(task)
    env.step(fenced("echo one > /app/one.txt"))
    seen = env.step(fenced("submit"))
    assert seen.stop is None and "given.txt" in seen.content
    assert env.step(fenced("cat given.txt")).content.startswith("two")
    assert env.grade().reward == 0.5, "one of two"
    env.step(fenced("cat given.txt >> one.txt"))
    assert env.step(fenced("submit")).stop == "submitted" and env.grade().reward == 1.0
    env.reset(task)
    assert env.step(fenced("submit")).stop == "submitted", "min_reward is missed"
    assert env.grade().reward == 0.0


def test_a_step_that_was_not_reached_is_no_reason_for_more(made: Any) -> None:
    """Harbor averages the steps that were verified; then it would pay to stop after an easy one."""
    files = steps_task()
    files["task.toml"] = files["task.toml"].replace("min_reward = 1.0\n", "")
    env, task = made(files)
    assert play(env, task, "echo one > /app/one.txt").reward == 0.5
    assert play(env, task, "submit", "submit").reward == 0.0, "the last step is not reached without its time"
    final = 'multi_step_reward_strategy = "final"\n'
    env, task = made({**files, "task.toml": final + files["task.toml"]})
    assert play(env, task, "echo one > /app/one.txt").reward == 0.0
    assert play(env, task, "submit", "printf 'one\\ntwo\\n' > one.txt", "submit").reward == 1.0


def test_only_declared_artifacts_reach_a_separate_verifier(made: Any) -> None:
    script = "find /app /logs /tests /solution -type f -o -type l | sort; echo 1 > /logs/verifier/reward.txt\n"
    env, task = made(with_test(script, separate_task()))
    grade = play(
        env,
        task,
        "echo x > report.txt; echo x > other; mkdir -p /logs/artifacts/d /tests /solution",
        "echo y > /logs/artifacts/d/f; ln -s /tests/test.sh /logs/artifacts/link; echo z > /logs/verifier/reward.txt",
    )
    found = grade.work.test_log.split("[reward")[0].split()
    assert found == ["/app/report.txt", "/logs/artifacts/d/f", "/logs/artifacts/lines", "/tests/test.sh"]
    assert grade.hacked, "a reward file before the verifier"


def test_too_many_artifacts_are_a_zero_that_the_agent_caused(made: Any) -> None:
    env, task = made(separate_task())
    grade = play(env, task, "truncate -s 1G report.txt")
    assert (grade.reward, grade.error_type) == (0.0, None) and grade.work.test_log == (
        "The artifacts have more than 256 MiB together, of which 3 bytes were read: /app/report.txt has more than "
        "268435453 bytes."
    )


BAD = {
    "nothing": ("true", "wrote no reward"),
    "a bad file before a good one": ("echo x > $R/reward.json; echo 1 > $R/reward.txt", "reward.json is not a reward"),
    "a deep one": ("printf '[%.0s' {1..50000} > $R/reward.json", "is not a reward"),
    "a huge one": ("truncate -s 3T $R/reward.txt 2>/dev/null || truncate -s 1G $R/reward.txt", "bytes; at most"),
    "a link": ("echo 1 > /app/r; ln -s /app/r $R/reward.txt", "it is a link, or no file"),
    "a pipe": ("mkfifo $R/reward.txt", "it is a link, or no file"),
    "a folder": ("mkdir $R/reward.json", "it is a link, or no file"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_no_reward_is_null_with_the_reason(made: Any, case: str) -> None:
    script, reason = BAD[case]
    env, task = made(with_test(f"R=/logs/verifier\necho try >> /app/tries\n{script}\n"))
    started = time.monotonic()
    grade = play(env, task)
    assert grade.reward is None and grade.hidden_pass is None and grade.error_type == "NoReward"
    assert grade.error and reason in grade.error
    assert env.step(fenced("wc -l < tries")).content.startswith("2"), "tried once more"
    assert time.monotonic() - started < 60


def test_a_verifier_that_hangs_ends_in_its_time_and_is_not_run_again(made: Any) -> None:
    files = with_test("echo try >> /app/tries; sleep 60\n")
    files["task.toml"] = files["task.toml"].replace("timeout_sec = 60.0", "timeout_sec = 0.5")
    env, task = made(files)
    grade = play(env, task)
    assert (grade.reward, grade.error) == (None, "The verifier did not end within 0.5 s.")
    assert env.step(fenced("wc -l < tries")).content.startswith("1")


def test_a_verifier_that_fails_once_is_run_again(made: Any) -> None:
    script = "if [ -e /app/failed ]; then echo 0.25 > /logs/verifier/reward.txt; fi; touch /app/failed\n"
    env, task = made(with_test(script))
    assert play(env, task).reward == 0.25


def test_a_reward_that_the_agent_wrote_is_deleted_before(made: Any) -> None:
    plant = "echo 1 | tee /logs/verifier/reward.txt > /logs/verifier/reward.json"
    env, task = made(python_task())
    grade = play(env, task, plant)
    assert (grade.reward, grade.hacked) == (0.0, True)
    env, task = made(with_test("true\n"))
    assert play(env, task, f"({plant}; sleep 1; {plant}) & {plant}").reward is None, "also of a process left behind"
    assert play(env, task, "rm -rf /logs/verifier; mkdir /app/v; ln -s /app/v /logs/verifier", plant).reward is None


def test_links_that_an_agent_leaves_lead_nowhere_on_this_machine(made: Any, tmp_path: Path) -> None:
    """The agent sees the folder around its folders too, and can put links into their place."""
    outside = tmp_path / "outside"
    (outside / "verifier").mkdir(parents=True)
    (outside / "kept").write_text("x")
    files = steps_task() | {"steps/second/workdir/sub/given.txt": "two\n"}
    files["task.toml"] = files["task.toml"].replace("min_reward = 1.0\n", "")
    env, task = made(files)
    env.reset(task)
    links = f"""cd {MACHINE} && for d in app tests logs solution; do rm -rf $d; mv $d .$d; ln -s {outside} $d; done
    rm -rf /app/sub; ln -s {outside} /app/sub; ls -la {MACHINE}"""
    env.step(fenced(links))
    env.step(fenced("submit"))
    env.step(fenced(links))
    grade = env.grade()
    assert grade.reward == 0.0
    assert sorted(path.name for path in outside.rglob("*")) == ["kept", "verifier"], "nothing written or deleted there"


@pytest.mark.parametrize(
    ("steps", "reason"),
    [
        ("RUN echo 1 > /opt/x", "the folder /opt belongs to the machine's system"),
        ("RUN printf a >>/etc/x", "the folder /etc belongs to the machine's system"),
        ("RUN mv x.sh /usr/bin/", "the folder /usr/bin"),
        ("RUN chmod 755 ../x", "the folder / belongs to the machine's system"),
        ("RUN touch a & sleep 9", "line 3: RUN touch a & sleep 9 is not carried out"),
        ("HEALTHCHECK CMD true", "line 3: HEALTHCHECK is not carried out"),
        ("RUN echo 1 > /data/x && ln -s /etc/hosts a 2>/dev/null", None),
    ],
)
def test_a_step_that_writes_where_bubblewrap_cannot_is_refused_before_the_start(
    steps: str, reason: str | None, tmp_path: Path
) -> None:
    text = f"FROM python:3.13\nWORKDIR /app\n{steps}\n"
    write(tmp_path / "t", {**python_task("x-0", "x"), "environment/Dockerfile": text})
    if reason is None:
        assert len(HarborEnv(path=str(tmp_path), runs_in="bubblewrap").tasks("train", 1, 0)) == 1
        return
    with pytest.raises(BadInput, match=re.escape(reason)):
        HarborEnv(path=str(tmp_path), runs_in="bubblewrap").tasks("train", 1, 0)


def test_everything_that_is_not_followed_is_refused_before_the_start(tmp_path: Path) -> None:
    base = python_task("x-0", "x")
    dockerfiles = {
        "FROM rust:1\nWORKDIR /app\n": "line 1: the image rust:1 may hold more",
        "FROM python:3.13\nRUN pip install numpy\n": "line 2: RUN pip install numpy is not carried out",
        "FROM python:3.13\nRUN pip install pytest==3.2.1\n": "line 2: it installs pytest==3.2.1, and the sandbox shows",
        "FROM python:3.13\nRUN true || pip install numpy\n": "line 2: RUN pip install numpy is not carried out",
        "FROM python:3.13\nRUN apt-get update && \\\n  apt-get install -y gcc\n": "line 2: RUN apt-get install -y gcc",
        "FROM python:3.13\nRUN curl x | sh\n": "line 2: RUN curl x | sh is not carried out",
        "FROM python:3.13 AS a\nFROM python:3.13\n": "line 2: it has several stages",
        "FROM python:3.13\nUSER app\n": "line 2: USER is not carried out",
        'FROM python:3.13\nENTRYPOINT ["a"]\n': "line 2: ENTRYPOINT is not carried out",
        "FROM python:3.13\nADD https://a/b /app/\n": "line 2: ADD of anything but files",
        "FROM python:3.13\nCOPY --from=a b /app/\n": "line 2: COPY --from is not carried out",
        "FROM python:3.13\nWORKDIR /usr/src\n": "the folder /usr/src belongs to the machine's system",
        "FROM python:3.13\n": "the folder / belongs to the machine's system",
    }
    for number, text in enumerate(dockerfiles):
        write(tmp_path / f"t{number}", {**python_task(f"x-{number}", "x"), "environment/Dockerfile": text})
    others = {
        '[environment]\nnetwork_mode = "public"\n': "asks for the network",
        "[environment]\nmemory_mb = 99999999\n": "needs 99999999 MiB, and this machine has",
        '[agent]\nuser = "app"\n[environment]\n': "needs the user 'app'",
        "[environment]\ngpus = 1\n": "environment.gpus: it needs 1 GPUs",
        '[environment.healthcheck]\ncommand = "true"\n': "no service goes on running",
        "[environment\n": "no valid TOML",
    }
    for number, text in enumerate(others):
        write(tmp_path / f"u{number}", {**base, "task.toml": text})
    write(tmp_path / "v0", python_task("y-1", "y"))
    write(tmp_path / "v1", python_task("z-1", "z"))
    with pytest.raises(BadInput) as caught:
        HarborEnv(path=str(tmp_path), runs_in="bubblewrap").tasks("train", 1, 0)
    said = str(caught.value)
    for reason in (*dockerfiles.values(), *others.values()):
        assert reason in said
    first, *lines = said.splitlines()
    assert first.endswith("2 tasks can be played, and 19 problems of the others, by reason:")
    assert "    4 x environment: environment/Dockerfile, ...: RUN ... is not carried out; containers need" in said
    assert sum(int(line.split(" x ")[0]) for line in lines if line.startswith("    ")) == 19
    env = HarborEnv(path=str(tmp_path), runs_in="bubblewrap", skip_refused=True)
    assert sorted([*env.tasks("train", 1, 0), *env.tasks("eval", 1, 0)], key=str)[0].family in ("y", "z")
    assert env.size("train") + env.size("eval") == 2


def test_a_folder_of_one_task_and_all_that_is_wrong_with_one(tmp_path: Path) -> None:
    env = HarborEnv(path=str(write(tmp_path / "mine", python_task())), runs_in="bubblewrap")
    (task,) = env.tasks("train", 1, 0)
    with pytest.raises(TooManyTasks, match="0 tasks for eval"):
        env.tasks("eval", 1, 0)
    assert task.task_id == "own/sums-1" and env.size("eval") == 0
    write(tmp_path / "a", {**python_task(), "environment/Dockerfile": "FROM rust:1\n", "trajectory.json": "{}"})
    with pytest.raises(BadInput, match=r"(?s)conversation before.*the image rust:1 may hold more"):
        HarborEnv(path=str(tmp_path / "a"), runs_in="bubblewrap").tasks("train", 1, 0)


ROOT_SCRIPT = "python3 -c 'print(1 + 1)' > /root/made/two && cp ~/given.txt /root/made/ && rm -rf /root/.cache"


def test_a_task_may_touch_the_folder_in_which_this_machines_python_lies(made: Any) -> None:
    files = python_task()
    files["environment/Dockerfile"] = (
        "FROM python:3.13-slim\nRUN mkdir -p /root/made\nCOPY sums.py /root/given.txt\nWORKDIR /root\n"
    )
    files["tests/test.sh"] = SHELL + (
        "[ $(cat /root/made/two) = 2 ] && grep -q add /root/made/given.txt && python3 -c pass && which pytest\n"
        "if [ $? = 0 ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt\n"
    )
    env, task = made(files)
    assert play(env, task, ROOT_SCRIPT, "submit").reward == 1.0
    # Links in the way of the interpreter, put there around its mounts: no machine starts through them.
    links = f"cd {MACHINE}/root; for one in .[!.]*; do mv $one moved$one; ln -s /usr $one; done"
    assert play(env, task, links, ROOT_SCRIPT, "submit").reward == 1.0


@pytest.mark.parametrize("copied", ["COPY . /app", "COPY sums.py /app", "COPY . app", "ADD --chown=0:0 . /app"])
def test_a_folder_is_copied_into_without_a_slash(made: Any, copied: str) -> None:
    first = "WORKDIR /app\n" if "sums" in copied else ""
    env, task = made({**python_task(), "environment/Dockerfile": f"FROM python:3\n{first}{copied}\nWORKDIR /app\n"})
    env.reset(task)
    assert "sums.py" in env.step(fenced("ls /app")).content.split()


def test_temporary_files_outlive_a_step_and_reach_the_verifier(made: Any) -> None:
    files = steps_task()
    files["steps/second/tests/test.sh"] = SHELL + "cp /tmp/score /logs/verifier/reward.txt\n"
    env, task = made(files)
    assert play(env, task, "echo one > one.txt; echo 1 > /tmp/score", "submit", "cat /tmp/score").reward == 1.0


def test_a_dockerfile_is_followed_where_it_can_be(made: Any) -> None:
    files = python_task()
    files["environment/Dockerfile"] = (
        "# syntax=docker/dockerfile:1\nFROM python:3.13-slim\nENV A=b C='d e'\nLABEL x=y\nWORKDIR /data/in\n"
        "RUN apt-get update && apt-get install -y --no-install-recommends git \\\n"
        "    && rm -rf /var/lib/apt/lists/*\nRUN pip install --no-cache-dir pytest>=8.4\n"
        'RUN python3 -c "import pytest" 2>/dev/null || pip install pytest==3.2.1\nRUN touch once || touch twice\n'
        'RUN mkdir -p /data/out && touch /data/out/made\nCOPY --chown=a:b sums.py x*.txt ./\nCOPY ["d", "/data/d"]\n'
        'COPY sums.py /data/out\nWORKDIR ../out\nADD x1.txt e.txt\nCMD ["bash"]\n'
    )
    files |= {"environment/x1.txt": "1", "environment/d/f": "f", "environment/d/g/h": "h"}
    env, task = made(files)
    env.reset(task)
    seen = env.step(fenced("pwd; echo $A $C; cd /data; find . -type f | sort | xargs; which pytest git")).content
    assert seen.startswith(
        "/data/out\nb d e\n./d/f ./d/g/h ./in/once ./in/sums.py ./in/x1.txt ./out/e.txt ./out/made ./out/sums.py"
    )
    assert "/pytest\n" in seen and "/git\n" in seen


@pytest.mark.parametrize(
    ("lines", "shell", "seen"),
    [
        ('ENV PATH="/app/bin:$PATH"\nCOPY --chmod=755 tool /app/bin/tool', "tool", "found"),
        ("ENV X=/app/lib:$NONE", 'echo "$X"', "/app/lib:"),
        ("ENV X=${MODE:-fast} Y=${X:+set}", 'echo "$X,$Y"', "fast,"),
        ("ENV X=1\nENV Y=${X:+set} Z=${X-other}", 'echo "$Y,$Z"', "set,1"),
        ("ENV X=\\$OTHER Y='$OTHER' Z=\"a \\$b\"", 'echo "$X,$Y,$Z"', "$OTHER,$OTHER,a $b"),
        ('ENV MSG hello "world"', 'echo "$MSG"', "hello world"),
        ("FROM --platform=linux/amd64 python:3.13-slim", "echo one", "one"),
    ],
)
def test_variables_of_a_dockerfile_are_what_docker_makes_of_them(made: Any, lines: str, shell: str, seen: str) -> None:
    files = python_task()
    begin = "" if lines.startswith("FROM") else "FROM python:3.13-slim\n"
    files["environment/Dockerfile"] = f"{begin}{lines}\nWORKDIR /app\n"
    files["environment/tool"] = "#!/bin/sh\necho found\n"
    env, task = made(files)
    env.reset(task)
    assert env.step(fenced(shell)).content.startswith(f"{seen}\n")


@pytest.mark.parametrize(
    "line",
    [
        'RUN echo "a\\\\nb" > f',
        "RUN echo -e a > f",
        "RUN mkdir -p /app/{a,b}",
        "RUN echo a &> f",
        "ENV X=${Y%.*}",
        "ENV X='a",
    ],
)
def test_what_a_dockerfile_means_in_another_shell_is_refused(made: Any, line: str) -> None:
    files = python_task()
    files["environment/Dockerfile"] = f"FROM python:3.13-slim\n{line}\nWORKDIR /app\n"
    with pytest.raises(ComposerError, match="line 2"):
        made(files)


def test_hostile_archives_and_links_of_a_task_stay_in_the_machine(made: Any, tmp_path: Path) -> None:
    files = python_task()
    files["environment/Dockerfile"] += "RUN ln -s /etc /app/etc && ln -s / /app/root\nCOPY d /app/\nADD a.tar /app/\n"
    files |= {"environment/d/etc/evil": "x", "environment/d/root/evil": "y"}
    env, task = made(files)
    archive = tmp_path / "tasks0" / "task0" / "environment" / "a.tar"
    for name, size in (("../../evil", 1), ("/evil", 1), ("a" * 3000, 1), ("big", 2 << 30)):
        with tarfile.open(archive, "w") as tar:
            info = tarfile.TarInfo(name)
            info.size = 1
            tar.addfile(info, io.BytesIO(b"x"))
            if size > 1:
                for number in range(2):
                    info = tarfile.TarInfo(f"{name}{number}")
                    tar.addfile(info)
        (task,) = env.tasks("train", 1, 0)
        if size == 1:
            with pytest.raises(BadInput, match="cannot be unpacked"):
                env.reset(task)
    env.reset(task)
    assert not Path("/etc/evil").exists() and not Path("/evil").exists() and not (tmp_path / "evil").exists()
    assert env.step(fenced("cat /app/etc/evil /app/root/evil")).content.startswith("xy")


def test_a_changed_task_is_not_played_on(made: Any, tmp_path: Path) -> None:
    env, task = made(python_task())
    (tmp_path / "tasks0" / "task0" / "tests" / "test.sh").write_text("echo 1 > /logs/verifier/reward.txt\n")
    with pytest.raises(InfrastructureError, match="have changed since the run began"):
        env.reset(task)


def test_the_tasks_own_time_holds_where_it_is_asked_for(made: Any) -> None:
    files = python_task()
    files["task.toml"] = files["task.toml"].replace("timeout_sec = 120.0", "timeout_sec = 1.5")
    env, task = made(files, limits="task")
    env.reset(task)
    assert env.step(fenced("sleep 30")).timed_out
    assert env.step(fenced("true")).stop == "wall_time"
    assert env.grade().reward == 0.0
    env, task = made(files)
    env.reset(task)
    assert not env.step(fenced("sleep 2")).timed_out


def test_tools_malformed_actions_and_options(made: Any, tmp_path: Path) -> None:
    env, task = made(python_task())
    env.use_tools()
    assert "a call of `bash`" in env.reset(task)[0]["content"]
    assert env.call("bash", {"command": "echo $((6*7))"}).content.startswith("42")
    assert env.malformed("no call").parse_error == "no call"
    assert env.call("submit", {}).stop == "submitted"
    assert env.grade().protocol_ok is False
    with pytest.raises(UsageError, match="Which tasks"):
        HarborEnv()
    with pytest.raises(UsageError, match=r"env\.network is 'all'; choose one of: none, task"):
        HarborEnv(path="x", network="all")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="Leave out sandbox=none"):
        HarborEnv(path="x", sandbox="none")
    with pytest.raises(
        UsageError, match=r"holds 1 task for train \(and 0 for eval\), not 2\. Ask for 1 at most, with tasks=1\."
    ):
        env.tasks("train", 2, 0)
    with pytest.raises(BadInput, match="holds no tasks that can be played"):
        HarborEnv(path=str(tmp_path / "tasks0" / "task0" / "tests"), runs_in="bubblewrap").tasks("train", 1, 0)


def test_families_come_from_a_key_or_the_names_prefix(tmp_path: Path) -> None:
    for number in range(12):
        write(tmp_path / f"t{number}", python_task(f"fam{number % 4}-{number}", family=f"f{number % 3}"))
    by_key = HarborEnv(path=str(tmp_path), runs_in="bubblewrap")
    by_name = HarborEnv(path=str(tmp_path), runs_in="bubblewrap", family="none", eval_share=0.5, split_seed=3)
    for env, families, held_out, drawn in ((by_key, 3, 4, (0, 0.25)), (by_name, 4, 6, (3, 0.5))):
        train, evaluated = (env.tasks(split, env.size(split), 5) for split in ("train", "eval"))
        assert len(evaluated) == held_out and len(train) == 12 - held_out
        assert not {task.family for task in train} & {task.family for task in evaluated}
        assert len({task.family for task in [*train, *evaluated]}) == families
        assert env.tasks("train", 2, 5) == train[:2]
        how = dict(zip(("split_seed", "eval_share"), drawn, strict=True))
        assert all(task.data["divided_by"] == how for task in [*train, *evaluated])


def test_rewards_of_a_file() -> None:
    assert parse_reward(b"1\n", "reward.txt") == {"reward": 1.0}
    assert parse_reward(b"0.5", "reward.json") == {"reward": 0.5}
    assert parse_reward(b'{"reward": true, "time": 3}', "reward.json") == {"reward": 1.0, "time": 3.0}
    assert parse_reward(b'{"score": 0.5}', "reward.json") == {"reward": 0.5, "score": 0.5}


@pytest.mark.parametrize(
    ("name", "data", "reason"),
    [
        ("reward.txt", b"", "it is empty"),
        ("reward.txt", b"nan", "reward is nan"),
        ("reward.txt", b"1e308", "which is not within"),
        ("reward.txt", b"9" * 400, "reward is"),
        ("reward.txt", b"yes", "it holds 'yes'"),
        ("reward.txt", b"\377", "decode"),
        ("reward.json", b'{"reward": Infinity}', "it holds Infinity"),
        ("reward.json", b"1e999", "reward is inf"),
        ("reward.json", b"9" * 400, "reward is"),
        ("reward.json", b'{"reward": "1"}', "reward is '1'"),
        ("reward.json", b'{"reward": null}', "reward is 'None'"),
        ("reward.json", b'{"score": 1, "time": 3}', "no key 'reward' but 'score', 'time'"),
        ("reward.json", b"{}", "no key 'reward' but none"),
        ("reward.json", b'{"reward": 1, "a": NaN}', "it holds NaN"),
    ],
)
def test_what_is_no_reward_is_refused_with_the_reason(name: str, data: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_reward(data, name)


def test_a_run_records_solutions_metrics_and_that_nothing_was_built(tmp_path: Path) -> None:
    for kind in ("metrics", "steps"):
        write(tmp_path / "tasks" / kind, for_training(KINDS[kind]()))
    env = {"name": "harbor", "path": str(tmp_path / "tasks"), "runs_in": "bubblewrap"}
    sizes = {"tasks": 2, "samples": 1}
    metrics = {}
    for run, reward in (
        (played(tmp_path, "reference", env, **sizes), 1.0),
        (nothing_done(tmp_path, env, **sizes), 0.0),
    ):
        rows = run.rows(ROLLOUT)
        assert [row["reward"] for row in rows] == [reward] * 2
        assert all("not built" in row["image"] and row["sandbox"] == "bubblewrap" for row in rows)
        assert sorted(json.loads(row["data_json"])["steps"] for row in run.rows(TASK)) == [1, 2]
        metrics[reward] = {row["task_id"]: json.loads(row["metrics_json"] or "null") for row in rows}
    assert metrics[1.0] == {
        "own/words-1": {"lines": 1.0, "count": 3.0},
        "own/ladder-1": {"first/reward": 1.0, "second/reward": 1.0},
    }
    assert metrics[0.0]["own/ladder-1"] == {"first/reward": 0.0}, "the second step was not reached"
