"""Why the gradient of a leaf is zero: `explain_zero`."""
