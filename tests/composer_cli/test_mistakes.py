"""Mistakes of a user, each answered by one clear sentence and the right exit code, and by nothing on disk.

A row is a mistake that takes another branch of the code, or one that was reported. All that an answer must hold is the
value or the remedy.
"""

import errno
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import typer

from composer_cli.printing import reporting_errors
from composer_stages.errors import Breakdown

URL = "policy.base_url=http://127.0.0.1:9/v1"
COLLECT = ["collect", "--policy", "m", "-s", URL, "-s", "policy.max_attempts=1"]
REPLAY, POOL = ["replay-teachers", "--teachers"], ["probe", "teacher-pool"]
IN_FILE = ["--artifacts", "{tmp}/binary"]
SIDES = ["compare", "{tmp}/left.csv", "{tmp}/right.csv"]
TEACHERS = {
    "one.toml": '[teachers]\nname = "a"\n',
    "same.toml": '[[teachers]]\nname = "a"\nmodel = "m"\n' * 2,
    "student.toml": '[[teachers]]\nname = "student"\nmodel = "m"\n',
    "negative.toml": '[[teachers]]\nname = "a"\nmodel = "m"\nmax_tokens = -5\n',
    "price.toml": '[[teachers]]\nname = "a"\nmodel = "m"\nusd_per_mtok_in = -1.0\n',
    "stream.toml": '[[teachers]]\nname = "a"\nmodel = "m"\nextra_body = { stream = true }\n',
    "no-model.toml": '[[teachers]]\nname = "a"\n',
}
OTHERS = {
    "ab.csv": "a,b\n1,2\n",
    "rows.jsonl": '{"id": 1}\n{"id": \n',
    "task.jsonl": '{"prompt": "p", "test": "true"}\n',
    "list.json": "[]",
    "left.csv": "id,score\n1,0\n2,1\n",
    "right.csv": "id,score\n1,1\n2,1\n",
    "many.toml": '\ufefftasks = "many"',  # with the mark that editors of Windows put first
    "seed.toml": 'seed = "abc"\nteachers = "{tmp}/same.toml"',
    "known.jsonl": '{"a": 1}',
    "call.jsonl": '{"prompt": "p", "calls": [{"function": "a:f", "retrns": 1}]}',
    "not-a-run/manifest.json": "{}",
    "number-run/manifest.json": "3",
    "model/config.json": "{}",
    "student.gguf": "",
    "missing.toml": '[[stage]]\nstage = "evaluate"\nfrom = ["train"]\n',
    "elsewhere.toml": '[[stage]]\nstage = "train"\n[[stage]]\nstage = "evaluate"\nfrom = ["B"]\n',
    "single.toml": '[stage]\nstage = "train"\n',
}


def settings(command: list[str], *pairs: str) -> list[tuple[list[str], int, str]]:
    return [([*command, "-s", pair], 2, pair.partition("=")[0].rpartition(".")[2]) for pair in pairs]


TWO = ["evaluate", "-s", "tasks=1", "-s", "policies.A.model=reference", "-s"]
ABSENT: dict[tuple[str, int, str], list[list[str]]] = {
    ("kata:nobody", 4, "no built-in model kata:nobody"): [
        *(["collect", "--policy"], ["serve"], [*TWO, "policies.B.model="], ["probe", "svd", "-s", "model="])
    ],
    ("nothing", 4, "no run 'nothing'"): [
        *(["extract-pairs", "--from"], ["query", "select 1", "--from"], ["show"], ["report"], ["curriculum"])
    ],
    ("katta", 2, "no environment 'katta'. Did you mean 'kata'?"): [
        *(["collect", "--env"], ["tasks", "check", "--env"], [*TWO, "policies.B.model=noop", "--env"])
    ],
    ("nowhere.jsonl", 4, "nowhere.jsonl"): [
        *(["import"], ["compare", "{tmp}/rows.jsonl"], ["tasks", "check"]),
        *(["collect", "--env", name, "-s", "env.path="] for name in ("tasks", "gsm8k", "swe-lite")),
    ],
    ("http://127.0.0.1:9/v1", 3, "Start the server"): [
        ["collect", "--policy", "m", "--dry-run", "-s", "policy.base_url="],
        [*TWO, "policies.B.model=m", "--dry-run", "-s", "policies.B.base_url="],
    ],
}
"""What does not exist or does not answer, its exit code and what is told, and every command that may be given it."""
MISTAKES: list[tuple[list[str], int, str]] = [
    *(
        ([*words[:-1], words[-1] + name] if words[-1].endswith("=") else [*words, name], code, part)
        for (name, code, part), commands in ABSENT.items()
        for words in commands
    ),
    *settings(COLLECT, "tasks=0", "tasks=true", "tasks=1.5", "tasks=100000000", "policy.temperature=inf"),
    *settings(COLLECT, "env.split=test", "nonsense=1", "policy.base_url=localhost:8000/v1"),
    *settings(["train"], "arm=''", "arm='a/b'", "policy.temperature=0"),
    ([*COLLECT, "-s", "policy.usd_per_mtok_in=-1"], 2, "prices cannot be negative"),
    ([*POOL, "-s", "sample=1"], 2, "`composer probe teacher-pool --help --all` lists all."),
    (["probe", "svd", "-s", "zzz.yyy.xxx=1"], 2, "zzz"),
    (["probe-teacher-pool"], 2, "probe-teacher-pool"),
    (["colect"], 2, "Did you mean 'collect'?"),
    *(([name, *IN_FILE], 2, "is a file, not a folder") for name in ("view", "status", "run")),
    ([*COLLECT, "--on", "magic"], 2, "processes:N, ray"),
    (["train", "--on", "ray"], 2, "--on"),
    (["collect", "--nonsense"], 2, "--nonsense"),
    ([*COLLECT, "-s", "tasks"], 2, "KEY=VALUE"),
    ([*COLLECT, "-s", "env.no_such_option=3"], 2, "no option 'no_such_option'"),
    ([*COLLECT, "-c", "{tmp}"], 2, "{tmp}"),
    ([*COLLECT, "-c", "{tmp}/bad.toml"], 2, "not valid TOML"),
    ([*COLLECT, "-c", "{tmp}/binary"], 2, "not valid TOML"),
    ([*COLLECT, "--seed", "99999999999999999999999"], 2, "more than 64 bits hold"),
    ([*COLLECT, "-s", "seed=1e400"], 2, "finite"),
    ([*COLLECT, "-s", "report_to=tensorbord"], 2, "it should be 'tensorboard', 'trackio' or 'wandb'"),
    ([*COLLECT, "-s", "history=last 0"], 2, "history"),
    (["import", "{tmp}/binary"], 4, "binary"),
    (["import", "{tmp}/empty.jsonl"], 4, "Nothing could be imported"),
    (["import", "{tmp}/torn.eval"], 4, "damaged_record"),
    (["export", "inspect"], 4, "Run `composer collect`"),
    (["compare", "nowhere.csv"], 4, "no file or folder nowhere.csv"),
    (["compare", "{tmp}/ab.csv"], 4, "{tmp}/ab.csv is no log of a known program"),
    ([*SIDES, "--html", "{tmp}/ab.csv"], 2, "write over {tmp}/ab.csv, which is neither an earlier page"),
    ([*SIDES, "--markdown", "{tmp}/right.csv"], 2, "write over {tmp}/right.csv, which is read"),
    ([*SIDES, "--html", "{tmp}/page", "--markdown", "{tmp}/page"], 2, "name one file"),
    ([*SIDES, "--outcome", f"pass@{10**22}"], 2, "outcome"),
    ([*SIDES, "--from", "collect"], 2, "--from"),
    ([*SIDES, "collect/20260821T140512Z-kata-7f3ac1"], 4, "Of a run give the folder"),
    ([*COLLECT, "--out", ""], 2, "takes a folder"),
    ([*COLLECT, "-s", "policy.base_url=http://me:word@127.0.0.1:9/v1"], 2, "api_key_env"),
    ([*COLLECT, "-s", "policy.base_url=http://127.0.0.1:9/v1?api-key=word"], 2, "holds the field api-key"),
    ([*COLLECT, "--max-cost", "nan"], 2, "--max-cost"),
    (["run", "--preset", "demo", "--max-cost", "1e400"], 2, "--max-cost cannot be inf"),
    ([*COLLECT, "-s", "policy.extra_body={a=[nan]}"], 2, "extra_body holds nan"),
    ([*COLLECT, "-s", "env.max_chars=inf"], 2, "options holds inf"),
    ([*COLLECT, "-s", f"policy.extra_body={{a={{b={10**30}}}}}"], 2, "extra_body holds 1000000"),
    ([*COLLECT, "--env", "no_such_module:Env"], 2, "could not be imported"),
    ([*COLLECT, "--env", "os:system", "-s", "env.options.command='true'"], 2, "standard library"),
    ([*COLLECT, "--env", "orjson:loads"], 2, "is no class, so it is not an environment"),
    (
        [*COLLECT, "--env", "pydantic:BaseModel"],
        2,
        "lacks the methods tasks, reset, step, grade, close, so it is not an environment",
    ),
    ([*COLLECT, "--env", "bad_env:Broken"], 2, "bad_env.py, line"),
    ([*COLLECT, "--env", "bad_env:NoTasks"], 2, "bad_env.py, line"),
    ([*COLLECT, "--env", "bad_env:WrongTasks"], 2, "a list of Task is needed"),
    ([*COLLECT, "--env", "bad_env:Twice"], 2, "twice"),
    ([*COLLECT, "--env", "bad_env:NoJson"], 2, "JSON cannot hold"),
    ([*COLLECT, "--env", "syntax_env:Env"], 2, "could not be imported"),
    ([*COLLECT, "-s", "sandbox=no-such-sandbox"], 2, "no-such-sandbox"),
    ([*COLLECT, "--dry-run", "-s", "policy.api_key_env=NO_SUCH_KEY"], 2, "NO_SUCH_KEY"),
    (["collect", "--policy", "reference", "--dry-run", "--out", "/proc/x"], 2, "Nothing can be written to /proc"),
    ([*COLLECT, "--from", "x"], 4, "There is no run 'x'"),
    (["collect", "kata"], 2, "`composer collect` takes no argument 'kata'. Did you mean --env kata?"),
    (["collect", "--plan"], 2, "--plan"),
    ([*COLLECT, "--artifacts", "/proc"], 2, "Nothing can be written to /proc"),
    ([*COLLECT, "--out", "{tmp}/binary"], 2, "{tmp}/binary is a file, not a folder"),
    ([*COLLECT, "--out", "{tmp}"], 2, "not empty"),
    (["collect", "--policy", "./nowhere"], 4, "no model folder"),
    (["collect", "--policy", ""], 2, "model"),
    (["import"], 2, "import"),
    (["export"], 2, "format"),
    (["export", "no-such-format"], 2, "no-such-format"),
    (["extract-pairs"], 4, "Run `composer collect`"),
    (["collect", "--env", "tasks"], 2, "--set env.path=FILE"),
    (["train", "--pairs", "collect"], 2, "made by `composer extract-pairs`, is given with --from RUN."),
    (["replay-teachers", "--rollouts", "collect"], 2, "--from RUN"),
    (["tasks", "check"], 2, "Give a file of rows"),
    (["tasks", "check", "--env", "support.environments:GuessEnv"], 2, "has no solutions to check"),
    (["tasks", "check", "--env", "kata", "-s", "repeats=0"], 2, "repeats"),
    (["replay-teachers", "--teachers", "{tmp}/other.toml"], 2, "[[teachers]]"),
    (["replay-teachers", "-c", "{tmp}/seed.toml"], 2, "{tmp}/seed.toml: it should be a whole number"),
    (["train", "-s", "trl.seed=3"], 2, "trl.seed, a field of TRL's, is set through seed"),
    (["replay-teachers", "--from", "{tmp}/other-run"], 4, "not a run folder"),
    (["evaluate"], 4, "--from"),
    (["probe", "uat"], 4, "composer probe"),
    (["show"], 2, "RUN"),
    (["show", "{tmp}/empty-manifest"], 4, "manifest.json"),
    (["query", "selec 1"], 2, "cannot be answered"),
    (["query", "select * from rolouts"], 2, "no run here holds a table rolouts"),
    (["query", "select * from nowhere"], 2, "There are no runs yet: `composer collect` makes one."),
    (["collect", "--env", "skills", "-s", "env.families=dates"], 2, "with commas between. Did you mean 'date'?"),
    (["query", ""], 2, "query"),
    (["report"], 4, "no finished run"),
    (["run"], 2, "Which preset?"),
    (["run", "--preset", "demo", "-s", "on.options.time=10"], 2, "give --on one of"),
    *(([*COLLECT, "-s", f"tasks={text}"], 2, f"write {number}") for text, number in (("007", "7"), (".5", "0.5"))),
    (["run", "--preset", "demo", "-s", "polcy.model=x"], 2, "Did you mean 'policy'?"),
    (["run", "--preset", "demo-kata", "-s", "B-0.wieghts.dpo=1"], 2, "Did you mean weights?"),
    (["run", "--preset", "demo-kata", "-s", "seed=3"], 2, "A-0 and A-1"),
    (["run", "--preset", "probe-smoke", "--tune", "seed=1,2"], 2, "needs a preset that trains arms"),
    (["collect", "--samples", "2"], 2, "Did you mean the setting --set samples=2? `composer collect --help --all`"),
    (["collect", "--limit", "abc"], 2, "--limit / -n cannot be 'abc': it should be a whole number."),
    (["collect", "-s", "env=3"], 2, "env = 3: it should be a table of keys and values."),
    (["replay-teachers", "-s", "teachers=[]"], 2, "teachers = []: it should not be empty."),
    (["collect", "--temprature=0"], 2, "--set policy.temperature=VALUE?"),
    (["train", "-s", "weights.dpo=1"], 2, "Run `composer extract-pairs` first"),
    (["train", "-s", "weights.dop=1"], 2, "Did you mean weights.dpo or weights.opd? `composer train --help --all`"),
    ([*TWO, "arms=X"], 2, "It has: seed"),
    (["collect", "-s", "policy.temp=1"], 2, "Did you mean policy.temperature?"),
    (["compare", "a", "b", "--metric", "x"], 2, "No such option: --metric. `composer compare --help --all`"),
    (["train", "-s", "optimisation.lr=3e-4"], 2, "Did you mean optimisation.learning_rate?"),
    (["train", "--lr", "3e-4"], 2, "--set optimisation.learning_rate=3e-4?"),
    (["collect", "-n", "5", "-s", "tasks=50"], 2, "--limit 5 and --set tasks=50"),
    (["tasks", "check", "{tmp}", "-n", "5", "-s", "limit=50"], 2, "--limit 5 and --set limit=50"),
    (["collect", "--limt", "2"], 2, "Did you mean --limit?"),
    (["run", "--preset", "demo", "--samples", "2"], 2, "--set KEY=VALUE or --set STAGE.KEY=VALUE"),
    (["tasks", "chek", "rows.jsonl"], 2, "Did you mean 'tasks check'?"),
    (["query", "select rnu from runs"], 2, 'Candidate bindings: "run"'),
    (["run", "--preset", "demo", "--resume", "--clean"], 2, "Leave out one of them"),
    (["run", "--preset", "demo", "--tune", "no.such=1,2"], 2, "has no setting no"),
    (["probe"], 2, "Missing command. `composer probe --help`"),
    (["run", "dmo"], 2, "Did you mean --preset demo?"),
    (["run", "--preset", "demoo"], 2, "Did you mean 'demo'?"),
    (["collect", "my.jsonl"], 2, "Tasks in a file are given with --env tasks --set env.path=my.jsonl."),
    (["collect", "--env", "my.jsonl"], 2, "Tasks in a file are given with --env tasks --set env.path=my.jsonl."),
    (["collect", "--set", "tasks", "=", "2"], 2, "A setting is written without spaces: --set KEY=VALUE."),
    (["query", "select", "run", "from", "runs"], 2, "Quote what is one argument."),
    (["import", "{tmp}/task.jsonl"], 4, "it is a task and no rollout"),
    (["collect", "--env", "tasks", "-s", "env.path={tmp}"], 4, ", a folder. Name a .jsonl"),
    (["collect", "--policy", "refrence"], 4, "Did you mean 'reference'?"),
    (["collect", "--policy", "refrence", "--dry-run"], 4, "Did you mean 'reference'?"),
    (["collect", "--policy", "{tmp}/not-a-run", "-n", "1"], 4, "it has neither config.json nor adapter_config.json"),
    ([*COLLECT, "-s", "policy.api_key_env=sk-secret"], 2, "api_key_env takes the name of an environment variable"),
    *(([*REPLAY, f"{{tmp}}/{name}"], 2, part) for name, part in (
        ("one.toml", "teachers"),
        ("same.toml", "2 teachers have the name 'a'"),
        ("student.toml", "the name 'student', which"),
        ("negative.toml", "(of a) in {tmp}/negative.toml"),
        ("stream.toml", "stream"),
        ("no-model.toml", "needs the setting teachers.0.model (of a)"),
    )),
    ([*COLLECT, "-c", "{tmp}/price.toml"], 2, "prices cannot be negative"),
    ([*COLLECT, "-s", 'policy.extra_body={n=3}'], 2, "one answer"),
    ([*COLLECT, "-s", "policy.request={max_tokens=false}"], 2, "max_completion_tokens"),
    ([*COLLECT, "-s", "policy.server.args={BAD=1}"], 2, "args"),
    ([*COLLECT, "-s", "policy.chat_template_kwargs={'a b'=1}"], 2, "chat_template_kwargs"),
    ([*COLLECT, "-s", "policy.price=free"], 2, "unknown"),
    ([*COLLECT, "-s", "env.curriculum=/no/such"], 4, "/no/such"),
    ([*COLLECT, "--out", ""], 2, ""),
    ([*COLLECT, "--artifacts", "s3://bucket"], 2, "is an address"),
    ([*COLLECT, "-s", "\x1b[2J=1"], 2, "no setting"),
    (["collect", "--policy", "{tmp}/model"], 4, "model"),
    (["collect", "--policy", "{tmp}/list.json"], 4, "list.json is a file."),
    (["collect", "--policy", "vllm:", "-s", URL], 2, "model"),
    (["evaluate", "--plan", "-n", "12", "-s", "planning.pass_rate=0.99"], 2, "leads to 1.01"),
    (["import", "{tmp}/rows.jsonl"], 4, "rows.jsonl"),
    (["import", "{tmp}/list.json"], 4, "list.json"),
    (["show", "{tmp}/number-run"], 4, "manifest.json"),
    (["query", "select 1; select 2"], 2, "one"),
    (["cancel", "nothing"], 4, "nothing"),
    # Other things that a command works on and cannot find: 4.
    (["collect", "--env", "harbor", "-s", "env.path=nowhere"], 4, "no such folder"),
    # Settings that it cannot find, in files too: 2.
    (["run", "--preset", "nowhere.toml"], 2, "nowhere.toml cannot be read"),
    ([*COLLECT, "-c", "{tmp}/many.toml"], 2, "tasks = 'many' in {tmp}/many.toml"),
    (["run", "--preset", "demo", "-c", "{tmp}/many.toml"], 2, "tasks = 'many' in {tmp}/many.toml"),
    (["run", "--preset", "demo", "-c", "{tmp}/other.toml"], 2, "no entry 'x' in {tmp}/other.toml"),
    ([*COLLECT, "-c", "{tmp}/many.toml", "-s", "tasks=few"], 2, "tasks = 'few':"),
    (["swe", "check", "x"], 2, "`composer swe check` takes no argument 'x'. Leave it out."),
    (["train", "collect"], 2, "A run that it is to read is given with --from collect."),
    (["evaluate", "-s", "baseline=A", "-s", "treatment=A"], 2, "are both 'A'"),
    (["collect", "--env", "tasks", "-s", "env.path={tmp}/call.jsonl"], 4, "did you mean calls.N.returns?"),
    (["import", "inspekt", "{tmp}/rows.jsonl"], 4, "Did you mean 'inspect'? The formats are"),
    (["collect", "--env", "tasks", "-s", "env.path=https://x.org/a.jsonl"], 4, "an address. Download the file"),
    (["collect", "--env", "kata:x"], 2, "no environment 'kata:x'. Did you mean 'kata'?"),
    (["collect", "--env", "tasks:a.jsonl"], 2, "--env tasks --set env.path=a.jsonl"),
    (["collect", "--policy", "http://127.0.0.1:9/v1"], 2, "Give it as base_url"),
    (["collect", "--policy"], 2, "`composer collect --help --all`"),
    (["show", "{tmp}/rows.jsonl"], 4, "rows.jsonl is a file. Give the folder of a run"),
    (["import", "trl", "{tmp}/known.jsonl"], 4, "Without the word trl"),
    (["run", "--preset", "{tmp}/missing.toml"], 2, 'it is the first entry. Add the entry before it, [[stage]]'),
    (["run", "--preset", "{tmp}/elsewhere.toml"], 2, 'called so: train. Add the entry before it, [[stage]] with name'),
    (["run", "--preset", "{tmp}/single.toml"], 2, "Write [[stage]] for [stage]."),
    (["evaluate", "--from", "{tmp}/model"], 4, "as --set policies.NAME.model={tmp}/model"),
    (["replay-teachers", "--from", "{tmp}/student.gguf"], 4, "as --set policy.model={tmp}/student.gguf"),
    (["evaluate", "--policy", "kata:student"], 2, "Did you mean the setting --set policies.NAME.model=kata:student?"),
    ([*COLLECT, "--env", "bad_env:Needs"], 2, "no default: --set env.words=VALUE, --set env.size=VALUE."),
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(place: Path) -> Path:
    """The files, beside those of `place`."""
    for name, text in (TEACHERS | OTHERS).items():
        (place / name).parent.mkdir(exist_ok=True)
        (place / name).write_text(text.replace("{tmp}", str(place)))
    return place


@pytest.mark.parametrize(
    ("words", "code", "part"), MISTAKES, ids=lambda value: repr(" ".join(value)) if isinstance(value, list) else ""
)
def test_a_mistake_is_one_clear_sentence(
    run_command: Callable[..., tuple[int, str, str]], folder: Path, words: list[str], code: int, part: str
) -> None:
    assert_one_sentence(run_command, folder, words, code, part)


def assert_one_sentence(
    run_command: Callable[..., tuple[int, str, str]], folder: Path, words: list[str], code: int, part: str
) -> None:
    """Assert that a command ends with this exit code and one sentence that holds this part, and leaves no run."""
    before = set((folder / "artifacts").glob("*/2*"))
    found, out, err = run_command(*words)
    last = (err.splitlines() or [""])[-1]
    assert found == code, err
    assert "failed unexpectedly" not in err and "Traceback" not in err and "\x1b" not in err and not out
    assert code != 2 or "starts" not in err, "nothing has begun before the checks are over"
    assert part.replace("{tmp}", str(folder)) in last and last.endswith((".", "?", "`", ")")), err
    assert set((folder / "artifacts").glob("*/2*")) == before


@pytest.mark.parametrize(
    "words", [["collect", "-s", "tasks=0"], ["show", "nothing"], ["colect"], ["run"], ["status", *IN_FILE]]
)
def test_a_failure_is_json_where_json_is_asked_for(run_command, words):
    code, out, err = run_command(*words, "--json")
    told = json.loads(out)
    assert told["exit_code"] == code and told["error"] and err


@pytest.mark.parametrize(
    "error",
    [
        ZeroDivisionError("x"),
        MemoryError(),
        OSError(errno.ENOSPC, "full"),
        Breakdown("runs.disk-full", first="x", folder="y"),
    ],
)
def test_what_broke_is_no_verdict(error: Exception) -> None:
    """Its exit code is 5 wherever it is raised: 1 would also say that B is worse."""
    with pytest.raises(typer.Exit) as ended, reporting_errors():
        raise error
    assert ended.value.exit_code == 5
