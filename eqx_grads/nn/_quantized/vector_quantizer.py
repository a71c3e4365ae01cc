"""A codebook as a layer, learned by a loss or by moving averages."""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Float, Integer, Key

from ... import ste
from ..._errors import check_flags
from ..._rules.explicit_sharding import add_rows, gathered, rows
from ..._rules.float_args import widen
from ..._tangent_spaces import promote
from .._arguments import as_sizes, layer_dtype
from .codebook import AbstractCodebook, as_axis
from .quantizer import as_number, Floats


class VectorQuantized(NamedTuple):
    """The result of `VectorQuantizer.quantize`."""

    value: Array
    indices: Array
    codebook_loss: Array
    commitment_loss: Array


class VectorQuantizer(AbstractCodebook):
    r"""Quantize vectors to the nearest entry of a learned codebook.

    [van den Oord et al. (2017)](https://arxiv.org/abs/1711.00937).

    !!! example

        ```python
        import eqx_grads as eqg
        import equinox as eqx
        import jax
        import jax.numpy as jnp

        key1, key2, key3 = jax.random.split(jax.random.key(0), 3)
        z = jax.random.normal(key1, (100, 3))
        vq = eqg.nn.VectorQuantizer(16, 3, key=key2)
        vq = vq.fit(z, key=key3)  # before training: the entries are means of clusters

        quantized, indices, codebook_loss, commitment_loss = vq.quantize(z)
        print(jnp.array_equal(quantized, vq.codebook[indices]))  # bitwise
        print(codebook_loss)  # the codebook follows moving averages instead

        # The layer has no state: update the codebook after each step of the optimizer.
        vq = vq.updated(z, key=jax.random.key(1))
        print(vq.perplexity() > 10)  # of 16 entries
        ```

        ```text
        True
        0.0
        True
        ```

    There are two ways to learn the codebook. By default, it follows moving averages (appendix
    A.1 of the paper), and has no gradient: `updated` moves each entry towards the mean of the
    vectors that are nearest to it. Call `updated` after each step of the optimizer, or the
    codebook does not change. With `ema=False`, the codebook has a gradient: add
    `codebook_loss` to the loss.

    A codebook collapses if few entries are near the vectors, because an entry that is never
    the nearest never learns. So `updated` replaces unused entries by vectors of the batch.
    Begin with `fit`, so that the entries start where the data are. In an autoencoder of the
    digits of scikit-learn, with 32 entries, the perplexity is then 28 to 31, with or without
    `fit` and keys. With `ema=False` it is 26 to 29. With `dead_below=0` it is 11 to 21.

    **Derivative:**

    The value has the derivative of [`eqx_grads.ste.vector_quantize`][]: straight through to
    `z`, zero for the codebook. Let $e$ be the entry, $d$ the number of elements of $z$ and
    $\beta$ the weight of the commitment. Then `codebook_loss` $= \|\text{sg}(z) - e\|^2 / d$
    has a gradient for the codebook only, and `commitment_loss` $= \beta\,\|z - \text{sg}(e)\|^2
    / d$ for `z` only. The result of `updated` has no derivative. `usage` is not a parameter,
    and its gradient is zero: exclude it (and, with `ema`, the codebook) from weight decay.
    """

    codebook: Float[Array, "entries size"]
    usage: Float[Array, " entries"]
    commitment: float = eqx.field(static=True)
    ema: bool = eqx.field(static=True)
    decay: float = eqx.field(static=True)
    dead_below: float = eqx.field(static=True)
    axis: int = eqx.field(static=True)

    def __init__(
        self,
        num_entries: int,
        size: int,
        *,
        commitment: float = 0.25,
        ema: bool = True,
        decay: float = 0.99,
        dead_below: float = 0.1,
        axis: int = -1,
        dtype: Any = None,
        key: Key[Array, ""],
    ):
        r"""**Arguments:**

        - `num_entries`, `size`: of the codebook, and of each of its vectors. The initial
            entries are standard normal: `fit` replaces them.
        - `commitment`: $\beta$, the weight of `commitment_loss`.
        - `ema`: whether the codebook follows moving averages, and not a gradient.
        - `decay`: of all moving averages, including `usage`.
        - `dead_below`: `updated` replaces an entry whose usage is less than this fraction of
            the mean usage. With zero, it replaces no entry.
        - `axis`: the axis of the vectors, counted from the end: -3 for images with channels
            first, with or without a batch axis.
        - `dtype`: of the codebook. Moving averages need single precision.
        - `key`: for the initial codebook.
        """
        check_flags("VectorQuantizer", ema=ema)
        num_entries, size = as_sizes("VectorQuantizer", num_entries=num_entries, size=size)
        self.decay = as_number("VectorQuantizer", "decay", decay, less_than=1.0)
        dtype = layer_dtype("VectorQuantizer", dtype)
        self.codebook = jr.normal(key, (num_entries, size), dtype)
        wide = widen(self.codebook).dtype
        self.usage = jnp.full(num_entries, 1 / num_entries, wide)
        self.commitment = as_number("VectorQuantizer", "commitment", commitment)
        self.ema = bool(ema)
        self.dead_below = as_number("VectorQuantizer", "dead_below", dead_below)
        self.axis = as_axis("VectorQuantizer", axis)

    def __call__(self, z: Floats, *, key: Key[Array, ""] | None = None) -> Floats:
        """**Arguments:**

        - `z`: floats, with `size` of them along `axis`.
        - `key`: ignored.

        **Returns:**

        The nearest entries: an array like `z`.
        """
        del key
        return self.quantize(z).value

    def quantize(self, z: Floats) -> VectorQuantized:
        """**Arguments:**

        - `z`: as for a call.

        **Returns:**

        A named tuple:

        - `value`: the nearest entries, as from a call.
        - `indices`: their indices, in the shape of `z` without its `axis`.
        - `codebook_loss`, `commitment_loss`: means over `z`, scalars in its dtype, or in
            single precision if its dtype is half precision. Add both to your loss. With `ema`,
            `codebook_loss` is zero. For an empty batch, both are zero.
        """
        z = self._vectors_last(z, self.codebook.shape[1])
        value, indices = ste.vector_quantize(z, self.codebook)
        wide = promote([widen(z), widen(self.codebook)])
        near, entry = z.astype(wide), rows(self.codebook, indices).astype(wide)
        # Not in half precision, in which squares overflow.
        dtype = widen(z).dtype
        distance = lambda a, b: (
            jnp.sum((a - jax.lax.stop_gradient(b)) ** 2) / max(z.size, 1)
        ).astype(dtype)
        codebook_loss = jnp.zeros((), dtype) if self.ema else distance(entry, near)
        commitment_loss = self.commitment * distance(near, entry)
        return VectorQuantized(self._put_back(value), indices, codebook_loss, commitment_loss)

    def decode(self, indices: Integer[Array, "..."]) -> Floats:
        """The entries with these indices; NaN for an index without an entry. They have a
        derivative with respect to the codebook."""
        return self._codes(self.codebook, indices)

    def perplexity(self) -> Float[Array, ""]:
        """How many entries are in use: the exponential of the entropy of `usage`."""
        usage = jax.lax.stop_gradient(self.usage)
        share = usage / jnp.sum(usage)
        return jnp.exp(jnp.sum(jax.scipy.special.entr(share)))

    def fit(self, z: Floats, *, key: Key[Array, ""] | None = None) -> "VectorQuantizer":
        """**Arguments:**

        - `z`: vectors to be quantized, of any shape as for a call. Pass the output of the
            encoder for a first batch, with more vectors than the codebook has entries.
        - `key`: for the choice of the vectors to start from. Without one, the choice is the
            same in every call.

        **Returns:**

        This quantizer, with means of clusters of `z` as its entries, from ten iterations of
        Lloyd's algorithm (k-means), and with their `usage`. Vectors with a number that is not
        finite are ignored. An empty batch changes nothing.
        """
        z, index_of = self._vectors(z)
        if len(z) == 0:
            return self
        finite = jnp.all(jnp.isfinite(z), axis=1)
        start = jnp.where(
            jnp.any(finite), z[_draw(key, finite, len(self.usage))], self.codebook
        )

        def step(_, carry):
            # Without a memory, the moving average is the mean of the batch.
            return _moved(z, index_of(carry[0]), *carry, decay=0.0, ema=True)

        carry = jax.lax.stop_gradient((start, self.usage))
        return self._with(*jax.lax.fori_loop(0, _LLOYD_ITERATIONS, step, carry))

    def updated(self, z: Floats, *, key: Key[Array, ""] | None = None) -> "VectorQuantizer":
        r"""Return this quantizer after a batch: with a new `usage`, with `ema` a new codebook,
        and with dead entries replaced.

        With $n$ of $N$ vectors nearest to the entry $e$, and $\bar z$ their mean, usage and
        entry become

        $$u' = \gamma u + (1 - \gamma)\,n / N, \qquad
        e' = e + (1 - \gamma) \frac{n}{N u'} (\bar z - e),$$

        which is the moving average of the sums divided by the moving average of the counts. An
        entry that was not used does not change, bitwise. Where usage is then below `dead_below
        / num_entries`, the entry becomes one of the vectors of `z`, with the usage `1 /
        num_entries`.

        **Arguments:**

        - `z`: a whole batch of vectors, of any shape as for a call. Under `jax.vmap` each
            example would have its own codebook.
        - `key`: for the choice of the vectors that replace dead entries. Without one, the
            choice is the same for every batch of this size.

        **Returns:**

        A `VectorQuantizer`. Vectors with a number that is not finite, in the dtype of the
        codebook, are ignored. An empty batch changes nothing.
        """
        z, index_of = self._vectors(z)
        if len(z) == 0:
            return self
        old = jax.lax.stop_gradient((self.codebook, self.usage))
        index = index_of(old[0])
        codebook, usage = _moved(z, index, *old, decay=self.decay, ema=self.ema)
        if self.dead_below > 0:
            finite = jnp.all(jnp.isfinite(z), axis=1)
            dead = (usage * len(usage) < self.dead_below) & jnp.any(finite)
            drawn = _draw(key, finite, len(usage))
            codebook = jnp.where(dead[:, None], rows(z, drawn), codebook)
            usage = jnp.where(dead, 1 / len(usage), usage)
        return self._with(codebook, usage)

    def _vectors(self, z):
        """The vectors of an array as `(number, size)`, in the dtype of the codebook, and a
        function from a codebook to the indices of their nearest entries."""
        z = jax.lax.stop_gradient(self._vectors_last(z, self.codebook.shape[1]))
        z = z.reshape(-1, z.shape[-1])
        index_of = lambda codebook: ste.vector_quantize(z, codebook)[1]
        return z.astype(self.codebook.dtype), index_of

    def _with(self, codebook, usage):
        return eqx.tree_at(lambda vq: (vq.codebook, vq.usage), self, (codebook, usage))


_LLOYD_ITERATIONS = 10


def _moved(z, index, codebook, usage, *, decay, ema):
    """The codebook and the usage after a batch of vectors; `index` is the nearest entry of
    each. Vectors that are not finite do not count."""
    finite = jnp.all(jnp.isfinite(z), axis=1)
    count = jnp.sum(finite, dtype=usage.dtype)
    weight = finite.astype(count.dtype) / jnp.maximum(count, 1)
    share = add_rows(jnp.zeros_like(usage), index, weight)
    usage = jnp.where(count > 0, decay * usage + (1 - decay) * share, usage)
    if not ema:
        return codebook, usage
    # As a sum of differences, which is exactly zero for an entry that is not used.
    wide = widen(codebook)
    weight = weight[:, None].astype(wide.dtype)
    pull = jnp.where(weight > 0, widen(z) - rows(wide, index), 0) * weight
    pull = add_rows(jnp.zeros_like(wide), index, pull)
    # The usage of an entry that was used is positive; for the others, `pull` is zero.
    divisor = jnp.where(usage > 0, usage, 1).astype(wide.dtype)[:, None]
    return (wide + (1 - decay) * pull / divisor).astype(codebook.dtype), usage


def _draw(key, usable, number):
    """Random indices of usable vectors. All occur once before any occurs again."""
    usable = gathered(usable)
    order = jr.permutation(jr.key(0) if key is None else key, len(usable))
    order = order[jnp.argsort(~usable[order])]  # a stable sort
    return order[jnp.arange(number) % jnp.maximum(jnp.sum(usable), 1)]
