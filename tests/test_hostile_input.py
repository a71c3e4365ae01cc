"""Every public function and layer, called with nonsense for each of its arguments.

The outcome is an error that names the argument, or a right answer: `tests/hostile` says for
each argument what it may be. The guard tests some kinds of nonsense for each argument, and not
the same for all; the slow tests take all kinds, in each of three ways to call.
"""

import eqx_grads as eqg
import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from .hostile import KINDS, outcome, TARGETS
from .hostile.kinds import NotApplicable
from .hostile.targets import arrays, call


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


@pytest.fixture(autouse=True)
def _no_type_checks():
    """As users run it."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def _faults(targets, kinds_of, mode="staged"):
    found = []
    for target in targets:
        for argument in TARGETS[target].args:
            for kind in kinds_of(target, argument):
                if kind == MASKED or (target, argument, kind) in KNOWN:
                    continue
                result = outcome(target, argument, kind, mode)
                if result is not None and result.verdict in ("silent", "unclear"):
                    found.append(f"{target}({argument}): {kind}: {result[3:]}")
    return "\n".join(found)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["staged", "traced", "eager"])
@pytest.mark.parametrize("part", range(PARTS))
def test_all_nonsense(part, mode):
    assert not _faults(list(TARGETS)[part::PARTS], lambda *_: KINDS, mode)


@pytest.mark.slow
@pytest.mark.parametrize("target", [t for t in TARGETS if t.startswith(("safe.", "ste."))])
def test_nan_in_nan_out(target):
    """The functions of arrays. Masks, keys and codes have no NaN."""
    given = TARGETS[target]
    for argument, good in given.args.items():
        if not isinstance(good, jax.Array) or not jnp.issubdtype(good.dtype, jnp.inexact):
            continue
        value = KINDS["nan in array"](good)
        out = arrays(call(given, **{argument: value}))
        floats = [x for x in out if jnp.issubdtype(x.dtype, jnp.inexact)]
        assert any(np.isnan(x).any() for x in floats), argument


SAME = ("read only", "not contiguous", "number of NumPy", "double of NumPy")


@pytest.mark.slow
@pytest.mark.parametrize("kind", SAME)
def test_arrays_of_numpy_are_arrays(kind):
    """The answer is that for the same array of JAX."""
    for target, given in TARGETS.items():
        for argument, good in given.args.items():
            try:
                value = KINDS[kind](good)
            except NotApplicable:
                continue
            found = outcome(target, argument, kind, "eager")
            if found is None or found.verdict != "right" or not isinstance(good, jax.Array):
                continue
            got, want = (
                arrays(call(given, **{argument: x})) for x in (value, jnp.asarray(value))
            )
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
