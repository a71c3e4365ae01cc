"""Through which elements of a value a taken path leads.

A mask is `True` (all elements), `False` (none), or an array of booleans. Backward, an element
is in the mask of a value if a taken path leads from it to the result. Forward, it is if one
leads to it from the inputs.

An equation relates elements of its operands to elements of its outputs. A mask passes along
that relation, or back, as a tangent passes through a Jacobian, and a cotangent through its
transpose. So one function, `transfer`, has both directions of each case.

Without values, backward masks say what is known. A mask that would be an array is `None`.
"""

import contextlib
import functools as ft
import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
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


def read(env: dict[Any, Any], atoms: Sequence[Any], literal: Any = None) -> list[Any]:
    """The values of variables. A literal is its own value, or the given one."""
    of_literal = lambda v: v.val if literal is None else literal
    return [of_literal(v) if isinstance(v, Literal) else env[v] for v in atoms]


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


def masks_of_outputs(analysis: Analysis, values: Values, ins: Sequence[Mask]) -> list[Mask]:
    """Forward: the masks of the outputs of a program."""
    masks = forward(analysis, _raw_values(analysis, values), ins)
    return read(masks, analysis.program.jaxpr.outvars, False)


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
        ins = transfer(e, values, results, given, is_forward=False)
        add(e.eqn.invars, ins)
        visit(e, ins, given)
    return masks


def forward(analysis: Analysis, env: dict[Any, Any], ins: Sequence[Mask]) -> dict[Any, Mask]:
    """The masks of all variables, given the masks of the inputs."""
    program = analysis.program
    masks: dict[Any, Mask] = dict(zip(program.jaxpr.invars, ins, strict=True))
    for v, x in zip(program.jaxpr.constvars, program.consts, strict=True):
        # Values that a function closes over may be differentiated.
        masks[v] = isinstance(x, Tracer) and is_inexact(v.aval)
    for e in analysis.eqns:
        given = read(masks, e.eqn.invars, False)
        values, results = read(env, e.eqn.invars), [env.get(v) for v in e.eqn.outvars]
        outs = transfer(e, values, results, given, is_forward=True)
        masks.update(zip(e.eqn.outvars, outs, strict=True))
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
    e: AnalyzedEquation,
    values: Values,
    results: Values,
    masks: Sequence[Mask],
    *,
    is_forward: bool,
) -> list[Mask]:
    """The masks of the outputs of an equation from the masks of its operands, or the reverse.

    - `values`, `results`: its operands and outputs.
    """
    kind = kind_of(e.eqn)
    source, target = _ends(e, is_forward)
    given, nothing = at(masks, source), [False] * len(_variables(e, is_forward)[1])
    if not target or all(m is False for m in given) or kind.derivative == "zero":
        return nothing
    is_all = all(m is True for m in given)
    if is_forward and kind.linear == "each":
        is_all = any(m is True for m in given)
    with contextlib.nullcontext() if values is None else equation_context(e.eqn):
        if e.is_entered:
            return _inner(e, values, masks, is_forward)
        if _is_collective(e.eqn):
            found: Sequence[Mask] = [True] * len(target)
        elif e.has_rule:
            return _rule(e, values, masks, is_forward)
        elif e.name == "select_n" and (case := decided_case(e.eqn, e.ins)) is not None:
            found = [masks[case]] if is_forward else [i == case and given[0] for i in target]
        elif is_all and (is_forward or not kind.selects):
            found = [True] * len(target)
        elif values is None:
            is_opaque = not (kind.selects or kind.elementwise or kind.sums)
            found = [(is_opaque and True in given) or None] * len(target)
        elif kind.elementwise:
            found = _elementwise(e, values, masks, is_forward)
        elif e.name == "dot_general":
            found = _dot(e.eqn, masks, is_forward)
        elif e.name in ("reduce_max", "reduce_min"):
            found = [_extremum(e, values[0], results[0], given[0], is_forward)]
        elif kind.sums:
            found = _sums(e, values, given, is_forward)
        else:
            found = _opaque(e.eqn, given, *_variables_at(e, source, target, is_forward))
    return fill(nothing, target, found)


def _is_collective(eqn: Any) -> bool:
    """Whether an equation works across a named axis. An element that no selection takes on this
    device may be taken on another."""
    axes = eqn.params.get("axes", ())
    return "axis_name" in eqn.params or any(
        not isinstance(axis, int | np.integer) for axis in axes
    )


def _ends(e: AnalyzedEquation, is_forward: bool) -> tuple[list[int], list[int]]:
    """The operands and outputs that may have a tangent. The ends with known masks are first."""
    return (e.inexact_ins, e.inexact_outs) if is_forward else (e.inexact_outs, e.inexact_ins)


def _variables(e: AnalyzedEquation, is_forward: bool) -> tuple[list[Any], list[Any]]:
    ins, outs = e.eqn.invars, e.eqn.outvars
    return (ins, outs) if is_forward else (outs, ins)


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


def _elementwise(e, values, masks, is_forward) -> list[Mask]:
    taken = {i: taken_by(e.name, values, i) for i in e.inexact_ins}
    if is_forward:
        mask = either(*(both(taken[i], masks[i]) for i in taken))
        return [mask if isinstance(mask, bool) else dense(mask, e.eqn.outvars[0].aval.shape)]
    (out,) = e.inexact_outs
    return [_unbroadcast(both(masks[out], taken[i]), jnp.shape(values[i])) for i in taken]


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


def _dot(eqn, masks, is_forward) -> list[Mask]:
    """A product of matrices takes each element of a row, and each of a column."""
    contracted, batch = eqn.params["dimension_numbers"]
    shapes, n_batch = [v.aval.shape for v in eqn.invars], len(batch[0])
    free = [
        [i for i in range(len(shapes[k])) if i not in (*batch[k], *contracted[k])]
        for k in (0, 1)
    ]
    first, last = n_batch + len(free[0]), n_batch + len(free[0]) + len(free[1])
    found: list[Mask] = []
    for k, others in enumerate([range(first, last), range(n_batch, first)]):
        # The axes of the operand: first the axes of the output, then the axes of the sum.
        order = [*batch[k], *free[k], *contracted[k]]
        summed = range(n_batch + len(free[k]), len(order))
        if not is_inexact(eqn.invars[k].aval):
            continue
        if is_forward:
            mask = jnp.transpose(dense(masks[k], shapes[k]), order)
            kept = jnp.expand_dims(jnp.any(mask, tuple(summed)), tuple(others))
            found.append(dense(kept, eqn.outvars[0].aval.shape))
        else:
            kept = jnp.any(dense(masks[0], eqn.outvars[0].aval.shape), tuple(others))
            full = dense(jnp.expand_dims(kept, tuple(summed)), [shapes[k][i] for i in order])
            found.append(jnp.transpose(full, [order.index(i) for i in range(len(order))]))
    return [either(*found)] if is_forward else found


def _extremum(e, x, extremum, mask, is_forward) -> Mask:
    """As `taken_by`. JAX divides by the number of elements that are equal to the extremum, and
    if that is NaN, by zero."""
    axes = e.eqn.params["axes"]
    extremum = jnp.expand_dims(extremum, axes)
    taken = ~(x < extremum if e.name == "reduce_max" else x > extremum)
    if is_forward:
        return jnp.any(taken & mask, axes)
    return taken & jnp.expand_dims(dense(mask, e.eqn.outvars[0].aval.shape), axes)


def _sums(e, values, given, is_forward) -> list[Mask]:
    """Sums of elements that are taken: no derivative is negative. A product takes each term
    with either factor, whatever the other factor is, as if they were all one."""
    is_product = kind_of(e.eqn).linear == "each" or kind_of(e.eqn).along == "axis"
    full = [jnp.ones_like(x) if is_product else jnp.asarray(x) for x in values]
    full = vary_alike(full, values)  # the type of ones does not say that they vary
    parts = [[i] for i in e.inexact_ins] if is_product else [e.inexact_ins]
    masks = iter(given)
    found: list[list[Any]] = []
    for part in parts:
        function = function_of(e.eqn, full, part, e.inexact_outs)
        primals = [full[i] for i in part]
        numbers = lambda xs, ms: [
            of_type(jax.typeof(x), m).astype(x.dtype) for x, m in zip(xs, ms, strict=True)
        ]
        if is_forward:
            tangents = numbers(primals, [next(masks) for _ in part])
            found.append(jax.jvp(function, primals, tangents)[1])
        else:
            outs, pull = jax.vjp(function, *primals)
            found.append(pull(numbers(outs, given)))
    if is_forward:
        return [either(*(t != 0 for t in ts)) for ts in zip(*found, strict=True)]
    return [ct != 0 for cts in found for ct in cts]


def _opaque(eqn, given, sources, targets) -> list[Mask]:
    """Each element of an output may depend on all elements of the operands, or of the same
    matrix."""
    if any(mask is True for mask in given):
        return [True] * len(targets)
    given = [dense(mask, v.aval.shape) for mask, v in zip(given, sources, strict=True)]
    n_batch = _n_matrix_axes(eqn) if kind_of(eqn).along == "matrices" else 0
    some = either(*(jnp.any(mask, tuple(range(n_batch, mask.ndim))) for mask in given))
    return [jax.lax.broadcast_in_dim(some, v.aval.shape, range(n_batch)) for v in targets]


def _variables_at(e, source, target, is_forward) -> list[list[Any]]:
    pairs = zip(_variables(e, is_forward), (source, target), strict=True)
    return [[vs[i] for i in indices] for vs, indices in pairs]


def _n_matrix_axes(eqn: Any) -> int:
    """The number of batch axes that all operands and outputs of a function of matrices have."""
    shapes = [v.aval.shape for v in (*eqn.invars, *eqn.outvars)]
    n_batch = len(shapes[0]) - 2
    return n_batch if all(shape[:n_batch] == shapes[0][:n_batch] for shape in shapes) else 0


def _rule(e, values, masks, is_forward) -> list[Mask]:
    """A rule takes the values that its tangents depend on. A backward rule does not show them,
    but it may be elementwise."""
    source, target = e.moving, e.inexact_outs
    source, target = (source, target) if is_forward else (target, source)
    given, n = at(masks, source), len(e.eqn.invars)
    if e.tangent_map is not None:
        still, primals = [False] * n, None
        if values is not None:
            primals = [*values, *(jnp.zeros_like(values[i]) for i in e.moving)]
        if is_forward:
            found = masks_of_outputs(e.tangent_map, primals, [*still, *given])
        else:
            found = masks_of_inputs(e.tangent_map, primals, given)[n:]
    elif values is None:
        found = [any(mask is True for mask in given) or None] * len(target)
    elif not any(mask is True for mask in given) and _is_elementwise_rule(e):
        found = [either(*given)] * len(target)
    else:
        found = _opaque(e.eqn, given, *_variables_at(e, source, target, is_forward))
    return fill([False] * len(_variables(e, is_forward)[1]), target, found)


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


def _inner(e, values, masks, is_forward) -> list[Mask]:
    """An equation with inner programs."""
    if isinstance(e.known, Call | Checkpoint):
        return _through(e.inner[0], values, masks, is_forward)
    if isinstance(e.known, Scan):
        if values is not None:
            return masks_of_scan(e, values, masks, is_forward)[0]
        masks = [*_static_carry(e, masks), *masks[e.known.n_carry :]]
        return _through(e.inner[0], None, masks, is_forward)
    if values is None:
        of_branches = [_through(analysis, None, masks, is_forward) for analysis in e.inner]
        same = lambda *masks: masks[0] if len(set(masks)) == 1 else None
        return [False, *map(same, *of_branches)]
    # The index of a branch is the first operand, and none of the branch.
    masks, offset = (masks[1:], 0) if is_forward else (masks, 1)
    target, variables = _ends(e, is_forward)[1], _variables(e, is_forward)[1]

    def branch(analysis, values):
        found = _through(analysis, values, masks, is_forward)
        return [of_type(variables[i].aval, found[i - offset]) for i in target]

    branches = [ft.partial(branch, analysis) for analysis in e.inner]
    found = jax.lax.switch(values[0], branches, [stopped(x) for x in values[1:]])
    return fill([False] * len(variables), target, found)


def _through(analysis, values, masks, is_forward) -> list[Mask]:
    return (masks_of_outputs if is_forward else masks_of_inputs)(analysis, values, masks)


def masks_of_scan(
    e: AnalyzedEquation, values: Sequence[Any], masks: Sequence[Mask], is_forward: bool
) -> tuple[list[Mask], list[Mask]]:
    """The masks of the outputs of a scan, or the masks of its operands. And the masks of the
    carry before each step, or after each step: an array has a leading axis of time.

    Forward, the masks go through the steps together with the values. Backward, the steps run
    once to record the carry, and then the masks go through them in reverse.
    """
    scan, body = e.known, e.inner[0]
    assert isinstance(scan, Scan)
    n_carry, n, m = scan.n_carry, scan.n_consts, scan.n_consts + scan.n_carry
    values = [stopped(x) for x in values]
    consts, init, xs = values[:n], values[n:m], values[m:]
    inputs, outputs = body.program.jaxpr.invars, body.program.jaxpr.outvars
    # Each step has the masks of the constants, or adds to them.
    fixed, masks = (masks[:n], masks[n:]) if is_forward else ([], masks)
    of_start, of_slices = masks[:n_carry], dict(enumerate(masks[n_carry:]))
    static: list[bool | None] = (
        [False if not r.active else None if r.mixed else True for r in body.ins[n:m]]
        if is_forward
        else _static_carry(e, [x if isinstance(x, bool) else None for x in masks])
    )
    is_open = lambda i, v: static[i] is None and is_inexact(v.aval)
    opened = [(i, v) for i, v in enumerate(inputs[n:m]) if is_open(i, v)]
    arrays = {i: of_type(v.aval, of_start[i]) for i, v in opened}
    all_carried = lambda arrays: [arrays.get(i, bool(static[i])) for i in range(n_carry)]

    def after(carry, x):
        return evaluate(body.program, [*consts, *carry, *x])[:n_carry]

    def step(state, now):
        carry, of_consts, arrays = state
        recorded, x, of_x = now
        carry = carry if is_forward else recorded
        given = [*fixed, *all_carried(arrays), *{**of_slices, **of_x}.values()]
        found = _through(body, [*consts, *carry, *x], given, is_forward)
        types = [v.aval for v in (outputs if is_forward else inputs)]
        found = list(map(of_type, types, found))
        k = len(of_consts)
        of_consts = list(map(jnp.logical_or, of_consts, found))
        new = after(carry, x) if is_forward else ()
        state = new, of_consts, {i: found[k + i] for i in arrays}
        return state, (arrays, found[k + n_carry :])

    run = ft.partial(jax.lax.scan, length=as_length(scan.length))
    recorded, start, nothing = None, init, []
    if not is_forward:
        record = lambda carry, x: (after(carry, x), carry)
        recorded, start = run(record, init, xs, reverse=scan.reverse)[1], ()
        nothing = [of_type(v.aval, False) for v in inputs[:n]]
    sliced = {i: mask for i, mask in of_slices.items() if not isinstance(mask, bool)}
    (_, of_consts, last), (arrays, found) = run(
        step,
        (start, nothing, arrays),
        (recorded, xs, sliced),
        reverse=scan.reverse == is_forward,
    )
    found = [*of_consts, *all_carried(last), *found]
    target = _ends(e, is_forward)[1]
    return fill([False] * len(found), target, at(found, target)), all_carried(arrays)


def _static_carry(e: AnalyzedEquation, outs: Sequence[bool | None]) -> list[Mask]:
    """The known mask of a scan's carry, the same before and after every step."""
    scan = e.known
    assert isinstance(scan, Scan)
    n, m = scan.n_carry, scan.n_consts

    def before_a_step(carry):  # a mask that is known becomes one that is not, once
        ins = _through(e.inner[0], None, [*carry, *outs[n:]], is_forward=False)
        return [a if a is b else None for a, b in zip(carry, ins[m : m + n], strict=True)]

    return fixed_point(before_a_step, list(outs[:n]))
