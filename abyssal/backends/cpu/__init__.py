"""The CPU backend.

The modules named like those in `abyssal.ops` are the reference in plain torch: what other implementations are tested
against, what runs where there is no compiler, and what one reads. `native` replaces entries by fused C++ kernels;
`table` puts the two together.
"""
