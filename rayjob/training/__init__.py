"""Training: window order, recipe, saving, recovery, evaluation, tracking."""
