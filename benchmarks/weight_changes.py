"""How many weights change in an optimiser step, and what sending only the changes costs and saves.

    python benchmarks/weight_changes.py                    SmolLM2-135M-Instruct, model=smollm2_135m
    python benchmarks/weight_changes.py --model FOLDER     a causal LM of Transformers

For each learning rate the model is trained on text (this repository's documents) by AdamW with the defaults of
`trainer.optimizer` and float32 weights. After each step the weights are rounded to the precision of the servers, and
compared with those of the step before: the changes are found, applied to a copy, and the result is compared bit for
bit. Times are CPU seconds of one thread.
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from bounds import check_sizes
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from mtrl.command.compose import compose
from mtrl.config.trainer_schema import OptimizerConfig
from mtrl.engines.server.changes import apply_changes, find_changes, message_of
from mtrl.engines.server.checksum import checksum
from mtrl.models.gguf import as_folder

ROOT = Path(__file__).parent.parent
ROWS = "| lr | step | changed, % | whole, MB | changes, MB | share, % | find, s | apply, s | checksum, s | copy, s |"


def texts(tokenizer: Any, tokens: int, steps: int) -> Iterator[Tensor]:
    """Yield the ids [1, tokens] of each step."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("*.md")))
    ids = tokenizer(text, return_tensors="pt").input_ids[0]
    return (ids[start * tokens : (start + 1) * tokens].unsqueeze(0) for start in range(steps))


def rounded(model: Any, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return copies of the weights in the precision of the servers, tied ones once."""
    return {name: value.detach().to(dtype, copy=True) for name, value in model.named_parameters()}


class CpuSeconds:
    """CPU seconds by the name of the work."""

    def __init__(self) -> None:
        self.of: dict[str, float] = {}

    @contextmanager
    def measured(self, name: str) -> Iterator[None]:
        begun = time.process_time()
        yield
        self.of[name] = self.of.get(name, 0.0) + time.process_time() - begun


def compared(new: dict[str, Tensor], old: dict[str, Tensor]) -> tuple[int, int, CpuSeconds]:
    """Send the changes from `old` to `new` to a copy of `old`. Return the number of changed elements, the number of
    bytes that are sent, and the times."""
    seconds, changed, size = CpuSeconds(), 0, 0
    kept = {name: value.clone() for name, value in old.items()}
    for name, value in new.items():
        with seconds.measured("copy"):
            value.clone()
        with seconds.measured("find"):
            found, pieces = find_changes(name, value, old[name])
            message = message_of(pieces, "cpu")
        with seconds.measured("apply"):
            apply_changes(found, message.numpy()[: found.nbytes], kept[name])
        changed += int((value.view(torch.uint8) != old[name].view(torch.uint8)).view(*value.shape, -1).any(-1).sum())
        size += found.nbytes
    with seconds.measured("checksum"):
        digest = checksum(new)
    if checksum(kept) != digest:
        raise SystemExit("the changed copy differs from the new weights")
    return changed, size, seconds


def train(load: Callable[[], Any], ids: Iterator[Tensor], lr: float, dtype: torch.dtype) -> None:
    """Train and print a row for each step."""
    defaults, model = OptimizerConfig(), load()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr, betas=defaults.betas, eps=defaults.eps, weight_decay=defaults.weight_decay
    )
    old = rounded(model, dtype)
    count, whole = sum(v.numel() for v in old.values()), sum(v.nbytes for v in old.values())
    for step, batch in enumerate(ids, start=1):
        model(input_ids=batch, labels=batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), defaults.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        new = rounded(model, dtype)
        changed, size, seconds = compared(new, old)
        times = " | ".join(f"{seconds.of[name]:.2f}" for name in ("find", "apply", "checksum", "copy"))
        sizes = f"{whole / 1e6:.1f} | {size / 1e6:.2f} | {100 * size / whole:.2f}"
        print(f"| {lr:g} | {step} | {100 * changed / count:.3f} | {sizes} | {times} |", flush=True)
        old = new


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder or Hub name; default: that of model=smollm2_135m")
    parser.add_argument("--lr", type=float, nargs="+", default=[1e-6, 1e-5, 1e-4])
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=256, help="tokens of each step")
    parser.add_argument(
        "--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"), help="precision of the servers"
    )
    parser.add_argument("--exact", action="store_true", help="round the initial weights to that precision first")
    args = parser.parse_args()
    check_sizes(parser, args)
    torch.set_num_threads(1)
    path = args.model or compose(["model=smollm2_135m"]).model.path
    folder, dtype = as_folder(path, "--model"), getattr(torch, args.dtype)
    tokenizer = AutoTokenizer.from_pretrained(folder)

    def load() -> Any:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        with torch.no_grad():
            for value in model.parameters() if args.exact else ():
                value.copy_(value.to(dtype))
        return model

    print(f"{path}; {platform.processor() or platform.machine()}, torch {torch.__version__}")
    print(f"{ROWS}\n|{'---|' * ROWS.count(' | ')}---|")
    for lr in args.lr:
        train(load, texts(tokenizer, args.tokens, args.steps), lr, dtype)


if __name__ == "__main__":
    main()
