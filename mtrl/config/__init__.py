"""Configuration of a run: the schema, composition, and the checks that come before any work."""
