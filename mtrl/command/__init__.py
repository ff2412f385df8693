"""Turns the words of a command into a checked configuration: composition, checks, warnings and the folder of a run."""
