# ruff: noqa: E501 - lines of templates
"""The templates of harbor's wheel, with their blanks filled in: what people begin with who write tasks for it.

`harbor task init` writes a task of one step or several. The wheel holds further ones: of an adapter for a benchmark, of
reviews by an agent, and of compiled tasks. What a template leaves open is filled in, and what needs the internet (pytest
by uvx, packages of apt) is replaced by what an image without network has; all else is theirs.
"""

import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from support import real_harbor

SHELL = "#!/bin/bash\n"
HELLO = "def test_outputs():\n    assert open('{path}').read() == '{text}\\n'\n"
PYTEST = "python3 -m pytest -p no:cacheprovider /tests/test_outputs.py -rA\n\nif ["
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


def write_all(folder: Path, image: str | None = None, *, network: bool = False) -> list[str]:
    """Write a task of each template and return their names.

    image: in place of those that the templates name. network: leave `network_mode = "public"`, which `harbor task init`
    writes.
    """
    python = real_harbor.interpreter()
    assert python is not None
    where = subprocess.run(
        [python, "-c", "import harbor; print(harbor.__path__[0])"], capture_output=True, text=True, check=True
    )
    wheel = Path(where.stdout.strip())
    program = Path(python).with_name("harbor")
    for name, more in (("init", ()), ("init-plain", ("--no-pytest",)), ("init-steps", ("--steps", "2"))):
        folder.mkdir(parents=True, exist_ok=True)
        words = [str(program), "task", "init", f"own/{name}", "--tasks-dir", str(folder), *more]
        subprocess.run(words, capture_output=True, check=True)
    for step, above in (("", "init/"), ("1", "init-steps/steps/step-1/"), ("2", "init-steps/steps/step-2/")):
        file = f"/app/hello{step}.txt"
        test = folder / above / "tests" / "test.sh"
        text = test.read_text()
        found = text[text.index("apt-get update") : text.index("if [")] + "if ["
        fill(folder / above / "tests", {"test.sh": text.replace(found, PYTEST), "test_outputs.py": hello(file)})
        solution = f"{SHELL}echo hello > {file}\n"
        fill(folder / above, {"instruction.md": f"Write hello into {file}.\n", "solution/solve.sh": solution})
    plain = folder / "init-plain"
    fill(
        plain,
        {
            "instruction.md": "Write hello into /app/hello.txt.\n",
            "solution/solve.sh": f"{SHELL}echo hello > /app/hello.txt\n",
            "tests/test.sh": (plain / "tests/test.sh").read_text()
            + '\n[ "$(cat /app/hello.txt)" = hello ] && echo 1 > /logs/verifier/reward.txt'
            " || echo 0 > /logs/verifier/reward.txt\n",
        },
    )
    _adapter(wheel / "cli/template-adapter/task-template", folder / "adapter")
    for template, (file, right) in RESULTS.items():
        place = folder / Path(template).name
        shutil.copytree(wheel / template, place)
        write = f"{SHELL}cat > /app/{file} <<'END'\n{right}\nEND\n"
        filled = {
            "instruction.md": f"Write /app/{file}.\n",
            "solution/solve.sh": write,
            "tests/criteria.json": CRITERIA,
        }
        fill(place, {**filled, "task.toml": (place / "task.toml").read_text() + 'network_mode = "no-network"\n'})
    compiled = folder / "compiled"
    shutil.copytree(wheel / "compile/compiled-task-template/tests", compiled / "tests")
    (compiled / "tests" / "auto-verify-artifacts.sh").rename(compiled / "tests" / "test.sh")
    fill(
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
        text = text if network else text.replace('network_mode = "public"', 'network_mode = "no-network"')
        text = text.replace("python:3.13-slim", image) if image else text
        toml.write_text(text)
    for dockerfile in folder.glob("*/environment/Dockerfile") if image else ():
        text = dockerfile.read_text().replace("ubuntu:24.04", image).replace("python:3.13-slim", image)
        dockerfile.write_text(text)
    return sorted(path.name for path in folder.iterdir())


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
    fill(
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


def hello(path: str) -> str:
    """The test of a file that holds hello."""
    return HELLO.format(path=path, text="hello")


def fill(folder: Path, files: Mapping[str, str]) -> None:
    """Write files; scripts are executable."""
    for path, text in files.items():
        place = folder / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
        place.chmod(0o755 if text.startswith("#!") else 0o644)
