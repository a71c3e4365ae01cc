"""Layers of recurrently connected spiking neurons over time."""

import functools as ft
from typing import Any, ClassVar

import equinox as eqx
from jaxtyping import Array, Inexact, Key, PyTree

from .._recurrent.stack import Stack
from .._recurrent.states import zero_states
from .abstract_layer import AbstractSpiking, single_cell, spiking_cells, spiking_from_cell
from .parameters import Parameter
from .recurrent_cells import RALIFCell, RCuBaLIFCell, RLIFCell
from .weighted_cell import WeightedCell


class RLIF(AbstractSpiking):
    r"""Recurrently connected leaky integrate-and-fire neurons over time.

    An [`eqx_grads.nn.RLIFCell`][] over time, as [`eqx_grads.nn.LIF`][] is an
    [`eqx_grads.nn.LIFCell`][] over time.

    !!! example

        ```python
        import eqx_grads as eqg
        import equinox as eqx
        import jax
        import jax.numpy as jnp

        rlif = eqg.nn.RLIF(3, 8, beta=0.9, key=jax.random.key(0))
        xs = jnp.ones((20, 3))
        grads = eqx.filter_grad(lambda rlif: jnp.mean(rlif(xs)[0]))(rlif)
        print(grads.cells[0][0].cell.weight_hh.shape)
        ```

        ```text
        (8, 8)
        ```

    **Derivative:**

    As for [`eqx_grads.nn.LIF`][]. The gradient of $V$ is one matrix product for a chunk.
    """

    _cell_types: ClassVar[tuple[type, ...]] = (RLIFCell, WeightedCell)
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
        key: Key[Array, ""],
        **neurons: Any,
    ):
        """**Arguments:**

        - `beta`: as for [`eqx_grads.nn.RLIFCell`][].
        - `neurons`: all other options of that cell.

        All others as for [`eqx_grads.nn.LIF`][].
        """
        options = {"dtype": dtype, **neurons}
        make = lambda key: RLIFCell(hidden_size, beta, key=key, **options)
        self.cells = spiking_cells(
            "RLIF",
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
    ) -> "RLIF":
        """The layer that runs this cell.

        **Arguments:**

        - `cell`: an [`eqx_grads.nn.RLIFCell`][], or an [`eqx_grads.nn.WeightedCell`][] of
            one.
        - `keep`, `reverse`, `time_major`, `learn_initial_state`: as above.

        **Returns:**

        A layer of one cell, which shares the arrays of `cell`.
        """
        return spiking_from_cell(
            ft.partial(RLIF, 1, 1, 0.5),
            cell,
            RLIFCell,
            keep=keep,
            reverse=reverse,
            time_major=time_major,
            learn_initial_state=learn_initial_state,
        )

    def to_cell(self) -> Any:
        """The only cell of a layer that has one. It is an [`eqx_grads.nn.WeightedCell`][] if
        there are input weights."""
        return single_cell(self)


class RALIF(AbstractSpiking):
    r"""Recurrently connected neurons whose threshold rises as they fire, over time.

    An [`eqx_grads.nn.RALIFCell`][] over time, as [`eqx_grads.nn.LIF`][] is an
    [`eqx_grads.nn.LIFCell`][] over time.

    !!! example

        ```python
        import eqx_grads as eqg
        import equinox as eqx
        import jax
        import jax.numpy as jnp

        ralif = eqg.nn.RALIF(3, 8, beta=0.9, rho=0.99, key=jax.random.key(0))
        xs = jnp.ones((20, 3))
        grads = eqx.filter_grad(lambda ralif: jnp.mean(ralif(xs)[0]))(ralif)
        print(grads.cells[0][0].cell.weight_hh.shape)
        ```

        ```text
        (8, 8)
        ```

    **Derivative:**

    As for [`eqx_grads.nn.ALIF`][]. The gradient of $V$ is one matrix product for a chunk.
    """

    _cell_types: ClassVar[tuple[type, ...]] = (RALIFCell, WeightedCell)
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
        key: Key[Array, ""],
        **neurons: Any,
    ):
        """**Arguments:**

        - `beta`, `rho`: as for [`eqx_grads.nn.RALIFCell`][].
        - `neurons`: all other options of that cell.

        All others as for [`eqx_grads.nn.LIF`][].
        """
        options = {"dtype": dtype, **neurons}
        make = lambda key: RALIFCell(hidden_size, beta, rho, key=key, **options)
        self.cells = spiking_cells(
            "RALIF",
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
    ) -> "RALIF":
        """The layer that runs this cell.

        **Arguments:**

        - `cell`: an [`eqx_grads.nn.RALIFCell`][], or an [`eqx_grads.nn.WeightedCell`][] of
            one.
        - `keep`, `reverse`, `time_major`, `learn_initial_state`: as above.

        **Returns:**

        A layer of one cell, which shares the arrays of `cell`.
        """
        return spiking_from_cell(
            ft.partial(RALIF, 1, 1, 0.5, 0.5),
            cell,
            RALIFCell,
            keep=keep,
            reverse=reverse,
            time_major=time_major,
            learn_initial_state=learn_initial_state,
        )

    def to_cell(self) -> Any:
        """The only cell of a layer that has one. It is an [`eqx_grads.nn.WeightedCell`][] if
        there are input weights."""
        return single_cell(self)


class RCuBaLIF(AbstractSpiking):
    r"""Recurrently connected current-based neurons over time.

    An [`eqx_grads.nn.RCuBaLIFCell`][] over time, as [`eqx_grads.nn.LIF`][] is an
    [`eqx_grads.nn.LIFCell`][] over time.

    !!! example

        ```python
        import eqx_grads as eqg
        import equinox as eqx
        import jax
        import jax.numpy as jnp

        rcubalif = eqg.nn.RCuBaLIF(3, 8, alpha=0.8, beta=0.9, key=jax.random.key(0))
        xs = jnp.ones((20, 3))
        grads = eqx.filter_grad(lambda rcubalif: jnp.mean(rcubalif(xs)[0]))(rcubalif)
        print(grads.cells[0][0].cell.weight_hh.shape)
        ```

        ```text
        (8, 8)
        ```

    **Derivative:**

    As for [`eqx_grads.nn.CuBaLIF`][]. The gradient of $V$ is one matrix product for a chunk.
    """

    _cell_types: ClassVar[tuple[type, ...]] = (RCuBaLIFCell, WeightedCell)
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
        key: Key[Array, ""],
        **neurons: Any,
    ):
        """**Arguments:**

        - `alpha`, `beta`: as for [`eqx_grads.nn.RCuBaLIFCell`][].
        - `neurons`: all other options of that cell.

        All others as for [`eqx_grads.nn.LIF`][].
        """
        options = {"dtype": dtype, **neurons}
        make = lambda key: RCuBaLIFCell(hidden_size, alpha, beta, key=key, **options)
        self.cells = spiking_cells(
            "RCuBaLIF",
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
    ) -> "RCuBaLIF":
        """The layer that runs this cell.

        **Arguments:**

        - `cell`: an [`eqx_grads.nn.RCuBaLIFCell`][], or an [`eqx_grads.nn.WeightedCell`][] of
            one.
        - `keep`, `reverse`, `time_major`, `learn_initial_state`: as above.

        **Returns:**

        A layer of one cell, which shares the arrays of `cell`.
        """
        return spiking_from_cell(
            ft.partial(RCuBaLIF, 1, 1, 0.5, 0.5),
            cell,
            RCuBaLIFCell,
            keep=keep,
            reverse=reverse,
            time_major=time_major,
            learn_initial_state=learn_initial_state,
        )

    def to_cell(self) -> Any:
        """The only cell of a layer that has one. It is an [`eqx_grads.nn.WeightedCell`][] if
        there are input weights."""
        return single_cell(self)
