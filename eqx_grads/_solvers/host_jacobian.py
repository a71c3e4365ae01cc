"""The Jacobian of a host function, by finite differences or by one call of a rule for each
basis vector, and its products with tangents and cotangents, which JAX computes."""

import abc
import dataclasses
import functools as ft
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from .._errors import rule_error
from .._jaxprs.varying import vary_alike, varying_types
from .finite_difference import central_differences, complex_steps, NotComplex
from .host_callback import AbstractHostOp, batch_shape, own_outputs, read_only
from .host_ops import is_complex, is_inexact, Types
from .host_rule_ops import CotangentOp, TangentOp


def contract(
    jacobian: Sequence[jax.Array], in_types: Types, out_types: Types, ts: Sequence[jax.Array]
) -> list[jax.Array]:
    """The tangents of the outputs, from those of the inputs.

    `jacobian` has one array of shape `out.shape + in.shape` for each pair, outputs first. For a
    complex input it has two: the derivatives along the real and the imaginary axis.
    """
    blocks = iter(jacobian)
    outs = []
    for t_out in out_types:
        total = jnp.zeros(t_out.shape, t_out.dtype)
        for t_in, t in zip(in_types, ts, strict=True):
            for part in (t.real, t.imag) if is_complex(t_in) else (t,):
                product = jnp.tensordot(
                    next(blocks),
                    part.astype(t_out.dtype),
                    axes=len(t_in.shape),
                    precision=jax.lax.Precision.HIGHEST,
                )
                total = total + product
        outs.append(total)
    return outs


def contract_transpose(
    jacobian: Sequence[jax.Array], in_types: Types, out_types: Types, cts: Sequence[jax.Array]
) -> list[jax.Array]:
    """The cotangents of the inputs, from those of the outputs."""
    forward = ft.partial(contract, jacobian, in_types, out_types)
    # The pairing of JAX is `sum(ct * t)`, without a conjugate, also for complex numbers.
    types = varying_types(in_types, jacobian, cts)
    (ct_in,) = jax.linear_transpose(forward, types)(vary_alike(cts, types))
    return ct_in


@dataclasses.dataclass(frozen=True)
class _AbstractJacobianOp(AbstractHostOp):
    """The derivatives of the inexact outputs of `op` with respect to its inputs `live`."""

    op: AbstractHostOp
    live: tuple[int, ...]

    @property
    def call(self):
        return self.op.call

    @property
    def name(self):
        return self.op.name

    @property
    def place(self):
        return self.op.place

    @property
    def vmap_method(self):
        return self.op.vmap_method

    @property
    @abc.abstractmethod
    def sources(self) -> Types:
        """The types of the inputs that the derivatives are with respect to."""

    @property
    @abc.abstractmethod
    def targets(self) -> Types:
        """The types of the outputs that have derivatives."""

    @ft.cached_property
    def out_types(self):
        return tuple(
            jax.ShapeDtypeStruct(t.shape + s.shape, t.dtype)
            for t in self.targets
            for s in self.sources
            for _ in range(1 + is_complex(s))
        )

    def out_path(self, i):
        return f"array number {i} of the Jacobian"

    def blocks(self, columns, batch) -> list[np.ndarray]:
        """The arrays, from the derivatives `columns[source][element][target]`."""
        blocks = []
        for j, t in enumerate(self.targets):
            for s, of_source in zip(self.sources, columns, strict=True):
                n = int(np.prod(s.shape, dtype=int))
                for start in range(0, n * (1 + is_complex(s)), n) if n else [0]:
                    block = [
                        np.broadcast_to(column[j], batch + t.shape)
                        for column in of_source[start : start + n]
                    ]
                    if not block:
                        blocks.append(np.zeros(batch + t.shape + s.shape, t.dtype))
                        continue
                    blocks.append(np.stack(block, -1).reshape(batch + t.shape + s.shape))
        return blocks


# The exception may be any mistake, so that it is not turned into NaN.
_AT_MOVED = (
    "`{name}` was called for a finite difference, with an argument that was moved by a step. "
    "If that is outside of its domain, give a smaller `step` or a rule, or return NaN there."
)


@dataclasses.dataclass(frozen=True)
class DifferenceOp(_AbstractJacobianOp):
    """By finite differences of `op` as a function of its inputs `live`.

    `steps` are relative, one for each of `live`; `None`: complex steps.
    """

    steps: tuple[float | None, ...]

    @ft.cached_property
    def in_types(self):
        return self.op.in_types

    @property
    def sources(self):
        return tuple(self.op.in_types[i] for i in self.live)

    @property
    def targets(self):
        return tuple(t for t in self.op.out_types if is_inexact(t))

    def run(self, leaves):
        batch = batch_shape(self, leaves)
        columns = []
        for i, source, step in zip(self.live, self.sources, self.steps, strict=True):
            rank = len(source.shape)
            try:
                if step is None:
                    columns.append(complex_steps(self._outputs, leaves, i, rank))
                else:
                    columns.append(central_differences(self._outputs, leaves, i, rank, step))
            except NotComplex:
                raise rule_error(
                    f"`{self.name}` returned a real array for a complex argument.",
                    self.place,
                    do="`finite_difference='complex'` is for functions that compute with "
                    "complex numbers throughout. Use `'central'`.",
                ) from None
            except Exception as error:
                if not isinstance(self.op, DifferenceOp):  # which says so
                    error.add_note(_AT_MOVED.format(name=self.name))
                raise
        return self.blocks(columns, batch)

    def _outputs(self, leaves):
        out = zip(own_outputs(self.op, leaves), self.op.out_types, strict=True)
        return [x for x, t in out if is_inexact(t)]


@dataclasses.dataclass(frozen=True)
class ForwardBasisOp(_AbstractJacobianOp):
    """By one call of the user's forward rule for each element of the inputs `live`."""

    op: TangentOp

    @ft.cached_property
    def in_types(self):
        return self.op.call.in_types

    @property
    def sources(self):
        return tuple(self.op.call.in_types[i] for i in self.live)

    @property
    def targets(self):
        return self.op.out_types

    def run(self, leaves):
        batch = batch_shape(self, leaves)
        columns = [
            [own_outputs(self.op, [*leaves, *ts]) for ts in _basis(batch, self.sources, k)]
            for k in range(len(self.sources))
        ]
        return self.blocks(columns, batch)


@dataclasses.dataclass(frozen=True)
class ReverseBasisOp(_AbstractJacobianOp):
    """By one call of the user's backward rule for each element of the outputs."""

    op: CotangentOp

    @ft.cached_property
    def in_types(self):
        return self.op.in_types[: len(self.op.in_types) - len(self.targets)]

    @property
    def sources(self):
        return self.op.out_types

    @property
    def targets(self):
        call = self.op.call
        return tuple(call.out_types[i] for i in call.out_inexact)

    def run(self, leaves):
        batch = batch_shape(self, leaves)
        blocks = []
        for j, target in enumerate(self.targets):
            bases = _basis(batch, self.targets, j)
            rows = [own_outputs(self.op, [*leaves, *cts]) for cts in bases]
            for s, source in enumerate(self.sources):
                shape = batch + target.shape + source.shape
                stack = [row[s] for row in rows]
                axis = len(batch)
                if not stack:
                    stack = np.zeros((0,), target.dtype)
                    blocks.extend([np.zeros(shape, target.dtype)] * (1 + is_complex(source)))
                    continue
                block = _from_cotangents(
                    np.stack(stack, axis), axis, is_complex(target), is_complex(source)
                )
                blocks.extend(part.reshape(shape) for part in block)
        return blocks


def _basis(batch, types, i):
    """Lists of arrays of these types, of zeros but for one element of array number `i`. That is
    1 (and then `1j`, if the array is complex)."""
    t = types[i]
    size = int(np.prod(t.shape, dtype=int))
    arrays = [read_only(np.zeros(batch + t.shape, t.dtype)) for t in types]
    for direction in (1, 1j) if is_complex(t) else (1,):
        for k in range(size):
            basis = np.zeros((*batch, size), t.dtype)
            basis[..., k] = direction
            arrays[i] = read_only(basis.reshape(batch + t.shape))
            yield arrays


def _from_cotangents(rows, axis, complex_target, complex_source):
    r"""The derivatives along the real and the imaginary axis, from the cotangents.

    JAX's cotangent $\bar x$ of $\bar y$ is defined by $\mathrm{Re}(\bar x\,\dot x) =
    \mathrm{Re}(\bar y\,\dot y)$. So with $\bar y = 1$ one has $\mathrm{Re}\,\dot y$, and with
    $\bar y = \mathrm{i}$ one has $-\mathrm{Im}\,\dot y$.
    """
    if complex_target:
        of_one, of_i = np.split(rows, 2, axis)
    else:
        of_one, of_i = rows, None

    def derivative(along):
        real = (of_one * along).real
        return real if of_i is None else real - 1j * (of_i * along).real

    return [derivative(1), derivative(1j)] if complex_source else [derivative(1)]
