"""From the words of a command to a checked configuration: composition, checks, warnings and the folder of the run."""
