"""Gradient reversal and probes as layers, for `equinox.nn.Sequential`.

Any other op is a layer as `equinox.nn.Lambda(functools.partial(eqg.scale_gradient, s=2.0))`.
"""

import equinox as eqx
from jaxtyping import ArrayLike, PRNGKeyArray, PyTree

from .._gradient_ops.linear import reverse_gradient
from .._gradient_ops.probe import GradientStatistics, probe


class GradientReversal(eqx.Module):
    r"""Reverse the gradient: with the same loss, the layers before this one are trained in the
    opposite direction.

    !!! example

        ```python
        import eqx_grads as eqg
        import equinox as eqx
        import jax
        import jax.numpy as jnp

        key1, key2 = jax.random.split(jax.random.key(0))
        critic = eqx.nn.Sequential(
            [
                eqx.nn.Linear(2, 3, key=key1),
                eqg.nn.GradientReversal(0.5),
                eqx.nn.Linear(3, 1, key=key2),
            ]
        )
        grads = eqx.filter_grad(lambda critic: critic(jnp.ones(2))[0])(critic)
        features, weight = critic.layers[0](jnp.ones(2)), critic.layers[2].weight
        print(jnp.allclose(grads.layers[2].weight[0], features))
        print(jnp.allclose(grads.layers[0].bias, -0.5 * weight[0]))
        ```

        ```text
        True
        True
        ```

    **Arguments:**

    - `strength`: a number, or an array that broadcasts to every floating leaf of `x`. A
        number is compiled into the program. For a strength that changes during training, put
        an array in its place:
        `eqx.tree_at(lambda m: m.layers[1].strength, critic, eqg.reversal_schedule(progress))`.

    **Derivative:**

    The derivative of [`eqx_grads.reverse_gradient`][]. The value does not depend on `strength`,
    so an array there has a zero gradient. Mask it in an optimizer with weight decay, which
    would change it.
    """

    strength: ArrayLike = 1.0

    def __call__(self, x: PyTree, *, key: PRNGKeyArray | None = None) -> PyTree:
        """**Arguments:**

        - `x`: any PyTree.
        - `key`: ignored.

        **Returns:**

        `x`, unchanged.
        """
        del key
        return reverse_gradient(x, self.strength)


class GradientProbe(eqx.Module):
    r"""Record the gradient at this point of a model, in the gradient of the model.

    !!! example

        ```python
        import eqx_grads as eqg
        import equinox as eqx
        import jax
        import jax.numpy as jnp

        key1, key2 = jax.random.split(jax.random.key(0))
        model = eqx.nn.Sequential(
            [
                eqx.nn.Linear(2, 3, key=key1),
                eqg.nn.GradientProbe(),
                eqx.nn.Linear(3, 1, key=key2),
            ]
        )
        loss = lambda model, xs: jnp.sum(jax.vmap(model)(xs))
        grads = eqx.filter_grad(loss)(model, jnp.ones((5, 2)))
        statistics = grads.layers[1].slot
        print(statistics.steps)  # one for each example
        norm = jnp.linalg.norm(model.layers[2].weight)
        print(jnp.allclose(statistics.mean_norm, norm))

        # In the gradient flow of a whole model, a probe is a layer.
        flow = eqg.gradient_flow(loss, model, jnp.ones((5, 2)))
        print(list(flow))

        # The record is not a gradient to train with: give zeros to the optimizer.
        grads = eqx.tree_at(lambda m: m.layers[1].slot, grads, model.layers[1].slot)
        ```

        ```text
        5.0
        True
        ['layers[0]', 'layers[1]', 'layers[2]']
        ```

    **Arguments:**

    - `slot`: a perturbation, whose gradient is the record, as for [`eqx_grads.probe`][]. The
        default is an [`eqx_grads.GradientStatistics`][], which holds a few numbers about a
        gradient of any shape. A tree of arrays like `x`, such as `jnp.zeros(3)`, records the
        gradient itself.

    All calls of the layer share one slot. So the record is the sum over the steps of a scan and
    over the examples of a batch.

    **Derivative:**

    The derivative of [`eqx_grads.probe`][]: both modes and all orders; for a
    `GradientStatistics`, forward mode is the identity. The values in the slot are ignored.
    """

    slot: PyTree

    def __init__(self, slot: PyTree = None):
        self.slot = GradientStatistics() if slot is None else slot

    def __call__(self, x: PyTree, *, key: PRNGKeyArray | None = None) -> PyTree:
        """As for [`eqx_grads.nn.GradientReversal`][].

        **Raises:**

        [`eqx_grads.RuleError`][] if the slot is of another structure or shape than `x`.
        """
        del key
        return probe(x, self.slot)
