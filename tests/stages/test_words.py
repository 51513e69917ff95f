"""Every refusal has a sentence, gets the values that it shows, and is raised by the class of its table."""

import ast
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest
from jinja2 import meta
from support import sentences

from composer_post_training.words import PYTHON
from composer_stages import errors, words
from composer_stages.errors import BadInput, ComposerError, UsageError
from composer_stages.words import CallOption, Command, FromRun, Sentence, Setting

ROOT = Path(__file__).parents[2]
TABLES = {
    "usage": UsageError,
    "input": BadInput,
    "incomplete": errors.Incomplete,
    "infrastructure": errors.InfrastructureError,
    "failed": ComposerError,
    "breakdown": errors.Breakdown,
    "remark": Sentence,
}
FUNCTIONS = {"option", "setting", "command", "stage_command", "from_run", "did_you_mean"}
CONTEXT = {*words.COMMAND_LINE.words, *FUNCTIONS, "range"}


def calls() -> Iterator[tuple[str, int, str, str, set[str] | None]]:
    """File, line, class, code and names of values of each call with a code; None for values that are not named."""
    for package in ("stages", "composer_cli", "composer_post_training"):
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
                    code, name = node.args[0].value, ast.unparse(node.func).rpartition(".")[2]
                    if isinstance(code, str) and words._entry(code):
                        keys = [keyword.arg for keyword in node.keywords]
                        yield str(path), node.lineno, name, code, None if None in keys else {*filter(None, keys)}


def every_code() -> list[str]:
    return [f"{room}.{name}".lstrip(".") for room in sentences.rooms() for name in words.entries(room)]


def test_every_sentence_is_used_and_gets_the_values_that_it_shows() -> None:
    environment, used, wrong = words._environment(), set[str](), list[str]()
    for path, line, name, code, keys in calls():
        used.add(code)
        table, template = words._entry(code) or ("", "")
        needed = meta.find_undeclared_variables(environment.parse(template)) - CONTEXT
        if keys and keys & CONTEXT and (hasattr(errors, name) or name == "Sentence"):
            wrong.append(f"{path}:{line}: {code} gets {keys & CONTEXT}, which templates have from the interface")
        if keys is not None and needed - keys:
            wrong.append(f"{path}:{line}: {code} shows {needed - keys}, which it does not get")
        if keys is not None and isinstance(getattr(errors, name, None), type) and keys - needed - {"most", "again"}:
            wrong.append(f"{path}:{line}: {code} does not show {keys - needed}")
        if hasattr(errors, name) and getattr(errors, name) is not TABLES[table]:
            wrong.append(f"{path}:{line}: {code} is in the table {table}, and is raised as {name}")
    assert wrong == []
    assert [code for code in every_code() if code not in used] == []


def test_every_template_compiles_and_a_code_stands_in_one_table() -> None:
    assert all(words._template(code) for code in every_code())
    for room in sentences.rooms():
        assert len(words.entries(room)) and all(table in TABLES for table, _ in words.entries(room).values())


def test_the_table_of_sentences_is_of_this_program() -> None:
    """`./dev sentences` writes it again; a reviewer reads there what users will."""
    assert sentences.FILE.read_text("utf-8") == sentences.table()


def test_a_refusal_is_data() -> None:
    error = UsageError("runs.folder-holds-this-run", folder="a/b", state="2 of 4 done")
    assert error.exit_code == 2 and error.remedies == [
        CallOption("resume"),
        CallOption("clean"),
        CallOption("out", "FOLDER"),
    ]
    assert str(error) == (
        "a/b already holds this run (2 of 4 done). Use --resume to go on, --clean to start again, or --out FOLDER to "
        "write elsewhere."
    )
    error.interface = PYTHON
    assert "Use resume=True to go on, clean=True to start again, or out='FOLDER' to write" in str(error)
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error) and again.values == error.values


@pytest.mark.parametrize(
    ("remedy", "command_line", "python"),
    [
        (CallOption("resume"), "--resume", "resume=True"),
        (CallOption("env", "kata"), "--env kata", "env='kata'"),
        (CallOption("max-cost"), "--max-cost", "`max_cost`"),
        (Setting("policy.max_tokens", 8), "--set policy.max_tokens=8", "policy={'max_tokens': 8}"),
        (Command(("probe", "svd", "--resume")), "composer probe svd --resume", "probe.svd(resume=True)"),
        (Command(("status",)), "composer status", "runs()"),
        (Command(("collect", "--help", "--all")), "composer collect --help --all", "collect.settings()"),
        (FromRun(), "with --from RUN", "as an argument"),
    ],
)
def test_a_remedy_is_written_as_each_interface_takes_it(remedy: words.Remedy, command_line: str, python: str) -> None:
    assert words.COMMAND_LINE.remedy(remedy) == command_line and PYTHON.remedy(remedy) == python


def test_a_text_of_a_users_environment_is_a_sentence_itself() -> None:
    error = BadInput("The file {{ name }} of my environment is empty.")
    assert str(error) == "The file {{ name }} of my environment is empty." and error.remedies == []
    assert str(BadInput("nowhere.at-all")) == "nowhere.at-all"


def test_the_options_of_a_refusal_are_written_for_each_interface() -> None:
    error = errors.not_a_folder(Path("a/b"), "artifacts", "out")
    assert str(error) == "a/b is a file, not a folder. Choose another place with --artifacts or --out."
    error.interface = PYTHON
    assert str(error).endswith("Choose another place with `artifacts` or `out`.")


def test_values_are_no_templates_and_sentences_in_values_are_rendered_too() -> None:
    inner = Sentence("runs.file-missing", path="{{ 7 * 7 }}")
    assert inner == "{{ 7 * 7 }} does not exist." and pickle.loads(pickle.dumps(inner)).filled == inner.filled
    assert str(BadInput("runs.run-damaged", run_path="r", damage=inner)).startswith("r: {{ 7 * 7 }} does not exist.")
