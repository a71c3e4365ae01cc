"""Rematerialization of functions and Modules."""

from collections.abc import Callable

import equinox as eqx
import jax
from jaxtyping import PyTree

from .._errors import check_flags, check_function
from .._rules.tree_split import AbstractTransformed, call_on_arrays


def filter_checkpoint(
    fn: Callable[..., PyTree],
    *,
    prevent_cse: bool = True,
    policy: Callable[..., bool] | None = None,
) -> Callable[..., PyTree]:
    """Recompute the residuals of `fn` in the backward pass: `jax.checkpoint` for any PyTrees.

    Unlike `equinox.filter_checkpoint` (of Equinox 0.13), it keeps no tracers alive where `fn`
    is a Module.

    !!! example

        ```python
        import equinox as eqx
        import eqx_grads as eqg
        import jax
        import jax.numpy as jnp

        mlp = eqx.nn.MLP(3, 3, 64, 2, key=jax.random.key(0))

        @eqx.filter_grad
        def gradient(mlp):
            return jnp.sum(eqg.filter_checkpoint(mlp)(jnp.ones(3)))

        assert gradient(mlp).layers[0].weight.shape == (64, 3)
        ```

    **Arguments:**

    - `fn`: a function, a bound method, a method in the body of a class, or a Module. Takes and
        returns any PyTrees. Arrays in its arguments are traced; all other leaves are passed as
        they are.
    - `prevent_cse`, `policy`: as for `jax.checkpoint`.

    **Returns:**

    A function with the signature of `fn`. It is a PyTree with the leaves and the public
    attributes of `fn`, so it can be a layer of a model.

    **Derivative:**

    The derivative of `fn`, in both modes, to all orders.
    """
    check_function(fn, "fn", "filter_checkpoint")
    check_flags("filter_checkpoint", prevent_cse=prevent_cse)
    if policy is not None:
        check_function(policy, "policy", "filter_checkpoint")
    return eqx.module_update_wrapper(_Checkpoint(fn, prevent_cse, policy))


class _Checkpoint(AbstractTransformed):
    _prevent_cse: bool = eqx.field(static=True)
    _policy: Callable[..., bool] | None = eqx.field(static=True)

    def __getattr__(self, name):
        # A model may read `self.cell.hidden_size`.
        fn = self.__dict__.get("_eqg_fn")
        if fn is None or name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(fn, name)

    def __call__(self, /, *args, **kwargs):
        options = {"prevent_cse": self._prevent_cse, "policy": self._policy}
        transform = lambda run, arrays: jax.checkpoint(run, **options)(arrays)
        return call_on_arrays(transform, self._eqg_fn, args, kwargs)
