"""What a dry run asks of a model: whether it is available, and of a server's whether it answers at all.

A question of one token is sent where that costs nothing, so that a wrong address, a stream, a refused key or an empty
account are named before a run begins.
"""

from composer_stages.errors import InfrastructureError
from composer_stages.policy import available, background, kind_of
from composer_stages.policy.base import UNSTATED, PolicyConfig
from composer_stages.policy.request_fields import LIMITS
from composer_stages.policy.requests import CallBounds, max_tokens_field, probe_request
from composer_stages.words import Sentence


def check(config: PolicyConfig) -> str:
    """Return a line about the model; raise what opening it, or a first question to its server, would raise."""
    line = available.check(config)
    if kind_of(config) != "endpoint":
        return line
    # A key without a price is mostly that of an account: what an answer costs is not known.
    free = not config.has_price and (config.priced or not config.api_key_env)
    if free:
        _ask_for_a_token(config)
    return Sentence("policy.asked-for-a-token", line=line, asked=free)


def _ask_for_a_token(config: PolicyConfig) -> None:
    """Raise what a plain question to the server raises; a field that it refuses is left out by the run itself."""
    from composer_stages.policy import reading  # HTTP's libraries are slow to import
    from composer_stages.policy.client import CallError, Client, FatalError, MissingModel, RefusedField, WebPage

    plain, _ = probe_request(config, max_tokens_field(config))
    client, bounds = Client(config), CallBounds.of_request(plain, UNSTATED)
    try:
        short = plain | {name: 1 for name in LIMITS if name in plain}
        reading.read(
            background.run(client.ask("/chat/completions", short)).body, config, bounds, latency_s=0.0, attempts=1
        )
    except (RefusedField, reading.OverlongAnswer):
        return
    except (WebPage, MissingModel) as error:
        raise background.run(client.explained(error)) from None
    except FatalError:
        raise
    except CallError as error:
        raise error.permanent or InfrastructureError("policy.server-not-available", error=str(error)) from None
