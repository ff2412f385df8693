"""Import of mini-swe-agent without its side effects."""

from __future__ import annotations

import importlib
import logging
import os
import tempfile
import threading
from typing import Any

from mtrl.errors import missing_extra

_lock = threading.Lock()


def mini_swe_agent(module: str) -> Any:
    """Return the module `minisweagent.<module>`.

    The import of the package prints a banner, creates a settings folder in the user's home, and loads the keys of a
    `.env` there into this process. This function redirects the folder to an empty temporary one and disables the
    banner.

    Raises:
        UserError: the package is not installed; the message names the extra.
    """
    with _lock, tempfile.TemporaryDirectory() as folder:
        settings = {"MSWEA_SILENT_STARTUP": "1", "MSWEA_GLOBAL_CONFIG_DIR": folder}
        before = {name: os.environ.get(name) for name in settings}
        os.environ.update(settings)
        try:
            found = importlib.import_module(f"minisweagent.{module}")
        except ImportError as error:
            raise missing_extra("mini-swe-agent", "swe") from error
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
    # Its logger would print to the terminal, between mtrl's progress bars.
    logging.getLogger("minisweagent").handlers.clear()
    return found
