"""The verifier of an exported task: grade the agent's tree, and write the reward.

    python3 -I -S composer_verify.py

It is in a task's tests/ with task.json, originals/ (delivered tests and test configuration), hidden/ (files that are
written for grading alone), composer_rules.py, and the programs that report the outcomes of pytest. It copies the
files, links and folders of the agent's tree with their modes, without those that a solution may not change, writes
originals and hidden files over the copy, runs the test there, and writes /logs/verifier/reward.json last. Earlier
rewards are removed first. As root it runs the test as `nobody`, who can write neither a reward nor these files. If it
fails itself it writes no reward: that is an error of the infrastructure, and no zero.
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
    from typing import Any

    from composer_stages.envs.repo.guest import composer_rules as rules
else:
    import composer_rules as rules

LOGS = "/logs/verifier"
NOBODY = 65534
MOST_BYTES = 1 << 30
"""Limit on the agent's files: a larger solution cannot be graded."""
LONGEST_LOG = 16 << 20


def entries(root: str) -> "dict[str, os.stat_result]":
    """Return the regular files, links and folders below a folder by their paths; no link is followed."""
    listed = {}
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in rules.CACHES | rules.HISTORY)
        for name in [*folders, *sorted(names)]:
            status = os.lstat(path := os.path.join(folder, name))
            is_source = stat.S_ISREG(status.st_mode) and not name.endswith(rules.COMPILED)
            is_link = stat.S_ISLNK(status.st_mode) and name not in rules.CACHES | rules.HISTORY
            if is_source or is_link or is_folder(status):
                listed[os.path.relpath(path, root)] = status
    return listed


def is_folder(status: os.stat_result) -> bool:
    """Return whether an entry is a folder."""
    return stat.S_ISDIR(status.st_mode)


def paths_of_files(root: str) -> "list[str]":
    """Return the paths of the files and links below a folder."""
    return [path for path, status in entries(root).items() if not is_folder(status)]


def content(root: str, path: str) -> "bytes | None":
    """Return the bytes of a regular file, or what a link names; None where there is neither."""
    path = os.path.join(root, path)
    if os.path.islink(path):
        return os.fsencode(os.readlink(path))
    if not os.path.isfile(path):
        return None
    with open(path, "rb") as file:
        return file.read()


def above(path: str) -> "list[str]":
    """Return the folders that a path lies in."""
    parts = path.split("/")
    return ["/".join(parts[:end]) for end in range(1, len(parts))]


def remove(path: str) -> None:
    """Remove a file, a link or a folder, where there is one."""
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    elif os.path.lexists(path):
        os.unlink(path)


def copy(source: str, target: str, path: str) -> None:
    """Copy one file, link or empty folder and create its folders; entries of other kinds in their place are removed."""
    for folder in above(path):
        if os.path.islink(full := os.path.join(target, folder)) or not os.path.isdir(full):
            remove(full)
            os.mkdir(full)
    source, destination = os.path.join(source, path), os.path.join(target, path)
    remove(destination)
    if os.path.islink(source):
        os.symlink(os.readlink(source), destination)
    elif os.path.isdir(source):
        os.mkdir(destination)
    else:
        shutil.copyfile(source, destination)
        os.chmod(destination, os.stat(source).st_mode & 0o777)


def rebuild(task: "dict[str, Any]", agent_tree: str, tree: str, here: str = HERE) -> "list[str]":
    """Write the tree to grade: the agent's files, the originals of protected files, hidden files.

    Returns the agent's changes that are dropped. here: the folder of the task's tests.
    """
    size, existing, dropped = 0, set(task["existing"]), []
    originals, hidden = os.path.join(here, "originals"), os.path.join(here, "hidden")
    original_paths = paths_of_files(originals)
    occupied = {folder for path in original_paths for folder in above(path)}
    agents = entries(agent_tree)
    full = {folder for path in agents for folder in above(path)}

    def is_dropped(path: str, is_link: bool) -> bool:
        return path in occupied or rules.is_dropped(
            path,
            *(
                content(root, path) if os.path.basename(path) in rules.SHARED else None
                for root in (originals, agent_tree)
            ),
            is_link=is_link,
            existing=existing,
            tests=task["tests"],
            source=task["source"],
            modules=task["modules"],
        )

    for path, status in agents.items():
        if is_folder(status):
            if path not in full:
                copy(agent_tree, tree, path)
        elif is_dropped(path, stat.S_ISLNK(status.st_mode)):
            dropped += [path] if content(originals, path) != content(agent_tree, path) else []
        else:
            size += status.st_size
            if size > MOST_BYTES:
                return []  # an incomplete tree: the tests fail
            copy(agent_tree, tree, path)
    for path in original_paths:
        if not os.path.lexists(os.path.join(tree, path)) and is_dropped(path, is_link=False):
            copy(originals, tree, path)
    for path in paths_of_files(hidden):
        copy(hidden, tree, path)
    for path in task["removed"]:
        remove(os.path.join(tree, path))
    for path in sorted(filter(lambda path: is_folder(agents[path]), agents), reverse=True):
        folder = os.path.join(tree, path)  # which must be filled before it is closed
        if os.path.isdir(folder) and not os.path.islink(folder):
            os.chmod(folder, agents[path].st_mode & 0o777)
    return dropped


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
    for path, status in entries(tree).items():
        if stat.S_ISREG(status.st_mode) and rules.is_test(path) and path.endswith((".py", ".txt", ".rst", ".md")):
            texts[path] = (content(tree, path) or b"").decode(errors="replace")
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
        remove(os.path.join(LOGS, name))
    with open(os.path.join(HERE, "task.json")) as file:
        task = json.load(file)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
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
