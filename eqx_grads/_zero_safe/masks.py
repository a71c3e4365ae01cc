"""From which elements of a value a taken path leads to the result.

A mask is `True` (all elements), `False` (none), or an array of booleans. An element is in the
mask of a value if a taken path leads from it to the result. Masks go backward through a
program, as cotangents do: an equation relates elements of its outputs to elements of its
operands.

Without the values, masks say what is known without running anything. There, a mask that would
be an array is `None`.
"""

import contextlib
import functools as ft
import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from .._jaxprs.dependence import depends
from .._jaxprs.diagonal import is_elementwise
from .._jaxprs.evaluate import bind, equation_context, evaluate, function_of, values_of_inputs
from .._jaxprs.interpret import fixed_point
from .._jaxprs.operands import at, fill
from .._jaxprs.primitives import kind_of
from .._jaxprs.structure import Call, Checkpoint, Scan
from .._jaxprs.symbolic_sizes import as_length
from .._jaxprs.varying import cast_to, vary_alike
from .analysis import Analysis, AnalyzedEquation
from .ranges import decided_case, is_inexact


Mask: TypeAlias = Any  # `True`, `False`, an array of booleans, or `None`
Values: TypeAlias = Any  # a list for some variables, or `None` if nothing is computed


def either(*masks: Mask) -> Mask:
    if any(mask is True for mask in masks):
        return True
    arrays = [mask for mask in masks if mask is not False]
    if any(mask is None for mask in arrays):
        return None
    return ft.reduce(operator.or_, arrays) if arrays else False


def both(a: Mask, b: Mask) -> Mask:
    if a is True or b is False:
        return b
    return a if b is True or a is False else a & b


def dense(mask: Mask, shape: Sequence[int]) -> jax.Array:
    return jnp.broadcast_to(jnp.asarray(mask), shape)


def of_type(t: Any, mask: Mask) -> jax.Array:
    """A mask as an array that has the shape of a type, and is on the devices as its values."""
    return cast_to(dense(mask, t.shape), t)


def stopped(x: Any) -> Any:
    return jax.lax.stop_gradient(x) if jnp.issubdtype(jnp.result_type(x), jnp.inexact) else x


def read(env: dict[Any, Any], atoms: Sequence[Any]) -> list[Any]:
    return [v.val if isinstance(v, Literal) else env[v] for v in atoms]


def raw_outputs(eqn: Any, values: Sequence[Any]) -> list[Any]:
    with equation_context(eqn):
        return bind(eqn, [stopped(x) for x in values])


# ---------------------------------------------------------------- programs


def masks_of_inputs(analysis: Analysis, values: Values, outs: Sequence[Mask]) -> list[Mask]:
    """The masks of the inputs of a program; `False` for those without a derivative."""
    inputs = analysis.program.jaxpr.invars
    pairs = zip(inputs, analysis.ins, strict=True)
    wanted = [r.active and is_inexact(v.aval) for v, r in pairs]
    env = None if values is None else _raw_values(analysis, values)
    dependent = depends(analysis.program, wanted)
    eqns = [e for e in analysis.eqns if any(v in dependent for v in e.eqn.outvars)]
    masks = backward(analysis, env, outs, eqns)
    return [masks.get(v, False) if w else False for v, w in zip(inputs, wanted, strict=True)]


def backward(
    analysis: Analysis,
    env: dict[Any, Any] | None,
    outs: Sequence[Mask],
    eqns: Sequence[AnalyzedEquation],
    visit: Callable[[AnalyzedEquation, list[Mask], list[Mask]], None] = lambda *_: None,
) -> dict[Any, Mask]:
    """The masks of the variables that these equations use, given the masks of the outputs.

    - `env`: the values of all variables.
    - `visit`: called with each equation, last one first, the masks of its operands there, and
        the masks of its outputs.
    """
    masks: dict[Any, Mask] = {}

    def add(vs, found):
        for v, mask in zip(vs, found, strict=True):
            if not isinstance(v, Literal):
                masks[v] = either(masks.get(v, False), mask)

    add(analysis.program.jaxpr.outvars, outs)
    for e in reversed(eqns):
        given = [masks.get(v, False) for v in e.eqn.outvars]
        ends = (e.eqn.invars, e.eqn.outvars)
        values, results = (None, None) if env is None else (read(env, vs) for vs in ends)
        ins = transfer(e, values, results, given)
        add(e.eqn.invars, ins)
        visit(e, ins, given)
    return masks


def _raw_values(analysis: Analysis, values: Sequence[Any]) -> dict[Any, Any]:
    """The values of all variables of a program, which nobody differentiates."""
    program = analysis.program
    env = values_of_inputs(program, values)
    for eqn in program.eqns:
        if eqn.outvars:  # the others only have effects, which happen once
            env.update(zip(eqn.outvars, raw_outputs(eqn, read(env, eqn.invars)), strict=True))
    return env


# ---------------------------------------------------------------- equations


def transfer(
    e: AnalyzedEquation, values: Values, results: Values, masks: Sequence[Mask]
) -> list[Mask]:
    """The masks of the operands of an equation from the masks of its outputs.

    - `values`, `results`: its operands and outputs.
    """
    kind, target = kind_of(e.eqn), e.inexact_ins
    given, nothing = at(masks, e.inexact_outs), [False] * len(e.eqn.invars)
    if not target or all(m is False for m in given) or kind.derivative == "zero":
        return nothing
    with contextlib.nullcontext() if values is None else equation_context(e.eqn):
        if e.is_entered:
            return _inner(e, values, masks)
        if _is_collective(e.eqn):
            found: Sequence[Mask] = [True] * len(target)
        elif e.has_rule:
            return _rule(e, values, given)
        elif e.name == "select_n" and (case := decided_case(e.eqn, e.ins)) is not None:
            found = [i == case and given[0] for i in target]
        elif all(m is True for m in given) and not kind.selects:
            found = [True] * len(target)
        elif values is None:
            is_opaque = not (kind.selects or kind.elementwise or kind.sums)
            found = [(is_opaque and True in given) or None] * len(target)
        elif kind.elementwise:
            taken = lambda i: both(masks[0], taken_by(e.name, values, i))
            found = [_unbroadcast(taken(i), jnp.shape(values[i])) for i in target]
        elif e.name == "dot_general":
            found = _dot(e.eqn, masks[0])
        elif e.name in ("reduce_max", "reduce_min"):
            found = [_extremum(e, values[0], results[0], masks[0])]
        elif kind.sums:
            found = _sums(e, values, given)
        else:
            found = _opaque(e, given, target)
    return fill(nothing, target, found)


def _is_collective(eqn: Any) -> bool:
    """Whether an equation works across a named axis. An element that no selection takes on this
    device may be taken on another."""
    axes = eqn.params.get("axes", ())
    return "axis_name" in eqn.params or any(
        not isinstance(axis, int | np.integer) for axis in axes
    )


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


def _dot(eqn, mask) -> list[Mask]:
    """A product of matrices takes each element of a row, and each of a column."""
    contracted, batch = eqn.params["dimension_numbers"]
    shapes, n_batch = [v.aval.shape for v in eqn.invars], len(batch[0])
    free = [
        [i for i in range(len(shapes[k])) if i not in (*batch[k], *contracted[k])]
        for k in (0, 1)
    ]
    first = n_batch + len(free[0])
    others = range(first, first + len(free[1])), range(n_batch, first)
    found = []
    for k in [k for k in (0, 1) if is_inexact(eqn.invars[k].aval)]:
        axes = [*batch[k], *free[k]]  # those of the operand that the output has
        kept = jnp.any(mask, tuple(others[k]))
        kept = jnp.transpose(kept, sorted(range(len(axes)), key=axes.__getitem__))
        found.append(jax.lax.broadcast_in_dim(kept, shapes[k], sorted(axes)))
    return found


def _extremum(e, x, extremum, mask) -> Mask:
    """As `taken_by`. JAX divides by the number of elements that are equal to the extremum, and
    if that is NaN, by zero."""
    axes = e.eqn.params["axes"]
    extremum = jnp.expand_dims(extremum, axes)
    taken = ~(x < extremum if e.name == "reduce_max" else x > extremum)
    return taken & jnp.expand_dims(dense(mask, e.eqn.outvars[0].aval.shape), axes)


def _sums(e, values, given) -> list[Mask]:
    """Sums of elements that are taken: no derivative is negative. A product takes each term
    with either factor, whatever the other factor is, as if they were all one."""
    is_product = kind_of(e.eqn).linear == "each" or kind_of(e.eqn).along == "axis"
    full = [jnp.ones_like(x) if is_product else jnp.asarray(x) for x in values]
    full = vary_alike(full, values)  # the type of ones does not say that they vary
    cts: list[Any] = []
    for part in [[i] for i in e.inexact_ins] if is_product else [e.inexact_ins]:
        function = function_of(e.eqn, full, part, e.inexact_outs)
        outs, pull = jax.vjp(function, *at(full, part))
        pairs = zip(outs, given, strict=True)
        cts += pull([of_type(jax.typeof(x), m).astype(x.dtype) for x, m in pairs])
    return [ct != 0 for ct in cts]


def _opaque(e, given, target) -> list[Mask]:
    """Each element of an output may depend on all elements of the operands, or of the same
    matrix."""
    if any(mask is True for mask in given):
        return [True] * len(target)
    outs, ins = at(e.eqn.outvars, e.inexact_outs), at(e.eqn.invars, target)
    given = [dense(mask, v.aval.shape) for mask, v in zip(given, outs, strict=True)]
    n_batch = _n_matrix_axes(e.eqn) if kind_of(e.eqn).along == "matrices" else 0
    some = either(*(jnp.any(mask, tuple(range(n_batch, mask.ndim))) for mask in given))
    return [jax.lax.broadcast_in_dim(some, v.aval.shape, range(n_batch)) for v in ins]


def _n_matrix_axes(eqn: Any) -> int:
    """The number of batch axes that all operands and outputs of a function of matrices have."""
    shapes = [v.aval.shape for v in (*eqn.invars, *eqn.outvars)]
    n_batch = len(shapes[0]) - 2
    return n_batch if all(shape[:n_batch] == shapes[0][:n_batch] for shape in shapes) else 0


def _rule(e, values, given) -> list[Mask]:
    """A rule takes the values that its tangents depend on. A backward rule does not show them,
    but it may be elementwise."""
    n, is_taken = len(e.eqn.invars), any(mask is True for mask in given)
    if e.tangent_map is not None:
        primals = None
        if values is not None:
            primals = [*values, *(jnp.zeros_like(values[i]) for i in e.moving)]
        found = masks_of_inputs(e.tangent_map, primals, given)[n:]
    elif values is None:
        found = [is_taken or None] * len(e.moving)
    elif not is_taken and _is_elementwise_rule(e):
        found = [either(*given)] * len(e.moving)
    else:
        found = _opaque(e, given, e.moving)
    return fill([False] * n, e.moving, found)


def _is_elementwise_rule(e: AnalyzedEquation) -> bool:
    """Whether each element of the cotangents that a rule returns depends on the elements at the
    same place only."""
    types = [v.aval for v in e.eqn.invars]
    out_types = [e.eqn.outvars[i].aval for i in e.inexact_outs]
    shapes = {t.shape for t in (*out_types, *(types[i] for i in e.moving))}

    def cotangents(values, cts):
        function = function_of(e.eqn, values, e.moving, e.inexact_outs)
        return jax.vjp(function, *(values[i] for i in e.moving))[1](cts)

    if len(shapes) != 1:
        return False
    program = e.traced(cotangents, types, out_types)
    return program is not None and is_elementwise(program, shapes.pop())


def _inner(e, values, masks) -> list[Mask]:
    """An equation with inner programs."""
    if isinstance(e.known, Call | Checkpoint):
        return masks_of_inputs(e.inner[0], values, masks)
    if isinstance(e.known, Scan):
        if values is not None:
            return masks_of_scan(e, values, masks)[0]
        masks = [*_static_carry(e, masks), *masks[e.known.n_carry :]]
        return masks_of_inputs(e.inner[0], None, masks)
    if values is None:
        of_branches = [masks_of_inputs(analysis, None, masks) for analysis in e.inner]
        same = lambda *masks: masks[0] if len(set(masks)) == 1 else None
        return [False, *map(same, *of_branches)]

    def branch(analysis, values):
        found = masks_of_inputs(analysis, values, masks)
        # The index of a branch is the first operand, and none of the branch.
        return [of_type(e.eqn.invars[i].aval, found[i - 1]) for i in e.inexact_ins]

    branches = [ft.partial(branch, analysis) for analysis in e.inner]
    found = jax.lax.switch(values[0], branches, [stopped(x) for x in values[1:]])
    return fill([False] * len(e.eqn.invars), e.inexact_ins, found)


def masks_of_scan(
    e: AnalyzedEquation, values: Sequence[Any], outs: Sequence[Mask]
) -> tuple[list[Mask], list[Mask]]:
    """The masks of the operands of a scan. And the masks of the carry after each step: an array
    has a leading axis of time.

    The steps run once to record the carry, and then the masks go through them in reverse.
    """
    scan, body = e.known, e.inner[0]
    assert isinstance(scan, Scan)
    n_carry, n, m = scan.n_carry, scan.n_consts, scan.n_consts + scan.n_carry
    values = [stopped(x) for x in values]
    consts, init, xs = values[:n], values[n:m], values[m:]
    types = [v.aval for v in body.program.jaxpr.invars]
    of_ys = dict(enumerate(outs[n_carry:]))
    static = _static_carry(e, [x if isinstance(x, bool) else None for x in outs])
    is_open = lambda i: static[i] is None and is_inexact(types[n + i])
    arrays = {i: of_type(types[n + i], outs[i]) for i in range(n_carry) if is_open(i)}
    all_carried = lambda arrays: [arrays.get(i, bool(static[i])) for i in range(n_carry)]

    def record(carry, x):
        return evaluate(body.program, [*consts, *carry, *x])[:n_carry], carry

    def step(state, now):
        of_consts, arrays = state
        carry, x, of_y = now
        given = [*all_carried(arrays), *{**of_ys, **of_y}.values()]
        found = masks_of_inputs(body, [*consts, *carry, *x], given)
        found = list(map(of_type, types, found))
        # Each step adds to the masks of the constants.
        of_consts = list(map(jnp.logical_or, of_consts, found[:n]))
        return (of_consts, {i: found[n + i] for i in arrays}), (arrays, found[m:])

    run = ft.partial(jax.lax.scan, length=as_length(scan.length))
    _, carries = run(record, init, xs, reverse=scan.reverse)
    sliced = {i: mask for i, mask in of_ys.items() if not isinstance(mask, bool)}
    start = [of_type(t, False) for t in types[:n]], arrays
    (of_consts, first), (arrays, of_xs) = run(
        step, start, (carries, xs, sliced), reverse=not scan.reverse
    )
    found = [*of_consts, *all_carried(first), *of_xs]
    return (
        fill([False] * len(found), e.inexact_ins, at(found, e.inexact_ins)),
        all_carried(arrays),
    )


def _static_carry(e: AnalyzedEquation, outs: Sequence[bool | None]) -> list[Mask]:
    """The known mask of a scan's carry, the same before and after every step."""
    scan = e.known
    assert isinstance(scan, Scan)
    n, m = scan.n_carry, scan.n_consts

    def before_a_step(carry):  # a mask that is known becomes one that is not, once
        ins = masks_of_inputs(e.inner[0], None, [*carry, *outs[n:]])
        pairs = zip(carry, ins[m : m + n], strict=True)
        return [a if a is b else None for a, b in pairs]

    return fixed_point(before_a_step, list(outs[:n]))
