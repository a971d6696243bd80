"""Frozen configuration: the model's (from config.json), its layer roles, and the engine's. Nothing here imports torch."""
