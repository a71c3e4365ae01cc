"""Spiking neurons: one step of a layer of them, as a cell."""

from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Num

from ...surrogates import spike
from .._recurrent.layer import common_dtype
from .parameters import (
    ALIFState,
    check_inputs,
    check_reset,
    CuBaLIFState,
    decay,
    decay_of,
    float_dtype,
    known_surrogate,
    LIFState,
    like_last,
    LIState,
    next_membrane,
    Parameter,
    parameter,
    Reset,
    shape_of_layer,
    Surrogate,
    value_of,
)


class LIFCell(eqx.Module):
    r"""Leaky integrate-and-fire neurons.

    With $s$ and $u$ for the spikes and the membrane potential of the last step, and $x$ for
    the input,

    $$u' = \beta u + x - \theta s, \qquad s' = \Theta(u' - \theta)$$

    where $\Theta$ is one for what is greater than zero. So a neuron that has fired is reset in
    the next step. With `reset="zero"`, it is $u' = \beta\,(1 - s)\,u + x$; with
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
        assert jnp.all(grads.bias > 0)
        ```

    **Derivative:**

    That of the equations, with the derivative of the surrogate in place of that of $\Theta$:
    see [`eqx_grads.surrogates.spike`][]. Both modes and all orders. With `detach_reset`, the
    $s$ of the reset is a constant.

    A $\beta$ that is an array is clipped to $[0, 1]$, and the gradient passes the clipping as
    if there were none: a $\beta$ that is learned and has walked out can walk back. (In
    snnTorch, its gradient is zero from then on.) What is not learned is a constant of the
    program if it is a number. If it is an array, it has the gradient zero.
    """

    beta: Parameter
    threshold: Parameter
    surrogate: Surrogate
    hidden_size: int | tuple[int, ...] = eqx.field(static=True)
    reset: Reset = eqx.field(static=True)
    learn_beta: bool = eqx.field(static=True)
    learn_threshold: bool = eqx.field(static=True)
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
        - `beta`: what a step leaves of a potential, $\\beta$. From zero to one; a number, or an
            array or list with one for each neuron (that broadcasts to the layer without new
            axes). A number that is not learned is no leaf of the cell. An array is one, and
            what moves a leaf without a gradient moves it, like the weight decay of an
            optimizer: keep it out of that, or give a number.
        - `threshold`: $\\theta$, likewise; any real number.
        - `reset`: what follows a spike: `"subtract"`, `"zero"` or `"none"`.
        - `learn_beta`, `learn_threshold`: whether they are parameters. They are then arrays.
        - `detach_reset`: whether the gradient goes past the reset and not through it. It does
            in snnTorch.
        - `surrogate`: as for [`eqx_grads.surrogates.spike`][]. The default is
            `eqx_grads.surrogates.atan()`, which is that of snnTorch.
        - `dtype`: of what is learned and of `initial_state()`, one of floats. The default is
            JAX's.

        **Raises:**

        [`eqx_grads.RuleError`][] if an argument is none of these. Of an array of JAX, only the
        shape and the dtype are looked at.
        """
        shape, dtype = shape_of_layer("LIFCell", hidden_size), float_dtype("LIFCell", dtype)
        check_reset("LIFCell", reset)
        self.beta = decay("LIFCell", "beta", beta, shape, learn_beta, dtype)
        self.threshold = parameter(
            "LIFCell", "threshold", threshold, shape, learn_threshold, dtype
        )
        self.surrogate = known_surrogate("LIFCell", surrogate)
        self.hidden_size = hidden_size
        self.reset = reset
        self.learn_beta = learn_beta
        self.learn_threshold = learn_threshold
        self.detach_reset = detach_reset
        self.dtype = dtype

    def initial_state(self) -> LIFState:
        """The neurons at rest, one example of them: all is zero."""
        zero = jnp.zeros(self.hidden_size, self.dtype)
        return LIFState(spikes=zero, membrane=zero)

    def __call__(self, x: Num[Array, "*hidden"], state: LIFState) -> LIFState:
        """**Arguments:**

        - `x`: the input of this step, one number for each neuron.
        - `state`: what the last step returned, or `initial_state()`.

        **Returns:**

        The next state, in the dtypes of `state`, whatever that of `x` is, so that a scan can
        carry it. It is computed in the common dtype of both, and rounded once: a bfloat16 cell
        takes float32 inputs, adds and fires in float32, and remembers and emits bfloat16.

        **Raises:**

        [`eqx_grads.RuleError`][] if `x` or an array of the state has another shape than the
        layer, if `x` is complex, or if the state is not of floats.
        """
        check_inputs("LIFCell", self.hidden_size, x, state, LIFState)
        x, spikes, membrane = common_dtype(x, state.spikes, state.membrane)
        membrane = next_membrane(self, x, spikes, membrane)
        threshold = value_of(self.threshold, self.learn_threshold, membrane)
        new = LIFState(spike(membrane - threshold, self.surrogate), membrane)
        return like_last(new, state)


class ALIFCell(eqx.Module):
    r"""Leaky integrate-and-fire neurons whose threshold rises as they fire.

    In the symbols of [`eqx_grads.nn.LIFCell`][], and with a trace $a$ of the spikes,

    $$a' = \rho\,a + s, \qquad u' = \beta u + x - \theta s, \qquad
    s' = \Theta(u' - \theta - \gamma a').$$

    A spike raises the threshold by $\gamma$ in the next step, and what is added decays with
    $\rho$, which is slow: the neurons of [Bellec et al.
    (2020)](https://doi.org/10.1038/s41467-020-17236-y), whose $\beta$ is the $\gamma$ here.
    That of [Bellec et al. (2018)](https://arxiv.org/abs/1803.09574) belongs to a trace
    $a' = \rho\,a + (1 - \rho)\,s$: multiply it by $1 - \rho$. The reset subtracts $\theta$ in
    the former, as it does here, and $\theta + \gamma a'$ in the latter.

    !!! example

        ```python
        import eqx_grads as eqg
        import jax.numpy as jnp

        layer = eqg.nn.Recurrent(eqg.nn.ALIFCell(1, beta=0.9, rho=0.99))
        spikes, state = layer(jnp.full((50, 1), 0.5))
        assert jnp.sum(spikes[:10]) > jnp.sum(spikes[-10:])  # it tires
        ```

    **Derivative:**

    As for [`eqx_grads.nn.LIFCell`][], and likewise for $\rho$. `detach_reset` is about the
    reset only: the gradient does pass through the trace.
    """

    beta: Parameter
    rho: Parameter
    strength: Parameter
    threshold: Parameter
    surrogate: Surrogate
    hidden_size: int | tuple[int, ...] = eqx.field(static=True)
    reset: Reset = eqx.field(static=True)
    learn_beta: bool = eqx.field(static=True)
    learn_rho: bool = eqx.field(static=True)
    learn_threshold: bool = eqx.field(static=True)
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

        - `rho`: what a step leaves of the trace, $\\rho$; as `beta`.
        - `strength`: by how much a spike raises the threshold, $\\gamma$: a number, or an
            array with one for each neuron, as `beta`. It is not learned. The default is that
            of Norse.
        - `learn_rho`: whether `rho` is a parameter.

        All others as for [`eqx_grads.nn.LIFCell`][].
        """
        shape, dtype = shape_of_layer("ALIFCell", hidden_size), float_dtype("ALIFCell", dtype)
        check_reset("ALIFCell", reset)
        self.beta = decay("ALIFCell", "beta", beta, shape, learn_beta, dtype)
        self.rho = decay("ALIFCell", "rho", rho, shape, learn_rho, dtype)
        self.strength = parameter("ALIFCell", "strength", strength, shape, False, dtype)
        self.threshold = parameter(
            "ALIFCell", "threshold", threshold, shape, learn_threshold, dtype
        )
        self.surrogate = known_surrogate("ALIFCell", surrogate)
        self.hidden_size = hidden_size
        self.reset = reset
        self.learn_beta = learn_beta
        self.learn_rho = learn_rho
        self.learn_threshold = learn_threshold
        self.detach_reset = detach_reset
        self.dtype = dtype

    def initial_state(self) -> ALIFState:
        """The neurons at rest: all is zero."""
        zero = jnp.zeros(self.hidden_size, self.dtype)
        return ALIFState(spikes=zero, membrane=zero, adaptation=zero)

    def __call__(self, x: Num[Array, "*hidden"], state: ALIFState) -> ALIFState:
        """As for [`eqx_grads.nn.LIFCell`][]."""
        check_inputs("ALIFCell", self.hidden_size, x, state, ALIFState)
        x, spikes, membrane, trace = common_dtype(
            x, state.spikes, state.membrane, state.adaptation
        )
        trace = decay_of(self.rho, self.learn_rho, trace) * trace + spikes
        membrane = next_membrane(self, x, spikes, membrane)
        threshold = value_of(self.threshold, self.learn_threshold, membrane)
        raised = threshold + value_of(self.strength, False, trace) * trace
        new = ALIFState(spike(membrane - raised, self.surrogate), membrane, trace)
        return like_last(new, state)


class CuBaLIFCell(eqx.Module):
    r"""Current-based leaky integrate-and-fire neurons: what comes in lasts for a while.

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
        assert state.spikes == 0
        state = cell(jnp.array([0.5]), state)  # 0.8 are 0.4 in the current, 0.4 in the membrane
        assert jnp.allclose(state.membrane, 1.3)
        assert state.spikes == 1
        ```

    **Derivative:**

    As for [`eqx_grads.nn.LIFCell`][], and likewise for $\alpha$.
    """

    alpha: Parameter
    beta: Parameter
    threshold: Parameter
    surrogate: Surrogate
    hidden_size: int | tuple[int, ...] = eqx.field(static=True)
    reset: Reset = eqx.field(static=True)
    learn_alpha: bool = eqx.field(static=True)
    learn_beta: bool = eqx.field(static=True)
    learn_threshold: bool = eqx.field(static=True)
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

        - `alpha`: what a step leaves of the current, $\\alpha$; as `beta`.
        - `learn_alpha`: whether `alpha` is a parameter.

        All others as for [`eqx_grads.nn.LIFCell`][].
        """
        shape, dtype = (
            shape_of_layer("CuBaLIFCell", hidden_size),
            float_dtype("CuBaLIFCell", dtype),
        )
        check_reset("CuBaLIFCell", reset)
        self.alpha = decay("CuBaLIFCell", "alpha", alpha, shape, learn_alpha, dtype)
        self.beta = decay("CuBaLIFCell", "beta", beta, shape, learn_beta, dtype)
        self.threshold = parameter(
            "CuBaLIFCell", "threshold", threshold, shape, learn_threshold, dtype
        )
        self.surrogate = known_surrogate("CuBaLIFCell", surrogate)
        self.hidden_size = hidden_size
        self.reset = reset
        self.learn_alpha = learn_alpha
        self.learn_beta = learn_beta
        self.learn_threshold = learn_threshold
        self.detach_reset = detach_reset
        self.dtype = dtype

    def initial_state(self) -> CuBaLIFState:
        """The neurons at rest: all is zero."""
        zero = jnp.zeros(self.hidden_size, self.dtype)
        return CuBaLIFState(spikes=zero, current=zero, membrane=zero)

    def __call__(self, x: Num[Array, "*hidden"], state: CuBaLIFState) -> CuBaLIFState:
        """As for [`eqx_grads.nn.LIFCell`][]."""
        check_inputs("CuBaLIFCell", self.hidden_size, x, state, CuBaLIFState)
        x, spikes, current, membrane = common_dtype(
            x, state.spikes, state.current, state.membrane
        )
        current = decay_of(self.alpha, self.learn_alpha, current) * current + x
        membrane = next_membrane(self, current, spikes, membrane)
        threshold = value_of(self.threshold, self.learn_threshold, membrane)
        new = CuBaLIFState(spike(membrane - threshold, self.surrogate), current, membrane)
        return like_last(new, state)


class LICell(eqx.Module):
    r"""Leaky integrators: neurons that do not fire, such as those that a network is read
    from.

    $$u' = \beta u + x$$

    !!! example

        ```python
        import eqx_grads as eqg
        import jax.numpy as jnp

        layer = eqg.nn.Recurrent(eqg.nn.LICell(1, beta=0.5))
        membranes, _ = layer(jnp.ones((3, 1)))
        assert jnp.array_equal(membranes[:, 0], jnp.array([1.0, 1.5, 1.75]))
        ```

    **Derivative:**

    That of the equation; of $\beta$, as for [`eqx_grads.nn.LIFCell`][].
    """

    beta: Parameter
    hidden_size: int | tuple[int, ...] = eqx.field(static=True)
    learn_beta: bool = eqx.field(static=True)
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
        shape, dtype = shape_of_layer("LICell", hidden_size), float_dtype("LICell", dtype)
        self.beta = decay("LICell", "beta", beta, shape, learn_beta, dtype)
        self.hidden_size = hidden_size
        self.learn_beta = learn_beta
        self.dtype = dtype

    def initial_state(self) -> LIState:
        """The neurons at rest: zero."""
        return LIState(membrane=jnp.zeros(self.hidden_size, self.dtype))

    def __call__(self, x: Num[Array, "*hidden"], state: LIState) -> LIState:
        """As for [`eqx_grads.nn.LIFCell`][]."""
        check_inputs("LICell", self.hidden_size, x, state, LIState)
        x, membrane = common_dtype(x, state.membrane)
        new = LIState(decay_of(self.beta, self.learn_beta, membrane) * membrane + x)
        return like_last(new, state)
