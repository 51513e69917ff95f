"""Sixty more bad inputs: of presets, teacher tables, budgets, helps, folders, runs and addresses. One sentence each."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest

URL = "policy.base_url=http://127.0.0.1:9/v1"
COLLECT = ["collect", "--policy", "m", "-s", URL, "-s", "policy.max_attempts=1"]
REPLAY = ["replay-teachers", "--teachers"]
PRESETS = {
    "twice.toml": '[[stage]]\nstage = "collect"\n[[stage]]\nstage = "collect"\n',
    "later.toml": '[[stage]]\nstage = "extract-pairs"\nfrom = ["collect"]\n[[stage]]\nstage = "collect"\n',
    "unknown.toml": '[[stage]]\nstage = "colect"\n',
    "empty.toml": "",
    "gpus.toml": '[[stage]]\nstage = "collect"\ngpus = -1\n',
    "text.toml": 'stage = "collect"\n',
    "config.toml": '[[stage]]\nstage = "collect"\nconfig = 3\n',
    "key.toml": '[[stage]]\nstage = "collect"\nconfg = {}\n',
    "value.toml": '[[stage]]\nstage = "collect"\n[stage.config]\ntasks = "many"\n',
    "date.toml": '[[stage]]\nstage = "collect"\n[stage.config]\ntasks = 2026-01-01\n',
}
TEACHERS = {
    "no-teacher.toml": "teachers = []\n",
    "one.toml": '[teachers]\nname = "a"\n',
    "same.toml": '[[teachers]]\nname = "a"\nmodel = "m"\n' * 2,
    "negative.toml": '[[teachers]]\nname = "a"\nmodel = "m"\nmax_tokens = -5\n',
    "price.toml": '[[teachers]]\nname = "a"\nmodel = "m"\nusd_per_mtok_in = -1.0\n',
    "stream.toml": '[[teachers]]\nname = "a"\nmodel = "m"\nextra_body = { stream = true }\n',
    "scheme.toml": '[[teachers]]\nname = "a"\nmodel = "m"\nbase_url = "file:///etc/passwd"\n',
    "no-model.toml": '[[teachers]]\nname = "a"\n',
    "binary.toml": "\x00\x01",
}
OTHERS = {
    "rows.jsonl": '{"id": 1}\n{"id": \n',
    "task.jsonl": '{"prompt": "p", "test": "true"}\n',
    "list.json": "[]",
    "not-a-run/manifest.json": "{}",
    "number-run/manifest.json": "3",
    "model/config.json": "{}",
}
TABLE: list[tuple[list[str], int, str]] = [
    *((["run", "--preset", f"{{tmp}}/{name}"], 2, part) for name, part in (
        ("twice.toml", "two entries are called 'collect'"),
        ("later.toml", "no earlier entry"),
        ("unknown.toml", "colect"),
        ("empty.toml", "it has no [[stage]] tables"),
        ("gpus.toml", "gpus"),
        ("text.toml", "is no preset"),
        ("config.toml", "config"),
        ("key.toml", "confg"),
        ("value.toml", "tasks"),
        ("date.toml", "tasks"),
    )),
    (["collect", "--samples", "2"], 2, "Did you mean the setting --set samples=2? `composer collect --help`"),
    (["collect", "--limit", "abc"], 2, "--limit / -n cannot be 'abc': it should be a whole number."),
    (["collect", "-s", "tasks=abc"], 2, "tasks = 'abc': it should be a whole number."),
    (["train", "-s", "weights.dpo=much"], 2, "weights.dpo = 'much': it should be a number."),
    (["collect", "-s", "env=3"], 2, "env = 3: it should be a table of keys and values."),
    (["replay-teachers", "-s", "teachers=[]"], 2, "teachers = []: it should not be empty."),
    (["collect", "--temprature=0"], 2, "--set policy.temperature=VALUE?"),
    (["train", "--lr", "3e-4"], 2, "--set optimisation.learning_rate=3e-4?"),
    (["collect", "--limt", "2"], 2, "--limit"),
    (["run", "--preset", "demo", "--samples", "2"], 2, "--set KEY=VALUE or --set STAGE.KEY=VALUE"),
    (["tasks", "chek", "rows.jsonl"], 2, "Did you mean 'tasks check'?"),
    (["query", "select rnu from runs"], 2, 'Candidate bindings: "run"'),
    (["run", "--preset", "{tmp}"], 2, "There is no preset"),
    (["run", "--preset", ""], 2, "There is no preset"),
    (["run", "--preset", "examples/no-such.toml"], 2, "no-such.toml"),
    (["run", "--preset", "demo", "--resume", "--clean"], 2, "Leave out one of them"),
    (["run", "--preset", "demo", "--on", "slurmm"], 2, "slurmm"),
    (["run", "--preset", "demo", "--tune", "x"], 2, "--tune"),
    (["run", "--preset", "demo", "--tune", "no.such=1,2"], 2, "has no setting no"),
    (["run", "--preset", "demo", "--max-cost", "-3"], 2, "--max-cost"),
    (["run", "--preset", "demo", "-s", "train.arm=a/b"], 2, "arm"),
    (["run", "--preset", "demo", "-s", "A-0"], 2, "KEY=VALUE"),
    (["run", "demo"], 2, "Did you mean --preset demo?"),
    (["run", "--preset", "demoo"], 2, "Did you mean 'demo'?"),
    (["collect", "my.jsonl"], 2, "Tasks in a file are given with --env tasks --set env.path=my.jsonl."),
    (["collect", "--env", "my.jsonl"], 2, "Tasks in a file are given with --env tasks --set env.path=my.jsonl."),
    (["collect", "--set", "tasks", "=", "2"], 2, "A setting is written without spaces: --set KEY=VALUE."),
    (["query", "select", "run", "from", "runs"], 2, "Quote what is one argument."),
    (["export"], 2, "Write `composer export FORMAT [RUN]`."),
    (["import", "{tmp}/task.jsonl"], 4, "it is a task and no rollout"),
    (["collect", "--env", "tasks", "-s", "env.path={tmp}"], 4, ", a folder. Name a .jsonl"),
    (["collect", "--policy", "refrence"], 4, "Did you mean 'reference'?"),
    (["collect", "--policy", "{tmp}/not-a-run", "-n", "1"], 4, "it has neither config.json nor adapter_config.json"),
    ([*COLLECT, "-s", "policy.api_key_env=sk-secret"], 2, "api_key_env takes the name of an environment variable"),
    *(([*REPLAY, f"{{tmp}}/{name}"], 2, part) for name, part in (
        ("no-teacher.toml", "teachers"),
        ("one.toml", "teachers"),
        ("same.toml", "same name"),
        ("negative.toml", "(of a)"),
        ("price.toml", "prices cannot be negative"),
        ("stream.toml", "stream"),
        ("scheme.toml", "is no address"),
        ("no-model.toml", "needs the setting teachers.0.model (of a)"),
        ("binary.toml", "not valid TOML"),
    )),
    ([*REPLAY, "{tmp}"], 2, "cannot be read"),
    ([*REPLAY, ""], 2, "cannot be read"),
    ([*COLLECT, "--resume", "--clean"], 2, "Leave out one of them"),
    ([*COLLECT, "-s", "policy.max_tokens=0"], 2, "max_tokens"),
    ([*COLLECT, "-s", "policy.max_tokens=1.5"], 2, "max_tokens"),
    ([*COLLECT, "-s", "policy.max_tokens=9223372036854775808"], 2, "64 bits"),
    ([*COLLECT, "-s", "limits.context_tokens=-1"], 2, "context_tokens"),
    ([*COLLECT, "-s", "limits.context_tokens=1.5"], 2, "context_tokens"),
    ([*COLLECT, "-s", 'policy.extra_body={n=3}'], 2, "one answer"),
    ([*COLLECT, "-s", "policy.request={max_tokens=false}"], 2, "max_completion_tokens"),
    ([*COLLECT, "-s", "policy.server.args={BAD=1}"], 2, "args"),
    ([*COLLECT, "-s", "policy.chat_template_kwargs={'a b'=1}"], 2, "chat_template_kwargs"),
    ([*COLLECT, "-s", "policy.price=free"], 2, "unknown"),
    ([*COLLECT, "-s", "policy.base_url=http:///v1"], 2, "is no address"),
    ([*COLLECT, "-s", "policy.base_url=127.0.0.1:9"], 2, "is no address"),
    ([*COLLECT, "-s", "history=last"], 2, "history"),
    ([*COLLECT, "-s", "env.curriculum=/no/such"], 4, "/no/such"),
    ([*COLLECT, "--out", ""], 2, ""),
    ([*COLLECT, "--artifacts", "s3://bucket"], 2, "is an address"),
    ([*COLLECT, "-s", "\x1b[2J=1"], 2, "no setting"),
    (["collect", "--policy", "{tmp}/model"], 4, "model"),
    (["collect", "--policy", "{tmp}/list.json"], 4, "list.json is a file."),
    (["collect", "--policy", "vllm:", "-s", URL], 2, "model"),
    (["collect", "--al"], 2, "--al"),
    (["train", "-s", "weights.dpo=-1"], 2, "weights.dpo"),
    (["train", "-s", "adapter.rank=-1"], 2, "adapter.rank"),
    (["train", "-s", "optimisation.steps=0"], 2, "optimisation.steps"),
    (["evaluate", "--plan", "-s", "planning.power=2"], 2, "planning.power"),
    (["import", "{tmp}/rows.jsonl"], 4, "rows.jsonl"),
    (["import", "{tmp}/list.json"], 4, "list.json"),
    (["show", "{tmp}/not-a-run"], 4, "manifest.json"),
    (["show", "{tmp}/number-run"], 4, "manifest.json"),
    (["query", "drop table runs"], 2, "SELECT"),
    (["query", "select 1; select 2"], 2, "one"),
    (["query", "copy (select 1) to '/tmp/x'"], 2, "SELECT"),
    (["publish", "nothing", "s3://bucket/run"], 4, "There is no run 'nothing'"),
    (["cancel", "nothing"], 4, "nothing"),
    (["serve", "./nowhere"], 4, "nowhere"),
    (["curriculum", "nothing"], 4, "There is no run 'nothing'"),
    (["normalize", "nothing"], 4, "nothing"),
    (["probe", "compare", "--from", "nothing"], 4, "There is no run 'nothing'"),
    (["probe", "svd", "--from", "x"], 2, "reads no runs"),
    # What a command works on and cannot find: 4.
    (["collect", "--env", "tasks", "-s", "env.path=nowhere.jsonl"], 4, "nowhere.jsonl cannot be read"),
    (["collect", "--env", "harbor", "-s", "env.path=nowhere"], 4, "no such folder"),
    (["collect", "--env", "gsm8k", "-s", "env.path=nowhere.jsonl"], 4, "nowhere.jsonl cannot be read"),
    (["collect", "--env", "swe-lite", "-s", "env.path=nowhere.jsonl"], 4, "nowhere.jsonl"),
    (["collect", "--env", "feature-deletion", "-s", "env.package=nowhere"], 4, "no package at"),
    (["tasks", "check", "nowhere.jsonl"], 4, "nowhere.jsonl cannot be read"),
    (["tasks", "feature-deletion", "nowhere"], 4, "There is no package 'nowhere'"),
    (["import", "nowhere.jsonl"], 4, "neither a file nor a folder"),
    (["evaluate"], 4, "`composer train`"),
    (["evaluate", "--plan", "--from", "nowhere"], 4, "There is no run 'nowhere'"),
    # Settings that it cannot find, in files too: 2.
    (["collect", "-c", "nowhere.toml"], 2, "nowhere.toml cannot be read"),
    (["replay-teachers", "--teachers", "nowhere.toml"], 2, "nowhere.toml cannot be read"),
    (["run", "--preset", "nowhere.toml"], 2, "nowhere.toml cannot be read"),
    (["run", "--preset", "nowhere"], 2, "There is no preset 'nowhere'"),
    (["tasks", "rows.jsonl"], 2, "`composer tasks check rows.jsonl`"),
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(place: Path) -> Path:
    """The files, beside those of the other bad inputs."""
    for name, text in (PRESETS | TEACHERS | OTHERS).items():
        (place / name).parent.mkdir(exist_ok=True)
        (place / name).write_text(text)
    return place


@pytest.mark.parametrize(
    ("words", "code", "part"), TABLE, ids=lambda value: repr(" ".join(value)) if isinstance(value, list) else ""
)
def test_bad_input_is_one_clear_sentence_within_ten_seconds(
    say: Callable[..., tuple[int, str, str]], folder: Path, words: list[str], code: int, part: str
) -> None:
    before = set((folder / "artifacts").glob("*/2*"))
    started = time.thread_time()
    found, out, err = say(*words)
    assert time.thread_time() - started < 10
    last = (err.splitlines() or [""])[-1]
    assert found == code, err
    assert "failed unexpectedly" not in err and "Traceback" not in err and "\x1b" not in err and not out
    assert part.replace("{tmp}", str(folder)) in last and last.endswith((".", "?", "`", ")")), err
    assert set((folder / "artifacts").glob("*/2*")) == before


def test_there_are_sixty() -> None:
    assert len(TABLE) >= 60
