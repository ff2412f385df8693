"""mtrl sft: fine-tune on conversations, before RL or without it.

    mtrl sft --data chats.jsonl --out warm                        the tiny model, from scratch
    mtrl sft --data chats.jsonl --out warm --model Qwen/Qwen3-0.6B
    mtrl train model=hf model.path=warm                           then train with RL from there

Every line of the data is `{"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]}`. If
the prompt shows tools, it also has `"tools": [{"type": "function", "function": {…}}]`. The loss is on the tokens of the
assistant's messages, including the closing token of each. Control tokens in other text have a space (`< |im_end|>`), as
in the prompts of RL.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mtrl.config import keys
from mtrl.config.outputs import check_local
from mtrl.errors import UserError
from mtrl.types import ROLES, Demonstration, Tools
from mtrl.utils.prompt_column import with_argument_objects
from mtrl.utils.strict_json import loads_text


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="mtrl sft", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--data", type=Path, required=True, help="JSONL file of conversations")
    add("--out", type=Path, required=True, help="folder to write, in Hugging Face's format")
    add("--model", default="tiny", help="folder or Hub name of a causal LM; tiny: a new one from scratch (default)")
    add("--epochs", type=float, default=3.0, help="passes over the data (default: %(default)s)")
    add("--steps", type=int, help="updates, instead of --epochs")
    add("--batch-size", type=int, default=16, help="conversations per update (default: %(default)s)")
    add("--lr", type=float, help="AdamW's learning rate (default: 1e-5, tiny: 2e-3)")
    add("--max-tokens", type=int, default=4096, help="padded tokens per forward pass (default: %(default)s)")
    add("--renderer", default="auto", help="chat template to tokens: auto, or a name of the renderers package")
    add("--dtype", default="float32", choices=("float32", "bfloat16"), help="(default: %(default)s)")
    add("--device", default="auto", help="auto, cpu or cuda (default: %(default)s)")
    add("--tags", default="", help="tiny: words that are one token each, such as '<sql>,</sql>'")
    add("--seed", type=int, default=0)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> list[float]:
    """Read the data, train, and write the model. Return the loss of each update."""
    args = parse(argv)
    for name in ("epochs", "steps", "batch_size", "lr", "max_tokens"):
        if (value := getattr(args, name)) is not None and not 0 < value < math.inf:
            raise UserError(f"--{name.replace('_', '-')}={value} must be a number above 0")
    bound = keys.all_keys()["seed"].bound
    if bound is not None and (broken := bound.broken_by(args.seed)):
        raise UserError(f"--seed={args.seed} must be {broken}")
    if args.model == "tiny" and args.dtype != "float32":
        raise UserError(f"--dtype={args.dtype} has no effect with --model=tiny, which is float32; leave it out")
    if args.model != "tiny" and args.tags:
        raise UserError(
            f"--tags={args.tags} has no effect with --model={args.model}, whose tokens are fixed; leave it out"
        )
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", args.device):
        raise UserError(f"--device={args.device} is not known; choose auto, cpu, cuda or cuda:N")
    check_local(f"--out={args.out}", args.out)
    if args.out.exists():
        raise UserError(f"--out={args.out} exists; choose another folder, or delete it first")
    chats = read_conversations(args.data)
    # torch is imported only here, so that --help and errors in the data come without it.
    return _train(args, chats)


def read_conversations(path: Path) -> list[Demonstration]:
    """Read the conversations of a JSONL file; empty lines are skipped.

    Raises:
        UserError: the file does not exist or is empty, or a line is invalid; the message names the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--data={path} cannot be read ({error}); give a JSONL file in UTF-8") from error
    conversations = [_conversation(line, f"{path}, line {i}") for i, line in enumerate(lines, 1) if line.strip()]
    if not conversations:
        raise UserError(f"--data={path} holds no conversation; write one per line")
    return conversations


def _conversation(line: str, where: str) -> Demonstration:
    try:
        value = loads_text(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: this is not JSON ({error}); write one object per line") from error
    messages = value.get("messages") if isinstance(value, dict) else None
    if not isinstance(messages, list) or not messages:
        raise UserError(f'{where}: there are no messages; write {{"messages": [{{"role": …, "content": …}}, …]}}')
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            raise UserError(f"{where}: message {number} has no role of {', '.join(ROLES)}")
        if message.get("content") is None and message.get("tool_calls"):
            message["content"] = ""
        if not isinstance(message.get("content"), str):
            raise UserError(
                f"{where}: the content of message {number} is {message.get('content')!r:.60}; it must be text"
            )
    if all(message["role"] != "assistant" for message in messages):
        raise UserError(f"{where}: the assistant says nothing, so there is nothing to learn; add its message")
    messages = [with_argument_objects(message, where) for message in messages]
    return Demonstration(messages, _tools(value.get("tools"), where))


def _tools(tools: Any, where: str) -> Tools:
    """Return the tools of a line; empty if it has none."""
    if tools is None:
        return []
    if not isinstance(tools, list) or not all(isinstance(each, dict) and "function" in each for each in tools):
        raise UserError(
            f'{where}: tools is {tools!r:.60}; it must be a list of {{"type": "function", "function": {{…}}}}'
        )
    return tools


def _train(args: argparse.Namespace, chats: list[Demonstration]) -> list[float]:
    import random

    from mtrl.config.model_schema import TinyConfig
    from mtrl.console.console import Console
    from mtrl.models.renderer import make_renderer
    from mtrl.models.sft import MixedOptimizer, batches, fine_tune
    from mtrl.models.tiny import save
    from mtrl.trainer.setup.warm_start import to_examples

    console = Console()
    sizes = TinyConfig()
    model, tokenizer = _tiny(args, chats, sizes) if args.model == "tiny" else _pretrained(args)
    renderer = make_renderer(tokenizer, args.renderer, "--renderer")
    examples = to_examples(tokenizer, renderer, chats)
    _check_lengths([len(example.ids) for example in examples], model)
    muon_lr, lr = (2e-2, 2e-3) if args.model == "tiny" else (None, 1e-5)
    optimizer = MixedOptimizer(model, muon_lr, args.lr or lr)
    size = min(args.batch_size, len(examples))
    steps = args.steps or max(1, round(args.epochs * len(examples) / size))
    said = sum(sum(example.mask) for example in examples)
    size_in_millions = sum(p.numel() for p in model.parameters()) / 1e6
    console.banner(
        {
            "data": f"{args.data}: {len(examples)} conversations, {said} tokens of the assistant",
            "model": f"{args.model}, {size_in_millions:.2f} M parameters on {model.device}",
            "training": f"{steps} updates of {size} conversations",
        },
        title="mtrl sft",
    )
    with console.progress("fine-tune", steps) as bar:
        losses = fine_tune(
            model,
            batches(examples, size, random.Random(args.seed)),
            steps,
            optimizer,
            warmup=min(20, max(1, steps // 10)),
            max_tokens=args.max_tokens,
            on_step=lambda step, loss: bar.advance(),
        )
    save(model, tokenizer, args.out)
    console.note(f"loss per token: {losses[0]:.3f} in the first update, {losses[-1]:.3f} in the last")
    console.note(f"written to {args.out}; train on with: mtrl train model=hf model.path={args.out}")
    return losses


def _tiny(args: argparse.Namespace, chats: list[Demonstration], sizes: Any) -> tuple[Any, Any]:
    from mtrl.models.tiny import make_model, train_tokenizer
    from mtrl.trainer.loading import pick_device

    tags = tuple(tag for tag in args.tags.split(",") if tag)
    tokenizer = train_tokenizer([chat.messages for chat in chats], sizes.vocabulary, tags)
    return make_model(sizes, tokenizer, args.seed).to(pick_device(args.device, "--device")), tokenizer


def _pretrained(args: argparse.Namespace) -> tuple[Any, Any]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from mtrl.models.gguf import as_folder
    from mtrl.trainer import loading
    from mtrl.utils.hub import is_out_of_reach, model_options

    loading.check_export(args.model, "--model")
    folder = as_folder(args.model, "--model")
    if loading.folder_reads_images(folder, trust_remote_code=False):
        raise UserError(f"--model={args.model} reads images, and mtrl sft trains on text; give a model of text only")
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=is_out_of_reach(folder))
        loaded = AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, args.dtype), **loading.REPORTED, **model_options(folder)
        )
    except loading.UNREADABLE as error:
        raise UserError(
            f"--model={args.model} cannot be loaded ({loading.first_line(error)}); give a folder or a Hub name of a "
            "causal LM"
        ) from error
    model = loading.whole_model(loaded, f"--model={args.model}")
    return model.to(loading.pick_device(args.device, "--device")), tokenizer


def _check_lengths(lengths: list[int], model: Any) -> None:
    holds = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    longest = max(range(len(lengths)), key=lengths.__getitem__)
    if holds and lengths[longest] > holds:
        raise UserError(
            f"conversation {longest + 1} of --data has {lengths[longest]} tokens, more than the {holds} that the model "
            "holds; shorten it or leave it out"
        )


if __name__ == "__main__":
    from mtrl.command.program import one_sentence

    with one_sentence():
        main()
