"""Where a gradient is zero, large or not finite: probes and reports."""
