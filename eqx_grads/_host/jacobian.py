"""The Jacobian of host code, column by column: by finite differences, or by one call of a rule
for each basis vector. JAX computes its products with tangents and cotangents."""

import functools as ft
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._errors import rule_error
from .._jaxprs.varying import vary_alike, varying_types
from .host_op import HostOp, inexact, is_complex, is_inexact, read_only, Types


# The columns of a linear map are its values at the basis vectors: 1 for each element of each
# input, and then 1j, if it is complex. There is one array of shape `(columns, *out.shape)` for
# each output.


def n_columns(types: Types) -> int:
    return sum((1 + is_complex(t)) * t.size for t in types)


def product(
    columns: Sequence[jax.Array], out_types: Types, ts: Sequence[jax.Array]
) -> list[jax.Array]:
    """The linear map with these columns, applied to `ts`."""

    def of_output(columns, t_out):
        parts = [p for t in ts for p in ((t.real, t.imag) if is_complex(t) else (t,))]
        flat = [part.astype(t_out.dtype).reshape(-1) for part in parts]
        weights = jnp.concatenate([*flat, jnp.zeros(0, t_out.dtype)])
        return jnp.tensordot(weights, columns, 1, precision=jax.lax.Precision.HIGHEST)

    return [of_output(c, t) for c, t in zip(columns, out_types, strict=True)]


def transposed_product(
    columns: Sequence[jax.Array], in_types: Types, out_types: Types, cts: Sequence[jax.Array]
) -> list[jax.Array]:
    """The transpose of `product`. The pairing of JAX is the real part of `sum(ct * t)`, without
    a conjugate, even for complex numbers."""
    types = varying_types(in_types, columns, cts)
    of_tangents = ft.partial(product, columns, out_types)
    (ct_in,) = jax.linear_transpose(of_tangents, types)(vary_alike(cts, types))
    return ct_in


def basis_op(op: HostOp, types: Types) -> HostOp:
    """The columns of a rule, which is linear in its last inputs: these have `types`."""
    in_types = op.in_types[: len(op.in_types) - len(types)]
    return _columns_op(run_basis, op, (op, types), in_types, types, op.out_types)


def difference_op(op: HostOp, live: tuple[int, ...], steps: tuple[Any, ...]) -> HostOp:
    """The derivatives of the inexact outputs of `op` with respect to its inputs `live`, by
    central differences with these relative steps; `None`: by complex steps."""
    sources = tuple(op.in_types[i] for i in live)
    parts = (op, live, steps)
    return _columns_op(run_differences, op, parts, op.in_types, sources, inexact(op.out_types))


def n_differences(op: HostOp) -> int:
    """How many central differences `op` takes of each other."""
    if op.run is not run_differences:
        return 0
    inner, _, steps = op.parts
    return (steps[0] is not None) + n_differences(inner)


def _columns_op(run, op, parts, in_types, sources, targets):
    n = n_columns(sources)
    types = tuple(jax.ShapeDtypeStruct((n, *t.shape), t.dtype) for t in targets)
    path = lambda i: f"array number {i} of the Jacobian"
    return HostOp(run, op.call, parts, op.source, in_types, types, path)


def _stacked(op, columns, leaves) -> list[np.ndarray]:
    batch = op.batch(leaves)
    if not columns:
        return [np.zeros(batch + t.shape, t.dtype) for t in op.out_types]
    return [np.stack(stack, len(batch)) for stack in zip(*columns, strict=True)]


def run_basis(op, leaves):
    inner, types = op.parts
    vectors = _basis(op.batch(leaves), types)
    return _stacked(op, [inner.outputs([*leaves, *vector]) for vector in vectors], leaves)


def _basis(batch, types) -> Iterator[list[np.ndarray]]:
    zeros = [read_only(np.zeros(batch + t.shape, t.dtype)) for t in types]
    for i, t in enumerate(types):
        for direction in (1, 1j) if is_complex(t) else (1,):
            for row in np.eye(t.size, dtype=t.dtype) * direction:
                vector = np.broadcast_to(row.reshape(t.shape), batch + t.shape).copy()
                yield [*zeros[:i], read_only(vector), *zeros[i + 1 :]]


def run_differences(op, leaves):
    inner, live, steps = op.parts
    columns = []
    for i, step in zip(live, steps, strict=True):
        columns += _differences(inner, leaves, i, step)
    return _stacked(op, columns, leaves)


def _differences(op: HostOp, leaves, i: int, step: float | None) -> list[list[Any]]:
    r"""The derivatives of the outputs with respect to each element of `leaves[i]`.

    Central differences: an element $x$ is moved by $\pm h$ with
    $h = \mathrm{step} \cdot \max(|x|, 1)$, in all members of a batch at once. The differences
    are divided by how far the element really moved, which rounding decides. A complex leaf is
    moved along the real axis, and then along the imaginary one.

    Complex steps: $\mathrm{Im} f(x + \mathrm{i} h) / h$ with a tiny $h$. Nothing cancels in it,
    so it is right to rounding, if the function is analytic.
    """
    x, is_batched = leaves[i], np.ndim(leaves[i]) - len(op.in_types[i].shape)
    flat = x.reshape(*x.shape[:is_batched], -1)

    def outputs(k, h):
        """At an element moved by `h`; and this element."""
        moved = np.array(flat, h.dtype)
        moved[..., k] += h
        element = moved[..., k].copy()
        there = [*leaves[:i], read_only(moved.reshape(x.shape)), *leaves[i + 1 :]]
        try:
            out = zip(op.outputs(there), op.out_types, strict=True)
        except Exception as error:
            # The exception may be any mistake, so that it is not turned into NaN.
            if op.run is not run_differences:  # which says so
                error.add_note(
                    f"`{op.name}` was called for a finite difference, with an argument that "
                    "was moved by a step. If that is outside of its domain, give a smaller "
                    "`step` or a rule, or return NaN there."
                )
            raise
        wide = lambda y: y.astype(np.result_type(y.dtype, np.float64))
        return element, [wide(y) for y, t in out if is_inexact(t)]

    def central(k, direction):
        h = step * np.maximum(np.abs(flat[..., k]), 1) * direction
        h = np.asarray(h).astype(x.dtype)
        above, up = outputs(k, h)
        below, down = outputs(k, -h)
        distance = np.abs(above - below)
        # The axes of the batch are in front.
        fit = lambda y: distance.reshape(distance.shape + (1,) * (y.ndim - distance.ndim))
        return [(a - b) / fit(a) for a, b in zip(up, down, strict=True)]

    def complex_step(k, _):
        # Far below the resolution of the dtype, and far above the smallest number.
        h = float(jnp.finfo(x.dtype).tiny) ** 0.5  # NumPy does not know bfloat16
        _, out = outputs(k, np.asarray(1j * h))
        if not all(map(np.iscomplexobj, out)):
            raise rule_error(
                f"`{op.name}` returned a real array for a complex argument.",
                op.place,
                do="`finite_difference='complex'` is for functions that compute with "
                "complex numbers throughout. Use `'central'`.",
            )
        return [np.imag(y) / h for y in out]

    column = complex_step if step is None else central
    directions = (1.0, 1.0j) if np.iscomplexobj(x) else (1.0,)
    return [column(k, d) for d in directions for k in range(flat.shape[-1])]
