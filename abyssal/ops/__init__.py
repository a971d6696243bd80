"""The operations a model is made of: one signature each, no kernels.

A backend fills an `OpTable` (see `registry`); the model calls nothing else. Each module here holds the contracts of one
family: shapes, dtypes, what is written, and the formula. Backends use the same file names.

Conventions: T rows of a step, H heads, D head width, C hidden width, n streams, K input width, V vocabulary. All real
tensors are float32 and contiguous, all indices int32, unless a contract says otherwise. Every op computes each row from that
row's inputs alone. Ties go to the lowest id.
"""
