"""The cross-entropy of a linear layer: the head of a language model, without its logits."""

import functools as ft
import math
from collections.abc import Hashable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike

from .._errors import rule_error, type_of
from .._rules.float_args import as_floats, as_integer
from .._tangent_spaces import dtype_of, promote, sum_dtype
from ._explicit_axes import on_explicit_axes
from ._linear_cross_entropy_rules import (
    Options,
    summed_loss,
    token_losses,
    vary_over_tokens,
    vocabulary_size,
)


NAME = "losses.linear_cross_entropy"
REDUCTIONS = ("mean", "sum", "none")


def linear_cross_entropy(
    x: ArrayLike,
    weight: ArrayLike,
    labels: ArrayLike,
    *,
    bias: ArrayLike | None = None,
    chunk: int | None = None,
    ignore_index: int | None = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
    axis_name: Hashable = None,
) -> Array:
    r"""The softmax cross-entropy of the logits $W x + b$ with integer labels, which never holds
    the logits of all tokens in memory.

    With a vocabulary of $V$ entries, the logits of $N$ tokens and their gradient are two arrays
    of $N V$ numbers, often the largest of a language model. Here the tokens are taken in
    chunks.

    !!! example

        ```python
        import equinox as eqx
        import eqx_grads as eqg
        import jax
        import jax.numpy as jnp

        head = eqx.nn.Linear(16, 1000, key=jax.random.key(0))
        x = jax.random.normal(jax.random.key(1), (4, 32, 16))  # 4 texts of 32 tokens
        labels = jnp.ones((4, 32), int).at[:, 20:].set(-100)  # of which 20 have a label

        @eqx.filter_value_and_grad
        def loss(head, x, labels):
            return eqg.losses.linear_cross_entropy(x, head.weight, labels, bias=head.bias)

        value, grads = loss(head, x, labels)

        @eqx.filter_value_and_grad
        def with_all_logits(head, x, labels):
            log_p = jax.nn.log_softmax(jax.vmap(head)(x[:, :20].reshape(-1, 16)))
            return -jnp.mean(log_p[:, 1])

        plain_value, plain_grads = with_all_logits(head, x, labels)
        print(f"{value:.4f} {plain_value:.4f}")
        print(jnp.allclose(grads.weight, plain_grads.weight, atol=1e-6))
        ```

        ```text
        7.3924 7.3924
        True
        ```

    **Arguments:**

    - `x`: floats of shape `(..., features)`, with any number of leading dimensions.
    - `weight`: floats of shape `(vocabulary, features)`, as that of an `equinox.nn.Linear` or
        of an `equinox.nn.Embedding`. (It is the transpose of a matrix $W$ in $x W$.)
    - `labels`: integers of shape `(...)`.
    - `bias`: floats of shape `(vocabulary,)`, or `None`.
    - `chunk`: the number of tokens whose logits exist at a time, at most. The default is the
        number of features, but at least 128, and at least $2^{20} / V$: the logits of a chunk
        then need as much memory as the gradient of `weight`, or 4 MiB. If JAX's default backend
        is not a CPU, it is at least $2^{25} / V$. A smaller chunk needs less memory, and more
        time.
    - `ignore_index`: the label of tokens that do not count. Their rows of `x` may be anything,
        also NaN. With `None`, all tokens count.
    - `label_smoothing`: a number $\alpha$ from zero to one. The target is $1 - \alpha$ at the
        label plus $\alpha / V$ everywhere.
    - `z_loss`: the factor of the square of the log-partition function $\log \sum_v e^{l_v}$,
        which is added to the loss of each token ($10^{-4}$ in PaLM).
    - `reduction`: `"mean"` over the tokens that count (zero if none does), `"sum"` over them,
        or `"none"`: the loss of each token, zero where it does not count.

    - `axis_name`: inside `jax.shard_map`, the name of the mesh axis over which the vocabulary
        is sharded, or a tuple of names. Each device then passes its rows of `weight` and
        `bias`, all tokens, and labels that count the rows of all devices. The loss is the same
        on all of them.

    `x` and `weight` are cast to their common dtype. In half precision, matrix products are
    accumulated in single precision, and all else is computed in it.

    **Returns:**

    A scalar, or an array of shape `(...)` for `"none"`; of single precision if `x` and `weight`
    are of half precision. A label that is neither in the vocabulary nor `ignore_index` makes
    the loss NaN, and the gradient too: labels are known only when the program runs, and
    then no error can be raised. `jax.debug_nans` stops there.

    **Derivative:**

    With $p$ the softmax of a token's logits and $q$ its target, the cotangent of the logits is
    $d = \bar L\,(p - q)$, and $\bar x = W^T d$, $\bar W = \sum d\,x^T$, $\bar b = \sum d$, each
    computed for arguments that are being differentiated only.

    For `"mean"` and `"sum"`, $\bar L$ is a factor of all tokens, so that the gradients are
    formed in the forward pass, while the logits of a chunk exist. They are the residuals, and
    the matrix products are those of plain automatic differentiation. Forward mode is the inner
    product of the gradients with the tangents. For `"none"`, the residuals are the arguments
    and two numbers for each token, and the backward pass computes the logits again: four matrix
    products in place of three. Both modes, all orders; higher orders compute the logits of a
    chunk again.

    Under `jax.vmap` with a `weight` that is not batched, the batch becomes part of the tokens,
    and the gradient of the mean over examples is formed as for `"none"`. In a loop that is
    differentiated as a whole, `"mean"` and `"sum"` keep one gradient of `weight` for each step:
    take the gradient inside the loop, or wrap the step in [`eqx_grads.filter_checkpoint`][].

    The batch, the vocabulary or both may be sharded over devices: under `jax.jit`, over
    explicit axes of the mesh, or inside `jax.shard_map` with `axis_name`. With a sharded
    vocabulary, each device computes its columns of the logits only. See
    [Many devices](../guides/many-devices.md#a-sharded-vocabulary).

    **Raises:**

    [`eqx_grads.RuleError`][] if shapes do not fit together, if `labels` are not integers, for
    an option that is out of range, or if there is no axis of the name `axis_name`.

    ??? cite

        The gradient in the forward pass, chunk by chunk: Hsu, P.-L. et al. (2024). Liger
        Kernel: Efficient Triton kernels for LLM training. arXiv:2410.10989.

        `z_loss`: Chowdhery, A. et al. (2022). PaLM: Scaling language modeling with pathways.
        arXiv:2204.02311.
    """
    check_options(
        NAME,
        chunk=chunk,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        reduction=reduction,
    )
    ignore_index = None if ignore_index is None else as_integer(ignore_index)
    x, weight, labels, bias = _as_arrays(x, weight, labels, bias)
    options = Options(
        None if chunk is None else int(chunk),
        float(label_smoothing),
        float(z_loss),
        _as_axes(axis_name),
    )
    is_sum = reduction != "none"
    fn = ft.partial(_sum if is_sum else _of_each_token, ignore_index=ignore_index)
    losses = on_explicit_axes(fn, x, weight, bias, labels, options=options, is_sum=is_sum)
    if reduction != "mean":
        return losses
    count = jnp.sum(_is_counted(labels, ignore_index))
    return losses / jnp.maximum(count, 1).astype(losses.dtype)


def _sum(x, weight, bias, labels, *, ignore_index, options):
    tokens = _as_tokens(x, weight, bias, labels, ignore_index, options)
    return summed_loss(*tokens, options=options)


def _of_each_token(x, weight, bias, labels, *, ignore_index, options):
    tokens = _as_tokens(x, weight, bias, labels, ignore_index, options)
    return token_losses(*tokens, options=options).reshape(labels.shape)


def _as_tokens(x, weight, bias, labels, ignore_index, options):
    """The arguments of a loss of tokens in one dimension."""
    is_counted = _is_counted(labels, ignore_index)
    in_range = (labels >= 0) & (labels < vocabulary_size(weight.shape[0], options))
    # An ignored token has the factor zero, and zero times NaN would be NaN.
    x = jnp.where(is_counted[..., None], x, 0)
    # Zero by zero is NaN, where a label is out of range. A constant would stop `debug_nans`.
    is_valid = in_range.astype(sum_dtype(x.dtype))
    scale = jnp.where(is_counted, is_valid / jnp.where(is_counted, is_valid, 1), 0)
    tokens = (
        x.reshape(labels.size, x.shape[-1]),
        weight,
        bias,
        jnp.where(is_counted & in_range, labels, 0).reshape(-1),
        scale.reshape(-1),
    )
    return vary_over_tokens(tokens, options)


def _as_axes(axis_name) -> tuple[Hashable, ...]:
    if axis_name is None:
        return ()
    axes = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    try:
        are_different = len(set(axes)) == len(axes)
        jax.lax.axis_index(axes)
    except (NameError, KeyError, TypeError, ValueError):
        are_different = False
    if not are_different:
        raise rule_error(
            f"`{NAME}` was given the name of an axis that does not exist here.",
            f"`axis_name` is {axis_name!r:.60}",
            do="Call it inside a `jax.shard_map` over a mesh with this axis, which distributes "
            "the rows of `weight`. Elsewhere, leave `axis_name` out.",
        )
    return axes


def _as_arrays(x, weight, labels, bias):
    x, weight = as_floats(NAME, x), as_floats(NAME, weight, "weight")
    bias = None if bias is None else as_floats(NAME, bias, "bias")
    dtype = dtype_of(labels)
    if dtype is None or not jnp.issubdtype(dtype, jnp.integer):
        raise rule_error(
            f"`{NAME}` was given labels that are not integers.",
            f"`labels` is {type_of(labels)}",
            do="A label is the index of a row of `weight`. For targets that are probabilities, "
            "compute the logits, and use `optax.losses.softmax_cross_entropy`.",
        )
    labels = jnp.asarray(labels)
    fits = (
        x.ndim >= 1
        and weight.ndim == 2
        and weight.shape[1] == x.shape[-1]
        and labels.shape == x.shape[:-1]
        and (bias is None or bias.shape == weight.shape[:1])
    )
    if not fits or weight.shape[0] == 0:
        raise rule_error(
            f"The arguments of `{NAME}` do not fit together.",
            f"`x` is {type_of(x)}, `weight` is {type_of(weight)}, `labels` is "
            f"{type_of(labels)}, `bias` is {type_of(bias)}",
            do="Give `x` of shape `(..., features)`, labels of shape `(...)`, a weight of "
            "shape `(vocabulary, features)` like that of `equinox.nn.Linear`, and a bias of "
            "shape `(vocabulary,)` or `None`.",
        )
    dtype = promote([x, weight])
    return x.astype(dtype), weight.astype(dtype), _as_signed(labels), bias


def _as_signed(labels):
    """Small integers can't hold every index of a vocabulary, nor -100."""
    bits = jnp.iinfo(labels.dtype).bits
    return labels.astype(jnp.int32) if bits < 32 else labels


def _is_counted(labels, ignore_index) -> Array:
    known = jnp.iinfo(labels.dtype)
    if ignore_index is None or not known.min <= ignore_index <= known.max:
        return jnp.ones(labels.shape, bool)
    return labels != ignore_index


def check_options(
    name: str,
    *,
    chunk: Any,
    ignore_index: Any,
    label_smoothing: Any,
    z_loss: Any,
    reduction: Any,
) -> None:
    if chunk is not None and (as_integer(chunk) or 0) < 1:
        raise rule_error(
            f"The `chunk` of `{name}` is not a positive integer.",
            f"it is {chunk!r:.60}",
            do="Give the number of tokens whose logits may exist at a time, or `None`.",
        )
    if ignore_index is not None and as_integer(ignore_index) is None:
        raise rule_error(
            f"The `ignore_index` of `{name}` is not an integer.",
            f"it is {ignore_index!r:.60}",
            do="Give the label of tokens that do not count, or `None`.",
        )
    for option, value, most in (
        ("label_smoothing", label_smoothing, 1.0),
        ("z_loss", z_loss, math.inf),
    ):
        is_number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
        if not (is_number and 0 <= value <= most and math.isfinite(value)):
            raise rule_error(
                f"The `{option}` of `{name}` is out of range.",
                f"it is {value!r:.60}",
                do=f"Give a number from zero{' to one' if most == 1 else ''}.",
            )
    if not isinstance(reduction, str) or reduction not in REDUCTIONS:
        raise rule_error(
            f"`{name}` has no such reduction.",
            f"`reduction` is {reduction!r:.60}",
            do=f"Give one of {', '.join(map(repr, REDUCTIONS))}.",
        )
