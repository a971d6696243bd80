"""The engine: requests in, outputs out. `engine.py` is the loop, `launch.py` assembles its parts from a model folder."""
