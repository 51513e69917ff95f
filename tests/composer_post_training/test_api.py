"""The Python interface does what the command line does: the same run, the same sentences."""

import inspect
import pydoc
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from support.command_line import teachers
from support.refusals import refused

import composer_post_training as composer
from composer_stages import STAGES, stages_of
from composer_stages.runs import settings
from composer_stages.runs.display import SHOWN_COLUMNS, Table
from composer_stages.runs.kinds import KINDS
from composer_stages.runs.run import Inputs
from composer_stages.runs.stage import load_stage
from composer_stages.runs.tables import Scan


def test_every_stage_of_the_pipeline_has_its_function() -> None:
    for stage in stages_of("pipeline"):
        function = getattr(composer, stage.replace("-", "_"))
        assert function.name == stage and function.__doc__ and stage.replace("-", "_") in repr(function)


def test_a_group_given_as_text_or_table_is_one_configuration(tmp_path: Path) -> None:
    """A group's text, its table, a TOML file and --set are one plan, and one identity of the work."""
    file = tmp_path / "study.toml"
    file.write_text('policy = "reference"\nenv = "kata"\n')
    stage = load_stage("collect")
    configs = [
        settings.build("collect", stage.config, layers)
        for layers in (
            [{"policy": "reference", "env": "kata"}],
            [{"policy": {"model": "reference"}, "env": {"name": "kata"}}],
            [settings.read_file(file)],
            [settings.assignment("policy=reference"), settings.assignment("env=kata")],
        )
    ]
    assert [config.identity() for config in configs] == [configs[0].identity()] * 4
    assert [stage.plan(Inputs(), config) for config in configs] == [stage.plan(Inputs(), configs[1])] * 4
    under = [{"policy": {"base_url": "http://127.0.0.1:1/v1"}}, {"policy": "m"}]
    assert settings.build("collect", stage.config, under).policy.base_url == "http://127.0.0.1:1/v1"


def test_a_run_of_the_command_line_is_found_done_however_it_is_asked_for(
    own_runs: Path, server: str, tmp_path: Path
) -> None:
    policy = {"model": "scripted", "base_url": server}
    study, file = tmp_path / "study.toml", teachers(tmp_path, server)
    study.write_text(f'tasks = 3\nsamples = 2\npolicy = {{ model = "scripted", base_url = "{server}" }}\n')
    size, path = {"tasks": 2, "samples": 2}, (own_runs / "collect" / "latest").resolve()
    for words in (
        {"policy": policy, **size},
        {f"policy.{key}": value for key, value in policy.items()} | size,
        {"config": str(study), "tasks": 2, "policy": "scripted"},
    ):
        assert composer.collect(artifacts=own_runs, **words).path == path == composer.find("collect", own_runs).path
    run, tables = composer.find("collect", own_runs), settings.read_table(file, "teachers")["teachers"]
    for given in (tables, str(file)):
        answers = composer.replay_teachers(run, artifacts=own_runs, config=[], teachers=given)
        assert answers.path == (own_runs / "replay-teachers" / "latest").resolve()
    assert composer.replay_teachers.plan(run, artifacts=own_runs, teachers=tables).units == 24
    with pytest.raises(composer.UsageError, match=r"but \[\[teachers\]\] tables are needed"):
        composer.replay_teachers(run, artifacts=own_runs, teachers=study)
    with pytest.raises(composer.UsageError, match="train has no setting teachers"):
        composer.train(artifacts=own_runs, teachers=file)


def test_a_missing_input_is_answered_with_the_call_that_makes_it(tmp_path: Path) -> None:
    refused(lambda: composer.extract_pairs(artifacts=tmp_path), composer.BadInput, "Run `collect()`")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: composer.extract_pairs("collect"), "'collect' is not a run"),
        (lambda: composer.replay_teachers([1]), "A list is not a run"),
        (lambda: composer.query("select 1", Path("collect")), "'collect' is not a run"),
        (lambda: composer.report("collect"), "'collect' is not a run"),
        (lambda: composer.find(3), "`runs()` lists"),
        (lambda: composer.collect(max_cost="five"), "max_cost = 'five': it should be a number"),
        (lambda: composer.collect(artifacts=3), "artifacts = 3: it should be a path."),
        (lambda: composer.query(3), "3 is no text"),
        (lambda: composer.collect(config={"tasks": 2}), "config: it takes the path of a TOML file"),
        (lambda: composer.collect(policy=3), "policy = 3: it should be a dictionary"),
        (lambda: composer.collect.plan(task=3), "Did you mean tasks? `collect.settings"),
        (lambda: composer.export(format="trl", on="processes:2"), "export deals no work"),
        (lambda: composer.run("demo", {"collct.tasks": 3}), "Did you mean 'collect'"),
    ],
)
def test_a_mistake_is_answered_with_what_to_pass(
    call: Callable[[], object], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    refused(call, composer.UsageError, message)


def test_every_function_has_the_settings_of_its_stage_as_its_words() -> None:
    for name in composer.__all__:
        if isinstance(function := getattr(composer, name), composer.StageFunction):
            words = {key.partition(".")[0] for key in function.settings()} | {
                function.positionals(),
                "artifacts",
                "out",
            }
            assert set(inspect.signature(function).parameters) >= words
    words = inspect.signature(composer.collect)
    assert words == inspect.signature(composer.collect.__call__)  # which a notebook shows of an object
    assert repr(composer.compare).startswith("<stage function compare(*paths, seed=0, min_gain=None, not_worse=None, ")
    assert "policy: str | dict = {}, tasks: int = 25," in str(words) and "artifacts: str = 'artifacts'" in str(words)
    assert "teacher: dict | None = None" in str(inspect.signature(composer.train))
    assert "composer_stages." not in str(inspect.signature(composer.probe.teacher_pool)).replace(
        "composer_stages.runs.run.Run", ""
    )


def test_runs_tables_and_plans_show_themselves_in_a_terminal_and_a_notebook(made: Path) -> None:
    run = composer.find("collect", made)
    assert f" {run.path}\n" in repr(run) and "mean_reward" in repr(run) and "rollouts (4)" in repr(run)
    assert len(repr(run).splitlines()) < 25
    assert "<table>" in run._repr_html_() and run.path.name in run._repr_html_()
    steps = run.scan("steps")
    assert f"and {len(steps) - 10:,} rows more" in repr(steps) and "\x1b" not in repr(steps)
    assert max(map(len, steps._repr_html_().split("<td>")[1:])) < 400
    assert "at most" in repr(composer.collect.plan(tasks=2))


def test_model_output_is_escaped_in_terminal_and_notebook() -> None:
    table = Table(("text",), [("\x1b[2J\u202e<script>alert(1)</script>\nnext",), (None,), (0.123456,)])
    assert "\x1b" not in repr(table) and "\u202e" not in repr(table) and "0.1235" in repr(table)
    assert "<script>" not in table._repr_html_()
    assert table[1] == {"text": None} and len(table[:2]) == 2 and list(table.pandas()["text"])[1] is None


def test_questions_reports_and_presets_are_functions(
    own_runs: Path, server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = composer.query("select run, count(*) as n from rollouts group by run", artifacts=own_runs)
    assert found[0]["n"] == 4 and "n" in repr(found)
    run = composer.find("collect", own_runs)
    assert composer.query("select count(*) as n from steps", run)[0]["n"] == len(run.scan("steps"))
    monkeypatch.chdir(tmp_path)
    page = composer.report(composer.find("collect", "artifacts"), artifacts="artifacts")
    assert page.is_file() and page.suffix == ".html" and page.is_absolute()
    preset = tmp_path / "mine.toml"
    preset.write_text('[[stage]]\nstage = "collect"\n')
    chosen = {"collect.tasks": 2, "collect.samples": 2, "collect.policy": {"base_url": server}}
    chain = composer.run(preset, chosen, policy="scripted", artifacts=own_runs, quiet=True)
    assert chain["collect"].path == (own_runs / "collect" / "latest").resolve()
    assert list(chain) == ["collect"] and "complete" in repr(chain) and "<table>" in chain._repr_html_()
    with pytest.raises(composer.UsageError, match="no preset 'dmeo'"):
        composer.run("dmeo")


def test_a_table_is_the_same_as_arrow_duckdb_and_pandas(made: Path) -> None:
    run = composer.find("collect", made)
    rows = [row["rollout_id"] for row in run.scan("rollouts").arrow().to_pylist()]
    assert len(rows) == 4 and run.scan("rollout").arrow(["rollout_id"]).column_names == ["rollout_id"]
    assert [row[0] for row in run.scan("rollouts").duckdb().project("rollout_id").fetchall()] == rows
    assert list(run.scan("rollouts").pandas()["rollout_id"]) == rows
    assert run.scan("rollouts").arrow("rollout_id").column_names == ["rollout_id"]
    assert run.scan("rollouts").pandas(("rollout_id", "reward")).shape == (4, 2)
    for read in (Scan.arrow, Scan.pandas, lambda scan, name: list(scan.rows(name))):
        with pytest.raises(composer.UsageError, match="rollouts has no column 'rewrd'; it has rollout_id, "):
            read(run.scan("rollouts"), "rewrd")
    with pytest.raises(composer.BadInput, match="has no table 'pairs'; it has rollouts, steps, tasks"):
        run.scan("pairs")


def test_a_stage_from_outside_is_a_function(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(STAGES, "collect-again", STAGES["collect"])
    assert composer.collect_again.settings()["tasks"] == 25
    with pytest.raises(AttributeError, match="has no attribute 'colect'"):
        composer.colect  # noqa: B018


def test_completion_shows_the_interface_alone() -> None:
    assert dir(composer) == sorted(composer.__all__)
    help_text = pydoc.render_doc(composer.collect, renderer=pydoc.plaintext)
    assert help_text.count("Play a policy in an environment") == 1
    assert "\n        tasks=25  - Number of tasks of the split." in help_text and "resume=False  - Go on" in help_text
    assert re.search(r"collect\.settings\(\) returns all \d+ settings", help_text)
    assert "svd" in dir(composer.probe) == sorted(dir(composer.probe)) and "svd" in repr(composer.probe)
    assert "probe.teacher_pool.settings()" in str(composer.probe.teacher_pool.__doc__)
    assert pydoc.render_doc(composer, renderer=pydoc.plaintext).index("composer.find(") < 400


def test_runs_are_listed_as_a_table(made: Path, tmp_path: Path) -> None:
    table = composer.runs(made)
    assert [row["stage"] for row in table] == ["collect", "replay-teachers", "extract-pairs"]
    assert table[0]["status"] == "complete" and table[0]["units"] == "4/4"
    assert composer.find(table[0]["run"], made).path.name in repr(table) and "<table>" in table._repr_html_()
    assert "`run('demo')` makes some" in repr(composer.runs(tmp_path))


def test_a_run_holds_rollouts_with_messages_and_pairs(made: Path) -> None:
    run = composer.find("collect", made)
    rollouts, table = run.rollouts(), run.scan("rollouts").pandas()
    assert [one.rollout_id for one in rollouts] == list(table["rollout_id"])
    assert [one.reward for one in rollouts] == list(table["reward"])
    assert {m["role"] for m in rollouts[0].messages} >= {"user", "assistant"}
    assert rollouts[0].task_id == table["task_id"][0]
    assert rollouts[0].row["terminated_by"] == table["terminated_by"][0] and "messages>" in repr(rollouts[0])
    pairs = composer.find("extract-pairs", made).pairs()
    assert pairs and pairs[0]["messages"][-1]["role"] == "user" and pairs[0]["chosen"] != pairs[0]["rejected"]
    with pytest.raises(composer.BadInput, match=r"Give the run that holds them as an argument\."):
        run.pairs()


def test_a_file_sends_no_key_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENROUTER_API_KEY", raising=False)
    policy = 'policy = { model = "m", base_url = "https://example.com/v1", api_key_env = "OPENROUTER_API_KEY" }\n'
    study, preset = tmp_path / "study.toml", tmp_path / "preset.toml"
    study.write_text(policy)
    preset.write_text(f'[[stage]]\nstage = "collect"\n[stage.config]\n{policy}')
    untrusted = "or give trust=True if that server"
    refused(lambda: composer.collect.plan(config=study, policy="other"), composer.UsageError, untrusted)
    refused(lambda: composer.run(preset, {"collect.policy": "o"}, artifacts=tmp_path), composer.UsageError, untrusted)
    with pytest.raises(composer.UsageError, match=r"OPENROUTER_API_KEY.* is not set"):
        composer.collect.plan(config=study, trust=True, tasks=1)


def test_an_interrupt_before_anything_finished_says_so_and_how_to_go_on(
    server: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = {"artifacts": tmp_path, "policy": {"model": "scripted", "base_url": server}, "tasks": 1, "samples": 2}
    with pytest.raises(KeyboardInterrupt, match=r"Nothing was finished yet; the same call starts again\."):
        composer.collect(**words, listener=lambda *_: signal.raise_signal(signal.SIGINT))
    assert composer.runs(tmp_path)[0]["status"] == "interrupted"
    assert composer.collect(**words, resume=True).manifest.status == "complete"
    shown = capsys.readouterr().err
    assert "collect: starts, 2 " in shown and "done in" in shown and "\x1b" not in shown
    composer.collect(**words, quiet=True)
    assert capsys.readouterr().err == ""


def test_a_wide_table_shows_the_columns_that_matter_and_names_the_way_to_the_others(made: Path) -> None:
    rollouts = composer.find("collect", made).scan("rollouts")
    head = repr(rollouts).splitlines()[0].split()
    assert len(head) == SHOWN_COLUMNS < len(rollouts.columns) and {"task_id", "reward", "error_type"} <= set(head)
    assert f"and {len(rollouts.columns) - SHOWN_COLUMNS} columns more: .columns" in repr(rollouts)
    assert "columns more" in rollouts._repr_html_()
    assert "columns more" not in repr(composer.find("collect", made).scan("task"))
    for kind in KINDS.values():
        assert set(kind.main) <= set(kind.columns) and len(kind.main) in (0, SHOWN_COLUMNS)
