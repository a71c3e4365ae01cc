"""Layers of spiking neurons over time."""

import functools as ft
from typing import Any, ClassVar

import equinox as eqx
from jaxtyping import Array, Inexact, Key, PyTree

from .._recurrent.stack import Stack
from .._recurrent.states import zero_states
from .abstract_layer import AbstractSpiking, single_cell, spiking_cells, spiking_from_cell
from .cells import ALIFCell, CuBaLIFCell, LICell, LIFCell
from .parameters import Parameter
from .weighted_cell import WeightedCell


class LIF(AbstractSpiking):
    r"""Leaky integrate-and-fire neurons over time, with a backward pass written by hand.

    An [`eqx_grads.nn.LIFCell`][] in a `jax.lax.scan`, with the inputs $W x + b$: the same
    spikes, and up to rounding the same gradients. The outputs are the spikes, and the state is
    an [`eqx_grads.nn.LIFState`][].

    !!! example

        ```python
        import eqx_grads as eqg
        import equinox as eqx
        import jax
        import jax.numpy as jnp

        lif = eqg.nn.LIF(3, 8, beta=0.9, learn_beta=True, key=jax.random.key(0))
        xs = jnp.ones((5, 20, 3))  # a batch of five sequences

        @eqx.filter_grad
        def gradient(lif):
            spikes, state = lif(xs)
            print(spikes.shape, state.membrane.shape)
            return jnp.mean(spikes)

        cell = gradient(lif).cells[0][0]
        print(cell.weight_ih.shape, cell.cell.beta != 0)
        ```

        ```text
        (5, 20, 8) (5, 8)
        (8, 3) True
        ```

    **Derivative:**

    Written by hand, over chunks of several steps. With $g$ for the derivative of the surrogate
    and $\bar s'$, $\bar u'$ for the cotangents of a new state, $\bar x = \bar u' + g\,\bar s'$
    and, with a detached reset that subtracts, $\bar u = \beta\,\bar x$. The gradient of each
    weight is one matrix product for a chunk, and is not computed for frozen weights. Both modes
    (forward mode by plain differentiation), all orders; `jax.vmap` of the layer computes one
    gradient for the batch.
    """

    _cell_types: ClassVar[tuple[type, ...]] = (LIFCell, WeightedCell)
    cells: tuple[tuple[Any, ...], ...]
    initial_state: PyTree[Inexact[Array, "..."]] | None
    stack: Stack
    keep: str = eqx.field(static=True)

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        beta: Parameter,
        *,
        num_layers: int = 1,
        bidirectional: bool = False,
        dropout: float = 0.0,
        use_input_weight: bool = True,
        use_bias: bool = True,
        learn_initial_state: bool = False,
        keep: str = "membranes",
        reverse: bool = False,
        time_major: bool = False,
        dtype: Any = None,
        key: Key[Array, ""] | None = None,
        **neurons: Any,
    ):
        """**Arguments:**

        - `input_size`: the number of inputs.
        - `hidden_size`: the number of neurons.
        - `beta`: as for [`eqx_grads.nn.LIFCell`][].
        - `use_input_weight`: whether there are input weights. If not, each neuron has an input
            of its own, which is its current, and `input_size` has to be `hidden_size`.
        - `use_bias`: whether there are biases, if there are input weights. Both are initialized
            as in `equinox.nn.Linear`.
        - `keep`: the residuals of the recurrence. `"membranes"`: the spikes, which are the
            outputs, and the membrane potentials. `"spikes"`: the backward pass recomputes the
            potentials, with one more product of the inputs and the weights.
        - `num_layers`, `bidirectional`, `dropout`, `learn_initial_state`, `reverse`,
            `time_major`: as for [`eqx_grads.nn.GRU`][]. All layers of a stack have the same
            constants.
        - `dtype`: of weights, learned constants and the initial state.
        - `key`: for the weights and biases. It may be left out where there are none.
        - `neurons`: all other options of [`eqx_grads.nn.LIFCell`][]: `threshold`, `reset`,
            `learn_beta`, `learn_threshold`, `detach_reset` and `surrogate`.
        """
        make = lambda key: LIFCell(hidden_size, beta, dtype=dtype, **neurons)
        self.cells = spiking_cells(
            "LIF",
            make,
            input_size,
            hidden_size,
            num_layers=num_layers,
            bidirectional=bidirectional,
            dropout=dropout,
            keep=keep,
            use_input_weight=use_input_weight,
            use_bias=use_bias,
            learn_initial_state=learn_initial_state,
            reverse=reverse,
            time_major=time_major,
            key=key,
        )
        self.initial_state = (
            zero_states(type(self).__name__, self.cells) if learn_initial_state else None
        )
        self.stack = Stack(dropout, reverse, time_major)
        self.keep = keep

    @staticmethod
    def from_cell(
        cell: Any,
        *,
        keep: str = "membranes",
        reverse: bool = False,
        time_major: bool = False,
        learn_initial_state: bool = False,
    ) -> "LIF":
        """The layer that runs this cell.

        **Arguments:**

        - `cell`: an [`eqx_grads.nn.LIFCell`][], or an [`eqx_grads.nn.WeightedCell`][] of
            one.
        - `keep`, `reverse`, `time_major`, `learn_initial_state`: as above.

        **Returns:**

        A layer of one cell, which shares the arrays of `cell`.
        """
        return spiking_from_cell(
            ft.partial(LIF, 1, 1, 0.5),
            cell,
            LIFCell,
            keep=keep,
            reverse=reverse,
            time_major=time_major,
            learn_initial_state=learn_initial_state,
        )

    def to_cell(self) -> Any:
        """The only cell of a layer that has one. It is an [`eqx_grads.nn.WeightedCell`][] if
        there are input weights."""
        return single_cell(self)


class ALIF(AbstractSpiking):
    r"""Leaky integrate-and-fire neurons whose threshold rises as they fire, over time.

    An [`eqx_grads.nn.ALIFCell`][] over time, as [`eqx_grads.nn.LIF`][] is an
    [`eqx_grads.nn.LIFCell`][] over time.

    !!! example

        ```python
        import eqx_grads as eqg
        import equinox as eqx
        import jax
        import jax.numpy as jnp

        alif = eqg.nn.ALIF(3, 8, beta=0.9, rho=0.99, key=jax.random.key(0))
        xs = jnp.ones((20, 3))
        grads = eqx.filter_grad(lambda alif: jnp.mean(alif(xs)[0]))(alif)
        print(grads.cells[0][0].weight_ih.shape)
        ```

        ```text
        (8, 3)
        ```

    **Derivative:**

    As for [`eqx_grads.nn.LIF`][]. The backward pass recomputes the adaptation from the spikes.
    """

    _cell_types: ClassVar[tuple[type, ...]] = (ALIFCell, WeightedCell)
    cells: tuple[tuple[Any, ...], ...]
    initial_state: PyTree[Inexact[Array, "..."]] | None
    stack: Stack
    keep: str = eqx.field(static=True)

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        beta: Parameter,
        rho: Parameter,
        *,
        num_layers: int = 1,
        bidirectional: bool = False,
        dropout: float = 0.0,
        use_input_weight: bool = True,
        use_bias: bool = True,
        learn_initial_state: bool = False,
        keep: str = "membranes",
        reverse: bool = False,
        time_major: bool = False,
        dtype: Any = None,
        key: Key[Array, ""] | None = None,
        **neurons: Any,
    ):
        """**Arguments:**

        - `beta`, `rho`: as for [`eqx_grads.nn.ALIFCell`][].
        - `neurons`: all other options of that cell.

        All others as for [`eqx_grads.nn.LIF`][].
        """
        make = lambda key: ALIFCell(hidden_size, beta, rho, dtype=dtype, **neurons)
        self.cells = spiking_cells(
            "ALIF",
            make,
            input_size,
            hidden_size,
            num_layers=num_layers,
            bidirectional=bidirectional,
            dropout=dropout,
            keep=keep,
            use_input_weight=use_input_weight,
            use_bias=use_bias,
            learn_initial_state=learn_initial_state,
            reverse=reverse,
            time_major=time_major,
            key=key,
        )
        self.initial_state = (
            zero_states(type(self).__name__, self.cells) if learn_initial_state else None
        )
        self.stack = Stack(dropout, reverse, time_major)
        self.keep = keep

    @staticmethod
    def from_cell(
        cell: Any,
        *,
        keep: str = "membranes",
        reverse: bool = False,
        time_major: bool = False,
        learn_initial_state: bool = False,
    ) -> "ALIF":
        """The layer that runs this cell.

        **Arguments:**

        - `cell`: an [`eqx_grads.nn.ALIFCell`][], or an [`eqx_grads.nn.WeightedCell`][] of
            one.
        - `keep`, `reverse`, `time_major`, `learn_initial_state`: as above.

        **Returns:**

        A layer of one cell, which shares the arrays of `cell`.
        """
        return spiking_from_cell(
            ft.partial(ALIF, 1, 1, 0.5, 0.5),
            cell,
            ALIFCell,
            keep=keep,
            reverse=reverse,
            time_major=time_major,
            learn_initial_state=learn_initial_state,
        )

    def to_cell(self) -> Any:
        """The only cell of a layer that has one. It is an [`eqx_grads.nn.WeightedCell`][] if
        there are input weights."""
        return single_cell(self)


class CuBaLIF(AbstractSpiking):
    r"""Current-based leaky integrate-and-fire neurons over time.

    A [`eqx_grads.nn.CuBaLIFCell`][] over time, as [`eqx_grads.nn.LIF`][] is an
    [`eqx_grads.nn.LIFCell`][] over time.

    !!! example

        ```python
        import eqx_grads as eqg
        import equinox as eqx
        import jax
        import jax.numpy as jnp

        cuba = eqg.nn.CuBaLIF(3, 8, alpha=0.8, beta=0.9, key=jax.random.key(0))
        xs = jnp.ones((20, 3))
        grads = eqx.filter_grad(lambda cuba: jnp.mean(cuba(xs)[0]))(cuba)
        print(grads.cells[0][0].weight_ih.shape)
        ```

        ```text
        (8, 3)
        ```

    **Derivative:**

    As for [`eqx_grads.nn.LIF`][]. If $\alpha$ is learned, the backward pass computes the
    currents from the differences of the potentials.
    """

    _cell_types: ClassVar[tuple[type, ...]] = (CuBaLIFCell, WeightedCell)
    cells: tuple[tuple[Any, ...], ...]
    initial_state: PyTree[Inexact[Array, "..."]] | None
    stack: Stack
    keep: str = eqx.field(static=True)

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        alpha: Parameter,
        beta: Parameter,
        *,
        num_layers: int = 1,
        bidirectional: bool = False,
        dropout: float = 0.0,
        use_input_weight: bool = True,
        use_bias: bool = True,
        learn_initial_state: bool = False,
        keep: str = "membranes",
        reverse: bool = False,
        time_major: bool = False,
        dtype: Any = None,
        key: Key[Array, ""] | None = None,
        **neurons: Any,
    ):
        """**Arguments:**

        - `alpha`, `beta`: as for [`eqx_grads.nn.CuBaLIFCell`][].
        - `neurons`: all other options of that cell.

        All others as for [`eqx_grads.nn.LIF`][].
        """
        make = lambda key: CuBaLIFCell(hidden_size, alpha, beta, dtype=dtype, **neurons)
        self.cells = spiking_cells(
            "CuBaLIF",
            make,
            input_size,
            hidden_size,
            num_layers=num_layers,
            bidirectional=bidirectional,
            dropout=dropout,
            keep=keep,
            use_input_weight=use_input_weight,
            use_bias=use_bias,
            learn_initial_state=learn_initial_state,
            reverse=reverse,
            time_major=time_major,
            key=key,
        )
        self.initial_state = (
            zero_states(type(self).__name__, self.cells) if learn_initial_state else None
        )
        self.stack = Stack(dropout, reverse, time_major)
        self.keep = keep

    @staticmethod
    def from_cell(
        cell: Any,
        *,
        keep: str = "membranes",
        reverse: bool = False,
        time_major: bool = False,
        learn_initial_state: bool = False,
    ) -> "CuBaLIF":
        """The layer that runs this cell.

        **Arguments:**

        - `cell`: an [`eqx_grads.nn.CuBaLIFCell`][], or an [`eqx_grads.nn.WeightedCell`][] of
            one.
        - `keep`, `reverse`, `time_major`, `learn_initial_state`: as above.

        **Returns:**

        A layer of one cell, which shares the arrays of `cell`.
        """
        return spiking_from_cell(
            ft.partial(CuBaLIF, 1, 1, 0.5, 0.5),
            cell,
            CuBaLIFCell,
            keep=keep,
            reverse=reverse,
            time_major=time_major,
            learn_initial_state=learn_initial_state,
        )

    def to_cell(self) -> Any:
        """The only cell of a layer that has one. It is an [`eqx_grads.nn.WeightedCell`][] if
        there are input weights."""
        return single_cell(self)


class LI(AbstractSpiking):
    r"""Leaky integrators over time: non-spiking readout neurons.

    An [`eqx_grads.nn.LICell`][] over time, as [`eqx_grads.nn.LIF`][] is an
    [`eqx_grads.nn.LIFCell`][] over time. The outputs are the potentials.

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

    _cell_types: ClassVar[tuple[type, ...]] = (LICell, WeightedCell)
    cells: tuple[tuple[Any, ...], ...]
    initial_state: PyTree[Inexact[Array, "..."]] | None
    stack: Stack
    keep: str = eqx.field(static=True)

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        beta: Parameter,
        *,
        learn_beta: bool = False,
        num_layers: int = 1,
        bidirectional: bool = False,
        dropout: float = 0.0,
        use_input_weight: bool = True,
        use_bias: bool = True,
        learn_initial_state: bool = False,
        reverse: bool = False,
        time_major: bool = False,
        dtype: Any = None,
        key: Key[Array, ""] | None = None,
    ):
        """**Arguments:**

        - `beta`, `learn_beta`: as for [`eqx_grads.nn.LICell`][].

        All others as for [`eqx_grads.nn.LIF`][].
        """
        make = lambda key: LICell(hidden_size, beta, learn_beta=learn_beta, dtype=dtype)
        self.cells = spiking_cells(
            "LI",
            make,
            input_size,
            hidden_size,
            num_layers=num_layers,
            bidirectional=bidirectional,
            dropout=dropout,
            keep="membranes",
            use_input_weight=use_input_weight,
            use_bias=use_bias,
            learn_initial_state=learn_initial_state,
            reverse=reverse,
            time_major=time_major,
            key=key,
        )
        self.initial_state = (
            zero_states(type(self).__name__, self.cells) if learn_initial_state else None
        )
        self.stack = Stack(dropout, reverse, time_major)
        self.keep = "membranes"

    @staticmethod
    def from_cell(
        cell: Any,
        *,
        reverse: bool = False,
        time_major: bool = False,
        learn_initial_state: bool = False,
    ) -> "LI":
        """The layer that runs this cell.

        **Arguments:**

        - `cell`: an [`eqx_grads.nn.LICell`][], or an [`eqx_grads.nn.WeightedCell`][] of
            one.
        - `reverse`, `time_major`, `learn_initial_state`: as above.

        **Returns:**

        A layer of one cell, which shares the arrays of `cell`.
        """
        return spiking_from_cell(
            ft.partial(LI, 1, 1, 0.5),
            cell,
            LICell,
            reverse=reverse,
            time_major=time_major,
            learn_initial_state=learn_initial_state,
        )

    def to_cell(self) -> Any:
        """The only cell of a layer that has one. It is an [`eqx_grads.nn.WeightedCell`][] if
        there are input weights."""
        return single_cell(self)
