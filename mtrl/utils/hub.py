"""A check whether the Hub can be reached, made once, since libraries would retry for each single file."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

TIMEOUT = 10.0
"""Timeout of the check, in seconds."""


def is_out_of_reach(path: str) -> bool:
    """Return whether `path` is a name of the Hub and the Hub does not answer. Then only local files can be loaded, and
    callers pass that to `transformers` and `datasets` (`local_files_only`), which would try each file six times."""
    return not Path(path).exists() and not hub_answers()


def model_options(path: str) -> dict[str, Any]:
    """Return arguments of `from_pretrained` by which it sends no request to a Hub that does not answer. Transformers
    looks for an adapter beside the weights with a separate request."""
    local = is_out_of_reach(path)
    return {"local_files_only": local, "adapter_kwargs": {"local_files_only": local}}


@functools.cache
def hub_answers() -> bool:
    """Return whether the Hub answers a request, which is sent once per process."""
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    if constants.HF_HUB_OFFLINE:
        return False
    try:
        get_session().head(constants.ENDPOINT, timeout=TIMEOUT)
    except Exception:  # the type depends on the HTTP library in use
        return False
    return True
