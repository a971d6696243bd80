"""The command `abyssal`: one module for each command. Importing any of them imports neither torch nor the engine."""
