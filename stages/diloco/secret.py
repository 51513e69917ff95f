"""What replicas over a lighthouse have in common and nobody else: with it they prove who asks, and who answers.

The secret itself never travels. A request carries a random word and an HMAC of what is asked; the answer an HMAC of
that word and of what is given. So a stranger on the network gets nothing, and cannot pass for a replica either, which
the lighthouse, that has no password, would let it. Nothing is encrypted.
"""

import hmac

from stages.errors import UsageError
from stages.redaction import secret_in


class Secret:
    """A word shared by all replicas of a training."""

    def __init__(self, word: str) -> None:
        self._word = word.encode()

    @classmethod
    def read(cls, variable: str) -> "Secret":
        """From the environment, redacted from now on; `UsageError` names a variable that is missing or empty."""
        word = secret_in(variable)
        if not word:
            raise UsageError(
                f"The environment variable {variable}, which holds the secret that replicas over a lighthouse share, "
                "is not set. Make one with `openssl rand -hex 16` and export it for each of them."
            )
        return cls(word)

    def proof(self, *told: str) -> str:
        """HMAC-SHA-256, in hexadecimal, of these words, none of which holds a line break."""
        return hmac.new(self._word, "\n".join(told).encode(), "sha256").hexdigest()

    def proves(self, proof: str, *told: str) -> bool:
        """Whether a proof is that of these words; takes as long for one that nearly is."""
        return hmac.compare_digest(self.proof(*told).encode(), proof.encode())
