"""The CUDA backend: kernels of ours for Hopper, built when first used.

Modules are named like those in `abyssal.ops` and fill the same table. Activations are bfloat16, sums float32; weights stay
in their stored precision and are repacked once, when loaded (`packing`). `build` compiles the sources in `csrc`; how fast
they are and what was tried is in docs/kernels.md.
"""
