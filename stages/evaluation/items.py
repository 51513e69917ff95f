"""Rollouts of arms as items: what each is called, its row, and which of them one worker plays."""

from collections.abc import Sequence

from stages.evaluation.lineup import Arm
from stages.rollouts.episode import Episode
from stages.runs import plan, store
from stages.runs.records import Row


def item_id(arm: Arm, episode: Episode) -> str:
    """The name of an arm's rollout."""
    return f"{arm.name}/{arm.seed}/{episode.rollout_id}"


def blocks(arms: Sequence[Arm], episodes: Sequence[Episode]) -> list[Sequence[str]]:
    """What one worker plays at least: one rollout of a server, a whole batch of a model in its process."""
    found = list[Sequence[str]]()
    for arm in arms:
        served = arm.policy.served or arm.policy.base_url is not None
        found += plan.blocks([item_id(arm, episode) for episode in episodes], 1 if served else plan.BATCH)
    return found


def item(arm: Arm, episode: Episode) -> Row:
    """One `eval_item/1` row; `passed` is null when the machinery failed."""
    error_type, error = episode.error or (None, None)
    reward = None if episode.error else episode.grade.reward
    return {
        "item_id": item_id(arm, episode),
        "arm": arm.name,
        "train_seed": arm.seed,
        "task_id": episode.task.task_id,
        "family": episode.task.family,
        "sample_idx": episode.sample_idx,
        "passed": None if reward is None else reward >= 1.0,
        **{name: getattr(episode.grade, name) for name in ("gt_pass", "visible_pass", "hacked", "protocol_ok")},
        "num_steps": len(episode.steps),
        "terminated_by": episode.terminated_by,
        "transcript_json": store.encode(episode.messages).decode(),
        "error_type": error_type,
        "error": error,
        "cost_usd": sum(step.sample.cost_usd for step in episode.steps),
        "sampled_tokens": sum(step.sample.completion_tokens for step in episode.steps),
        "wall_s": episode.wall_s,
    }
