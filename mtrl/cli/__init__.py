"""The command `mtrl`, which runs every other program, and its completion in a shell."""
