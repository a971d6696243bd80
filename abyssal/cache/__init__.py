"""What a sequence leaves behind: declared groups of rows, block and slot ids, and the memory that they point into.

`spec` says which rows exist and how large they are, `block_pool` counts ids, and `manager` is the one class the scheduler
talks to. None of the three imports torch; tensors belong to the storage of a backend.
"""
