"""Functions that run on the host, in a JAX program: values, derivatives, residuals."""
