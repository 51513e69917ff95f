import itertools
import json
import re
import subprocess
from dataclasses import asdict

from support.command_line import call, command, environment, model, until
from support.runs import written
from support.view_site import item

from stages.evaluation.verdict import decide
from stages.rollouts.trace import pairs_with_states
from stages.runs.artifact import InputRef, Run


def test_a_transcript_is_readable_and_whole(made):
    text = call(made, "show", "collect").stdout
    assert "4 rollout/3" in text and "Collection gate" in text
    assert text.count("\nassistant\n") == 4 and "    sed -i" in text and "    [exit 0]" in text
    assert "terminated_by submitted" in text and "protocol_ok yes" in text


def test_an_evaluation_begins_with_its_verdict_and_names_each_input_once(tmp_path, monkeypatch):
    trained = [written(tmp_path, f"train/20260102T030405Z-kata-{arm}", config={"arm": arm}) for arm in "AB"]
    refs = [InputRef(stage="train", path=str(path), fingerprint="", content="") for path in trained]
    elsewhere = InputRef(stage="collect", path="/elsewhere/collect/x", fingerprint="", content="")
    models = {f"{arm}/0": {"model": f"{path}/checkpoint"} for arm, path in zip("AB", trained, strict=True)}
    inputs = {"trained": [*refs, elsewhere], "again": refs}
    run = written(tmp_path, "evaluate/20260102T030405Z-kata", inputs=inputs, models=models)
    items = [
        {**item(arm, f"t-{n}", arm == "B"), "family": "f", "hacked": False, "protocol_ok": True, "error_type": None}
        for arm in "AB"
        for n in range(30)
    ]
    (run / "verdict.json").write_text(json.dumps(asdict(decide(items)), default=str))
    monkeypatch.chdir(tmp_path)
    shown = call(tmp_path, "show", run).stdout.splitlines()
    assert shown[0].startswith(decide(items).decision) and shown[1].startswith("  shown ")
    assert any(line.startswith("  not shown  ") for line in shown[:8])
    text = "\n".join(shown)
    assert "models  A/0 = train/20260102T030405Z-kata-A, B/0 = train/20260102T030405Z-kata-B" in text
    assert text.count("kata-A") == 1 and "reads   /elsewhere/collect/x\n" in text and str(tmp_path) not in text


def test_n_and_rollout_choose(made):
    assert call(made, "show", "collect", "-n", "3").stdout.count("\nsystem\n") == 3
    assert call(made, "show", "collect", "-n", "0").stdout.count("\nsystem\n") == 0
    one = json.loads(call(made, "show", "collect", "--rollout", "00001#1", "--json").stdout)["transcripts"]
    assert [t["rollout_id"] for t in one] == ["kata-train-0-00001#1@0"] and one[0]["messages"][2]["role"] == "assistant"


def test_an_unknown_rollout_is_said_with_one_that_exists(made):
    done = call(made, "show", "collect", "--rollout", "zebra")
    assert done.returncode == 2 and "it has 4, for example kata-train" in done.stderr
    several = call(made, "show", "collect", "--rollout", "kata")
    assert several.returncode == 2 and "4 rollouts fit" in several.stderr
    pairs = call(made, "show", "extract-pairs", "--rollout", "kata")
    assert pairs.returncode == 2 and "holds no rollouts" in pairs.stderr


def test_runs_without_rollouts_show_rows(made):
    answers = call(made, "show", "replay-teachers", "-n", "2").stdout
    assert answers.count("\nteacher_action/3\n") == 2 and re.search("teacher +first", answers)
    pairs = call(made, "show", "extract-pairs").stdout
    assert "chosen\n" in pairs and "rejected\n" in pairs and "\nstate/" not in pairs
    (pair,) = itertools.islice(pairs_with_states(Run(made / "extract-pairs" / "latest")), 1)
    said = json.loads(pair["messages_json"])[-1]["content"].splitlines()[0]
    assert said in pairs.partition("messages_json (the last)\n")[2].partition("pair_id")[0], "the state of this pair"


def test_a_run_that_is_still_going_on_can_be_read_and_is_left_alone(server, tmp_path):
    root = tmp_path / "artifacts"
    words = ["collect", *model(server, "slow"), "-s", "tasks=8", "-s", "in_flight.episodes=1"]
    with subprocess.Popen(command(*words), env=environment(root), stderr=subprocess.DEVNULL) as process:
        until(lambda: [p for p in root.glob("collect/2*/steps/*.open") if p.stat().st_size])
        folder = next(root.glob("collect/2*"))
        before = next(folder.glob("steps/*.open")).read_bytes()
        shown = call(root, "show", folder, "-n", "1")
        after = next(folder.glob("steps/*.open")).read_bytes()
        process.kill()
    assert "status  running" in shown.stdout and shown.stdout.count("\nassistant\n") == 4
    assert after[: len(before)] == before
