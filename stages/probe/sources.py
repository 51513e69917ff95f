"""Answers of policies as pool rows, and the models that fill a pool."""

from collections.abc import Callable, Sequence
from typing import Any

from composer_stages.envs.base import Environment, Task
from composer_stages.gradients.basis import target_linears
from composer_stages.policy.local import LocalPolicy, load_model
from composer_stages.probe.checks.check import Check
from composer_stages.probe.checks.pool import hack_gap, merge_is_sound, teacher_differs
from composer_stages.probe.loras import apply_lora, lora_folder
from composer_stages.probe.rows import as_tokens, rollout_pool_row
from composer_stages.probe.settings import HINTED, SourceConfig
from composer_stages.rollouts.agent_loop import LiveRollout, play
from composer_stages.runs.kinds import Row
from composer_stages.runs.run import RunWriter

TEACHER_ANSWERS = 8
"""The number of answers on which teacher and base are compared."""


def answers(
    make: Callable[[], Environment],
    policy: LocalPolicy,
    tasks: Sequence[Task],
    samples: int,
    seed: int,
    source: str,
    max_steps: int,
) -> list[Row]:
    """Sample `samples` answers to each task as `pool_row/1` rows, without answers that have no reward.

    make: opens an environment. source: the src_pool of the rows. max_steps: actions after which a rollout ends.
    """
    rollouts = [LiveRollout(task, index, seed) for task in tasks for index in range(samples)]
    play(make, policy, rollouts, max_steps=max_steps)
    return [
        rollout_pool_row(rollout, policy, source=source, role=HINTED, step=0)
        for rollout in rollouts
        if rollout.error is None and rollout.steps and rollout.grade.reward is not None
    ]


class SourcePolicies:
    """The models that fill a pool, each loaded once: sources with the same model and LoRA share it.

    `by_name` has the local policy of each source, `tokenizer` is the first source's.
    """

    def __init__(self, sources: Sequence[SourceConfig], out: RunWriter) -> None:
        self.by_name: dict[str, LocalPolicy] = {}
        self._merges: list[Row] = []
        commits: dict[str, str | None] = {}
        loaded: dict[tuple[str, str], tuple[Any, Any]] = {}
        for source in sources:
            key = (source.policy.model, source.lora)
            if key not in loaded:
                model, tokenizer = load_model(source.policy, listener=out.progress)
                if source.lora:
                    folder, commits[source.lora] = lora_folder(source.lora)
                    self._merges.append(apply_lora(model, folder))
                loaded[key] = (model.eval(), tokenizer)
            policy = self.by_name[source.name] = LocalPolicy(*loaded[key], source.policy)
            out.model(source.name, **policy.facts(), lora=source.lora, lora_commit=commits.get(source.lora))
        self.tokenizer = next(iter(self.by_name.values())).tokenizer

    def guards(self, rows: Sequence[Row]) -> list[Check]:
        """Check that merged LoRAs are sound and, where there are both, that teacher and base differ on these rows."""
        expected = len(target_linears(next(iter(self.by_name.values())).model))
        checks = [merge_is_sound(report, expected) for report in self._merges]
        if "teacher" in self.by_name and "base" in self.by_name:
            answers = [as_tokens(row) for row in rows if row["src_pool"] == "teacher"][:TEACHER_ANSWERS]
            teacher, base = self.by_name["teacher"].model, self.by_name["base"].model
            checks.append(teacher_differs(teacher, base, answers, hack_gap(rows)))
        return checks
