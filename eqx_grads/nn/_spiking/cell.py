"""Leaky integrate-and-fire neurons: one step of a layer of neurons, as a cell."""

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Float, Key, Num

from ..._errors import bad_argument, check_flags, check_option, rule_error, type_of
from ..._rules.float_args import as_count, check_parameter, Parameter as Number
from ..._rules.replace_gradient import replace_gradient
from ..._tangent_spaces import broadcasts_to
from ...surrogates import AbstractSurrogate, atan
from .._arguments import check_callable, check_step, common_dtype, layer_dtype
from .dynamics import Dynamics, LIFState, Reset, step


Parameter: TypeAlias = Number | list[Any] | tuple[Any, ...]
Surrogate: TypeAlias = AbstractSurrogate | Callable[[Array], Any]
CONSTANTS = ("beta", "alpha", "rho", "strength", "threshold")
DECAYS = ("beta", "alpha", "rho")


class LIFCell(eqx.Module):
    r"""Leaky integrate-and-fire neurons.

    With $s$ and $u$ for the spikes and the membrane potential of the last step, and $x$ for
    the input,

    $$u' = \beta u + x - \theta s, \qquad s' = \Theta(u' - \theta)$$

    where $\Theta$ is one for positive numbers and zero for all others. So a neuron that has
    fired is reset in the next step. With `reset="zero"`, $u' = \beta\,(1 - s)\,u + x$; with
    `reset="none"`, $u' = \beta u + x$. Options make other neurons:

    - `alpha`: with a synaptic current, $i' = \alpha i + x$ is added to the potential, not $x$.
    - `rho`: with adaptation. A trace of the spikes, $a' = \rho a + s$, raises the threshold:
        $s' = \Theta(u' - \theta - \gamma a')$. So a spike raises it by $\gamma$ in the next
        step, and this increase decays by the factor $\rho$ per step.
    - `recurrent`: connected to each other. The input is $x + V s$, not $x$.
    - `input_size`: with input weights. The input is $W x + b$, not $x$.
    - `threshold=None`: leaky integrators, which do not spike: $u' = \beta u + x$.

    These are `Leaky`, `Synaptic`, `RLeaky` and `RSynaptic` of
    [snnTorch](https://snntorch.readthedocs.io), with the names of its arguments and the same
    numbers. (In snnTorch, `reset="zero"` also removes the input of the step, except in `Leaky`,
    and $V s$ has a bias.) The adaptation comes from [Bellec et al.
    (2020)](https://doi.org/10.1038/s41467-020-17236-y), whose $\beta$ is the $\gamma$ here. The
    $\beta$ of [Bellec et al. (2018)](https://arxiv.org/abs/1803.09574) belongs to a trace $a' =
    \rho\,a + (1 - \rho)\,s$: multiply it by $1 - \rho$.

    !!! example

        ```python
        import eqx_grads as eqg
        import equinox as eqx
        import jax
        import jax.numpy as jnp

        cell = eqg.nn.LIFCell(3, beta=0.9, input_size=2, key=jax.random.key(0))

        @eqx.filter_grad
        def gradient(cell, xs):
            def step(state, x):
                state = cell(x, state)
                return state, state.spikes

            _, spikes = jax.lax.scan(step, cell.initial_state(), xs)
            return jnp.sum(spikes)

        print(gradient(cell, jnp.ones((5, 2))).weight_ih.shape)

        adaptive = eqg.nn.LIFCell(1, beta=0.9, rho=0.99)
        spikes, _ = eqg.nn.Recurrent(adaptive)(jnp.full((50, 1), 0.5))
        print(spikes[:10].sum(), spikes[-10:].sum())  # it adapts
        ```

        ```text
        (3, 2)
        2.0 1.0
        ```

    **Derivative:**

    The derivative of the equations. The derivative of the surrogate replaces the derivative of
    $\Theta$: see [`eqx_grads.surrogates.spike`][]. Both modes and all orders. With
    `detach_reset`, the $s$ of the reset is a constant; the gradient does pass through $V s$ and
    through the trace.

    A decay that is an array is clipped to $[0, 1]$ with a straight-through gradient. So a
    learned decay outside the interval can return. (In snnTorch, its gradient is zero from then
    on.) A parameter that is not learned is a constant of the program if it is a number. If it
    is an array, its gradient is zero.
    """

    beta: Any
    alpha: Any
    rho: Any
    strength: Any
    threshold: Any
    weight_ih: Float[Array, "hidden in"] | None
    bias: Float[Array, " hidden"] | None
    weight_hh: Float[Array, "hidden hidden"] | None
    surrogate: Surrogate
    hidden_size: int | tuple[int, ...] = eqx.field(static=True)
    reset: Reset = eqx.field(static=True)
    detach_reset: bool = eqx.field(static=True)
    learn: tuple[str, ...] = eqx.field(static=True)
    dtype: Any = eqx.field(static=True)

    def __init__(
        self,
        hidden_size: int | tuple[int, ...],
        beta: Parameter,
        *,
        alpha: Parameter | None = None,
        rho: Parameter | None = None,
        strength: Parameter = 1.8,
        threshold: Parameter | None = 1.0,
        recurrent: bool = False,
        input_size: int | None = None,
        use_bias: bool = True,
        reset: Reset = "subtract",
        detach_reset: bool = True,
        learn: str | Sequence[str] = (),
        surrogate: Surrogate | None = None,
        dtype: Any = None,
        key: Key[Array, ""] | None = None,
    ):
        """**Arguments:**

        - `hidden_size`: how many neurons, or the shape of the layer, `(channels, height,
            width)` after a convolution. Neurons with weights are a vector. A cell has this
            argument first, as its inputs need no weights; the layer [`eqx_grads.nn.LIF`][] has
            `input_size` first.
        - `beta`: the decay factor of the potential per step, $\\beta$. From zero to one; a
            number, or an array or list with one for each neuron (that broadcasts to the layer
            without new axes). A number that is not learned is a constant. An array that is
            not learned is a leaf of the cell: its gradient is zero, but the weight decay of an
            optimizer would change it. Mask it there, or pass a number.
        - `alpha`: the decay factor of a synaptic current, as `beta`.
        - `rho`: the decay factor of the adaptation, as `beta`.
        - `strength`: by how much a spike raises the threshold if there is a `rho`: $\\gamma$,
            in the same forms. The default is Norse's.
        - `threshold`: $\\theta$, in the same forms; any real number. With `None`, the neurons
            do not spike: they are leaky integrators.
        - `recurrent`: whether the neurons are connected, by weights `weight_hh`, uniform
            within $\\pm 1/\\sqrt{\\mathrm{hidden\\_size}}$.
        - `input_size`: the number of inputs, with weights `weight_ih`. By default each neuron
            has its own input: put an `equinox.nn.Linear` or a convolution before them.
        - `use_bias`: whether input weights have a bias. Both are initialized as in
            `equinox.nn.Linear`: uniform within $\\pm 1/\\sqrt{\\mathrm{input\\_size}}$.
        - `reset`: what follows a spike: `"subtract"`, `"zero"` or `"none"`.
        - `detach_reset`: whether the reset is a constant for the gradient, as in snnTorch.
        - `learn`: the names of the constants that are parameters, from `"beta"`, `"alpha"`,
            `"rho"`, `"strength"` and `"threshold"`. They are then arrays.
        - `surrogate`: as for [`eqx_grads.surrogates.spike`][]. The default is
            `eqx_grads.surrogates.atan()`, as in snnTorch.
        - `dtype`: of weights, learned constants and `initial_state()`, a dtype of floats. The
            default is JAX's.
        - `key`: for the weights. You may leave it out if the cell has no weights.

        **Raises:**

        [`eqx_grads.RuleError`][] if an argument is not valid. If a constant is a JAX array,
        only its shape and dtype are checked.
        """
        shape = hidden_size if isinstance(hidden_size, tuple) else (hidden_size,)
        shape = tuple(as_count("LIFCell", "hidden_size", size) for size in shape or [0])
        check_flags(
            "LIFCell", recurrent=recurrent, use_bias=use_bias, detach_reset=detach_reset
        )
        check_option("LIFCell", "reset", reset, ("subtract", "zero", "none"))
        self.dtype = layer_dtype("LIFCell", dtype)
        constants = {"beta": beta, "alpha": alpha, "rho": rho, "threshold": threshold}
        constants["strength"] = None if rho is None else strength
        known = [name for name, value in constants.items() if value is not None]
        names: Any = learn
        self.learn = tuple(names) if isinstance(names, tuple | list) else (names,)
        for name in self.learn:
            check_option("LIFCell", "learn", name, known)
        for name, value in constants.items():
            if value is not None or name == "beta" or (name == "strength" and rho is not None):
                value = _as_constant(name, value, shape)
            is_learned = name in self.learn
            setattr(self, name, jnp.asarray(value, self.dtype) if is_learned else value)
        if threshold is None and (recurrent or rho is not None):
            do = "Neurons without a threshold do not spike. Leave `recurrent` and `rho` out."
            raise bad_argument("LIFCell", "threshold", "a number", threshold, do)
        self.reset = "none" if threshold is None else reset
        self.detach_reset = bool(detach_reset)
        if not isinstance(surrogate, AbstractSurrogate):
            # A class is callable, too: somebody wrote `atan` for `atan()`.
            check_callable("LIFCell", "surrogate", surrogate, "eqx_grads.surrogates.atan()")
        self.surrogate = atan() if surrogate is None else surrogate
        self.hidden_size = hidden_size
        self.weight_hh = self.weight_ih = self.bias = None
        if recurrent or input_size is not None:
            self._set_weights(recurrent, input_size, use_bias, key)

    def _set_weights(self, recurrent, input_size, use_bias, key):
        hidden_size = self.hidden_size
        if isinstance(hidden_size, tuple):
            do = "Give a number: neurons with weights are a vector."
            raise bad_argument("LIFCell", "hidden_size", "a number of neurons", hidden_size, do)
        if key is None:
            do = "Give it `key=jax.random.key(0)`: these neurons have weights."
            raise bad_argument("LIFCell", "key", "a random key", key, do)
        key1, key2 = jr.split(key)
        if recurrent:
            self.weight_hh = self._uniform(key1, hidden_size, hidden_size)
        if input_size is not None:
            size = as_count("LIFCell", "input_size", input_size)
            key1, key2 = jr.split(key2)
            self.weight_ih = self._uniform(key1, hidden_size, size)
            self.bias = self._uniform(key2, hidden_size, inputs=size) if use_bias else None

    def _uniform(self, key, *shape, inputs=None):
        limit = 1 / math.sqrt(shape[-1] if inputs is None else inputs)
        return jr.uniform(key, shape, self.dtype, -limit, limit)

    @property
    def input_size(self) -> int | tuple[int, ...]:
        """The number of inputs, or their shape."""
        return self.hidden_size if self.weight_ih is None else self.weight_ih.shape[1]

    def initial_state(self) -> LIFState:
        """The resting state of the neurons for one example: all is zero."""
        weights = [w for w in (self.weight_ih, self.weight_hh) if w is not None]
        # The weights may have been cast.
        zero = jnp.zeros(self.hidden_size, weights[0].dtype if weights else self.dtype)
        of = lambda constant: None if constant is None else zero
        return LIFState(of(self.threshold), zero, of(self.alpha), of(self.rho))

    def _dynamics(self, dtype: Any) -> Dynamics:
        """The constants of a step, in this dtype."""
        constants = {name: self._constant(name, dtype) for name in CONSTANTS}
        return Dynamics(
            **constants,
            surrogate=self.surrogate,
            reset=self.reset,
            detach_reset=self.detach_reset,
        )

    def _constant(self, name, dtype):
        value = getattr(self, name)
        if value is None or isinstance(value, float | int | np.number):
            return value if value is None else float(value)
        value = jnp.asarray(value).astype(dtype)
        constant = jax.lax.stop_gradient(value)
        if name in DECAYS:
            constant = jnp.clip(constant, 0.0, 1.0)
        return replace_gradient(constant, value) if name in self.learn else constant

    def __call__(self, x: Num[Array, "..."], state: LIFState) -> LIFState:
        """**Arguments:**

        - `x`: the input of this step: one number for each neuron, or for each input weight.
        - `state`: what the last step returned, or `initial_state()`.

        **Returns:**

        The next state, in the dtypes of `state`, whatever the dtype of `x` is, so that a scan
        can carry it. It is computed in the common dtype of both and of the weights, and rounded
        once: with a bfloat16 state and float32 inputs, it is computed in float32 and returned
        in bfloat16.

        **Raises:**

        [`eqx_grads.RuleError`][] if `x` or an array of the state has another shape than the
        layer, if `x` is complex, or if the state does not hold floats.
        """
        self._check(x, state)
        weights = self.weight_ih, self.bias, self.weight_hh
        x, (weight_ih, bias, weight_hh), wide = common_dtype(x, weights, state)
        if weight_ih is not None:
            x = weight_ih @ x if bias is None else weight_ih @ x + bias
        if weight_hh is not None:
            x = x + weight_hh @ wide.spikes
        new = step(self._dynamics(x.dtype), x, wide)
        return jax.tree.map(lambda new, s: new.astype(s.dtype), new, state)

    def _check(self, x, state):
        if jax.tree.structure(state) != jax.tree.structure(self.initial_state()):
            do = "Pass `cell.initial_state()`, or what the cell returned for the step before."
            raise bad_argument("LIFCell", "state", "a state of these neurons", state, do)
        as_shape = lambda size: size if isinstance(size, tuple) else (size,)
        parts = {f"state.{name}": s for name, s in vars(state).items() if s is not None}
        hidden = as_shape(self.hidden_size)
        # An input may also be of integers, which is a count of spikes.
        check_step("LIFCell", "real numbers", {"x": (x, as_shape(self.input_size))})
        check_step("LIFCell", "floats", {name: (s, hidden) for name, s in parts.items()})


# ---------------------------------------------------------------- arguments


def _as_constant(name, value, shape) -> Any:
    """A number, or an array that broadcasts to the neurons. A list becomes an array."""
    value = np.asarray(value) if isinstance(value, list | tuple) else value
    check_parameter("LIFCell", f"`{name}`", value)
    if np.ndim(value) and not (
        np.ndim(value) == len(shape) and broadcasts_to(np.shape(value), shape)
    ):
        raise rule_error(
            f"`LIFCell` was given a `{name}` that does not fit its neurons.",
            f"`{name}` is {type_of(value)}, and there are {shape} neurons",
            do="Give one number, or an array with as many axes as the layer has, which "
            "broadcasts to its shape.",
        )
    if isinstance(value, jax.Array):  # which may be traced
        return value
    numbers = np.asarray(value)
    if name in DECAYS and not np.all((numbers >= 0) & (numbers <= 1)):
        do = "It is the decay factor per step: `exp(-dt / tau)` for a time constant `tau`."
        raise bad_argument("LIFCell", name, "from zero to one", value, do)
    return value
