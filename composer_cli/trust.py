"""Keys and their servers: refuse a settings file that would send a provider's key to another server.

A preset or a settings file names an environment variable (`api_key_env`) and an address, and so could send whoever runs
it the key of one server to another. A variable in `PROVIDERS` holds the key of that provider. It is sent elsewhere, or
without TLS, only where the user typed the address on the command line or gave --trust. A server on this machine (a
proxy) is no other server. Variables that are not in the table are the user's own names, of which nothing is known.
"""

import re
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import urlsplit

from composer_stages.data_files import load_toml
from composer_stages.errors import UsageError
from composer_stages.runs.settings import StageConfig, Tree, expanded, parts

PROVIDERS: dict[str, str] = load_toml(__package__, "providers.toml")
"""The domain of the provider whose key a variable holds, by the variable; `*` is a region."""
ADDRESSES = ("base_url", "endpoint")
"""Settings beside `api_key_env` that hold the address to which the key is sent."""
HOST = re.compile(r"[a-z0-9.-]+|[0-9a-f:.]+")
LOOPBACK = re.compile(r"localhost|127(\.\d+){3}|::1")


def require_trusted_servers(title: str, config: StageConfig, typed: Iterable[Tree], *, trust: bool) -> None:
    """`UsageError` where a stage would send a provider's key to another server that the user did not type.

    typed: the settings from the command line; trust: whether the user gave --trust.
    """
    if trust:
        return
    trees = [expanded(type(config), layer) for layer in typed]
    for key, part in parts("", config):
        variable = getattr(part, "api_key_env", "")
        domain = PROVIDERS.get(variable) if isinstance(variable, str) else None
        for name in ADDRESSES if domain else ():
            address = getattr(part, name, None)
            setting = f"{key}.{name}".lstrip(".")
            if not address or _is_host_of(address, str(domain)) or any(_holds(tree, setting) for tree in trees):
                continue
            raise UsageError(
                "cli.key-to-other-server", title=title, variable=variable, domain=domain, key=setting, address=address
            )


def _is_host_of(address: str, domain: str) -> bool:
    """Whether an address is a server of the domain, reached by TLS, or of this machine.

    False for an address that programs read differently.
    """
    try:
        split = urlsplit(address)
        host = (split.hostname or "").rstrip(".")
    except ValueError:
        return False
    # A backslash or a space ends the host for some programs and not for others.
    if not HOST.fullmatch(host) or re.search(r"[\\\s\x00-\x1f]", address):
        return False
    if LOOPBACK.fullmatch(host):
        return True
    names = re.escape(domain).replace(re.escape("*"), "[a-z0-9-]+")
    return split.scheme == "https" and re.fullmatch(rf"(.+\.)?{names}", host) is not None


def _holds(tree: Tree, key: str) -> bool:
    """Whether settings give a value for a dotted key, or for a list that holds it, and do not name a file for it."""
    value: object = tree
    for part in key.split("."):
        if isinstance(value, (str, Path)):  # of a file with the list (`settings.InFile`), which is not what was typed
            return False
        if not isinstance(value, dict):
            return True
        if part not in value:
            return False
        value = value[part]
    return True
