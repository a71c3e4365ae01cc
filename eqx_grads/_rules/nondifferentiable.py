"""`nondifferentiable`: the identity, which raises if it is differentiated."""

from collections.abc import Sequence

from jaxtyping import PyTree

from .._errors import rule_error
from .._tangent_spaces import is_dynamic
from .custom_jvp import custom_jvp
from .tree_split import ClosedTree


def nondifferentiable(x: PyTree, name: str = "This value") -> PyTree:
    """Return `x`, and raise an error if it is differentiated.

    !!! example

        ```python
        import eqx_grads as eqg
        import jax

        try:
            jax.grad(lambda x: eqg.nondifferentiable(x, "the learning rate"))(1.0)
        except eqg.RuleError as error:
            assert "the learning rate" in str(error)
        ```

    **Arguments:**

    - `x`: any PyTree. For a function in it, the values that it closes over count.
    - `name`: the name of the value, for the error.

    **Returns:**

    `x`, unchanged.

    **Derivative:**

    None, in any mode: [`eqx_grads.RuleError`][] while tracing, which names the leaf. Where
    `x` is not being differentiated, nothing happens. In a function with a rule, the rule gives
    the derivative. The error is then raised if the rule returns `None` for an argument that the
    function passes to `nondifferentiable`.
    """
    # A function in `x` can't be returned by a rule, but the values that it closes over can.
    tree, values = ClosedTree.split(x, is_dynamic)
    return tree.tree(_nondifferentiable(values, name=name, places=tuple(tree.places("x"))))


@custom_jvp
def _nondifferentiable(values, *, name, places):
    del name, places
    return values


@_nondifferentiable.def_jvp(symbolic_zeros=True)
def _nondifferentiable_jvp(primals, tangents, *, name: str, places: Sequence[str]):
    del primals
    pairs = zip(places, *tangents, strict=True)
    error = rule_error(
        f"{name} was differentiated, and must not be.",
        *(f"at {place}" for place, t in pairs if t is not None and place != "x"),
        do="Pass `jax.lax.stop_gradient` of it to treat it as a constant.",
    )
    error.forbids_derivative = True
    raise error
