"""See where and why a gradient vanishes, explodes, is not finite, or takes memory."""
