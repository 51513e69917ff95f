"""Playing the episodes of a stage: in batches with a local model, each at its own pace with a server; units of both."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pydantic import Field, model_validator

from stages.envs.base import Environment
from stages.envs.config import EnvStageConfig
from stages.policy import background
from stages.policy.base import Policy
from stages.policy.scheduler import Asks
from stages.rollouts.episode import Episode, play
from stages.rollouts.history import PATTERN, SUMMARISE
from stages.rollouts.independent import play_each
from stages.rollouts.limits import EpisodeLimits, InFlight, Rules
from stages.runs.artifact import Out
from stages.runs.plan import work_through
from stages.runs.reporting import Backends
from stages.runs.together import Together


class PlayingConfig(EnvStageConfig):
    """The configuration of a stage that plays episodes."""

    max_steps: int = Field(8, gt=0)
    """Actions after which a rollout ends."""
    limits: EpisodeLimits = EpisodeLimits()
    history: str = Field("full", pattern=PATTERN)
    """What the policy is shown of the past: `full`; `last 5`: of all observations the last five; or `summarise`: from
    near the limit of the context on, its own summary and what came since."""
    in_flight: InFlight = Field(InFlight(), json_schema_extra={"affects_results": False})
    report_to: Backends = Field((), json_schema_extra={"affects_results": False})
    """Where the run is logged besides its own files: tensorboard, trackio, wandb, one or several."""

    @model_validator(mode="after")
    def _summaries_have_an_occasion(self) -> "PlayingConfig":
        if self.history == SUMMARISE and self.limits.context_tokens is None:
            raise ValueError(
                "history summarise asks for summaries near the limit of the context, and there is none. "
                "Set limits.context_tokens."
            )
        return self

    @property
    def rules(self) -> Rules:
        """How episodes are played."""
        return Rules(self.max_steps, self.limits, self.history)


def play_missing(
    make: Callable[[], Environment],
    policy: Policy,
    episodes: Sequence[Episode],
    *,
    key: Callable[[Episode], str],
    payload: Callable[[Episode], Mapping[str, Any]],
    config: PlayingConfig,
    out: Out,
    what: str,
) -> None:
    """Play every episode whose unit (`key`) is not finished, and write one with its `payload` as soon as it is graded.

    A policy that can be asked many things at once plays episodes independently of each other; any other, whose
    arithmetic depends on the batch, plays fixed batches in lock step. Workers take them first, where the run has some.
    """

    def unit(episode: Episode) -> tuple[str, Mapping[str, Any], bool]:
        return key(episode), payload(episode), episode.error is not None

    async def each() -> None:
        missing = [episode for episode in episodes if not out.finished(key(episode))]
        done = len(episodes) - len(missing)
        written = Together[tuple[str, Mapping[str, Any], bool]](out.write_all)

        async def finished(episode: Episode) -> None:
            nonlocal done
            await written(unit(episode))
            done += 1
            out.progress(what, done, len(episodes))

        out.progress(what, done, len(episodes))
        await play_each(
            make,
            policy,
            missing,
            finished,
            rules=replace(config.rules, calls=policy.config.tool_calls != "none"),
            in_flight=config.in_flight,
            check=out.stop_here,
            watch=lambda live: out.live(live, done, len(episodes)),
        )

    def batched(batch: list[Episode]) -> Iterable[tuple[str, Mapping[str, Any], bool]]:
        started = time.monotonic()
        play(
            make,
            policy,
            batch,
            max_steps=config.max_steps,
            limits=config.limits,
            history=config.history,
            before_turn=out.stop_here,
        )
        for episode in batch:
            episode.wall_s = (time.monotonic() - started) / len(batch)
            yield unit(episode)

    if isinstance(policy, Asks):
        out.spread([[key(episode)] for episode in episodes], what)
        background.run(each())
    else:
        work_through(episodes, key, batched, policy=policy, out=out, what=what)
