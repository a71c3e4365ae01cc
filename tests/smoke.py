"""Use the installed package, outside of the checkout, as `.ci/install-and-use` does.

Its environment holds the package and what it depends on, and nothing else: no extra, no test
tool. The numbers are small: that they are right everywhere is what the tests show.
"""

import importlib.metadata
import importlib.util
import pathlib
import re
import sys

import equinox as eqx
import eqx_grads as eqg
import jax
import jax.numpy as jnp


# The package is complete.
package = pathlib.Path(eqg.__file__).parent
assert "site-packages" in package.parts, package
assert (package / "py.typed").exists()
assert importlib.metadata.version("eqx-grads") == eqg.__version__
links = re.findall(r"\]\(([^)]*)\)", str(importlib.metadata.metadata("eqx-grads")))
assert links
assert all(link.startswith("https://") for link in links), links
(plugin,) = importlib.metadata.entry_points(group="pytest11", name="eqx_grads")
assert importlib.util.find_spec(plugin.value) is not None

# A rule, and a wrong one; a layer.
cube = eqg.elementwise(lambda x: x**3, lambda out, x: 3 * x**2)
assert eqg.testing.check_rule(cube, jnp.array([0.5, 2.0])).passed
wrong = eqg.elementwise(lambda x: x**3, lambda out, x: 2 * x**2)
try:
    eqg.testing.check_rule(wrong, jnp.array([0.5, 2.0]))
    raise SystemExit("The wrong derivative of a cube passed.")
except eqg.testing.RuleCheckError:
    pass
layer = eqg.nn.GRU(2, 3, key=jax.random.key(0))
loss = lambda layer: jnp.sum(layer(jnp.ones((5, 2)))[0])
gradients = jax.tree.leaves(eqx.filter_jit(eqx.filter_grad(loss))(layer))
assert gradients
assert all(jnp.any(x != 0) for x in gradients)

# An extra that is absent is named.
try:
    eqg.fixed_point(jnp.cos, 1.0)
    raise SystemExit("No error, so that the extra is installed.")
except ModuleNotFoundError as absent:
    error = str(absent)
assert "`pip install eqx-grads[solvers]`" in error, error
print(f"It works with Python {sys.version.split()[0]}, JAX {jax.__version__}.")
