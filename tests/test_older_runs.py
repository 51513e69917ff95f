"""Runs that commit 46e634e wrote are read by every command that reads runs. Both collect four tasks of kata, twice."""

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from composer_cli.app import main
from stages.runs.kinds import EVAL_ITEM, ROLLOUT
from stages.runs.run import Run

FIXTURE = Path(__file__).parent / "fixtures" / "runs_of_46e634e"
STUDENT, HONEST = "collect/20261122T163418Z-kata-f3f4c9", "collect/20261122T163619Z-kata-d4b355"


@pytest.fixture
def artifacts(tmp_path: Path) -> Path:
    return Path(shutil.copytree(FIXTURE, tmp_path / "artifacts"))


def composer(artifacts: Path, capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> Any:
    """The JSON that a command prints, run in this process."""
    with pytest.raises(SystemExit) as ended:
        main([*words, "--json", "--artifacts", str(artifacts)])
    assert (ended.value.code or 0) == code, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


def test_they_are_listed_shown_and_queried(artifacts, capsys):
    listed = composer(artifacts, capsys, "status")
    assert json.dumps(listed).count("complete") >= 2 and STUDENT in json.dumps(listed)
    shown = composer(artifacts, capsys, "show", STUDENT)
    assert shown["manifest"]["fingerprint"].startswith("f3f4c9")
    answer = composer(
        artifacts, capsys, "query", "select run, count(*) n, avg(reward) r from rollouts group by run order by run"
    )
    assert answer["rows"] == [{"run": STUDENT, "n": 8, "r": answer["rows"][0]["r"]}, {"run": HONEST, "n": 8, "r": 0.75}]
    run = Run(artifacts / STUDENT)
    assert run.damage() is None and len(run.rows(ROLLOUT)) == 8 == sum(1 for _ in run.units())


def test_they_are_viewed(artifacts):
    from composer_cli.view.app import build

    app = build(artifacts, "token")

    def get(path: str) -> tuple[int, str]:
        sent: list[dict[str, Any]] = []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        path, _, query = f"/token{path}".partition("?")
        scope = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "GET", "scheme": "http"}
        scope |= {"path": path, "raw_path": path.encode(), "query_string": query.encode(), "root_path": ""}
        scope |= {"headers": [(b"host", b"127.0.0.1")], "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80)}
        asyncio.run(app(scope, receive, send))
        return sent[0]["status"], b"".join(message.get("body", b"") for message in sent[1:]).decode()

    assert get("/")[0] == 200 and "f3f4c9" in get("/")[1]
    rollout_id = Run(artifacts / STUDENT).rows(ROLLOUT)[0]["rollout_id"]
    assert get(f"/run/{STUDENT}")[0] == 200 and rollout_id in get(f"/run/{STUDENT}")[1]
    status, page = get(f"/rollout/{STUDENT}?id={rollout_id}")
    assert status == 200 and "solution.py" in page


def test_they_are_evaluated(artifacts, capsys):
    """Four tasks decide nothing, which the exit code 3 tells."""
    settings = ("baseline=kata:student", "treatment=kata:honest", "units=sampled")
    words = [word for setting in settings for word in ("--set", setting)]
    found = composer(artifacts, capsys, "evaluate", "--from", STUDENT, "--from", HONEST, *words, code=3)
    assert found["status"] == "complete"
    items = Run(Path(found["path"])).rows(EVAL_ITEM)
    assert len(items) == 16 and {item["arm"] for item in items} == {"kata:student", "kata:honest"}
