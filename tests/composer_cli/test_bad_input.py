"""Bad inputs, each answered by one clear sentence and the right exit code, and by nothing on disk."""

import json

import pytest

COLLECT = ["collect", "--policy", "m", "-s", "policy.base_url=http://127.0.0.1:9/v1", "-s", "policy.max_attempts=1"]
POOL = ["probe", "teacher-pool"]
IN_FILE = ["--artifacts", "{tmp}/binary"]


def settings(command: list[str], *pairs: str) -> list[tuple[list[str], int, str]]:
    return [([*command, "-s", pair], 2, pair.partition("=")[0].rpartition(".")[2]) for pair in pairs]


NUMBERS = [
    f"{key}={value}"
    for key in ("tasks", "samples", "max_steps", "policy.max_tokens", "policy.concurrency", "policy.max_attempts")
    for value in ("0", "-1", "true", "1.5", "nan", "many", "[]")
]
FLOATS = [
    f"policy.{key}={value}"
    for key, values in {
        "temperature": ("-1", "inf", "nan", "true", "warm", "-inf"),
        "timeout_s": ("0", "-1", "inf", "false"),
        "usd_per_mtok_in": ("inf", "nan", "true"),
        "usd_per_mtok_out": ("inf", "cheap"),
    }.items()
    for value in values
]
TABLE: list[tuple[list[str], int, str]] = [
    *settings(COLLECT, *NUMBERS, *FLOATS),
    *settings(COLLECT, "tasks=100000000", "samples=100000000", "seed=true", "seed=x", "env.split=test", "nonsense=1"),
    *settings(COLLECT, "policy.base_url=localhost:8000/v1", "policy.base_url=ftp://x"),
    *settings(["train"], "arm=''", "arm='a/b'", "tasks=100000000", "policy.temperature=0", "tasks=true"),
    *settings(["evaluate"], "tasks=100000000", "tasks=0", "temperature=inf", "temperature=true", "samples=0"),
    *settings(["extract-pairs"], "no_such_setting=1"),
    *settings(POOL, "no_such_setting=1", "samples=true"),
    ([*COLLECT, "-s", "policy.usd_per_mtok_in=-1"], 2, "prices cannot be negative"),
    ([*POOL, "-s", "no_such_setting=1"], 2, "no setting no_such_setting"),
    ([*POOL, "-s", "sample=1"], 2, "`composer probe teacher-pool --help`"),
    (["probe", "svd", "-s", "zzz.yyy.xxx=1"], 2, "zzz"),
    (["probe-teacher-pool"], 2, "probe-teacher-pool"),
    (["colect"], 2, "Did you mean 'collect'?"),
    *((command, 2, "is a file") for command in (["view", *IN_FILE], ["status", *IN_FILE], ["run", *IN_FILE])),
    ([*COLLECT, "--on", "magic"], 2, "processes:N, ray"),
    ([*COLLECT, "--on", "processes:0"], 2, "processes:N, ray"),
    (["train", "--on", "ray"], 2, "--on"),
    (["probe", "colect"], 2, "colect"),
    (["collect", "--nonsense"], 2, "--nonsense"),
    (["collect", "--set"], 2, "--set"),
    ([*COLLECT, "-s", "tasks"], 2, "KEY=VALUE"),
    ([*COLLECT, "-s", "=3"], 2, "KEY=VALUE"),
    ([*COLLECT, "-s", "a..b=3"], 2, "KEY=VALUE"),
    ([*COLLECT, "-s", "policy=3"], 2, "policy"),
    ([*COLLECT, "-s", "env=3"], 2, "env"),
    ([*COLLECT, "-s", "env.options=3"], 2, "options"),
    ([*COLLECT, "-s", "env.no_such_option=3"], 2, "no option 'no_such_option'"),
    ([*COLLECT, "-c", "/no/such.toml"], 2, "/no/such.toml"),
    ([*COLLECT, "-c", "{tmp}"], 2, "{tmp}"),
    ([*COLLECT, "-c", "{tmp}/bad.toml"], 2, "not valid TOML"),
    ([*COLLECT, "-c", "{tmp}/binary"], 2, "not valid TOML"),
    ([*COLLECT, "--limit", "many"], 2, "--limit"),
    ([*COLLECT, "--limit", "0"], 2, "--limit / -n cannot be '0'"),
    ([*COLLECT, "--seed", "x"], 2, "--seed"),
    ([*COLLECT, "--seed", "99999999999999999999999"], 2, "more than 64 bits hold"),
    ([*COLLECT, "-s", "seed=1e400"], 2, "finite"),
    ([*COLLECT, "-s", "report_to=tensorbord"], 2, "it should be 'tensorboard', 'trackio' or 'wandb'"),
    ([*COLLECT, "-s", "report_to=3"], 2, "report_to"),
    ([*COLLECT, "-s", "history=last 0"], 2, "history"),
    ([*COLLECT, "-s", "limits.wall_s=-1"], 2, "limits.wall_s"),
    ([*COLLECT, "-s", "in_flight.episodes=0"], 2, "in_flight.episodes"),
    ([*COLLECT, "-s", "policy.tool_calls=maybe"], 2, "policy.tool_calls"),
    (["import", "{tmp}/binary"], 4, "binary"),
    (["import", "{tmp}/empty.jsonl"], 4, "Nothing could be imported"),
    (["import", "{tmp}/torn.eval"], 4, "damaged_record"),
    (["export", "inspect"], 4, "Run `composer collect`"),
    (["view", "--port", "99999"], 2, "Port 99999"),
    (["view", "--port", "x"], 2, "--port"),
    ([*COLLECT, "--max-cost", "-1"], 2, "--max-cost"),
    ([*COLLECT, "--max-cost", "nan"], 2, "--max-cost"),
    ([*COLLECT, "--max-cost", "much"], 2, "--max-cost"),
    ([*COLLECT, "--env", ""], 2, "no environment ''"),
    ([*COLLECT, "--env", "no-such-env"], 2, "no environment 'no-such-env'"),
    ([*COLLECT, "--env", "no_such_module:Env"], 2, "could not be imported"),
    ([*COLLECT, "--env", "orjson:NoSuchClass"], 2, "could not be imported"),
    ([*COLLECT, "--env", "os:system", "-s", "env.options.command='true'"], 2, "standard library"),
    ([*COLLECT, "--env", "orjson:loads"], 2, "is no class, so it is no environment"),
    (
        [*COLLECT, "--env", "pydantic:BaseModel"],
        2,
        "lacks the methods tasks, reset, step, grade, close, so it is no environment",
    ),
    ([*COLLECT, "--env", "json:"], 2, "json:"),
    ([*COLLECT, "--env", "json:dumps"], 2, "json:dumps"),
    ([*COLLECT, "--env", "bad_env:Broken"], 2, "bad_env.py, line"),
    ([*COLLECT, "--env", "bad_env:NoTasks"], 2, "bad_env.py, line"),
    ([*COLLECT, "--env", "bad_env:WrongTasks"], 2, "a list of Task is needed"),
    ([*COLLECT, "--env", "bad_env:Twice"], 2, "twice"),
    ([*COLLECT, "--env", "bad_env:NoJson"], 2, "JSON cannot hold"),
    ([*COLLECT, "--env", "syntax_env:Env"], 2, "could not be imported"),
    ([*COLLECT, "-s", "sandbox=no-such-sandbox"], 2, "no-such-sandbox"),
    ([*COLLECT, "--from", "x"], 2, "reads no runs"),
    ([*COLLECT, "extra"], 2, "extra"),
    ([*COLLECT, "--out", "/proc/x"], 2, "Nothing can be written to /proc"),
    ([*COLLECT, "--out", "/proc/x/y"], 2, "Nothing can be written to /proc"),
    ([*COLLECT, "--artifacts", "/proc"], 2, "Nothing can be written to /proc"),
    ([*COLLECT, "--artifacts", "{tmp}/binary"], 2, "{tmp}/binary"),
    ([*COLLECT, "--out", "{tmp}/binary"], 2, "is a file"),
    ([*COLLECT, "--out", "{tmp}"], 2, "not empty"),
    ([*COLLECT, "-s", "policy.api_key_env=NO_SUCH_KEY_VARIABLE"], 2, "NO_SUCH_KEY_VARIABLE"),
    (["collect", "--policy", "./nowhere"], 4, "no model folder"),
    (["collect", "--policy", "/no/where"], 4, "no model folder"),
    (["collect", "--policy", "kata:nobody"], 4, "kata:nobody"),
    (["collect", "--policy", ""], 2, "model"),
    (["tasks"], 2, "From which package?"),
    (["tasks", "feature-deletion"], 2, "From which package?"),
    (["tasks", "feature-deletion", "/no/such/package"], 4, "/no/such/package"),
    (["tasks", "no-such-env", "x"], 2, "no-such-env"),
    (["tasks", "feature-deletion", "x", "y"], 2, "one word too many"),
    (["import"], 2, "import"),
    (["import", "/no/such/file"], 4, "/no/such/file"),
    (["export"], 2, "format"),
    (["export", "no-such-format"], 2, "no-such-format"),
    (["extract-pairs"], 4, "Run `composer collect`"),
    (["extract-pairs", "-n", "3"], 2, "-n"),
    (["replay-teachers"], 4, "Run `composer collect`"),
    (["replay-teachers", "--teachers", "/no/such.toml"], 2, "/no/such.toml"),
    (["replay-teachers", "--teachers", "{tmp}/other.toml"], 2, "[[teachers]]"),
    (["replay-teachers", "--teachers", "{tmp}/nameless.toml"], 2, "name"),
    (["replay-teachers", "--from", "{tmp}/other-run"], 4, "not a run folder"),
    (["evaluate"], 4, "--from"),
    (["evaluate", "--from", "nothing"], 4, "There is no run 'nothing'"),
    (["train", "--from", "nothing"], 4, "There is no run 'nothing'"),
    (["probe", "replay"], 4, "Run `composer probe teacher-pool`"),
    (["probe", "score"], 4, "Run `composer probe replay`"),
    (["probe", "uat"], 4, "composer probe"),
    (["show"], 2, "RUN"),
    (["show", "nothing"], 4, "There is no run 'nothing'"),
    (["show", "/proc"], 4, "not a run folder"),
    (["show", "{tmp}/empty-manifest"], 4, "manifest.json"),
    (["show", "x", "-n", "-1"], 2, "-n"),
    (["query"], 2, "SQL"),
    (["query", "selec 1"], 2, "cannot be answered"),
    (["query", "select * from rolouts"], 2, "no run here holds a table rolouts"),
    (["query", "select * from nowhere"], 2, "tables"),
    (["query", ""], 2, "question"),
    (["query", "select 1", "--from", "nothing"], 4, "There is no run 'nothing'"),
    (["report"], 4, "no finished run"),
    (["report", "nothing"], 4, "There is no run 'nothing'"),
    (["run"], 2, "Which preset?"),
    (["run", "--preset", "nothing"], 2, "There is no preset 'nothing'"),
    (["run", "--preset", "/no/such.toml"], 2, "/no/such.toml"),
    (["run", "--preset", "{tmp}/other.toml"], 2, "is no preset"),
    (["run", "--preset", "{tmp}/bad.toml"], 2, "not valid TOML"),
    (["run", "--preset", "demo", "-s", "nonsense=1"], 2, "no entry 'nonsense'"),
    (["run", "--preset", "demo", "-s", "collect.nonsense=1"], 2, "no setting nonsense"),
]


@pytest.mark.parametrize(
    ("words", "code", "part"), TABLE, ids=lambda value: " ".join(value) if isinstance(value, list) else ""
)
def test_bad_input_is_one_clear_sentence(say, place, words, code, part):
    found, out, err = say(*words)
    last = (err.splitlines() or [""])[-1]
    assert found == code, err
    assert "failed unexpectedly" not in err and "Traceback" not in err and not out
    assert part.replace("{tmp}", str(place)) in last and last.endswith((".", "?", "`")), last
    assert not list((place / "artifacts").glob("*/2*"))


def test_the_table_is_long():
    assert len(TABLE) >= 150


@pytest.mark.parametrize("words", [["collect", "-s", "tasks=0"], ["show", "nothing"], ["colect"], ["run"]])
def test_a_failure_is_json_where_json_is_asked_for(say, words):
    code, out, err = say(*words, "--json")
    told = json.loads(out)
    assert told["exit_code"] == code and told["error"] and err


def test_a_dry_run_of_a_chain_is_json_where_json_is_asked_for(say):
    code, out, _ = say("run", "--preset", "demo", "--dry-run", "--json")
    assert code == 0 and json.loads(out)["entries"][0]["plan"]["units"] > 0


def test_limit_is_listed_only_where_it_works(say):
    assert "--limit" in say("collect", "--help")[1] and "--limit" not in say("extract-pairs", "--help")[1]
