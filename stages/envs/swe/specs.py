"""Environment specifications of repository versions, and how the tests of an instance are run in them.

A specification comes from swebench's table where a release that has it is installed. The table of repositories and
versions was removed from swebench in release 5, which requires an image and a script in every row instead. Without the
table the specification is guessed: the repository declares what it needs, which suffices for repositories that install
on a current Python.
"""

import re
import secrets
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from composer_stages.envs.repo import grading
from composer_stages.envs.repo.grading import TestOutcomes, TestRuntime
from composer_stages.envs.repo.guest.composer_rules import NEUTRAL
from composer_stages.envs.swe.instances import touched_paths
from composer_stages.swebench import logs
from composer_stages.swebench.lists import Statuses, TestLists

DJANGO = "./tests/runtests.py --verbosity 2 --settings=test_sqlite --parallel 1"
SYMPY = "bin/test -C --verbose"
COMMANDS = {"django/django": DJANGO, "sympy/sympy": SYMPY}
OWN_RUNNERS = (DJANGO, SYMPY)
"""Commands that do not run pytest; every other one does, directly or through tox."""
PYTEST = "pytest"
PYTEST_OPTIONS = ("-p", "no:cacheprovider", "-q", "--tb=short")
GUESSED = "the repository itself"
IN_PLACE = re.compile(r"(pip install(?: -(?!e\b)\S+)* )\.")
"""A plain `pip install .` would leave a copy of the repository in the environment, maybe of a later commit."""
HERE = f"{sys.version_info.major}.{sys.version_info.minor}"
GONE = re.compile(r"^(?:rename from (.*?)|--- a/(?=.*\n\+\+\+ /dev/null)(.*?))(?:\t.*)?\r?$", re.MULTILINE)
"""Head of a file in a patch that is not there afterwards."""
EXIT_CODE = ">>>>> Test Exit Code"
"""Words before the exit code of the tests that a script prints."""
LOG_WORDS = {outcome: word for word, outcome in logs.OUTCOMES.items()} | {"xpassed": "XPASS"}
SEVERITY = {"passed": 0, "xfailed": 1, "skipped": 2, "xpassed": 3, "failed": 4, "error": 5}


@dataclass(frozen=True)
class EnvironmentSpec:
    """The contents of the environment of a repository version, and the command that runs its tests.

    Of the files in `requirements` the first that exists is installed. `eval_commands` run before the tests.
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


def spec_of(row: Mapping[str, Any]) -> EnvironmentSpec:
    """Return the specification of a row from swebench's table where it is installed, else a guess by its repository."""
    repo = str(row["repo"])
    with suppress(ImportError):
        from swebench.harness.constants import MAP_REPO_TO_REQS_PATHS, MAP_REPO_VERSION_TO_SPECS

        versions = MAP_REPO_VERSION_TO_SPECS.get(row["repo"], {})
        if str(row.get("version")) in versions:
            requirements = tuple(MAP_REPO_TO_REQS_PATHS.get(row["repo"], ()))
            return spec_from_table(row["repo"], versions[str(row["version"])], requirements)
    runner = () if repo in COMMANDS or repo == "pytest-dev/pytest" else ("pytest",)
    return EnvironmentSpec(HERE, packages=runner, test_command=COMMANDS.get(repo, PYTEST))


def spec_from_table(repo: str, entry: Mapping[str, Any], requirements: tuple[str, ...] = ()) -> EnvironmentSpec:
    """Return the specification of an entry of swebench's table; `requirements` are the repository's known files."""

    def words(value: Any) -> tuple[str, ...]:
        return (value,) if isinstance(value, str) else tuple(value or ())

    packages = str(entry.get("packages", ""))
    by_file = packages == "requirements.txt"
    command = entry.get("test_cmd", PYTEST)
    last = command[-1] if isinstance(command, list) else command
    return EnvironmentSpec(
        python=str(entry.get("python", HERE)),
        # Lines that change the system (apt-get, locales) were made for the root of a container.
        pre_install=tuple(
            line for line in words(entry.get("pre_install")) if "apt-get" not in line and "locale" not in line
        ),
        packages=(
            *(() if by_file or packages == "environment.yml" else packages.split()),
            *words(entry.get("pip_packages")),
        ),
        requirements=(*requirements, "requirements.txt") if by_file else (),
        install=IN_PLACE.sub(r"\1-e .", str(entry.get("install", ""))),
        test_command=COMMANDS.get(repo, last if "pytest" in last else PYTEST),
        eval_commands=words(entry.get("eval_commands")),
        needs_conda=packages == "environment.yml",
        source="swebench's table",
    )


@dataclass(frozen=True)
class InstanceTests:
    """The test files of one instance and the specification by which they are run."""

    spec: EnvironmentSpec
    repo: str
    files: tuple[str, ...]

    def filtered(self, lists: TestLists) -> TestLists:
        """Drop names from the lists that are no tests: `[100%]` and its like were parsed from a test's output.

        Any other name is one that SWE-bench asks for: where no test has it, the instance is not resolved.

        Where no name of `fail_to_pass` looks like a test, all stay: with an empty list anything would be resolved.
        """
        if self.spec.test_command in OWN_RUNNERS:
            return lists
        # With `[100%]` in its lists pytest-5227 was unresolved with its own gold patch.
        groups = (lists.fail_to_pass, lists.pass_to_pass)
        fail_to_pass, pass_to_pass = (tuple(name for name in names if not name.startswith("[")) for names in groups)
        return replace(lists, fail_to_pass=fail_to_pass or lists.fail_to_pass, pass_to_pass=pass_to_pass)

    def run(self, runtime: TestRuntime, tree: Path) -> TestOutcomes:
        """Run the tests on a tree that may be written to.

        Without pytest the outcomes are read from the log between two words that nothing inside knows beforehand; what
        tests print there is trusted.
        """
        before = "".join(f"{command}\n" for command in self.spec.eval_commands)
        if self.spec.test_command not in OWN_RUNNERS:
            reported = grading.run_pytest(runtime, tree, [*PYTEST_OPTIONS, *self.files], before=before)
            return replace(reported, statuses=statuses_by_log_name(reported.nodes, self.repo))
        files = " ".join(self.files)
        if self.spec.test_command == DJANGO:  # its labels are modules: tests/app/tests.py is app.tests
            labels = (re.sub(r"^tests/", "", path.removesuffix(".py")).replace("/", ".") for path in self.files)
            command = f"{DJANGO} {' '.join(labels)}"
        else:
            command = f"PYTHONWARNINGS='ignore::UserWarning,ignore::SyntaxWarning' {SYMPY} {files}"
        secret = secrets.token_hex(16)
        result = runtime.run(tree, f"{before}echo {secret}; {command}; echo; echo {secret} $?")
        parts = result.output.split(secret)
        # A third occurrence is tampering; fewer than two, and the command did not end by itself.
        text = parts[1] if len(parts) == 3 else ""
        statuses = logs.to_outcomes(logs.log_parser(self.repo)(text))
        return TestOutcomes(statuses, len(parts) > 3, result.output.replace(secret, ""), result.timed_out)


def instance_tests(row: Mapping[str, Any], spec: EnvironmentSpec) -> InstanceTests:
    """Return the tests of a row: the files that its test patch changes, as in SWE-bench, and does not take away."""
    gone = {path for pair in GONE.findall(row["test_patch"]) for path in pair}
    files = [path for path in touched_paths(row["test_patch"]) if path.endswith(".py") and path not in gone]
    return InstanceTests(spec, row["repo"], tuple(files))


def statuses_by_log_name(nodes: Mapping[str, str], repo: str) -> Statuses:
    """Convert outcomes by node id to the names of the lists, as parsing a log of `pytest -rA` gives them.

    Of several under one name the worst counts. A skipped test has no status: the summary of pytest folds skips
    (`SKIPPED [1] file:line: reason`) and names none, so that for swebench (4.1.0, harness/log_parsers/python.py) a test
    that pytest skips is missing, and fails.
    """
    ordered = sorted(nodes.items(), key=lambda item: SEVERITY[item[1]])
    reported = {node: outcome for node, outcome in ordered if outcome not in NEUTRAL}
    log = "".join(f"{LOG_WORDS[outcome]} {node}\n" for node, outcome in reported.items())
    # Lists of other programs have names with blanks in full.
    full_names = {node: outcome for node, outcome in reported.items() if " " in node}
    return full_names | logs.to_outcomes(logs.log_parser(repo)(log))


def run_eval_script(row: Mapping[str, Any], runtime: TestRuntime, tree: Path) -> TestOutcomes:
    """Run the script of a row of the newer shape, and read the outcomes from its log."""
    result = runtime.run(tree, f"set -o pipefail; exec 2>&1\n{row['eval_script']}")
    parts = result.output.split(logs.START)
    text = parts[1].split(logs.END)[0] if len(parts) == 2 and logs.END in parts[1] else ""
    statuses = logs.to_outcomes(logs.whole_names(text) | logs.NAMED_PARSERS[row["log_parser"]](text))
    # As swebench 5.0.2 (harness/grading.py: get_logs_eval): a log without a failure is not that of tests that failed.
    code = re.search(rf"{re.escape(EXIT_CODE)}:\s*(-?\d+)", result.output)
    if code and code[1] != "0" and not {"failed", "error"} & set(statuses.values()):
        statuses = {}
    return TestOutcomes(statuses, len(parts) > 2, result.output, result.timed_out)
