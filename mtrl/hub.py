"""A check whether the Hub can be reached, made once, since libraries would retry for each single file."""

from __future__ import annotations

import functools
from pathlib import Path

TIMEOUT = 10.0
"""Timeout of the check, in seconds."""


def is_out_of_reach(path: str) -> bool:
    """Return whether `path` is a name of the Hub and the Hub does not answer. Then only local files can be loaded, and
    callers pass that to `transformers` and `datasets` (`local_files_only`), which would try each file six times."""
    return not Path(path).exists() and not _answers()


@functools.cache
def _answers() -> bool:
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    if constants.HF_HUB_OFFLINE:
        return False
    try:
        get_session().head(constants.ENDPOINT, timeout=TIMEOUT)
    except Exception:  # the type depends on the HTTP library in use
        return False
    return True
