"""The optimizers, their rates and their rounding."""
