"""A stand-in for many vLLM servers. It answers every turn immediately with the requested number of tokens, so that the
trainer's cost of a call can be measured without a model.

    python answering.py COUNT       listens at COUNT ports of 127.0.0.1, prints them, and answers until it is killed
"""

from __future__ import annotations

import asyncio
import json
import sys
from functools import lru_cache

VOCABULARY = 300
"""Number of token ids, of which those in the answers are a part."""


@lru_cache(maxsize=64)
def turn_of(tokens: int) -> bytes:
    """Return a turn in the format of vLLM, with one entry of log-probs for each token."""
    ids = [32 + i % (VOCABULARY - 64) for i in range(tokens)]
    entries = [{"token": f"token_id:{i}", "logprob": -0.1 - i / 997, "bytes": None, "top_logprobs": []} for i in ids]
    spans = [{"version": "default", "start": 0, "end": tokens}]
    choice = {
        "index": 0,
        "token_ids": ids,
        "logprobs": {"content": entries},
        "finish_reason": "length",
        "weight_versions": spans,
    }
    return json.dumps({"request_id": "r", "choices": [choice], "usage": {"prompt_tokens_details": None}}).encode()


def answer_to(path: str, body: bytes) -> bytes:
    """Return the JSON of an answer."""
    if path.startswith("/inference"):
        return turn_of(json.loads(body)["sampling_params"]["max_tokens"])
    return b'{"weight_version": "default", "success": true}'


async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer the requests of one keep-alive connection."""
    try:
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            lengths = [line for line in head if line.lower().startswith("content-length:")]
            body = await reader.readexactly(int(lengths[0].partition(":")[2])) if lengths else b""
            content = answer_to(head[0].split()[1], body)
            start = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
            writer.write(start.encode() + content)
            await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()


async def main(count: int) -> None:
    servers = [await asyncio.start_server(serve, "127.0.0.1", 0) for _ in range(count)]
    print(json.dumps([server.sockets[0].getsockname()[1] for server in servers]), flush=True)
    await asyncio.gather(*(server.serve_forever() for server in servers))


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
