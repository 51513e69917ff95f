"""Every name that the documents use exists in the program, in its settings, or in a program that is named."""

import ast
import inspect
import re
import subprocess
from functools import cache
from pathlib import Path
from pkgutil import resolve_name

import pytest
import typer

from composer_cli.app import click_command
from composer_cli.executors.base import EXECUTORS, load
from composer_cli.help import describe_settings
from composer_stages import STAGES, envs
from composer_stages.runs.settings import known
from composer_stages.runs.stage import load_stage
from tests.docs.documents import BIN, DOCUMENTS, FENCE, ROOT, blocks, find

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
        "--max-logprobs",
    },
    "pip": {"pip install swebench"},
    "PyPI": {"errorbars", "evalconfidence", "paired-eval"},
    "Linux": {"sysinfo"},
    "inspect_ai": {"judge1"},
    "Python": {"Fraction", "object.__subclasses__()"},
    "Slurm": {"--requeue"},
    "reasoning-gym": {"countdown", "rubiks_cube", "--set env.config.max_words=3"},
    "Hugging Face": {"hf auth login", "hf buckets sync hf://buckets/OWNER/NAME artifacts"},
    "Modal": {"modal token new", "modal volume get VOLUME / artifacts"},
    "git": {"git tag", "git push"},
    "shell": {"PATH", "PYTHONPATH", "zcat steps/*.jsonl.gz", ">/dev/null"},
}
"""Words of other programs, by whose they are."""
FOLDERS = ("stages", "composer_cli", "composer_post_training")
PACKAGES = ("composer_stages", "composer_cli", "composer_post_training")


def spans(path: Path) -> list[str]:
    """The code spans of a document outside its blocks and outside generated parts' source."""
    text = FENCE.sub("", re.sub(r"<!--.*?-->", "", path.read_text(), flags=re.S))
    return SPAN.findall(text)


@cache
def source() -> frozenset[str]:
    """Every word of the program, its tests' support, its recipes and settings files."""
    own = ("stages/**/*.py", "stages/**/*.toml", "composer_cli/**/*.*", "composer_post_training/*.py")
    patterns = (*own, "tests/support/**/*.py", "docs/*.py")
    single = ("justfile", "dev", "pyproject.toml", "mkdocs.yml", "tests/conftest.py", "constraints.txt")
    paths = [*(path for pattern in patterns for path in ROOT.glob(pattern)), *(ROOT / name for name in single)]
    texts = [path.read_text(errors="replace") for path in paths if path.is_file() and path.suffix != ".pyc"]
    return frozenset(word for text in texts for form in (r"[\w-]+", r"\w+") for word in re.findall(form, text))


@cache
def settings() -> frozenset[str]:
    """The keys of every stage's settings, and the options of every environment as `env.OPTION`."""
    keys = {key for stage in STAGES for key, _ in known(load_stage(stage).config)}
    folders = {".".join(key.split(".")[:i]) for key in keys for i in range(1, key.count(".") + 1)}
    options = {f"env.{name}" for target in envs.ENVIRONMENTS for name in _options(target)}
    return frozenset(keys | folders | options | {f"{key}.options" for key in folders})


def _options(name: str) -> list[str]:
    """The options of an environment's constructor."""
    return list(inspect.signature(resolve_name(envs.ENVIRONMENTS[name].environment)).parameters)


@cache
def options() -> frozenset[str]:
    """Every option of every command."""
    every = [*click_command().commands.values(), *click_command().commands["probe"].commands.values()]
    params = [param for command in every for param in command.get_params(typer.Context(command))]
    return frozenset(name for param in params for name in param.opts) | {"--help", "--version"}


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
    roots = (ROOT, path.parent, ROOT / "stages", ROOT / "docs", ROOT / "examples" / "plugin" / "composer_plugin")
    if any((root / name).exists() or ("*" in name and any(root.glob(name))) for root in roots):
        return True
    if name in {block.title for block in blocks(path)}:
        return True
    if name.partition("/")[0] in {*FOLDERS, "tests", "docs", "benchmarks", "examples"}:
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
    return frozenset(key for word in EXECUTORS for key, _ in known(load(word).settings))


FILES_OF_A_RUN = {
    *("gz", "open", "jsonl", "json", "parquet", "log"),
    *("artifacts", "1", "000000", "attempt-1", "venv", "bin", "~"),
}


def exists(word: str) -> bool:
    """Whether a word is a setting, a module, or a word of the program's source."""
    if PLACEHOLDER.fullmatch(word) and word not in source():
        return True
    if word in settings() or word in source():
        return True
    if word.startswith(tuple(f"{package}." for package in PACKAGES)):
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
    assert [f"{span}: {wrong}" for span in spans(path) for wrong in wrong_names(span, path)] == []


TREE = re.compile(
    r"(?<![\w./-])(?:from|import)\s+(?:(?:composer_)?stages|composer_cli)\b"
    r"|(?<![\w./-])(?:(?:composer_)?stages|composer_cli)\.[a-z_]+"
)
"""Packages that only a clone has under these names, or that are no interface, where Python would look for them."""


def test_documents_use_public_names_alone() -> None:
    """Their blocks, code and text; paths of files, and what generates a part of a document, are none."""
    texts = {path: re.sub(r"<!--.*?-->", "", path.read_text(), flags=re.S) for path in DOCUMENTS}
    assert {path: names for path, text in texts.items() if (names := TREE.findall(text))} == {}


def test_internal_module_names_are_detected() -> None:
    wrong = (
        "from composer_stages.envs import load",
        "import stages",
        "`composer_stages.errors.BadInput`",
        '"composer_stages.envs.kata.env:KataEnv"',
    )
    assert all(
        TREE.search(text) for text in (*wrong, "python -m composer_stages.train", "from composer_cli.app import main")
    )
    right = ("composer_post_training.stages", "stages/envs/base.py", "the stages. An")
    assert not any(TREE.search(text) for text in right)


def test_help_texts_and_messages_name_no_internal_module() -> None:
    rows = [row for stage in STAGES for row in describe_settings(load_stage(stage).config)]
    assert rows and [row for row in rows if TREE.search(row[-1])] == []
    assert [
        f"{path.relative_to(ROOT)}: {text}"
        for package in FOLDERS
        for path in (ROOT / package).rglob("*.py")
        for text in messages(path)
        if TREE.search(text)
    ] == []


def messages(path: Path) -> list[str]:
    """The texts of several words in a source that stand neither below what they document nor in a program."""
    nodes = [*ast.walk(ast.parse(path.read_text()))]
    documented = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    texts = [node for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return [node.value for node in texts if id(node) not in documented and " " in node.value and "\n" not in node.value]


@pytest.mark.parametrize(
    "wrong",
    [
        "composer colect",
        "--polcy",
        "./dev demmo",
        "stages/nowhere.py",
        "composer_stages.runs.nowhere",
        "--set tsaks=3",
        "policy.modell",
        "RolloutFunktion",
    ],
)
def test_a_wrong_name_is_found(wrong: str) -> None:
    assert wrong_names(wrong, ROOT / "README.md")
