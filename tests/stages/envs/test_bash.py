"""Commands in messages of an agent: which one is run, and which edit files, run tests or have faults."""

import pytest

from composer_stages.envs.base import Observation
from composer_stages.envs.bash import ActionError, edits_files, fenced, find_faults, parse_bash, runs_tests


@pytest.mark.parametrize("command", ["ls", "a\nb", "cat <<'X'\n`one`\nX", "  indented", 'echo "```bash"'])
def test_a_fenced_command_comes_back_verbatim_and_other_text_does_not_count(command: str) -> None:
    assert parse_bash(f"I look first.\n```python\nx = 1\n```\n{fenced(command)}\nThen I wait.") == command


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "found none"),
        ("ls", "found none"),
        ("```\nls\n```", "found none"),
        ("```sh\nls\n```", "found none"),
        (fenced("ls") + "\n" + fenced("pwd"), "found 2 of them"),
        ("```bash\n\n```", "is empty"),
        ("```bash\n```", "is empty"),
        ("```bash\nls", "does not end"),
        (fenced("ls") + "\n```bash\npwd", "does not end"),
    ],
)
def test_a_malformed_message_is_explained(text: str, said: str) -> None:
    with pytest.raises(ActionError, match=said):
        parse_bash(text)


EDITS = [
    "sed -i s/a/b/ solution.py",
    "sed -e s/a/b/ -i solution.py",
    "cat > /work/src/a.py <<'EOF'\nprint(1)\nEOF",
    "cat >> notes.txt <<EOF\nx\nEOF",
    "git apply fix.patch",
    "cd /repo && git apply <<'EOF'\ndiff\nEOF",
    "python3 - <<'EOF'\nopen('a.py', 'w').write('x')\nEOF",
    "python - <<EOF\nfrom pathlib import Path\nPath('a').write_text('x')\nEOF",
    "python3 -c \"open('a', 'w').write('1')\"",
    "patch -p1 < fix.diff",
    "echo 'a > b' > file.txt",
    "printf x | tee a.py",
    "perl -pi -e s/a/b/ a.py",
    "mv a b",
    "grep -rlZ foo . | xargs -0 -n 1 sed -i s/foo/bar/",
    "find . -name '*.py' -exec sed -i s/a/b/ {} +",
    "cat > ./tests/test_a.py <<'EOF'\nassert 1\nEOF",
    "pytest -q > out.txt; sed -i s/a/b/ a.py",
    "sed -i s/a/b/ ./tests/test_a.py",
]
NO_EDITS = [
    *("ls", "python3 test_solution.py 2>&1", "pytest -q >/dev/null", "pytest -q > /dev/null 2>&1"),
    *("grep -n 'a > b' a.py", "python3 - <<'EOF'\nprint(3 > 2)\nEOF", "grep -rn patch src", "cat fix.patch"),
    *("git diff", "python -c 'f = lambda x: x -> 1'", "cat a.py 2> err.txt", "sed -n 1,20p a.py"),
    *("pytest -q 2>&1 | tee out.txt", "go test ./... |& tee log", "bash ./run_tests.sh &> log"),
    "cd /repo && python -m pytest -x > /tmp/out.txt 2>&1; tail /tmp/out.txt",
]
TESTS = [
    *("pytest -q", "python3 test_solution.py", "python -m unittest", "tox -e py311", "make", "make -j4 check"),
    *("go test ./...", "cargo test", "cd x && cargo build 2>&1 | tail", "npm test", "./run_tests.sh"),
    *("bash -x ./run_tests.sh", "cd x && ./test/run"),
]
NO_TESTS = [
    *("cat tests/test_a.py", "ls tests/", "git log", "echo makefile", "cat go.mod", "vi Makefile", "grep 'pytest' a"),
    *("sed -i s/a/b/ ./tests/test_a.py", "cat > ./tests/test_a.py <<'EOF'\nassert 1\nEOF"),
]


@pytest.mark.parametrize("command", [*EDITS, *NO_EDITS])
def test_what_edits_is_told_from_what_only_looks_like_it(command: str) -> None:
    assert edits_files(command) == (command in EDITS)


@pytest.mark.parametrize("command", [*TESTS, *NO_TESTS])
def test_what_tests_is_told_from_what_only_looks_like_it(command: str) -> None:
    assert runs_tests(command) == (command in TESTS)


def ran(command: str, output: str = "", code: int = 0) -> Observation:
    return Observation(f"{output}[exit {code}]", commands=(command,), returncode=code)


@pytest.mark.parametrize("between", ["git diff", "python3 a.py 2>&1"])
@pytest.mark.parametrize("tests", [*TESTS[:4], "pytest 2>&1", "pytest 2>&1 | tee out.txt"])
def test_a_failing_test_is_the_fault_of_the_edit_before_it(between: str, tests: str) -> None:
    (fault,) = find_faults([ran("ls"), ran(EDITS[0]), ran(between), ran(tests, "FAIL: 3, not 2\n", 1)])
    assert (fault.turn, fault.kind) == (1, "failing_test") and "FAIL: 3, not 2" in fault.advice


def test_without_an_edit_nothing_is_at_fault() -> None:
    assert find_faults([ran("pytest", "FAIL\n", 1)]) == []
    assert find_faults([ran("sed -i s/a/b/ a.py"), ran("pytest", "ok\n")]) == []
