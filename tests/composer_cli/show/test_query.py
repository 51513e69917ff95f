import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from support.command_line import call, command, environment, until
from support.runs import written

import composer_post_training as composer
from composer_stages.errors import BadInput, UsageError
from composer_stages.runs import index
from composer_stages.runs.kinds import ROLLOUT
from composer_stages.runs.run import Run
from composer_stages.runs.sql import SqlQuery, pooled, run_sql, sql_query


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


def test_a_query_opens_only_the_tables_that_it_names(tmp_path):
    (tmp_path / "steps.parquet").write_bytes(b"no Parquet")
    damaged = {"steps": [tmp_path / "steps.parquet"]}
    run = {"run": "collect/a", "stage": "collect"}
    assert run_sql(SqlQuery("select run from runs", damaged, [run]))[1] == [("collect/a",)]
    for sql in ('select * from "STEPS"', "show tables"):
        with pytest.raises(BadInput, match=r"steps\.parquet cannot be read as Parquet"):
            run_sql(SqlQuery(sql, damaged, [run]))


def test_only_named_runs_are_queried(made):
    done = call(made, "query", "select stage from runs", "--from", "collect", "--json")
    assert json.loads(done.stdout) == {"rows": [{"stage": "collect"}]}


def test_rows_of_several_stages_are_not_pooled_silently(tmp_path):
    for stage in ("collect", "train"):
        written(tmp_path, f"{stage}/20260102T030405Z-x", [(ROLLOUT, [{"rollout_id": "r", "reward": 1.0}])])
    pooling = "select avg(reward) from rollouts"
    note = call(tmp_path, "query", pooling).stderr
    assert "collect and train together" in note and "run like 'collect/%'" in note
    with pytest.warns(UserWarning, match="collect and train together"):
        composer.query(pooling, artifacts=tmp_path)
    asked = index.entries(tmp_path)
    for pools in (
        pooling,
        f"{pooling} /* run */ where rollout_id not like '%run%'",
        "select max(Reward) run from ROLLOUTS",
    ):
        assert pooled(asked, pools), pools
    assert not call(tmp_path, "query", pooling, "--from", "collect").stderr
    for apart in (
        f"{pooling} where run like 'collect/%'",
        "select avg(r.reward) from rollouts r group by r.run",
        "select count(*) from runs join rollouts using (run)",
        "select 'of rollouts' as rollouts -- rollouts",
        "select 1 as num_rollouts",
        f"select {'+'.join(['1'] * 900)}",
    ):
        assert not pooled(asked, apart), apart


def test_values_of_every_kind_can_be_printed(made):
    asked = "select 1.50 as price, null as nothing, date '2026-01-02' as day, 'a' || chr(10) || 'b' as text"
    assert call(made, "query", asked).stdout.splitlines()[1].split() == ["1.50", "-", "2026-01-02", "a\\nb"]
    assert json.loads(call(made, "query", asked, "--json").stdout)["rows"][0]["price"] == 1.5
    joined = "select 1 as a, 2 as a, histogram(b) as counts, sum(170::hugeint << 100) as sum from (select 1.5 as b)"
    (row,) = json.loads(call(made, "query", joined, "--json").stdout)["rows"]
    assert row == {"a": 1, "a_1": 2, "counts": {"1.5": 1}, "sum": str(170 << 100)}


WRITES = [
    "copy (select 1 as a) to '{table}' (format parquet, use_tmp_file false)",
    "copy (select 1 as a) to '{new}'",
    "with x as (select 1) select * from x; copy (select 1 as a) to '{new}'",
    "explain analyze copy (select 1 as a) to '{table}' (format parquet, use_tmp_file false)",
    "prepare p as copy (select 1 as a) to '{new}'",
    "export database '{new}'",
    "import database '{new}'",
    "attach '{new}'",
    "create table t as select 1",
    "create secret (type s3, key_id 'a', secret 'b')",
    "insert into runs values (1)",
    "drop view rollouts",
    "install httpfs",
    "set enable_external_access = true",
    "reset lock_configuration",
    "pragma enable_profiling",
    "pragma enable_logging",
    "call enable_logging(storage = 'file', storage_path = '{new}')",
    "select * from enable_logging(storage = 'file', storage_path = '{new}')",
    "select * from enable_profiling(save_location = '{new}')",
    "checkpoint",
]
READS = [
    "select * from read_text('{secret}')",
    "select * from read_csv('{secret}')",
    "select * from '{secret}'",
    "select * from sniff_csv('{secret}')",
    "select * from read_parquet('{folder}/*.parquet')",
    "select * from parquet_metadata('{other}')",
    "select * from read_parquet('{other}')",
    "select * from read_parquet('http://127.0.0.1:9/x.parquet')",
    "select * from glob('{folder}/*')",
    "select * from query('select * from read_text(''{secret}'')')",
    "select (select content from read_text('{secret}')) from rollouts",
]


@pytest.fixture(scope="module")
def tables(made, tmp_path_factory):
    """A copy of the tables of a run, beside files that no question may read, by their names in a question."""
    folder = tmp_path_factory.mktemp("query")
    root = Path(shutil.copytree(made / "collect", folder / "artifacts" / "collect", symlinks=True))
    table = (root / "latest" / "rollouts.parquet").resolve()
    secret, other = folder / "secret.csv", folder / "other.parquet"
    secret.write_text("kept,to,oneself\n1,2,3\n")
    shutil.copy(table, other)
    return {"table": table, "new": folder / "new", "secret": secret, "other": other, "folder": folder}


@pytest.mark.parametrize("sql", [*WRITES, *READS])
def test_a_query_reads_the_tables_of_runs_and_nothing_else(tables, sql):
    run = index.of([Run(tables["table"].parent)])
    before = {path: path.read_bytes() for path in tables["folder"].rglob("*") if path.is_file()}
    with pytest.raises(UsageError, match=r"^(?!.*(oneself|\n)).*$"):
        run_sql(sql_query(run, sql.format(**tables)))
    assert {path: path.read_bytes() for path in tables["folder"].rglob("*") if path.is_file()} == before
    assert run_sql(sql_query(run, "from rollouts select count(*)"))[1] == [(4,)]


def test_all_reading_statements_are_answered(made):
    forms = "describe rollouts", "show tables", "summarize rollouts", "values (1)", "with x as (select 1) from x"
    for sql in forms:
        assert run_sql(sql_query(index.of([Run(made / "collect" / "latest")]), sql))[1]


def test_a_damaged_table_is_named_and_other_runs_are_answered(made, tmp_path):
    root = shutil.copytree(made, tmp_path / "it's [1]", symlinks=True)
    run = (root / "collect" / "latest").resolve()
    broken = shutil.copytree(run, run.with_name("20200101T000000Z-copy-000000"))
    (broken / "steps.parquet").write_bytes(b"PAR1 nothing of it is left")
    done = call(root, "query", "select count(*) from steps")
    assert done.returncode == 4 and f"{broken}/steps.parquet cannot be read as Parquet" in done.stderr
    assert call(root, "query", "select count(*) from steps", "--from", run).returncode == 0
    rows = json.loads(call(root, "query", "select distinct run from rollouts", "--json").stdout)["rows"]
    assert len(rows) == 2, "no table that is not asked about is read, and runs of one stage are told apart"


@pytest.mark.parametrize(
    "asked",
    [
        "select count(*) from range(10000000) a, range(100000000) b",
        pytest.param(
            "with recursive t(n) as (select 1 union all select n + 1 from t) select count(*) from t",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_an_endless_query_is_stopped(asked):
    with pytest.raises(UsageError, match=r"no answer after 1 seconds and was stopped\. Ask for less: [^\n]*$"):
        run_sql(sql_query({}, asked), limit_s=1)


def test_a_query_stopped_at_once_leaves_no_thread():
    before = {*threading.enumerate()}
    with pytest.raises(UsageError, match="had no answer"):
        run_sql(sql_query({}, "select count(*) from range(10000000) a, range(100000000) b"), limit_s=0)
    assert {*threading.enumerate()} <= before, "threads of earlier tests may end meanwhile"


def test_an_answer_with_too_many_rows_is_refused():
    with pytest.raises(UsageError, match="needs more than 1,000,000 rows for its answer"):
        run_sql(sql_query({}, "select * from range(2000000)"))


def test_a_sort_that_needs_much_memory_is_not_kept_in_the_working_folder():
    sorting = "select i, hash(i) as h from range(3000000) t(i) order by h"
    with pytest.raises(UsageError, match=r"needs more than 0\.0625 GB of memory"):
        run_sql(SqlQuery(sorting, {}, [], memory=2**26))


@pytest.mark.slow
def test_a_large_function_result_counts_against_the_memory_of_a_query(tmp_path):
    """DuckDB does not count it; as the largest of all answers it would be 2.4 GB, and twice that as a value."""
    asked = "select list_aggregate(range(300000000), 'sum'), range(300000000)"
    with subprocess.Popen(
        command("query", asked), env=environment(tmp_path), stderr=subprocess.PIPE, text=True
    ) as process:
        told = process.stderr.read()
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 2 and "needs more than 1 GB of memory. Ask for less" in told and told.count("\n") == 1
    assert used.ru_maxrss < 4.5 * 2**20, "KiB"


def test_a_query_restores_the_memory_limit(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_DATA)
    assert call(tmp_path, "query", "select 1").returncode == 0
    assert resource.getrlimit(resource.RLIMIT_DATA) == before


ASKING = """
import sys
from composer_cli.app import main
for question in sys.argv[1:]:
    try: main(["query", question, "--json"])
    except SystemExit as end:
        for stream in (sys.stdout, sys.stderr): print(end.code or 0, end="\\0", file=stream)
"""
"""Asks one question after the other; what is printed about each ends with its exit code and a NUL."""
ROOT = Path(__file__).parents[3]
QUARTER = "GB of memory, a quarter of what `ulimit -d`"
FITS = "select count(*) from range(9) where 1 = 1"


@pytest.mark.parametrize(
    ("megabytes", "questions"),
    [
        (300, {"select 1": "`ulimit -d` leaves "}),
        (1000, {FITS: "", "select i, hash(i) as h from range(30000000) t(i) order by h": QUARTER}),
        (700, {"select repeat('x', 300) || i as x from range(700000) t(i)": QUARTER}),
    ],
    ids=["libraries", "what fits and a sort", "answer"],
)
def test_a_query_under_a_memory_limit_is_answered_or_refused(tmp_path, megabytes, questions):
    """`questions`: what is said about each; "" where it is answered."""
    (tmp_path / "asking.py").write_text(ASKING)  # with -c DuckDB would take Python for interactive, and draw a bar
    words = [sys.executable, tmp_path / "asking.py", *questions]
    line = ["bash", "-c", f'ulimit -d {megabytes * 1024}; exec "$@"', "bash", *words]
    done = subprocess.run(
        line, capture_output=True, text=True, timeout=120, env=environment(tmp_path, PYTHONPATH=str(ROOT))
    )
    *shown, _ = done.stdout.split("\0")
    *told, rest = done.stderr.split("\0")
    assert len(shown) == len(told) == len(questions) and not rest, done.stderr
    for out, err, said in zip(shown, told, questions.values(), strict=True):
        assert out[-1] == ("2" if said else "0") and said in err, err
        assert err.count("\n") == bool(said), "nothing of the libraries' own"
        assert list(json.loads(out[:-1])) == (["error", "exit_code"] if said else ["rows"])


@pytest.mark.slow
def test_a_query_can_be_interrupted(tmp_path):
    endless = "select count(*) from range(10000000) a, range(100000000) b"
    with subprocess.Popen(
        command("query", endless), env=environment(tmp_path), stderr=subprocess.PIPE, text=True
    ) as process:
        until(lambda: "duckdb" in Path(f"/proc/{process.pid}/maps").read_text())
        time.sleep(1)  # until it is asked: an interrupt before is that of any command
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130
        assert "Traceback" not in process.stderr.read()
