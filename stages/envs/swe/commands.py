"""How the environment of an instance is made and how its tests are run: by swebench's table, or by a guess.

The table of repositories and versions went out of swebench with release 5, which wants an image and a script in every
row instead. Without it the repository says itself what it needs, which is enough for repositories that install on a
current Python.
"""

import re
import secrets
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stages.envs.repo import grading, trees
from stages.envs.repo.grading import NEUTRAL, Statuses, TestLists, TestOutcomes, TestRuntime
from stages.envs.swe import logs
from stages.envs.swe.logs import END, START, reader
from stages.errors import InfrastructureError, UsageError

# ---- mirrors
# Repositories that the user keeps: one git mirror each, read without changing it.


def find(folder: Path, repo: str) -> Path | None:
    """The git directory of `owner/name` below a folder, bare or checked out: owner__name, owner/name or name."""
    owner, _, name = repo.partition("/")
    for stem in (f"{owner}__{name}", f"{owner}/{name}", name):
        for path in (folder / stem, folder / f"{stem}.git", folder / stem / "repo"):
            for git in (path / ".git", path):
                if (git / "objects").is_dir() and (git / "HEAD").exists():
                    return git
    return None


def required(folder: Path, repo: str) -> Path:
    """The git directory, or a refusal that says how to make it."""
    mirror = find(folder, repo)
    if mirror is None:
        name = repo.replace("/", "__")
        raise UsageError(
            f"There is no mirror of {repo} in {folder} (`composer swe check` tells what else is lacking; "
            "`--env swe-mini` needs none). Make it with: "
            f"git clone --mirror https://github.com/{repo} {folder}/{name}.git"
        )
    return mirror


def extract(mirror: Path, commit: str, target: Path) -> None:
    """Write the files of a commit into an empty folder, through an index of its own: the mirror stays as it is.

    `InfrastructureError` where the mirror lacks the commit.
    """
    with trees.scratch() as beside:
        at = (f"--git-dir={mirror}", f"--work-tree={target}")
        index = {"GIT_INDEX_FILE": str(beside / "index")}
        try:
            trees.git(target, "-c", "safe.directory=*", *at, "read-tree", commit, env=index)
            trees.git(target, "-c", "safe.directory=*", *at, "checkout-index", "--all", "--force", env=index)
        except RuntimeError as error:
            raise InfrastructureError(
                f"The mirror {mirror} does not give commit {commit}: {error}. Fetch it again."
            ) from None


def patched(base: Path, patch: str) -> trees.Changes:
    """What a patch makes of the files that it touches. `InfrastructureError` when it does not apply to `base`."""
    with trees.scratch() as work:
        for path in touched(patch):
            if file := trees.read(base, path):
                trees.apply({path: file}, work)
        before = {path: trees.read(work, path) for path in trees.walk(work)}
        (work / ".patch").write_text(patch)
        try:
            trees.git(work, "apply", "--whitespace=nowarn", ".patch")
        except RuntimeError as error:
            raise InfrastructureError(f"The patch does not apply to the base commit: {error}.") from None
        (work / ".patch").unlink()
        after = {path: trees.read(work, path) for path in trees.walk(work)}
    return {path: after.get(path) for path in sorted({*before, *after}) if before.get(path) != after.get(path)}


def touched(patch: str) -> list[str]:
    """The paths that a patch changes, removes or creates."""
    heads = [line[4:] for line in patch.splitlines() if line.startswith(("--- ", "+++ "))]
    renamed = [line.split(" ", 2)[2] for line in patch.splitlines() if line.startswith(("rename from ", "rename to "))]
    named = [head.partition("\t")[0][2:] for head in heads if head.startswith(("a/", "b/"))]
    return list(dict.fromkeys([*named, *renamed]))


DJANGO = "./tests/runtests.py --verbosity 2 --settings=test_sqlite --parallel 1"
SYMPY = "bin/test -C --verbose"
COMMANDS = {"django/django": DJANGO, "sympy/sympy": SYMPY}
PYTEST = "pytest"
GUESSED = "the repository itself"
IN_PLACE = re.compile(r"(pip install(?: -(?!e\b)\S+)* )\.")
"""A plain `pip install .` would leave a copy of the repository in the environment, maybe of a later commit."""
HERE = f"{sys.version_info.major}.{sys.version_info.minor}"


@dataclass(frozen=True)
class Spec:
    """What the environment of a repository version holds, and how tests are run in it.

    Of the files in `requirements` the first that exists counts. `eval_commands` run before the tests.
    """

    python: str
    pre_install: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    requirements: tuple[str, ...] = ()
    install: str = "python -m pip install -e ."
    test_command: str = PYTEST
    eval_commands: tuple[str, ...] = ()
    needs_conda: bool = False
    source: str = GUESSED

    @property
    def uses_pytest(self) -> bool:
        """Whether the tests are run by pytest, be it through tox."""
        return self.test_command not in (DJANGO, SYMPY)


def spec_of(row: Mapping[str, Any]) -> Spec:
    """From swebench's table where a release that has it is installed, else what the repository's kind suggests."""
    try:
        from swebench.harness.constants import MAP_REPO_TO_REQS_PATHS, MAP_REPO_VERSION_TO_SPECS
    except ImportError:
        return _guessed(row)
    table = MAP_REPO_VERSION_TO_SPECS.get(row["repo"], {})
    if str(row.get("version")) not in table:
        return _guessed(row)
    return from_table(row["repo"], table[str(row["version"])], tuple(MAP_REPO_TO_REQS_PATHS.get(row["repo"], ())))


def from_table(repo: str, entry: Mapping[str, Any], requirements: tuple[str, ...] = ()) -> Spec:
    """An entry of swebench's table."""
    packages = str(entry.get("packages", ""))
    by_file = packages == "requirements.txt"
    command = entry.get("test_cmd", PYTEST)
    last = command[-1] if isinstance(command, list) else command
    return Spec(
        python=str(entry.get("python", HERE)),
        pre_install=tuple(
            line for line in _each(entry.get("pre_install")) if "apt-get" not in line and "locale" not in line
        ),
        packages=(
            *(() if by_file or packages == "environment.yml" else packages.split()),
            *_each(entry.get("pip_packages")),
        ),
        requirements=(*requirements, "requirements.txt") if by_file else (),
        install=IN_PLACE.sub(r"\1-e .", str(entry.get("install", ""))),
        test_command=COMMANDS.get(repo, last if "pytest" in last else PYTEST),
        eval_commands=_each(entry.get("eval_commands")),
        needs_conda=packages == "environment.yml",
        source="swebench's table",
    )


def _each(value: Any) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value or ())


def _guessed(row: Mapping[str, Any]) -> Spec:
    repo = str(row["repo"])
    runner = () if repo in COMMANDS or repo == "pytest-dev/pytest" else ("pytest",)
    return Spec(HERE, packages=runner, test_command=COMMANDS.get(repo, PYTEST))


WORDS = {outcome: word for word, outcome in logs.OUTCOMES.items()} | {"xpassed": "XPASS"}
WORST_LAST = {"passed": 0, "xfailed": 1, "skipped": 2, "xpassed": 3, "failed": 4, "error": 5}
NO_TESTS = (
    *(".json", ".png", ".csv", ".txt", ".md", ".jpg", ".jpeg", ".pkl", ".yml", ".yaml", ".toml"),
    *(".cfg", ".rst", ".svg"),
)
"""Endings of files that a test patch brings and that are no tests."""
PYTEST_OPTIONS = ("-p", "no:cacheprovider", "-q", "--tb=short")


@dataclass(frozen=True)
class Tests:
    """How the tests of one instance are run."""

    spec: Spec
    repo: str
    files: tuple[str, ...]

    def counting(self, lists: TestLists) -> TestLists:
        """The lists without names that are no tests: a few, such as `[100%]`, were read from a test's own output.

        Where none of those that must come to pass looks like a test, all stay: without one, anything is resolved.
        """
        if not self.spec.uses_pytest:
            return lists
        groups = (lists.fail_to_pass, lists.pass_to_pass)
        fail_to_pass, pass_to_pass = (tuple(name for name in names if "::" in name) for names in groups)
        return replace(lists, fail_to_pass=fail_to_pass or lists.fail_to_pass, pass_to_pass=pass_to_pass)

    def run(self, runtime: TestRuntime, tree: Path) -> TestOutcomes:
        """Run them on a tree that may be written to."""
        if self.spec.uses_pytest:
            return self._by_pytest(runtime, tree)
        return self._by_log(runtime, tree)

    def _by_pytest(self, runtime: TestRuntime, tree: Path) -> TestOutcomes:
        reported = grading.run_pytest(runtime, tree, [*PYTEST_OPTIONS, *self.files], before=self._before())
        return replace(reported, statuses=named(reported.nodes, self.repo))

    def _by_log(self, runtime: TestRuntime, tree: Path) -> TestOutcomes:
        """The log between two words that nothing inside knows beforehand; what is printed there is believed."""
        secret = secrets.token_hex(16)
        command = f"{self._before()}echo {secret}; {self.command()}; echo; echo {secret} $?"
        result = runtime.run(tree, command)
        parts = result.output.split(secret)
        text = parts[1] if len(parts) == 3 else ""
        statuses = logs.outcomes(logs.dialect(self.repo)(text))
        return TestOutcomes(statuses, len(parts) > 3, result.output.replace(secret, ""), result.timed_out)

    def _before(self) -> str:
        return "".join(f"{command}\n" for command in self.spec.eval_commands)

    def command(self) -> str:
        """The command line for people and for logs."""
        if self.spec.test_command == DJANGO:
            return f"{DJANGO} {' '.join(map(django_label, self.files))}"
        if self.spec.test_command == SYMPY:
            return f"PYTHONWARNINGS='ignore::UserWarning,ignore::SyntaxWarning' {SYMPY} {' '.join(self.files)}"
        return f"python -m pytest -rA {' '.join(self.files)}"


def tests_of(row: Mapping[str, Any], spec: Spec) -> Tests:
    """The files that the test patch changes are the tests that are run, as SWE-bench does it."""
    files = [path for path in touched(row["test_patch"]) if not path.endswith(NO_TESTS)]
    return Tests(spec, row["repo"], tuple(dict.fromkeys(files)))


def django_label(path: str) -> str:
    """tests/app/tests.py as Django's runner calls it."""
    return re.sub(r"^tests/", "", path.removesuffix(".py")).replace("/", ".")


def named(nodes: Mapping[str, str], repo: str) -> Statuses:
    """Outcomes by node id under the names that the lists have, as a log of `pytest -rA` would have given them.

    Of several under one name the worst counts. A skipped test has no status: the summary of pytest folds skips
    (`SKIPPED [1] file:line: reason`) and names none, so that for swebench (4.1.0, harness/log_parsers/python.py) a test
    that pytest skips is missing, and fails.
    """
    ordered = sorted(nodes.items(), key=lambda item: WORST_LAST[item[1]])
    log = "".join(f"{WORDS[outcome]} {node}\n" for node, outcome in ordered if outcome not in NEUTRAL)
    return logs.outcomes(logs.dialect(repo)(log))


def scripted(row: Mapping[str, Any]) -> Callable[[TestRuntime, Path], TestOutcomes]:
    """The tests of a row of the newer shape, which brings its own script.

    Its log is read by swebench where that is installed, else by ours.
    """

    def run(runtime: TestRuntime, tree: Path) -> TestOutcomes:
        result = runtime.run(tree, f"set -o pipefail; exec 2>&1\n{row['eval_script']}")
        parts = result.output.split(START)
        text = parts[1].split(END)[0] if len(parts) == 2 and END in parts[1] else ""
        statuses = logs.outcomes(reader(row)(text))
        return TestOutcomes(statuses, len(parts) > 2, result.output, result.timed_out)

    return run
