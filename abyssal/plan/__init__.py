"""What a model and its caches need, what a machine has, and whether the one fits the other. Nothing here imports torch."""
