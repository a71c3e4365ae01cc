"""Every public function and layer, called with nonsense for each of its arguments.

The outcome is an error that names the argument, or a right answer: `tests/hostile` says for
each argument what it may be. The guard tests some kinds of nonsense for each argument, and not
the same for all; the slow tests take all kinds, in each of three ways to call.
"""

import importlib

import eqx_grads as eqg
import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest


# What is neither right nor a clear error, and why.
MASKED = "masked array"  # JAX refuses them where they enter, in its own words, for any function
NO_ARRAYS = ("array of objects", "array of strings", "array of dates", "structured array")
KNOWN = {
    ("custom_vjp.def_bwd", "bwd", "none"): "then it is a decorator without a rule",
    ("linear_function", "rmatvec", "none"): "then it is defined later, and the call says so",
    ("elementwise", "derivative", "none"): "then it is a decorator of the derivative",
    **{("filter_scan", "init", kind): "JAX raises the error" for kind in NO_ARRAYS},
}
PARTS = 8


def hostile():
    """Imported when a test runs, as it makes all layers."""
    return importlib.import_module(".hostile", __package__)


@pytest.fixture(autouse=True)
def _no_type_checks():
    """As users run it."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def faults(targets, kinds_of=None, mode="staged"):
    """Of all kinds, or of those that `kinds_of` returns for an argument."""
    found = []
    for target in targets:
        for argument in hostile().TARGETS[target].args:
            for kind in kinds_of(target, argument) if kinds_of else hostile().KINDS:
                if kind == MASKED or (target, argument, kind) in KNOWN:
                    continue
                result = hostile().outcome(target, argument, kind, mode)
                if result is not None and result.verdict in ("silent", "unclear"):
                    found.append(f"{target}({argument}): {kind}: {result[3:]}")
    return "\n".join(found)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["staged", "traced", "eager"])
@pytest.mark.parametrize("part", range(PARTS))
def test_all_nonsense(part, mode):
    assert not faults(list(hostile().TARGETS)[part::PARTS], mode=mode)


@pytest.mark.slow
@pytest.mark.parametrize("room", ["safe.", "ste."])
def test_nan_in_nan_out(room):
    """The functions of arrays. Masks, keys and codes have no NaN."""
    for target, given in hostile().TARGETS.items():
        for argument, good in given.args.items() if target.startswith(room) else ():
            if not isinstance(good, jax.Array) or not jnp.issubdtype(good.dtype, jnp.inexact):
                continue
            value = hostile().KINDS["nan in array"](good)
            out = hostile().arrays(hostile().call(given, **{argument: value}))
            floats = [x for x in out if jnp.issubdtype(x.dtype, jnp.inexact)]
            assert any(np.isnan(x).any() for x in floats), f"{target}({argument})"


SAME = ("read only", "not contiguous", "number of NumPy", "double of NumPy")


@pytest.mark.slow
@pytest.mark.parametrize("kind", SAME)
def test_arrays_of_numpy_are_arrays(kind):
    """The answer is that for the same array of JAX."""
    of, call = hostile().arrays, hostile().call
    for target, given in hostile().TARGETS.items():
        for argument, good in given.args.items():
            try:
                value = hostile().KINDS[kind](good)
            except hostile().NotApplicable:
                continue
            found = hostile().outcome(target, argument, kind, "eager")
            if found is None or found.verdict != "right" or not isinstance(good, jax.Array):
                continue
            got, want = (of(call(given, **{argument: x})) for x in (value, jnp.asarray(value)))
            for x, y in zip(got, want, strict=True):
                np.testing.assert_array_equal(x, y, err_msg=f"{target}({argument})")


@pytest.mark.parametrize("way", ["too few", "too many", "unknown"])
def test_the_wrong_number_of_arguments(way):
    """Python's own errors, also of functions with rules."""
    f = eqg.custom_jvp(lambda x, y: x * y)
    f.def_jvp(lambda primals, tangents: (f(*primals), tangents[0]))
    calls = {"too few": ((1.0,), {}), "too many": ((1.0,) * 9, {}), "unknown": ((), {"q": 1.0})}
    args, kwargs = calls[way]
    for fn in (f, jax.grad(f), eqg.scale_gradient, eqg.safe.power, eqg.ste.lsq, eqg.nn.GRU):
        with pytest.raises(TypeError, match="argument"):
            fn(*args, **kwargs)
