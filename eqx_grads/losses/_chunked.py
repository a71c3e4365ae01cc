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
    name_of,
    place_of,
    rule_error,
    show_path,
    type_of,
)
from .._errors.trees import mirror, mirrored, prefix_leaves
from .._jaxprs.eager_calls import compile_eager_calls
from .._jaxprs.symbolic_sizes import is_symbolic, Size
from .._rules.closure_convert import ClosureTemplate, contains_tracer, lift_tracers
from .._rules.custom_jvp import custom_jvp
from .._rules.float_args import as_count, as_integer
from .._rules.tree_split import AbstractTransformed, TreeSplit
from .._tangent_spaces import is_array, is_arraylike, is_none, sum_dtype
from ._gradient_sums import add, inner_product, zero_sum


REDUCTIONS = ("sum", "mean")
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
        argument, as `in_axes` of `jax.vmap`: an integer, `None` for an argument that every
        chunk gets whole, or a prefix of the argument with these as leaves. A keyword argument
        is not split.
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
    product with the tangents of the arguments; so forward mode too needs a `loss` that has a
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
    if not isinstance(reduction, str) or reduction not in REDUCTIONS:
        do = 'Give "sum" or "mean": how the loss of all follows from the losses of its parts.'
        raise bad_argument("losses.chunked", "reduction", "a known one", reduction, do)
    axes, treedef = jax.tree.flatten(mirrored(axis), is_leaf=is_none)
    if any(a is not None and as_integer(a) is None for a in axes):
        raise bad_argument(
            "losses.chunked", "axis", "an integer, or a tree of them", axis, _AXIS
        )
    axes = tuple(None if a is None else int(a) for a in axes)
    return eqx.module_update_wrapper(_Chunked(loss, axes, treedef, chunk, reduction == "mean"))


class _Chunked(AbstractTransformed):
    _eqg_fn: Callable[..., Any]
    _axes: tuple[int | None, ...] = eqx.field(static=True)
    _axes_treedef: Any = eqx.field(static=True)
    _chunk: int = eqx.field(static=True)
    _mean: bool = eqx.field(static=True)

    def __call__(self, /, *args, **kwargs):
        if contains_tracer(eqx.filter(self._eqg_fn, is_array, inverse=True)):
            return self._call(args, kwargs)  # which makes operands of what it closes over
        axis = jax.tree.unflatten(self._axes_treedef, self._axes)
        return _run(self._eqg_fn, axis, self._chunk, self._mean, args, kwargs)

    def _call(self, args, kwargs):
        axes = self._axes_of(args)
        length = self._split_length(args, axes)
        axes = (*(None for _ in _leaves(self._eqg_fn)[0]), *axes)
        # A value that the loss closes over is an argument too, and so has a gradient.
        call, arrays = TreeSplit.split((self._eqg_fn, args, kwargs), is_array)
        closures, captured = lift_tracers(call.static)
        call.static = closures.items
        leaves, treedef = _leaves(call.tree(arrays))
        is_number = [isinstance(x, int | float | complex) for x in leaves]
        numbers = tuple(x if n else None for x, n in zip(leaves, is_number, strict=True))
        loss, args, kwargs = jax.tree.unflatten(
            treedef, [None if n else x for x, n in zip(leaves, is_number, strict=True)]
        )
        closures = closures if captured else None
        chunks = _Chunks(axes, numbers, length, self._chunk, self._mean, closures)
        return _sum_over_chunks(loss, args, kwargs, captured, chunks=chunks)

    def _axes_of(self, args) -> list[int | None]:
        """An axis, or `None`, for each leaf of the arguments."""
        axes = jax.tree.unflatten(self._axes_treedef, self._axes)
        if isinstance(axes, int):
            axes = (None, *(axes for _ in args[1:]))
        has_axis = mirror(is_arraylike, args, is_leaf=is_none)
        try:
            filled = prefix_leaves(tuple(axes), has_axis, is_leaf=is_none)
        except (TypeError, ValueError):
            raise self._error(
                "an `axis` that does not fit its arguments",
                f"it has {len(args)} arguments, and `axis` is {axes}",
                do=_AXIS,
            ) from None
        return [a if has else None for a, has in zip(filled, _leaves(has_axis)[0], strict=True)]

    def _split_length(self, args, axes) -> Size:
        leaves = jax.tree_util.tree_leaves_with_path(args, is_leaf=is_none)
        lengths = {}
        for (path, x), axis in zip(leaves, axes, strict=True):
            if axis is None:
                continue
            where = f"args{show_path(path)} is {type_of(x)}, its axis is {axis}"
            if not -jnp.ndim(x) <= axis < jnp.ndim(x):
                raise self._error(
                    "an axis that an argument does not have",
                    where,
                    do="Give `None` for an argument that every chunk gets whole.",
                )
            lengths[where] = jnp.shape(x)[axis]
        if len(set(lengths.values())) != 1:
            raise self._error(
                "arguments that can't be split together",
                *(lengths or ["no array has an axis"]),
                do=f"At least one array has an axis, and all that do are equally long. {_AXIS}",
            )
        return next(iter(lengths.values()))

    def _error(self, what, *where, do):
        return rule_error(
            f"`losses.chunked` of `{name_of(self._eqg_fn)}` was given {what}.", *where, do=do
        )


@compile_eager_calls
def _run(loss, axis, chunk, mean, args, kwargs):
    axes, treedef = jax.tree.flatten(axis, is_leaf=is_none)
    return _Chunked(loss, tuple(axes), treedef, chunk, mean)._call(args, kwargs)


@dataclasses.dataclass(frozen=True)
class _Chunks:
    """How a loss is split. `axes` has an entry for each leaf of the loss and its positional
    arguments, and `numbers` for each such leaf, and for the keywords: a Python number, which
    would be an array in a rule, or `None`. `closures` is for the tracers that were captured, if
    any were."""

    axes: tuple[int | None, ...]
    numbers: tuple[int | float | complex | None, ...]
    length: Size
    chunk: int
    mean: bool
    closures: ClosureTemplate | None

    def split(self, leaves):
        """The leaves that are split, with their axis in front, and the others."""
        axes = [*self.axes, *(None for _ in leaves[len(self.axes) :])]
        pairs = list(zip(leaves, axes, strict=True))
        whole = [x if a is None else None for x, a in pairs]
        return whole, [None if a is None else jnp.moveaxis(x, a, 0) for x, a in pairs]

    def join(self, whole, parts):
        """The inverse of `split`, even for one chunk."""
        axes = [*self.axes, *(None for _ in whole[len(self.axes) :])]
        return [
            x if a is None or part is None else jnp.moveaxis(part, 0, a)
            for x, part, a in zip(whole, parts, axes, strict=True)
        ]

    def with_numbers(self, leaves):
        """The leaves of the loss, its arguments and what it captured, with the numbers."""
        numbers = [*self.numbers, *(None for _ in leaves[len(self.numbers) :])]
        return [x if n is None else n for x, n in zip(leaves, numbers, strict=True)]

    def scan(self, fn, sums, parts):
        return scan_in_chunks(fn, sums, parts, chunk=self.chunk, reverse=False)


def _leaves(tree):
    return jax.tree.flatten(tree, is_leaf=is_none)


@custom_jvp
def _sum_over_chunks(loss, args, kwargs, captured, *, chunks: _Chunks):
    leaves, treedef = _leaves((loss, args, kwargs, captured))
    whole, parts = chunks.split(leaves)

    # Rematerialized for the batching rule, which differentiates this.
    @ft.partial(jax.checkpoint, prevent_cse=False)
    def of_chunk(arrays, parts):
        filled = eqx.combine(arrays, static)
        return _loss_of_chunk(treedef, chunks, filled, parts)

    arrays, static = eqx.partition(whole, is_array)
    _, losses = chunks.scan(
        lambda _, parts, __: (None, of_chunk(arrays, parts)[None]), None, parts
    )
    return _total(losses)


def _loss_of_chunk(treedef, chunks: _Chunks, whole, parts) -> Array:
    """The loss of a chunk, as a term of the sum over all chunks."""
    leaves = chunks.with_numbers(chunks.join(whole, parts))
    *call, captured = jax.tree.unflatten(treedef, leaves)
    if chunks.closures is not None:
        split, arrays = TreeSplit.split(tuple(call), is_array)
        call = split.tree(arrays, chunks.closures.substitute(captured)[0])
    loss, args, kwargs = call
    value = loss(*args, **kwargs)
    if not eqx.is_inexact_array(value) or jnp.iscomplexobj(value) or jnp.shape(value) != ():
        raise rule_error(
            f"`{name_of(loss)}`, in `losses.chunked`, did not return a real scalar.",
            f"it returned {type_of(value)}",
            place_of(loss),
            do="Return the sum, or the mean, of the losses of the elements of a chunk.",
        )
    if not chunks.mean or is_symbolic(chunks.length):  # then this is the only chunk
        return value
    [length] = {len(part) for part in parts if part is not None}
    return value * (length / max(chunks.length, 1))


def _total(losses):
    return jnp.sum(losses, dtype=sum_dtype(losses.dtype)).astype(losses.dtype)


@_sum_over_chunks.def_jvp(symbolic_zeros=True)
def _sum_over_chunks_jvp(primals, tangents, *, chunks):
    leaves, treedef = _leaves(primals)
    ts, _ = _leaves(tangents)
    whole, parts = chunks.split(leaves)
    live = [t is not None for t in ts]
    of_live = lambda xs: [x if alive else None for x, alive in zip(xs, live, strict=True)]
    arrays, static = eqx.partition(whole, is_array)

    @ft.partial(jax.checkpoint, prevent_cse=False)
    def of_chunk(arrays, parts):
        def value(live_whole, live_parts):
            filled = eqx.combine(live_whole, arrays, static)
            return _loss_of_chunk(treedef, chunks, filled, eqx.combine(live_parts, parts))

        return jax.value_and_grad(value, (0, 1))(of_live(arrays), of_live(parts))

    def step(sums, parts, _):
        loss, (ct_whole, ct_parts) = of_chunk(arrays, parts)
        return add(sums, ct_whole), (loss[None], ct_parts)

    zeros = [None if x is None else zero_sum(x.shape, x.dtype, leaves) for x in of_live(arrays)]
    ct_whole, (losses, ct_parts) = chunks.scan(step, zeros, parts)
    cts = [
        ct if part is None else part
        for ct, part in zip(ct_whole, chunks.join([None] * len(ts), ct_parts), strict=True)
    ]
    loss = _total(losses)
    return loss, inner_product(cts, ts).astype(loss.dtype)


@_sum_over_chunks.def_vmap
def _sum_over_chunks_vmap(axis_size, batched, *args, chunks):
    """One gradient for all examples, of the arguments that are not batched."""
    leaves, treedef = _leaves(args)
    flags, _ = _leaves(batched)
    is_shared = [eqx.is_inexact_array(x) and not b for x, b in zip(leaves, flags, strict=True)]
    if not any(is_shared):
        return NotImplemented
    arrays, static = eqx.partition(leaves, is_array)

    def one(arrays):
        args = jax.tree.unflatten(treedef, eqx.combine(arrays, static))
        return _sum_over_chunks.fn(*args, chunks=chunks)

    in_axes = [0 if flag is True else None for flag in flags]
    return jax.vmap(one, (in_axes,), axis_size=axis_size)(arrays), True
