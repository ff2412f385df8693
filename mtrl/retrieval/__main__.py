"""Entry point: `python -m mtrl.retrieval --corpus FILE` serves a corpus to search agents."""

import sys

from mtrl.retrieval.command import main

if __name__ == "__main__":
    sys.exit(main())
