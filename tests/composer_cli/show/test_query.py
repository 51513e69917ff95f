import json
import shutil

from support.command_line import call


def test_tables_of_all_runs_are_there_with_a_column_run(made):
    asked = (
        "select s.run, count(*) as steps, max(r.reward) as best from steps s join rollouts r using (rollout_id) "
        "group by s.run"
    )
    rows = json.loads(call(made, "query", asked, "--json").stdout)["rows"]
    run = (made / "collect" / "latest").resolve()
    assert [row["run"] for row in rows] == [f"collect/{run.name}"] and rows[0]["steps"] > 0
    counts = "select (select count(*) from rollouts), (select count(*) from pairs), (select count(*) from runs)"
    _head, values = call(made, "query", counts).stdout.splitlines()
    assert len(values.split()) == 3 and values.split()[0] == "4"


def test_only_the_named_runs_are_asked(made):
    assert json.loads(call(made, "query", "select stage from runs", "--from", "collect", "--json").stdout) == {
        "rows": [{"stage": "collect"}]
    }


def test_two_runs_of_a_stage_are_told_apart(made, tmp_path):
    root = shutil.copytree(made, tmp_path / "artifacts", symlinks=True)
    run = (root / "collect" / "latest").resolve()
    shutil.copytree(run, run.with_name("20200101T000000Z-copy-000000"))
    rows = json.loads(call(root, "query", "select distinct run from rollouts", "--json").stdout)["rows"]
    assert len(rows) == 2


def test_a_question_that_cannot_be_answered_is_one_sentence(made, tmp_path):
    for asked, part in [("select * from nothing", "nothing"), ("selct 1", "syntax error"), ("drop table runs", "View")]:
        done = call(made, "query", asked)
        assert done.returncode == 2 and part in done.stderr and "There are the tables" in done.stderr
        assert len(done.stderr.splitlines()) == 1
    assert "tables runs" in call(tmp_path / "none", "query", "select * from rollouts").stderr


def test_values_of_every_kind_can_be_printed(made):
    asked = "select 1.50 as price, null as nothing, date '2026-01-02' as day, 'a' || chr(10) || 'b' as text"
    assert call(made, "query", asked).stdout.splitlines()[1].split() == ["1.50", "-", "2026-01-02", "a\\nb"]
    assert json.loads(call(made, "query", asked, "--json").stdout)["rows"][0]["price"] == "1.50"
