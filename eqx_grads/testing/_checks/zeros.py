"""The check `zeros`: subsets of perturbed leaves and of used outputs.

For every subset, the rule has to return the derivative that it returns with dense tangents or
cotangents, and no equations for the leaves that are not perturbed.
"""

import functools as ft
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import Literal, Var

# Public, if little known: the pass with which JAX itself drops dead equations.
from jax.interpreters.partial_eval import dce_jaxpr

from ..._jaxprs.evaluate import bind, evaluate
from ..._jaxprs.known_zeros import evaluate_with_zeros
from ..._jaxprs.structure import Call, structure
from .._case import Case
from .._compiled import all_at_once, Program
from .._findings import broke, compare, failed, passed, skipped
from .._random_tangents import only
from .._report import Finding


_ALL_SUBSETS = 4  # up to this many leaves
_SAMPLED = 8


def zeros(case: Case) -> Iterator[Finding]:
    """The dense derivative for every subset, and no equations for unperturbed leaves."""
    n_leaves, n_outputs = len(case.subject.leaves), len(case.own.outputs)
    if n_leaves < 2 and n_outputs < 2:
        yield skipped("zeros", "one leaf and one output: there are no subsets")
        return
    subsets = _subsets(n_leaves, case.rng)
    if case.offers_forward and subsets:
        yield from _perturbed_forward(case, subsets)
        yield from _dead_work(case)
    if subsets:
        yield from _perturbed_reverse(case, subsets)
    if n_outputs > 1:
        yield from _used_outputs(case, _subsets(n_outputs, case.rng))


def _subsets(n: int, rng: np.random.Generator) -> list[tuple[int, ...]]:
    """The non-empty proper subsets: all of them, or a sample with all singles."""
    sizes = range(1, n)
    if n <= _ALL_SUBSETS:
        return [s for size in sizes for s in itertools.combinations(range(n), size)]
    singles = [(i,) for i in range(min(n, _SAMPLED))]
    rest = [tuple(j for j in range(n) if j != i) for (i,) in singles[:2]]
    draws = [np.flatnonzero(rng.random(n) < 0.5) for _ in range(2)]
    drawn = [tuple(int(i) for i in draw) for draw in draws if 0 < len(draw) < n]
    return [*singles, *rest, *drawn]


def _label(kept, names) -> str:
    shown = ", ".join(names[i] for i in kept[:3])
    return f"only {shown}{', ...' if len(kept) > 3 else ''}"


def _restricted(fn, leaves: Sequence[Any], kept: Sequence[int]) -> Callable[..., list[Any]]:
    """The function of the leaves in `kept`; the others are constant."""

    def restricted(*perturbed):
        full = list(leaves)
        for i, x in zip(kept, perturbed, strict=True):
            full[i] = x
        return fn(*full)

    return restricted


def _perturbed_forward(case: Case, subsets) -> Iterator[Finding]:
    p = case.precision
    tangents = p.like_leaves(case.tangents())

    def run(kept, leaves, tangents):
        perturbed, t_perturbed = [leaves[i] for i in kept], [tangents[i] for i in kept]
        return jax.jvp(_restricted(p.rule.fn, leaves, kept), perturbed, t_perturbed)[1]

    runs = [ft.partial(run, kept) for kept in subsets]
    results = all_at_once(runs, (p.subject.leaves, tangents), p.context)
    for kept, got in zip(subsets, results, strict=True):
        name = _label(kept, case.names)
        where = f"{name} perturbed, forward"
        if isinstance(got, Exception):
            yield broke("zeros", where, got)
            continue
        want = p.rule.jvp(only(tangents, kept))
        cause = f"wrong where {name} is perturbed, right where all leaves are"
        yield compare(
            "zeros", where, want, got, case.output_names, case.tolerance(p), cause=cause
        )


def _perturbed_reverse(case: Case, subsets) -> Iterator[Finding]:
    p = case.precision
    w = p.like_outputs(case.cotangents())
    dense = p.rule.vjp(w)

    def run(kept, leaves, w):
        perturbed = [leaves[i] for i in kept]
        return jax.vjp(_restricted(p.rule.fn, leaves, kept), *perturbed)[1](w)

    runs = [ft.partial(run, kept) for kept in subsets]
    results = all_at_once(runs, (p.subject.leaves, w), p.context)
    for kept, got in zip(subsets, results, strict=True):
        name = _label(kept, case.names)
        where = f"{name} perturbed, reverse"
        if isinstance(got, Exception):
            yield broke("zeros", where, got)
            continue
        names, want = [case.names[i] for i in kept], [dense[i] for i in kept]
        cause = f"wrong where {name} is perturbed, right where all leaves are"
        yield compare("zeros", where, want, got, names, case.tolerance(p), cause=cause)


def _used_outputs(case: Case, subsets) -> Iterator[Finding]:
    p = case.precision
    w = p.like_outputs(case.cotangents())

    def run(kept, leaves, w):
        used = lambda *xs: [p.rule.fn(*xs)[i] for i in kept]
        return jax.vjp(used, *leaves)[1]([w[i] for i in kept])

    runs = [ft.partial(run, kept) for kept in subsets]
    results = all_at_once(runs, (p.subject.leaves, w), p.context)
    for kept, got in zip(subsets, results, strict=True):
        name = _label(kept, case.output_names)
        where = f"{name} used"
        if isinstance(got, Exception):
            yield broke("zeros", where, got)
            continue
        want = p.rule.vjp(only(w, kept))
        cause = f"wrong where {name} is used, right where all outputs are"
        yield compare("zeros", where, want, got, case.names, case.tolerance(p), cause=cause)


# ---------------------------------------------------------------- dead work


def _dead_work(case: Case) -> Iterator[Finding]:
    """With one leaf perturbed, no equation may be left that only the other tangents need.

    The number of equations to compare with: the dense tangent is linear, so its derivative
    along the tangent of one leaf is the same tangent, without the terms of the other leaves.
    """
    if len(case.subject.leaves) < 2 or _is_dense_by_nature(case.subject.fn):
        return
    p, leaves = case.own, case.own.subject.leaves
    tangents = case.tangents()
    for i, name in enumerate(case.names[:_SAMPLED]):
        try:
            actual, needed = _work(p.rule, leaves, i, tangents[i])
            if actual > needed:
                # JAX's own rules (`jax.nn.softplus`) compute dead terms as well.
                without, enough = _work(p.plain, leaves, i, tangents[i])
                needed += max(without - enough, 0)
            if actual > needed and not _knows_zeros(case):
                # So do they if the rule calls them: to the constant in `logaddexp(x, 0.0)`,
                # which is `softplus`, JAX gives a tangent of zero.
                run = _one_perturbed(p.rule, leaves, i)
                actual = _equations(_without_zero_products(run), leaves, tangents[i])
        except Exception:  # the rule has no second derivative to compare with
            return
        where = f"only {name} perturbed"
        if actual > needed:
            cause = "a zero tangent (`None`) was made into an array of zeros"
            if not _knows_zeros(case):
                cause = "an operation of which it is not known that it maps zero to zero"
            yield failed(
                "zeros", where,
                f"the jaxpr has {actual} equations, and needs {needed}: some belong to leaves "
                f"that are not perturbed.\n  likely cause: {cause}",
            )  # fmt: skip
        else:
            yield passed("zeros", where)


def _work(program: Program, leaves, i, tangent) -> tuple[int, int]:
    """The number of equations with one leaf perturbed, and the number that is needed."""
    actual = _equations(_one_perturbed(program, leaves, i), leaves, tangent)
    return actual, _equations(_one_differentiated(program, leaves, i), leaves, tangent)


def _is_dense_by_nature(fn) -> bool:
    """A `jax.custom_jvp` without `symbolic_zeros` receives arrays of zeros from JAX."""
    return isinstance(fn, jax.custom_jvp) and not fn.symbolic_zeros


def _knows_zeros(case: Case) -> bool:
    """Whether a rule is given `None`, or symbolic zeros, and so can take them for arrays: its
    own, or one that it calls. That of a solver is ours."""
    rules = getattr(case.subject.fn, "_rules", None)
    rule = getattr(rules, "jvp_rule", None)
    if rule is not None:
        return rule.symbolic_zeros
    return not case.is_solver


def _without_zero_products(run):
    """The function, in which a product with the literal `0.0`, or with an array of it, is known
    to be zero."""

    def folded(*args):
        leaves = jax.tree.leaves(args)
        closed = jax.make_jaxpr(run)(*args)
        closed = jax.make_jaxpr(ft.partial(evaluate, closed, hook=_enter_calls))(leaves)
        new, equations, arrays = [], [], set()
        for eqn in closed.jaxpr.eqns:
            is_zero = [
                np.all(v.val == 0) if isinstance(v, Literal) else v in arrays
                for v in eqn.invars
            ]
            if eqn.primitive.name == "broadcast_in_dim" and is_zero[0]:
                arrays.update(eqn.outvars)
            if eqn.primitive.name == "mul" and any(is_zero):
                zeros = [Var(v.aval) for v, z in zip(eqn.invars, is_zero, strict=True) if z]
                new += zeros
                invars = [
                    zeros.pop(0) if z else v for v, z in zip(eqn.invars, is_zero, strict=True)
                ]
                eqn = eqn.replace(invars=invars)
            equations.append(eqn)
        jaxpr = closed.jaxpr.replace(invars=[*closed.jaxpr.invars, *new], eqns=equations)
        program = closed.replace(jaxpr=jaxpr)
        out = evaluate_with_zeros(program, [*leaves, *(None for _ in new)])
        return [x for x in out if x is not None]

    return folded


def _enter_calls(eqn, values):
    known = structure(eqn)
    if isinstance(known, Call):
        return evaluate(*known.programs, values, _enter_calls)
    return bind(eqn, values)


def _one_perturbed(rule: Program, leaves, i):
    def run(xs, t):
        of_one = lambda x: rule.fn(*[x if j == i else y for j, y in enumerate(xs)])
        return jax.jvp(of_one, (xs[i],), (t,))[1]

    return run


def _one_differentiated(rule: Program, leaves, i):
    def run(xs, t):
        def dense(t_one):
            zeros = [jax.numpy.zeros_like(x) for x in xs]
            return jax.jvp(rule.fn, xs, [t_one if j == i else z for j, z in enumerate(zeros)])[
                1
            ]

        return jax.jvp(dense, (jax.numpy.zeros_like(t),), (t,))[1]

    return run


def _equations(run, *args) -> int:
    closed = jax.make_jaxpr(run)(*args)
    jaxpr, _ = dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars))
    return sum(count_equations(eqn) for eqn in jaxpr.eqns)


def count_equations(eqn) -> int:
    """The number of equations in an equation: those of its inner jaxprs, or one.

    The cast of a scalar does not count: whether the `0` in `jnp.where(x > 0, t, 0)` is cast
    depends on how the tangent `t` came about.
    """
    inner = jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda p: hasattr(p, "eqns"))
    jaxprs = [p for p in inner if hasattr(p, "eqns")]
    if jaxprs:
        return sum(count_equations(e) for j in jaxprs for e in j.eqns)
    is_cast = eqn.primitive.name == "convert_element_type"
    return 0 if is_cast and eqn.outvars[0].aval.size == 1 else 1
