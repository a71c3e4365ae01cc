"""`host_function`: a NumPy, SciPy, C or PyTorch function in a JAX program, differentiable."""

import functools as ft
import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
from jaxtyping import PyTree

from .._errors import bad_argument, check_option, name_of, place_of, rule_error
from .._rules.float_args import as_count, is_number
from .._rules.rule import Rule
from .._rules.wrapper import reduce_by_name, set_metadata, unwrap_method
from .derivative import host_call
from .host_call import host_call_of, HostCode
from .host_callback import VMAP_METHODS
from .residual_cache import ResidualCache


class HostFunction(eqx.Module):
    """A function that runs on the host. Made by [`eqx_grads.host_function`][]."""

    _code: HostCode = eqx.field(static=True)

    @property
    def __wrapped__(self):
        return self._code.fn

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Call the function.

        **Arguments:**

        - `args`, `kwargs`: any PyTrees. The function gets NumPy arrays for all arrays and
            floats, and can't write to them. It gets everything else unchanged.

        **Returns:**

        The output of the function, as JAX arrays of the promised types.
        """
        call, operands = host_call_of(self._code, args, kwargs)
        return jax.tree.unflatten(call.out_treedef, host_call(call.op, operands))

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else jax.tree_util.Partial(self, instance)

    def __reduce__(self):
        return reduce_by_name(self, self._code.fn)

    def __repr__(self):
        return f"<eqx_grads.host_function of {self._code.name}>"

    def def_fwd(
        self, rule: Callable[..., Any] | None = None, *, keep: int = 8
    ) -> Callable[..., Any]:
        """Give the rule for the forward pass, which runs on the host. Use it as a decorator,
        with or without options. Without this rule, the residuals are the tuple of the
        arguments.

        **Arguments:**

        - `rule`: called as `rule(*args, **kwargs)`, like the function, with the defaults of
            positional arguments. Returns `out, residuals`. The residuals may be anything
            (arrays, a factorization, a graph), and stay on the host. The library finds them by
            a digest of the arguments. It copies NumPy arrays in any PyTree of residuals, and
            keeps other objects as they are. If two calls return the same object, it belongs to
            the later call, and the residuals of the earlier call are computed again.
        - `keep`: the number of calls whose residuals are kept. The backward pass of an earlier
            call computes them again.

        **Returns:**

        `rule`.
        """
        if rule is None:
            return ft.partial(self.def_fwd, keep=keep)
        as_count("def_fwd", "keep", keep, least=0)
        self._code.fwd = Rule(rule, conventions=_CONVENTIONS)
        self._code.kept = ResidualCache(keep)
        return rule

    def def_bwd(self, rule: Callable[..., Any]) -> Callable[..., Any]:
        """Give the rule for the backward pass, which runs on the host.

        **Arguments:**

        - `rule`: called as `rule(residuals, ct)`, where `ct` is like the output, with `None`
            for all leaves that are not floating or complex. Returns a tuple with one cotangent
            for each positional argument, arguments with defaults included. Each is like the
            argument, with `None` for any part that is zero. A cotangent is summed over the axes
            over which the function broadcast its argument. A real argument gets the real part,
            as in [`eqx_grads.custom_vjp`][]. Complex cotangents are JAX's: `ct` times the
            derivative, without a conjugate; for a matrix $A$, its transpose times `ct`. The
            rule may ask by name, with keyword-only parameters, for the function's keyword-only
            arguments, and for `perturbed`: the tuple of trees of bools that says which leaves
            are being differentiated. It may be called more than once for the same residuals,
            whose arrays can't be written to.

        **Returns:**

        `rule`.
        """
        self._code.bwd = Rule(rule, conventions=_CONVENTIONS)
        return rule

    def def_jvp(self, rule: Callable[..., Any]) -> Callable[..., Any]:
        """Give the forward rule, which runs on the host.

        **Arguments:**

        - `rule`: called as `rule(primals, tangents, **kwargs)`. `primals` is the tuple of all
            positional arguments, arguments with defaults included. `tangents` is the tuple of
            their tangents: arrays where the primal is floating or complex, `None` for all other
            leaves. Returns `out, t_out`, the second with `None` for any part that is zero.

        **Returns:**

        `rule`.
        """
        self._code.jvp = Rule(rule, conventions=_CONVENTIONS)
        return rule


_CONVENTIONS = (
    "The rules of a host function are called as `jvp(primals, tangents, **kwargs)`, "
    "`fwd(*args, **kwargs)` and `bwd(residuals, ct)`. Positional arguments that have their "
    "default are passed too."
)


def host_function(
    fn: Callable[..., Any] | None = None,
    *,
    out: PyTree | Callable[..., PyTree] = None,
    finite_difference: str | None = None,
    step: PyTree = None,
    max_rule_calls: int = 256,
    vmap_method: str = "sequential",
) -> Any:
    r"""Give a derivative to a function that JAX can't trace: NumPy, SciPy, C by `ctypes`,
    PyTorch.

    !!! example

        ```python
        import eqx_grads as eqg
        import jax
        import jax.numpy as jnp
        from scipy.integrate import solve_ivp

        @eqg.host_function(out=lambda rate, start: start, finite_difference="central")
        def decay(rate, start):
            solution = solve_ivp(
                lambda t, y: -rate * y, (0.0, 1.0), start, rtol=1e-10, atol=1e-10
            )
            return solution.y[:, -1]

        end = lambda rate: decay(rate, jnp.array([2.0]))[0]
        with jax.enable_x64(True):
            print(f"{jax.jit(jax.grad(end))(0.5):.3f}")

        # Or with a rule, which runs on the host as well.
        @decay.def_bwd
        def decay_bwd(residuals, ct):
            rate, start = residuals  # the arguments, as there is no `def_fwd`
            end = decay.__wrapped__(rate, start)
            return -(ct * end).sum(), ct * end / start

        print(f"{jax.grad(end)(0.5):.3f}")
        ```

        ```text
        -1.213
        -1.213
        ```

    **Arguments:**

    - `fn`: the function, which must be pure. Without it, a decorator. Its arguments may be any
        PyTrees, Modules included; it gets NumPy arrays, which it can't write to. The function
        and its rules may return the same memory in each call (`np.sin(x, out=buffer)`): the
        library copies it. A traced value that `fn` closes over is an error.
    - `out`: the type of the output: a `jax.ShapeDtypeStruct(shape, dtype)`, an array or
        anything else that has a shape and a dtype (such as `jax.typeof(x)`), or a float (for
        one number of JAX's default precision). Also a tree with such leaves, or a function that
        returns such a tree. Such a function gets the caller's arguments, with
        `jax.ShapeDtypeStruct`s instead of arrays and floats. A Python integer stays a Python
        integer. An object of a registered class is replaced by one with the same attributes,
        which `out` may return. A function as `out` gets only the keyword-only arguments that it
        has parameters for. Floats that `fn` returns are cast to the precision of `out`. A bare
        integer, shape or dtype is an error; for an integer output, give
        `jax.ShapeDtypeStruct((), int)`.
    - `finite_difference`: how to differentiate in modes and orders without a rule: by
        `"central"` differences, or by `"complex"` steps. Complex steps are exact up to
        rounding. They need a real function whose every operation also takes complex numbers.
    - `step`: the relative step of central differences. An element $x$ is moved by
        $\pm\mathrm{step}\cdot\max(|x|, 1)$. A number, or a tuple with one entry for each
        argument: a number, or a tree of numbers. By default $\epsilon^{1/3}$, with $\epsilon$
        the machine epsilon of the argument's dtype: 0.005 for float32, 6e-6 for float64. If the
        function is less precise than its dtype (an adaptive solver), give the cube root of its
        relative error. If it computes in float64 for float32 arguments, `step` may be 1e-5. The
        step has to be smaller than the distance to the end of the domain, and much smaller than
        the distance to a pole. Beyond the domain you get what the function does there: NaN, or
        the exception that it raises.
    - `max_rule_calls`: how many calls of a rule the other mode may make; see below.
    - `vmap_method`: as for `jax.pure_callback`. With any but `"sequential"` and
        `"sequential_unrolled"`, the function and its rules get the axes of `jax.vmap` in front,
        and have to return them.

    **Returns:**

    An [`eqx_grads.HostFunction`][]. Its methods `def_fwd`, `def_bwd` and `def_jvp` take rules,
    as in [`eqx_grads.custom_vjp`][] and [`eqx_grads.custom_jvp`][]. The rules run on the host.
    Floats are cast to the promised precision.

    **Derivative:**

    Reverse mode uses the rule of `def_bwd`, and forward mode the rule of `def_jvp`. A mode
    without a rule multiplies by the Jacobian. With `finite_difference`, the Jacobian takes two
    calls of `fn` (complex steps: one) for each element of the arguments. Otherwise, it takes
    one call of the other rule for each element of the outputs (`def_bwd`) or of the arguments
    (`def_jvp`). Both modes; higher orders take finite differences of the rules, or of
    differences.

    **Raises:**

    [`eqx_grads.RuleError`][] if you need a derivative that nothing above gives, or if the
    function returns another structure, shape or kind of dtype than was promised. An exception
    of `fn` arrives unchanged where JAX runs eagerly. In a compiled program it becomes a
    `jax.errors.JaxRuntimeError` whose text has the exception and the lines that raised it.
    """
    options = {
        "vmap_method": vmap_method,
        "out": out,
        "finite_difference": finite_difference,
        "step": step,
        "max_rule_calls": max_rule_calls,
    }
    if fn is None:
        return ft.partial(host_function, **options)
    fn, _ = unwrap_method(fn, "fn", "host_function")
    _check_options(fn, **options)
    function = HostFunction(HostCode(fn, **options))
    set_metadata(function, fn)
    return function


def _check_options(fn, *, out, finite_difference, step, max_rule_calls, vmap_method) -> None:
    name = "host_function"
    if out is None:
        raise rule_error(
            f"`{name}` has to know what `{name_of(fn)}` returns, and was given no `out`.",
            place_of(fn),
            do="Give the types, or a function of the arguments that returns them: "
            "`out=lambda x: x` for the types of `x`; or an array like it, such as "
            "the result of one call of the function.",
        )
    if finite_difference is not None:
        check_option(name, "finite_difference", finite_difference, ("central", "complex"))
    check_option(name, "vmap_method", vmap_method, VMAP_METHODS)
    if step is not None and finite_difference is None:
        do = "Say `finite_difference='central'`, too."
        raise bad_argument(name, "step", "useful without `finite_difference`", step, do)
    for x in jax.tree.leaves(step):
        if not is_number(x) or not 0 < x < math.inf:
            raise bad_argument(name, "step", "positive", x, "Give a positive number.")
    as_count(name, "max_rule_calls", max_rule_calls, least=0)
