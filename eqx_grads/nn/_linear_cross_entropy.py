"""The head of a language model and its loss, as one layer."""

from typing import Any

import equinox as eqx
import jax.random as jr
from jaxtyping import Array, ArrayLike, Float, Key

from .._errors import check_flags, rule_error, type_of
from .._rules.float_args import as_floats
from ..losses import linear_cross_entropy
from ..losses._linear_cross_entropy import check_options
from ._argument_checks import as_sizes
from ._dtypes import common_dtype, layer_dtype


class LinearCrossEntropy(eqx.Module):
    r"""`equinox.nn.Linear` with the softmax cross-entropy of its outputs: the head of a
    language model with its loss, which never holds the logits of all tokens in memory.

    !!! example

        ```python
        import equinox as eqx
        import eqx_grads as eqg
        import jax
        import jax.numpy as jnp

        key1, key2 = jax.random.split(jax.random.key(0))
        embedding = eqx.nn.Embedding(1000, 16, key=key1)
        head = eqg.nn.LinearCrossEntropy(16, 1000, use_bias=False, key=key2)
        # The embedding and the head have one weight.
        model = eqx.nn.Shared(
            (embedding, head), lambda model: model[1].weight, lambda model: model[0].weight
        )

        @eqx.filter_grad
        def gradient(model, tokens):
            embedding, head = model()
            x = jax.vmap(embedding)(tokens)
            return head(x[:-1], tokens[1:])  # the next token

        (grad,) = jax.tree.leaves(gradient(model, jnp.arange(50)))
        print(grad.shape)  # of the one weight

        embedding, head = model()
        print(head.logits(embedding(3)).shape)
        ```

        ```text
        (1000, 16)
        (1000,)
        ```

    For the weight of another layer, call [`eqx_grads.losses.linear_cross_entropy`][] itself.

    **Derivative:**

    That of [`eqx_grads.losses.linear_cross_entropy`][].
    """

    weight: Float[Array, "out in"]
    bias: Float[Array, " out"] | None
    chunk: int | None = eqx.field(static=True)
    ignore_index: int | None = eqx.field(static=True)
    label_smoothing: float = eqx.field(static=True)
    z_loss: float = eqx.field(static=True)
    reduction: str = eqx.field(static=True)

    def __init__(
        self,
        in_features: int,
        out_features: int,
        use_bias: bool = True,
        dtype: Any = None,
        *,
        chunk: int | None = None,
        ignore_index: int | None = -100,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        reduction: str = "mean",
        key: Key[Array, ""],
    ):
        """**Arguments:**

        - `in_features`, `use_bias`, `dtype`, `key`: as for `equinox.nn.Linear`.
        - `out_features`: the size of the vocabulary.
        - `chunk`, `ignore_index`, `label_smoothing`, `z_loss`, `reduction`: as for
            [`eqx_grads.losses.linear_cross_entropy`][].

        **Raises:**

        [`eqx_grads.RuleError`][] for a size that is not a positive integer, or an option that
        is out of range.
        """
        in_features, out_features = as_sizes(
            "LinearCrossEntropy", in_features=in_features, out_features=out_features
        )
        check_flags("LinearCrossEntropy", use_bias=use_bias)
        check_options(
            "LinearCrossEntropy",
            chunk=chunk,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            z_loss=z_loss,
            reduction=reduction,
        )
        dtype = layer_dtype("LinearCrossEntropy", dtype)
        linear = eqx.nn.Linear(in_features, out_features, bool(use_bias), dtype, key=key)
        self.weight, self.bias = linear.weight, linear.bias
        self.chunk = None if chunk is None else int(chunk)
        self.ignore_index = None if ignore_index is None else int(ignore_index)
        self.label_smoothing, self.z_loss = float(label_smoothing), float(z_loss)
        self.reduction = reduction

    def __call__(self, x: ArrayLike, labels: ArrayLike) -> Array:
        """**Arguments:**

        - `x`: floats of shape `(..., in_features)`.
        - `labels`: integers of shape `(...)`.

        **Returns:**

        The loss: a scalar, or with `reduction="none"` an array of shape `(...)`.
        """
        return linear_cross_entropy(
            x,
            self.weight,
            labels,
            bias=self.bias,
            chunk=self.chunk,
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
            z_loss=self.z_loss,
            reduction=self.reduction,
        )

    def logits(self, x: ArrayLike) -> Array:
        """All logits, from which tokens are sampled.

        **Arguments:**

        - `x`: floats of shape `(..., in_features)`.

        **Returns:**

        An array of shape `(..., out_features)`.

        **Raises:**

        [`eqx_grads.RuleError`][] if the last axis of `x` does not have the length
        `in_features`.
        """
        xs = as_floats("LinearCrossEntropy.logits", x)
        if xs.ndim == 0 or xs.shape[-1] != self.weight.shape[1]:
            raise rule_error(
                "`LinearCrossEntropy.logits` was given inputs of the wrong size.",
                f"`x` is {type_of(xs)}, `weight` is {type_of(self.weight)}",
                do="The last axis of `x` is `in_features` long.",
            )
        xs, weight, bias = common_dtype(xs, self.weight, self.bias)
        logits = xs @ weight.T
        return logits if bias is None else logits + bias[(None,) * (xs.ndim - 1)]

    @staticmethod
    def from_layer(
        layer: eqx.Module,
        *,
        chunk: int | None = None,
        ignore_index: int | None = -100,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        reduction: str = "mean",
    ) -> "LinearCrossEntropy":
        """A linear layer, with the loss added to it.

        **Arguments:**

        - `layer`: an `equinox.nn.Linear`.
        - `chunk`, `ignore_index`, `label_smoothing`, `z_loss`, `reduction`: as for
            [`eqx_grads.losses.linear_cross_entropy`][].

        **Returns:**

        A `LinearCrossEntropy` with the weight and the bias of `layer`.

        **Raises:**

        [`eqx_grads.RuleError`][] if `layer` is not an `equinox.nn.Linear`.
        """
        if not isinstance(layer, eqx.nn.Linear):
            raise rule_error(
                "`LinearCrossEntropy.from_layer` was given a layer that is not linear.",
                f"it is {type_of(layer)}",
                do="Give an `equinox.nn.Linear`.",
            )
        like = LinearCrossEntropy(
            1,
            1,
            layer.bias is not None,
            chunk=chunk,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            z_loss=z_loss,
            reduction=reduction,
            key=jr.key(0),
        )
        parts = lambda head: (head.weight, head.bias)
        return eqx.tree_at(parts, like, parts(layer), is_leaf=lambda x: x is None)
