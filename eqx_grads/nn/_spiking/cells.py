"""Spiking neurons: one step of a layer of them, as a cell."""

import functools as ft
from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Num

from .dynamics import Dynamics, one_step
from .neurons import AbstractNeurons, AbstractSpikingNeurons
from .parameters import (
    ALIFState,
    check_inputs,
    check_reset,
    CuBaLIFState,
    float_dtype,
    known_surrogate,
    LIFState,
    LIState,
    NeuronParameter,
    Parameter,
    Reset,
    shape_of_layer,
    Surrogate,
)


class LIFCell(AbstractSpikingNeurons):
    r"""Leaky integrate-and-fire neurons.

    With $s$ and $u$ for the spikes and the membrane potential of the last step, and $x$ for
    the input,

    $$u' = \beta u + x - \theta s, \qquad s' = \Theta(u' - \theta)$$

    where $\Theta$ is one for positive numbers and zero for all others. So a neuron that has
    fired is reset in the next step. With `reset="zero"`, $u' = \beta\,(1 - s)\,u + x$; with
    `reset="none"`, $u' = \beta u + x$. The neurons have no input weights: put an
    `equinox.nn.Linear` or a convolution before them.

    These are `Leaky` neurons of [snnTorch](https://snntorch.readthedocs.io), with the names
    of its arguments and the same numbers.

    !!! example

        ```python
        import eqx_grads as eqg
        import equinox as eqx
        import jax
        import jax.numpy as jnp

        cell = eqg.nn.LIFCell(3, beta=0.9)
        linear = eqx.nn.Linear(2, 3, key=jax.random.key(0))

        @eqx.filter_grad
        def gradient(linear, xs):
            def step(state, x):
                state = cell(linear(x), state)
                return state, state.spikes

            _, spikes = jax.lax.scan(step, cell.initial_state(), xs)
            return jnp.sum(spikes)

        grads = gradient(linear, jnp.ones((5, 2)))
        print(grads.bias > 0)
        ```

        ```text
        [ True  True  True]
        ```

    **Derivative:**

    That of the equations, with the derivative of the surrogate in place of that of $\Theta$:
    see [`eqx_grads.surrogates.spike`][]. Both modes and all orders. With `detach_reset`, the
    $s$ of the reset is a constant.

    A $\beta$ that is an array is clipped to $[0, 1]$ with a straight-through gradient, so that
    a learned $\beta$ outside the interval can return. (In snnTorch, its gradient is zero from
    then on.) A parameter that is not learned is a constant of the program if it is a number.
    If it is an array, its gradient is zero.
    """

    _beta: NeuronParameter
    _threshold: NeuronParameter
    surrogate: Surrogate
    hidden_size: int | tuple[int, ...] = eqx.field(static=True)
    reset: Reset = eqx.field(static=True)
    detach_reset: bool = eqx.field(static=True)
    dtype: Any = eqx.field(static=True)

    def __init__(
        self,
        hidden_size: int | tuple[int, ...],
        beta: Parameter,
        *,
        threshold: Parameter = 1.0,
        reset: Reset = "subtract",
        learn_beta: bool = False,
        learn_threshold: bool = False,
        detach_reset: bool = True,
        surrogate: Surrogate | None = None,
        dtype: Any = None,
    ):
        """**Arguments:**

        - `hidden_size`: how many neurons, or the shape of the layer, `(channels, height,
            width)` after a convolution. Such a layer runs in [`eqx_grads.filter_scan`][] or
            `jax.lax.scan`: [`eqx_grads.nn.Recurrent`][] takes vectors.
        - `beta`: the decay factor of the potential per step, $\\beta$. From zero to one; a
            number, or an array or list with one for each neuron (that broadcasts to the layer
            without new axes). A number that is not learned is no array of the cell. An array
            that is not learned is one: its gradient is zero, but the weight decay of an
            optimizer would change it. Mask it there, or give a number.
        - `threshold`: $\\theta$, in the same forms; any real number.
        - `reset`: what follows a spike: `"subtract"`, `"zero"` or `"none"`.
        - `learn_beta`, `learn_threshold`: whether they are parameters. They are then arrays.
        - `detach_reset`: whether the reset is a constant for the gradient, as in snnTorch.
        - `surrogate`: as for [`eqx_grads.surrogates.spike`][]. The default is
            `eqx_grads.surrogates.atan()`, as in snnTorch.
        - `dtype`: of learned parameters and of `initial_state()`, a dtype of floats. The
            default is JAX's.

        **Raises:**

        [`eqx_grads.RuleError`][] if an argument is none of these. Of a JAX array, only the
        shape and the dtype are checked.
        """
        shape = shape_of_layer("LIFCell", hidden_size)
        dtype = float_dtype("LIFCell", dtype)
        check_reset("LIFCell", reset, detach_reset)
        parameter = ft.partial(NeuronParameter, "LIFCell", shape=shape, dtype=dtype)
        self._beta = parameter("beta", beta, learned=learn_beta, is_decay=True)
        self._threshold = parameter("threshold", threshold, learned=learn_threshold)
        self.surrogate = known_surrogate("LIFCell", surrogate)
        self.hidden_size = hidden_size
        self.reset = reset
        self.detach_reset = detach_reset
        self.dtype = dtype

    def initial_state(self) -> LIFState:
        """The neurons at rest, one example of them: all is zero."""
        zero = jnp.zeros(self.hidden_size, self.dtype)
        return LIFState(spikes=zero, membrane=zero)

    def _dynamics(self, like: Array) -> Dynamics:
        """The constants of a step, in the dtype of an array."""
        return Dynamics(
            beta=self._beta.cast(like),
            threshold=self._threshold.cast(like),
            surrogate=self.surrogate,
            reset=self.reset,
            detach_reset=self.detach_reset,
        )

    def __call__(self, x: Num[Array, "*hidden"], state: LIFState) -> LIFState:
        """**Arguments:**

        - `x`: the input of this step, one number for each neuron.
        - `state`: what the last step returned, or `initial_state()`.

        **Returns:**

        The next state, in the dtypes of `state`, whatever the dtype of `x` is, so that a scan
        can carry it. It is computed in the common dtype of both, and rounded once: with a
        bfloat16 state and float32 inputs, it is computed in float32 and returned in bfloat16.

        **Raises:**

        [`eqx_grads.RuleError`][] if `x` or an array of the state has another shape than the
        layer, if `x` is complex, or if the state is not of floats.
        """
        check_inputs("LIFCell", self.hidden_size, x, state, LIFState)
        return one_step(self, x, state)


class ALIFCell(AbstractSpikingNeurons):
    r"""Leaky integrate-and-fire neurons whose threshold rises as they fire.

    In the symbols of [`eqx_grads.nn.LIFCell`][], and with a trace $a$ of the spikes,

    $$a' = \rho\,a + s, \qquad u' = \beta u + x - \theta s, \qquad
    s' = \Theta(u' - \theta - \gamma a').$$

    A spike raises the threshold by $\gamma$ in the next step, and this increase decays slowly,
    by the factor $\rho$ per step: the neurons of [Bellec et al.
    (2020)](https://doi.org/10.1038/s41467-020-17236-y), whose $\beta$ is the $\gamma$ here.
    The $\beta$ of [Bellec et al. (2018)](https://arxiv.org/abs/1803.09574) belongs to a trace
    $a' = \rho\,a + (1 - \rho)\,s$: multiply it by $1 - \rho$. The reset subtracts $\theta$ in
    the former, as it does here, and $\theta + \gamma a'$ in the latter.

    !!! example

        ```python
        import eqx_grads as eqg
        import jax.numpy as jnp

        layer = eqg.nn.Recurrent(eqg.nn.ALIFCell(1, beta=0.9, rho=0.99))
        spikes, state = layer(jnp.full((50, 1), 0.5))
        print(spikes[:10].sum(), spikes[-10:].sum())  # it adapts
        ```

        ```text
        2.0 1.0
        ```

    **Derivative:**

    As for [`eqx_grads.nn.LIFCell`][], also for $\rho$. `detach_reset` is about the
    reset only: the gradient does pass through the trace.
    """

    _beta: NeuronParameter
    _rho: NeuronParameter
    _strength: NeuronParameter
    _threshold: NeuronParameter
    surrogate: Surrogate
    hidden_size: int | tuple[int, ...] = eqx.field(static=True)
    reset: Reset = eqx.field(static=True)
    detach_reset: bool = eqx.field(static=True)
    dtype: Any = eqx.field(static=True)

    def __init__(
        self,
        hidden_size: int | tuple[int, ...],
        beta: Parameter,
        rho: Parameter,
        *,
        strength: Parameter = 1.8,
        threshold: Parameter = 1.0,
        reset: Reset = "subtract",
        learn_beta: bool = False,
        learn_rho: bool = False,
        learn_threshold: bool = False,
        detach_reset: bool = True,
        surrogate: Surrogate | None = None,
        dtype: Any = None,
    ):
        """**Arguments:**

        - `rho`: the decay factor of the trace, $\\rho$; as `beta`.
        - `strength`: by how much a spike raises the threshold, $\\gamma$: a number, or an
            array with one for each neuron, as `beta`. It is not learned. The default is
            Norse's.
        - `learn_rho`: whether `rho` is a parameter.

        All others as for [`eqx_grads.nn.LIFCell`][].
        """
        shape = shape_of_layer("ALIFCell", hidden_size)
        dtype = float_dtype("ALIFCell", dtype)
        check_reset("ALIFCell", reset, detach_reset)
        parameter = ft.partial(NeuronParameter, "ALIFCell", shape=shape, dtype=dtype)
        self._beta = parameter("beta", beta, learned=learn_beta, is_decay=True)
        self._rho = parameter("rho", rho, learned=learn_rho, is_decay=True)
        self._strength = parameter("strength", strength)
        self._threshold = parameter("threshold", threshold, learned=learn_threshold)
        self.surrogate = known_surrogate("ALIFCell", surrogate)
        self.hidden_size = hidden_size
        self.reset = reset
        self.detach_reset = detach_reset
        self.dtype = dtype

    @property
    def rho(self) -> Any:
        """The decay factor of the trace: a number or an array."""
        return self._rho.value

    @property
    def learn_rho(self) -> bool:
        """Whether `rho` is learned."""
        return self._rho.learned

    @property
    def strength(self) -> Any:
        """By how much a spike raises the threshold: a number or an array."""
        return self._strength.value

    def initial_state(self) -> ALIFState:
        """The neurons at rest: all is zero."""
        zero = jnp.zeros(self.hidden_size, self.dtype)
        return ALIFState(spikes=zero, membrane=zero, adaptation=zero)

    def _dynamics(self, like: Array) -> Dynamics:
        """The constants of a step, in the dtype of an array."""
        return Dynamics(
            beta=self._beta.cast(like),
            rho=self._rho.cast(like),
            strength=self._strength.cast(like),
            threshold=self._threshold.cast(like),
            surrogate=self.surrogate,
            reset=self.reset,
            detach_reset=self.detach_reset,
        )

    def __call__(self, x: Num[Array, "*hidden"], state: ALIFState) -> ALIFState:
        """As for [`eqx_grads.nn.LIFCell`][]."""
        check_inputs("ALIFCell", self.hidden_size, x, state, ALIFState)
        return one_step(self, x, state)


class CuBaLIFCell(AbstractSpikingNeurons):
    r"""Current-based leaky integrate-and-fire neurons: the input current decays over time.

    In the symbols of [`eqx_grads.nn.LIFCell`][], and with a synaptic current $i$,

    $$i' = \alpha\,i + x, \qquad u' = \beta u + i' - \theta s, \qquad
    s' = \Theta(u' - \theta).$$

    With `reset="zero"`, it is $u' = \beta\,(1 - s)\,u + i'$. These are `Synaptic` neurons of
    snnTorch. (There, `"zero"` takes the current of the step off as well, $u' = (1 - s)\,(\beta
    u + i')$, as it does in `RLeaky` and `RSynaptic`, but not in `Leaky`. Here, no input is
    lost.)

    !!! example

        ```python
        import eqx_grads as eqg
        import jax.numpy as jnp

        cell = eqg.nn.CuBaLIFCell(1, alpha=0.5, beta=0.5, threshold=0.9)
        state = cell(jnp.array([0.8]), cell.initial_state())
        print(state.spikes)
        state = cell(jnp.array([0.5]), state)  # 0.8 are 0.4 in the current, 0.4 in the membrane
        print(f"{state.membrane[0]:.1f}")
        print(state.spikes)
        ```

        ```text
        [0.]
        1.3
        [1.]
        ```

    **Derivative:**

    As for [`eqx_grads.nn.LIFCell`][], also for $\alpha$.
    """

    _alpha: NeuronParameter
    _beta: NeuronParameter
    _threshold: NeuronParameter
    surrogate: Surrogate
    hidden_size: int | tuple[int, ...] = eqx.field(static=True)
    reset: Reset = eqx.field(static=True)
    detach_reset: bool = eqx.field(static=True)
    dtype: Any = eqx.field(static=True)

    def __init__(
        self,
        hidden_size: int | tuple[int, ...],
        alpha: Parameter,
        beta: Parameter,
        *,
        threshold: Parameter = 1.0,
        reset: Reset = "subtract",
        learn_alpha: bool = False,
        learn_beta: bool = False,
        learn_threshold: bool = False,
        detach_reset: bool = True,
        surrogate: Surrogate | None = None,
        dtype: Any = None,
    ):
        """**Arguments:**

        - `alpha`: the decay factor of the current, $\\alpha$; as `beta`.
        - `learn_alpha`: whether `alpha` is a parameter.

        All others as for [`eqx_grads.nn.LIFCell`][].
        """
        shape = shape_of_layer("CuBaLIFCell", hidden_size)
        dtype = float_dtype("CuBaLIFCell", dtype)
        check_reset("CuBaLIFCell", reset, detach_reset)
        parameter = ft.partial(NeuronParameter, "CuBaLIFCell", shape=shape, dtype=dtype)
        self._alpha = parameter("alpha", alpha, learned=learn_alpha, is_decay=True)
        self._beta = parameter("beta", beta, learned=learn_beta, is_decay=True)
        self._threshold = parameter("threshold", threshold, learned=learn_threshold)
        self.surrogate = known_surrogate("CuBaLIFCell", surrogate)
        self.hidden_size = hidden_size
        self.reset = reset
        self.detach_reset = detach_reset
        self.dtype = dtype

    @property
    def alpha(self) -> Any:
        """The decay factor of the current: a number or an array."""
        return self._alpha.value

    @property
    def learn_alpha(self) -> bool:
        """Whether `alpha` is learned."""
        return self._alpha.learned

    def initial_state(self) -> CuBaLIFState:
        """The neurons at rest: all is zero."""
        zero = jnp.zeros(self.hidden_size, self.dtype)
        return CuBaLIFState(spikes=zero, current=zero, membrane=zero)

    def _dynamics(self, like: Array) -> Dynamics:
        """The constants of a step, in the dtype of an array."""
        return Dynamics(
            beta=self._beta.cast(like),
            alpha=self._alpha.cast(like),
            threshold=self._threshold.cast(like),
            surrogate=self.surrogate,
            reset=self.reset,
            detach_reset=self.detach_reset,
        )

    def __call__(self, x: Num[Array, "*hidden"], state: CuBaLIFState) -> CuBaLIFState:
        """As for [`eqx_grads.nn.LIFCell`][]."""
        check_inputs("CuBaLIFCell", self.hidden_size, x, state, CuBaLIFState)
        return one_step(self, x, state)


class LICell(AbstractNeurons):
    r"""Leaky integrators: non-spiking readout neurons.

    $$u' = \beta u + x$$

    !!! example

        ```python
        import eqx_grads as eqg
        import jax.numpy as jnp

        layer = eqg.nn.Recurrent(eqg.nn.LICell(1, beta=0.5))
        membranes, _ = layer(jnp.ones((3, 1)))
        print(membranes[:, 0])
        ```

        ```text
        [1.   1.5  1.75]
        ```

    **Derivative:**

    That of the equation; of $\beta$, as for [`eqx_grads.nn.LIFCell`][].
    """

    _beta: NeuronParameter
    hidden_size: int | tuple[int, ...] = eqx.field(static=True)
    dtype: Any = eqx.field(static=True)

    def __init__(
        self,
        hidden_size: int | tuple[int, ...],
        beta: Parameter,
        *,
        learn_beta: bool = False,
        dtype: Any = None,
    ):
        """**Arguments:**

        As for [`eqx_grads.nn.LIFCell`][].
        """
        shape = shape_of_layer("LICell", hidden_size)
        dtype = float_dtype("LICell", dtype)
        parameter = ft.partial(NeuronParameter, "LICell", shape=shape, dtype=dtype)
        self._beta = parameter("beta", beta, learned=learn_beta, is_decay=True)
        self.hidden_size = hidden_size
        self.dtype = dtype

    def initial_state(self) -> LIState:
        """The neurons at rest: zero."""
        return LIState(membrane=jnp.zeros(self.hidden_size, self.dtype))

    def _dynamics(self, like: Array) -> Dynamics:
        """The constants of a step, in the dtype of an array."""
        return Dynamics(beta=self._beta.cast(like))

    def __call__(self, x: Num[Array, "*hidden"], state: LIState) -> LIState:
        """As for [`eqx_grads.nn.LIFCell`][]."""
        check_inputs("LICell", self.hidden_size, x, state, LIState)
        return one_step(self, x, state)
