"""Environments as an OpenEnv server, its sessions, and a client that plays through one.

Server and sessions need openenv, in an interpreter without verifiers; the client does not.
"""

from typing import TYPE_CHECKING

from composer_post_training.deferred import deferred

if TYPE_CHECKING:
    from composer_stages.integrations.openenv import (
        EpisodeState as EpisodeState,
        Session as Session,
        TextAction as TextAction,
        TurnObservation as TurnObservation,
        app as app,
    )
    from composer_stages.integrations.openenv_client import ServedEnvironment as ServedEnvironment
else:
    __getattr__ = deferred(
        __name__,
        {
            "composer_stages.integrations.openenv": ("EpisodeState", "Session", "TextAction", "TurnObservation", "app"),
            "composer_stages.integrations.openenv_client": ("ServedEnvironment",),
        },
    )
