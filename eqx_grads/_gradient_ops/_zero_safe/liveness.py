"""From which elements of a value a taken path leads to the result.

A mask is `True` (from all), `False` (from none), or an array of booleans. The masks of the
operands of an equation follow from those of its outputs and from what it selects.
"""

import functools as ft
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from ..._jaxprs.dependence import variables, without_unused
from ..._jaxprs.evaluate import bind, evaluate
from ..._jaxprs.plain_scan import lax_scan
from ..._jaxprs.primitives import ELEMENTWISE
from ..._jaxprs.structure import Call, CallWithRule, Checkpoint, Scan, structure
from ..._jaxprs.versions import equation_context
from .analysis import Analysis, AnalyzedEquation
from .ranges import CONSTANT, inexact_indices
from .static_masks import (
    at_moving,
    is_collective,
    PULLED_BACK,
    SELECTING,
    shows_nothing,
    static_carry,
)


Mask = bool | jax.Array

_ALONG_AXIS = ("cumlogsumexp", "cumprod")
# Functions of matrices, of which there may be a batch.
_OF_MATRICES = frozenset(
    """
    cholesky cholesky_update lu qr geqrf householder_product eigh eig svd schur triangular_solve
    hessenberg
    """.split()  # noqa: SIM905
)


def either(a: Mask, b: Mask) -> Mask:
    if a is True or b is True:
        return True
    if a is False:
        return b
    return a if b is False else a | b


def dense(mask: Mask, shape: Sequence[int]) -> jax.Array:
    return jnp.broadcast_to(jnp.asarray(mask), shape)


def raw_values(program: Any, values: Sequence[Any]) -> dict[Any, Any]:
    """The values of all variables of a program, which nobody differentiates."""
    env: dict[Any, Any] = dict(zip(program.jaxpr.constvars, program.consts, strict=True))
    env.update(zip(program.jaxpr.invars, values, strict=True))
    for eqn in program.eqns:
        if eqn.outvars:  # the others only have effects, which happen once
            env.update(zip(eqn.outvars, raw_outputs(eqn, read(env, eqn.invars)), strict=True))
    return env


def raw_outputs(eqn: Any, values: Sequence[Any]) -> list[Any]:
    with equation_context(eqn):
        return bind(eqn, [stopped(x) for x in values])


def stopped(x):
    return jax.lax.stop_gradient(x) if jnp.issubdtype(jnp.result_type(x), jnp.inexact) else x


def read(env: dict[Any, Any], atoms: Sequence[Any]) -> list[Any]:
    return [v.val if isinstance(v, Literal) else env[v] for v in atoms]


def masks_of_inputs(
    analysis: Analysis, values: Sequence[Any], outs: Sequence[Mask], wanted: Sequence[bool]
) -> list[Mask]:
    """The masks of the wanted inputs of a program; `False` for the others."""
    jaxpr = analysis.program.jaxpr
    env = raw_values(analysis.program, values)
    vs = {v for v, w in zip(jaxpr.invars, wanted, strict=True) if w}
    for eqn in jaxpr.eqns:
        if any(v in vs for v in variables(eqn.invars)):
            vs.update(eqn.outvars)
    masks = masks_of_variables(analysis, env, outs, vs)
    return [
        masks.get(v, False) if w else False for v, w in zip(jaxpr.invars, wanted, strict=True)
    ]


def masks_of_variables(
    analysis: Analysis,
    env: dict[Any, Any],
    outs: Sequence[Mask],
    wanted: Any,
    visit: Callable[[AnalyzedEquation, list[Mask], list[Mask]], None] | None = None,
) -> dict[Any, Mask]:
    """The masks of the wanted variables.

    - `env`: the values of all variables.
    - `wanted`: holds with a variable all that depend on it.
    - `visit`: called with each equation, last one first, that has a wanted output, the masks of
        its operands there, and those of its outputs.
    """
    masks: dict[Any, Mask] = {}

    def add(vs, given):
        for v, mask in zip(vs, given, strict=True):
            if not isinstance(v, Literal) and v in wanted:
                masks[v] = either(masks.get(v, False), mask)

    add(analysis.program.jaxpr.outvars, outs)
    for e in reversed(analysis.eqns):
        if any(v in wanted for v in e.eqn.outvars):
            given = [masks.get(v, False) for v in e.eqn.outvars]
            with equation_context(e.eqn):
                ins = transfer(e, read(env, e.eqn.invars), read(env, e.eqn.outvars), given)
            add(e.eqn.invars, ins)
            if visit is not None:
                visit(e, ins, given)
    return masks


def transfer(
    e: AnalyzedEquation, values: Sequence[Any], results: Sequence[Any], outs: Sequence[Mask]
) -> list[Mask]:
    """The masks of the operands of an equation, from its operands, outputs and their masks."""
    eqn, name = e.eqn, e.eqn.primitive.name
    inexact_outs = inexact_indices(eqn.outvars)
    if not inexact_outs or all(outs[i] is False for i in inexact_outs) or name in CONSTANT:
        return [False] * len(values)
    if e.is_entered:
        return _transfer_inner(e, values, outs)
    if is_collective(eqn):
        return [i in inexact_indices(eqn.invars) for i in range(len(values))]
    if e.has_rule:
        return _transfer_rule(e, values, outs)
    if e.known is None and name in ELEMENTWISE:
        (mask,) = (outs[i] for i in inexact_outs)
        return [
            _unbroadcast(both(mask, taken_by(name, values, i)), jnp.shape(x))
            if i in inexact_indices(eqn.invars)
            else False
            for i, x in enumerate(values)
        ]
    if all(outs[i] is True for i in inexact_outs) and name not in SELECTING:
        return [i in inexact_indices(eqn.invars) for i in range(len(values))]
    if name == "dot_general":
        return _transfer_dot(eqn, values, outs[0])
    if name in ("reduce_max", "reduce_min"):
        return [_transfer_extremum(eqn, values[0], results[0], outs[0])]
    if name in PULLED_BACK:
        return _pull_back(e, values, outs)
    return _transfer_opaque(e, values, outs)


def both(mask: Mask, taken: Mask) -> Mask:
    if mask is True or taken is False:
        return taken
    return mask if taken is True or mask is False else mask & taken


def taken_by(name: str, values: Sequence[Any], i: int) -> Mask:
    """Where an elementwise selection takes operand `i`. Both at a tie, and where it is NaN."""
    if name == "select_n":
        which = jnp.asarray(values[0])
        return which == (jnp.asarray(i - 1, which.dtype) if which.dtype != bool else i == 2)
    if name == "max":
        return ~(values[i] < values[1 - i])
    if name == "min":
        return ~(values[i] > values[1 - i])
    if name == "clamp":  # at a bound, JAX takes the bound
        low, x, high = values
        return (~(low < x), ~((x <= low) | (x >= high)), ~(high > x))[i]
    return True


def _unbroadcast(mask: Mask, shape: Sequence[int]) -> Mask:
    """The mask of an operand of an elementwise operation: it may be a scalar, or have axes of
    length one."""
    if isinstance(mask, bool) or mask.shape == tuple(shape):
        return mask
    if not shape:
        return jnp.any(mask)
    if mask.ndim < len(shape):  # the predicate of a selection may be a scalar
        return dense(mask, shape)
    axes = tuple(i for i, n in enumerate(shape) if n != mask.shape[i])
    return jnp.any(mask, axes, keepdims=True)


def _transfer_dot(eqn, values, mask) -> list[Mask]:
    (left_sum, right_sum), (left_batch, right_batch) = eqn.params["dimension_numbers"]
    left, right = (jnp.ndim(x) for x in values)
    n_batch = len(left_batch)
    n_left = left - n_batch - len(left_sum)
    n_right = right - n_batch - len(right_sum)
    free_left = tuple(range(n_batch, n_batch + n_left))
    free_right = tuple(range(n_batch + n_left, n_batch + n_left + n_right))

    def of_operand(x, batch, contracted, others):
        kept = jnp.any(mask, others)  # batch dimensions, then free ones
        free = [i for i in range(jnp.ndim(x)) if i not in (*batch, *contracted)]
        return (
            jax.lax.broadcast_in_dim(kept, jnp.shape(x), (*batch, *free))
            if _is_sorted((*batch, *free))
            else _place(kept, jnp.shape(x), (*batch, *free))
        )

    return [
        of_operand(values[0], left_batch, left_sum, free_right),
        of_operand(values[1], right_batch, right_sum, free_left),
    ]


def _is_sorted(dims):
    return tuple(sorted(dims)) == tuple(dims)


def _place(x, shape, dims):
    """`broadcast_in_dim` with dimensions in any order."""
    order = sorted(range(len(dims)), key=lambda i: dims[i])
    return jax.lax.broadcast_in_dim(jnp.transpose(x, order), shape, sorted(dims))


def _transfer_extremum(eqn, x, extremum, mask) -> Mask:
    """As `taken_by`. JAX divides by the number of elements that are equal to the extremum, and
    if that is NaN, by zero."""
    axes = eqn.params["axes"]
    extremum, mask = (jnp.expand_dims(y, axes) for y in (extremum, dense(mask, extremum.shape)))
    return mask & ~(x < extremum if eqn.primitive.name == "reduce_max" else x > extremum)


def _pull_back(e, values, outs) -> list[Mask]:
    eqn = e.eqn
    moving = inexact_indices(eqn.invars)
    inexact_outs = inexact_indices(eqn.outvars)
    is_product = eqn.primitive.name == "conv_general_dilated"
    masks: list[Mask] = [False] * len(values)
    for part in [[i] for i in moving] if is_product else [moving]:
        full = [jnp.ones_like(x) for x in values] if is_product else list(values)

        def of_moving(*xs, full=full, part=part):
            operands = list(full)
            for i, x in zip(part, xs, strict=True):
                operands[i] = x
            out = bind(eqn, operands)
            return [out[i] for i in inexact_outs]

        out, pull = jax.vjp(of_moving, *(jnp.asarray(full[i]) for i in part))
        cts = [
            dense(outs[i], y.shape).astype(y.dtype)
            for i, y in zip(inexact_outs, out, strict=True)
        ]
        for i, ct in zip(part, pull(cts), strict=True):
            masks[i] = ct != 0
    return masks


def _transfer_opaque(e, values, outs) -> list[Mask]:
    """Each element of an output may depend on all elements of the operands: of the same matrix,
    or along the same axis."""
    eqn = e.eqn
    given = [dense(outs[i], eqn.outvars[i].aval.shape) for i in inexact_indices(eqn.outvars)]
    moving = inexact_indices(eqn.invars)
    name = eqn.primitive.name
    if name in _ALONG_AXIS:
        some = jnp.any(given[0], eqn.params["axis"], keepdims=True)
        return [jnp.broadcast_to(some, given[0].shape)]
    if name == "reduce_prod":
        some = jnp.expand_dims(given[0], eqn.params["axes"])
        return [jnp.broadcast_to(some, jnp.shape(values[0]))]
    n_batch = matrices_in_batch(eqn)
    some = [jnp.any(m, tuple(range(n_batch, m.ndim))) for m in given]
    some = ft.reduce(jnp.logical_or, some)
    return [
        jax.lax.broadcast_in_dim(some, jnp.shape(x), range(n_batch)) if i in moving else False
        for i, x in enumerate(values)
    ]


def matrices_in_batch(eqn: Any) -> int:
    """The number of batch dimensions of all operands and outputs of a function of matrices, and
    zero for other primitives."""
    if eqn.primitive.name not in _OF_MATRICES:
        return 0
    shapes = [v.aval.shape for v in (*eqn.invars, *eqn.outvars)]
    n_batch = len(shapes[0]) - 2
    return n_batch if all(shape[:n_batch] == shapes[0][:n_batch] for shape in shapes) else 0


def _transfer_rule(e, values, outs) -> list[Mask]:
    """What the tangents of a rule depend on is what it takes. A backward rule does not show
    that, but it may be elementwise."""
    eqn, tangents = e.eqn, e.tangent_map
    given = [outs[i] for i in inexact_indices(eqn.outvars)]
    moving = e.moving
    if tangents is not None and not shows_nothing(tangents):
        zeros = [jnp.zeros_like(values[i]) for i in moving]
        wanted = [False] * len(values) + [True] * len(moving)
        masks = masks_of_inputs(tangents, [*values, *zeros], given, wanted)
        return at_moving(e, masks[len(values) :])
    if any(mask is True for mask in given):
        return at_moving(e, [True] * len(moving))
    if _is_elementwise_rule(e):
        mask = ft.reduce(either, given)
        return at_moving(e, [mask] * len(moving))
    return _transfer_opaque(e, values, outs)


def _is_elementwise_rule(e: AnalyzedEquation) -> bool:
    """Whether each element of the cotangents that a rule returns depends on the elements at the
    same place only."""
    eqn = e.eqn
    moving, outs = e.moving, inexact_indices(eqn.outvars)
    shapes = {eqn.invars[i].aval.shape for i in moving}
    shapes.update(eqn.outvars[i].aval.shape for i in outs)
    if len(shapes) != 1:
        return False

    def cotangents(values, cts):
        def of_moving(*xs):
            full = list(values)
            for i, x in zip(moving, xs, strict=True):
                full[i] = x
            out = bind(eqn, full)
            return [out[i] for i in outs]

        return jax.vjp(of_moving, *(values[i] for i in moving))[1](cts)

    types = [v.aval for v in eqn.invars]
    try:
        program = jax.make_jaxpr(cotangents)(types, [eqn.outvars[i].aval for i in outs])
    except Exception:
        # The rule has not been asked for: what it raises is for the one who differentiates.
        return False
    return _is_elementwise(without_unused(program), shapes.pop())


def _is_elementwise(program, shape) -> bool:
    return all(_is_elementwise_equation(eqn, shape) for eqn in program.eqns)


def _is_elementwise_equation(eqn, shape) -> bool:
    name, known = eqn.primitive.name, structure(eqn)
    if isinstance(known, Call | CallWithRule | Checkpoint):
        return _is_elementwise(*known.programs, shape)
    if name == "broadcast_in_dim":
        return not eqn.invars[0].aval.shape or eqn.invars[0].aval.shape == shape
    return name in ELEMENTWISE and all(v.aval.shape in (shape, ()) for v in eqn.outvars)


def _transfer_inner(e, values, outs) -> list[Mask]:
    eqn, moving = e.eqn, set(inexact_indices(e.eqn.invars))
    match e.known:
        case Call() | Checkpoint():
            wanted = [i in moving for i in range(len(values))]
            return masks_of_inputs(e.inner[0], values, outs, wanted)
        case Scan():
            return scan_masks(e, values, outs)[0]
    wanted = [i in moving for i in range(1, len(values))]

    def branch(analysis):
        def run(values):
            masks = masks_of_inputs(analysis, values, outs, wanted)
            return [
                dense(mask, jnp.shape(x))
                for mask, x, w in zip(masks, values, wanted, strict=True)
                if w
            ]

        return run

    branches = [branch(analysis) for analysis in e.inner]
    masks = jax.lax.switch(values[0], branches, [stopped(x) for x in values[1:]])
    result: list[Mask] = [False] * len(values)
    for i, mask in zip(inexact_indices(eqn.invars), masks, strict=True):
        result[i] = mask
    return result


def scan_masks(
    e: AnalyzedEquation, values: Sequence[Any], outs: Sequence[Mask]
) -> tuple[list[Mask], list[Any]]:
    """The masks of the operands of a scan; and of the carry after each step, those that are
    arrays with a leading axis of time."""
    scan, body = e.known, e.inner[0]
    assert isinstance(scan, Scan)
    n, m = scan.n_consts, scan.n_consts + scan.n_carry
    values = [stopped(x) for x in values]
    consts, init, xs = values[:n], values[n:m], values[m:]
    static = static_carry(e, [x if isinstance(x, bool) else None for x in outs])
    types = [v.aval for v in body.program.jaxpr.invars]
    moving = inexact_indices(body.program.jaxpr.invars)

    def record(carry, x):
        out = evaluate(body.program, [*consts, *carry, *x])
        return out[: scan.n_carry], carry

    scanned = ft.partial(lax_scan, length=scan.length)
    _, carries = scanned(record, init, xs, reverse=scan.reverse)
    wanted = [i in moving for i in range(len(types))]
    per_step = {i: y for i, y in enumerate(outs[scan.n_carry :]) if not isinstance(y, bool)}

    def step(state, inputs):
        of_consts, of_carry = state
        carry, x, of_ys = inputs
        given = [of_carry.get(i, s) for i, s in enumerate(static)]
        given += [of_ys.get(i, y) for i, y in enumerate(outs[scan.n_carry :])]
        masks = masks_of_inputs(body, [*consts, *carry, *x], given, wanted)
        masks = [
            dense(mask, t.shape) if i in moving else False
            for i, (mask, t) in enumerate(zip(masks, types, strict=True))
        ]
        of_consts = {i: old | masks[i] for i, old in of_consts.items()}
        before = {i: masks[n + i] for i in of_carry}
        of_xs = {i: masks[i] for i in moving if i >= m}
        return (of_consts, before), (of_carry, of_xs)

    is_open = lambda i: static[i] is None and n + i in moving
    first = {i: dense(outs[i], types[n + i].shape) for i in range(scan.n_carry) if is_open(i)}
    nothing = {i: jnp.zeros(types[i].shape, bool) for i in moving if i < n}
    (of_consts, of_init), (after, of_xs) = scanned(
        step, (nothing, first), (carries, xs, per_step), reverse=not scan.reverse
    )
    masks: list[Mask] = [False] * len(values)
    for i in moving:
        if n <= i < m:
            masks[i] = of_init.get(i - n, bool(static[i - n]))
        else:
            masks[i] = of_consts[i] if i < n else of_xs[i]
    return masks, [after.get(i, bool(s)) for i, s in enumerate(static)]
