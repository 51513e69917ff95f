import itertools
import json
import re
import shutil

from rich.cells import cell_len
from support.command_line import call
from support.runs import eval_item, written
from support.view_site import item

from composer_stages.evaluation.document import verdict_document
from composer_stages.evaluation.outcomes import items_table
from composer_stages.evaluation.verdict import decide
from composer_stages.rollouts.trace import pairs_with_states
from composer_stages.runs.kinds import EVAL_ITEM, ROLLOUT, STEP
from composer_stages.runs.run import InputRef, Run, RunOutcome, read_manifest, write_manifest


def test_a_run_begins_with_a_few_facts_and_lists_its_rollouts(made):
    head, facts, result, rates, _, table, how = (
        call(made, "show", "collect", COLUMNS="100").stdout.strip().split("\n\n")
    )
    path, decision = head.splitlines()
    assert path == str((made / "collect" / "latest").resolve())
    assert [line.split()[0] for line in facts.splitlines()] == ["status", "began", "models", "report"]
    assert re.search(r"all \d+ passed; \d+ more need what was not recorded", decision) and "0 errors" in result
    assert rates.splitlines()[-1].split()[:5] == ["all", "2", "tasks", "4", "0"]
    titles, *lines = table.splitlines()
    assert titles.split() == ["rollout", "reward", "outcome", "steps", "ended", "by", "prompt"]
    ids = [f"0000{task}#{sample}" for task in (0, 1) for sample in (0, 1)]
    assert [line.split()[0] for line in lines] == ids and all(" failed " in line for line in lines)
    assert len({line.partition("submitted")[2] for line in lines}) == 2, "two tasks, each with two samples"
    assert max(map(len, lines)) <= 100 and how.startswith("`composer show collect '00000#0'` prints the first")


def test_a_rollout_prints_outcome_conversation_and_grading(made):
    text = call(made, "show", "collect", "00001#1").stdout
    assert text.startswith("kata-train-0-00001#1@0: failed, reward 0\n") and "status" not in text
    assert "  task      kata-train-0-00001, sample 1" in text and "  ended by  submitted" in text
    titles = [line for line in text.splitlines()[1:] if line and not line.startswith(" ")]
    steps = [f"{who}, step {n}" for n in (1, 2, 3) for who in ("assistant", "observation")]
    assert titles == ["system", "user", *steps, "assistant, step 4", "grading", "log of the tests"]
    assert "    sed -i" in text and "    [exit 0]" in text and text.count("hidden tests pass") == 1
    coloured = call(made, "show", "collect", "00001#1", FORCE_COLOR="1", NO_COLOR="").stdout
    assert "\x1b[1massistant, step 1\x1b[0m\n    ```bash" in coloured
    found = json.loads(call(made, "show", "collect", "00001#1", "--json").stdout)
    assert found["rollout"]["rollout_id"] == "kata-train-0-00001#1@0" and found["rollout"]["outcome"] == "failed"
    assert [(one["role"], one["step"]) for one in found["messages"][:4]] == [
        ("system", None),
        ("user", None),
        ("assistant", 1),
        ("user", 1),
    ]


def test_cuts_and_submissions_are_noted_at_their_step(tmp_path):
    opening = [{"role": "user", "content": "Fix it."}]
    first = {"step": 0, "action": "cat big", "observation": "head\n...\ntail", "elided_chars": 900, "raw_chars": 1000}
    second = {"step": 1, "action": "submit", "observation": "diff --git a/x b/x", "truncated": True}
    gained = [{"role": "assistant", "content": "cat big"}, {"role": "user", "content": first["observation"]}]
    messages = [opening, gained]
    steps = [
        {**step, "rollout_id": "r", "new_messages_json": json.dumps(new), "sampling_json": '{"max_tokens": 16}'}
        for step, new in zip((first, second), messages, strict=True)
    ]
    rollout = {"rollout_id": "r", "task_id": "t", "reward": 0.0, "num_steps": 2, "submission": second["observation"]}
    rollout |= {"f2p_passed": 0, "f2p_total": 2, "test_log": "FAILED test_x", "metrics_json": '{"time": 1.5}'}
    run = written(tmp_path, "collect/20260102T030405Z-repo", [(ROLLOUT, [rollout]), (STEP, steps)])
    text = call(tmp_path, "show", run, "r").stdout
    parts = dict(part.partition("\n")[::2] for part in text.strip().split("\n\n")[1:])
    assert parts["observation, step 1 \u00b7 cut by the environment: 900 of 1,000 characters left out"]
    assert parts["assistant, step 2 \u00b7 cut off at max_tokens = 16"] == "    submit"
    assert parts["submitted patch"] == "    diff --git a/x b/x" and text.count("diff --git") == 1
    assert re.search("fail-to-pass tests +0 of 2 pass\n +time +1.5", parts["grading"])
    assert list(parts)[-1] == "log of the tests" and "observation, step 2" not in parts


def test_long_texts_are_shortened_unless_they_are_asked_for(tmp_path):
    log = "\n".join([*(f"line {n}" for n in range(100)), "x" * 5000])
    rollout = {"rollout_id": "r", "task_id": "t", "reward": 0.0, "test_log": log}
    run = written(tmp_path, "collect/20260102T030405Z-repo", [(ROLLOUT, [rollout])])
    shown = call(tmp_path, "show", run, "r").stdout
    assert "line 19\n    ... 71 lines left out here, --full prints them ...\n    line 91\n" in shown
    assert shown.endswith(f"    {'x' * 1000} (4,000 more characters, --full prints them)\n")
    full = call(tmp_path, "show", run, "r", "--full").stdout
    assert "    line 50\n" in full and full.endswith("x" * 5000 + "\n") and "left out" not in full
    assert call(tmp_path, "show", run, "--full").returncode == 2


def test_the_verdict_of_an_evaluation_follows_its_path_and_it_names_each_input_once(tmp_path, monkeypatch):
    trained = [written(tmp_path, f"train/20260102T030405Z-kata-{arm}", config={"arm": arm}) for arm in "AB"]
    refs = [InputRef(stage="train", path=str(path), fingerprint="", content="") for path in trained]
    elsewhere = InputRef(stage="collect", path="/elsewhere/collect/x", fingerprint="", content="")
    models = {f"{arm}/0": {"model": f"{path}/checkpoint"} for arm, path in zip("AB", trained, strict=True)}
    inputs = {"trained": [*refs, elsewhere], "again": refs}
    run = written(tmp_path, "evaluate/20260102T030405Z-kata", inputs=inputs, models=models)
    items = [{**eval_item(arm, n, arm == "B"), "family": "f"} for arm in "AB" for n in range(30)]
    (run / "verdict.json").write_text(json.dumps(verdict_document(decide(items_table(items))), default=str))
    monkeypatch.chdir(tmp_path)
    shown = call(tmp_path, "show", run).stdout.splitlines()
    assert shown[1].startswith(decide(items_table(items)).decision) and shown[2].startswith("  shown ")
    assert any(line.startswith("  not shown  ") for line in shown[:9])
    text = "\n".join(shown)
    assert "models  A = train/20260102T030405Z-kata-A, B = train/20260102T030405Z-kata-B" in text
    assert text.count("kata-A") == 1 and "reads   /elsewhere/collect/x\n" in text and str(tmp_path) not in text
    earlier = verdict_document(decide(items_table(items)))
    del earlier["comparisons"]
    (run / "verdict.json").write_text(json.dumps(earlier))
    again = " ".join(call(tmp_path, "show", run).stdout.split())
    assert "an earlier version" in again and "`composer compare evaluate/20260102T030405Z-kata`" in again
    assert "an earlier version" not in text


def test_rollouts_are_listed_by_number_and_outcome(tmp_path):
    outcomes = [(1.0, False, None), (1.0, True, None), (0.0, False, None), (None, None, "Timeout"), (None, None, None)]
    rows = [
        {"rollout_id": f"r{n}", "task_id": f"task-{n}", "reward": reward, "hacked": hacked, "error_type": error}
        for n, (reward, hacked, error) in enumerate(outcomes * 5)
    ]
    run = written(tmp_path, "import/20260102T030405Z-x", [(ROLLOUT, rows)])
    text = call(tmp_path, "show", run).stdout
    assert "25 rollouts: 5 error, 5 failed, 5 not graded, 5 passed, 5 passed, hacked" in text
    assert "and 5 more: -n 25" in text and re.search("r4 +task-4 +not graded", text)
    failed = call(tmp_path, "show", run, "--failed", "--limit", "2").stdout
    assert re.findall("^r[0-9]+", failed, re.M) == ["r2", "r7"] and "and 3 more: -n 5" in failed
    found = json.loads(call(tmp_path, "show", run, "--passed", "--json").stdout)
    assert found["fitting"] == 10 and {row["outcome"] for row in found["rollouts"]} == {"passed", "passed, hacked"}
    assert "r0" not in call(tmp_path, "show", run, "-n", "0").stdout
    refused = [("--passed", "--failed"), ("r1", "--failed"), ("r1", "-n", "3")]
    assert [call(tmp_path, "show", run, *words).returncode for words in refused] == [2, 2, 2]


def test_items_of_an_evaluation_have_their_arm(tmp_path):
    kept = {"steps_json": '[{"message": 1, "truncated": true}]', "test_log": "FAIL f(1): 2, not 3"}
    items = [item(arm, "t-0", arm == "B") | (kept if arm == "A" else {}) for arm in "AB"]
    run = written(tmp_path, "evaluate/20260102T030405Z-kata", [(EVAL_ITEM, items)])
    cut = call(tmp_path, "show", run, "A/0").stdout
    assert "assistant, step 1 \u00b7 cut off at max_tokens\n" in cut and cut.endswith("    FAIL f(1): 2, not 3\n")
    failed = call(tmp_path, "show", run, "--failed").stdout
    assert re.search("\nA +A +failed +1 +do t-0\n", failed) and "\nB " not in failed
    one = call(tmp_path, "show", run, "B/0").stdout
    assert "  arm       B, training seed 0" in one and "assistant, step 1\n    B did t-0" in one


def test_prompts_are_shown_from_where_they_differ_and_no_wider_than_the_terminal(tmp_path):
    same = "You are an agent that repairs programs in a terminal. "
    prompts = [f"{same}\x1b[2J{word} it\n{'x' * 300}" for word in ("Fix", "修复")]
    rows = [{"rollout_id": f"t{n}#0", "task_id": f"t{n}", "reward": 1.0} for n in range(2)]
    steps = [
        {"rollout_id": f"t{n}#0", "step": 0, "new_messages_json": json.dumps([{"role": "user", "content": prompt}])}
        for n, prompt in enumerate(prompts)
    ]
    run = written(tmp_path, "collect/20260102T030405Z-x", [(ROLLOUT, rows), (STEP, steps)])
    shown = call(tmp_path, "show", run, COLUMNS="60").stdout
    lines = [line for line in shown.splitlines() if "\u2026" in line]
    assert "\u2026 \\x1b[2JFix it xxx" in lines[0] and "\u2026 \\x1b[2J修复 it xxx" in lines[1]
    assert max(map(cell_len, lines)) == 60 and all(line.endswith("\u2026") for line in lines)
    assert "  prompt\n" in shown and "  prompt\n" not in call(tmp_path, "show", run, COLUMNS="30").stdout


def test_checks_that_passed_are_counted_beside_those_that_failed(tmp_path):
    checks = {"one": [1, 2], "other": [2, 2], "log-probs finite, <= 0": [0, 0]}
    ended = RunOutcome(ok=False, summary={"collection_checks": checks, "failed_checks": ["one"]})
    run = written(tmp_path, "collect/20260102T030405Z-x", [(ROLLOUT, [{"rollout_id": "t#0"}])], outcome=ended)
    shown = call(tmp_path, "show", run).stdout.splitlines()
    title = "Collection checks: 1 of 2 passed; 1 more needs what was not recorded (log-probs)"
    assert shown[:2] == [str(run), title]
    assert "  passed     1 other check" in shown and "  FAIL       one, 1 of 2" in shown


def test_an_unknown_rollout_is_said_with_one_that_exists(made):
    done = call(made, "show", "collect", "zebra")
    assert done.returncode == 4 and "it has 4, for example kata-train" in done.stderr
    several = call(made, "show", "collect", "kata")
    assert "fit 'kata': 00000#0, 00000#1, 00001#0, 00001#1. Give one of these" in several.stderr
    assert several.returncode == 4 and "4 rollouts fit" in several.stderr
    pairs = call(made, "show", "extract-pairs", "kata")
    assert pairs.returncode == 4 and "holds no rollouts" in pairs.stderr


def test_a_newer_run_that_failed_is_named_beside_the_one_that_is_shown(own_runs):
    stage = own_runs / "collect"
    whole = (stage / "latest").resolve()
    later = shutil.copytree(whole, stage / "29991231T000000Z-later")
    record = read_manifest(later)
    record.status = "failed"
    write_manifest(later, record)
    shown = call(own_runs, "show", "collect")
    assert shown.stderr == f"collect/29991231T000000Z-later is newer and failed; this is collect/{whole.name}.\n"
    assert whole.name in shown.stdout and call(own_runs, "show", whole.name).stderr == ""
    shutil.rmtree(later / "steps")
    assert "newer and failed, with nothing finished;" in call(own_runs, "show", "collect").stderr


def test_runs_without_rollouts_show_rows(made):
    answers = call(made, "show", "replay-teachers", "-n", "2").stdout
    assert re.search("\nteacher_action/1, row 2 of [0-9]+\nteacher +", answers)
    assert call(made, "show", "replay-teachers", "--failed").returncode == 2
    pairs = call(made, "show", "extract-pairs").stdout
    (pair,) = itertools.islice(pairs_with_states(Run(made / "extract-pairs" / "latest")), 1)
    state = json.loads(pair["messages_json"])
    shown = pairs.partition("pair 1 of ")[2]
    assert f"\nstate, the last of {len(state)} messages, user\n    {state[-1]['content'].splitlines()[0]}" in shown
    assert ", 2 to 1 votes of 3 teachers\n" in shown and "\nchosen, by second, third\n" in shown
    assert "\nrejected, by student\n" in shown and "more pairs: -n " in shown and "state/1" not in shown
