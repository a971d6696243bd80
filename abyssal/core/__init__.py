"""Plain values that cross the seams of the engine. Nothing here imports torch or any other package of ours."""
