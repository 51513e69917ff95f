"""The Python interface does what the command line does: the same run, the same sentences."""

import ast
import inspect
import pydoc
import shutil
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
from support.command_line import TEACHERS

from composer_cli import api
from stages import stages_of
from stages.runs.display import MAIN_COLUMNS, SHOWN_COLUMNS, Table
from stages.runs.records import KINDS


def test_every_stage_of_the_pipeline_has_its_function() -> None:
    for stage in stages_of("pipeline"):
        function = getattr(api, stage.replace("-", "_"))
        assert function.name == stage and function.__doc__ and f"composer {stage}" in repr(function)


def test_a_run_of_the_command_line_is_found_done(made: Path, server: str, tmp_path: Path) -> None:
    root = Path(shutil.copytree(made, tmp_path / "artifacts", symlinks=True))
    policy = {"model": "scripted", "base_url": server}
    run = api.collect(artifacts=root, policy=policy, tasks=2, samples=2)
    assert run.path == (root / "collect" / "latest").resolve() == api.find("collect", root).path
    dotted = {f"policy.{key}": value for key, value in policy.items()}
    assert api.collect(artifacts=root, tasks=2, samples=2, **dotted).path == run.path
    teachers = [{"name": n, "model": m, "base_url": server, "max_tokens": 64} for n, m in TEACHERS.items()]
    answers = api.replay_teachers(run, artifacts=root, teachers=teachers)
    assert answers.path == (root / "replay-teachers" / "latest").resolve()
    assert api.replay_teachers.plan(run, artifacts=root, teachers=teachers).units == 24


@pytest.mark.parametrize(
    ("said", "python"),
    [
        ("Use --resume to go on, --clean to start anew.", "Use resume=True to go on, clean=True to start anew."),
        ("Give it with --set policy.max_tokens=8.", "Give it with policy.max_tokens=8."),
        ("Give the run that holds it with --from.", "Pass the run that holds it."),
        ("Give both: --from a/collect/x --from a/y.", 'Give both: find("a/collect/x"), find("a/y").'),
        ("Run `composer replay-teachers` first.", "Run `replay_teachers()` first."),
        ("`composer probe teacher-pool --help` lists all.", "`probe.teacher_pool.settings()` lists all."),
        ("a larger --max-cost", "a larger max_cost"),
        ("another --out.", "another out=."),
    ],
)
def test_messages_speak_python(said: str, python: str) -> None:
    assert api.in_python(said) == python


def test_no_error_of_a_call_names_an_option(made: Path, tmp_path: Path) -> None:
    run = api.find("collect", made)
    for call, reads, words in (
        (api.collect, (run,), {}),
        (api.evaluate, (), {}),
        (api.extract_pairs, (run, run), {}),
        (api.collect, (), {"resume": True, "clean": True}),
        (api.collect, (), {"env": {"name": "gsm8k", "options": {"path": "/no/such/file"}}}),
        (api.tasks, (), {}),
    ):
        with pytest.raises(api.ComposerError) as error:
            call(*reads, artifacts=tmp_path, **words)
        assert " --" not in str(error.value), str(error.value)
    with pytest.raises(api.UsageError, match="Pass runs, such as find"):
        api.extract_pairs("collect", artifacts=tmp_path)  # type: ignore[arg-type]


def test_every_function_has_the_settings_of_its_stage_as_its_words() -> None:
    for name in api.__all__:
        if isinstance(function := getattr(api, name), api.StageFunction):
            words = inspect.signature(function).parameters
            assert set(words) >= {key.partition(".")[0] for key in function.settings()} | {"reads", "artifacts", "out"}
    assert inspect.signature(api.collect).parameters["tasks"].default == 25


def test_the_types_for_editors_are_those_of_the_settings() -> None:
    path = Path(__file__).parents[2] / "docs" / "signatures.py"
    spec = spec_from_file_location("signatures_of_docs", path)
    assert spec and spec.loader
    generator = module_from_spec(spec)
    spec.loader.exec_module(generator)
    ours, theirs = (ast.dump(ast.parse(text)) for text in (generator.text(), generator.FILE.read_text()))
    assert ours == theirs, "run `PYTHONPATH=. .venv/bin/python docs/signatures.py`, or `./dev docs`"


def test_runs_tables_and_plans_show_themselves_in_a_terminal_and_a_notebook(made: Path) -> None:
    run = api.find("collect", made)
    assert "mean_reward" in repr(run) and "rollouts (4)" in repr(run) and len(repr(run).splitlines()) < 25
    assert "<table>" in run._repr_html_() and run.path.name in run._repr_html_()
    steps = run.scan("steps")
    assert f"and {len(steps) - 10:,} rows more" in repr(steps) and "\x1b" not in repr(steps)
    assert max(map(len, steps._repr_html_().split("<td>")[1:])) < 400
    assert "at most" in repr(api.collect.plan(tasks=2))


def test_what_models_wrote_cannot_steer_a_terminal_or_a_notebook() -> None:
    table = Table(("text",), [("\x1b[2J\u202e<script>alert(1)</script>\nnext",), (None,), (0.123456,)])
    assert "\x1b" not in repr(table) and "\u202e" not in repr(table) and "0.1235" in repr(table)
    assert "<script>" not in table._repr_html_()
    assert table[1] == {"text": None} and len(table[:2]) == 2 and list(table.pandas()["text"])[1] is None


def test_questions_reports_and_presets_are_functions(made: Path, server: str, tmp_path: Path) -> None:
    root = Path(shutil.copytree(made, tmp_path / "artifacts", symlinks=True))
    found = api.query("select run, count(*) as n from rollouts group by run", artifacts=root)
    assert found[0]["n"] == 4 and "n" in repr(found)
    assert api.query("select count(*) as n from steps", api.find("collect", root))[0]["n"] == len(
        api.find("collect", root).scan("steps")
    )
    page = api.report(api.find("collect", root), artifacts=root)
    assert page.is_file() and page.suffix == ".html"
    preset = tmp_path / "mine.toml"
    preset.write_text('[[stage]]\nstage = "collect"\n')
    chosen = {"collect.tasks": 2, "collect.samples": 2, "collect.policy": {"base_url": server}}
    chain = api.run(preset, chosen, policy="scripted", artifacts=root, quiet=True)
    assert chain["collect"].path == (root / "collect" / "latest").resolve()
    assert list(chain) == ["collect"] and "complete" in repr(chain) and "<table>" in chain._repr_html_()
    with pytest.raises(api.UsageError, match="no preset 'dmeo'"):
        api.run("dmeo")


def test_a_table_is_the_same_as_arrow_duckdb_and_pandas(made: Path) -> None:
    run = api.find("collect", made)
    rows = [row["rollout_id"] for row in run.scan("rollouts").arrow().to_pylist()]
    assert len(rows) == 4 and run.scan("rollout").arrow(["rollout_id"]).column_names == ["rollout_id"]
    assert [row[0] for row in run.scan("rollouts").duckdb().project("rollout_id").fetchall()] == rows
    assert list(run.scan("rollouts").pandas()["rollout_id"]) == rows
    with pytest.raises(api.BadInput, match="has no table 'pairs'; it has rollouts, steps, tasks"):
        run.scan("pairs")


def test_mistakes_are_the_sentences_of_the_command_line(tmp_path: Path) -> None:
    with pytest.raises(api.UsageError, match=r"Did you mean tasks\?"):
        api.collect(artifacts=tmp_path, taks=3)
    with pytest.raises(api.BadInput, match=r"Run `collect\(\)`"):
        api.extract_pairs(artifacts=tmp_path)
    assert api.collect.settings()["tasks"] == 25


def test_completion_shows_the_interface_alone() -> None:
    assert dir(api) == sorted(api.__all__)
    help_text = pydoc.render_doc(api.collect, renderer=pydoc.plaintext)
    assert help_text.count("Play a policy in an environment") == 1
    assert (
        "\n        tasks=25  - Number of tasks of the split." in help_text
        and "collect.settings() returns all settings." in help_text
    )
    assert "probe.teacher_pool.settings()" in str(api.probe.teacher_pool.__doc__)


def test_a_wide_table_shows_the_columns_that_matter_and_names_the_way_to_the_others(made: Path) -> None:
    rollouts = api.find("collect", made).scan("rollouts")
    head = repr(rollouts).splitlines()[0].split()
    assert len(head) == SHOWN_COLUMNS < len(rollouts.columns) and {"task_id", "reward", "error_type"} <= set(head)
    assert f"and {len(rollouts.columns) - SHOWN_COLUMNS} columns more: .columns" in repr(rollouts)
    assert "columns more" in rollouts._repr_html_() and "columns more" not in repr(
        api.find("collect", made).scan("task")
    )
    for kind, names in MAIN_COLUMNS.items():
        assert set(names.split()) <= set(KINDS[kind].columns) and len(names.split()) == SHOWN_COLUMNS
