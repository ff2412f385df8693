"""Serve a corpus to search agents: python scripts/retriever_server.py --corpus FILE; --help lists the rest."""

import sys

from mtrl.retrieval.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
