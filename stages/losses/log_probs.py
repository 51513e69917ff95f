"""Log-probs of given tokens without a [batch, tokens, vocabulary] table of log-probs."""

from torch import Tensor

from stages.losses.shapes import (
    Distribution,
    Logits,
    PerPosition,
    PerSequence,
    PositionIds,
    TokenMask,
    TokenValues,
)


def token_log_probs(logits: Distribution, token_ids: PositionIds, *, temperature: float = 1.0) -> PerPosition:
    """Values of log softmax(logits / temperature) at token_ids, in nats, with gradient.

    Calls TRL 1.16's selective_log_softmax.
    The logits at position t must be those that predict token_ids[t]: shift before calling.
    """
    from trl.trainer.utils import selective_log_softmax

    return selective_log_softmax(logits, token_ids, temperature=temperature)


def sequence_log_probs(token_values: TokenValues, mask: TokenMask, *, average: bool = False) -> PerSequence:
    """Sum over the mask, or the mean: NaN for a sequence without tokens, as in princeton-nlp/SimPO 1b3e8f3.

    Serves the parity check only.
    """
    total = (token_values * mask).sum(-1)
    return total / mask.sum(-1) if average else total


def label_log_probs(logits: Logits, labels: Tensor, *, average: bool = True, ignored: int = -100) -> PerSequence:
    """Log-prob of each row's labels[1:] under logits[:-1], summed or averaged over the labels that are not `ignored`.

    Serves the parity check only.
    Source: princeton-nlp/SimPO 1b3e8f3 scripts/simpo_trainer.py:597-683 get_batch_logps.
    """
    targets = labels[:, 1:]
    mask = targets != ignored
    return sequence_log_probs(token_log_probs(logits[:, :-1], targets.masked_fill(~mask, 0)), mask, average=average)
