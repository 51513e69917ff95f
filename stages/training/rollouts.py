"""On-policy rollouts for GRPO: the same agent loop as everywhere, sampling from the model under training."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

from stages.backends.ranks import Ranks
from stages.envs.base import Environment, Task
from stages.messages import opening_ids
from stages.policy.base import Policy
from stages.rollouts import trace
from stages.rollouts.agent_loop import Episode, play
from stages.runs import store
from stages.runs.artifact import RunWriter
from stages.runs.records import HINT, ROLLOUT, STEP, TRAINING_REWARD, Row
from stages.training.data import Hint, own_episode


class TokenPolicy(Policy, Protocol):
    """A policy whose tokens are known here."""

    tokenizer: Any


class Rollouts:
    """TRL's `rollout_func`: plays one episode a row and returns ids, log-probs, the mask of own tokens, and rewards.

    Seeds depend on the run's seed, the step, the task and the sample alone, in whatever process it is played. `record`
    gets (step, episodes). `latest` holds the episodes of the last call, in order; in the first of several processes
    those of all.
    """

    def __init__(
        self,
        make: Callable[[], Environment],
        tasks: Mapping[str, Task],
        *,
        seed: int,
        max_steps: int,
        before_turn: Callable[[], None],
        record: Callable[[int, list[Episode]], None] = lambda step, episodes: None,
        ranks: Ranks | None = None,
    ) -> None:
        self._make, self._tasks, self._seed, self._max_steps = make, tasks, seed, max_steps
        self._before_turn, self._record, self._ranks = before_turn, record, ranks or Ranks()
        self.latest: list[Episode] = []

    def play(self, rows: list[Row], policy: TokenPolicy, step: int) -> dict[str, list[Any]]:
        """Play every row's task; rows of one task are samples of one group."""
        return self.handed_over(self.played(self.numbered(rows), policy, step), policy, step)

    def numbered(self, rows: list[Row]) -> list[Row]:
        """The rows with `sample`, which of its task's rollouts each is, among those of all processes."""
        ids = self._ranks.gather([row["task_id"] for row in rows])
        seen = Counter(task_id for earlier in ids[: self._ranks.rank] for task_id in earlier)
        numbered = []
        for row in rows:
            numbered.append({**row, "sample": seen[row["task_id"]]})
            seen[row["task_id"]] += 1
        return numbered

    def played(self, rows: list[Row], policy: Policy, step: int) -> list[Episode]:
        """The rollouts of this process alone, of numbered rows; nothing is recorded yet, and no other one is asked."""
        episodes = [self._episode(row["task_id"], row["sample"], step) for row in rows]
        return play(self._make, policy, episodes, max_steps=self._max_steps, before_turn=self._before_turn)

    def handed_over(self, own: list[Episode], policy: TokenPolicy, step: int) -> dict[str, list[Any]]:
        """Record the rollouts of a step and give those of this process the form TRL wants."""
        self.latest = [episode for episodes in self._ranks.gather_to_rank0(own) for episode in episodes]
        self._record(step, self.latest)
        columns = [self._columns(episode, policy) for episode in own]
        return {name: [column[name] for column in columns] for name in columns[0]}

    def _episode(self, task_id: str, sample: int, step: int) -> Episode:
        seed = int(store.digest([self._seed, step, task_id, sample])[:15], 16)
        return Episode(self._tasks[task_id], sample, seed)

    def _columns(self, episode: Episode, policy: TokenPolicy) -> Row:
        """One row of what TRL wants; an episode that failed before its first action has one masked token, no reward."""
        own = own_episode(episode)
        reward = None if episode.error else episode.grade.reward
        if own is None:
            prompt = opening_ids(
                policy.tokenizer, episode.messages or [{"role": "user", "content": episode.task.prompt}]
            )
            return {
                "prompt_ids": prompt,
                "completion_ids": [policy.tokenizer.eos_token_id],
                "logprobs": [0.0],
                "env_mask": [0],
                "environment_reward": reward,
            }
        return {
            "prompt_ids": own.tree.prompt,
            "completion_ids": own.tree.branches[0],
            "logprobs": own.logprobs,
            "env_mask": own.own,
            "environment_reward": reward,
        }


def environment_reward(
    prompts: Any, completions: Any, environment_reward: list[float | None], **columns: Any
) -> list[float | None]:
    """TRL's reward function: the environment's own; None, never zero, where it could not grade."""
    del prompts, completions, columns
    return environment_reward


# ---- ahead
# Rollouts of coming steps, played by a server while this step trains: at most `depth` steps ahead of the weights.

Play = Callable[[list[Row], Policy, int], list[Episode]]


class Ahead:
    """Plays steps in order in a thread of its own; each with the newest weights at its beginning, whole.

    rows_of: the rows of a step, None behind the last. newest: the policy with the weights that the server has now.
    """

    def __init__(
        self, play: Play, rows_of: Callable[[int], list[Row] | None], newest: Callable[[], Policy], depth: int
    ) -> None:
        self._play, self._rows_of, self._newest, self._depth = play, rows_of, newest, depth
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="rollouts")
        self._playing: dict[int, tuple[list[str], Future[list[Episode]]]] = {}

    def take(self, rows: list[Row], step: int) -> list[Episode]:
        """The rollouts of a step, played already or now; those of the next steps are begun."""
        wanted = [row["task_id"] for row in rows]
        tasks, playing = self._playing.pop(step, ([], None))
        episodes = (
            playing.result() if playing is not None and tasks == wanted else self._play(rows, self._newest(), step)
        )
        for later in range(step + 1, step + self._depth + 1):
            coming = self._rows_of(later)
            if coming is not None and later not in self._playing:
                self._playing[later] = ([r["task_id"] for r in coming], self._pool.submit(self._later, coming, later))
        return episodes

    def _later(self, rows: list[Row], step: int) -> list[Episode]:
        return self._play(rows, self._newest(), step)

    def close(self) -> None:
        """Begin no further step; returns when the one that is being played has ended."""
        self._pool.shutdown(cancel_futures=True)


# ---- journal
# What a training run keeps of its course beside the model: rollouts, their steps, rewards, and hints, as tables.
#
# Each training step is a unit of the run's journal, so a killed run keeps what it played; steps that are played again
# after a resume take the place of their first record.


class TrainingJournal:
    """Writes each step as it is played."""

    def __init__(self, out: RunWriter, policy: Policy, sandbox: str) -> None:
        self._out, self._policy, self._sandbox = out, policy, sandbox

    def rollouts(self, step: int, episodes: Sequence[Episode]) -> None:
        """Keep the rollouts of a step."""
        payloads = [trace.payload(e, self._policy, sandbox=self._sandbox, source="train") for e in episodes]
        self._out.write(f"rollouts-{step:06d}", {"training_step": step, "played": payloads})

    def hints(self, step: int, hints: Sequence[tuple[Episode, Hint]]) -> None:
        """Keep the hints that a step learns from."""
        rows = [hint_row(step, episode, hint) for episode, hint in hints]
        self._out.write(f"hints-{step:06d}", {"training_step": step, "hints": rows})


def write_tables(out: RunWriter, num_steps: int) -> None:
    """Write what the first `num_steps` steps kept, in order."""
    of_step = {unit["unit"]: unit.get("training_step", num_steps) for unit in out.records()}
    names = sorted(name for name, step in of_step.items() if step < num_steps)

    def played() -> Iterator[tuple[int, Any]]:
        return ((unit["training_step"], p) for unit in out.journal.read(names) for p in unit.get("played", ()))

    out.table(ROLLOUT, (payload["rollout"] for _, payload in played()))
    out.table(STEP, (row for _, payload in played() for row in payload["steps"]))
    out.table(TRAINING_REWARD, (reward_row(step, payload["rollout"]) for step, payload in played()))
    out.table(HINT, (row for unit in out.journal.read(names) for row in unit.get("hints", ())))


def course(out: RunWriter, num_steps: int) -> tuple[Row, str]:
    """The share of hacks and of right answers over the first and the last three steps, as numbers and in words.

    Nothing of what the environment cannot tell, and no text without hacks, which is where right answers mislead.
    """
    ends = min(3, num_steps // 2)
    played = [(unit["training_step"], p["rollout"]) for unit in out.records() for p in unit.get("played", ())]
    rates: Row = {}
    for column, name in (("hacked", "hack_rate"), ("gt_pass", "gt_rate")):
        for when, wanted in (("first", range(ends)), ("last", range(num_steps - ends, num_steps))):
            known = [row[column] for step, row in played if step in wanted and row[column] is not None]
            if known:
                rates[f"{when}_{name}"] = sum(known) / len(known)
    if not rates.get("first_hack_rate") and not rates.get("last_hack_rate"):
        return rates, ""
    shown = [
        f"{text} {rates[f'first_{name}']:.2f} -> {rates[f'last_{name}']:.2f}"
        for name, text in (("hack_rate", "hacks"), ("gt_rate", "right answers"))
        if f"first_{name}" in rates and f"last_{name}" in rates
    ]
    return rates, f"\nfirst {ends} steps -> last {ends}: {', '.join(shown)}\n"


def reward_row(step: int, rollout: Row) -> Row:
    """One `training_reward/1` row."""
    names = ("rollout_id", "task_id", "sample_idx", "reward")
    return {"training_step": step, **{name: rollout[name] for name in names}}


def hint_row(step: int, episode: Episode, hint: Hint) -> Row:
    """One `hint/1` row."""
    return {
        "training_step": step,
        "rollout_id": episode.rollout_id,
        "task_id": episode.task.task_id,
        "step": hint.turn,
        "kind": hint.kind,
        "error": hint.error,
        "hint": hint.text,
        "source": hint.source,
    }
