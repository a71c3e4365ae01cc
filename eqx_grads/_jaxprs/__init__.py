"""Traced programs: inspect and evaluate jaxprs. Only this room knows how JAX writes them."""
