"""A chain in a Modal sandbox: Modal's real SDK, and a fake of its service that runs the command with the volume."""

import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from needs import needs
from support.command_line import call, call_process, until
from support.server import Server

from tests.composer_cli.executors.submitting import KEY, chain, digests, holding, job, name_of

TOKEN = ("ak-0123456789", "as-0123456789abcdef")
ROOT = Path(__file__).parents[3]


@pytest.fixture
def service(tmp_path: Path) -> Iterator:
    from tests.composer_cli.executors.modal_service import serving_modal

    (tmp_path / "volume").mkdir()
    with serving_modal(TOKEN, {"runs": tmp_path / "volume"}, {"teaching": {"TEACHING_KEY": KEY}}) as running:
        yield running


@pytest.fixture
def composer(service, model: Server, tmp_path: Path) -> Callable:
    (tmp_path / "small.toml").write_text(chain(model.url, sandbox="none"))
    mine = {
        "MODAL_SERVER_URL": service.url,
        "MODAL_TOKEN_ID": TOKEN[0],
        "MODAL_TOKEN_SECRET": TOKEN[1],
        "MODAL_CONFIG_PATH": str(tmp_path / "modal.toml"),
    }
    # In processes of their own: the SDK keeps the client of a process's first call, with its address and its token.
    return lambda *words, at="artifacts", **more: call_process(tmp_path / at, *words, **{**mine, **more})


@pytest.fixture
def words(tmp_path: Path) -> list:
    where = {"image": "python:3.11", "volume": "runs", "secret": "teaching", "python": sys.executable}
    sets = [word for key, value in where.items() for word in ("--set", f"on.{key}={value}")]
    path = ["--set", f"on.env.PYTHONPATH={ROOT}"]
    return ["run", "--preset", tmp_path / "small.toml", "--on", "modal", *sets, *path]


@needs("modal")
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_an_ended_sandbox_is_followed_by_one_that_goes_on_to_the_same_content(
    composer, words, service, model, held, tmp_path
):
    held.first = 6
    name = name_of(composer(*words, "--json"))
    until(lambda: len(model.requests) == 7, seconds=200)  # the seventh is held
    assert job(composer, name)["status"] == "running"
    assert "collect: starts" in composer("show", name).stdout
    stopped = composer("cancel", name)
    held.let.set()
    assert stopped.returncode == 0 and job(composer, name)["status"] == "cancelled", stopped.stderr
    until(lambda: service.sandboxes[0].process.poll() is not None)
    again = name_of(composer(*words, "--json"))
    log = composer("show", again, "--follow")
    assert log.returncode == 0 and "resumed, done in" in log.stdout, log.stdout + log.stderr
    assert job(composer, again)["status"] == "complete"
    here = composer("run", "--preset", tmp_path / "small.toml", at="here", TEACHING_KEY=KEY)
    assert here.returncode == 0 and digests(tmp_path / "volume") == digests(tmp_path / "here")
    assert set(model.keys) == {f"Bearer {KEY}"}
    assert holding(KEY, tmp_path / "artifacts", tmp_path / "volume") == []


@needs("modal")
def test_the_sandbox_is_what_was_asked_for(composer, words, service):
    sets = ["--set", 'on.setup="echo said; exit 3"', "--set", "on.gpu=H100:2", "--set", "on.cpu=4", "--json"]
    name = name_of(composer(*words, *sets))
    asked = service.sandboxes[0].asked
    assert (asked.name, asked.timeout_secs, service.sandboxes[0].secrets) == (name, 86_400, ["st-teaching"])
    assert (asked.resources.gpu_config.gpu_type, asked.resources.gpu_config.count) == ("H100", 2)
    assert (asked.resources.milli_cpu, asked.resources.memory_mb) == (4000, 8192)
    assert any("python:3.11" in line for line in service.images[asked.image_id])
    until(lambda: service.sandboxes[0].process.poll() is not None)
    found = job(composer, name)
    assert found["status"] == "failed" and found["reason"].startswith("exit code 3")
    assert "said" in composer("show", name).stdout


@needs("modal")
def test_a_sandbox_that_outlives_its_time_has_failed(composer, words, service):
    name = name_of(composer(*words, "--set", 'on.setup="sleep 60"', "--set", "on.timeout_s=1", "--json"))
    until(lambda: service.sandboxes[0].process.poll() is not None)
    assert job(composer, name)["reason"] == "its time is over; the same command with --on goes on"


@needs("modal")
@pytest.mark.parametrize(
    ("more", "variables", "said"),
    [
        (["--set", "on.secret=other"], {}, "Modal refuses this job: Secret other not found"),
        (["--set", 'on.keys=["WANDB_API_KEY"]'], {}, "is missing ['WANDB_API_KEY']"),
        ([], {"MODAL_TOKEN_ID": "", "MODAL_TOKEN_SECRET": ""}, "Modal refuses the token"),
        (["--set", "on.secret="], {}, "The chain needs TEACHING_KEY. Keep them in a secret"),
    ],
)
def test_a_refused_submission_leaves_no_record(composer, words, tmp_path, more, variables, said):
    done = composer(*words, *more, **variables)
    assert done.returncode == 2 and said in done.stderr, done.stderr
    assert not list(tmp_path.glob("artifacts/submitted/*"))


def test_a_missing_sdk_is_reported_with_a_remedy(tmp_path):
    if find_spec("modal") is not None:
        pytest.skip("Modal's SDK is installed")
    sets = ["--set", "on.image=python:3.11", "--set", "on.volume=runs"]
    done = call(tmp_path, "run", "--preset", "demo", "--on", "modal", *sets)
    assert done.returncode == 2 and "pip install 'composer-post-training[modal]'" in done.stderr
