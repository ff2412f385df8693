#!/usr/bin/env bash
# Serve a corpus to search agents at http://127.0.0.1:8000.
#
#   bash examples/search/start_retriever.sh                     the passages of this folder, BM25
#   bash examples/search/start_retriever.sh wiki-18.jsonl --retriever dense --encoder intfloat/e5-base-v2
#
# Words behind the corpus go to scripts/retriever_server.py; PORT is another port.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
export PYTHONPATH="$here/../..${PYTHONPATH:+:$PYTHONPATH}"
corpus=${1:-$here/corpus.jsonl}
shift $(($# > 0))
exec python "$here/../../scripts/retriever_server.py" --corpus "$corpus" --port "${PORT:-8000}" "$@"
