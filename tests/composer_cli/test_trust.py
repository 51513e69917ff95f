"""Settings files are read, not obeyed: they run nothing in a dry run, and send no provider's key elsewhere unasked."""

import json
from contextlib import nullcontext
from pathlib import Path

import pytest
from pydantic import ValidationError

from composer_cli.trust import require_trusted_servers
from composer_stages.errors import UsageError
from composer_stages.runs.stage import load_stage

EVIL = "https://collect.example/v1"
HOME = "https://api.openai.com/v1"
MARK = "import pathlib\npathlib.Path(__file__).with_name('imported').touch()\n"


def preset(tmp_path: Path, *lines: str, stage: str = "collect") -> Path:
    path = tmp_path / "preset.toml"
    path.write_text("\n".join(["[[stage]]", f'stage = "{stage}"', "[stage.config]", *lines]))
    return path


def policy(address: str, variable: str = "OPENAI_API_KEY") -> str:
    return f'policy = {{ model = "m", base_url = "{address}", api_key_env = "{variable}" }}'


@pytest.mark.parametrize(
    ("variable", "address", "trusted"),
    [
        *(
            ("OPENAI_API_KEY", address, False)
            for address in (
                EVIL,
                "https://api.openai.com.collect.example/v1",
                "https://notopenai.com/v1",
                "https://localhost.collect.example/v1",
                "http://[2001:db8::1]/v1",
                "http://127.0.0.1.collect.example/v1",
                "http://api.openai.com/v1",
            )
        ),
        ("ANTHROPIC_API_KEY", EVIL, False),
        ("OPENROUTER_API_KEY", EVIL, False),
        ("AWS_BEARER_TOKEN_BEDROCK", "https://bedrock-runtime.eu-west-1.amazonaws.com/openai/v1", True),
        ("AWS_BEARER_TOKEN_BEDROCK", "https://bedrock-runtime.a.execute-api.us-east-1.amazonaws.com/v1", False),
        ("AWS_SECRET_ACCESS_KEY", "https://x1.execute-api.us-east-1.amazonaws.com/v1", False),
        ("AWS_SECRET_ACCESS_KEY", "https://ec2-3-4-5-6.compute-1.amazonaws.com/v1", False),
        ("AZURE_OPENAI_API_KEY", "https://ours.openai.azure.com/openai/v1", True),
        ("AZURE_OPENAI_API_KEY", "https://theirs.westeurope.cloudapp.azure.com/v1", False),
    ],
)
def test_lookalike_domains_and_servers_in_a_cloud_are_not_the_provider(variable, address, trusted):
    config = load_stage("collect").config(policy={"model": "m", "base_url": address, "api_key_env": variable})
    refusal = rf"{variable} holds the key .*policy\.base_url would send it to .*--trust"
    with nullcontext() if trusted else pytest.raises(UsageError, match=refusal):
        require_trusted_servers("collect", config, [], trust=False)


@pytest.mark.parametrize("address", ["https://api.openai.com@collect.example/v1", "https://a.b\\@api.openai.com/v1"])
def test_an_address_with_a_user_is_refused_whatever_its_host(address):
    with pytest.raises(ValidationError, match="before @"):
        load_stage("collect").config(policy={"model": "m", "base_url": address})


def test_no_settings_file_sends_a_key_to_another_server(run_command, tmp_path, monkeypatch):
    variable = "HF_TOKEN"
    monkeypatch.setenv(variable, "a-key-of-the-user")
    settings = tmp_path / "settings.toml"
    settings.write_text(f"tasks = 2\n{policy(EVIL, variable)}\n")
    for words in (["collect", "--config", settings], ["run", "--preset", preset(tmp_path, policy(EVIL, variable))]):
        code, _, err = run_command(*words, "--dry-run")
        assert code == 2 and "policy.base_url would send it to" in err and "a-key-of-the-user" not in err
    teacher = f'name = "t"\nmodel = "m"\nbase_url = "{EVIL}"\napi_key_env = "{variable}"\nmax_tokens = 9\n'
    (tmp_path / "teachers.toml").write_text(f"[[teachers]]\n{teacher}")
    code, _, err = run_command("replay-teachers", "--teachers", tmp_path / "teachers.toml", "--dry-run")
    assert code == 2 and "teachers.0.base_url" in err
    lines = ('format = "hub"', 'repo = "a/b"', f'endpoint = "{EVIL}"')
    code, _, err = run_command("run", "--preset", preset(tmp_path, *lines, stage="export"), "--dry-run")
    assert code == 2 and "endpoint would send it to" in err


def test_typed_trusted_and_local_addresses_are_accepted(run_command, tmp_path, monkeypatch):
    """Refused later, since nothing answers at these addresses; none of them is asked in this test."""
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    places = {"evil": EVIL, "home": HOME, "local": "http://127.0.0.1:4000/v1"}
    for name in places:
        (tmp_path / name).mkdir()
    evil, home, local = (preset(tmp_path / name, policy(address)) for name, address in places.items())
    for words in (
        ["run", "--preset", home],
        ["run", "--preset", local],
        ["run", "--preset", evil, "--trust"],
        ["run", "--preset", evil, "--set", f'collect.policy.base_url="{EVIL}"'],
        ["collect", "--set", f'policy.base_url="{EVIL}"', "--set", "policy.api_key_env=OPENAI_API_KEY"],
    ):
        code, _, err = run_command(*words, "--dry-run")
        assert code == 2 and "is not set" in err, err


def test_a_dry_run_imports_and_calls_nothing_that_a_preset_names(run_command, tmp_path, monkeypatch):
    (tmp_path / "theirs.py").write_text(f"{MARK}class Env: ...\n")
    monkeypatch.chdir(tmp_path)
    chain = preset(tmp_path, 'env = { name = "theirs:Env", options = { command = "touch called" } }', "tasks = 2")
    code, out, err = run_command("run", "--preset", chain, "--dry-run", "--json")
    assert code == 0, err
    assert any(f"imports {tmp_path / 'theirs.py'}" in line for line in json.loads(out)["checked"])
    theirs = preset(tmp_path, 'env = { name = "os:system", options = { command = "touch called" } }')
    for dry in ([], ["--dry-run"]):
        code, _, err = run_command("run", "--preset", theirs, *dry)
        assert code == 2 and "standard library" in err, dry
    assert not (tmp_path / "imported").exists() and not (tmp_path / "called").exists()
