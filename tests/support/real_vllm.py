"""Where the real vLLM is, for the tests that are marked so."""

from stages.errors import UsageError
from stages.policy import server
from stages.policy.base import PolicyConfig

MISSING = (
    "NOT TESTED: vLLM is not installed, so nothing ran through the real server. `./dev vllm` installs it, or "
    "COMPOSER_VLLM names an interpreter that has it; then `./dev test -m vllm`."
)


def interpreter() -> str | None:
    """The interpreter that has a vLLM for this machine; None where there is none."""
    try:
        return server.interpreter(PolicyConfig())
    except UsageError:
        return None
