"""What gating saves: the share of the full run's pairs against the share of its cost, as a curve.

    python benchmarks/gating.py RUN --prices teacher-a=1 --prices teacher-b=1 --prices teacher-c=10

RUN is a folder of `replay-teachers` in which everybody was asked. Its answers are served again at the given prices (USD
an answer) by a local server, through every gate; pairs are extracted by canonical form.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from tabulate import tabulate

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.server import Reply, answer, serving

from stages import extract_pairs, replay_teachers
from stages.policy import dialect
from stages.rollouts.trace import states_by_digest
from stages.runs import runner, store
from stages.runs.artifact import Run
from stages.runs.pair_records import PAIR, TEACHER_ACTION
from stages.runs.records import STEP

VALUES = (0.5, 1, 2, 5, 10, 20, 50, 100, 500)
"""USD a pair, in the unit of the prices."""
GATES: list[tuple[str, dict[str, Any]]] = [
    ("everybody", {}),
    ("disagreement", {"rule": "disagreement"}),
    *((f"value, {usd:g} a pair", {"rule": "value", "usd_per_pair": usd}) for usd in VALUES),
]


def main() -> None:
    """Print the curve."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--prices", action="append", required=True, metavar="TEACHER=USD")
    arguments = parser.parse_args()
    prices = {name: float(usd) for name, usd in (item.split("=") for item in arguments.prices)}
    recorded = Run(arguments.run)
    rollouts = Run(Path(recorded.manifest.inputs["rollouts"][0].path))
    rows = {(row["teacher"], row["state_sha256"]): row for row in recorded.rows(TEACHER_ACTION)}
    states = {
        store.digest(dialect.conversation(state.messages, with_tools=False)): digest
        for digest, state in states_by_digest(rollouts.rows(STEP)).items()
    }

    def reply(body: dict[str, Any], earlier: int) -> Reply:
        row = rows[body["model"], states[store.digest(body["messages"])]]
        said = answer(row["action"] or "", cost=prices[body["model"]])
        said["choices"][0]["finish_reason"] = row["finish_reason"]
        return Reply(body=said)

    points = []
    with serving(reply) as server, tempfile.TemporaryDirectory() as folder:
        table = [
            {"name": name, "model": name, "base_url": server.url, "max_tokens": 4096, "usd_per_mtok_in": usd,
             "usd_per_mtok_out": usd}
            for name, usd in prices.items()
        ]  # fmt: skip
        for name, gate in GATES:
            config = replay_teachers.Config(teachers=table, gate=gate, max_usd_per_trace=1e9)
            root = Path(folder) / name
            answers = Run(runner.execute("replay-teachers", {"rollouts": rollouts}, config, root=root).path)
            inputs = {"rollouts": rollouts, "teacher_actions": answers}
            compared = extract_pairs.Config(compare="canonical")
            pairs = {
                row["pair_id"]
                for row in Run(runner.execute("extract-pairs", inputs, compared, root=root).path).rows(PAIR)
            }
            usd = sum(row["cost_usd"] for row in answers.rows(TEACHER_ACTION))
            points.append((name, usd, len(pairs), pairs))
    _, full_cost, _, full = points[0]
    print(json.dumps(prices))
    print(
        tabulate(
            [(name, usd, usd / full_cost, count, len(pairs & full) / len(full)) for name, usd, count, pairs in points],
            ("gate", "USD", "of the cost", "pairs", "of the pairs"),
            tablefmt="github",
            floatfmt=("", ".0f", ".3f", "", ".3f"),
        )
    )


if __name__ == "__main__":
    main()
