"""Runs steps: gathers a step's rows into a `ForwardBatch`, calls the model, draws tokens."""
