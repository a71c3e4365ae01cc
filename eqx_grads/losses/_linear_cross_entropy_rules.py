"""The cross-entropy of a linear layer over chunks of tokens: the loss, and its derivatives.

No array here has an element for each token and each entry of the vocabulary. The largest arrays
belong to one chunk of tokens.
"""

import functools as ft
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._control_flow.accelerators import logits_of_chunk
from .._jaxprs.current_trace import is_in_shard_map
from .._jaxprs.eager_calls import compile_eager_calls
from .._jaxprs.symbolic_sizes import is_symbolic, Size, size_or
from .._jaxprs.varying import vary_alike, vary_over, varying_axes
from .._rules.custom_jvp import custom_jvp
from .._rules.custom_vjp import custom_vjp
from .._tangent_spaces import sum_dtype
from ._gradient_sums import add, inner_product, zero_sum


class Options(NamedTuple):
    """The arguments of `linear_cross_entropy` that are not arrays."""

    chunk: int | None
    ignore_index: int | None
    reduction: str
    label_smoothing: float
    z_loss: float
    soft_cap: float | None
    # In `jax.shard_map`, the mesh axes over which the rows of the weight are sharded, and those
    # over which the tokens are.
    axes: tuple[Hashable, ...] = ()
    token_axes: tuple[Hashable, ...] = ()

    def total(self, x: jax.Array) -> jax.Array:
        """The sum over the devices; each device has a part of the vocabulary."""
        return jax.lax.psum(x, self.axes)


class Scales(NamedTuple):
    """The factors of the terms of each token's loss. All are zero for a token that is ignored;
    `None` is a term that no token has."""

    label: jax.Array
    uniform: jax.Array | None
    z: jax.Array | None


# Take one token with the logits l = W x + b, or c tanh(l / c) for a soft cap, the label y and
# the weights c_v of the classes, the loss is
#
#     loss = label (lse - l_y) + uniform sum_v c_v (lse - l_v) + z lse²,
#     lse = log sum_v exp l_v,
#
# where `label`, `uniform` and `z` are the scales of the token: `label` contains c_y, and
# `uniform` is for smoothed labels. Of a token with the probabilities q_v for a label, the first
# term is label sum_v c_v q_v (lse - l_v). With p = softmax(l) = exp(l - lse), the cotangent of
# the logits is
#
#     d = p (label + uniform sum_v c_v + 2 z lse) - label [v = y] - uniform c_v.
#
# The derivatives are W^T d in x, and the sums over tokens of d x^T in W and of d in b.
@custom_jvp
def summed_loss(x, weight, bias, class_weight, labels, scales, *, options: Options):
    """The sum over tokens, and the z-loss in it, which has no derivative.

    `x` is `(tokens, features)`, and `labels` is in range everywhere.
    """
    losses, z, _ = _forward(x, weight, bias, class_weight, labels, scales, options)
    return jnp.sum(losses), None if z is None else jnp.sum(z)


# The derivative of a sum over tokens is a sum over tokens. So the gradients are formed with the
# loss, chunk by chunk while the logits of the chunk exist, and the tangent is their inner
# product with the tangents of the arguments. Its transpose multiplies the gradients by the
# cotangent.
@summed_loss.def_jvp(symbolic_zeros=True)
def _summed_loss_jvp(primals, tangents, *, options):
    live = [t is not None for t in tangents[:3]]
    args: Any = (*primals, None)
    terms, cts = _gradients(*args, live=live, options=options)
    # The losses are summed after the loop: of sharded tokens, that is one sum over the devices.
    out = jax.tree.map(jnp.sum, terms)
    return out, (options.total(inner_product(cts, tangents[:3])), None)


@compile_eager_calls
def _gradients(
    x, weight, bias, class_weight, labels, scales, normalizer, *, live, options
) -> Any:
    """The loss of each token and its z-loss, which are not computed if the normalizer is known;
    the cotangents of `x`, of the weight and of the bias."""

    # For the second derivative of a chunk, its logits are computed again.
    @ft.partial(jax.checkpoint, prevent_cse=False)
    def of_chunk(x, labels, scales, normalizer, weight, bias, class_weight):
        logits, losses = _logits(x, weight, bias, options), None
        if normalizer is None:
            *losses, normalizer = _losses(logits, labels, scales, class_weight, options)
            losses = tuple(losses)
        d = _cotangent(logits, normalizer, labels, scales, class_weight, options)
        return losses, *_pull_back(d, x, weight, live)

    def chunk(sums, tokens):
        losses, ct_x, *cts = of_chunk(*tokens, weight, bias, class_weight)
        return add(sums, cts), (losses, ct_x)

    args = x, weight, bias, class_weight, labels, scales
    zeros = [
        zero_sum(weight.shape[::-1], x.dtype, args) if live[1] else None,
        zero_sum(bias.shape, x.dtype, args) if live[2] else None,
    ]
    (ct_weight_t, ct_bias), (losses, ct_x) = _over_chunks(
        chunk, zeros, (x, labels, scales, normalizer), weight, options
    )
    ct_weight = None if ct_weight_t is None else ct_weight_t.T
    return losses, (ct_x, ct_weight, ct_bias)


@summed_loss.def_vmap
def _summed_loss_vmap(axis_size, batched, *args, options):
    """One gradient of the weight for all examples, and not one for each. The cotangents of the
    examples are not known in the forward pass, and so the logits are computed twice."""
    found = _token_losses_vmap(axis_size, batched, *args, options=options)
    if found is NotImplemented:
        return found
    return jax.tree.map(lambda y: jnp.sum(y, 1), found[0]), found[1]


@custom_vjp
def token_losses(x, weight, bias, class_weight, labels, scales, *, options: Options):
    """The loss of each token, and its z-loss, which has no derivative."""
    return _forward(x, weight, bias, class_weight, labels, scales, options)[:2]


@compile_eager_calls
def _forward(x, weight, bias, class_weight, labels, scales, options):
    def chunk(_, tokens):
        x, labels, scales = tokens
        logits = _logits(x, weight, bias, options)
        return None, _losses(logits, labels, scales, class_weight, options)

    return _over_chunks(chunk, None, (x, labels, scales), weight, options)[1]


@token_losses.def_fwd
def _token_losses_fwd(x, weight, bias, class_weight, labels, scales, *, options):
    args = x, weight, bias, class_weight, labels, scales
    losses, z, normalizer = _forward(*args, options)
    return (losses, z), (*args, normalizer)


# The cotangent of each token is known here only, so that the gradients can't be formed in the
# forward pass. With the normalizer, the softmax of a chunk is one exponential of its logits.
@token_losses.def_bwd
def _token_losses_bwd(residuals, cts, *, options, perturbed: tuple[Any, ...]):
    *args, scales, normalizer = residuals
    ct, _ = cts
    if options.axes:
        # The loss is a sum over the devices.
        (part,) = vary_alike([jnp.zeros(ct.shape, ct.dtype)], ct, args[1])
        (ct,) = jax.linear_transpose(options.total, part)(ct)
    scales = jax.tree.map(lambda scale: _times(scale, ct), scales)
    live = [p is True for p in perturbed[:3]]
    terms: Any = (*args, scales, normalizer)
    _, cts = _gradients(*terms, live=live, options=options)
    return *cts, None, None, None


# Labels and losses do not vary over the axes of the vocabulary: `vary_over_tokens` casts.
summed_loss._rules.varies_alike = token_losses._rules.varies_alike = False


def vary_over_tokens(args: Sequence[Any], options: Options) -> list[Any]:
    """Inside `shard_map`: arrays, cast to vary over each axis over which one of them does,
    except the axes of the vocabulary. The transpose of the cast sums the cotangents, once."""
    if not is_in_shard_map():
        return list(args)
    axes = frozenset[Any]().union(*map(varying_axes, jax.tree.leaves(args)))
    return jax.tree.map(lambda x: vary_over(x, axes - set(options.axes)), list(args))


@token_losses.def_vmap
def _token_losses_vmap(
    axis_size, batched, x, weight, bias, class_weight, labels, scales, *, options
):
    if any(batched[1:4]):
        return NotImplemented
    tokens = (x, labels, scales), (batched[0], *batched[4:])
    x, labels, scales = jax.tree.map(ft.partial(_fold, axis_size), *tokens)
    out = token_losses(x, weight, bias, class_weight, labels, scales, options=options)
    return jax.tree.map(lambda y: y.reshape(axis_size, -1), out), True


def _logits(
    x: jax.Array, weight: jax.Array, bias: jax.Array | None, options: Options
) -> jax.Array:
    """In single precision if `x` is in half precision."""
    # Contracted as they are: a transpose of the weight would be moved out of the loop, and
    # there it is a copy.
    logits = _matmul(x, weight, ((1,), (1,)))
    logits = logits if bias is None else logits + bias.astype(logits.dtype)[None]
    cap = options.soft_cap
    return logits if cap is None else cap * jnp.tanh(logits / cap)


def _matmul(a: jax.Array, b: jax.Array, contracted=((1,), (0,))) -> jax.Array:
    return jax.lax.dot_general(
        a, b, (contracted, ((), ())), preferred_element_type=sum_dtype(a.dtype)
    )


def _losses(logits, labels, scales: Scales, class_weight, options: Options):
    """The loss of each token, its z-loss, and the normalizer `lse = highest + log_sum`, as two
    numbers: it is rounded by more than a small loss is."""
    # The result does not depend on the number that is subtracted.
    highest = jax.lax.stop_gradient(jnp.max(logits, 1))
    if options.axes:
        highest = jax.lax.pmax(highest, options.axes)
    logits = logits - highest[:, None]
    log_sum = jnp.log(options.total(jnp.sum(jnp.exp(logits), 1)))

    def cross_entropy(weights):
        # An entry of the vocabulary that a bias of minus infinity removes may have no weight.
        terms = logits if weights is None else jnp.where(weights == 0, 0, weights * logits)
        of_all = _sum_of_weights(weights, logits, options)
        return of_all * log_sum - options.total(jnp.sum(terms, 1))

    if is_soft(labels):
        losses = cross_entropy(_weighted(labels, class_weight))
    else:
        take = lambda index: jnp.take_along_axis(logits, index[:, None], 1)[:, 0]
        losses = log_sum - at_labels(take, logits.shape[1], labels, options)
    losses, z = _times(scales.label, losses), None
    if scales.uniform is not None:
        weights = None if class_weight is None else class_weight[None]
        losses = losses + _times(scales.uniform, cross_entropy(weights))
    if scales.z is not None:
        z = _times(scales.z, (highest + log_sum) ** 2)
        losses = losses + z
    return losses, z, (highest, log_sum)


def _times(scale, x):
    """A token that is ignored has the factor zero, whatever its loss or cotangent is."""
    return jnp.where(scale == 0, 0, scale * x)


def is_soft(labels: jax.Array) -> bool:
    """Whether labels are probabilities, of shape `(tokens, vocabulary)`."""
    return jnp.issubdtype(labels.dtype, jnp.floating)


def _sum_of_weights(weights, logits, options: Options):
    """The sum over all entries of the vocabulary; `None` is one for each."""
    of_device = logits.shape[1] if weights is None else jnp.sum(weights, 1)
    return options.total(of_device)


def _weighted(probabilities, class_weight):
    return probabilities if class_weight is None else probabilities * class_weight[None]


def at_labels(take, n: int, labels, options: Options) -> jax.Array:
    """What `take` finds at the labels, each on the device that has it among its `n` rows."""
    if not options.axes:
        return take(labels)
    index = labels - _first_label(n, labels, options)
    found = take(jnp.clip(index, 0, n - 1))
    return options.total(jnp.where((index >= 0) & (index < n), found, 0))


def _first_label(n, labels, options: Options):
    """The label of the first of the `n` rows of the weight that this device has."""
    return n * jax.lax.axis_index(options.axes).astype(labels.dtype) if options.axes else 0


def _cotangent(
    logits, normalizer, labels, scales: Scales, class_weight, options: Options
) -> jax.Array:
    """The cotangent of `W x + b`, if the cotangent of each token's loss is one."""
    # The barrier keeps XLA from writing `logits - highest`, which the loss needs too, to
    # memory.
    highest, log_sum = jax.lax.optimization_barrier(normalizer)
    # No array of constants is as large as the logits: it would be moved out of the loop.
    n = logits.shape[1]
    column = lambda x: x[:, None]
    if is_soft(labels):
        at_label = _weighted(labels, class_weight)
        of_all = scales.label * _sum_of_weights(at_label, logits, options)
    else:
        index = labels - _first_label(n, labels, options)
        at_label = jnp.arange(n, dtype=labels.dtype)[None] == column(index)
        of_all = scales.label
    q = column(scales.label) * at_label.astype(logits.dtype)
    if scales.uniform is not None:
        weights = None if class_weight is None else class_weight[None]
        of_all = of_all + scales.uniform * _sum_of_weights(weights, logits, options)
        q = q + _weighted(column(scales.uniform), class_weight)
    if scales.z is not None:
        of_all = of_all + 2 * scales.z * (highest + log_sum)
    p = jnp.exp((logits - column(highest)) - column(log_sum))
    d = column(of_all) * p - q
    # The slope of `cap * tanh(logits / cap)`.
    return d if options.soft_cap is None else d * (1 - (logits / options.soft_cap) ** 2)


def _pull_back(d, x, weight, live) -> tuple[jax.Array | None, ...]:
    """The cotangents of `x`, of the transpose of the weight, and of the bias."""
    ct_bias = jnp.sum(d, 0) if live[2] else None
    if x.dtype == jnp.bfloat16:
        d = d.astype(x.dtype)  # float16 would lose small probabilities
    x, weight = x.astype(d.dtype), weight.astype(d.dtype)
    ct_x = _matmul(d, weight) if live[0] else None
    # Not as `d.T @ x`: XLA:CPU is slow at a product whose left operand is contracted along its
    # first axis, and this transpose is the smaller one. See `nn/_recurrent/chunked_matmuls.py`.
    ct_weight_t = _matmul(jax.lax.optimization_barrier(x.T), d) if live[1] else None
    return ct_x, ct_weight_t, ct_bias


def _over_chunks(
    fn: Callable[[Any, Any], tuple[Any, Any]],
    carry: Any,
    tokens: Sequence[Any],
    weight: jax.Array,
    options: Options,
) -> tuple[Any, Any]:
    """`fn(carry, tokens) -> carry, ys` for one chunk of tokens after another.

    The tokens of a chunk are not adjacent: of `n` chunks, each takes every `n`-th token. So
    each chunk of sharded tokens is sharded as all of them are.
    """
    size, (vocabulary, features) = tokens[0].shape[0], weight.shape
    # The gradient of the weight is read and written once for each chunk, which takes little
    # time beside the matrix products if there are as many tokens as features. The logits of a
    # chunk then are as large as that gradient. A small vocabulary has larger chunks, of 4 MiB
    # of logits on a CPU, in which a chunk takes long beside a step of a loop.
    chunk = options.chunk or max(128, features, logits_of_chunk() // vocabulary)
    n = _number_of_chunks(size, chunk)
    if size_or(n, 2) <= 1:
        return fn(carry, tokens)
    rows = chunk if is_symbolic(size) else -(-size // n)

    def shaped(x):
        if rows * n != size:
            x = jnp.pad(x, [(0, rows * n - size)] + [(0, 0)] * (x.ndim - 1))
        return x.reshape(rows, n, *x.shape[1:])

    def split(x):
        return jnp.moveaxis(shaped(x), 1, 0)

    def join(y):
        return jnp.moveaxis(y, 0, 1).reshape(rows * n, *y.shape[2:])[:size]

    x, labels, *rest = tokens
    # Probabilities are not split, which would copy all of them: each step finds its own.
    whole = shaped(labels) if is_soft(labels) else None

    def step(carry, part):
        x, labels, *rest = part
        if whole is not None:
            labels = jax.lax.dynamic_index_in_dim(whole, labels, 1, keepdims=False)
        return fn(carry, (x, labels, *rest))

    parts = split(x), split(labels) if whole is None else jnp.arange(n)
    carry, ys = jax.lax.scan(step, carry, (*parts, *jax.tree.map(split, rest)))
    return carry, jax.tree.map(join, ys)


def _number_of_chunks(size: Size, chunk: int) -> Size:
    """A number of chunks of at most `chunk` tokens, and at most twice as many as needed.

    If possible, all are equally long, and their length is divisible by the largest power of
    two. So devices have equal parts of each chunk; unequal parts would be gathered.
    """
    fewest = -(-size // chunk)
    if is_symbolic(size):
        return fewest
    equal = [n for n in range(fewest, 2 * fewest + 1) if n > 0 and size % n == 0]
    power_of_two = lambda n: (size // n) & -(size // n)
    return max(equal, key=power_of_two, default=fewest)


def _fold(size, x, is_batched):
    """Merge the batch dimension into the dimension of the tokens."""
    x = x if is_batched else jnp.broadcast_to(x[None], (size, *x.shape))
    return x.reshape(size * x.shape[1], *x.shape[2:])
