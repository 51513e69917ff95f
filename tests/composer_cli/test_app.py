import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import typer
from support.command_line import environment, settings
from support.server import Reply, answer, serving

from composer_cli.__main__ import main as start
from composer_cli.app import click_command, main
from composer_cli.help import RARE_OPTIONS, first_sentence
from composer_cli.printing import EXTRAS
from composer_stages import STAGES, command_words
from composer_stages.runs.settings import Basic, known
from composer_stages.runs.stage import load_stage

ROOT = Path(__file__).parents[2]
HEAVY = {
    *("torch", "transformers", "trl", "pyarrow", "duckdb", "openai"),
    *("scipy", "matplotlib", "pydantic", "rich", "numpy"),
}


ANSWERS = """
import json, sys
from composer_cli.printing import EXTRAS
if sys.argv[2:]: sys.modules |= dict.fromkeys(EXTRAS)  # an import of one of them is an error
from composer_cli.app import main
before = set()
for words in json.loads(sys.argv[1]):
    try: main(words)
    except SystemExit as end: print(json.dumps([words, end.code, [*{*sys.modules} - before]]))
    before = {*sys.modules}
"""
"""Prints of every command its words, its exit code, and the modules that it imported; a second word hides torch."""


def test_help_lists_every_command_and_neither_it_nor_a_mistake_waits_for_a_heavy_import():
    """One process, so that a module counts for the first command that imports it."""
    mistakes = list[list[str]]()
    for stage, entry in STAGES.items():
        for words in (
            ["--no-such"],
            ["--set", "no_such_setting=1"],
            ["--config", "/no/such/file"],
            ["--from", "no-run"],
        ):
            given = entry.positionals and words[0] == "--from" and words[1:]
            mistakes.append([*command_words(stage).split()[1:], *(given or words)])
    mistakes += [line.split() for line in MISTAKES.strip().splitlines()]
    asked = [sys.executable, "-c", ANSWERS, json.dumps([["--help"], *mistakes])]
    offline = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(asked, capture_output=True, text=True, check=True, env=offline)
    assert all(f"\n  {name} " in done.stdout for name, one in click_command().commands.items() if not one.hidden)
    (_, code, modules), *answered = (json.loads(line) for line in done.stdout.splitlines() if line.startswith("[["))
    assert code == 0 and not HEAVY & {*modules}
    assert [words for words, _, _ in answered] == mistakes and {code for _, code, _ in answered} == {2, 3, 4}
    heavy = {" ".join(words): (HEAVY - {"pydantic"}) & {*modules} for words, _, modules in answered}
    assert {words: found for words, found in heavy.items() if found} == {
        "import no-run": {"numpy", "pyarrow"},
        "show no-run": {"duckdb", "rich"},
    }


MISTAKES = """
status --no-such
show no-run
cancel no-job
query selec
report no-run
publish no-run file:///no/such
view no-page
serve no-run
serve no/such
swe no-command
tasks check no.jsonl
tasks check --env kata --set no_such_setting=1
tasks convert no.jsonl
run
run --preset no-such
run --preset demo --set no_such_setting=1
run --preset demo --config /no/such/file
collect --env no-such
collect --policy ./no-model
collect --env kata --policy m --set policy.base_url=http://127.0.0.1:9/v1 --dry-run
train --policy ./no-model
evaluate --env no-such
"""
"""A mistake a line, of commands that are no stage's, and about what stages read."""


WITHOUT_TORCH = """
import asyncio, json, sys
from pathlib import Path
from composer_cli.printing import EXTRAS
sys.modules |= dict.fromkeys(EXTRAS)  # an import of one of them is an error
from composer_cli.app import main
calls, root = json.loads(sys.argv[1]), Path(sys.argv[2])
codes = []
for words in calls:
    try:
        codes.append(main(words))
    except SystemExit as end:
        codes.append(end.code)
from composer_cli.view.app import build

async def status(path):
    async def send(message):
        codes.extend([message["status"]] if "status" in message else [])
    async def receive():
        return {"type": "http.request"}
    scope = {"type": "http", "method": "GET", "path": f"/token/{path}", "query_string": b"", "scheme": "http",
             "headers": [(b"host", b"127.0.0.1")], "server": ("127.0.0.1", 80), "http_version": "1.1"}
    await build(root, "token")(scope, receive, send)

for run in ("", *(f"run/{path.parent.name}/{path.name}" for path in sorted(root.glob("*/2*")))):
    asyncio.run(status(run))
print(json.dumps(codes))
"""


def test_reading_and_comparing_need_no_extra(own_runs, tmp_path):
    """`import`, `compare`, plans of evaluations, `query`, `report`, `view` and every `--help`: no torch, no scipy."""
    said = [{"role": "user", "content": "Add."}, {"role": "assistant", "content": "3"}]
    (tmp_path / "one.jsonl").write_text(json.dumps({"messages": said, "reward": 1.0}))
    for name, score in (("before", 0), ("after", 1)):
        (tmp_path / f"{name}.csv").write_text("id,score\n" + "".join(f"{task},{score}\n" for task in range(9)))
    looks = [
        ["query", "select 1"],
        ["report"],
        ["import", str(tmp_path / "one.jsonl")],
        ["compare", str(tmp_path / "before.csv"), str(tmp_path / "after.csv")],
        ["evaluate", "-n", "9", "--set", "planning.gain=0.5", "--plan"],
        ["status"],
        ["show", "collect"],
    ]
    helps = [[*name.split("-", 1), "--help"] if name.startswith("probe-") else [name, "--help"] for name in STAGES]
    unknown = ["collect", "--policy", "kata:studnet"]
    local = ["collect", "--policy", "kata:student", "-n", "1"]
    script = [sys.executable, "-c", WITHOUT_TORCH, json.dumps([*looks, *helps, unknown, local]), str(own_runs)]
    done = subprocess.run(script, capture_output=True, text=True, env=environment(own_runs, PYTHONPATH=str(ROOT)))
    assert done.returncode == 0, done.stderr
    codes = json.loads(done.stdout.splitlines()[-1])
    commands, pages = codes[: len(looks + helps)], codes[len(looks + helps) + 2 :]
    said = "There is no built-in model kata:studnet. Did you mean kata:student? There is kata:honest, kata:loophole, "
    assert codes[len(commands)] == 4 and said in done.stderr
    assert codes[len(commands) + 1] == 2 and "`pip install 'composer-post-training[train]'`" in done.stderr
    assert set(commands) <= {0, None}, dict(zip(map(" ".join, looks + helps), commands, strict=True))
    assert len(pages) > 4 and set(pages) == {200}


TEACHER = """
[[teachers]]
name = "t"
model = "m"
base_url = "{url}"
max_tokens = 8
usd_per_mtok_in = 1.0
usd_per_mtok_out = 2.0
"""


def exit_codes(printed):
    """The exit codes of the commands of `ANSWERS`."""
    return [json.loads(line)[1] or 0 for line in printed.splitlines() if line.startswith('[["')]


def test_answers_of_a_priced_server_are_read_without_any_extra(tmp_path):
    """Each was paid and lost, as its reader imported a package of the extra `train`; --resume bought them again."""
    credit = [2]

    def reply(body, earlier):
        if earlier == credit[0]:
            credit[0] = 1000
            return Reply(402, {"error": {"message": "no credit"}})
        return Reply(body=answer("42"))

    with serving(reply) as server:
        (tmp_path / "teachers.toml").write_text(TEACHER.format(url=server.url))
        priced = {"model": "m", "base_url": server.url, "max_tokens": 8, "concurrency": 1, "timeout_s": 20}
        priced |= {"usd_per_mtok_in": 1.0, "usd_per_mtok_out": 2.0}
        arms = [f"policies.{arm}.{key}={value}" for arm in "AB" for key, value in {**priced, "temperature": 1}.items()]
        collect = ["collect", "--env", "skills", "-n", "4", *settings("samples=1"), "--out", str(tmp_path / "c"), "-q"]
        collect += settings(*(f"policy.{key}={value}" for key, value in priced.items()))
        teachers = ["--from", str(tmp_path / "c"), "--teachers", str(tmp_path / "teachers.toml"), "-q"]
        evaluate = ["evaluate", "--env", "skills", "-n", "2", *settings("samples=1", "control=null", *arms), "-q"]
        calls = [collect, [*collect, "--resume"], ["replay-teachers", *teachers], evaluate]
        script = [sys.executable, "-c", ANSWERS, json.dumps(calls), "without extra"]
        env = environment(tmp_path / "artifacts", PYTHONPATH=str(ROOT))
        done = subprocess.run(script, capture_output=True, text=True, env=env, cwd=tmp_path)
    assert exit_codes(done.stdout) == [3, 0, 0, 3], done.stderr
    assert len(server.requests) == (2 + 1) + 2 + 4 + 2, "the arms are one model, whose answers are bought once"


def test_answer_readers_are_imported_before_the_first_call(tmp_path):
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "huggingface_hub.py").write_text("raise ImportError('of another architecture')")
    with serving(lambda body, earlier: Reply(body=answer("42"))) as server:
        priced = {"model": "m", "base_url": server.url, "max_tokens": 8, "usd_per_mtok_in": 1, "usd_per_mtok_out": 2}
        words = ["collect", "--env", "skills", "-n", "4", *settings("samples=1", "policy.timeout_s=20")]
        words += [*settings(*(f"policy.{key}={value}" for key, value in priced.items())), "-q"]
        env = environment(tmp_path, PYTHONPATH=os.pathsep.join([str(tmp_path / "broken"), str(ROOT)]))
        script = [sys.executable, "-c", ANSWERS, json.dumps([[*words, "--dry-run"], words])]
        done = subprocess.run(script, capture_output=True, text=True, env=env, cwd=tmp_path)
    assert exit_codes(done.stdout) == [5, 5] and done.stderr.count("of another architecture") == 2, done.stderr
    assert server.requests == []


def test_training_dependencies_are_an_extra():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {
        re.split(r"[\[>=<;]", line)[0]: extra
        for extra in ("train", "charts")
        for line in project["optional-dependencies"][extra]
    }
    assert extras == EXTRAS
    assert not extras.keys() & {re.split(r"[\[>=<;]", line)[0] for line in project["dependencies"]}


def test_a_stage_lists_its_settings_and_only_the_short_options_it_has(composer):
    collect, pairs = composer("collect", "--help").stdout, composer("extract-pairs", "--help").stdout
    assert "policy.temperature=1.0" in collect and "--env" in collect
    assert "compare=outcome" in pairs and "--env" not in pairs and "--teachers" not in pairs
    assert "--teachers" in composer("replay-teachers", "--help").stdout


def test_help_shows_what_most_runs_need_and_with_all_the_rest(composer):
    keys = [key for key, _ in known(load_stage("train").config)]
    short, full = composer("train", "--help").stdout, composer("train", "--help", "--all").stdout
    shown = [key for key in keys if re.search(rf"^  {re.escape(key)}\b(?!\.)", short, re.MULTILINE)]
    assert {"arm", "policy.model", "weights.dpo", "optimisation.steps"} <= set(shown) and len(shown) < 30
    assert "--artifacts" not in short and "--artifacts" in full
    assert all(re.search(rf"^  {re.escape(key)}\b", full, re.MULTILINE) for key in keys)
    assert f"lists {len(keys) - len(shown)} settings and" in short and "--help --all" not in full
    for words in (["--all"], ["--all", "--help"], ["-h", "--all"]):
        assert composer("train", *words).stdout == full
    full = composer("run", "--all").stdout
    assert "on.setup" not in composer("run", "--help").stdout and "Settings of --on slurm" in full
    assert "on.setup" in full and "on.options" in full


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ["--env", "skills"],
            "Options of skills, for --set env.KEY=VALUE: env.families '' unless it is set env.held_out",
        ),
        (["--env=tasks"], "Options of tasks, for --set env.KEY=VALUE: env.path"),
        (
            ["--env", "kata", "--env", "skils"],
            "Options of skils, for --set env.KEY=VALUE: skils There is no environment",
        ),
        (
            ["--env", "composer_stages.envs.answered:AnsweredEnv"],
            "KEY=VALUE: composer_stages.envs.answered:AnsweredEnv It has",
        ),
        ([], None),
    ],
)
def test_help_lists_the_options_of_the_environment_that_is_named(composer, words, told):
    shown = " ".join(composer("collect", *words, "--help", COLUMNS="200").stdout.split())
    assert "Options of" not in shown if told is None else told in shown


def test_every_basic_setting_and_rare_option_exists():
    for stage in STAGES:
        config = load_stage(stage).config
        keys = [key for key, _ in known(config)]
        for name, field in config.model_fields.items():
            for mark in (one for one in field.metadata if isinstance(one, Basic)):
                below = [
                    key.removeprefix(name).removeprefix(".").removeprefix("N.")
                    for key in keys
                    if key.split(".")[0] == name
                ]
                assert set(mark.keys) <= {*below, "*"}, f"{stage}: {name}"
    commands = click_command().commands.values()
    assert set(RARE_OPTIONS) <= {param.name for one in commands for param in one.get_params(typer.Context(one))}


@pytest.mark.parametrize("group", [[], ["probe"], ["swe"]])
def test_no_summary_of_a_command_is_cut_off(group, composer):
    shown = " ".join(composer(*group, "--help", COLUMNS="80").stdout.split())
    command = click_command()
    for word in group:
        command = command.commands[word]
    assert "..." not in shown.replace("[ARGS]...", "")
    assert all(first_sentence(one.help) in shown for one in command.commands.values())


def test_version_says_which_composer_this_is(composer):
    done = composer("--version")
    assert done.returncode == 0 and "post-training coding agents" in done.stdout and str(ROOT) in done.stdout


def test_a_deleted_working_folder_is_said_in_a_sentence(tmp_path, monkeypatch, capsys):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(SystemExit) as ended:
        main(["status"])
    assert ended.value.code == 2 and "working folder was deleted" in capsys.readouterr().err


@pytest.mark.parametrize("wanted", ["1", "0"])
def test_trainings_are_reported_to_hugging_face_only_where_somebody_wants_it(
    wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["composer", "--version"])
    monkeypatch.delenv("HF_HUB_DISABLE_TELEMETRY")
    if wanted == "0":
        monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "0")
    with pytest.raises(SystemExit):
        start()
    assert os.environ["HF_HUB_DISABLE_TELEMETRY"] == wanted
