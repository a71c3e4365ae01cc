"""A codebook as a layer, learned by a loss or by moving averages."""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Float, Integer, Key

from ... import ste
from ..._errors import rule_error
from ..._rules.float_args import as_floats, check_flags, widen
from ..._tangent_spaces import promote
from .._dtypes import layer_dtype
from .argument_checks import (
    as_axis,
    as_number,
    check_indices,
    check_vectors,
    integer_option,
)
from .quantizers import entries


class VectorQuantized(NamedTuple):
    """The result of `VectorQuantizer.quantize`."""

    value: Array
    indices: Array
    codebook_loss: Array
    commitment_loss: Array


class VectorQuantizer(eqx.Module):
    r"""Quantize vectors to the nearest entry of a learned codebook.

    [van den Oord et al. (2017)](https://arxiv.org/abs/1711.00937).

    !!! example

        ```python
        import eqx_grads as eqg
        import equinox as eqx
        import jax
        import jax.numpy as jnp

        vq = eqg.nn.VectorQuantizer(16, 3, ema=True, dead_below=0.1, key=jax.random.key(0))
        z = jax.random.normal(jax.random.key(1), (100, 3))

        quantized, indices, codebook_loss, commitment_loss = vq.quantize(z)
        assert jnp.array_equal(quantized, vq.codebook[indices])  # bitwise
        assert codebook_loss == 0  # the codebook follows moving averages instead

        # The layer has no state: update the codebook after each step of the optimizer.
        new = vq.updated(z, key=jax.random.key(2))
        assert new.quantize(z).commitment_loss < commitment_loss
        ```

    There are two ways to learn the codebook. By gradient: add `codebook_loss` to the loss. By
    moving averages (`ema=True`): there is no gradient, and in `updated` each entry follows the
    mean of the vectors that are nearest to it.

    **Derivative:**

    Of the value, that of [`eqx_grads.ste.vector_quantize`][]: straight through to `z`, zero
    for the codebook. With $e$ the entry, $d$ the number of elements of $z$ and $\beta$ the
    weight of the commitment, `codebook_loss` $= \|\text{sg}(z) - e\|^2 / d$ has a gradient
    for the codebook only, `commitment_loss` $= \beta\,\|z - \text{sg}(e)\|^2 / d$ for `z` only.
    The result of `updated` has no derivative. `usage` is no parameter, and its gradient is
    zero: exclude it (and, with `ema`, the codebook) from weight decay.
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
        ema: bool = False,
        decay: float = 0.99,
        dead_below: float = 0.0,
        axis: int = -1,
        dtype: Any = None,
        key: Key[Array, ""],
    ):
        r"""**Arguments:**

        - `num_entries`, `size`: of the codebook, and of each of its vectors. The initial
            entries are standard normal; replace them with `equinox.tree_at`.
        - `commitment`: $\beta$, the weight of `commitment_loss`.
        - `ema`: whether the codebook follows moving averages, and not a gradient.
        - `decay`: of all moving averages, including `usage`.
        - `dead_below`: `updated` replaces an entry whose usage is less than this fraction of
            the mean usage. With zero, it replaces none.
        - `axis`: the axis of the vectors, counted from the end: -3 for images with channels
            first, with or without a batch axis.
        - `dtype`: of the codebook. Moving averages need single precision.
        - `key`: for the initial codebook.
        """
        check_flags("VectorQuantizer", ema=ema)
        do = "Give it a positive integer."
        num_entries = integer_option("VectorQuantizer", "num_entries", num_entries, do=do)
        size = integer_option("VectorQuantizer", "size", size, do=do)
        decay = as_number("VectorQuantizer", "decay", decay)
        if not (0 <= decay < 1 and num_entries > 0 and size > 0):
            raise rule_error(
                "`VectorQuantizer` can't be made of these numbers.",
                f"`num_entries` is {num_entries}, `size` is {size}, `decay` is {decay}",
                do="Both sizes are positive, and a decay is from zero to less than one.",
            )
        dtype = layer_dtype("VectorQuantizer", dtype)
        self.codebook = jr.normal(key, (num_entries, size), dtype)
        wide = widen(self.codebook).dtype
        self.usage = jnp.full(num_entries, 1 / num_entries, wide)
        self.commitment = as_number("VectorQuantizer", "commitment", commitment)
        self.ema = bool(ema)
        self.decay = decay
        self.dead_below = as_number("VectorQuantizer", "dead_below", dead_below)
        self.axis = as_axis("VectorQuantizer", axis)

    def __call__(
        self, z: Float[Array, "..."], *, key: Key[Array, ""] | None = None
    ) -> Float[Array, "..."]:
        """**Arguments:**

        - `z`: floats, with `size` of them along `axis`.
        - `key`: ignored.

        **Returns:**

        The nearest entries: an array like `z`.
        """
        del key
        return self.quantize(z).value

    def quantize(self, z: Float[Array, "..."]) -> VectorQuantized:
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
        z = as_floats("VectorQuantizer", z, "z")
        check_vectors("VectorQuantizer", z, self.axis, self.codebook.shape[1])
        moved = jnp.moveaxis(z, self.axis, -1)
        value, indices = ste.vector_quantize(moved, self.codebook)
        wide = promote([widen(z), widen(self.codebook)])
        near, entry = moved.astype(wide), self.codebook[indices].astype(wide)
        # Not in half precision, in which squares overflow.
        dtype = widen(z).dtype
        distance = lambda a, b: (
            jnp.sum((a - jax.lax.stop_gradient(b)) ** 2) / max(z.size, 1)
        ).astype(dtype)
        codebook_loss = jnp.zeros((), dtype) if self.ema else distance(entry, near)
        commitment_loss = self.commitment * distance(near, entry)
        value = jnp.moveaxis(value, -1, self.axis)
        return VectorQuantized(value, indices, codebook_loss, commitment_loss)

    def decode(self, indices: Integer[Array, "..."]) -> Float[Array, "..."]:
        """The entries with these indices; NaN where there is no such entry. They have a
        derivative with respect to the codebook."""
        check_indices("VectorQuantizer", indices, self.axis)
        return jnp.moveaxis(entries(self.codebook, indices), -1, self.axis)

    def perplexity(self) -> Float[Array, ""]:
        """How many entries are in use: the exponential of the entropy of `usage`."""
        usage = jax.lax.stop_gradient(self.usage)
        share = usage / jnp.sum(usage)
        return jnp.exp(jnp.sum(jax.scipy.special.entr(share)))

    def updated(
        self, z: Float[Array, "..."], *, key: Key[Array, ""] | None = None
    ) -> "VectorQuantizer":
        r"""This quantizer after a batch: with a new `usage`, with `ema` a new codebook, and
        with dead entries replaced.

        With $n$ of $N$ vectors nearest to the entry $e$, and $\bar z$ their mean, usage and
        entry become

        $$u' = \gamma u + (1 - \gamma)\,n / N, \qquad
        e' = e + (1 - \gamma) \frac{n}{N u'} (\bar z - e),$$

        which is the moving average of the sums over that of the counts. An entry that was not
        used does not change, bitwise. Where usage is then below `dead_below / num_entries`,
        the entry becomes one of the vectors of `z`, with the usage `1 / num_entries`.

        **Arguments:**

        - `z`: a whole batch of vectors, of any shape as for a call. Under `jax.vmap` each
            example would have a codebook of its own.
        - `key`: for the choice of the vectors that replace dead entries; needed if
            `dead_below` is positive.

        **Returns:**

        A `VectorQuantizer`. Vectors with a number that is not finite, in the dtype of the
        codebook, are ignored. An empty batch changes nothing.
        """
        if self.dead_below > 0 and key is None:
            raise rule_error(
                "`VectorQuantizer.updated` was given no key.",
                f"`dead_below` is {self.dead_below}: dead entries are replaced by random "
                "vectors",
                do="Pass `key=...`.",
            )
        z = as_floats("VectorQuantizer", z, "z")
        z, codebook, usage = jax.lax.stop_gradient((z, self.codebook, self.usage))
        check_vectors("VectorQuantizer", z, self.axis, codebook.shape[1])
        z = jnp.moveaxis(z, self.axis, -1)
        index = ste.vector_quantize(z, codebook)[1].reshape(-1)
        z = z.reshape(-1, z.shape[-1]).astype(codebook.dtype)
        if len(z) == 0:
            return self
        finite = jnp.all(jnp.isfinite(z), axis=1)
        count = jnp.sum(finite, dtype=usage.dtype)
        weight = finite.astype(count.dtype) / jnp.maximum(count, 1)
        share = jnp.zeros_like(usage).at[index].add(weight)
        moved = self.decay * usage + (1 - self.decay) * share
        usage = jnp.where(count > 0, moved, usage)
        if self.ema:
            codebook = self._averaged(z, index, weight, usage, codebook)
        if key is not None and self.dead_below > 0:
            dead = (usage * len(usage) < self.dead_below) & (count > 0)
            drawn = _draw(key, finite, len(usage))
            codebook = jnp.where(dead[:, None], z[drawn], codebook)
            usage = jnp.where(dead, 1 / len(usage), usage)
        return eqx.tree_at(lambda vq: (vq.codebook, vq.usage), self, (codebook, usage))

    def _averaged(self, z, index, weight, usage, codebook):
        # As a sum of differences, which is exactly zero for an entry that is not used.
        wide = widen(codebook)
        weight = weight[:, None].astype(wide.dtype)
        pull = jnp.where(weight > 0, widen(z) - wide[index], 0) * weight
        pull = jnp.zeros_like(wide).at[index].add(pull)
        # The usage of an entry that was used is positive; for the others, `pull` is zero.
        usage = jnp.where(usage > 0, usage, 1)
        return (wide + (1 - self.decay) * pull / usage[:, None]).astype(codebook.dtype)


def _draw(key, usable, number):
    """Random indices of usable vectors. All occur once before any occurs again."""
    order = jr.permutation(key, len(usable))
    order = order[jnp.argsort(~usable[order])]  # a stable sort
    return order[jnp.arange(number) % jnp.maximum(jnp.sum(usable), 1)]
