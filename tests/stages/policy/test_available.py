"""Whether a model is available, and its context, which limits an answer without `max_tokens`."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from support.command_line import call
from support.models import save_tiny
from support.server import Reply, Server, answer, kept_in, serving

from composer_stages import collect
from composer_stages.errors import BadInput, ComposerError, InfrastructureError, UsageError
from composer_stages.policy import ask_all, available, open_policy, preflight
from composer_stages.policy.available import check, context_tokens
from composer_stages.policy.base import UNSTATED, PolicyConfig, Turn
from composer_stages.rollouts.agent_loop import Rules
from composer_stages.rollouts.config import RolloutLimits
from composer_stages.runs.ledger import Budget
from composer_stages.runs.run import Inputs, Run
from composer_stages.teachers.config import TeacherConfig

TURN = Turn([{"role": "user", "content": "hello"}], 1)
PRICES: dict[str, Any] = {"usd_per_mtok_in": 1.0, "usd_per_mtok_out": 2.0}


def listing(**row: Any) -> Reply:
    return Reply(body={"data": [{"id": "other", "max_model_len": 8}, {"id": "m", **row}]})


@pytest.fixture
def stating() -> Iterator[Server]:
    """A server whose model `m` has a context of 4,096 tokens."""
    with serving(lambda body, n: Reply(body=answer("a")), listing(max_model_len=4096)) as server:
        yield server


def sampled(config: PolicyConfig, cache: Path, limit: float | None = None) -> Any:
    budget = Budget(limit, cache / "ledger.jsonl")
    policy = open_policy(config, cache=kept_in(cache), budget=budget, listener=lambda *_: None)
    return ask_all(policy, [TURN])[0]


@pytest.mark.parametrize("model", ["kata:student", "vllm:kata:student-served", "reference", "noop"])
def test_a_built_in_model_answers_with_64_tokens_by_default(model: str) -> None:
    config = PolicyConfig(model=model)
    assert (config.max_tokens, available.notes(config)) == (64, ())
    assert PolicyConfig(model=model, max_tokens=9).max_tokens == 9
    assert config.identity()["max_tokens"] == 64, "runs of before are found again"


def test_a_served_model_may_have_the_name_of_a_built_in_model() -> None:
    assert PolicyConfig(model="kata:student", base_url="http://127.0.0.1:1/v1").max_tokens is None


def test_a_server_that_states_its_context_gets_no_limit_and_the_money_is_bounded_by_it(
    stating: Server, tmp_path: Path
) -> None:
    config = PolicyConfig(model="m", base_url=stating.url, **PRICES)
    assert available.longest_answer(config) == 4096 and "4,096" in available.notes(config)[0]
    assert sampled(config, tmp_path, limit=1.0).text == "a"
    assert "max_tokens" not in stating.requests[0]
    reserved = json.loads((tmp_path / "ledger.jsonl").read_text().splitlines()[0])["reserved"]
    assert 4096 * 2e-6 < reserved < 4096 * 2e-6 + 2000e-6


def test_a_server_without_a_stated_context_gets_a_limit(tmp_path: Path) -> None:
    with serving(lambda body, n: Reply(body=answer("a"))) as server:
        config = TeacherConfig(name="t", model="m", base_url=server.url, **PRICES)
        assert available.longest_answer(config) == UNSTATED
        sampled(config, tmp_path)
        assert server.requests[0]["max_tokens"] == UNSTATED
        other = PolicyConfig(model="m", base_url=server.url, request={"max_completion_tokens": 7}, **PRICES)
        sampled(other, tmp_path)
        assert "max_tokens" not in server.requests[1] and available.longest_answer(other) == 7


@pytest.mark.parametrize(
    ("row", "tokens"),
    [
        ({"context_length": 1000, "top_provider": {"max_completion_tokens": 300}}, 300),
        ({"context_window": 500, "max_completion_tokens": None}, 500),
        ({"context_length": "many", "top_provider": []}, None),
        ({"context_length": -1}, None),
    ],
)
def test_lists_of_models_name_the_context_in_several_ways(row: dict[str, Any], tokens: int | None) -> None:
    with serving(lambda body, n: Reply(), listing(**row)) as server:
        assert context_tokens(PolicyConfig(model="m", base_url=server.url)) == tokens


def test_a_server_that_is_down_may_state_its_context_later() -> None:
    with serving(lambda body, n: Reply(), listing(max_model_len=99)) as server:
        url = server.url
    assert available.longest_answer(PolicyConfig(model="m", base_url=url)) == UNSTATED


def test_a_folder_states_its_context_and_its_answers_fit_into_it(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model")
    shape = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**shape, "max_position_embeddings": 40}))
    config = PolicyConfig(model=str(folder))
    assert config.max_tokens is None and available.longest_answer(config) == 40
    sample = sampled(config, tmp_path)
    assert sample.prompt_tokens + sample.completion_tokens <= 40


def test_a_plan_names_the_context_as_the_bound(stating: Server) -> None:
    config = collect.Config(policy={"model": "m", "base_url": stating.url, **PRICES}, tasks=2, samples=3, max_steps=4)
    plan = collect.plan(Inputs(), config)
    assert plan.max_completion_tokens == 2 * 3 * 4 * 4096 and plan.max_cost_usd == pytest.approx(24 * 4096 * 2e-6)
    assert any("4,096" in note for note in plan.notes)


def test_context_limits_need_a_limit_of_the_answer(tmp_path: Path) -> None:
    config = PolicyConfig(model="m", base_url="http://127.0.0.1:9/v1")
    policy = open_policy(config, cache=kept_in(tmp_path), budget=Budget(None, None), listener=lambda *_: None)
    with pytest.raises(UsageError, match="max_tokens"):
        Rules.of(policy, 3, RolloutLimits(context_tokens=100), "full")
    with pytest.raises(ValidationError, match="max_tokens"):
        PolicyConfig(model="m", base_url="http://127.0.0.1:9/v1", extra_body={"thinking": {"budget_tokens": 9}})


def test_a_local_folder_passes_collection_checks_without_settings(tmp_path: Path) -> None:
    """It was cut off after 64 tokens and failed the collection checks."""
    folder = save_tiny(tmp_path / "model")
    words = ["collect", "--env", "support.environments:GuessEnv", "--policy", folder, "-n", "2", "-s", "samples=2"]
    done = call(tmp_path, *words, PYTHONPATH=str(Path(__file__).parents[2]))
    assert done.returncode == 0, done.stdout + done.stderr
    steps = Run(next((tmp_path / "collect").glob("2*"))).rows(collect.STEP)
    assert all(step["finish_reason"] == "stop" for step in steps)


# --- whether it is available


def named(*names: str) -> Reply:
    return Reply(body={"data": [{"id": name} for name in names]})


def never(body: dict[str, Any], number: int) -> Reply:
    raise AssertionError("no answer is to be asked for")


@pytest.mark.parametrize(
    ("model", "listed", "there"),
    [
        ("llama3.2", "llama3.2:latest", True),
        ("[aws]claude-sonnet-4-5", "[aws]claude-sonnet-4-5", True),
        ("claude-sonnet-4-5", "claude-sonnet-4-5-20250929", True),
        ("gpt-4o", "gpt-4o-2024-08-06", True),
        ("accounts/f/models/x#accounts/a/deployments/b", "accounts/f/models/x", True),
        ("gpt-4", "gpt-4.1", False),
        ("gpt-4o", "gpt-4o-mini", False),
    ],
)
def test_a_list_may_have_a_version_of_the_name(model: str, listed: str, there: bool) -> None:
    with serving(lambda body, n: Reply(), Reply(body=[{"id": listed, "context_length": 99}])) as server:
        config = PolicyConfig(model=model, base_url=server.url)
        if there:
            assert "lists the model" in check(config)
        else:
            with pytest.raises(BadInput, match="has no model"):
                check(config)


def test_a_key_without_the_right_to_list_is_no_refused_key() -> None:
    lacking = {"error": {"message": "You have insufficient permissions. Missing scopes: api.model.read."}}
    with serving(lambda body, n: Reply(), Reply(403, lacking)) as server:
        assert "lists no models" in check(PolicyConfig(model="m", base_url=server.url))


def test_an_answer_with_another_status_of_success_is_read(tmp_path: Path) -> None:
    with serving(lambda body, n: Reply(201, answer("a"))) as server:
        assert sampled(PolicyConfig(model="m", base_url=server.url), tmp_path).text == "a"


def test_a_server_that_lists_the_model_passes_and_one_that_does_not_is_refused() -> None:
    with serving(never, named("big", "small")) as server:
        assert "lists the model" in check(PolicyConfig(model="big", base_url=server.url))
        with pytest.raises(BadInput, match=r"'bgi'.*'big'"):
            check(PolicyConfig(model="bgi", base_url=server.url))
    with serving(never) as silent:
        assert "lists no models" in check(PolicyConfig(model="big", base_url=silent.url))


@pytest.mark.parametrize("model", ["vendor/big:nitro", "vendor/big", "big", "models/big", "vendor/big@preset/x"])
def test_an_alias_of_a_listed_model_passes(model: str) -> None:
    with serving(never, named("vendor/big", "big")) as server:
        assert "lists the model" in check(PolicyConfig(model=model, base_url=server.url))


PAID = {"usd_per_mtok_in": 1.0, "usd_per_mtok_out": 1.0}


@pytest.mark.parametrize(
    ("prices", "asked"), [({}, 1), ({"usd_per_mtok_in": 0.0, "usd_per_mtok_out": 0.0}, 1), (PAID, 0)]
)
def test_a_dry_run_asks_for_one_token_where_that_is_free(prices: dict[str, float], asked: int) -> None:
    with serving(never) as server:
        line = preflight.check(PolicyConfig(model="big", base_url=server.url, **prices))
    assert ("one token" in line, len(server.probes)) == (bool(asked), asked)
    assert all(body["max_tokens"] == 1 for body in server.probes)


@pytest.mark.parametrize(
    ("reply", "code"),
    [
        (Reply(body=b"data: {}\n\n"), "policy.answer-is-stream"),
        (Reply(404, {"detail": "Not Found"}), "policy.other-address"),
        (Reply(body=b"<!doctype html><html>"), "policy.other-address"),
        (Reply(403, {"error": {"message": "no"}}), "policy.request-refused"),
        (Reply(400, {"error": {"code": "Arrearage", "message": "no"}}), "policy.account-empty"),
        (Reply(500, {"error": {"message": "down"}}), "policy.server-not-available"),
    ],
)
def test_a_dry_run_says_what_the_first_answer_would(reply: Reply, code: str) -> None:
    with serving(never, probed=lambda *_: reply) as server, pytest.raises(ComposerError) as caught:
        preflight.check(PolicyConfig(model="big", base_url=server.url))
    assert caught.value.code == code


def test_a_refused_key_and_an_unreachable_server_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_KEY", "k-123456789")
    with (
        serving(never, Reply(401, {"error": {"message": "bad key"}})) as server,
        pytest.raises(UsageError, match=r"refuses the key \(status 401\). Check SOME_KEY"),
    ):
        check(PolicyConfig(model="big", base_url=server.url, api_key_env="SOME_KEY"))
    with pytest.raises(InfrastructureError, match=r"http://127\.0\.0\.1:9/v1 cannot be reached"):
        check(PolicyConfig(model="big", base_url="http://127.0.0.1:9/v1"))


def test_a_vllm_model_needs_a_server_or_an_interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dry run says both, of the tokenizer that is read here and of the server, before anything is loaded."""
    model = f"vllm:{save_tiny(tmp_path / 'tiny')}"
    with serving(never, named("base")) as server:
        assert "its folder is complete; " in (said := check(PolicyConfig(model=model, base_url=server.url)))
        assert said.endswith(f"{server.url}, which is to sample from it, answers")
    with pytest.raises(InfrastructureError, match=r"http://127\.0\.0\.1:9/v1 cannot be reached"):
        check(PolicyConfig(model=model, base_url="http://127.0.0.1:9/v1"))
    monkeypatch.delenv("COMPOSER_VLLM", raising=False)
    assert sys.executable in check(PolicyConfig(model=model, server={"python": sys.executable}))
    with pytest.raises(UsageError, match="/no/python, which is to run vLLM, does not exist"):
        check(PolicyConfig(model=model, server={"python": "/no/python"}))
    for weights in (tmp_path / "tiny").glob("*.safetensors"):
        weights.unlink()
    with pytest.raises(BadInput, match=r"holds no \*.safetensors"):
        check(PolicyConfig(model=model, server={"python": sys.executable}))


def test_built_in_models_are_available_and_folders_must_be_complete(tmp_path: Path) -> None:
    assert check(PolicyConfig(model="kata:student")) == "model kata:student: is there"
    with pytest.raises(BadInput, match=r"\./nowhere"):
        check(PolicyConfig(model="./nowhere"))
    assert not list(tmp_path.iterdir())
