"""Names for the tensor shapes that the losses take, so that a signature reads as a legend.

b batch, t token position, r position in the response, v vocabulary, k a support chosen from it, e divergence entries,
p preference pairs, n tokens of a whole batch, c columns of values per token, h and g hidden widths, f reward functions,
g groups of rows, s tokens or 1 a sequence.
Stacked: the chosen rows, then the rejected. Log-probs, entropies and losses are in nats. The tests check shapes.
"""

from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

Scalar = Float[Tensor, ""]
Values = Float[Tensor, "*any"]

Logits = Float[Tensor, "b t v"]
Support = Float[Tensor, "b t k"]
TokenValues = Float[Tensor, "b t"]
TokenIds = Int[Tensor, "b t"]
TokenMask = Shaped[Tensor, "b t"]
ResponseMask = Shaped[Tensor, "b r"]
PerSequence = Float[Tensor, " b"]

Distribution = Float[Tensor, "*batch v"]
DistributionIds = Int[Tensor, "*batch k"]
EntryValues = Float[Tensor, "*batch e"]
DistributionMask = Bool[Tensor, "*batch v"]
WithTail = Float[Tensor, "*batch v+1"]
PerPosition = Float[Tensor, "*batch"]
PositionIds = Int[Tensor, "*batch"]

Rows = Float[Tensor, "n v"]
TeacherRows = Float[Tensor, "n w"]
RowValues = Float[Tensor, " n"]
RowIds = Int[Tensor, " n"]
RowTable = Float[Tensor, "n c"]

Hidden = Float[Tensor, "b t h"]
TeacherHidden = Float[Tensor, "b t g"]

PerPair = Float[Tensor, " p"]
StackedTokens = Float[Tensor, "twice_p t"]
StackedTokenMask = Shaped[Tensor, "twice_p t"]
StackedSequences = Float[Tensor, " twice_p"]

Rewards = Float[Tensor, "b f"]
RewardWeights = Float[Tensor, " f"]
Groups = Float[Tensor, "g n"]
PerGroup = Float[Tensor, " g"]
Ratios = Float[Tensor, "b s"]

Packed = Float[Tensor, " seq"]
PackedMask = Bool[Tensor, " seq"]
