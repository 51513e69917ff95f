import io
import json
import os
import pty
import re
import signal
import subprocess
import threading
import time

import pytest
from rich.console import Console as Terminal
from support.command_line import call, command, environment, model, until

from composer_cli.console import BEATS, BEFORE, Bars, Console, HeartbeatLines, Pace
from composer_stages.layout import duration
from composer_stages.runs.activity import Detailed, Figures, Notice, Preparation
from composer_stages.runs.run import Manifest, write_manifest


def told(capfd: pytest.CaptureFixture[str], line: str, lines: list[str]) -> bool:
    """Add what stderr holds to the lines, and return whether this one has come."""
    lines += capfd.readouterr().err.splitlines()
    return any(one.startswith(line) for one in lines)


def test_a_heartbeat_comes_also_when_nothing_finished(capfd):
    lines = []
    with Console(heartbeat_s=0.05).watching() as watch:
        listen = watch.listener("collect")
        until(lambda: told(capfd, f"collect: {BEFORE} for ", lines))
        listen("rollouts", 3, 8)
        until(lambda: told(capfd, "collect: 3 of 8 rollouts, after", lines))
    assert lines[0].startswith(f"collect: {BEFORE} for ")


def test_preparation_prints_more_heartbeats_than_the_work(capfd):
    beaten = []
    lines = HeartbeatLines()
    listen = lines.listener("collect")
    for report in (("rollouts", 0, 8), (Preparation("training steps of kata-novice"), 9, 240), ("rollouts", 1, 8)):
        listen(*report)
        for _ in range(2 * BEATS):
            lines.beat()
        beaten.append(len(capfd.readouterr().err.splitlines()))
    assert beaten == [BEATS + 1, 2 * BEATS, 2], "the first half minute, a model that is made, and the work"


def test_figures_stay_beside_the_count_and_an_activity_has_its_seconds(capfd):
    lines = HeartbeatLines()
    listen = lines.listener("collect")
    reports = [
        (("opening the model m", 0, 0), "collect: opening the model m for "),
        (("", 0, 0), "collect: done with opening the model m, after"),
        (("rollouts", 4, 8), "collect: 4 of 8 rollouts, after"),
        ((Figures("mean reward 0.500"), 0, 0), "collect: 4 of 8 rollouts (mean reward 0.500), after"),
        (("sampling 4 answers", 0, 0), "collect: 4 of 8 rollouts (mean reward 0.500; sampling 4 answers for "),
        (("", 0, 0), "collect: 4 of 8 rollouts (mean reward 0.500), after"),
        (("rollouts", 5, 8), "collect: 5 of 8 rollouts (mean reward 0.500), after"),
    ]
    for report, line in reports:
        listen(*report)
        lines.print_line()
        assert capfd.readouterr().err.startswith(line)
    listen("sampling 4 answers", 0, 0)
    listen(Detailed("sampling 4 answers: 1 complete"), 0, 0)
    lines.print_line()
    assert re.search(r"; sampling 4 answers for [\d.]+ m?s: 1 complete\), after", capfd.readouterr().err)


def test_bars_leave_room_for_the_pace_beside_long_figures():
    bars, terminal = Bars(), Terminal(width=80, file=io.StringIO())
    listen = bars.listener("collect")
    for report in (("rollouts", 0, 64), ("rollouts", 32, 64), (Figures("mean reward " + "\u2581" * 60), 0, 0)):
        listen(*report)
    terminal.print(bars.live.get_renderable())
    bar, *figures = terminal.file.getvalue().splitlines()
    assert re.fullmatch("collect: rollouts \u2501+.* 32/64 0:00:00 *", bar) and "mean reward" in figures[0]
    bars.ended("collect")
    terminal.file = io.StringIO()
    terminal.print(bars.live.get_renderable())
    assert not terminal.file.getvalue().strip()


def test_a_notice_is_printed_at_once_unless_quiet(capfd):
    for quiet in (False, True):
        with Console(quiet).watching() as watch:
            watch.listener("collect")(Notice("the server is away"), 0, 0)
            assert capfd.readouterr().err == ("" if quiet else "collect: the server is away\n")


def test_the_remaining_time_follows_the_pace():
    pace = Pace(clock=iter((0.0, 9.0, 60.0, 90.0)).__next__)
    assert pace.left("rollouts", 0, 12) == ""
    assert pace.left("rollouts", 1, 12) == "", "one quick unit is no pace"
    assert pace.left("rollouts", 6, 12) == ", about 1 min 0 s left" and pace.left("rollouts", 12, 12) == ""


def test_the_estimate_falls_as_the_clock_runs_and_is_withheld_once_a_unit_takes_longer_than_any_before():
    pace = Pace(clock=iter((0.0, 20.0, 40.0, 55.0, 61.0, 120.0, 159.5, 160.0)).__next__)
    said = [pace.left("rollouts", done, 8) for done in (0, 2, 4, 4, 4, 6, 6, 8)]
    of_two = ", about 40 s left"
    assert said == ["", ", about 1 min 0 s left", of_two, ", about 25 s left", "", of_two, "", ""]


def test_quiet_prints_no_progress_and_library_output_goes_to_stderr(capfd):
    with Console(quiet=True, heartbeat_s=0.01).watching() as watch:
        watch.listener("collect")("rollouts", 1, 2)
        print("a library is talkative")
        time.sleep(0.05)
    shown = capfd.readouterr()
    assert shown.out == "" and shown.err == "a library is talkative\n"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (0.02434, "24 ms"),
        (2.44, "2.4 s"),
        (9.96, "10 s"),
        (59, "59 s"),
        (200, "3 min 20 s"),
        (7500, "2 h 5 min"),
    ],
)
def test_durations_are_readable(seconds, text):
    assert duration(seconds) == text


COLOUR = re.compile(r"\x1b\[[0-9;]*[39][0-7]")


def on_a_terminal(words, root, code=0, **more):
    """What a program shows on stderr, and its result, when stderr is a terminal."""
    here, there = pty.openpty()
    env = {name: value for name, value in environment(root, TERM="xterm", **more).items() if name != "FORCE_COLOR"}
    with subprocess.Popen(words, stderr=there, stdout=subprocess.PIPE, env=env) as process:
        os.close(there)
        shown = b""
        while True:
            try:
                shown += os.read(here, 4096)
            except OSError:  # the other end is closed
                break
        result = process.stdout.read()
    os.close(here)
    assert process.returncode == code
    return shown.decode(), result.decode()


@pytest.mark.slow
def test_a_check_of_tasks_has_a_bar_and_lists_what_a_forgery_passes(tmp_path):
    solved = {"prompt": "p", "test": "grep -qx 1 a", "solution": {"a": "1\n"}, "split": "train"}
    code = {"test": "python3 -c 'import a; assert a.f()'", "solution": {"a.py": "def f():\n    return 1\n"}}
    rows = [{"id": "sound", **solved}, {"id": "weak", **solved, **code, "prompt": "q"}]
    (tmp_path / "my.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = command("tasks", "check", tmp_path / "my.jsonl", "-s", "repeats=2")
    shown, result = on_a_terminal(words, tmp_path, code=4)
    assert "tasks check: plays" in shown and "━" in shown and re.search(r"\b2[0-8]/28\b", shown)
    assert (
        "weak" in result
        and "forgeable  rewarded as the solution: functions that return what is equal to everything" in result
    )
    assert "2 tasks: 1 ok, 1 forgeable" in result


def test_watching_shows_live_rollouts_below_the_bars(server, tmp_path):
    words = ["collect", *model(server, "slow"), "-s", "tasks=2", "-s", "samples=1", "-s", "in_flight.rollouts=1"]
    shown, result = on_a_terminal(command(*words, "--watch"), tmp_path)
    assert "━" in shown and COLOUR.search(shown)
    assert "collect: rollouts" in shown and "of 2 finished, 1 live" in shown and "asking" in shown
    assert "Collection checks" in result


def test_watching_shows_them_without_a_terminal_too(tmp_path, capfd):
    run = tmp_path / "20260101T000000Z-kata-123456"
    (run / "scratch" / "live").mkdir(parents=True)
    record = Manifest(composer="1", stage="collect", stage_version=1, fingerprint="123456")
    write_manifest(run, record)
    doing = {"rollout_id": "kata-1#0", "steps": 3, "doing": "asking", "doing_s": 4.0, "wall_s": 9.0}
    told = {"at": time.time(), "done": 1, "total": 2, "units": [doing]}
    (run / "scratch" / "live" / "units.json").write_text(json.dumps(told))
    with Console(heartbeat_s=0.1, watch=True).watching() as watch:
        watch.listener("collect", lambda: run)("rollouts", 1, 2)
        until(lambda: "asking" in capfd.readouterr().err)


def test_a_chain_and_a_training_can_be_watched_and_an_import_has_nothing_to_watch(tmp_path):
    for words, there in (["run"], True), (["train"], True), (["evaluate"], True), (["import"], False):
        assert ("--watch" in call(tmp_path, *words, "--help", "--all").stdout) is there


SLOWLY = ["-s", "tasks=3", "-s", "samples=1", "-s", "in_flight.rollouts=1"]


@pytest.fixture(scope="module")
def undisturbed(server, tmp_path_factory):
    """The digests of the same collection that nobody stops, with all rollouts in flight at once."""
    root = tmp_path_factory.mktemp("whole")
    assert call(root, "collect", *model(server, "slow"), *SLOWLY[:4]).returncode == 0
    return digests(root)


def digests(root):
    """The content of the tables of the one collection below a folder."""
    (path,) = root.glob("collect/2*/manifest.json")
    return {name: out["content_sha256"] for name, out in json.loads(path.read_text())["outputs"].items()}


def stopped_process(root, words, sent):
    """Exit code and stderr of a command in a process of its own that a user or a scheduler stops."""
    with subprocess.Popen(command(*words), env=environment(root), stderr=subprocess.PIPE, text=True) as process:
        stop(root, process.pid, sent)
        return process.wait(60), process.stderr.read()


def stopped_here(root, words, sent):
    """The same of a command in this process."""
    before = signal.signal(sent, lambda *given: None)  # which a signal that came too late would end
    thread = threading.Thread(target=stop, args=(root, os.getpid(), sent))
    thread.start()
    try:
        done = call(root, *words)
    finally:
        thread.join()
        signal.signal(sent, before)
    return done.returncode, done.stderr


def stop(root, process, sent):
    """Send a process a signal as soon as it has saved something; schedulers send more than one."""
    until(lambda: any(path.stat().st_size for path in root.glob("collect/2*/steps/*.open")))
    os.kill(process, sent)
    if sent != signal.SIGINT:
        time.sleep(0.05)
        os.kill(process, sent)


@pytest.mark.parametrize(
    ("sent", "code", "said", "stopped"),
    [(signal.SIGINT, 130, "Interrupted.", stopped_process), (signal.SIGHUP, 129, "Stopped by SIGHUP.", stopped_here)],
)
def test_a_signal_is_drained_exits_with_its_code_and_resume_gives_the_same_rows(
    server, undisturbed, tmp_path, sent, code, said, stopped
):
    words, cut = ["collect", *model(server, "slow"), *SLOWLY], tmp_path / "cut"
    found, errors = stopped(cut, words, sent)
    name = "Ctrl-C" if sent == signal.SIGINT else sent.name
    assert found == code and "Traceback" not in errors
    assert said in errors and errors.count(f"{name} again stops at once") == errors.count("again stops") == 1
    found = json.loads(next(cut.glob("collect/2*/manifest.json")).read_text())
    assert found["status"] == "interrupted" and found["reason"]
    assert found["reason"] == f"stopped by {'the user' if sent == signal.SIGINT else sent.name}"
    assert not list(cut.glob("collect/2*/.reserve"))
    assert call(cut, *words, "--resume").returncode == 0
    assert digests(cut) == undisturbed


@pytest.mark.slow
def test_nohup_outlives_its_terminal(server, tmp_path):
    words = command("collect", *model(server, "slow"), *SLOWLY)
    with subprocess.Popen(["nohup", *words], env=environment(tmp_path), stderr=-1, stdout=-1, text=True) as process:
        until(lambda: any(path.stat().st_size for path in tmp_path.glob("collect/2*/steps/*.open")))
        process.send_signal(signal.SIGHUP)
        process.communicate()
    assert process.returncode == 0 and list(tmp_path.glob("collect/latest/rollouts.parquet"))


def test_a_closed_pipe_prints_no_error(made):
    done = subprocess.run(
        f"{' '.join(command('show', 'collect', '-n', '4'))} | head -n 1",
        shell=True,
        capture_output=True,
        text=True,
        env=environment(made),
    )
    assert done.stderr == "" and done.stdout.count("\n") == 1
