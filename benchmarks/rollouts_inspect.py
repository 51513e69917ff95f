"""inspect_ai beside `benchmarks/rollouts.py`: the same episodes against the same server, with its own evaluation loop.

    python benchmarks/rollouts.py --inspect PYTHON

starts this with an interpreter that has inspect_ai and openai. A solver asks, sleeps as long as a command takes and
shows the same text, so many times; a scorer sleeps as long as a grading takes. Prints seconds from the start to the end
of the evaluation as its log has them, and its CPU time.
"""

import asyncio
import os
import sys
import tempfile
import time
from datetime import datetime

from records import needed

needed("inspect_ai", "openai", by="pip install inspect_ai openai, into an environment of its own")

from inspect_ai import Task, eval, task
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.model import ChatMessageUser
from inspect_ai.scorer import Score, Target, mean, scorer
from inspect_ai.solver import Generate, TaskState, solver
from rollouts import COMMAND_S, GRADE_S, OBSERVATION, prompt

URL, EPISODES, STEPS, SCALE = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])


@solver
def acts():
    """The agent loop."""

    async def solve(state: TaskState, generate: Generate) -> TaskState:
        for _ in range(STEPS):
            state = await generate(state)
            await asyncio.sleep(COMMAND_S * SCALE)
            state.messages.append(ChatMessageUser(content=OBSERVATION))
        return state

    return solve


@scorer(metrics=[mean()])
def graded():
    """Takes its time."""

    async def score(state: TaskState, target: Target) -> Score:
        await asyncio.sleep(GRADE_S * SCALE)
        return Score(value=1.0)

    return score


@task
def waiting():
    """The episodes."""
    samples = [Sample(input=prompt(i), id=i) for i in range(EPISODES)]
    return Task(dataset=MemoryDataset(samples), solver=acts(), scorer=graded())


def main():
    os.environ["WAITING_API_KEY"], os.environ["WAITING_BASE_URL"] = "none", URL
    with tempfile.TemporaryDirectory() as folder:
        began = time.process_time()
        (log,) = eval(
            waiting(),
            model="openai-api/waiting/m",
            max_connections=EPISODES,
            max_samples=EPISODES,
            display="none",
            log_dir=folder,
        )
        cpu = time.process_time() - began
    assert log.status == "success" and log.results.completed_samples == EPISODES, log.error
    started, ended = (datetime.fromisoformat(at) for at in (log.stats.started_at, log.stats.completed_at))
    print(f"{(ended - started).total_seconds()} {cpu}")


if __name__ == "__main__":
    main()
