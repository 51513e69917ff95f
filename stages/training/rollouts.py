"""On-policy rollouts for GRPO: the same agent loop as everywhere, sampling from the model under training."""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from stages.backends.ranks import Ranks
from stages.envs.base import Environment, Task
from stages.messages import opening_ids
from stages.policy.base import Policy
from stages.rollouts.episode import Episode, play
from stages.runs import store
from stages.runs.records import Row
from stages.training.rows import own_episode


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
        self.latest = [episode for episodes in self._ranks.to_first(own) for episode in episodes]
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
