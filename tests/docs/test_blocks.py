"""Every block of the documents is executed.

The blocks of a document are executed in their order, in one folder, as a reader would. A block with a title is a file
and is written there. A block of the language `text` is what the block before it prints, as doctest compares: `...` may
be anything; names of runs, dates and durations may differ. A model's name that a document uses is a folder there with a
tiny model in it; the servers that it names are one on loopback. Recipes of `./dev` that take minutes stand in blocks
marked `<!-- recipes -->`: `just` expands them, and every command that they would run is held against the program.
"""

import doctest
import inspect
import json
import os
import re
import shlex
import shutil
import subprocess
import tarfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from needs import package
from support.blocks import execute, execute_installed
from support.command_line import environment, repair
from support.models import save_tiny
from support.sample_package import SHELF, write
from support.server import Reply, answer, serving
from support.transcripts import document
from typer import TyperException

import composer_post_training as composer
from composer_cli import call
from composer_cli.app import click_command
from composer_cli.preset import configure_preset, load_preset
from composer_cli.stage_command import read_positionals, typed_settings
from composer_stages import STAGES
from composer_stages.errors import UsageError
from tests.docs.documents import BIN, DOCUMENTS, ROOT, blocks, commands, find
from tests.stages.formats.test_inspect_logs import log, sample
from tests.stages.formats.test_mini_swe_agent import trajectory

FRESH = {"quickstart.md", "tutorial-verdict.md"}
"""Documents that begin with no runs at all."""
AFTER = {"tutorial-verdict.md": "tutorial.md"}
"""A page that goes on where another ends: both are executed in one folder."""
ALWAYS = {"README.md", "python.md", "environments.md", "workers.md"}
"""Documents that are executed in every run of the tests: of commands, of Python, and of files of either language."""
Execute = Callable[[str | list[str], Path, dict[str, str]], tuple[int, str]]
"""What runs Python source, or the words after `composer`, in a folder: returns the exit code and what was printed."""
MODELS = ("Qwen/Qwen3-8B",)
SERVERS = ("https://openrouter.ai/api/v1", "http://127.0.0.1:8000/v1")
VARYING = re.compile(
    r"\d{8}T\d{6}Z|(?<=[\w]-)[0-9a-f]{6}\b|\d{4}-\d\d-\d\dT[\d:]+\S*|[\d.]+ (?P<unit>ms|s|min|minutes)\b", re.ASCII
)
"""What differs from run to run: the date and the fingerprint in a run's name, dates, and durations."""
QUICKSTART = {
    "median()": (
        "Let me look at the function first.\n\n```bash\ncat stats.py\n```",
        """The even case needs the mean of both middle numbers.

```bash
cat > stats.py <<'EOF'
def median(numbers):
    ordered = sorted(numbers)
    half = len(ordered) // 2
    if len(ordered) % 2:
        return ordered[half]
    return (ordered[half - 1] + ordered[half]) / 2
EOF
python3 -c "from stats import median; print(median([4, 1, 3, 2]))"
```""",
        "```bash\nsubmit\n```",
    ),
    "slug(title)": (
        """```bash
cat > slug.py <<'EOF'
def slug(title):
    return title.lower().replace(" ", "-")
EOF
python3 -c "from slug import slug; print(slug('Hello World'))"
```""",
        "```bash\nsubmit\n```",
    ),
    "is_leap()": (
        "```bash\nsed -i 's/year % 100 != 0/(year % 100 != 0 or year % 400 == 0)/' years.py && cat years.py\n```",
        "```bash\nsubmit\n```",
    ),
    "chunks(items, size)": (
        "Rounding up is enough.\n\n```bash\nsed -i 's|len(items) // size|-(-len(items) // size)|' chunks.py\n```",
        "```bash\nsubmit\n```",
    ),
    "roman(number)": ("Let me see what is there.\n\n```bash\nls -l; cat roman.py\n```",),
}
"""A word of each prompt of the quickstart, and what the model says there, turn by turn; at last it repeats itself."""


def reply(asked: dict[str, Any], earlier: int) -> Reply:
    """Teachers disagree with the student at every step but the first."""
    turn = sum(message["role"] == "assistant" for message in asked["messages"])
    prompt = asked["messages"][1]["content"]
    for word, turns in QUICKSTART.items():
        if word in prompt:
            # Half of the rollouts know that signs are to be left out.
            said = turns[min(turn, len(turns) - 1)]
            if asked["seed"] % 2:
                said = said.replace(
                    "title.lower()", '"".join(c for c in title.lower() if c.isalnum() or c == " ").strip()'
                )
            return Reply(body=answer(said, 100 + len(str(asked["messages"])) // 4, len(said) // 4))
    return repair({**asked, "model": "scripted" if asked["model"] in MODELS else "other"}, earlier)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """The base URL of a server for every model that a document names."""
    with serving(reply) as server:
        yield server.url


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What readers have lying about: models, a package, files of other programs."""
    folder = tmp_path_factory.mktemp("shared")
    for name in MODELS:
        save_tiny(folder / name)
    package = write(folder / "toolz-1.2.0", SHELF)
    with tarfile.open(folder / "toolz-1.2.0.tar.gz", "w:gz") as archive:
        archive.add(package, arcname=package.name)
    (folder / "examples").symlink_to(ROOT / "examples")
    (folder / "tasks.jsonl").symlink_to(ROOT / "examples" / "tasks.jsonl")  # which the tutorial's reader copies
    document(folder / "logs" / "sums.json", log(sample(), sample(epoch=2, value="I")))
    acted = {"role": "assistant", "content": "Look.\n\n```bash\nls\n```"}
    document(folder / "trajectories" / "a.traj.json", trajectory(acted))
    for name, passed in (("before", 15), ("after", 45), ("again", 17)):
        rows = (json.dumps({"id": f"task-{at}", "score": int(at < passed)}) for at in range(60))
        (folder / f"{name}.jsonl").write_text("".join(f"{row}\n" for row in rows))
    return folder


def executed(fast: set[str] = ALWAYS) -> list[Any]:
    """The documents, all but a few of them marked slow."""
    slow = [pytest.mark.slow, pytest.mark.timeout(900)]  # the tutorial trains fifteen times
    marks = {path: [] if path.name in fast else slow for path in DOCUMENTS if path.name not in AFTER.values()}
    return [pytest.param(path, path.name, marks=mark, id=str(path.relative_to(ROOT))) for path, mark in marks.items()]


@pytest.fixture
def folder(made: Path, shared: Path, request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A reader's folder: models, packages and files of other programs, and the runs that a document takes for given."""
    for item in shared.iterdir():
        (tmp_path / item.name).symlink_to(item)
    if getattr(request, "param", None) not in FRESH:
        shutil.copytree(made, tmp_path / "artifacts", symlinks=True)
    return tmp_path


def of_reader(folder: Path, *tree: Path) -> dict[str, str]:
    """The environment of commands and programs in a reader's folder; with the tree where Composer is not installed."""
    search = os.pathsep.join([*map(str, tree), *stand_ins()])
    return environment(
        folder / "artifacts", COLUMNS="120", PYTHONPATH=search, OPENROUTER_API_KEY="k", TRL_EXPERIMENTAL_SILENCE="1"
    )


@pytest.mark.parametrize(("path", "folder"), executed(), indirect=["folder"])
def test_the_blocks_of_a_document_run(path: Path, folder: Path, url: str) -> None:
    for page in pages(path):
        run_blocks(page, folder, url, execute, of_reader(folder, ROOT))


@pytest.mark.parametrize(("path", "folder"), executed(fast=set()), indirect=["folder"])
def test_the_blocks_of_a_document_run_where_composer_is_installed(
    path: Path, folder: Path, url: str, installed: Path
) -> None:
    """With the wheel alone: what only a clone has, such as the package `composer_stages`, is not found."""
    for page in pages(path):
        run_blocks(page, folder, url, partial(execute_installed, installed), of_reader(folder))


def pages(path: Path) -> list[Path]:
    """A document after the one that it goes on from."""
    return [*([path.with_name(AFTER[path.name])] if path.name in AFTER else []), path]


def run_blocks(path: Path, folder: Path, url: str, execute: Execute, env: dict[str, str]) -> None:
    said = ""
    examples = [block for block in blocks(path) if block.language == "pycon"]
    for block in blocks(path):
        if block.mark == "recipes" or block in examples[:-1]:  # the examples are one session
            continue
        if block.language == "text":
            assert (wrong := difference(block.text, said)) == "", f"{path}:{block.line}: {wrong}"
            continue
        said, text = "", session([one.text for one in examples]) if block in examples else block.text
        for server in SERVERS:
            text = text.replace(server, url)
        if block.title:
            (folder / block.title).parent.mkdir(parents=True, exist_ok=True)
            (folder / block.title).unlink(missing_ok=True)  # not the file that a link leads to
            (folder / block.title).write_text(text)
        jobs: list[str | list[str]] = [text] if block.language in ("python", "pycon") else []
        if block.language == "sh":
            assert all(words[0] == "composer" for words in commands(text)), f"{path}:{block.line}: only composer is run"
            jobs = [words[1:] for words in commands(text)]
        assert jobs or (block.language in ("toml", "json", "yaml") and block.title), (
            f"{path}:{block.line}: nothing executes this block"
        )
        for job in jobs:
            code, printed = execute(job, folder, env)
            said += printed.replace(str(folder) + "/", "")
            checks = code == 1 and "Collection checks" in printed and "FAIL" in printed  # tiny models say random things
            # What so little can show.
            undecided = code == 3 and any(
                word in printed for word in ("UNDERPOWERED", "TOO LITTLE DATA", "Too few to say")
            )
            # A chain to the end has the code of the first stage that did not pass its own checks.
            to_the_end = code == 1 and "Every entry was run." in printed
            assert code == 0 or checks or undecided or to_the_end, (
                f"{path}:{block.line}: {job} ended with {code}\n{printed[-4000:]}"
            )


def test_the_examples_of_the_python_interface_run(folder: Path, url: str) -> None:
    (folder / "chain.toml").write_text('[[stage]]\nstage = "collect"\nconfig = { tasks = 2 }\n')
    stages = [stage.replace("-", "_") for stage in STAGES]  # an example of a stage may use the run of one before it
    rest = sorted({*composer.__all__} - {*stages}, key=lambda name: (inspect.isclass(getattr(composer, name)), name))
    named = [getattr(composer, name) for name in (*(one for one in stages if hasattr(composer, one)), *rest)]
    members = [member for one in named if inspect.isclass(one) for member in vars(one).values()]
    texts = [inspect.getdoc(one) or "" for one in (*named, *members) if callable(one) or isinstance(one, property)]
    parser = doctest.DocTestParser()
    examples = [one for text in dict.fromkeys(texts) for one in parser.get_examples(text)]
    lines = [f">>> {one.source.rstrip().replace(chr(10), chr(10) + '... ')}\n{one.want}" for one in examples]
    text = session([">>> import composer_post_training as composer\n", *lines])
    for server in SERVERS:
        text = text.replace(server, url)
    code, printed = execute(text, folder, of_reader(folder, ROOT))
    assert code == 0, printed[-4000:]


def session(examples: list[str]) -> str:
    """Python source that executes the examples of a session in their order, and compares what is printed as doctest."""
    lines = (
        "import doctest, sys",
        f"test = doctest.DocTestParser().get_doctest({(chr(10) * 2).join(examples)!r}, {{}}, 'session', None, 0)",
        "sys.exit(doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test).failed)",
    )
    return "\n".join(lines)


def difference(shown: str, printed: str) -> str:
    """Say how what a document shows differs from what was printed; "" where it does not."""
    lines = [
        [" ".join(VARYING.sub(lambda found: found["unit"] or "run", line).split()) for line in text.splitlines()]
        for text in (shown, printed)
    ]
    # A line begins and ends with a newline of its own, and a line of `...` has none: it may be no line at all.
    texts = ["".join(line if line == "..." else f"\n{line}\n" for line in text if line) for text in lines]
    if doctest.OutputChecker().check_output(*texts, doctest.ELLIPSIS):
        return ""
    return f"the document shows\n{shown}\nand the program printed\n{printed}"


@pytest.mark.parametrize(
    ("shown", "printed", "same"),
    [
        ("a 1\n...\nd\n", "a 1\nb\nc\nd\n", True),
        ("a 1\n...\nd\n", "a 2\nb\nd\n", False),
        ("...\nb\n", "a\nb\nc\n", False),
        ("...\nb 2\n", "b  2\n", True),
        ("...\nb\n", "ab\n", False),
        ("a ... c\n", "a 1 c\n", True),
        ("artifacts/collect/20261123T205120Z-kata-af4ef9\n", "artifacts/collect/20270101T000000Z-kata-000000\n", True),
        (
            "began 2026-11-23T20:51:20+00:00, 1 attempt, 1 s\n",
            "began 2027-01-01T00:00:00+00:00, 1 attempt, 25 s\n",
            True,
        ),
        ("began 2026-11-23T20:51:20+00:00, 1 attempt\n", "began 2027-01-01T00:00:00+00:00, 2 attempts\n", False),
    ],
)
def test_what_a_document_shows_is_compared_with_what_was_printed(shown: str, printed: str, same: bool) -> None:
    assert (difference(shown, printed) == "") == same


def stand_ins() -> list[str]:
    """Where stand-ins for frameworks lie that are not installed."""
    folder = ROOT / "tests" / "support" / "stand_ins"
    return [] if package("openenv", "minisweagent")() else [str(folder)]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_marked_recipes_exist_and_run_what_exists(path: Path) -> None:
    for block in blocks(path):
        assert block.mark in (None, "recipes"), f"{path}:{block.line}: no such mark"
        if block.mark == "recipes":
            for words in commands(block.text):
                if words != ["source", ".venv/bin/activate"]:
                    check(words)


def check(words: list[str]) -> None:
    """Fail unless the command, its options and its settings exist, or the recipe, and whatever it would run."""
    if words[0] == "./dev":
        done = subprocess.run([BIN / "just", "--dry-run", *words[1:]], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        lines = [line.removeprefix("OMP_NUM_THREADS=1 ") for line in done.stderr.splitlines()]
        for line in lines:
            if line.startswith("composer "):
                check(shlex.split(line))
        return
    assert words[0] == "composer", f"nobody checks {words[0]}"
    name, command, rest = find(words[1:])
    given = command.make_context(
        name, rest, parent=click_command().make_context("composer", [], resilient_parsing=True)
    ).params
    if name in STAGES:
        said, _ = read_positionals(name, given.get("words") or [])
        call.configure(name, [], [*said, *typed_settings(name, {**given, "teachers": None})])
    if name == "run":
        configure_preset(load_preset(given["preset"]), [])


@pytest.mark.parametrize(
    "wrong",
    [
        "composer colect",
        "composer collect --polcy x",
        "composer collect --set tsaks=3",
        "./dev demmo",
        "rm -r artifacts",
    ],
)
def test_a_wrong_command_is_found(wrong: str) -> None:
    with pytest.raises((UsageError, TyperException, KeyError, AssertionError)):
        check(shlex.split(wrong))
