"""The scan body: the user's step as a function of lists of arrays."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import mapped_aval

from .._errors import name_of, pair_of, place_of
from .._jaxprs.current_trace import is_in_shard_map, is_jit_disabled
from .._jaxprs.varying import cast_carry, vary_alike
from .._rules.closure_convert import lift_tracers
from .._rules.replace_gradient import replace_gradient
from .._rules.tree_split import TreeSplit
from .._tangent_spaces import as_array_list, is_differentiable
from .carry import Carry, is_number, is_sliced


def _slice_types(xs: Sequence[jax.Array]) -> list[Any]:
    return [mapped_aval(x.shape[0], 0, jax.typeof(x)) for x in xs]


class ScanBody:
    """`f` of a scan as a function of lists of arrays: `carry, x` to `carry, y`.

    It holds no arrays except the ones that `f` closes over, so it serves for all arrays of the
    same types. First, `settle` takes the structure of the carry from `init`.
    """

    def __init__(
        self, f: Callable[..., Any], xs: Any, carry_gradient: Callable[..., Any] | None
    ):
        self._f = f
        self._carry_gradient = carry_gradient
        self._carry = Carry(())
        self._x, _ = TreeSplit.split(xs, is_sliced)
        # The structure and the static leaves of `y`, set whenever the body is traced.
        self._y: list[TreeSplit] = []

    def arrays(self, init: Any, xs: Any) -> tuple[list[jax.Array], list[jax.Array]]:
        """The arrays that the loop starts from, and the arrays that it slices."""
        return self._carry.first(init), TreeSplit.split(xs, is_sliced)[1]

    def settle(self, init: Any, xs: Any) -> Any:
        """`init`, with an array for each Python integer that a step changes."""
        arrays = TreeSplit.split(xs, is_sliced)[1]

        def step_of(carry, init):
            self._carry = carry
            if not is_jit_disabled():
                return self, carry.first(init), _slice_types(arrays)
            if not all(x.shape[0] for x in arrays):
                return (lambda: None,)  # JAX raises an error for a scan of no steps
            return self, carry.first(init), [x[0] for x in arrays]

        self._carry, init = Carry.settled(init, step_of)
        return init

    def cast_arrays(self, init: Any, xs: Any) -> tuple[list[jax.Array], list[jax.Array]]:
        """The same, with the first carry cast to the type on the mesh that later ones have."""
        carry, xs = self.arrays(init, xs)

        def step_types(carry):
            return jax.make_jaxpr(self)(carry, _slice_types(xs)).out_avals[: len(carry)]

        return cast_carry(step_types, carry), xs

    def varying_arrays(self, init: Any, xs: Any) -> tuple[list[jax.Array], list[jax.Array]]:
        """The same. Inside `shard_map`, they and all that `f` closes over vary alike."""
        if not is_in_shard_map():
            return self.cast_arrays(init, xs)
        carry, xs = self.arrays(init, xs)
        closures, captured = lift_tracers([self._f, self._carry_gradient])
        arrays = vary_alike([*carry, *xs, *captured])
        n, m = len(carry), len(carry) + len(xs)
        (self._f, self._carry_gradient), _ = closures.substitute(arrays[m:])
        return arrays[:n], arrays[n:m]

    def __call__(self, carry: Sequence[Any], x: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        if self._carry_gradient is not None:
            carry = self._with_carry_gradient(self._carry_gradient, carry)
        result = self._f(self._carry.tree(carry), self._x.tree(as_array_list(x)))
        what = f"`{name_of(self._f)}`, a step of `filter_scan`,"
        do = "Return `carry, y`; `y` may be `None`."
        new, y = pair_of(result, what, place_of(self._f), do)
        error = f"{what} returned a different carry than it was given."
        new_carry = self._carry.arrays(new, carry, self._f, error)
        y, ys = TreeSplit.split(y, is_number)
        self._y[:] = [y]
        return new_carry, ys

    def names_for_errors(self) -> tuple[tuple[str, ...], str]:
        """Where each array of the carry is, as the user would write it, and the step."""
        return tuple(self._carry.paths()), place_of(self._f)

    def outputs(self, carry: Sequence[Any], ys: Sequence[Any]) -> tuple[Any, Any]:
        """What `filter_scan` returns."""
        return self._carry.tree(carry), self._y[0].tree(ys)

    def _with_carry_gradient(self, fn: Callable[..., Any], carry: Sequence[Any]) -> list[Any]:
        """The carry, with the derivative of `fn`."""
        error = (
            "`carry_gradient` of `filter_scan` returned a different carry than it was given."
        )
        surrogate = self._carry.arrays(fn(self._carry.tree(carry)), carry, fn, error)
        return [
            replace_gradient(x, s) if is_differentiable(x) else x
            for x, s in zip(carry, surrogate, strict=True)
        ]
