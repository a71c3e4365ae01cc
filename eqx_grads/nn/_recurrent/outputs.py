"""The outputs of a recurrent layer without its state, for `equinox.nn.Sequential`."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Key, Num

from ..._errors import bad_argument, check_flags
from .layer import AbstractRecurrent
from .stack import CHANNELS


class Outputs(eqx.Module):
    """A recurrent layer that returns its outputs, and not its state.

    A layer of `equinox.nn.Sequential` gets what the layer before it returned, and a recurrent
    layer returns the pair `ys, state`. This one returns `ys`.

    !!! example

        ```python
        import eqx_grads as eqg
        import equinox as eqx
        import jax
        import jax.numpy as jnp

        keys = jax.random.split(jax.random.key(0), 3)
        classifier = eqx.nn.Sequential(
            [
                eqg.nn.Outputs(eqg.nn.GRU(3, 8, bidirectional=True, key=keys[0])),
                eqg.nn.Outputs(eqg.nn.LSTM(16, 8, key=keys[1]), last=True),
                eqx.nn.Linear(8, 10, key=keys[2]),
            ]
        )
        sequences = jnp.ones((5, 20, 3))
        print(jax.vmap(classifier)(sequences).shape)

        loss = lambda classifier: jnp.sum(jax.vmap(classifier)(sequences) ** 2)
        grads = eqx.filter_grad(loss)(classifier)
        print(grads[0].layer.cells[0][0].weight_ih.shape)
        ```

        ```text
        (5, 10)
        (24, 3)
        ```

    **Derivative:**

    The derivative of the layer.
    """

    layer: AbstractRecurrent
    last: bool = eqx.field(static=True)

    def __init__(self, layer: AbstractRecurrent, *, last: bool = False):
        """**Arguments:**

        - `layer`: [`eqx_grads.nn.GRU`][], [`eqx_grads.nn.LRU`][] or any other recurrent layer
            of this library.
        - `last`: whether to return the last output only, of one sequence: the output after all
            steps, for each direction.
        """
        if not isinstance(layer, AbstractRecurrent):
            do = "Give a layer such as `eqx_grads.nn.GRU`, or make one from a cell: "
            do += "`eqx_grads.nn.Recurrent(cell)`."
            raise bad_argument("Outputs", "layer", "a recurrent layer", layer, do)
        check_flags("Outputs", last=last)
        self.layer = layer
        self.last = bool(last)

    def __call__(
        self, xs: Num[Array, "..."], *, key: Key[Array, ""] | None = None
    ) -> Num[Array, "..."]:
        """**Arguments:**

        - `xs`: one sequence, `(time, in)`, or a batch of them in the layout of the layer. Call
            the layer itself to give it a state or lengths.
        - `key`: for dropout.

        **Returns:**

        The outputs of all steps, in the layout of `xs`; with `last`, the outputs of the last
        step, without the axis of time.
        """
        ys, _ = self.layer(xs, key=key)
        if not self.last:
            return ys
        is_batch = self.layer._is_batch(xs)
        axis = 1 if is_batch and not self.layer.time_major else 0
        channels = CHANNELS if is_batch else CHANNELS - 1
        ends = (-1, 0) if not self.layer.reverse else (0, -1)
        n_directions = len(self.layer.cells[-1])

        def last_output(y):
            parts = jnp.split(y, n_directions, channels) if n_directions > 1 else [y]
            taken = [jnp.take(p, end, axis) for p, end in zip(parts, ends, strict=False)]
            return jnp.concatenate(taken, channels - 1) if n_directions > 1 else taken[0]

        return jax.tree.map(last_output, ys)
