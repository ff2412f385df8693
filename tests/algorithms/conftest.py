"""Compositions use the cache of tests/hydra_cache.py."""

from tests.hydra_cache import cached_merges  # noqa: F401
