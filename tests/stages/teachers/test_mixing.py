"""Mixed rollouts: who plays a turn, what is recorded of it, and what may be learned from it."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from support.refusals import refused
from support.server import Reply, answer, serving

from composer_stages import collect, curriculum, export, extract_pairs, replay_teachers
from composer_stages.arms.stage import rollout_items
from composer_stages.comparison.logs import read_run
from composer_stages.errors import BadInput, InfrastructureError
from composer_stages.probe import rows as probe_rows
from composer_stages.rollouts.trace import by_rollout, played_by, prompt_ids
from composer_stages.runs import runner
from composer_stages.runs.kinds import PAIR, ROLLOUT, STEP, TEACHER_ACTION
from composer_stages.runs.run import Inputs, Run

TURNS = 5
PRICES = {"usd_per_mtok_in": 1.0, "usd_per_mtok_out": 1.0}


def mixing(model: Path | str, url: str, **more: Any) -> collect.Config:
    """Settings of a collection in which two teachers on a server play half of the turns."""
    teachers = [{"name": n, "model": n, "base_url": url, "max_tokens": 64, **PRICES} for n in ("ann", "bob")]
    policy = {"model": str(model), "max_tokens": 20} | more.pop("policy", {})
    env = {"name": "support.environments:GuessEnv", "options": {"turns": TURNS}}
    values = {"env": env, "policy": policy, "teachers": teachers, "rollouts": {"mixed": 0.5}, "tasks": 4, "samples": 2}
    return collect.Config(**{**values, **more})


def say(body: dict[str, Any], number: int) -> Reply:
    """Every teacher says its own name."""
    return Reply(body=answer(f"```bash\necho {body['model']}\n```"))


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> Run:
    """Rollouts of the tiny model and two teachers on a server."""
    with serving(say) as server:
        config = mixing(tiny, server.url)
        return Run(runner.execute("collect", {}, config, root=tmp_path_factory.mktemp("mixed")).path)


def players(run: Run) -> dict[str, list[str | None]]:
    """Who played each turn of each rollout."""
    return {name: [played_by(step) for step in steps] for name, steps in by_rollout(run.rows(STEP)).items()}


def test_a_teacher_s_turn_is_recorded_as_its_own_and_has_no_tokens_of_the_student(mixed: Run, tiny: Path) -> None:
    steps = mixed.rows(STEP)
    taught = [step for step in steps if played_by(step)]
    assert 0.3 < len(taught) / len(steps) < 0.7 and {played_by(step) for step in taught} == {"ann", "bob"}
    for step in steps:
        name, tokens = played_by(step), [step[key] for key in ("completion_token_ids", "logprobs", "prompt_len")]
        assert step["model"] == (name or str(tiny)) and (step["capture_level"] == "tokens") == (name is None)
        assert all(value is None for value in tokens) if name else all(value is not None for value in tokens)
        assert name is None or (step["action"] == f"```bash\necho {name}\n```" and step["cost_usd"] > 0)
    counts = {name: sum(played_by(step) == name for step in taught) for name in ("ann", "bob")}
    assert mixed.manifest.summary["turns_of_teachers"] == counts and {*counts} < {*mixed.manifest.models}
    assert mixed.manifest.outcome.ok, mixed.manifest.summary["collection_checks"]


def test_the_students_prompts_are_whole_behind_a_teacher_s_turn(mixed: Run) -> None:
    for steps in by_rollout(mixed.rows(STEP)).values():
        for step, ids in zip(steps, prompt_ids(steps), strict=True):
            assert (ids is None) == (played_by(step) is not None) and (ids is None or len(ids) == step["prompt_len"])


@pytest.mark.parametrize("change", [{"tasks": 2}, {"policy": {"lockstep": 1}}, {"max_steps": 3}], ids=str)
def test_who_plays_a_turn_depends_on_the_rollout_and_the_turn_alone(
    change: dict[str, Any], mixed: Run, tiny: Path, tmp_path: Path
) -> None:
    with serving(say) as server:
        run = Run(runner.execute("collect", {}, mixing(tiny, server.url, **change), root=tmp_path).path)
    whole = players(mixed)
    assert all(who == whole[name][: len(who)] for name, who in players(run).items())


@pytest.mark.parametrize("student", ["here", "served"])
def test_a_resumed_collection_has_the_same_players_and_pays_for_no_turn_twice(
    student: str, tiny: Path, tmp_path: Path
) -> None:
    broken = [True]

    def reply(body: dict[str, Any], number: int) -> Reply:
        return Reply(402, {"error": {"message": "no credit"}}) if broken[0] and number > 6 else say(body, number)

    with serving(reply) as server:
        policy = {} if student == "here" else {"model": "student", "base_url": server.url, **PRICES}
        config = mixing(tiny, server.url, policy=policy)
        with pytest.raises(InfrastructureError):
            runner.execute("collect", {}, config, root=tmp_path)
        broken[0], refusals = False, len(server.requests) - 7
        run = Run(runner.execute("collect", {}, config, root=tmp_path, resume=True).path)
        asked = [step for step in run.rows(STEP) if played_by(step) or student == "served"]
        assert len(server.requests) - refusals == len(asked)
        again = Run(runner.execute("collect", {}, config, root=tmp_path / "other").path)
    assert players(run) == players(again)


def test_teachers_are_asked_in_all_states_and_no_turn_of_theirs_becomes_the_students_action(
    mixed: Run, tmp_path: Path
) -> None:
    with serving(lambda body, number: Reply(body=answer("```bash\nabc\n```"))) as server:
        table = [{"name": name, "model": name, "base_url": server.url, "max_tokens": 9} for name in "xyz"]
        config = replay_teachers.Config(teachers=table)
        answers = Run(runner.execute("replay-teachers", {"rollouts": mixed}, config, root=tmp_path).path)
    steps = mixed.rows(STEP)
    assert {row["state_sha256"] for row in answers.rows(TEACHER_ACTION)} == {step["state_sha256"] for step in steps}
    given = {"rollouts": mixed, "teacher_actions": answers}
    run = Run(runner.execute("extract-pairs", given, extract_pairs.Config(compare="canonical"), root=tmp_path).path)
    own = {(step["rollout_id"], step["step"]) for step in steps if not played_by(step)}
    assert run.rows(PAIR) and {(pair["rollout_id"], pair["step"]) for pair in run.rows(PAIR)} <= own
    assert "teacher_turn" in (run.path / "report.txt").read_text()


@pytest.mark.parametrize(
    "read",
    [
        lambda run, root: runner.execute("curriculum", {"tasks": run, "rollouts": run}, curriculum.Config(), root=root),
        lambda run, root: read_run(run, "log", ""),
        lambda run, root: [*rollout_items(run)],
        lambda run, root: probe_rows.run_rows(run, None, source="x", role="plain"),
    ],
    ids=["curriculum", "compare", "plan", "probe"],
)
def test_what_measures_a_model_refuses_mixed_rollouts(
    read: Callable[[Run, Path], object], mixed: Run, tmp_path: Path
) -> None:
    refused(lambda: read(mixed, tmp_path), BadInput, code="rollouts.mixed-rollouts", mixed=0.5)


def test_an_export_has_the_messages_and_no_token_ids_that_nobody_sampled(mixed: Run, tmp_path: Path) -> None:
    run = Run(runner.execute("export", {"rollouts": mixed}, export.Config(format="verifiers"), root=tmp_path).path)
    lines = [line for path in run.path.rglob("*.jsonl") for line in path.read_text().splitlines()]
    taught = [line for line in lines if "echo ann" in line or "echo bob" in line]
    assert taught and not any(re.search(r'"token_ids":\[\d', line) for line in taught)


@pytest.mark.parametrize(
    ("changed", "code"),
    [
        ({"teachers": []}, "mixed-without-teachers"),
        ({"policy": {"model": "reference"}}, "mixed-scripted"),
        ({"teachers": [{"name": "a", "model": "noop"}]}, "mixed-scripted"),
        ({"policy": {"tool_calls": "qwen3"}}, "mixed-tool-calls"),
        (
            {"policy": {"base_url": "http://127.0.0.1:1/v1"}, "teachers": [{"name": "a", "model": "m"}]},
            "mixed-local-teacher",
        ),
        ({"teachers": [{"name": "a", "model": "vllm:m"}]}, "mixed-without-address"),
        ({"teachers": [{"name": "a", "model": "m"}, {"name": "a", "model": "n"}]}, "teacher-name-twice"),
        ({"rollouts": {"mixed": 1.5}}, "less_than_equal"),
    ],
    ids=str,
)
def test_what_cannot_be_mixed_is_refused(changed: dict[str, Any], code: str) -> None:
    usual = {"rollouts": {"mixed": 0.3}, "teachers": [{"name": "a", "model": "m", "base_url": "http://127.0.0.1:1/v1"}]}
    tree = {**usual, "policy": {"model": "student"}, **changed}
    with pytest.raises(ValidationError) as raised:
        collect.Config(**tree)
    (fault,) = raised.value.errors()
    assert fault["type"] == code or fault["ctx"]["error"].args[0].code == f"teachers.{code}"


def test_nothing_is_new_in_the_identity_of_a_collection_without_teachers() -> None:
    teachers = [{"name": "a", "model": "m"}]
    for config in (collect.Config(), collect.Config(teachers=teachers)):
        assert not {"rollouts", "teachers"} & config.identity().keys()
    assert "the teachers play no turns: rollouts.mixed is 0" in collect.plan(Inputs({}), config).notes


def test_a_plan_bounds_the_dearest_player() -> None:
    config = mixing("m", "http://127.0.0.1:1/v1", policy={"base_url": "http://127.0.0.1:1/v1"})
    planned = collect.plan(Inputs({}), config)
    assert planned.max_completion_tokens == 8 * config.max_steps * 64
    assert planned.max_cost_usd == pytest.approx(8 * config.max_steps * 64e-6)


def test_a_teacher_is_shown_the_opening_of_its_own_options(tiny: Path, tmp_path: Path) -> None:
    """Worked examples in place of the student's, and then what was said in the rollout."""
    with serving(say) as server:
        teacher = {"name": "shots", "model": "m", "base_url": server.url, "max_tokens": 9, "opening": {"shots": 4}}
        env = {"name": "skills", "options": {"families": "date", "shots": 1, "attempts": 3}}
        config = mixing(tiny, server.url, env=env, teachers=[teacher], rollouts={"mixed": 0.7}, samples=1)
        run = Run(runner.execute("collect", {}, config, root=tmp_path).path)
    lengths = {len(body["messages"]) for body in server.requests}
    assert lengths <= {10, 12, 14} and len(lengths) > 1, "system, four examples, the question, and two for each turn"
    assert {row["num_messages"] for row in run.rows(STEP)} <= {4, 6, 8} and run.rows(ROLLOUT)
