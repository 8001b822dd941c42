r"""The embedding: a table with a learned vector for each token."""

import numpy as np
from jaxtyping import Float, Integer

from numpygpt.array import Array, check_cotangent, check_ids, check_positive
from numpygpt.init import Seed, truncated_normal
from numpygpt.module import Module, Parameter


class Embedding(Module):
    r"""$y_n = W_{v_n}$: row $v_n$ of the table $W$ (V, D) for token id $v_n$.

    Source: Bengio, Ducharme, Vincent & Jauvin (2003), JMLR 3:1137-1155, section 2 (the matrix $C$); Vaswani et al.
    (2017), arXiv:1706.03762, section 3.4. **Departure:** no factor $\sqrt D$ on the vectors. Starting weights:
    truncated normal of mean 0 and deviation 1, cut at ±3. Indices: $n$ runs over all axes of the ids together, $v$
    over the vocabulary, $c$ over features.

    **Forward.** Looking up a row is multiplying with a one-hot vector, $\mathbb 1[v_n = v]$:

    $$y_{nc} = \sum_v \mathbb 1[v_n = v]\, W_{vc} = W_{v_n c} \tag{1}$$

    **Backward**, given $\bar y$. Ids are no real numbers and have no gradient. From the sum in (1),
    $\partial y_{nc}/\partial W_{vk} = \mathbb 1[v_n = v]\, \delta_{ck}$, so

    $$\bar W_{vc} = \sum_n \mathbb 1[v_n = v]\, \bar y_{nc} = \sum_{n:\, v_n = v} \bar y_{nc} \tag{2}$$

    **Reading.** The transpose of *gather* is *scatter-add*: each row collects the gradients of all places where its
    token stood, and a token that stood nowhere gets none. Nothing is lost: $\sum_v \bar W_{vc} = \sum_n \bar y_{nc}$.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        dtype: np.typing.DTypeLike = np.float32,
        rng: Seed = None,
    ):
        check_positive(num_embeddings=num_embeddings, embedding_dim=embedding_dim)
        self.weight = Parameter(truncated_normal((num_embeddings, embedding_dim), 1.0, rng, dtype))

    def forward(self, token_ids: Integer[Array, "..."]) -> Float[Array, "... embedding_dim"]:
        """Return the rows of integer `token_ids` of any shape. IndexError for an id outside 0..V-1."""
        check_ids(token_ids, self.weight.shape[0], "token id")
        token_ids = np.asarray(token_ids, like=self.weight.value)  # positions may have been on the host
        self.saved = token_ids
        return self.weight.value[token_ids]  # (1)

    def backward(self, dy: Float[Array, "... embedding_dim"]) -> None:
        """Add the gradient of the table."""
        # `grad[ids] += dy` would keep one of several equal ids, and np.add.at takes half as long again. So: number
        # the different ids 0..R-1, sum each (row, feature) cell with bincount, and add the sums to R different rows.
        token_ids, features = self.saved, self.weight.shape[1]
        check_cotangent(dy, (*token_ids.shape, features))
        rows, row_of = np.unique(token_ids, return_inverse=True)
        cells = row_of.reshape(-1, 1) * features + np.arange(features, like=row_of)
        sums = np.bincount(cells.reshape(-1), dy.reshape(-1))  # (2), in float64
        self.weight.grad[rows] += sums.reshape(-1, features)
