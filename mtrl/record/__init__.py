"""The folder of a run: its files, and the reading and writing of them."""
