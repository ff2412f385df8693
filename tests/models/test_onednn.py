"""What oneDNN keeps of the products that it made."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mtrl.models import onednn

CACHES = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "1024", "LRU_CACHE_CAPACITY": "1024"}
PRODUCTS = """
import torch
from mtrl.models import onednn

def resident():
    return int(open("/proc/self/statm").read().split()[1])

weight = torch.ones(256, 256, dtype=torch.bfloat16)
before = resident()
for rows in range(1, 400):
    torch.nn.functional.linear(torch.ones(rows, 256, dtype=torch.bfloat16), weight)
print(resident() - before)
"""


def pages(**environment: str) -> int:
    """That a process gains while it makes 400 products of as many shapes."""
    kept = {name: value for name, value in os.environ.items() if name not in CACHES}
    command = [sys.executable, "-c", PRODUCTS]
    return int(subprocess.run(command, env=kept | environment, check=True, capture_output=True, text=True).stdout)


@pytest.mark.skipif(not onednn.BFLOAT16, reason="this processor has no products in bfloat16")
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_shapes_that_passed_by_do_not_fill_the_memory_unless_the_user_says_so() -> None:
    assert pages() < 0.5 * pages(**CACHES)
