"""Layers of spiking neurons over time."""

from typing import Any, ClassVar

import equinox as eqx
from jaxtyping import Array, Key

from .._arguments import check_real, common_dtype
from .._recurrent.cell_scan import FAST_PATHS, run_cell
from .._recurrent.layer import AbstractStacked
from .._recurrent.stack import make_stack, StackOptions
from .cell import LIFCell, Parameter
from .spiking_scan import spiking_scan


def _run_neurons(cell, xs, state, valid, reverse, _):
    weights = cell.weight_ih, cell.bias, cell.weight_hh
    weights, xs, state = common_dtype(weights, xs, state)
    args: Any = (*weights, cell._dynamics(xs.dtype), xs, state, valid)
    return spiking_scan(*args, reverse=reverse)


FAST_PATHS[LIFCell] = _run_neurons


class AbstractNeurons(AbstractStacked):
    """Neurons over time, whose cells have some options by default."""

    _of_cells: eqx.AbstractClassVar[dict[str, Any]]

    def __init__(
        self,
        input_size: int | None,
        hidden_size: int | tuple[int, ...],
        beta: Parameter,
        *,
        key: Key[Array, ""] | None = None,
        **options: Any,
    ):
        """**Arguments:**

        - `input_size`: the number of inputs, or `None`: the layer then has no input weights,
            and each neuron has its own input. All layers over time have this argument first;
            [`eqx_grads.nn.LIFCell`][] has it by keyword.
        - `hidden_size`: the number of neurons. Without weights it may be a shape, such as
            `(channels, height, width)`; the outputs of two directions are joined along its
            first axis.
        - `beta`: as for [`eqx_grads.nn.LIFCell`][].
        - `key`: for the weights. You may leave it out if the layer has no weights.
        - `options`: all others of [`eqx_grads.nn.LIFCell`][], and the options of all recurrent
            layers: `num_layers`, `bidirectional`, `dropout`, `learn_initial_state`, `reverse`
            and `time_major` of [`eqx_grads.nn.GRU`][]. All layers of a stack have the same
            constants.
        """
        options = {**self._of_cells, **options}
        of_stack = StackOptions.__annotations__.keys() & options
        of_stack = {name: options.pop(name) for name in of_stack}

        def make(size, *, key):
            size = None if input_size is None else size
            return LIFCell(hidden_size, beta, input_size=size, key=key, **options)

        self.cells, self.initial_state, self.stack = make_stack(
            type(self).__name__, make, input_size, hidden_size, key, **of_stack
        )

    def _run_cell(self, cell, xs, state, valid, reverse):
        check_real(type(self).__name__, xs)
        return run_cell(cell, xs, state, valid, reverse)


class LIF(AbstractNeurons):
    r"""Leaky integrate-and-fire neurons over time, with a backward pass that is split by hand.

    An [`eqx_grads.nn.LIFCell`][] in a `jax.lax.scan`: the same spikes, and up to rounding the
    same gradients. The outputs are the spikes, and the state is an [`eqx_grads.nn.LIFState`][].
    The options of the cell make neurons with synaptic currents, adaptation and recurrent
    connections.

    !!! example

        ```python
        import eqx_grads as eqg
        import equinox as eqx
        import jax
        import jax.numpy as jnp

        lif = eqg.nn.LIF(3, 8, beta=0.9, recurrent=True, learn="beta", key=jax.random.key(0))
        xs = jnp.ones((5, 20, 3))  # a batch of five sequences

        @eqx.filter_grad
        def gradient(lif):
            spikes, state = lif(xs)
            print(spikes.shape, state.membrane.shape)
            return jnp.mean(spikes)

        cell = gradient(lif).cells[0][0]
        print(cell.weight_ih.shape, cell.weight_hh.shape, cell.beta != 0)

        # After a convolution: each neuron has its own input.
        lif = eqg.nn.LIF(None, (2, 4, 4), beta=0.9)
        print(lif(jnp.ones((5, 20, 2, 4, 4)))[0].shape)
        ```

        ```text
        (5, 20, 8) (5, 8)
        (8, 3) (8, 8) True
        (5, 20, 2, 4, 4)
        ```

    **Derivative:**

    Split by hand, over chunks of several steps. With $g$ for the derivative of the surrogate
    and $\bar s'$, $\bar u'$ for the cotangents of a new state, $\bar x = \bar u' + g\,\bar s'$
    and, with a detached reset that subtracts, $\bar u = \beta\,\bar x$. The gradient of each
    weight is one matrix product per chunk, and is not computed for frozen weights. Both modes
    (forward mode by plain differentiation), all orders; `jax.vmap` of the layer computes one
    gradient for the batch.
    """

    _of_cells: ClassVar[dict[str, Any]] = {}
    __init__ = AbstractNeurons.__init__  # a type checker sees no inherited one


class LI(AbstractNeurons):
    r"""Leaky integrators over time: neurons for a readout, which do not spike.

    An [`eqx_grads.nn.LIFCell`][] with `threshold=None` over time, as [`eqx_grads.nn.LIF`][].
    The outputs are the potentials.

    !!! example

        ```python
        import eqx_grads as eqg
        import equinox as eqx
        import jax
        import jax.numpy as jnp

        li = eqg.nn.LI(3, 8, beta=0.9, key=jax.random.key(0))
        xs = jnp.ones((20, 3))
        grads = eqx.filter_grad(lambda li: jnp.mean(li(xs)[0] ** 2))(li)
        print(grads.cells[0][0].weight_ih.shape)
        ```

        ```text
        (8, 3)
        ```

    **Derivative:**

    As for [`eqx_grads.nn.LIF`][], without the spikes.
    """

    _of_cells: ClassVar[dict[str, Any]] = {"threshold": None}
    __init__ = AbstractNeurons.__init__  # a type checker sees no inherited one
