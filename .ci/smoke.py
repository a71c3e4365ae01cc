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


def a_rule_in_both_modes() -> None:
    @eqg.custom_vjp
    def product(x, y):
        return x * jnp.sin(y)

    @product.def_fwd
    def _fwd(x, y):
        return product(x, y), (x, y)

    @product.def_bwd
    def _bwd(residuals, ct):
        x, y = residuals
        return ct * jnp.sin(y), ct * x * jnp.cos(y)

    x, y = jnp.array([1.0, 2.0]), jnp.array([0.5, -0.5])
    plain = lambda x, y: x * jnp.sin(y)
    for fn in (product, jax.jit(product), jax.vmap(product)):
        for transform in (jax.jacrev, jax.jacfwd):
            got, want = transform(fn, 1)(x, y), transform(plain, 1)(x, y)
            assert jnp.allclose(got, want), (got, want)
    report = eqg.testing.check_rule(product, x, y, checks=("primal", "forward", "reverse"))
    assert report.passed


def a_wrong_rule_is_found() -> None:
    cube = eqg.elementwise(lambda x: x**3, lambda out, x: 2 * x**2)
    try:
        eqg.testing.check_rule(cube, jnp.array([0.5, 2.0]), checks=("forward",))
    except eqg.testing.RuleCheckError:
        return
    raise AssertionError("The wrong derivative of a cube passed.")


def a_scan() -> None:
    def loss(weight, checkpoint):
        step = lambda h, x: (jnp.tanh(weight @ h + x), None)
        h, _ = eqg.filter_scan(step, jnp.zeros(3), jnp.ones((8, 3)), checkpoint=checkpoint)
        return jnp.sum(h)

    weight = jnp.linspace(-0.5, 0.5, 9).reshape(3, 3)
    plain, replayed = (jax.grad(loss)(weight, option) for option in (None, "replay"))
    assert jnp.allclose(plain, replayed, rtol=1e-4)


def a_layer() -> None:
    layer = eqg.nn.GRU(2, 3, key=jax.random.key(0))
    loss = lambda layer: jnp.sum(layer(jnp.ones((5, 2)))[0])
    gradients = jax.tree.leaves(eqx.filter_jit(eqx.filter_grad(loss))(layer))
    assert gradients
    assert all(jnp.any(x != 0) for x in gradients)


def extras_are_named_where_they_are_absent() -> None:
    root = eqg.implicit(lambda y, a: 2 * y - jnp.mean(y) - a)(lambda a: a / 2 + jnp.mean(a) / 2)
    gradient = lambda n: jax.grad(lambda a: jnp.sum(root(a)))(jnp.ones(n))
    assert jnp.allclose(gradient(3), 1.0)  # a small system
    calls = {
        "solvers": [
            lambda: gradient(300),
            lambda: eqg.fixed_point(jnp.cos, 1.0),
            lambda: importlib.import_module("eqx_grads.solvers"),
        ],
        "plot": [lambda: eqg.plot_gradient_flow({"layer": jnp.ones(2)})],
    }
    for extra, users in calls.items():
        for use in users:
            try:
                use()
            except ModuleNotFoundError as error:
                text = str(error)
            else:
                text = "No error, so that the extra is installed."
            assert f"`pip install eqx-grads[{extra}]`" in text, text


def the_package_is_complete() -> None:
    package = pathlib.Path(eqg.__file__).parent
    assert "site-packages" in package.parts, package
    assert (package / "py.typed").exists()
    assert importlib.metadata.version("eqx-grads") == eqg.__version__
    readme = str(importlib.metadata.metadata("eqx-grads"))
    links = re.findall(r"\]\(([^)]*)\)", readme)
    assert links, readme
    assert all(link.startswith("https://") for link in links), links
    plugins = importlib.metadata.entry_points(group="pytest11", name="eqx_grads")
    assert [importlib.util.find_spec(plugin.value) is None for plugin in plugins] == [False]


the_package_is_complete()
a_rule_in_both_modes()
a_wrong_rule_is_found()
a_scan()
a_layer()
extras_are_named_where_they_are_absent()
versions = {
    "Python": sys.version.split()[0],
    "JAX": jax.__version__,
    "Equinox": eqx.__version__,
}
print("It works with", ", ".join(f"{name} {version}" for name, version in versions.items()))
