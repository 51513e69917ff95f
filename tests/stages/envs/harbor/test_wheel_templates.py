"""The templates of harbor's wheel, with their blanks filled in, are played: solutions get 1, and nothing gets 0.

They are what people begin with who write tasks for Harbor. `harbor task init` writes a task of one step or several,
whose verifier has the agent's container or, by default, one of its own; the wheel holds further ones: of an adapter for
a benchmark, of reviews by an agent, and of compiled tasks. What a template leaves open is filled in, and what needs the
internet (pytest by uvx, packages of apt) is replaced by what an image without network has; all else is theirs.
"""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from needs import needs
from support import real_harbor
from support.harbor import SHELL
from support.sample_package import write
from support.scripted_runs import played

from composer_stages.runs.kinds import ROLLOUT

PYTEST = "python3 -m pytest -p no:cacheprovider /tests/test_outputs.py -rA"
CRITERIA = '["clear", "correct"]'
OUTCOMES = '{{"outcome": "pass", "explanation": "It is."}}'.format()
RESULTS = {
    "cli/annotator/annotate-task-template": ("annotate-result.json", '{"readme": "# A", "description": "A."}'),
    "analyze/analyze-task-template": (
        "analysis.json",
        f'{{"summary": "Fine.", "checks": {{"clear": {OUTCOMES}, "correct": {OUTCOMES}}}}}',
    ),
    "analyze/check-task-template": ("check-result.json", f'{{"clear": {OUTCOMES}, "correct": {OUTCOMES}}}'),
}
"""Template of a task for an agent that reviews -> the file that it is asked for, and one that is right."""
COMPILED = """\
schema_version = "1.4"
artifacts = ["/app/score.json"]

[environment]
docker_image = "python:3.13-slim"
workdir = "/app"
network_mode = "no-network"
"""


def greeting(file: str) -> dict[str, str]:
    """The instruction and the solution of a task to write hello into a file."""
    solution = f"{SHELL}echo hello > {file}\n"
    return {"instruction.md": f"Write hello into {file}.\n", "solution/solve.sh": solution}


def write_all(folder: Path) -> list[str]:
    """Write a task of each template, without network, and return their names."""
    python = real_harbor.interpreter()
    assert python is not None
    where = subprocess.run(
        [python, "-c", "import harbor; print(harbor.__path__[0])"], capture_output=True, text=True, check=True
    )
    wheel = Path(where.stdout.strip())
    program = Path(python).with_name("harbor")
    for name, *more in (
        ("init", "--verifier-mode", "shared"),
        ("init-plain", "--verifier-mode", "shared", "--no-pytest"),
        ("init-steps", "--verifier-mode", "shared", "--steps", "2"),
        ("init-separate",),
    ):
        folder.mkdir(parents=True, exist_ok=True)
        words = [str(program), "task", "init", f"own/{name}", "--tasks-dir", str(folder), *more]
        subprocess.run(words, capture_output=True, check=True)
    for step, above in (("", "init/"), ("1", "init-steps/steps/step-1/"), ("2", "init-steps/steps/step-2/")):
        file = f"/app/hello{step}.txt"
        test = folder / above / "tests" / "test.sh"
        text = test.read_text()
        tools = text[text.index("apt-get update") : text.index("; then")]
        test_outputs = f"def test_outputs():\n    assert open('{file}').read() == 'hello\\n'\n"
        write(
            folder / above / "tests", {"test.sh": text.replace(tools, f"if {PYTEST}"), "test_outputs.py": test_outputs}
        )
        write(folder / above, greeting(file))
    _separate(folder / "init-separate")
    plain, grade = folder / "init-plain", '[ "$(cat /app/hello.txt)" = hello ] && echo 1 > $R || echo 0 > $R\n'
    test = (plain / "tests/test.sh").read_text() + f"\nR=/logs/verifier/reward.txt\n{grade}"
    write(plain, {**greeting("/app/hello.txt"), "tests/test.sh": test})
    _adapter(wheel / "cli/template-adapter/task-template", folder / "adapter")
    for template, (file, right) in RESULTS.items():
        place = folder / Path(template).name
        shutil.copytree(wheel / template, place)
        filled = {
            "instruction.md": f"Write /app/{file}.\n",
            "solution/solve.sh": f"{SHELL}cat > /app/{file} <<'END'\n{right}\nEND\n",
            "tests/criteria.json": CRITERIA,
        }
        write(place, {**filled, "task.toml": (place / "task.toml").read_text() + 'network_mode = "no-network"\n'})
    compiled = folder / "compiled"
    shutil.copytree(wheel / "compile/compiled-task-template/tests", compiled / "tests")
    (compiled / "tests" / "auto-verify-artifacts.sh").rename(compiled / "tests" / "test.sh")
    write(
        compiled,
        {
            "task.toml": COMPILED,
            "instruction.md": "Write your score into /app/score.json.\n",
            "tests/required-artifacts.txt": "/app/score.json\n",
            "tests/reward-artifact.txt": "/app/score.json\n",
            "solution/solve.sh": f'{SHELL}echo \'{{"reward": 1, "speed": 0.5}}\' > /app/score.json\n',
        },
    )
    for task in folder.iterdir():
        # harbor wants the folder, also where it holds nothing: the wheel's own code makes it.
        (task / "environment").mkdir(exist_ok=True)
    for toml in folder.glob("*/task.toml"):
        text = toml.read_text().replace("[metadata]", '[metadata]\nsplit = "train"', 1)
        text = text if "[metadata]" in text else f'{text}\n[metadata]\nsplit = "train"\n'
        toml.write_text(text.replace('network_mode = "public"', 'network_mode = "no-network"'))
    return sorted(path.name for path in folder.iterdir())


def _separate(place: Path) -> None:
    """Fill in a task whose verifier has a container of its own, which gets the file of the agent as an artifact."""
    toml, test = (place / "task.toml").read_text(), (place / "tests/test.sh").read_text()
    dockerfile = (place / "tests/Dockerfile").read_text()
    tools = dockerfile[dockerfile.index("COPY --from") : dockerfile.index("WORKDIR")]
    write(
        place,
        {
            **greeting("/app/hello.txt"),
            "task.toml": toml.replace("artifacts = []", 'artifacts = ["/app/hello.txt"]'),
            "tests/Dockerfile": dockerfile.replace(tools, ""),
            "tests/test.sh": test.replace(test[test.index("if pytest") : test.index("; then")], f"if {PYTEST}"),
            "tests/test_outputs.py": "def test_outputs():\n    assert open('/app/hello.txt').read() == 'hello\\n'\n",
        },
    )


def _adapter(template: Path, place: Path) -> None:
    """Fill in the template of an adapter; git of apt is left out, which needs the internet."""
    shutil.copytree(template, place)
    toml = (place / "task.toml").read_text()
    blanks = {"TODO_ORG/{{ADAPTER_ID}}__{task_id}": "own/adapter__1", "TODO: author@email.com": "a@b.org"}
    for blank, value in blanks.items():
        toml = toml.replace(blank, value)
    test = (place / "tests/test.sh").read_text()
    dockerfile = (place / "environment/Dockerfile").read_text()
    packages = dockerfile[dockerfile.index("# Install system") : dockerfile.index("# Install Python")]
    write(
        place,
        {
            "task.toml": toml,
            "instruction.md": (place / "instruction.md").read_text().replace("{{PROBLEM_STATEMENT}}", "Write hello."),
            "environment/Dockerfile": dockerfile.replace(packages, ""),
            "solution/solve.sh": (place / "solution/solve.sh").read_text() + "\necho hello > /workspace/hello.txt\n",
            "tests/test.sh": test.replace(
                "# Generate reward", "grep -qx hello /workspace/hello.txt\n\n# Generate reward"
            ),
        },
    )


@needs("harbor")
@pytest.mark.slow
def test_the_templates_of_harbors_wheel_are_played(tmp_path: Path) -> None:
    names = write_all(tmp_path / "tasks")
    assert len(names) == 9
    assert len(real_harbor.judged([tmp_path / "tasks" / name for name in names])) == 9
    env = {"name": "harbor", "path": str(tmp_path / "tasks"), "runs_in": "bubblewrap"}
    for policy, reward in (("reference", 1.0), ("noop", 0.0)):
        rows = played(tmp_path, policy, env, tasks=9, samples=1, max_steps=8).rows(ROLLOUT)
        assert {row["task_id"]: row["reward"] for row in rows if row["reward"] != reward} == {}
        metrics = {row["task_id"]: json.loads(row["metrics_json"]) for row in rows if row["metrics_json"]}
        assert metrics["compiled"] == {"speed": 0.5} if reward else "compiled" not in metrics
