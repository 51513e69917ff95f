"""On-policy rollouts for GRPO: played in the agent loop of stages/rollouts, ahead of the trainer, and journalled.

`Rollouts` samples from the model under training and gives TRL its columns; `Ahead` plays coming steps on a server while
a step trains; `TrainingJournal` records each step as it is played, and `write_tables` turns the records into tables.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

from stages.backends.ranks import Ranks
from stages.envs.base import Environment, Task
from stages.messages import opening_ids
from stages.plurals import counted
from stages.policy.base import Policy
from stages.rollouts import trace
from stages.rollouts.agent_loop import Episode, play
from stages.runs import store
from stages.runs.kinds import HINT, ROLLOUT, STEP, TRAINING_REWARD, Row
from stages.runs.run import RunWriter
from stages.training.data import OwnEpisode, own_episode
from stages.training.hints import Hint
from stages.training.scoring import Tree

TRL_COLUMNS = ("prompt_ids", "completion_ids", "logprobs", "env_mask", "environment_reward")
"""What TRL's `rollout_func` returns; `env_mask` is 1 for the tokens that the policy wrote."""


class TokenPolicy(Policy, Protocol):
    """A policy whose tokenizer is in this process."""

    tokenizer: Any


class Rollouts:
    """TRL's `rollout_func`: plays one episode a row and returns ids, log-probs, the mask of own tokens, and rewards.

    Seeds depend on the run's seed, the step, the task and the sample alone, whichever process plays them. `record` gets
    (step, episodes). `latest` holds the episodes of the last call, in order; in the first of several processes those of
    all.
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
        return self.trl_columns(self.play_rows(self.number_samples(rows), policy, step), policy, step)

    def number_samples(self, rows: list[Row]) -> list[Row]:
        """Return the rows with `sample`: the number of each among its task's rollouts, over all processes."""
        # A group may be spread over processes; its samples are numbered as if one process had played them all.
        ids = self._ranks.gather([row["task_id"] for row in rows])
        seen = Counter(task_id for earlier in ids[: self._ranks.rank] for task_id in earlier)
        numbered = []
        for row in rows:
            numbered.append({**row, "sample": seen[row["task_id"]]})
            seen[row["task_id"]] += 1
        return numbered

    def play_rows(self, rows: list[Row], policy: Policy, step: int) -> list[Episode]:
        """Play numbered rows of this process; nothing is recorded yet, and no other process takes part."""
        episodes = []
        for row in rows:
            # A digest, not a sum or a count: seeds of neighbouring steps and samples must have nothing in common.
            seed = int(store.digest([self._seed, step, row["task_id"], row["sample"]])[:15], 16)
            episodes.append(Episode(self._tasks[row["task_id"]], row["sample"], seed))
        return play(self._make, policy, episodes, max_steps=self._max_steps, before_turn=self._before_turn)

    def trl_columns(self, own: list[Episode], policy: TokenPolicy, step: int) -> dict[str, list[Any]]:
        """Record the rollouts of a step and return those of this process as TRL's columns."""
        self.latest = [episode for episodes in self._ranks.gather_to_rank0(own) for episode in episodes]
        self._record(step, self.latest)
        columns: dict[str, list[Any]] = {name: [] for name in TRL_COLUMNS}
        for episode in own:
            played = own_episode(episode)
            if played is None:
                # It failed before its first action. TRL needs as many rows as prompts, so it gets one masked token, and
                # no reward: a reward of 0 would blame the policy for the machinery.
                opening = episode.messages or [{"role": "user", "content": episode.task.prompt}]
                ids, completion = opening_ids(policy.tokenizer, opening), [policy.tokenizer.eos_token_id]
                played = OwnEpisode(Tree(ids, (completion,)), [0], [0.0])
            reward = None if episode.error else episode.grade.reward
            row = (played.tree.prompt, played.tree.branches[0], played.logprobs, played.own, reward)
            for name, value in zip(TRL_COLUMNS, row, strict=True):
                columns[name].append(value)
        return columns


def environment_reward(
    prompts: Any, completions: Any, environment_reward: list[float | None], **columns: Any
) -> list[float | None]:
    """TRL's reward function: return the environment's own reward; None, never zero, where it could not grade."""
    del prompts, completions, columns  # TRL 1.16 leaves None out of a group's mean
    return environment_reward


Play = Callable[[list[Row], Policy, int], list[Episode]]


@dataclass(eq=False)
class Ahead:
    """Plays coming steps in order in a thread while a step trains, at most `depth` steps ahead of the weights.

    rows_of: the rows of a step, None after the last. newest: the policy with the weights that the server has when a
    step begins; a step is played with these weights from beginning to end.
    """

    play: Play
    rows_of: Callable[[int], list[Row] | None]
    newest: Callable[[], Policy]
    depth: int

    def __post_init__(self) -> None:
        # One thread: steps are played in their order, each with weights at least as new as those of the one before.
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="rollouts")
        self._playing: dict[int, tuple[list[str], Future[list[Episode]]]] = {}

    def take(self, rows: list[Row], step: int) -> list[Episode]:
        """Return the rollouts of a step, played already or now, and begin those of the next steps."""
        tasks, playing = self._playing.pop(step, ([], None))
        # Rows other than the expected ones are played anew: the trainer's sampler decides what a step is made of.
        if playing is not None and tasks == [row["task_id"] for row in rows]:
            episodes = playing.result()
        else:
            episodes = self.play(rows, self.newest(), step)
        for later in range(step + 1, step + self.depth + 1):
            coming = self.rows_of(later)
            if coming is not None and later not in self._playing:
                # The weights are those of the moment at which the thread begins the step, not of now.
                future = self._pool.submit(lambda r, s: self.play(r, self.newest(), s), coming, later)
                self._playing[later] = ([row["task_id"] for row in coming], future)
        return episodes

    def close(self) -> None:
        """Begin no further step; returns when the one that is being played has ended."""
        self._pool.shutdown(cancel_futures=True)


# Tables of a training: rollouts, their steps, rewards, and hints. Each training step is a unit of the run's journal, so
# a killed run keeps what was played; steps that are played again after a resume replace their first record.


@dataclass(frozen=True)
class TrainingJournal:
    """Records each step as it is played. sandbox: in which the environment runs commands."""

    out: RunWriter
    policy: Policy
    sandbox: str

    def rollouts(self, step: int, episodes: Sequence[Episode]) -> None:
        """Record the rollouts of a step."""
        payloads = [trace.payload(e, self.policy, sandbox=self.sandbox, source="train") for e in episodes]
        self.out.write(f"rollouts-{step:06d}", {"training_step": step, "played": payloads})

    def hints(self, step: int, hints: Sequence[tuple[Episode, Hint]]) -> None:
        """Record the hints that a step learns from, as `hint/1` rows."""
        rows = [
            {
                "training_step": step,
                "rollout_id": episode.rollout_id,
                "task_id": episode.task.task_id,
                "step": hint.turn,
                "kind": hint.kind,
                "error": hint.error,
                "hint": hint.text,
                "source": hint.source,
            }
            for episode, hint in hints
        ]
        self.out.write(f"hints-{step:06d}", {"training_step": step, "hints": rows})


def write_tables(out: RunWriter, num_steps: int) -> None:
    """Write the tables of what the first `num_steps` steps recorded, in order."""
    # Other units of the journal, such as a projection's, have no training_step; and a killed attempt may have played
    # steps that are no part of the result.
    of_step = {unit["unit"]: unit.get("training_step", num_steps) for unit in out.journal.records()}
    names = sorted(name for name, step in of_step.items() if step < num_steps)

    def played() -> Iterator[tuple[int, Any]]:
        return ((unit["training_step"], p) for unit in out.journal.read(names) for p in unit.get("played", ()))

    # The journal is read once for each table: the rollouts of a training may exceed memory.
    columns = ("rollout_id", "task_id", "sample_idx", "reward")
    out.table(ROLLOUT, (ROLLOUT.upgraded(payload["rollout"]) for _, payload in played()))
    out.table(STEP, (row for _, payload in played() for row in payload["steps"]))
    out.table(
        TRAINING_REWARD,
        ({"training_step": step, **{name: p["rollout"][name] for name in columns}} for step, p in played()),
    )
    out.table(HINT, (row for unit in out.journal.read(names) for row in unit.get("hints", ())))


def course(out: RunWriter, num_steps: int) -> tuple[Row, str]:
    """Return the share of hacks and of right answers over the first and the last three steps, as numbers and as text.

    Leaves out what the environment cannot tell; no text without hacks, where the share of right answers misleads.
    """
    ends = min(3, num_steps // 2)  # so that the first and the last steps never overlap
    played = [(unit["training_step"], p["rollout"]) for unit in out.journal.records() for p in unit.get("played", ())]
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
    return rates, f"\nfirst {counted(ends, 'step')} -> last {ends}: {', '.join(shown)}\n"
