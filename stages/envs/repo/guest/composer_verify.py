"""The verifier of an exported task: grade the agent's tree, and write the reward.

    python3 -I -S composer_verify.py

It is in a task's tests/ with task.json, originals/ (delivered tests and test configuration), hidden/ (files that are
written for grading alone), composer_rules.py, and the programs that report the outcomes of pytest. It copies the
regular files of the agent's tree without those that a solution may not change, writes originals and hidden files over
the copy, runs the test there, and writes /logs/verifier/reward.json last. Earlier rewards are removed first. As root it
runs the test as `nobody`, who can write neither a reward nor these files. If it fails itself it writes no reward: that
is an error of the infrastructure, and no zero.
"""

import contextlib
import json
import os
import secrets
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    from composer_stages.envs.repo.guest import composer_rules as rules
else:
    import composer_rules as rules

LOGS = "/logs/verifier"
NOBODY = 65534
LEFT_OUT = frozenset({".git", ".hg", ".svn", ".bzr", "__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache"})
MOST_BYTES = 1 << 30
"""Limit on the agent's files: a larger solution cannot be graded."""
LONGEST_LOG = 16 << 20


def files(root: str) -> "Iterator[str]":
    """Yield the paths of the regular files below a folder; no link is followed."""
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in LEFT_OUT)
        for name in sorted(names):
            path = os.path.join(folder, name)
            if stat.S_ISREG(os.lstat(path).st_mode) and not name.endswith((".pyc", ".pyo")):
                yield os.path.relpath(path, root)


def copy(source: str, target: str, path: str) -> None:
    """Copy one file and create its folders; entries of other kinds in their place are removed."""
    destination = os.path.join(target, path)
    above = os.path.dirname(destination)
    while len(above) > len(target):
        if os.path.lexists(above) and not os.path.isdir(above):
            os.unlink(above)
        above = os.path.dirname(above)
    if os.path.isdir(destination) and not os.path.islink(destination):
        shutil.rmtree(destination)
    os.makedirs(os.path.dirname(destination), exist_ok=True)
    shutil.copy(os.path.join(source, path), destination, follow_symlinks=False)


def rebuild(task: "dict[str, Any]", agent_tree: str, tree: str) -> "list[str]":
    """Write the tree to grade: the agent's files, the originals of protected files, hidden files.

    Returns the agent's new files that are dropped.
    """
    size, existing, left_out = 0, set(task["existing"]), []
    for path in files(agent_tree):
        if path in task["source"] or not rules.is_protected(path, existing, task["tests"], task["modules"]):
            size += os.lstat(os.path.join(agent_tree, path)).st_size
            if size > MOST_BYTES:
                return []  # an incomplete tree: the tests fail
            copy(agent_tree, tree, path)
        elif path not in existing:
            left_out.append(path)
    for name in ("originals", "hidden"):
        for path in files(os.path.join(HERE, name)):
            copy(os.path.join(HERE, name), tree, path)
    return left_out


def run(command: "list[str]", tree: str, timeout_s: float, stdin: str = "") -> "tuple[int | None, str]":
    """Run a command in the tree; return its exit code, None after a timeout, and the end of its output."""
    environment = {
        "PATH": os.environ.get("PATH", os.defpath),
        "HOME": tree,
        "LANG": "C.UTF-8",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTEST_ADDOPTS": "-p no:cacheprovider",
        # The tree is searched once pytest and the plugin are imported (composer_pytest.py).
        "PYTHONPATH": os.pathsep.join([HERE, tree, os.path.join(tree, "src")]),
    }
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command,
            cwd=tree,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=become_nobody if can_be_nobody() else None,
        )
        code: int | None
        try:
            process.communicate(stdin.encode(), timeout_s)
            code = process.returncode
        except subprocess.TimeoutExpired:
            code = None
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        size = output.seek(0, os.SEEK_END)
        output.seek(max(0, size - LONGEST_LOG))
        return code, output.read().decode(errors="replace")


def become_nobody() -> None:
    """Give up root."""
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)


def can_be_nobody() -> bool:
    """Return whether this is root, may become `nobody`, and `nobody` can run this interpreter."""
    try:
        return os.getuid() == 0 and subprocess.call([sys.executable, "-c", ""], preexec_fn=become_nobody) == 0
    except (OSError, subprocess.SubprocessError):  # a user namespace with one user, an interpreter of root's alone
        return False


def statuses(task: "dict[str, Any]", tree: str, timeout_s: float) -> "tuple[dict[str, str], str]":
    """Return the outcomes of the task's tests by name, none if the report is missing or forged, and the log."""
    if task["command"]:
        code, log = run(["bash", "-c", task["command"]], tree, timeout_s)
        return {rules.COMMAND: "passed" if code == 0 else "failed"}, log
    secret = secrets.token_hex(16)
    words = [sys.executable, "-I", "-S", os.path.join(HERE, "composer_supervisor.py")]
    words += [sys.executable, "-P", os.path.join(HERE, "composer_pytest.py")]
    words += ["-p", "composer_outcomes", *task["arguments"]]
    _, log = run(words, tree, timeout_s, f"{secret}\n")
    report, _, log = rules.read_report(log, secret)
    texts = {}
    for path in files(tree):
        if rules.is_test(path) and path.endswith((".py", ".txt", ".rst", ".md")):
            with open(os.path.join(tree, path), errors="replace") as file:
                texts[path] = file.read()
    outcomes = rules.fail_unexplained(rules.statuses_by_name(report.get("outcomes", {})), texts)
    return rules.add_id_statuses(outcomes, [*task["fail_to_pass"], *task["pass_to_pass"]]), log


def write(name: str, text: str) -> None:
    """Write a file of the verifier atomically."""
    with open(os.path.join(LOGS, f"{name}.new"), "w", errors="replace") as file:
        file.write(text)
    os.replace(os.path.join(LOGS, f"{name}.new"), os.path.join(LOGS, name))


def main() -> None:
    """Grade and write the reward."""
    os.makedirs(LOGS, exist_ok=True)
    for name in ("reward.json", "reward.txt"):
        path = os.path.join(LOGS, name)
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)
        elif os.path.lexists(path):
            os.unlink(path)
    with open(os.path.join(HERE, "task.json")) as file:
        task = json.load(file)
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        tree = os.path.join(folder, "testbed")
        os.mkdir(tree)
        notes = rules.dropped_lines(rebuild(task, task["workdir"], tree))
        os.chmod(folder, 0o755)  # noqa: S103 - the test runs as another user
        for path in [tree, *(os.path.join(above, name) for above, some, more in os.walk(tree) for name in some + more)]:
            try:
                os.chown(path, NOBODY, NOBODY, follow_symlinks=False)
            except OSError:
                break  # not root
        outcomes, log = statuses(task, tree, task["timeout_s"])
    lists = (("fail_to_pass", task["skips_fail"]), ("pass_to_pass", False))
    failed = {
        name: [test for test in task[name] if rules.fails(test, outcomes, skips_fail=skips)] for name, skips in lists
    }
    write("test.log", "".join(notes) + log[-100_000:])
    rewards = {f"{name}_share": 1 - len(failed[name]) / len(task[name]) for name, _ in lists if task[name]}
    resolved = not failed["fail_to_pass"] and not failed["pass_to_pass"]
    rewards |= {"reward": float(resolved), "duration_s": round(time.monotonic() - started, 3)}
    write("reward.json", json.dumps(rewards) + "\n")


if __name__ == "__main__":
    main()
