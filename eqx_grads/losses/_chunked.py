"""A loss that is a sum over an axis, with gradients that are formed chunk by chunk."""

import dataclasses
import functools as ft
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from .._control_flow.chunked_scan import scan_in_chunks
from .._errors import (
    bad_argument,
    check_function,
    check_option,
    name_of,
    place_of,
    rule_error,
    show_path,
    type_of,
)
from .._jaxprs.eager_calls import compile_eager_calls
from .._jaxprs.symbolic_sizes import is_symbolic, Size
from .._rules.closure_convert import contains_tracer
from .._rules.custom_jvp import custom_jvp
from .._rules.float_args import as_count, as_integer
from .._rules.tree_split import AbstractTransformed, ClosedTree, TreeSplit
from .._tangent_spaces import is_array, is_arraylike, is_none, is_numeric_array, sum_dtype
from .._trees import mirrored, prefix_leaves
from ._gradient_sums import add, inner_product, zero_sum


_AXIS = (
    "Give an integer, the axis of all arguments but the first, or a tuple with one entry for "
    "each argument: an integer, `None`, or a prefix of the argument with these as leaves. "
    "For a single argument, give `(axis,)`."
)


def chunked(
    loss: Callable[..., Array],
    axis: PyTree = 0,
    chunk: int = 128,
    *,
    reduction: str = "sum",
) -> Callable[..., Array]:
    r"""Compute a loss chunk by chunk, if it is a sum over an axis of its arguments. Its
    gradient needs the memory of one chunk.

    For the cross-entropy of a linear layer there is
    [`eqx_grads.losses.linear_cross_entropy`][], which is faster.

    !!! example

        ```python
        import equinox as eqx
        import eqx_grads as eqg
        import jax
        import jax.numpy as jnp

        mlp = eqx.nn.MLP(3, 1, 64, 2, key=jax.random.key(0))
        xs = jax.random.normal(jax.random.key(1), (1000, 3))
        ys = jnp.sum(xs**2, 1)

        def loss(mlp, xs, ys):
            return jnp.mean((jax.vmap(mlp)(xs)[:, 0] - ys) ** 2)

        in_chunks = eqg.losses.chunked(loss, axis=0, chunk=100, reduction="mean")
        grads = eqx.filter_grad(in_chunks)(mlp, xs, ys)
        plain = eqx.filter_grad(loss)(mlp, xs, ys)
        for grad, expected in zip(grads.layers, plain.layers):
            assert jnp.allclose(grad.weight, expected.weight, atol=1e-5)
        ```

    **Arguments:**

    - `loss`: a function of any PyTrees, or a Module, that returns a real scalar.
    - `axis`: the axis along which the arrays in the arguments are split. An integer is the axis
        of all arguments but the first, which is the model. Or a tuple with one entry for each
        argument, as `in_axes` of `jax.vmap`. An entry is an integer, `None` for an argument
        that every chunk gets whole, or a prefix of the argument with these as leaves. A keyword
        argument is not split.
    - `chunk`: the length of a chunk. If it does not divide the length of the axis, the last
        chunk is shorter.
    - `reduction`: `"sum"` if the loss of everything is the sum of the losses of its parts, and
        `"mean"` if it is the mean over the axis. A mean over a mask is neither: divide a sum by
        the number of elements that count.

    A random key that is not split is the same for every chunk.

    **Returns:**

    A function with the signature of `loss`. It is a PyTree with the leaves of `loss`.

    **Derivative:**

    The derivative of `loss`. The gradients with respect to the arguments that are being
    differentiated are formed in the forward pass, by `jax.value_and_grad` of one chunk after
    another. They are the residuals, and nothing is computed twice. The tangent is their inner
    product with the tangents of the arguments. So forward mode, too, needs a `loss` that has a
    reverse mode. Both modes, all orders; higher orders compute a chunk again. Values that
    `loss` closes over are differentiated too.

    Under `jax.vmap` with arguments that are not batched (a model, say), their gradient is
    formed once for the batch. For this, each chunk is rematerialized in the backward pass.

    An eager call is compiled, and knows `loss` by its identity, as `jax.jit` does.

    **Raises:**

    [`eqx_grads.RuleError`][] if no argument is split, if the split axes differ in length, if
    `loss` does not return a real scalar, or for an unknown option.
    """
    check_function(loss, "loss", "losses.chunked")
    chunk = as_count("losses.chunked", "chunk", chunk, do="Give the length of a chunk.")
    check_option("losses.chunked", "reduction", reduction, ("sum", "mean"))
    axes, treedef = jax.tree.flatten(mirrored(axis), is_leaf=is_none)
    if any(a is not None and as_integer(a) is None for a in axes):
        raise bad_argument(
            "losses.chunked", "axis", "an integer, or a tree of them", axis, _AXIS
        )
    axes = tuple(None if a is None else int(a) for a in axes)
    # A tuple, as an object would have an identity, and each new one would be compiled anew.
    options = axes, treedef, chunk, reduction == "mean"
    return eqx.module_update_wrapper(_Chunked(loss, options))


class _Chunked(AbstractTransformed):
    _options: tuple[Any, ...] = eqx.field(static=True)

    def __call__(self, /, *args, **kwargs):
        # A tracer that the loss closes over becomes an operand, and no constant of a program.
        captures = contains_tracer(eqx.filter(self._eqg_fn, is_array, inverse=True))
        return (_call if captures else _compiled)(self._eqg_fn, self._options, args, kwargs)


def _call(loss, options, args, kwargs):
    axes, treedef, chunk, is_mean = options
    axes, length = _split_of(loss, jax.tree.unflatten(treedef, axes), args)
    call, operands = ClosedTree.split((loss, args, kwargs), is_numeric_array)
    of_loss = len(TreeSplit.split(loss, is_numeric_array)[1])
    axes = [None] * of_loss + axes
    axes += [None] * (len(operands) - len(axes))
    chunks = _Chunks(call, tuple(axes), length, chunk, is_mean)
    return _sum_over_chunks(operands, chunks=chunks)


_compiled = compile_eager_calls(_call)


def _split_of(loss, axes, args) -> tuple[list[int | None], Size]:
    """An axis, or `None`, for each array in the arguments, and the length of the axes."""
    error = lambda what, *where, do: rule_error(
        f"`losses.chunked` of `{name_of(loss)}` was given {what}.", *where, do=do
    )
    if isinstance(axes, int):
        axes = (None, *(axes for _ in args[1:]))
    try:
        filled = prefix_leaves(tuple(axes), args, is_leaf=is_none)
    except (TypeError, ValueError):
        raise error(
            "an `axis` that does not fit its arguments",
            f"it has {len(args)} arguments, and `axis` is {axes}",
            do=_AXIS,
        ) from None
    lengths, of_arrays = {}, []
    for (path, x), axis in zip(jax.tree_util.tree_leaves_with_path(args), filled, strict=True):
        if is_numeric_array(x):
            of_arrays.append(axis)
        if axis is None or not is_arraylike(x):
            continue
        is_there = -jnp.ndim(x) <= axis < jnp.ndim(x)
        where = f"args{show_path(path)} is {type_of(x)}, its axis is {axis}"
        lengths[where] = jnp.shape(x)[axis] if is_there else None
    if len(set(lengths.values())) != 1 or None in lengths.values():
        raise error(
            "arguments that can't be split together",
            *(lengths or ["no array has an axis"]),
            do=f"At least one array has an axis, and all that do are equally long. {_AXIS}",
        )
    return of_arrays, next(iter(lengths.values()))


@dataclasses.dataclass(frozen=True)
class _Chunks:
    """A call of a loss without its operands, and how these are split: an axis, or `None`, for
    each."""

    call: ClosedTree
    axes: tuple[int | None, ...]
    length: Size
    chunk: int
    mean: bool

    def split(self, operands):
        """The operands that are not split, and the others, with their axis in front."""
        pairs = list(zip(operands, self.axes, strict=True))
        whole = [x if a is None else None for x, a in pairs]
        return whole, [None if a is None else jnp.moveaxis(x, a, 0) for x, a in pairs]

    def join(self, whole, parts):
        """The inverse of `split`, even for one chunk."""
        return [
            x if part is None or a is None else jnp.moveaxis(part, 0, a)
            for x, part, a in zip(whole, parts, self.axes, strict=True)
        ]

    def scan(self, fn, sums, parts):
        return scan_in_chunks(fn, sums, parts, chunk=self.chunk, reverse=False)

    def loss(self, whole, parts) -> Array:
        """The loss of a chunk, as a term of the sum over all chunks."""
        loss, args, kwargs = self.call.tree(self.join(whole, parts))
        value = loss(*args, **kwargs)
        if not eqx.is_inexact_array(value) or jnp.iscomplexobj(value) or value.shape != ():
            raise rule_error(
                f"`{name_of(loss)}`, in `losses.chunked`, did not return a real scalar.",
                f"it returned {type_of(value)}",
                place_of(loss),
                do="Return the sum, or the mean, of the losses of the elements of a chunk.",
            )
        if not self.mean or is_symbolic(self.length):  # then this is the only chunk
            return value
        [length] = {len(part) for part in parts if part is not None}
        return value * (length / max(self.length, 1))


@custom_jvp
def _sum_over_chunks(operands, *, chunks: _Chunks):
    whole, parts = chunks.split(operands)
    # Rematerialized for the batching rule, which differentiates this.
    of_chunk = jax.checkpoint(chunks.loss, prevent_cse=False)
    step = lambda _, parts, __: (None, of_chunk(whole, parts)[None])
    return _total(chunks.scan(step, None, parts)[1])


def _total(losses):
    return jnp.sum(losses, dtype=sum_dtype(losses.dtype)).astype(losses.dtype)


@_sum_over_chunks.def_jvp(symbolic_zeros=True)
def _sum_over_chunks_jvp(primals, tangents, *, chunks):
    (operands,), (ts,) = primals, tangents
    whole, parts = chunks.split(operands)
    of_live = lambda xs: [None if t is None else x for x, t in zip(xs, ts, strict=True)]

    @ft.partial(jax.checkpoint, prevent_cse=False)
    def of_chunk(whole, parts):
        def value(live, live_parts):
            return chunks.loss(eqx.combine(live, whole), eqx.combine(live_parts, parts))

        return jax.value_and_grad(value, (0, 1))(of_live(whole), of_live(parts))

    def step(sums, parts, _):
        loss, (ct_whole, ct_parts) = of_chunk(whole, parts)
        return add(sums, ct_whole), (loss[None], ct_parts)

    zero = lambda x: None if x is None else zero_sum(x.shape, x.dtype, operands)
    cts, (losses, ct_parts) = chunks.scan(step, [zero(x) for x in of_live(whole)], parts)
    loss = _total(losses)
    return loss, inner_product(chunks.join(cts, ct_parts), ts).astype(loss.dtype)


@_sum_over_chunks.def_vmap
def _sum_over_chunks_vmap(axis_size, batched, operands, *, chunks):
    """One gradient for all examples, of the arguments that are not batched."""
    (flags,) = batched
    pairs = zip(operands, flags, strict=True)
    if not any(eqx.is_inexact_array(x) and not b for x, b in pairs):
        return NotImplemented
    of_example = ft.partial(_sum_over_chunks.fn, chunks=chunks)
    in_axes = [0 if flag is True else None for flag in flags]
    return jax.vmap(of_example, (in_axes,), axis_size=axis_size)(operands), True
