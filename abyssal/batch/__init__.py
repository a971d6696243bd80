"""Batch files: OpenAI's batch requests in, answers out, resumable after any interruption.

`lines` reads, `request` makes engine requests of lines, `loop` runs them, `response` makes answers of outputs, `sink` and
`answers` write them, and `journal` says whose they are. Importing this imports no torch.
"""

from .job import BatchJob, run_batch
from .progress import BatchProgress

__all__ = ["BatchJob", "BatchProgress", "run_batch"]
