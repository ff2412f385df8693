"""Launch settings of a run with GPUs, for the tests of both engines' command lines."""

from dataclasses import replace

from mtrl.engines.server.backend import ServerPlace
from mtrl.engines.server.launch import Launch

TOKEN = "0123456789abcdef"
GPUS = ServerPlace(1234, TOKEN, devices=[2, 3])


def launch(settings, **changes):
    made = Launch(
        settings,
        model="/models/policy",
        context=2048,
        max_num_seqs=8,
        gpu_memory_utilization=0.6,
        dtype="bfloat16",
        python="/env/bin/python",
        is_cpu=False,
    )
    return replace(made, **changes)
