"""Runs inside SGLang's environment, and parses what the trainer would send by SGLang's own types.

Input: JSON of `{"bodies": [[path, body], …], "arguments": [[…], …], "served": […]}` on stdin. Output: one line of JSON
on stdout with the errors. Then it is a server with the arguments of `served`, to save another import of SGLang.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys

from mtrl.engines.sglang import serve


def main() -> None:
    import torch
    from pydantic import TypeAdapter
    from sglang.srt.entrypoints.http_server import app
    from sglang.srt.managers import io_struct
    from sglang.srt.platforms import current_platform
    from sglang.srt.sampling.sampling_params import SamplingParams

    from mtrl.engines.sglang.platform import activate

    requested = json.load(sys.stdin)
    wrong: list[str] = []
    routes = {getattr(route, "path", None): route for route in app.routes}
    for path, body in requested["bodies"]:
        try:
            if body is None:  # nothing to check; the tests with a server send these requests
                continue
            if path not in routes:
                raise LookupError("no such route")
            kind = getattr(io_struct, TYPES[path])
            TypeAdapter(kind).validate_python(body)  # as FastAPI does
            built = kind(**body)  # raises an error for an unknown field
            if path == "/generate":
                params = SamplingParams(**built.sampling_params)
                params.verify(1000)
                built.normalize_batch_and_arguments()
        except Exception as error:
            wrong.append(f"{path}: {type(error).__name__}: {error}")
    found = torch.cuda.is_available
    torch.cuda.is_available = lambda: True
    inert = activate()
    torch.cuda.is_available = found
    answer = {
        "wrong": wrong,
        "platform": f"{type(current_platform).__module__}.{type(current_platform).__name__}",
        "with_cuda": inert,
        "arguments": [parsed(words) for words in requested["arguments"]],
    }
    print(json.dumps(answer), flush=True)
    serve.main(requested["served"])


def parsed(words: list[str]) -> str:
    """Return SGLang's error for these arguments, empty without one."""
    from sglang.srt.server_args import prepare_server_args

    message = io.StringIO()
    try:
        with contextlib.redirect_stderr(message), contextlib.redirect_stdout(message):
            prepare_server_args(words)
    except SystemExit:
        return message.getvalue()
    return ""


TYPES = {
    "/generate": "GenerateReqInput",
    "/abort_request": "AbortReq",
    "/pause_generation": "PauseGenerationReqInput",
    "/continue_generation": "ContinueGenerationReqInput",
    "/update_weights_from_disk": "UpdateWeightFromDiskReqInput",
    "/init_weights_update_group": "InitWeightsUpdateGroupReqInput",
    "/destroy_weights_update_group": "DestroyWeightsUpdateGroupReqInput",
    "/update_weights_from_distributed": "UpdateWeightsFromDistributedReqInput",
    "/update_weights_from_tensor": "UpdateWeightsFromTensorReqInput",
    "/begin_weight_update": "BeginWeightUpdateReqInput",
    "/end_weight_update": "EndWeightUpdateReqInput",
    "/update_weight_version": "UpdateWeightVersionReqInput",
    "/load_lora_adapter": "LoadLoRAAdapterReqInput",
    "/unload_lora_adapter": "UnloadLoRAAdapterReqInput",
    "/release_memory_occupation": "ReleaseMemoryOccupationReqInput",
    "/resume_memory_occupation": "ResumeMemoryOccupationReqInput",
}

if __name__ == "__main__":
    main()
