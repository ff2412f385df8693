"""What the server of `tests/forked.py` computes once, after its imports: results that every run would compute again.

These are Hydra's merges of the files under conf/ (see `tests/hydra_cache.py`) and Transformers' table of renamed
weights, together a quarter of the CPU time of a small run.
"""

from contextlib import ExitStack

from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from mtrl.command.compose import merge
from tests.hydra_cache import caching

CACHED = ExitStack()
"""Closing it removes the cache of merges."""
CACHED.enter_context(caching())

get_checkpoint_conversion_mapping("qwen3")
for words in (
    [],
    ["debug=fast"],
    ["reward=guide"],
    ["experiment=text_to_sql"],
    ["experiment=text_to_sql", "debug=fast"],
):
    merge(words)
