"""Backends: each fills the op table of `abyssal.ops`. Vendor libraries are imported only below this folder."""
