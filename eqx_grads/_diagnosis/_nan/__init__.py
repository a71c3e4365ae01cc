"""Where and why a gradient is NaN, infinite or too large: `explain_nan`."""
