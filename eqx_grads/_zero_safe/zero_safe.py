"""`zero_safe`: the transformation of a function of any PyTrees."""

from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
from jax.extend.core import ClosedJaxpr
from jaxtyping import PyTree

from .._errors import check_function, check_option, first_line, name_of, place_of, rule_error
from .._jaxprs.dependence import without_unused
from .._jaxprs.evaluate import evaluate
from .._rules.tree_split import AbstractTransformed, call_on_arrays
from .analysis import Analysis, analyze
from .ranges import is_inexact, Range
from .transform import evaluate_zero_safe
from .zero_wins import evaluate_zero_wins


def zero_safe(fn: Callable[..., PyTree], *, policy: str = "selected") -> Callable[..., PyTree]:
    r"""Drop from a derivative all terms of elements that a selection does not take.

    JAX differentiates `jnp.where(x > 0, jnp.sqrt(x), 0.0)` by multiplying the derivative of
    `sqrt` by zero where the `where` does not take it, and $0 \cdot \infty$ is NaN. The known
    fix is a second `where` in the argument of `sqrt`. `zero_safe` does this for a whole
    function, and for the code of other libraries that it calls.

    !!! example

        ```python
        import equinox as eqx
        import eqx_grads as eqg
        import jax
        import jax.numpy as jnp

        def drag(x):
            return jnp.sum(jnp.where(x > 0, jnp.sqrt(x), 0.0))

        x = jnp.array([0.0, 4.0])
        print(jax.grad(drag)(x))
        print(jax.grad(eqg.zero_safe(drag))(x))
        ```

        ```text
        [ nan 0.25]
        [0.   0.25]
        ```

    **Arguments:**

    - `fn`: a function, a bound method, a method in the body of a class, or a Module. Takes and
        returns any PyTrees. Arrays in its arguments are traced; all other leaves are passed as
        they are.
    - `policy`: `"selected"` drops the terms of elements that no selection takes. `"zero"` also
        lets each exact zero win over any factor, which may be wrong. See below.

    **Returns:**

    A function with the signature and the values of `fn`. Under `jax.jit`, the values equal
    `jax.jit(fn)` bit by bit. In an eager call they may differ from `fn` by rounding. Where `fn`
    calls a jitted function in which something may be dropped, its operations are evaluated one
    by one, and XLA does not fuse them. The returned function is a PyTree with the leaves of
    `fn`, so it can be a layer of a model.

    Apply it to the whole loss: a selection outside of `fn` is not seen.

    **Derivative:**

    The derivative of `fn`, in both modes, to all orders, without the terms of elements that no
    selection takes. The selections are `jnp.where`, `select`, `maximum`, `minimum`, `clamp`,
    `max`, `min`, `sort`, `top_k`, `segment_max`, indexing, slices, padding, elements that `set`
    overwrites, and `cond` and `switch`, which `vmap` turns into a `select`. At a tie, `maximum`
    takes both.

    All terms that are taken stay unchanged, to the bit. An exact zero that no selection made,
    times an infinite derivative, is NaN: for example in `sqrt(x)**2` and `arctan2(x, x)` at 0.
    At the boundary of a mask, you get the derivative of the branch that is taken there. For
    `where(x == 0, 0, x**2 / x)` at 0 it is 0, as with two `where` calls, though the slope is 1.

    [`eqx_grads.explain_nan`][] of the undecorated function says what is dropped.
    `jax.debug_nans` still stops there: the product of zero and infinity is computed before it
    is dropped.

    `zero_safe` needs to know which elements are taken. Where it does not know, NaN stays:

    - A `jax.custom_vjp`, `eqx_grads.custom_vjp`, `while_loop`, `shard_map`, linear solve, or
        unknown primitive: its outputs count as one, and are dropped if none of them is taken. A
        rule that `zero_safe` can see to be elementwise is an exception. The loop of
        `diffrax.diffeqsolve` is a `jax.custom_vjp`: use [`eqx_grads.safe.where`][] in the
        vector field.
    - Infinite inputs, and overflow in sums, products and positive integer powers: `zero_safe`
        assumes that they do not occur. It looks for overflow in `exp` and similar functions.
    - A matrix product with an infinite element that is taken for one row, and not for another.

    With `policy="zero"`, an exact zero also wins over any factor in the derivative of
    elementwise operations and inner products. The derivative of `norm(x)` at 0 is then 0. So is
    the derivative of `std(x)` at equal numbers, if `x - mean(x)` is exactly zero; compiled, it
    may be a rounding error. This is a convention, and the finite numbers that it gives can be
    wrong: `sqrt(x)**2` is `x`, and its derivative at 0 becomes 0 instead of 1. It holds for the
    first derivative; higher derivatives may not be finite there. With the other policy, finite
    derivatives are right, except at boundaries of masks.

    **Cost:**

    A static analysis finds the operations that may have an infinite derivative and may not be
    taken. If it finds none, nothing changes: MLPs with `relu`, `softplus` or `gelu`, LayerNorm
    and recurrent cells need the same FLOPs and bytes as without `zero_safe`. Otherwise,
    booleans say which elements are taken. They cost next to nothing for elementwise operations,
    and 1.1 times the FLOPs for a masked attention layer before a `relu`. A `scan` with such an
    operation in its step runs two more times, without a derivative. This takes 1.4 times the
    FLOPs and 2.8 times the bytes for steps of one matrix product. For steps of four operations,
    it takes nearly 4 times both.

    **Raises:**

    [`eqx_grads.RuleError`][] for an unknown policy. A call of the function raises it if the
    function can't be traced.
    """
    check_function(fn, "fn", "zero_safe")
    check_option("zero_safe", "policy", policy, ("selected", "zero"))
    return eqx.module_update_wrapper(ZeroSafe(fn, policy))


class ZeroSafe(AbstractTransformed):
    """What `zero_safe` returns."""

    _policy: str = eqx.field(static=True)

    def __call__(self, /, *args, **kwargs):
        def transform(run, arrays):
            program = zero_safe_program(_trace(self._eqg_fn, run, arrays), arrays)
            if self._policy == "zero" and (analysis := _analyze(program)).has_risk:
                return evaluate_zero_wins(analysis, arrays)
            return evaluate(program, arrays)

        return call_on_arrays(transform, self._eqg_fn, args, kwargs)


def _trace(fn, run, arrays) -> ClosedJaxpr:
    try:
        return jax.make_jaxpr(run)(arrays)
    except (jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError) as error:
        raise rule_error(
            f"`zero_safe` can't trace `{name_of(fn)}`.",
            first_line(error),
            place_of(fn),
            do="It traces the function as `jax.jit` does. Use `jax.lax.cond` or `jnp.where` "
            "for decisions that depend on arrays, and `jax.pure_callback` for NumPy.",
        ) from error


def _analyze(program: ClosedJaxpr) -> Analysis:
    return analyze(program, [Range()] * len(program.in_avals))


def zero_safe_program(program: ClosedJaxpr, values: Sequence[Any]) -> ClosedJaxpr:
    """The program, with the derivative of `zero_safe`."""
    analysis = _analyze(program)
    if not analysis.has_risk:
        return program

    def run(*values):
        outs = [True] * len(program.out_avals)
        return evaluate_zero_safe(analysis, values, list(map(is_inexact, values)), outs)

    # The parts of a mask are computed where the mask is used, and nowhere else.
    return without_unused(jax.make_jaxpr(run)(*values))
