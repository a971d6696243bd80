"""Stored number formats: what lies in a checkpoint and in packed cache rows, and lossless conversion to float32.

Rounding of values that a model computes is an op, not a format: see `abyssal.ops.quantize`.
"""
