"""Every sentence that Python can show says what to do in Python."""

import re
import signal
from operator import attrgetter

import pytest
import typer
from support import sentences

import composer_post_training as composer
from composer_cli.app import click_command
from composer_post_training.words import FUNCTIONS, PYTHON, call, errors_in_python
from composer_stages import STAGES, words
from composer_stages.stopping import Interrupted
from composer_stages.words import CallOption, Command, Setting, words_of_stage

FOREIGN = ("git clone --mirror", "--logprobs-mode", "pip install --")
"""Options of other programs."""


def options(command) -> set[str]:
    """The options of a command and of those below it."""
    params = command.get_params(typer.Context(command))
    named = {name for param in params for name in param.opts if name.startswith("--") and name != "--help"}
    return named.union(*(options(member) for member in getattr(command, "commands", {}).values()))


def test_no_sentence_spells_an_option_or_a_command_of_the_command_line() -> None:
    """It names them by `option`, `setting` and `command`, which each interface writes; those of `cli` are its own."""
    known, wrong = options(click_command()), list[str]()
    for room in sentences.rooms():
        for name, (_, template) in words.entries(room).items():
            text = re.sub(r"\{\{.*?\}\}|\{%.*?%\}", "…", template)
            spelt = [option for option in known if re.search(rf"(?<![\w-]){option}(?![\w-])", text)]
            if room != "cli" and not any(part in text for part in FOREIGN) and (spelt or "`composer " in text):
                wrong.append(f"{room}.{name}: {spelt or text}")
    assert wrong == []


@pytest.mark.parametrize(
    ("remedy", "python"),
    [
        (CallOption("resume"), "resume=True"),
        (CallOption("max-cost"), "`max_cost`"),
        (CallOption("from", "a/collect/x"), "find('a/collect/x')"),
        (CallOption("set", "baseline=A"), "baseline='A'"),
        (CallOption("out", "FOLDER"), "out='FOLDER'"),
        (Setting("policy.max_tokens", 8), "policy={'max_tokens': 8}"),
        (Command(("replay-teachers",)), "replay_teachers()"),
        (Command(("probe", "teacher-pool", "--help", "--all")), "probe.teacher_pool.settings()"),
        (Command(("export", "trl")), "export(format='trl')"),
        (Command(("run", "--preset", "demo")), "run('demo')"),
        (Command(("collect", "--env", "kata", "--resume")), "collect(env='kata', resume=True)"),
        (Command(("serve", "m")), "composer serve m"),
        (Command(("tasks", "check", "b")), "composer tasks check b"),
        (Command(("tasks", "a", "b", "c")), "composer tasks a b c"),
    ],
)
def test_an_option_and_a_command_become_an_argument_and_a_call(remedy: words.Remedy, python: str) -> None:
    assert PYTHON.remedy(remedy) == python


def test_the_functions_that_sentences_name_exist() -> None:
    for stage in STAGES:
        assert attrgetter((call(words_of_stage(stage)) or "").strip("()"))(composer).name == stage
    for command in FUNCTIONS.values():
        assert callable(getattr(composer, command))


def test_an_interrupt_of_what_is_no_run_promises_nothing() -> None:
    with (
        pytest.raises(KeyboardInterrupt, match=r"^Interrupted\. Nothing was kept; start it again\.$"),
        errors_in_python(),
    ):
        raise KeyboardInterrupt


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
