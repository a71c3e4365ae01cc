"""The scan body: the user's step as a function of lists of arrays."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import Jaxpr, jaxprs_in_params, Literal

from .._errors import name_of, place_of, rule_error, show_tree, type_of
from .._jaxprs.evaluate import as_closed
from .._rules.flatten_call import Rest
from .._tangent_spaces import as_array_list
from .carry import Carry, is_number, is_sliced


class ScanBody:
    """`f` of a scan as a function of lists of arrays: `carry, x` to `carry, y`.

    It holds no arrays but those that `f` closes over, so that it serves for all arrays of the
    same types.
    `becomes_array` are the indices of the Python integers in the carry that are arrays.
    """

    def __init__(
        self,
        f: Callable[..., Any],
        init: Any,
        xs: Any,
        carry_gradient: Callable[..., Any] | None,
        becomes_array: frozenset[int],
    ):
        self._f = f
        self._carry_gradient = carry_gradient
        self._carry = Carry(init, becomes_array)
        self._x, _ = Rest.split(xs, is_sliced)
        # The structure and the static leaves of `y`, set whenever the body is traced.
        self._y: list[Rest] = []

    def arrays(self, init: Any, xs: Any) -> tuple[list[jax.Array], list[jax.Array]]:
        """The arrays that the loop starts from, and those that it slices."""
        return self._carry.first(init), Rest.split(xs, is_sliced)[1]

    def static_outputs(self) -> list[Any]:
        """The static leaves of `y`."""
        return [x for x in self._y[0].static if x is not None]

    def __call__(self, carry: Sequence[Any], x: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        carry_tree = self._carry.tree(carry)
        if self._carry_gradient is not None:
            carry_tree = self._with_carry_gradient(carry_tree, carry)
        result = self._f(carry_tree, self._x.tree(as_array_list(x)))
        if not isinstance(result, tuple | list) or len(result) != 2:
            raise rule_error(
                f"`{name_of(self._f)}`, a step of `filter_scan`, did not return a pair.",
                f"it returned {show_tree(result)}",
                place_of(self._f),
                do="Return `carry, y`; `y` may be `None`.",
            )
        new_carry = self._carry.arrays(
            result[0],
            carry,
            self._f,
            f"`{name_of(self._f)}`, a step of `filter_scan`, returned another carry than it "
            "was given.",
        )
        y, ys = Rest.split(result[1], is_number)
        self._y[:] = [y]
        return new_carry, ys

    def outputs(self, carry: Sequence[Any], ys: Sequence[Any]) -> tuple[Any, Any]:
        """What `filter_scan` returns."""
        return self._carry.tree(carry), self._y[0].tree(ys)

    def _with_carry_gradient(self, carry_tree, carry):
        fn = self._carry_gradient
        error = "`carry_gradient` of `filter_scan` returned another carry than it was given."

        def flat(arrays):
            return self._carry.arrays(fn(self._carry.tree(arrays)), arrays, fn, error)

        program = jax.make_jaxpr(flat)(carry).jaxpr
        for i, (given, new) in enumerate(zip(program.invars, program.outvars, strict=True)):
            if _source(program, new) is not given:
                where = self._carry.paths()[i]
                raise rule_error(
                    "`carry_gradient` of `filter_scan` does not return the carry that it was "
                    "given.",
                    f"at {where}: it returns a {type_of(given.aval)} that it computes, and "
                    "that may be another value",
                    place_of(fn),
                    do="It may change the derivative only, for example by "
                    "`eqx_grads.clip_gradient`. To give the carry the derivative of any "
                    "function, return `eqx_grads.replace_gradient(carry, fn(carry))`.",
                )
        return fn(carry_tree)


# Equations that hand on their first operand as it is.
_IDENTITIES = ("stop_gradient", "copy", "copy_p", "optimization_barrier", "eqg_batch_alike")


def _source(jaxpr: Jaxpr, atom: Any) -> Any:
    """The input of a program whose value `atom` has; `None` if that can't be seen.

    It is seen through calls, in which the rules of custom derivatives are, and through a
    choice among values that all are the same input.
    """
    if isinstance(atom, Literal):
        return None
    if atom in jaxpr.invars:
        return atom
    eqn = next((eqn for eqn in jaxpr.eqns if atom in eqn.outvars), None)
    if eqn is None:  # a constant
        return None
    name = eqn.primitive.name
    if name == "select_n":
        cases = {_source(jaxpr, case) for case in eqn.invars[1:]}
        return cases.pop() if len(cases) == 1 else None
    if name in _IDENTITIES:
        i = eqn.outvars.index(atom)
        return _source(jaxpr, eqn.invars[i])
    inner = [as_closed(j).jaxpr for j in jaxprs_in_params(eqn.params)]
    if len(inner) != 1 or name in ("scan", "while") or len(inner[0].invars) != len(eqn.invars):
        return None
    source = _source(inner[0], inner[0].outvars[eqn.outvars.index(atom)])
    return None if source is None else _source(jaxpr, eqn.invars[inner[0].invars.index(source)])
