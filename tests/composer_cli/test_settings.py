import pytest
from hypothesis import given, strategies as st
from support.refusals import refused

from composer_stages import collect, replay_teachers, train
from composer_stages.errors import UsageError
from composer_stages.runs import settings
from composer_stages.runs.stage import read_for_stage

KEYS = st.lists(st.text("abc_", min_size=1, max_size=4), min_size=1, max_size=4)


def build(*typed, files=()):
    return settings.build("collect", collect.Config, [*files, *map(settings.assignment, typed)])


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("policy.temperature=0.5", 0.5),
        ("x=true", True),
        ('x="a b"', "a b"),
        ("x=kata:student", "kata:student"),
        ("x=[1, 2]", [1, 2]),
        ("x={ a = 1 }", {"a": 1}),
        ("x=", ""),
        ("x=a=b", "a=b"),
        ("x=1\ny = 2", "1\ny = 2"),
    ],
)
def test_values_are_toml_and_bare_words_are_strings(text, value):
    tree = settings.assignment(text)
    for key in text.partition("=")[0].split("."):
        tree = tree[key]
    assert tree == value


@given(KEYS, st.integers() | st.booleans() | st.text("xyz ", max_size=5))
def test_an_assignment_sets_its_key_and_nothing_else(keys, value):
    expected = value
    for key in reversed(keys):
        expected = {key: expected}
    assert settings.nested(".".join(keys), value) == expected


@pytest.mark.parametrize("text", ["tasks", "=3", "a..b=3"])
def test_an_assignment_without_key_or_value_is_refused(text):
    refused(lambda: settings.assignment(text), UsageError, "KEY=VALUE")


def test_defaults_yield_to_files_and_files_to_typed_settings():
    found = build("policy.temperature=0.1", files=[{"tasks": 7, "policy": {"temperature": 0.9, "max_tokens": 5}}])
    assert (found.tasks, found.policy.temperature, found.policy.max_tokens) == (7, 0.1, 5)
    assert found.policy.model == collect.Config().policy.model  # one override drops no default


def test_a_stage_s_own_table_takes_back_the_address_of_a_server(tmp_path):
    file = tmp_path / "served.toml"
    file.write_text(
        '[policy]\nmodel = "m"\nbase_url = "http://127.0.0.1:1/v1"\n[train.policy]\nmodel = "weights"\nbase_url = ""\n'
    )
    for stage, module, found in (("collect", collect, "m"), ("train", train, "weights")):
        config = settings.build(stage, module.Config, read_for_stage(stage, [file], lambda what: None))
        assert config.policy.model == found and (config.policy.base_url is None) == (stage == "train")
    served = [{"policy": {"model": "m", "base_url": "http://127.0.0.1:1/v1"}}]
    refused(lambda: settings.build("train", train.Config, served), UsageError, "cannot be trained", "[train.policy]")


def test_a_quoted_number_is_refused():
    quoted = [{"tasks": "8"}]
    refused(lambda: settings.build("collect", collect.Config, quoted), UsageError, "tasks", "'8'", "write 8")


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("tsaks=3", "tasks"),
        ("policy.temprature=1", "policy.temperature"),
        ("temperature=1", "policy.temperature"),
        ("zzz=1", "It has: seed"),
    ],
)
def test_an_unknown_key_is_one_sentence_that_helps(typed, meant):
    assert "\n" not in refused(lambda: build(typed), UsageError, meant, typed.partition("=")[0])


def test_a_table_of_a_list_is_checked_like_everything_else():
    tables = [{"name": "a", "model": "m", "max_tokens": 9}, {"name": "b", "modle": "m", "max_tokens": 9}]
    nameless = [{"model": "m", "max_tokens": 9}]
    for teachers, *names in ((tables, "teachers.1.modle", "teachers.N.model"), (nameless, "teachers.0.name")):
        layers = [{"teachers": teachers}]
        refused(lambda: settings.build("replay-teachers", replay_teachers.Config, layers), UsageError, *names)  # noqa: B023


def test_all_problems_are_told_at_once_unknown_keys_first_and_teachers_by_name():
    """A setting that is missing is often one that was misspelt, so what is unknown stands before it."""
    tables = [{"name": "a", "model": "m", "max_tokens": 9}, {"nmae": "x", "model": "gpt", "max_tokens": 0}]
    layers = [{"teachers": tables, "answers_per_state": 0}]
    text = refused(lambda: settings.build("replay-teachers", replay_teachers.Config, layers), UsageError)
    first, *lines = text.splitlines()
    assert first == "replay-teachers cannot take these settings:" and len(lines) == 4
    assert lines[0].startswith("- it has no setting teachers.1.nmae (of gpt). Did you mean")
    assert "- answers_per_state = 0: it should be greater than 0." in lines[1:3]
    assert lines[3] == "- it needs the setting teachers.1.name (of gpt), which is not given."


def test_of_very_many_problems_some_are_told(tmp_path):
    with pytest.raises(UsageError, match="- and 950 more") as caught:
        build(*(f"k{number}=1" for number in range(1000)))
    assert str(caught.value).count("\n") == 51


def test_a_settings_file_that_is_too_large_is_refused_unread(tmp_path):
    path = tmp_path / "large.toml"
    with path.open("wb") as file:
        file.truncate(settings.MOST_BYTES + 1)
    with pytest.raises(UsageError, match=r"large\.toml has 8 MiB, and a file of settings at most 8"):
        settings.read_file(path)


def test_a_file_that_is_nested_too_deeply_is_named(tmp_path):
    path = tmp_path / "deep.toml"
    path.write_text(f"a = {'[' * 10_000}{']' * 10_000}\n")
    with pytest.raises(UsageError, match=r"deep\.toml is nested too deeply"):
        settings.read_file(path)


@pytest.mark.parametrize(
    "value",
    [
        3,
        -0.5,
        1e-9,
        True,
        "",
        "3",
        "true",
        "a = 'b' \"c\" \\ \n\x1b\x7f \u2603 \U0001f600",
        [1, ["a"]],
        {},
        {"a.b=": {"c d": [True]}},
    ],
)
def test_a_setting_as_text_is_read_as_the_same_value(value):
    assert settings.assignment(settings.assignment_text("env.options", value)) == {"env": {"options": value}}
