"""replay-teachers: distinct states once, costs as billed, failures resumable, the verdict."""

import json
import shutil
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support import scripted_runs
from support.engine import running
from support.recorded_states import states_by_digest
from support.runs import written
from support.server import Reply, Server, answer, serving
from support.transcripts import assistant, imported, jsonl, user

from composer_stages import STAGES, replay_teachers
from composer_stages.errors import Incomplete, UsageError
from composer_stages.runs import runner, store
from composer_stages.runs.kinds import ROLLOUT, STEP, TASK, TEACHER_ACTION
from composer_stages.runs.run import Inputs, Run
from composer_stages.runs.stage import load_stage
from composer_stages.teachers.questions import RecordedStates, questions

Collected = Callable[..., Run]


def endpoint(name: str, url: str, **more: Any) -> dict[str, Any]:
    """The settings of a teacher of this name behind a server."""
    prices = {"usd_per_mtok_in": 1.0, "usd_per_mtok_out": 1.0}
    return {"name": name, "model": name, "base_url": url, "max_tokens": 64, **prices, **more}


def replay(root: Path, rollouts: Run, teachers: list[dict[str, Any]], how: Any = None, **settings: Any) -> Run:
    """A run of replay-teachers; `how` it is carried out: `max_cost`, `resume`."""
    config, given = replay_teachers.Config(teachers=teachers, **settings), {"rollouts": rollouts}
    return Run(runner.execute("replay-teachers", given, config, root=root, **(how or {})).path)


@pytest.fixture
def server() -> Iterator[Server]:
    """Gives the same answer to all."""
    with serving(lambda body, n: Reply(body=answer("x"))) as running_server:
        yield running_server


def test_every_distinct_state_is_asked_once(tmp_path: Path, collected: Collected, server: Server) -> None:
    rollouts = collected()
    steps = rollouts.rows(STEP)
    distinct = {s["state_sha256"] for s in steps}
    run = replay(tmp_path, rollouts, [endpoint("one", server.url), endpoint("two", server.url)])
    rows = run.rows(TEACHER_ACTION)
    assert len(distinct) < len(steps)
    assert len(rows) == len(server.requests) == 2 * len(distinct)
    assert sum(r["num_steps"] for r in rows) == 2 * len(steps)
    assert sum(r["cost_usd"] for r in rows) == pytest.approx(len(rows) * 15 / 1e6)
    assert run.manifest.cost_usd == pytest.approx((len(rows) * 15 + 2 * 11) / 1e6), "with a probing call a server"
    assert run.manifest.summary["verdict"] == "AFFORDABLE"


def test_teachers_that_share_a_model_or_are_the_students_are_noted(
    tmp_path: Path, collected: Collected, server: Server
) -> None:
    rollouts = collected()
    url = "http://127.0.0.1:9/v1"
    student = {"name": "s", **{key: rollouts.manifest.config["policy"][key] for key in ("model", "base_url")}}
    teachers = [endpoint("a", url), endpoint("b", f"{url}/", model="a"), endpoint("a2", "http://other/v1", model="a")]
    config = replay_teachers.Config(teachers=[*teachers, {**student, "max_tokens": 64}])
    notes = replay_teachers.STAGE.plan(Inputs({"rollouts": [rollouts]}), config).notes
    shared, own = (note for note in notes if "independent" in note)
    assert "teachers a and b" in shared and "teacher s" in own and student["model"] in own
    apart = replay_teachers.Config(teachers=[endpoint("one", url), endpoint("two", url)])
    assert "independent" not in str(replay_teachers.STAGE.plan(Inputs({"rollouts": [rollouts]}), apart).notes)
    teachers = [endpoint("one", server.url), endpoint("two", server.url, model="one")]
    report = (replay(tmp_path, rollouts, teachers).path / "report.txt").read_text()
    assert "Note: teachers one and two" in report


def test_the_cost_of_a_plan_is_what_its_calls_reserve(tmp_path: Path, collected: Collected, server: Server) -> None:
    rollouts = collected()
    shaped = {"request": {"top_p": 0.5, "seed": False}, "extra_body": {"provider": {"only": ["x"]}}}
    teachers = [endpoint("one", server.url, **shaped), endpoint("two", server.url)]
    plan = replay_teachers.STAGE.plan(Inputs({"rollouts": [rollouts]}), replay_teachers.Config(teachers=teachers))
    run = replay(tmp_path, rollouts, teachers, {"max_cost": plan.max_cost_usd})
    ledger = [json.loads(line) for line in (run.path / "ledger.jsonl").read_text().splitlines()]
    reserved = sum(entry.get("reserved", 0.0) for entry in ledger)
    assert reserved == pytest.approx(plan.max_cost_usd, rel=1e-9)


def test_failures_are_kept_apart_and_resumed(tmp_path: Path, collected: Collected) -> None:
    rollouts, broken = collected(), [True]

    def reply(body: dict[str, Any], n: int) -> Reply:
        return Reply(500, {"error": {"message": "down"}}) if broken[0] and n % 2 else Reply(body=answer("x"))

    with serving(reply) as server:
        teachers = [endpoint("one", server.url, max_attempts=1)]
        with pytest.raises(Incomplete, match=r"answers failed, the first of one \(one at http://.*\): .*down"):
            replay(tmp_path, rollouts, teachers)
        asked, broken[0] = len(server.requests), False
        rows = replay(tmp_path, rollouts, teachers, {"resume": True}).rows(TEACHER_ACTION)
    assert all(r["error_type"] is None for r in rows)
    assert len(server.requests) == asked + asked // 2


def test_a_budget_holds_over_all_attempts_and_nothing_is_paid_twice(tmp_path: Path, collected: Collected) -> None:
    rollouts = collected()
    with serving(lambda body, n: Reply(body=answer("x", cost=1.0))) as server:
        teachers = [endpoint("one", server.url, usd_per_mtok_out=1e6 / 64, concurrency=1)]
        for resume in (False, True):
            with pytest.raises(Incomplete, match=r"budget of 2\.5 USD"):
                replay(tmp_path, rollouts, teachers, {"max_cost": 2.5, "resume": resume})
            assert len(server.requests) == 2
        run = replay(tmp_path, rollouts, teachers, {"resume": True})
    assert len(server.requests) == len(run.rows(TEACHER_ACTION))
    probe = (10 * 1.0 + 1 * 1e6 / 64) / 1e6
    assert run.manifest.cost_usd == pytest.approx(len(server.requests) + probe)


def test_a_model_behind_vllm_is_a_teacher_too(tmp_path: Path, tiny: Path, collected: Collected) -> None:
    """Asked by token ids, greedily, beside another."""
    rollouts = collected()
    local = {"name": "local", "model": str(tiny), "max_tokens": 8}
    with running(tiny) as engine:
        one = {"name": "served", "model": f"vllm:{tiny}", "base_url": engine.url, "max_tokens": 8}
        run = replay(tmp_path, rollouts, [local, one])
    said: dict[str, list[str]] = {}
    for row in run.rows(TEACHER_ACTION):
        said.setdefault(row["teacher"], []).append(row["action"])
        assert row["error_type"] is None and row["completion_tokens"] > 0 and row["cost_usd"] == 0
    assert said["served"] == said["local"] and said["local"]


def test_no_other_stage_has_a_setting_that_buys_answers() -> None:
    """`samples` at the top of a file of settings went to all stages, and bought four answers for each one.

    `collect` takes teachers, which play turns only where `rollouts.mixed` is set.
    """
    others = (load_stage(name).config.model_fields for name in STAGES if name != "replay-teachers")
    keys = {key for fields in others for key in fields}
    assert replay_teachers.Config.model_fields.keys() & keys == {"seed", "teachers"}


def test_two_teachers_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="2 teachers have the name 'one'"):
        replay_teachers.Config(teachers=[endpoint("one", "http://x"), endpoint("one", "http://y")])


def test_the_built_in_teachers_answer_kata_alone(tmp_path: Path, collected: Collected) -> None:
    """Also where rollouts were imported: their rows name the environment, and no settings do."""
    played = collected()
    tables = [(kind, played.rows(kind)) for kind in (TASK, ROLLOUT, STEP)]
    for rollouts in (played, Run(written(tmp_path, "import/one", tables))):
        asked = {"rollouts": rollouts}
        with pytest.raises(UsageError, match="--teachers FILE"):
            replay_teachers.STAGE.plan(Inputs(asked), replay_teachers.Config())
        with pytest.raises(UsageError, match="--teachers FILE"):
            runner.execute("replay-teachers", asked, replay_teachers.Config(), root=tmp_path)
    assert not list(tmp_path.glob("replay-teachers/2*"))
    named = replay_teachers.Config(teachers=[{"name": "a", "model": "kata:teacher-a", "max_tokens": 64}])
    assert replay_teachers.STAGE.plan(Inputs(asked), named).units > 0
    rollouts = scripted_runs.played(tmp_path, "noop", {"name": "kata"}, tasks=1, samples=1)
    assert replay_teachers.STAGE.plan(Inputs({"rollouts": rollouts}), replay_teachers.Config()).units == 3


# The share of answers and the verdict


def judged(root: Path, rollouts: Run, reply: Callable[[dict[str, Any], int], Reply], **settings: Any) -> Run:
    """replay-teachers with one teacher behind a scripted server."""
    with serving(reply) as server:
        return replay(root, rollouts, [endpoint("one", server.url, max_attempts=1)], **settings)


def half(body: dict[str, Any], n: int) -> Reply:
    return Reply(400, {"error": {"message": "no"}}) if n % 2 else Reply(body=answer("x"))


CUT: dict[str, Any] = {**answer(""), "choices": [{"finish_reason": "length", "message": {"content": "a half"}}]}
THOUGHT: dict[str, Any] = {**CUT, "choices": [{"finish_reason": "stop", "message": {"reasoning_content": "Hm."}}]}
VERDICTS: dict[str, tuple[Callable[[dict[str, Any], int], Reply], dict[str, float], str, int]] = {
    "nothing but errors": (lambda body, n: Reply(400, {"error": {"message": "no such field"}}), {}, "INVALID-RUN", 1),
    "nothing but answers cut off": (lambda body, n: Reply(body=CUT), {}, "INVALID-RUN", 1),
    "nothing but thoughts": (lambda body, n: Reply(body=THOUGHT), {}, "INVALID-RUN", 1),
    "half are errors": (half, {}, "TOO FEW ANSWERS", 1),
    "half are enough": (half, {"min_answered": 0.4}, "AFFORDABLE", 0),
    "dear by default": (lambda body, n: Reply(body=answer("x", cost=20.0)), {}, "TOO EXPENSIVE", 1),
    "dear": (lambda body, n: Reply(body=answer("x")), {"max_usd_per_rollout": 1e-9}, "TOO EXPENSIVE", 1),
    "slow": (lambda body, n: Reply(body=answer("x")), {"max_p95_latency_s": 1e-6}, "TOO SLOW", 1),
}


def test_teachers_are_given_the_tools_of_each_state(tmp_path: Path, server: Server) -> None:
    """Equal messages with other tools are another state: logs of function calling ask one question with several."""
    declared: list[Any] = [
        {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
        for name in ("search", "read")
    ]
    log = [
        {"messages": [user("q"), assistant(str(n))], "task_id": f"t{n}", "reward": 1, "tools": tools}
        for n, tools in enumerate([declared[:1], declared, declared[:1], []])
    ]
    run = replay(tmp_path, imported(tmp_path, jsonl(tmp_path / "log.jsonl", *log)), [endpoint("one", server.url)])
    given = [[tool["function"]["name"] for tool in request.get("tools") or []] for request in server.requests]
    assert sorted(given) == [[], ["search"], ["search", "read"]]
    assert len({row["state_sha256"] for row in run.rows(TEACHER_ACTION)}) == 3


def test_where_nobody_was_asked_nothing_was_measured(tmp_path: Path, server: Server) -> None:
    row = {"messages": [user("q"), {**assistant("a"), "weight": 0}], "task_id": "t", "reward": 1}
    rollouts = imported(tmp_path, jsonl(tmp_path / "masked.jsonl", row))
    run = replay(tmp_path, rollouts, [endpoint("one", server.url)])
    assert run.manifest.summary["verdict"] == "INVALID-RUN" and not server.requests


@pytest.mark.parametrize("case", VERDICTS)
def test_the_verdict_is_the_exit_code(tmp_path: Path, collected: Collected, case: str) -> None:
    reply, settings, verdict, exit_code = VERDICTS[case]
    run = judged(tmp_path, collected(), reply, **settings)
    assert (run.manifest.summary["verdict"], run.manifest.outcome.exit_code) == (verdict, exit_code)
    planned = run.manifest.counts["planned"]
    assert run.manifest.counts["truncated"] == planned * ("cut off" in case)
    assert run.manifest.counts["empty"] == planned * ("thoughts" in case)
    report = (run.path / "report.txt").read_text()
    assert verdict in report and ("AFFORDABLE" in report) == (verdict == "AFFORDABLE")


def test_a_finished_run_is_judged_again_by_the_limits_of_each_call(
    tmp_path: Path, collected: Collected, server: Server
) -> None:
    teachers = [endpoint("one", server.url)]
    run = replay(tmp_path, collected(), teachers)
    asked, before = len(server.requests), (run.path / "report.txt").read_text()
    dear = replay(tmp_path, collected(), teachers, max_usd_per_rollout=1e-9)
    assert dear.path == run.path and len(server.requests) == asked and dear.damage("bytes") is None
    assert (dear.manifest.summary["verdict"], dear.manifest.outcome.exit_code) == ("TOO EXPENSIVE", 1)
    assert "AFFORDABLE" not in (dear.path / "report.txt").read_text()
    again = replay(tmp_path, collected(), teachers)
    assert again.manifest.outcome == run.manifest.outcome and (run.path / "report.txt").read_text() == before


def test_calls_without_an_answer_count_in_the_cost_of_a_rollout(tmp_path: Path, collected: Collected) -> None:
    refused = set[str]()

    def reply(body: dict[str, Any], n: int) -> Reply:
        if (question := str(body)) in refused:
            return Reply(body=answer("x"))
        refused.add(question)
        return Reply(429, {"error": {"message": "slow"}, "usage": {"cost": 9.0}}, {"Retry-After": "0"})

    with serving(reply) as server:
        teachers = [endpoint("one", server.url, max_attempts=3, concurrency=1)]
        run = replay(tmp_path, collected(), teachers, max_usd_per_rollout=5.0)
    total = run.manifest.summary["teachers"][-1]
    assert total["usd_per_rollout"] < 1 < 5 < run.manifest.cost_usd / run.manifest.summary["rollouts"]
    assert run.manifest.summary["verdict"] == "TOO EXPENSIVE"


def test_an_unknown_price_is_not_zero(tmp_path: Path, collected: Collected, server: Server) -> None:
    teacher = endpoint("one", server.url, usd_per_mtok_in=None, usd_per_mtok_out=None)
    run = replay(tmp_path, collected(), [teacher])
    assert all(row["cost_usd"] is None for row in run.rows(TEACHER_ACTION))
    assert (run.manifest.summary["verdict"], run.manifest.outcome.ok) == ("UNPRICED", None)
    assert "price of one is not known" in (run.path / "report.txt").read_text()


def test_a_step_takes_as_long_as_its_slowest_teacher(tmp_path: Path, collected: Collected) -> None:
    def reply(body: dict[str, Any], n: int) -> Reply:
        return Reply(body=answer("x", cost=1.0), delay_s=0.3 if body["model"] == "slow" else 0.0)

    with serving(reply) as server:
        run = replay(tmp_path, collected(), [endpoint("fast", server.url), endpoint("slow", server.url)])
    fast, slow, total = run.manifest.summary["teachers"]
    rows = run.rows(TEACHER_ACTION)
    waits: dict[str, list[float]] = defaultdict(list)
    for row in rows:  # compared with what the rows say: on a busy machine the fast teacher may answer last
        waits[row["state_sha256"]].append(row["latency_s"])
    assert total["p50_latency_s"] == pytest.approx(statistics.median(max(two) for two in waits.values()))
    assert fast["p50_latency_s"] < slow["p50_latency_s"] <= total["p50_latency_s"]
    assert slow["p50_latency_s"] >= 0.3
    rollouts = {row["rollout_id"] for row in collected().rows(STEP)}
    assert total["usd_per_rollout"] == pytest.approx(len(rows) / len(rollouts))
    assert total["p50_usd_per_rollout"] <= total["p95_usd_per_rollout"]


def test_a_refused_key_stops_a_run_which_is_kept_where_it_spent_money(tmp_path: Path, collected: Collected) -> None:
    """A time-out, then a refused key: nothing was finished, yet money may have been spent."""

    def reply(body: dict[str, Any], n: int) -> Reply:
        return Reply(502, {"error": {"message": "lost"}}) if n == 0 else Reply(401, {"error": {"message": "no"}})

    with serving(reply) as server, pytest.raises(UsageError, match="key was refused"):
        replay(tmp_path, collected(), [endpoint("one", server.url, concurrency=1)])
    (folder,) = tmp_path.glob("replay-teachers/2*")
    assert Run(folder).manifest.possibly_usd > 0


# Chains of states, side by side


def test_teachers_are_asked_side_by_side_and_steps_in_order(tmp_path: Path, collected: Collected) -> None:
    rollouts = collected(tasks=4)
    inside, most, order = [0], [0], list[tuple[str, str]]()

    def reply(body: dict[str, Any], n: int) -> Reply:
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        order.append((body["model"], store.digest(body["messages"])))
        time.sleep(0.05)
        inside[0] -= 1
        return Reply(body=answer("x"))

    with serving(reply) as server:
        replay(tmp_path, rollouts, [endpoint("one", server.url), endpoint("two", server.url)])
    assert most[0] > 4, "the chains of both teachers run at once"
    paths: dict[str, list[str]] = {}
    for state in states_by_digest(rollouts.rows(STEP)).values():
        paths.setdefault(state.steps[0]["rollout_id"], []).append(store.digest(state.messages))
    assert max(map(len, paths.values())) > 1
    for model in ("one", "two"):
        asked = [state for name, state in order if name == model]
        for path in paths.values():
            assert [asked.index(state) for state in path] == sorted(asked.index(state) for state in path)


def test_one_slow_answer_holds_up_its_own_chain_alone(tmp_path: Path, collected: Collected) -> None:
    """In batches with barriers, everybody waited for the slowest."""
    finished, began = list[float](), list[float]()

    def reply(body: dict[str, Any], n: int) -> Reply:
        began.append(time.monotonic())
        time.sleep(1.5 if n == 0 else 0.0)
        finished.append(time.monotonic() - began[0])
        return Reply(body=answer("x"))

    rollouts = collected(tasks=4)
    with serving(reply) as server:
        replay(tmp_path, rollouts, [endpoint("one", server.url, concurrency=2)])
    slow = rollouts.rows(STEP)[0]["rollout_id"]
    chain = sum(s.steps[0]["rollout_id"] == slow for s in states_by_digest(rollouts.rows(STEP)).values())
    assert sum(at < 1.5 for at in finished) >= len(finished) - chain - 1


def test_samples_of_a_state_follow_its_first(tmp_path: Path, collected: Collected) -> None:
    answered: list[str] = []
    early: list[str] = []

    def reply(body: dict[str, Any], n: int) -> Reply:
        state = store.digest(body["messages"])
        if state in answered:
            early.append(state)
        time.sleep(0.02)
        answered.append(state)
        return Reply(body=answer(f"{n}"))

    with serving(reply) as server:
        run = replay(tmp_path, collected(), [endpoint("one", server.url, temperature=1.0)], answers_per_state=3)
    assert len(early) == 2 * len(set(answered)), "the first is answered, and its prompt cached, before the others"
    assert len(run.rows(TEACHER_ACTION)) == 3 * len(set(answered))


def test_a_local_teacher_is_hashed_once_however_many_questions(
    tmp_path: Path, tiny: Path, collected: Collected
) -> None:
    rollouts, opened = collected(tasks=6), [0]
    own = shutil.copytree(tiny, tmp_path / "own")  # which nobody has hashed before
    listening = [True]

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if listening and event == "open" and str(arguments[0]).endswith("model.safetensors"):
            opened[0] += 1

    sys.addaudithook(hook)
    config = replay_teachers.Config(teachers=[{"name": "local", "model": str(own), "max_tokens": 8}])
    with RecordedStates(rollouts, tmp_path) as recorded:
        asked = questions(recorded, config.teachers, answers_per_state=1, seed=0)
        assert len(list(asked["local"])) == len(list(asked["local"])) == len(asked["local"]) > 5
    listening.clear()
    assert opened[0] == 1
