"""The cross-entropy of a linear layer over chunks of tokens: the loss, and its derivatives.

No array here has an element for each token and each entry of the vocabulary; those of one chunk
of tokens are the largest.
"""

import functools as ft
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._control_flow.accelerators import logits_of_chunk
from .._jaxprs.eager_calls import compile_eager_calls
from .._jaxprs.symbolic_sizes import is_symbolic, Size, size_or
from .._jaxprs.varying import is_in_shard_map, vary_alike, vary_over, varying_axes
from .._rules.custom_jvp import custom_jvp
from .._rules.custom_vjp import custom_vjp
from .._tangent_spaces import sum_dtype
from ._gradient_sums import add, inner_product, zero_sum


class Options(NamedTuple):
    """What `linear_cross_entropy` is given besides arrays."""

    chunk: int | None
    label_smoothing: float
    z_loss: float
    # The mesh axes over which the rows of the weight are sharded, in `jax.shard_map`.
    axes: tuple[Hashable, ...] = ()

    def total(self, x: jax.Array) -> jax.Array:
        """The sum over the devices, each of which has a part of the vocabulary."""
        return jax.lax.psum(x, self.axes) if self.axes else x

    def first_label(self, n: int, dtype: Any) -> Any:
        """The label of the first of the `n` rows of the weight that this device has."""
        return n * jax.lax.axis_index(self.axes).astype(dtype) if self.axes else 0


# Of one token with the logits l = W x + b, the label y and the target q, which is
# 1 - label_smoothing at y plus label_smoothing / vocabulary everywhere, the loss is
#
#     loss = lse - sum_v q_v l_v + z_loss lse²,    lse = log sum_v exp l_v,
#
# and with p = softmax(l) = exp(l - lse) the cotangent of the logits is
#
#     d = p (1 + 2 z_loss lse) - q.
#
# The derivatives are W^T d in x, and the sums over tokens of d x^T in W and of d in b.
@custom_jvp
def summed_loss(x, weight, bias, labels, scale, *, options: Options):
    """The sum over tokens. `x` is `(tokens, features)`, `labels` is in range everywhere, and
    `scale` is a factor of each token: zero for one that is ignored."""

    return jnp.sum(_forward(x, weight, bias, labels, scale, options)[0])


# The derivative of a sum over tokens is a sum over tokens. So the gradients are formed with the
# loss, chunk by chunk while the logits of the chunk exist, and the tangent is their inner
# product with the tangents of the arguments. Its transpose multiplies the gradients by the
# cotangent.
@summed_loss.def_jvp(symbolic_zeros=True)
def _summed_loss_jvp(primals, tangents, *, options):
    live = [t is not None for t in tangents[:3]]
    loss, cts = _summed_loss_and_gradients(*primals, live=live, options=options)
    return loss, options.total(inner_product(cts, tangents[:3]))


@compile_eager_calls
def _summed_loss_and_gradients(x, weight, bias, labels, scale, *, live, options):
    # For the second derivative of a chunk, its logits are computed again.
    of_chunk = jax.checkpoint(
        ft.partial(_losses_and_gradients, live=live, options=options), prevent_cse=False
    )

    def chunk(sums, tokens):
        losses, ct_x, *cts = of_chunk(*tokens, weight, bias)
        return add(sums, tuple(cts)), (losses, ct_x)

    # The losses are summed after the loop: of sharded tokens, that is one sum over the devices.
    primals = x, weight, bias, labels, scale
    (ct_weight_t, ct_bias), (losses, ct_x) = _over_chunks(
        chunk, _zero_gradients(primals, live), (x, labels, scale), weight, options
    )
    return jnp.sum(losses), (ct_x, None if ct_weight_t is None else ct_weight_t.T, ct_bias)


def _losses_and_gradients(x, labels, scale, weight, bias, *, live, options):
    logits = _logits(x, weight, bias)
    losses, normalizer = _losses(logits, labels, scale, options)
    d = _cotangent(logits, normalizer, labels, scale, options)
    return losses, *_pull_back(d, x, weight, live)


@summed_loss.def_vmap
def _summed_loss_vmap(axis_size, batched, x, weight, bias, labels, scale, *, options):
    """One gradient of the weight for all examples, and not one for each. The cotangents of the
    examples are not known in the forward pass, and so the logits are computed twice."""
    _, *weights_batched, _, _ = batched
    if any(weights_batched):
        return NotImplemented
    tokens = _fold(axis_size, (x, labels, scale), (batched[0], *batched[3:]))
    losses = token_losses(tokens[0], weight, bias, *tokens[1:], options=options)
    return jnp.sum(losses.reshape(axis_size, -1), 1), True


@custom_vjp
def token_losses(x, weight, bias, labels, scale, *, options: Options):
    """The loss of each token."""
    return _forward(x, weight, bias, labels, scale, options)[0]


@compile_eager_calls
def _forward(x, weight, bias, labels, scale, options):
    def chunk(_, tokens):
        x, labels, scale = tokens
        return None, _losses(_logits(x, weight, bias), labels, scale, options)

    return _over_chunks(chunk, None, (x, labels, scale), weight, options)[1]


@token_losses.def_fwd
def _token_losses_fwd(x, weight, bias, labels, scale, *, options):
    losses, normalizer = _forward(x, weight, bias, labels, scale, options)
    return losses, (x, weight, bias, labels, scale, normalizer)


# The cotangent of each token is known here only, so that the gradients can't be formed in the
# forward pass. With the normalizer, the softmax of a chunk is one exponential of its logits.
@token_losses.def_bwd
@compile_eager_calls
def _token_losses_bwd(residuals, ct, *, options, perturbed: tuple[Any, ...]):
    x, weight, bias, labels, scale, normalizer = residuals
    live = [p is True for p in perturbed[:3]]

    @ft.partial(jax.checkpoint, prevent_cse=False)
    def of_chunk(x, labels, scale, normalizer, weight, bias):
        d = _cotangent(_logits(x, weight, bias), normalizer, labels, scale, options)
        return _pull_back(d, x, weight, live)

    def chunk(sums, tokens):
        ct_x, *cts = of_chunk(*tokens, weight, bias)
        return add(sums, tuple(cts)), ct_x

    if options.axes:
        # The loss is a sum over the devices.
        (part,) = vary_alike([jnp.zeros(ct.shape, ct.dtype)], ct, weight)
        (ct,) = jax.linear_transpose(options.total, part)(ct)
    # A token that is ignored has the factor zero, whatever its cotangent is.
    scale = jnp.where(scale == 0, 0, scale * ct)
    zeros = _zero_gradients((*residuals, ct), live)
    (ct_weight_t, ct_bias), ct_x = _over_chunks(
        chunk, zeros, (x, labels, scale, normalizer), weight, options
    )
    return ct_x, None if ct_weight_t is None else ct_weight_t.T, ct_bias, None, None


# Labels and losses do not vary over the axes of the vocabulary: `vary_over_tokens` casts.
summed_loss._rules.varies_alike = token_losses._rules.varies_alike = False


def vary_over_tokens(args: Sequence[Any], options: Options) -> list[Any]:
    """Inside `shard_map`: arrays, cast to vary over each axis over which one of them does,
    except the axes of the vocabulary. The transpose of the cast sums the cotangents, once."""
    if not is_in_shard_map():
        return list(args)
    axes = frozenset[Any]().union(*map(varying_axes, jax.tree.leaves(args)))
    return [None if x is None else vary_over(x, axes - set(options.axes)) for x in args]


@token_losses.def_vmap
def _token_losses_vmap(axis_size, batched, x, weight, bias, labels, scale, *, options):
    _, *weights_batched, _, _ = batched
    if any(weights_batched):
        return NotImplemented
    tokens = _fold(axis_size, (x, labels, scale), (batched[0], *batched[3:]))
    losses = token_losses(tokens[0], weight, bias, *tokens[1:], options=options)
    return losses.reshape(axis_size, -1), True


def _logits(x: jax.Array, weight: jax.Array, bias: jax.Array | None) -> jax.Array:
    """In single precision if `x` is in half precision."""
    # Contracted as they are: a transpose of the weight would be moved out of the loop, and
    # there it is a copy.
    logits = _matmul(x, weight, ((1,), (1,)))
    return logits if bias is None else logits + bias.astype(logits.dtype)[None]


def _matmul(a: jax.Array, b: jax.Array, contracted=((1,), (0,))) -> jax.Array:
    return jax.lax.dot_general(
        a, b, (contracted, ((), ())), preferred_element_type=sum_dtype(a.dtype)
    )


class _Normalizer(NamedTuple):
    """`lse = highest + log_sum`, in two parts: it is rounded by more than a small loss is."""

    highest: jax.Array
    log_sum: jax.Array


def _losses(logits, labels, scale, options: Options) -> tuple[jax.Array, _Normalizer]:
    """The loss of each token, and the logarithm of its sum of exponentials."""
    # The result does not depend on what is subtracted.
    highest = jax.lax.stop_gradient(jnp.max(logits, 1))
    if options.axes:
        highest = jax.lax.pmax(highest, options.axes)
    log_sum = jnp.log(options.total(jnp.sum(jnp.exp(logits - highest[:, None]), 1)))
    label_logit = _label_logit(logits - highest[:, None], labels, options)
    losses = log_sum - label_logit
    if options.label_smoothing != 0:
        total = options.total(jnp.sum(logits - highest[:, None], 1))
        mean = total / vocabulary_size(logits.shape[1], options)
        losses = losses + options.label_smoothing * (label_logit - mean)
    if options.z_loss != 0:
        losses = losses + options.z_loss * (highest + log_sum) ** 2
    return jnp.where(scale == 0, 0, scale * losses), _Normalizer(highest, log_sum)


def _label_logit(logits, labels, options: Options) -> jax.Array:
    if not options.axes:
        return jnp.take_along_axis(logits, labels[:, None], 1)[:, 0]
    n = logits.shape[1]
    index = labels - options.first_label(n, labels.dtype)
    at_label = jnp.take_along_axis(logits, jnp.clip(index, 0, n - 1)[:, None], 1)[:, 0]
    return options.total(jnp.where((index >= 0) & (index < n), at_label, 0))


def vocabulary_size(n: int, options: Options) -> int:
    """The number of rows of the weight on all devices, each of which has `n`."""
    return n * jax.lax.psum(1, options.axes) if options.axes else n


def _cotangent(logits, normalizer: _Normalizer, labels, scale, options: Options) -> jax.Array:
    """That of the logits, if that of the loss of each token is one."""
    # The barrier keeps XLA from writing `logits - highest`, which the loss needs too, to
    # memory.
    highest, log_sum = jax.lax.optimization_barrier(normalizer)
    d = jnp.exp((logits - highest[:, None]) - log_sum[:, None])
    if options.z_loss != 0:
        d = d * (1 + 2 * options.z_loss * (highest + log_sum))[:, None]
    # No array of constants is as large as the logits: it would be moved out of the loop.
    n = logits.shape[1]
    index = labels - options.first_label(n, labels.dtype)
    is_label = jnp.arange(n, dtype=labels.dtype)[None] == index[:, None]
    d = d - is_label.astype(d.dtype) * (1 - options.label_smoothing)
    if options.label_smoothing != 0:
        d = d - options.label_smoothing / vocabulary_size(logits.shape[1], options)
    return scale[:, None] * d


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


def default_chunk(features: int, vocabulary: int) -> int:
    """The number of tokens of a chunk.

    The gradient of the weight is read and written once for each chunk, which takes little time
    beside the matrix products if there are as many tokens as features. The logits of a chunk
    then are as large as that gradient. A small vocabulary has larger chunks, of 4 MiB of
    logits on a CPU, in which a chunk takes long beside a step of a loop.
    """
    return max(128, features, logits_of_chunk() // vocabulary)


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
    size, vocabulary = tokens[0].shape[0], weight.shape[0]
    chunk = options.chunk or default_chunk(weight.shape[1], vocabulary)
    n = _number_of_chunks(size, chunk)
    if size_or(n, 2) <= 1:
        return fn(carry, tokens)
    rows = chunk if is_symbolic(size) else -(-size // n)

    def split(x):
        if rows * n != size:
            x = jnp.pad(x, [(0, rows * n - size)] + [(0, 0)] * (x.ndim - 1))
        return jnp.moveaxis(x.reshape(rows, n, *x.shape[1:]), 1, 0)

    def join(y):
        return jnp.moveaxis(y, 0, 1).reshape(rows * n, *y.shape[2:])[:size]

    carry, ys = jax.lax.scan(fn, carry, jax.tree.map(split, tuple(tokens)))
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


def _zero_gradients(args, live):
    x, weight, bias, *_ = args
    return (
        zero_sum(weight.shape[::-1], x.dtype, args) if live[1] else None,
        zero_sum(bias.shape, x.dtype, args) if live[2] else None,
    )


def _fold(size, arrays, batched):
    """Merge the batch dimension into that of the tokens."""
    whole = [
        x if is_batched else jnp.broadcast_to(x[None], (size, *x.shape))
        for x, is_batched in zip(arrays, batched, strict=True)
    ]
    return [x.reshape(size * x.shape[1], *x.shape[2:]) for x in whole]
