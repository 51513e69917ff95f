"""What the documents say is true: every block is executed, every name exists, every message is explained.

The blocks of a document are executed in their order, in one folder, as a reader would. A block with a title is a file
and is written there. A model's name that a document uses is a folder there with a tiny model in it; the servers that it
names are one on loopback. Recipes of `./dev` that take minutes stand in blocks marked `<!-- recipes -->`: they are
expanded by `just`, and every command that they would run is held against the program.
"""

import ast
import inspect
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
from support.blocks import execute
from support.command_line import environment
from support.foreign import document
from support.models import save_tiny
from support.server import Reply, answer, serving
from support.shelf import SHELF, write
from typer import TyperException
from typer.main import get_command

from composer_cli import launch
from composer_cli import preset as presets
from composer_cli.app import app
from composer_cli.executors.names import EXECUTORS, found
from composer_cli.positionals import read
from composer_cli.settings import known
from composer_cli.stage_command import SHORTCUTS
from stages import STAGES, envs
from stages.errors import UsageError
from stages.runs.runner import module

ROOT = Path(__file__).parents[1]
PAGES = [*sorted(ROOT.glob("docs/**/*.md"))]
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "artifacts" / "README.md",
    ROOT / "examples" / "README.md",
    *PAGES,
]
FRESH = {"guide.md"}
"""Documents that begin with no runs at all."""
SLOW = {"guide.md"}
"""It trains and evaluates three arms."""
MODELS = ("Qwen/Qwen3-8B",)
SERVERS = ("https://openrouter.ai/api/v1", "http://127.0.0.1:8000/v1")
BIN = Path(sys.executable).parent
BLOCK = re.compile(
    r"(?:^<!-- (?P<mark>\w+) -->\n)?"
    r'^(?P<fence>```+)(?P<language>\w+)(?: title="(?P<title>[^"]+)")?\n(?P<text>.*?)^(?P=fence)$',
    re.M | re.S,
)
FENCE = re.compile(r"^(```+)([^\n]*)\n.*?^\1$", re.M | re.S)
STUDENT = ("cat solution.py", "sed -i 's|return .*|return u + v|' solution.py", "python3 test_solution.py", "submit")
TEACHER = ("cat solution.py", "sed -i 's|return .*|return u * v|' solution.py", "cat test_solution.py", "ls")


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, the file that it is, its mark, and the line that it begins on."""

    language: str
    title: str | None
    mark: str | None
    text: str
    line: int


def blocks(path: Path) -> list[Block]:
    """The blocks of a document that have a language; those without one are pictures."""
    text = path.read_text()
    return [
        Block(m["language"], m["title"], m["mark"], m["text"], text.count("\n", 0, m.start()) + 1)
        for m in BLOCK.finditer(text)
    ]


def commands(block: str) -> list[list[str]]:
    """The words of each command of a shell block, comments and line continuations taken care of."""
    lines = block.replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


# --- executed


def reply(asked: dict[str, Any], earlier: int) -> Reply:
    """Teachers disagree with the student at every step but the first."""
    del earlier
    turn = sum(message["role"] == "assistant" for message in asked["messages"])
    said = STUDENT if asked["model"] in MODELS else TEACHER
    return Reply(body=answer(f"```bash\n{said[min(turn, 3)]}\n```"))


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
    document(folder / "logs" / "sums.json", INSPECT_LOG)
    document(folder / "trajectories" / "a.traj.json", MINI_SWE_TRAJECTORY)
    return folder


def executed() -> list[Any]:
    """The documents, those marked slow that train several models."""
    marks = {path: [pytest.mark.slow] if path.name in SLOW else [] for path in DOCUMENTS}
    return [pytest.param(path, marks=mark, id=str(path.relative_to(ROOT))) for path, mark in marks.items()]


@pytest.mark.parametrize("path", executed())
def test_the_blocks_of_a_document_run(path: Path, made: Path, shared: Path, url: str, tmp_path: Path) -> None:
    for item in shared.iterdir():
        (tmp_path / item.name).symlink_to(item)
    if path.name not in FRESH:
        shutil.copytree(made, tmp_path / "artifacts", symlinks=True)
    search = os.pathsep.join([str(ROOT), *stand_ins()])
    env = environment(tmp_path / "artifacts", PYTHONPATH=search, OPENROUTER_API_KEY="k", TRL_EXPERIMENTAL_SILENCE="1")
    for block in blocks(path):
        if block.mark == "recipes":
            continue
        text = block.text
        for server in SERVERS:
            text = text.replace(server, url)
        if block.title:
            (tmp_path / block.title).write_text(text)
        jobs: list[str | list[str]] = [text] if block.language == "python" else []
        if block.language == "sh":
            assert all(words[0] == "composer" for words in commands(text)), f"{path}:{block.line}: only composer is run"
            jobs = [words[1:] for words in commands(text)]
        assert jobs or (block.language == "toml" and block.title), f"{path}:{block.line}: nothing executes this block"
        for job in jobs:
            code, printed = execute(job, tmp_path, env)
            gate = code == 1 and "Collection gate" in printed and "FAIL" in printed  # tiny models say random things
            assert code == 0 or gate, f"{path}:{block.line}: {job} ended with {code}\n{printed[-4000:]}"


def stand_ins() -> list[str]:
    """Where stand-ins for frameworks lie that are not installed."""
    folder = ROOT / "tests" / "support" / "stand_ins"
    missing = [name for name in ("openenv", "minisweagent") if find_spec(name) is None or _stands_in(name)]
    return [str(folder)] if missing else []


def _stands_in(name: str) -> bool:
    spec = find_spec(name)
    return spec is not None and "stand_ins" in str(spec.origin)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_marked_recipes_exist_and_run_what_exists(path: Path) -> None:
    for block in blocks(path):
        assert block.mark in (None, "recipes"), f"{path}:{block.line}: no such mark"
        if block.mark == "recipes":
            for words in commands(block.text):
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
        name, rest, parent=get_command(app).make_context("composer", [], resilient_parsing=True)
    ).params
    if name in STAGES:
        said, _ = read(name, given.get("words") or [])
        values = {key: given.get(word) for word, key in SHORTCUTS.items() if word != "teachers"}
        short = [*said, *launch.shortcuts(name, values, None, given.get("limit"))]
        launch.configure(name, [], short, given["set_"] or [])
    if name == "run":
        presets.configure(presets.load(given["preset"]), [])


def find(words: list[str]) -> tuple[str, Any, list[str]]:
    """The command that words name, and the words after its name; probe's commands go by their stage's name."""
    commands_ = get_command(app).commands
    if words[0] == "probe" and len(words) > 1:
        return f"probe-{words[1]}", commands_["probe"].commands[words[1]], words[2:]
    return words[0], commands_[words[0]], words[1:]


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


# --- generated


def test_generated_parts_are_as_the_program_says() -> None:
    tool = [BIN / "cog", "--check", *[path for path in DOCUMENTS if "[[[cog" in path.read_text()]]
    done = subprocess.run(tool, capture_output=True, text=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, f"{done.stdout}{done.stderr} Run `./dev docs`."


def test_every_command_is_documented() -> None:
    text = (ROOT / "README.md").read_text()
    assert [name for name in get_command(app).commands if f"`composer {name}`" not in text] == []


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) < 220


def test_the_picture_shows_stages_that_exist() -> None:
    shown = set(re.findall(r'class="stage"[^>]*>([^<]+)<', (ROOT / "docs" / "images" / "arrows.svg").read_text()))
    assert shown and shown <= STAGES.keys()


# --- messages


def test_every_message_of_the_program_is_explained_and_every_explanation_has_its_message() -> None:
    tool = runpy.run_path(str(ROOT / "docs" / "errors.py"))
    missing = [f"{message.place}: {message.text}" for message in tool["without_entry"]()]
    assert missing == [], (
        "docs/troubleshooting.md explains none of these; `python docs/errors.py --skeleton` gives rows"
    )
    assert tool["without_message"]() == [], "these rows of docs/troubleshooting.md fit no message any more"


@pytest.mark.parametrize(
    ("entry", "message", "fits"),
    [
        ("There is no stage …", "There is no stage …. The stages are: ….", True),
        ("There is no stage … are", "There is no stage …. The stages are: ….", True),
        ("The stages are … There is", "There is no stage …. The stages are: ….", False),
        ("There is no statue", "There is no stage …. The stages are: ….", False),
    ],
)
def test_an_entry_belongs_to_the_messages_that_hold_its_words(entry: str, message: str, fits: bool) -> None:
    assert runpy.run_path(str(ROOT / "docs" / "errors.py"))["belongs"](entry, message) == fits


# --- names

SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
WORD = re.compile(r"[A-Za-z_][\w-]*(?:\.[A-Za-z_]\w*)*")
FILE = re.compile(r"\.(py|md|toml|txt|json|jsonl|parquet|svg|html|log|gz|open|j2|yml)$")
PLACEHOLDER = re.compile(r"\b[A-Z][A-Z_]*\b")
"""KEY, VALUE, RUN: what the reader puts in."""
FOREIGN = {
    "prime-rl": {"orchestrator", "rl", "auto", "turn"},
    "OpenEnv": {"uvicorn serve:application", "pip install openenv"},
    "mini-swe-agent": {"pip install --no-deps mini-swe-agent", "python-dotenv", "platformdirs", "DefaultAgent"},
    "vLLM": {
        "vllm serve Qwen/Qwen3-8B --host 127.0.0.1",
        "--dtype auto",
        "--logprobs-mode processed_logprobs",
    },
    "pip": {"pip install swebench"},
    "Slurm": {"--requeue"},
    "Hugging Face": {"hf auth login", "hf buckets sync hf://buckets/OWNER/NAME artifacts"},
    "Modal": {"modal token new", "pip install modal", "modal volume get VOLUME / artifacts"},
    "git": {"git tag", "git push"},
    "torchft": {"--heartbeat_timeout_ms", "--join_timeout_ms", "--min_replicas"},
    "shell": {"PATH", "PYTHONPATH", "zcat steps/*.jsonl.gz"},
}
"""Words of other programs, by whose they are."""


def spans(path: Path) -> list[str]:
    """The code spans of a document outside its blocks and outside generated parts' source."""
    text = FENCE.sub("", re.sub(r"<!--.*?-->", "", path.read_text(), flags=re.S))
    return SPAN.findall(text)


@cache
def source() -> frozenset[str]:
    """Every word of the program, its tests' support, its recipes and settings files."""
    patterns = ("stages/**/*.py", "stages/**/*.toml", "composer_cli/**/*.*", "tests/support/**/*.py", "docs/*.py")
    single = ("justfile", "dev", "pyproject.toml", "mkdocs.yml", "tests/conftest.py", "constraints.txt")
    paths = [*(path for pattern in patterns for path in ROOT.glob(pattern)), *(ROOT / name for name in single)]
    texts = [path.read_text(errors="replace") for path in paths if path.is_file() and path.suffix != ".pyc"]
    return frozenset(word for text in texts for form in (r"[\w-]+", r"\w+") for word in re.findall(form, text))


@cache
def settings() -> frozenset[str]:
    """The keys of every stage's settings, and the options of every environment as `env.OPTION`."""
    keys = {key for stage in STAGES for key, _ in known(module(stage).Config)}
    folders = {".".join(key.split(".")[:i]) for key in keys for i in range(1, key.count(".") + 1)}
    options = {f"env.{name}" for target in envs.ENVIRONMENTS for name in _options(target)}
    return frozenset(keys | folders | options | {f"{key}.options" for key in folders})


def _options(name: str) -> list[str]:
    """The options of an environment's constructor."""
    return list(inspect.signature(resolve_name(envs.ENVIRONMENTS[name].environment)).parameters)


@cache
def options() -> frozenset[str]:
    """Every option of every command."""
    every = [*get_command(app).commands.values(), *get_command(app).commands["probe"].commands.values()]
    return frozenset(o for command in every for parameter in command.params for o in parameter.opts) | {
        "--help",
        "--version",
    }


@cache
def recipes() -> frozenset[str]:
    """The recipes of `./dev`."""
    done = subprocess.run([BIN / "just", "--summary"], cwd=ROOT, capture_output=True, text=True, check=True)
    return frozenset(done.stdout.split())


def wrong_names(span: str, path: Path) -> list[str]:
    """What a code span names that does not exist."""
    if any(span in words for words in FOREIGN.values()):
        return []
    words = span.split()
    if words[0] == "./dev":
        return [w for w in words[1:2] if w not in recipes() and not PLACEHOLDER.fullmatch(w)]
    wrong = []
    if words[0] == "composer" and len(words) > 1 and not PLACEHOLDER.fullmatch(words[1]):
        with_probe = words[1:3] if words[1] == "probe" else words[1:2]
        try:
            find(with_probe)
        except KeyError:
            return [span]
        words = words[1 + len(with_probe) :]
        words = [w for i, w in enumerate(words) if w.startswith("-") or (i and words[i - 1] in ("--set", "-s"))]
    for i, word in enumerate(words):
        if word.startswith("--") and len(word) > 2:
            wrong += [word] if word.partition("=")[0] not in options() else []
        elif "=" in word and i and words[i - 1] in ("--set", "-s"):
            wrong += [] if is_setting(word.partition("=")[0]) else [word]
        elif word.startswith("-"):
            continue
        elif "/" in word or FILE.search(word):
            wrong += [] if there(word, path) else [word]
        else:
            wrong += [w for w in WORD.findall(word) if w not in own_words(path) and not exists(w)]
    return wrong


def there(name: str, path: Path) -> bool:
    """Whether a path exists in the tree, beside the document, as part of a run, or as a model's name."""
    name = name.strip("(),;").rstrip("/")
    roots = (ROOT, path.parent, ROOT / "stages", ROOT / "docs")
    if any((root / name).exists() or ("*" in name and any(root.glob(name))) for root in roots):
        return True
    if name in {block.title for block in blocks(path)}:
        return True
    if name.partition("/")[0] in {"stages", "composer_cli", "tests", "docs", "benchmarks", "examples"}:
        return False
    if re.fullmatch(r"[a-z_]+/\d", name):
        return name.partition("/")[0] in source()
    parts = [part for part in re.split(r"[/*.:]+", name) if part]
    return all(PLACEHOLDER.fullmatch(part) or part in source() or part in FILES_OF_A_RUN for part in parts)


@cache
def own_words(path: Path) -> frozenset[str]:
    """The words of a document's own blocks, which are executed."""
    return frozenset(word for block in blocks(path) for word in re.findall(r"\w+", block.text))


def is_setting(key: str) -> bool:
    """Whether a key is a setting of a stage, one of an entry of a preset, or a form with placeholders of one."""
    key = key.replace("env.options.", "env.")
    first, _, rest = key.partition(".")
    if first == "on":
        return any(rest == name or rest.startswith(f"{name}.") for name in where())
    if PLACEHOLDER.fullmatch(key.rpartition(".")[2]):
        return not first or first == "env" or bool(PLACEHOLDER.fullmatch(first))
    return key in settings() or (first in STAGES and rest in settings())


@cache
def where() -> frozenset[str]:
    """The settings of all executors, without the `on.` before them."""
    return frozenset(key for word in EXECUTORS for key, _ in known(found(word).settings))


FILES_OF_A_RUN = {
    "gz",
    "open",
    "jsonl",
    "json",
    "parquet",
    "log",
    "artifacts",
    "1",
    "000000",
    "attempt-1",
    "venv",
    "bin",
}


def exists(word: str) -> bool:
    """Whether a word is a setting, a module, or a word of the program's source."""
    if PLACEHOLDER.fullmatch(word) and word not in source():
        return True
    if word in settings() or word in source():
        return True
    if word.startswith(("stages.", "composer_cli.")):
        return importable(word)
    return all(part in source() for part in re.split(r"[.-]", word))


def importable(name: str) -> bool:
    """Whether a dotted name is a module, or a name in one."""
    parts = name.split(".")
    for i in range(len(parts), 0, -1):
        for file in (ROOT.joinpath(*parts[:i]).with_suffix(".py"), ROOT.joinpath(*parts[:i], "__init__.py")):
            if file.is_file():
                return i == len(parts) or parts[i] in {
                    node.id if isinstance(node, ast.Name) else getattr(node, "name", "")
                    for node in ast.walk(ast.parse(file.read_text()))
                }
    return False


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_name_in_a_document_exists(path: Path) -> None:
    if path.name == "troubleshooting.md":
        pytest.skip("its first column is checked against the messages; the others are checked below")
    assert [f"{span}: {wrong}" for span in spans(path) for wrong in wrong_names(span, path)] == []


def test_every_name_in_the_ways_out_exists() -> None:
    path = ROOT / "docs" / "troubleshooting.md"
    rows = [line.split(" | ", 1)[-1] if line.startswith("| `") else line for line in path.read_text().splitlines()]
    assert [f"{s}: {w}" for row in rows for s in SPAN.findall(row) for w in wrong_names(s, path)] == []


@pytest.mark.parametrize(
    "wrong",
    [
        "composer colect",
        "--polcy",
        "./dev demmo",
        "stages/nowhere.py",
        "stages.runs.nowhere",
        "--set tsaks=3",
        "policy.modell",
        "RolloutFunktion",
    ],
)
def test_a_wrong_name_is_found(wrong: str) -> None:
    assert wrong_names(wrong, ROOT / "README.md")


LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(#[^)\s]+)?\)")


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_leads_somewhere(path: Path) -> None:
    site = runpy.run_path(str(ROOT / "docs" / "pages.py")) if find_spec("mkdocs") else {"ROOT_PAGES": ROOT_PAGES}
    for target, _ in LINK.findall(path.read_text()):
        if path.is_relative_to(ROOT / "docs") and target in site["ROOT_PAGES"]:
            continue
        assert not target or (path.parent / target).exists(), f"{path}: {target}"


@pytest.mark.skipif(find_spec("mkdocs") is None, reason="mkdocs is absent: the reference's packages were not compared")
def test_the_reference_holds_every_package() -> None:
    site = runpy.run_path(str(ROOT / "docs" / "pages.py"))
    assert set(site["PACKAGES"]) == {path.parent.name for path in (ROOT / "stages").glob("*/__init__.py")}


ROOT_PAGES = ("index.md", "runs.md", "contributing.md", "results.md", "changelog.md")

INSPECT_LOG = {
    "version": 2,
    "status": "success",
    "eval": {"task": "sums", "model": "openai/m", "scorers": [{"name": "match"}]},
    "plan": {"config": {"max_tokens": 5}},
    "samples": [
        {
            "id": 1,
            "epoch": epoch,
            "input": "1+1?",
            "target": "2",
            "messages": [
                {"role": "user", "content": "1+1?", "source": "input"},
                {"role": "assistant", "content": said, "source": "generate"},
            ],
            "output": {"choices": [{"stop_reason": "stop"}], "usage": {"input_tokens": 4, "output_tokens": 1}},
            "scores": {"match": {"value": value}},
            "events": [],
        }
        for epoch, said, value in ((1, "2", "C"), (2, "3", "I"))
    ],
}
MINI_SWE_TRAJECTORY = {
    "info": {
        "mini_version": "1.15.0",
        "config": {"model": {"model_name": "some/model", "model_kwargs": {"temperature": 0.0}}},
        "exit_status": "Submitted",
        "submission": "",
        "model_stats": {"instance_cost": 0.5, "api_calls": 1},
    },
    "messages": [
        {"role": "system", "content": "You fix."},
        {"role": "user", "content": "It breaks."},
        {"role": "assistant", "content": "Look.\n\n```bash\nls\n```"},
        {"role": "user", "content": "<returncode>0</returncode>\n<output>\na.py\n</output>"},
    ],
    "trajectory_format": "mini-swe-agent-1",
    "instance_id": "owner__repo-12",
}
