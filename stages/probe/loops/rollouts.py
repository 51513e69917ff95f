"""Groups of answers for one GRPO step, by student and teacher, as pool rows with advantages."""

from collections.abc import Callable, Sequence
from typing import Any

from stages.envs.base import Environment, Task
from stages.policy.local import LocalPolicy, load_model
from stages.probe.adapters.attach import target_linears
from stages.probe.checks.check import Check
from stages.probe.checks.contrast_checks import hack_gap
from stages.probe.checks.guards import merge_is_sound, teacher_differs
from stages.probe.checks.prompts import HINTED
from stages.probe.gradients.merge import apply_lora, lora_folder
from stages.probe.loops.config import SourceConfig
from stages.probe.pool.rows import episode_pool_row
from stages.probe.pool.tokens import as_tokens
from stages.rollouts.agent_loop import Episode, play
from stages.runs.artifact import RunWriter
from stages.runs.records import Row


def answers(
    make: Callable[[], Environment],
    policy: LocalPolicy,
    tasks: Sequence[Task],
    samples: int,
    seed: int,
    source: str,
    max_steps: int,
) -> list[Row]:
    """`pool_row/1` rows of `samples` answers to each task; those that could not be scored are left out.

    `make` opens an environment, `source` becomes src_pool, `max_steps` is the number of actions after which a rollout
    ends.
    """
    episodes = [Episode(task, index, seed) for task in tasks for index in range(samples)]
    play(make, policy, episodes, max_steps=max_steps)
    return [
        episode_pool_row(episode, policy, source=source, role=HINTED, step=0)
        for episode in episodes
        if episode.error is None and episode.steps and episode.grade.reward is not None
    ]


def with_advantages(rows: Sequence[Row]) -> tuple[list[Row], list[list[float]]]:
    """Rows with A = R - mean R of the problem's group (Dr.GRPO, arXiv 2503.20783), and the rewards by group."""
    groups: dict[str, list[float]] = {}
    for row in rows:
        groups.setdefault(row["problem_id"], []).append(row["reward"])
    means = {problem: sum(rewards) / len(rewards) for problem, rewards in groups.items()}
    judged = [row | {"advantage": row["reward"] - means[row["problem_id"]], "adv_kind": "dr_grpo"} for row in rows]
    return judged, list(groups.values())


# ---- teachers
# The models that fill a pool, each loaded once, and whether the teacher is another model than the base.

ANSWERS = 8


class SourcePolicies:
    """Local policies by source name; two sources of one model share it."""

    def __init__(self, sources: Sequence[SourceConfig], out: RunWriter) -> None:
        self._policies: dict[str, LocalPolicy] = {}
        self._merges: dict[str, Row] = {}
        self._commits: dict[str, str | None] = {}
        loaded: dict[tuple[str, str], tuple[Any, Any]] = {}
        for source in sources:
            key = (source.policy.model, source.lora)
            if key not in loaded:
                loaded[key] = self._load(source, out)
            self._policies[source.name] = LocalPolicy(*loaded[key], source.policy)
            facts = {"lora": source.lora, "lora_commit": self._commits.get(source.lora)}
            out.model(source.name, **self._policies[source.name].facts(), **facts)

    def _load(self, source: SourceConfig, out: RunWriter) -> tuple[Any, Any]:
        model, tokenizer = load_model(source.policy, cache=out.cache, listener=out.progress)
        if source.lora:
            folder, self._commits[source.lora] = lora_folder(source.lora)
            self._merges[source.name] = apply_lora(model, folder)
        return model.eval(), tokenizer

    def policy(self, name: str) -> LocalPolicy:
        """The policy of a source."""
        return self._policies[name]

    @property
    def tokenizer(self) -> Any:
        """The tokenizer, which all sources share."""
        return next(iter(self._policies.values())).tokenizer

    def guards(self, rows: Sequence[Row]) -> list[Check]:
        """Whether merged LoRAs are sound and, given both, whether the teacher differs from the base on these rows."""
        expected = len(target_linears(next(iter(self._policies.values())).model))
        checks = [merge_is_sound(report, expected) for report in self._merges.values()]
        if "teacher" in self._policies and "base" in self._policies:
            answers = [as_tokens(row) for row in rows if row["src_pool"] == "teacher"][:ANSWERS]
            teacher, base = self._policies["teacher"].model, self._policies["base"].model
            checks.append(teacher_differs(teacher, base, answers, hack_gap(rows)))
        return checks
