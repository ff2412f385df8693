"""JSON bodies of requests to SGLang and parsers of its answers.

The fields are those of `sglang/srt/managers/io_struct.py` (0.5.23) and of `sampling/sampling_params.py`. SGLang
silently ignores unknown fields, so a test builds SGLang's own types from these bodies.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from mtrl.engines.base import SamplingParams
from mtrl.engines.server.server_api import Json, Rendezvous, ServerError, TensorLayout, TurnRequest
from mtrl.types import FinishReason, Generation
from mtrl.utils.text import one_line

INITIAL_VERSION = "default"
"""SGLang's weight version of a server that was started without `--weight-version`."""


def turn_body(request: TurnRequest, rid: str, seed: int | None) -> Json:
    """Return the body of `/generate`.

    Args:
        rid: name of the request on the server.
        seed: seed of the turn; None where the server draws from one random stream.
    """
    body: Json = {
        "rid": rid,
        "input_ids": list(request.prompt),
        "sampling_params": sampling_body(request.sampling, request.max_tokens, seed),
        "return_logprob": True,
    }
    if request.cache_salt is not None:
        body["extra_key"] = request.cache_salt
    if request.adapter is not None:
        body["lora_path"] = request.adapter  # SGLang takes the adapter's name here
    return body


def sampling_body(sampling: SamplingParams, max_tokens: int, seed: int | None) -> Json:
    """Return SGLang's sampling parameters. With `stop_token_ids`, SGLang also ends a turn at the model's own end token;
    without them, no token ends a turn."""
    body: Json = {
        "max_new_tokens": max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k if sampling.top_k > 0 else -1,
        "stop": list(sampling.stop),
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": not sampling.stop_token_ids,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "no_stop_trim": True,
    }
    return body if seed is None else {**body, "sampling_seed": seed}


def folder_body(folder: str) -> Json:
    """Return the body of `/update_weights_from_disk`."""
    return {"model_path": folder, "flush_cache": False}


def rendezvous_body(rendezvous: Rendezvous) -> Json:
    """Return the body of `/init_weights_update_group`."""
    return {
        "master_address": rendezvous.host,
        "master_port": rendezvous.port,
        "rank_offset": rendezvous.rank_offset,
        "world_size": rendezvous.world_size,
        "group_name": rendezvous.name,
        "backend": rendezvous.backend,
    }


def broadcast_body(layouts: Sequence[TensorLayout], group: str) -> Json:
    """Return the body of `/update_weights_from_distributed`, for one broadcast of the bytes of all tensors."""
    return {
        "names": [layout.name for layout in layouts],
        "dtypes": [layout.dtype for layout in layouts],
        "shapes": [list(layout.shape) for layout in layouts],
        "group_name": group,
        "load_format": "flattened_bucket",
        "flush_cache": False,
    }


def tensor_body(payloads: Sequence[str]) -> Json:
    """Return the body of `/update_weights_from_tensor`: every worker reads its own payload of whole tensors, and takes
    its part of them."""
    return {"serialized_named_tensors": list(payloads), "flush_cache": False}


def version_body(version: int) -> Json:
    """Return the body of `/update_weight_version`, which aborts every request by default."""
    return {"new_version": str(version), "abort_all_requests": False}


def read_turn(answer: Any, url: str, stop: Sequence[str] = ()) -> Generation:
    """Parse the answer of `/generate`.

    Args:
        stop: the stop strings of the request. SGLang looks for them only below the limit of tokens, so a turn whose
            last allowed token completes one has the finish reason `length` in the answer, and `STOP` here.

    Raises:
        ServerError: the answer is not a turn.
    """
    try:
        meta = answer["meta_info"]
        pairs = meta.get("output_token_logprobs") or []
        ids, logprobs = [int(pair[1]) for pair in pairs], [float(pair[0]) for pair in pairs]
        if ids != answer["output_ids"]:
            raise ValueError("output_ids are not those of output_token_logprobs")
        if not all(map(math.isfinite, logprobs)):
            raise ValueError("a log-prob is not a finite number")
        finish = FinishReason(meta["finish_reason"]["type"])
        if finish == FinishReason.LENGTH and any(text in str(answer.get("text") or "") for text in stop):
            finish = FinishReason.STOP
        return Generation(ids, logprobs, finish, _spans(meta, len(ids)), int(meta.get("cached_tokens") or 0))
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise ServerError(f"{url}: the answer is not a turn ({one_line(f'{type(error).__name__}: {error}')})") from None


def read_version(version: Any, url: str) -> int:
    """Return the policy version for the server's name of its weights.

    Raises:
        ServerError: the name is not a policy version.
    """
    if version == INITIAL_VERSION:
        return 0
    if isinstance(version, str) and version.isascii() and version.isdigit():
        return int(version)
    raise ServerError(f"{url}: its weights have the version {one_line(version, 60)!r}, which is not a policy version")


def read_loads(answer: Any, url: str) -> tuple[int, int]:
    """Return the numbers of running and waiting requests from the answer of `/v1/loads`.

    Raises:
        ServerError: the answer does not contain them.
    """
    try:
        loads = answer["loads"]
        return sum(int(load["num_running_reqs"]) for load in loads), sum(
            int(load["num_waiting_reqs"]) for load in loads
        )
    except (LookupError, TypeError, ValueError):
        raise ServerError(f"{url}: the answer reports no load ({one_line(answer)})") from None


def _spans(meta: Json, tokens: int) -> list[tuple[int, int]]:
    """Return the `(policy version, tokens)` runs of a turn. Old servers report only the version at its end."""
    if not tokens:
        return []
    spans = meta.get("weight_versions") or [{"version": meta["weight_version"], "start": 0, "end": tokens}]
    runs = [(read_version(span["version"], "weight_versions"), int(span["end"]) - int(span["start"])) for span in spans]
    grouped = groupby((run for run in runs if run[1]), key=lambda run: run[0])
    return [(version, sum(count for _, count in group)) for version, group in grouped]
