"""What a training logged can be read while it goes on."""

from pathlib import Path

import orjson

from stages import train
from stages.runs import runner
from stages.runs.run import Run


def test_metrics_lie_in_the_run_before_it_ends_and_are_whole_when_it_has(tmp_path: Path, tiny: Path) -> None:
    config = train.Config(
        env={"name": "support.environments:GuessEnv"},
        policy={"model": str(tiny), "max_tokens": 20},
        tasks=4,
        optimisation={"steps": 3, "prompts_per_step": 2, "generations": 4},
    )
    seen: list[int] = []

    def listener(what: str, done: int, total: int) -> None:
        seen.extend(len(path.read_bytes().splitlines()) for path in tmp_path.glob("train/2*/metrics.jsonl"))

    path = runner.execute("train", {}, config, root=tmp_path, listener=listener).path
    assert seen and 1 <= seen[0] <= 3 and seen == sorted(seen)
    lines = [orjson.loads(line) for line in (Run(path).read_file("metrics.jsonl") or b"").splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
