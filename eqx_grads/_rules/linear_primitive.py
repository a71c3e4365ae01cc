"""The primitive for a linear map with a chosen transpose: tangents of a `custom_vjp`.

`jax.custom_derivatives.linear_call` is the nearest thing in JAX, and has no batching rule. It
can't have forward mode, reverse mode and `vmap` at once (clause 3 of the contract: both modes).
"""

import dataclasses
import functools as ft
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Primitive, unmapped_aval
from jax.interpreters import ad, batching, mlir

from .._errors import name_of
from .._jaxprs.current_trace import CONFIG, in_precision
from .._jaxprs.evaluate import trace
from .._jaxprs.operands import at, fill, flagged, restricted
from .._jaxprs.structure import LinearCall, register
from .._tangent_spaces import as_array_list, is_differentiable


@dataclasses.dataclass(eq=False, repr=False)
class LinearMap:
    """A linear map of tangents, given residuals, and its transpose. Hashed by identity.

    - `forward(residuals, tangents)` returns the list of output tangents.
    - `transpose(residuals, cotangents)` returns the list of input cotangents, `None` for
        zero; so may be the cotangents that it gets. It need not be linear.
    - `out_types` are the types of the output tangents.

    - `fn` is the function that it is of, or a name: what a jaxpr shows.

    None of them may hold a tracer: JAX keeps them for as long as it keeps the program.
    """

    fn: Any
    _forward: Callable[[list[Any], list[Any]], Sequence[Any]]
    _transpose: Callable[[list[Any], list[Any]], Sequence[Any]]
    out_types: Sequence[Any]

    def __post_init__(self):
        self._precision = CONFIG.jax_default_matmul_precision

    def forward(self, residuals: list[Any], tangents: list[Any]) -> Sequence[Any]:
        with in_precision(self._precision):
            return self._forward(residuals, tangents)

    def transpose(self, residuals: list[Any], cotangents: list[Any]) -> Sequence[Any]:
        with in_precision(self._precision):
            return self._transpose(residuals, cotangents)

    def __repr__(self):
        return self.fn if isinstance(self.fn, str) else name_of(self.fn)


def lifetime() -> ClosedJaxpr:
    """A parameter for a primitive whose other parameters nobody else may keep alive.

    JAX remembers the output types of the last 2048 calls of primitives by their parameters,
    and so keeps these alive, but for jaxprs, to which it has weak references: when this one
    goes with the program that it is in, so does what was remembered.
    (`multi_weakref_lru_cache` in JAX 0.10 to 0.12.)
    """
    return ClosedJaxpr(_NOTHING, ())


_NOTHING = jax.make_jaxpr(lambda: ())().jaxpr


def linear_call(
    linear_map: LinearMap, residuals: Sequence[Any], tangents: Sequence[Any]
) -> list[Any]:
    """Apply `linear_map`. Its transpose is used wherever JAX transposes the call."""
    return linear_p.bind(
        *residuals,
        *tangents,
        linear_map=linear_map,
        n_residuals=len(residuals),
        lifetime=lifetime(),
    )


linear_p = Primitive("eqg_linear")
linear_p.multiple_results = True


def _impl(*operands, linear_map, n_residuals, lifetime=None):
    del lifetime
    operands = as_array_list(operands)
    return list(linear_map.forward(operands[:n_residuals], operands[n_residuals:]))


def _abstract_eval(*operands, linear_map, **params):
    del operands, params
    return list(linear_map.out_types)


def _jvp(primals, tangents, **params):
    linear_map, n = params["linear_map"], params["n_residuals"]
    bind, primals = ft.partial(linear_p.bind, **params), as_array_list(primals)
    out, t_out = bind(*primals), None
    if any(type(t) is not ad.Zero for t in tangents[n:]):
        t_out = bind(*primals[:n], *map(ad.instantiate_zeros, tangents[n:]))
    has_tangent = [type(t) is not ad.Zero for t in tangents[:n]]
    live = [i for i in flagged(has_tangent) if is_differentiable(primals[i])]
    if live:
        # The map itself moves with its residuals: the second-order part.
        of_live = restricted(ft.partial(_impl, **params), primals, live)
        _, moved = jax.jvp(of_live, at(primals, live), at(tangents, live))
        t_out = moved if t_out is None else [a + b for a, b in zip(t_out, moved, strict=True)]
    if t_out is None:
        t_out = [ad.Zero(t.to_tangent_aval()) for t in linear_map.out_types]
    return out, t_out


def _transpose(cts, *operands, linear_map, n_residuals, lifetime):
    del lifetime
    residuals, linear = list(operands[:n_residuals]), operands[n_residuals:]
    if any(map(ad.is_undefined_primal, residuals)):
        run = ft.partial(_impl, linear_map=linear_map, n_residuals=n_residuals)
        return transpose_of(run, operands, cts)
    # Called right here, not staged: JAX and XLA see through it, it can be differentiated
    # again, and it may be non-linear.
    cts = [None if type(ct) is ad.Zero else ct for ct in cts]
    cts = [ct if ct is None or isinstance(ct, jax.Array) else jnp.asarray(ct) for ct in cts]
    pairs = zip(linear_map.transpose(as_array_list(residuals), cts), linear, strict=True)
    ct_linear = [ct if ad.is_undefined_primal(x) else None for ct, x in pairs]
    return [None] * n_residuals + ct_linear


def transpose_of(
    run: Callable[..., Sequence[Any]], operands: Sequence[Any], cts: Sequence[Any]
) -> list[Any]:
    """A transpose rule for `run(*operands)`, which is linear in the unknown operands: JAX
    transposes what it does."""
    linear = flagged(map(ad.is_undefined_primal, operands))
    used = flagged(type(ct) is not ad.Zero for ct in cts)
    of_linear = restricted(lambda *xs: at(run(*xs), used), operands, linear)
    transpose = jax.linear_transpose(of_linear, *(operands[i].aval for i in linear))
    return fill([None] * len(operands), linear, transpose(at(cts, used)))


def vmap_over(axis_data: Any) -> Callable[..., Any]:
    """The `jax.vmap` for which JAX calls a batching rule with `axis_data`."""
    return ft.partial(
        jax.vmap,
        axis_size=axis_data.size,
        axis_name=axis_data.name,
        spmd_axis_name=axis_data.spmd_name,
    )


def with_batch_in_front(operands: Sequence[Any], dims: Sequence[int | None]) -> list[Any]:
    pairs = zip(operands, dims, strict=True)
    return [x if dim in (None, 0) else jnp.moveaxis(x, dim, 0) for x, dim in pairs]


def _batch(axis_data, operands, dims, *, linear_map, **params):
    if all(dim is None for dim in dims):
        out = linear_p.bind(*operands, linear_map=linear_map, **params)
        return out, [None] * len(out)
    axes, n = [None if dim is None else 0 for dim in dims], params["n_residuals"]
    of_batch = _vmap(linear_map, axis_data, axes[:n], axes[n:])
    operands = with_batch_in_front(operands, dims)
    out = linear_p.bind(*operands, linear_map=of_batch, **params)
    return out, [0] * len(out)


def _vmap(linear_map, axis_data, residual_axes, linear_axes):
    vmap = vmap_over(axis_data)

    def forward(residuals, tangents):
        one = lambda rs, ts: list(linear_map.forward(rs, ts))
        return vmap(one, (residual_axes, linear_axes))(residuals, tangents)

    def transpose(residuals, cts):
        one = lambda rs, cts: list(linear_map.transpose(rs, cts))
        ct_axes = [None if ct is None else 0 for ct in cts]
        ct_linear = vmap(one, (residual_axes, ct_axes))(residuals, cts)
        # An input that was not batched served every example: its cotangents add up.
        return [
            jnp.sum(ct, 0) if axis is None and ct is not None else ct
            for ct, axis in zip(ct_linear, linear_axes, strict=True)
        ]

    size, mesh_axis = axis_data.size, axis_data.explicit_mesh_axis
    out_types = [unmapped_aval(size, 0, t, mesh_axis) for t in linear_map.out_types]
    return LinearMap(linear_map.fn, forward, transpose, out_types)


def _structure(eqn) -> LinearCall:
    run = ft.partial(_impl, **eqn.params)
    program = lambda: trace(run, [v.aval for v in eqn.invars])
    return LinearCall(eqn.params["n_residuals"], program)


linear_p.def_impl(_impl)
linear_p.def_abstract_eval(_abstract_eval)
ad.primitive_jvps[linear_p] = _jvp
ad.primitive_transposes[linear_p] = _transpose
batching.fancy_primitive_batchers[linear_p] = _batch
mlir.register_lowering(linear_p, mlir.lower_fun(_impl, multiple_results=True))
register(linear_p.name, _structure)


class Side(NamedTuple):
    """One of the two maps.

    - `run(parameters, xs)` returns the arrays of the output, which have these `types`. JAX
        differentiates the function with respect to the parameters. The function holds no
        tracer, as JAX keeps it with the program.
    """

    name: str
    run: Callable[[list[Any], list[Any]], Sequence[Any]]
    types: Sequence[Any]


def apply_side(
    side: Side, transpose: Side, parameters: Sequence[Any], xs: Sequence[Any]
) -> list[Any]:
    """Apply `side`. JAX uses `transpose` where it transposes `side`, and `side` where it
    transposes `transpose`."""

    def pull_back(parameters, cts):
        pairs = zip(cts, side.types, strict=True)
        cts = [ad.zeros_like_aval(t) if ct is None else ct for ct, t in pairs]
        return apply_side(transpose, side, parameters, cts)

    linear_map = LinearMap(side.name, side.run, pull_back, side.types)
    return list(linear_call(linear_map, parameters, xs))
