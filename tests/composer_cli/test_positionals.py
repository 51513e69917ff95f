import json

import pytest

from composer_cli.stage_command import read_positionals
from stages.errors import UsageError


@pytest.mark.parametrize(
    ("stage", "words", "layers", "runs"),
    [
        ("export", ["trl", "collect"], [{"format": "trl"}], ["collect"]),
        ("export", ["trl"], [{"format": "trl"}], []),
        ("tasks", ["feature-deletion", "./toolz"], [{"env": "feature-deletion"}, {"package": "./toolz"}], []),
        ("import", ["auto", "a", "b", "c"], [{"paths": ["auto", "a", "b", "c"]}], []),
        ("import", [], [], []),
        ("collect", [], [], []),
    ],
)
def test_words_are_settings_and_runs(stage, words, layers, runs):
    assert read_positionals(stage, words) == (layers, runs)


@pytest.mark.parametrize(("stage", "words"), [("export", ["trl", "a", "b"]), ("tasks", ["x", "y", "z"])])
def test_a_word_too_many_is_named(stage, words):
    with pytest.raises(UsageError, match=f"'{words[2]}' is one word too many"):
        read_positionals(stage, words)


def test_a_stage_without_words_refuses_them(composer):
    done = composer("collect", "kata")
    assert done.returncode == 2 and "collect does not take 'kata'. Did you mean --env kata?" in done.stderr


def test_export_and_import_in_words_go_round(composer, made, tmp_path):
    made_runs = str(made / "collect" / "latest")
    written = json.loads(composer("export", "trl", made_runs, "--json").stdout)
    again = json.loads(composer("import", "trl", f"{written['path']}", "--json").stdout)
    assert again["counts"]["rollouts"] == written["counts"]["rollouts"] > 0
