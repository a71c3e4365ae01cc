"""`safe`: functions of single numbers."""

import eqx_grads as eqg
import jax.numpy as jnp
import numpy as np

from .entry import entry, Nasty


safe = eqg.safe
X = np.array([0.5, 1.2, 2.0])

entry("safe.log", safe.log, X, plain=jnp.log, nasty=[Nasty(np.array([1e-30, 1e30, np.inf]))])
