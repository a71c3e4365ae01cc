"""Arguments of no use at all: the error names the function and the argument."""

import eqx_grads as eqg
import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest


X = jnp.ones(3)
FALL = lambda t, y: -y
HEIGHT = lambda t, y: y

CALLS = {
    "std: ddof": (lambda: eqg.safe.std(X, ddof="a"), "`ddof` of `safe.std`"),
    "std: array": (lambda: eqg.safe.std(X, ddof=X), r"`ddof` of `safe.std`.*\n.*float.*\[3\]"),
    "norm: name": (lambda: eqg.safe.norm(X, ord="fro"), "`ord` of `safe.norm`.*\n.*'fro'"),
    "norm: array": (lambda: eqg.safe.norm(X, ord=X), "`ord` of `safe.norm`"),
    "where: fn": (lambda: eqg.safe.where(X > 0, 3, X, 0.0), "`fn` of `safe.where`"),
    "where: None": (
        lambda: eqg.safe.where(X > 0, jnp.log, X, None),
        "`otherwise` of `safe.where`.*\n.*None",
    ),
    "where: string": (
        lambda: eqg.safe.where(X > 0, jnp.log, X, "a"),
        "`otherwise` of `safe.where`.*\n.*str",
    ),
    "where: substitute": (
        lambda: eqg.safe.where(X > 0, jnp.log, X, 0.0, substitute=None),
        "`substitute` of `safe.where`",
    ),
    "event_time: where": (
        lambda: eqg.event_time(HEIGHT, 1.0, FALL, 1.0, where=None),
        "`event_time`.*`where`.*\n.*None",
    ),
    "event_time: condition": (
        lambda: eqg.event_time((1.0, 2.0), HEIGHT, FALL, 1.0),
        "`condition` of `event_time` is not a function.\n.*tuple",
    ),
    "event_time: f": (lambda: eqg.event_time(HEIGHT, 1.0, 3, 1.0), "`f` of `event_time`"),
    "jump: reset": (lambda: eqg.jump(3, 1.0, FALL, 1.0), "`reset` of `jump`"),
    "jump: f": (lambda: eqg.jump(None, 1.0, 3, 1.0), "`f` of `jump`"),
    "implicit: residual": (lambda: eqg.implicit(3), "`residual` of `implicit`"),
    "fixed_point: fn": (lambda: eqg.fixed_point(3, 1.0), "`fn` of `fixed_point`"),
    "fixed_point: max_steps": (
        lambda: eqg.fixed_point(jnp.cos, 1.0, max_steps=0),
        "`max_steps` of `fixed_point`",
    ),
    "fixed_point: max_steps, string": (
        lambda: eqg.fixed_point(jnp.cos, 1.0, max_steps="a"),
        "`max_steps` of `fixed_point`.*\n.*'a'",
    ),
    "FixedPoint: cell": (lambda: eqg.nn.FixedPoint(3, 3), "`cell` of `FixedPoint`"),
    "chunked: loss": (lambda: eqg.losses.chunked(3), "`loss` of `losses.chunked`"),
}


@pytest.fixture(autouse=True)
def _no_type_checks():
    """As users run it."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.mark.parametrize("name", CALLS)
def test_error(name):
    call, match = CALLS[name]
    with pytest.raises(eqg.RuleError, match=f"(?s){match}" if ".*`" in match else match):
        call()


def test_numbers_of_numpy_are_numbers():
    x = jnp.array([1.0, 2.0, 4.0])
    assert jnp.allclose(eqg.safe.std(x, ddof=np.float32(1)), jnp.std(x, ddof=1))
    assert jnp.allclose(eqg.safe.norm(x, ord=np.int64(1)), 7.0)
    assert jnp.allclose(jax.jit(lambda x: eqg.safe.norm(x, ord=np.inf))(x), 4.0)
