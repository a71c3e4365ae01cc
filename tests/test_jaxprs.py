"""Decisions on traced programs: a diagonal Jacobian, and the table of primitives."""

import itertools
import warnings

import jax
import jax.numpy as jnp
import pytest
from eqx_grads._jaxprs.diagonal import has_diagonal_jacobian, is_elementwise
from eqx_grads._jaxprs.primitives import ELEMENTWISE
from eqx_grads._jaxprs.structure import structure
from jax.extend.core import Primitive, primitives


pytestmark = [pytest.mark.versions, pytest.mark.x64]


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (lambda x, y: jax.lax.cond(True, lambda x: x, jnp.sin, x), True),
        (lambda x, y: jax.lax.cond(x[0] > 0, lambda x: x, jnp.sin, x), False),
        (lambda x, y: jax.lax.while_loop(lambda z: jnp.int32(0) > 1, jnp.sin, x), True),
        (lambda x, y: jax.lax.while_loop(lambda z: z[0] > 1, jnp.sin, x), False),
        (lambda x, y: jax.lax.while_loop(lambda z: False, lambda z: z + x[::-1], x), False),
        (lambda x, y: jax.lax.scan(lambda c, z: (c + z, c), 0.0, x)[1], False),
    ],
)
def test_a_diagonal_jacobian_through_branches_and_loops(fn, expected):
    both = lambda x, y: (fn(x, y), y)
    program = jax.make_jaxpr(both)(jnp.arange(1.0, 4.0), jnp.ones((3, 3)))
    assert has_diagonal_jacobian(program) == expected


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (lambda x, y, z: (jnp.sin(x) * y, 1 + x, y), True),
        (lambda x, y, z: (jnp.sin(x), x[::-1]), False),
        (lambda x, y, z: x * z, False),
    ],
)
def test_an_elementwise_program(fn, expected):
    program = jax.make_jaxpr(fn)(jnp.arange(1.0, 4.0), 2.0, jnp.ones(1))
    assert is_elementwise(program, (3,)) == expected


def test_an_equation_with_other_parameters_is_opaque():
    """As a later JAX may have it: then the worst case is assumed."""

    def run(x):
        x = jax.lax.scan(lambda c, x: (c + x, c), 0.0, jax.jit(jnp.sin)(x))[1]
        x = jax.lax.while_loop(lambda x: x[0] < 3, lambda x: 2 * x, jax.nn.relu(x))
        return jax.lax.cond(x[0] > 1, jnp.sin, jnp.cos, x)

    eqns = [e for e in jax.make_jaxpr(run)(jnp.ones(3)).eqns if structure(e) is not None]
    assert len(eqns) == 5
    for eqn in eqns:
        for name in eqn.params:
            others = {key: x for key, x in eqn.params.items() if key != name}
            assert structure(eqn.replace(params=others)) in (None, structure(eqn))
    assert structure(eqns[0].replace(invars=2 * eqns[0].invars)) is None


# ---------------------------------------------------------------- the elementwise primitives

ALL = [*vars(jax.lax).values(), *vars(primitives).values()]
PRIMITIVES = {p.name: p for p in ALL if isinstance(p, Primitive)}
# Behaves as if it were elementwise: returns what it is given, without a derivative.
EXCEPTIONS = ("stage",)
# For those that need other parameters than these.
PARAMS = ({}, {"accuracy": None})
MORE = {
    "convert_element_type": {"new_dtype": jnp.float32, "weak_type": False, "sharding": None},
    "integer_pow": {"y": 3},
    "reduce_precision": {"exponent_bits": 5, "mantissa_bits": 3},
    "round": {"rounding_method": jax.lax.RoundingMethod.TO_NEAREST_EVEN},
}
XS = (
    jnp.array([1.3, 2.5, 0.7]),
    jnp.array([1, 2, 3]),
    jnp.array([True, False, False]),
    jnp.array([1 + 0.2j, 0.2, 0.3j]),
)


def _is_elementwise(primitive) -> bool:
    """Whether, for operands of some types, the output for reversed operands is reversed."""
    options = [MORE[primitive.name]] if primitive.name in MORE else PARAMS
    same_types = [[x] * n for x in XS for n in (1, 2, 3)]
    for xs, params in itertools.product([*same_types, [XS[2], XS[0], XS[0]]], options):
        try:
            out = primitive.bind(*xs, **params)
            of_reversed = primitive.bind(*(x[::-1] for x in xs), **params)
        except Exception:  # not for operands of these types, or with these parameters
            continue
        if jnp.shape(out) == (3,):
            is_float = jnp.issubdtype(out.dtype, jnp.inexact)
            return bool(jnp.array_equal(out[::-1], of_reversed, equal_nan=is_float))
    return False


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", sorted(PRIMITIVES))
def test_each_primitive(name):
    with warnings.catch_warnings(action="ignore"):
        is_elementwise = _is_elementwise(PRIMITIVES[name])
    if is_elementwise:
        assert name in ELEMENTWISE or name in EXCEPTIONS
    else:
        # These can't be bound to arrays alone, or have another output than operands.
        assert name not in ELEMENTWISE or name in ("pvary", "polygamma", "sharding_constraint")
