"""Seconds of a weight sync into a running server, for every way of syncing.

For each engine one server is started with a random Qwen3, and weights are sent in all ways, alternately. After each
sync the version of the server is checked. "changes" is `distributed` with `sync_delta`, after a sync of the weights
from which the changes start; one of `--every` elements changes. "A copy" is a copy of these weights in the trainer's
memory.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import secrets
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from bounds import check_sizes
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from mtrl.config.derived import engine_python
from mtrl.config.engine_schema import ServerConfig, SglangConfig, VllmConfig
from mtrl.engines.server.backend import ServerPlace
from mtrl.engines.server.launch import Launch
from mtrl.engines.server.process import ServerProcess, free_port
from mtrl.engines.server.server_api import ServerApi
from mtrl.engines.server.sync import WeightSync
from mtrl.engines.server.transports import make_sync
from mtrl.engines.sglang.command import sglang_command
from mtrl.engines.sglang.sglang_api import SglangApi
from mtrl.engines.vllm.command import vllm_command
from mtrl.engines.vllm.vllm_api import VllmApi
from mtrl.models.tiny import train_tokenizer

ENGINES = {"vllm": (VllmApi, vllm_command, VllmConfig), "sglang": (SglangApi, sglang_command, SglangConfig)}
WAYS = ("disk", "distributed", "tensor")
CHANGES = "changes"
CONTEXT = 512
STARTING = 600.0
"""Time limit of the start of a server, in seconds."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of the model and of the measurement. Each field is a command-line option."""

    hidden_size: int = 768
    intermediate_size: int = 2048
    layers: int = 8
    heads: int = 12
    vocabulary: int = 32000
    dtype: str = "float32"
    every: int = 100
    """One of so many elements changes between two versions."""
    repeats: int = 3
    """Number of syncs in each way; the least time counts."""
    threads: int = 1


@dataclass
class Row:
    """Times of one way of syncing into one engine."""

    engine: str
    way: str
    first_s: float = 0.0
    """Seconds of the first sync, which also connects to the server."""
    sync_s: float = float("inf")
    """Seconds of the fastest of the other syncs."""


def write_model(sizes: Sizes, folder: Path) -> dict[str, Tensor]:
    """Write a random model for the servers, and return its weights; tied weights occur once."""
    texts = [path.read_text(encoding="utf-8") for path in sorted(Path(__file__).parent.glob("*.py"))]
    tokenizer = train_tokenizer([[{"role": "user", "content": text}] for text in texts], 400)
    config = Qwen3Config(
        vocab_size=sizes.vocabulary, hidden_size=sizes.hidden_size, intermediate_size=sizes.intermediate_size,
        num_hidden_layers=sizes.layers, num_attention_heads=sizes.heads, num_key_value_heads=sizes.heads,
        head_dim=64, max_position_embeddings=CONTEXT, tie_word_embeddings=True,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).to(getattr(torch, sizes.dtype))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return {name: value.detach() for name, value in model.state_dict().items() if name != "lm_head.weight"}


def measure(engine: str, sizes: Sizes, model: Path, weights: dict[str, Tensor]) -> list[Row]:
    """Measure all ways of syncing into one engine."""
    api_class, command, config = ENGINES[engine]
    settings = config(sync_timeout=600.0)
    place = ServerPlace(free_port(), secrets.token_hex(16))
    launch = Launch(
        settings, str(model), CONTEXT, max_num_seqs=8, gpu_memory_utilization=0.5, dtype=sizes.dtype,
        python=engine_python(engine, None), is_cpu=not torch.cuda.is_available(),
    )  # fmt: skip
    process = ServerProcess(command(launch, place), model.parent / f"{engine}.log", engine)
    try:
        api = api_class(f"http://127.0.0.1:{place.port}", place.token, settings)
        return asyncio.run(_rounds(engine, sizes, api, settings, process, model, weights))
    finally:
        process.end()


async def _rounds(
    engine: str,
    sizes: Sizes,
    api: ServerApi,
    settings: ServerConfig,
    process: ServerProcess,
    model: Path,
    weights: dict[str, Tensor],
) -> list[Row]:
    async with asyncio.timeout(STARTING):
        while not await api.is_ready():
            if not process.running:
                raise SystemExit(f"{engine} ended: {process.error_line()}")
            await asyncio.sleep(0.5)
    ways = (*WAYS, CHANGES) if engine == "vllm" else WAYS
    rows, syncs = [Row(engine, way) for way in ways], {}
    for way in ways:
        settings.sync_delta, settings.weight_sync = way == CHANGES, "distributed" if way == CHANGES else way
        syncs[way] = make_sync(settings, model=str(model), dtype=sizes.dtype, lora_scaling=None)
    version = 0
    for repeat in range(1 + sizes.repeats):
        for row in rows:
            if repeat and row.way == CHANGES:  # the other ways have replaced the weights that the server kept
                version += 1
                await _sync(api, syncs[row.way], weights, version)
            version += 1
            weights = next_version(weights, sizes.every)
            seconds = await _sync(api, syncs[row.way], weights, version)
            if repeat == 0:
                row.first_s = seconds
            else:
                row.sync_s = min(row.sync_s, seconds)
    for sync in syncs.values():
        await sync.close()
    await api.close()
    return rows


def next_version(weights: dict[str, Tensor], every: int) -> dict[str, Tensor]:
    """Return the weights with the opposite sign of one of `every` elements."""
    new = {name: value.clone() for name, value in weights.items()}
    for value in new.values():
        value.view(-1)[::every].neg_()
    return new


async def _sync(api: ServerApi, sync: WeightSync, weights: dict[str, Tensor], version: int) -> float:
    """Return the seconds of `send`."""
    await api.pause("drain")
    began = time.perf_counter()
    await sync.send([api], weights, version)
    seconds = time.perf_counter() - began
    await api.drop_cache()
    await api.resume()
    if await api.version() != version:
        raise SystemExit(f"{api.url} has other weights than those of version {version}")
    return seconds


def copy_seconds(weights: dict[str, Tensor]) -> float:
    """Return the least seconds of five copies in memory."""
    times = []
    for _ in range(5):
        began = time.perf_counter()
        _kept = {name: value.clone() for name, value in weights.items()}
        times.append(time.perf_counter() - began)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engines", nargs="+", choices=list(ENGINES), default=list(ENGINES))
    parser.add_argument("--json", type=Path, help="also write all results to this file")
    for name, value in asdict(Sizes()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    args = parser.parse_args()
    check_sizes(parser, args)
    arguments = vars(args)
    engines, path = arguments.pop("engines"), arguments.pop("json")
    sizes = Sizes(**arguments)
    torch.set_num_threads(sizes.threads)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        weights = write_model(sizes, Path(folder) / "model")
        count, size = sum(v.numel() for v in weights.values()), sum(v.nbytes for v in weights.values())
        copy = copy_seconds(weights)
        print(f"{count / 1e6:.1f} M parameters, {size / 1e6:.0f} MB in {sizes.dtype}; a copy takes {copy:.3f} s")
        print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}")
        print("| engine | way | first sync, s | sync, s | sync / copy | MB/s |\n|---|---|---|---|---|---|")
        rows = []
        for engine in engines:
            for row in measure(engine, sizes, Path(folder) / "model", weights):
                rows.append(asdict(row))
                rate = size / 1e6 / row.sync_s
                print(
                    f"| {row.engine} | {row.way} | {row.first_s:.2f} | {row.sync_s:.2f} | {row.sync_s / copy:.1f} "
                    f"| {rate:.0f} |",
                    flush=True,
                )
    if path is not None:
        path.write_text(json.dumps({"sizes": asdict(sizes), "bytes": size, "copy_s": copy, "rows": rows}, indent=2))


if __name__ == "__main__":
    main()
