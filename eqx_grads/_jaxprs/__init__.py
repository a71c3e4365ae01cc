"""Traced programs (jaxprs): evaluate, search and analyze them. Only this folder knows how JAX
represents them."""
