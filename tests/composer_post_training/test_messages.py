"""Every message that Python can show says what to do in Python."""

import ast
import re
import signal
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path

import pytest
import typer

import composer_post_training as composer
from composer_cli.app import click_command
from composer_post_training.messages import FUNCTIONS, ONLY_COMMANDS, errors_in_python, translate_message
from stages import STAGES, command_words
from stages.stopping import Interrupted

ROOT = Path(__file__).parents[2]
ONLY_COMMAND_LINE = (
    *("app", "commands", "options", "tasks", "tuning", "serve", "help", "stage_command"),
    *("executors/", "view/"),
)
"""Parts of `composer_cli` whose sentences the functions of Python do not show."""
WITHOUT_FUNCTION = ("serve", "publish", "swe check", *ONLY_COMMANDS, "…")
"""Commands that exist on the command line alone, or that the source does not name."""
FOREIGN = ("git clone --mirror", "--version is equivalent", "bin/test -C")
"""Words of other programs, which have options of the same names."""
NOT_RAISED = ("--set … is not understood", "--limit", "--follow watches it", "--full prints them")
"""Sentences that only the command line prints, about words that it alone reads."""


def options(command) -> set[str]:
    """The options of a command and of those below it."""
    params = command.get_params(typer.Context(command))
    own = {name for param in params for name in param.opts if name.startswith("--") and name != "--help"}
    return own.union(*(options(one) for one in getattr(command, "commands", {}).values()))


def texts(tree: ast.Module) -> Iterator[str]:
    """The strings of a module that are no docstrings, `…` where something is put in."""
    left_out = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            left_out |= {id(part) for part in node.values}
            yield "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in left_out:
            yield node.value


def sentences() -> list[str]:
    """Everything in the source that names an option or a command of Composer in a sentence."""
    words = re.compile(rf"(?<![\w-])({'|'.join(options(click_command()))})(?![\w-])|`(composer |… --)")
    left_out = tuple(str(ROOT / "composer_cli" / part) for part in ONLY_COMMAND_LINE)
    paths = [*(ROOT / "stages").rglob("*.py"), *(ROOT / "composer_cli").rglob("*.py")]
    sources = [path.read_text() for path in paths if not str(path).startswith(left_out) and "guest" not in path.parts]
    trees = [ast.parse(source) for source in sources if "--" in source or "`composer" in source]
    found = {text for tree in trees for text in texts(tree) if " " in text and words.search(text)}
    return sorted(text.replace("`… --", "`composer collect --") for text in found)


def test_every_sentence_names_arguments_and_functions_alone() -> None:
    named, said_here, wrong = options(click_command()), sentences(), list[str]()
    for sentence in said_here:
        if not any(words in sentence for words in (*FOREIGN, *NOT_RAISED)):
            said = translate_message(sentence)
            wrong += [said for option in named if re.search(rf"(?<![\w-]){option}(?![\w-])", said)]
            wrong += [
                said for words in re.findall(r"`composer ([^`]+)", said) if not words.startswith(WITHOUT_FUNCTION)
            ]
    assert wrong == []
    assert len(said_here) > 80


@pytest.mark.parametrize(
    ("said", "python"),
    [
        ("Use --resume to go on, --clean to start again.", "Use resume=True to go on, clean=True to start again."),
        ("The same command with --resume goes on.", "The same call with resume=True goes on."),
        ("Give it with --set policy.max_tokens=8.", "Give it with policy={'max_tokens': 8}."),
        ("Give the run that holds them with --from.", "Give the run that holds them as an argument."),
        ("Give both: --from a/collect/x --from a/y.", "Give both: find('a/collect/x'), find('a/y')."),
        ("Name two: --set baseline=A --set treatment=B.", "Name two: baseline='A', treatment='B'."),
        ("Run `composer replay-teachers` first.", "Run `replay_teachers()` first."),
        ("Finish it: `composer probe svd --resume`.", "Finish it: `probe.svd(resume=True)`."),
        ("`composer probe teacher-pool --help --all` lists all.", "`probe.teacher_pool.settings()` lists all."),
        ("`composer tasks feature-deletion PACKAGE`", "`tasks(env='feature-deletion', package='PACKAGE')`"),
        ("`composer status` lists the runs.", "`runs()` lists the runs."),
        ("`composer run --preset demo` makes some.", "`run('demo')` makes some."),
        ("Start one with `composer serve m`.", "Start one with `composer serve m`."),
        ("a larger --max-cost", "a larger `max_cost`"),
        ("`--env swe-mini` needs neither, or --out FOLDER.", "`env='swe-mini'` needs neither, or out='FOLDER'."),
        ("git clone --mirror x --min_replicas 2", "git clone --mirror x --min_replicas 2"),
        ("`composer tasks a b c`", "`composer tasks a b c`"),
    ],
)
def test_an_option_and_a_command_become_an_argument_and_a_call(said: str, python: str) -> None:
    assert translate_message(said) == python


def test_the_functions_that_messages_name_exist() -> None:
    for stage in STAGES:
        said = translate_message(f"`{command_words(stage)}`").strip("`()")
        assert attrgetter(said)(composer).name == stage
    for command in FUNCTIONS.values():
        assert callable(getattr(composer, command))


def test_an_interrupt_of_a_command_without_run_promises_no_resume() -> None:
    with (
        pytest.raises(KeyboardInterrupt, match=r"^Interrupted\. Nothing was kept; start it again\.$"),
        errors_in_python(),
    ):
        raise KeyboardInterrupt
    assert translate_message("Ctrl-C again stops at once.") == "A second interrupt stops at once."


def test_sigterm_ends_a_program_with_the_exit_code_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    """As an `Exception` it ended in a traceback and exit code 1, and in a loop that goes on after errors not at all."""
    with pytest.raises(SystemExit) as ended, errors_in_python(resumes=True):
        raise Interrupted(signal.SIGTERM)
    assert ended.value.code == 143
    assert capsys.readouterr().err == (
        "Stopped by SIGTERM. Everything finished is saved; the same call with resume=True goes on.\n"
    )


def test_an_error_is_shown_with_the_call_alone() -> None:
    with pytest.raises(composer.UsageError) as error:
        composer.collect(task=2)
    assert len(error.traceback) == 3  # this call, the function of Python, and the end of its block
    with pytest.raises(composer.BadInput) as error:
        composer.find("nowhere")
    assert len(error.traceback) == 3 and error.value.__context__ is None
