"""The abstract interpreter, and the table of primitives."""

import itertools

import jax
import jax.numpy as jnp
import pytest
from eqx_grads._jaxprs.diagonal import has_diagonal_jacobian
from eqx_grads._jaxprs.interpret import Domain, interpret
from eqx_grads._jaxprs.primitives import has_row
from jax.extend.core import Primitive


# The set of inputs that a value depends on.
DEPENDS = Domain[frozenset](
    constant=lambda x: frozenset(),
    join=frozenset.union,
    apply=lambda eqn, ins, path: [frozenset().union(*ins)] * len(eqn.outvars),
    decide=lambda eqn, index, out: index | out,
)


def _rotate(*args):
    """In each step, the parts of the carry change places, and the last takes from `x`."""
    *carry, x = args
    step = lambda carry, x: ((*carry[1:], carry[0] + x), carry[0])
    return jax.lax.scan(step, tuple(carry), jnp.stack([x] * 3))


def _nested(a, b, c):
    def outer(carry):
        a, b = carry
        return jax.lax.fori_loop(0, 2, lambda i, s: (s[1], s[0]), (a, b))

    return jax.lax.while_loop(lambda s: s[0] < c, outer, (a, b))


def _branches(a, b, c):
    return jax.lax.cond(a > 0, lambda b, c: (b, 1.0), lambda b, c: (c, 2.0), b, c)


def _rule(a, b, c):
    f = jax.custom_jvp(lambda x, y: x)
    f.defjvp(lambda p, t: (f(*p), t[1]))
    return f(a, b), jax.checkpoint(lambda b: jnp.sin(b))(b), c


def _by_perturbation(fn, args):
    """The witness: which outputs change if an input does, for either sign of the first one."""
    found = [set() for _ in jax.tree.leaves(fn(*args))]
    for sign, scale, i in itertools.product((1, -1), (0.5, -1.0, 3.0), range(len(args))):
        xs = [sign * args[0], *args[1:]]
        ys = [x * scale if j == i else x for j, x in enumerate(xs)]
        pairs = zip(*(jax.tree.leaves(fn(*z)) for z in (xs, ys)), strict=True)
        for k, (old, new) in enumerate(pairs):
            if not jnp.array_equal(new, old):
                found[k].add(i)
    return found


@pytest.mark.parametrize(
    ("fn", "args", "is_exact"),
    [
        (_rotate, (1.0, 2.0, 4.0, 8.0), False),  # each step counts as any
        (_branches, (1.0, 2.0, 3.0), True),
        (_rule, (1.0, 2.0, 3.0), True),
        (lambda a, b, c: jax.jit(lambda a, b: (a * b, b))(a, c), (1.0, 2.0, 3.0), True),
    ],
)
def test_what_depends_on_what(fn, args, is_exact):
    program = jax.make_jaxpr(fn)(*args)
    outs = interpret(program, [frozenset([i]) for i in range(len(args))], DEPENDS).outs
    found = _by_perturbation(fn, args)
    assert all(a <= b for a, b in zip(found, outs, strict=True))
    assert found == list(map(set, outs)) or not is_exact


def test_a_loop_in_a_loop():
    """The condition is of the first part, which each step exchanges with the second."""
    program = jax.make_jaxpr(_nested)(1.0, 2.0, 3.0)
    outs = interpret(program, [frozenset([i]) for i in range(3)], DEPENDS).outs
    assert [set(out) for out in outs] == [{0, 1, 2}] * 2


def test_the_steps_of_a_loop_share_what_is_known():
    program = jax.make_jaxpr(_rotate)(1.0, 2.0, 4.0, 8.0)
    found = interpret(program, [frozenset([i]) for i in range(4)], DEPENDS)
    [scan] = [step for step in found.steps if step.eqn.primitive.name == "scan"]
    [body] = scan.inner
    assert body.ins == [frozenset(range(4))] * 3 + [frozenset([3])]
    assert [step.eqn.primitive.name for step in body.steps] == ["add"]


def test_a_bound_that_moves_is_widened():
    """Without widening, the count of a loop would have no fixed point."""
    upper = Domain[float](
        constant=float,
        join=max,
        apply=lambda eqn, ins, path: [sum(ins)] * len(eqn.outvars),
        widen=lambda a, b: a if b <= a else float("inf"),
    )
    fn = lambda x: jax.lax.scan(lambda c, _: (c + 1.0, None), x, None, length=5)[0]
    assert interpret(jax.make_jaxpr(fn)(0.0), [0.0], upper).outs == [float("inf")]
    same = lambda x: jax.lax.scan(lambda c, _: (c + 0.0, None), x, None, length=5)[0]
    assert interpret(jax.make_jaxpr(same)(0.0), [3.0], upper).outs == [3.0]


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (lambda x, y: jax.lax.cond(True, lambda x: x, jnp.sin, x), True),
        (lambda x, y: jax.lax.cond(x[0] > 0, lambda x: x, jnp.sin, x), False),
        (lambda x, y: jax.lax.while_loop(lambda z: jnp.int32(0) > 1, jnp.sin, x), True),
        (lambda x, y: jax.lax.while_loop(lambda z: z[0] > 1, jnp.sin, x), False),
        (lambda x, y: jax.lax.while_loop(lambda z: False, lambda z: z + x[::-1], x), False),
        (lambda x, y: jax.lax.scan(lambda c, z: (c + z, None), x, y)[0], False),
    ],
)
def test_a_diagonal_jacobian_through_branches_and_loops(fn, expected):
    both = lambda x, y: (fn(x, y), y)
    program = jax.make_jaxpr(both)(jnp.arange(1.0, 4.0), jnp.ones((3, 3)))
    assert has_diagonal_jacobian(program) == expected


def test_each_primitive_has_a_row():
    modules = (jax.lax, jax.lax.linalg)
    values = [value for module in modules for value in vars(module).values()]
    names = {value.name for value in values if isinstance(value, Primitive)}
    assert len(names) > 100
    assert not [name for name in sorted(names) if not has_row(name)]
    assert not has_row("a primitive of another library")
