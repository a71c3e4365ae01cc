"""`nondifferentiable`: the identity, which raises if it is differentiated."""

import jax
from jaxtyping import PyTree

from .._errors import rule_error, show_path
from .custom_jvp import custom_jvp


def nondifferentiable(x: PyTree, name: str = "This value") -> PyTree:
    """The identity, which raises if it is differentiated.

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

    - `x`: any PyTree.
    - `name`: what it is, for the error.

    **Returns:**

    `x`, unchanged.

    **Derivative:**

    None, in any mode: [`eqx_grads.RuleError`][] while tracing, which names the leaf. Where
    `x` is not being differentiated, nothing happens.
    """
    if not isinstance(name, str):
        raise rule_error(
            "The `name` of `nondifferentiable` is not a string.",
            f"it is {name!r:.60}",
            do="Name the value, as the error should.",
        )
    return _nondifferentiable(x, name=name)


@custom_jvp
def _nondifferentiable(x, *, name):
    del name
    return x


@_nondifferentiable.def_jvp(symbolic_zeros=True)
def _nondifferentiable_jvp(primals, tangents, *, name):
    del primals
    paths = [show_path(path) for path, _ in jax.tree_util.tree_leaves_with_path(tangents[0])]
    raise rule_error(
        f"{name} was differentiated, and must not be.",
        *(f"at x{path}" for path in paths if path),
        do="Pass `jax.lax.stop_gradient` of it to treat it as a constant.",
    )
