"""A plan, or a proposed layout, as a page for the terminal."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

from rich.console import Group
from rich.table import Table
from rich.text import Text

from mtrl.config.derived import ranks_per_batch
from mtrl.config.keys import typed
from mtrl.doctor.advice import launcher
from mtrl.doctor.changes import Change
from mtrl.doctor.layout_proposal import LayoutProposal
from mtrl.doctor.memory import COMFORT, Moment
from mtrl.doctor.plan import Plan, gib


def page(plan: Plan) -> Group:
    """Return the page: facts, the memory of every phase, the parts of the tightest phase, and the verdict."""
    lines = [*_facts(plan), Text(), _moments(plan), Text(), _parts(plan.tightest), Text(), verdict(plan)]
    if faster := plan.faster:
        free = f"{100 * COMFORT:.0f} % of the memory free in each phase that they affect"
        words = f"fewer recomputed layers, with {free}: {as_words(faster)}"
        lines.append(Text(words, style="cyan"))
    return Group(*lines)


def proposal_page(proposal: LayoutProposal, overrides: Sequence[str], config_dir: str | None = None) -> Group:
    """Return the page of a layout: facts, memory, what binds, what rules out the preferred layouts, and the command."""
    plan, config = proposal.plan, proposal.plan.memory.config
    ranks, copies, trainer = plan.memory.layout.ranks, config.trainer.fsdp.replicas, config.trainer
    mesh = (
        f"mesh: data parallel {ranks // ranks_per_batch(trainer)} x sequence parallel {trainer.sequence_parallel} "
        f"x tensor parallel {trainer.tensor_parallel}, expert parallel {trainer.expert_parallel}; "
        f"copies of the weights: {copies}, each sharded over {ranks // copies} of {ranks} ranks"
    )
    largest = max(plan.tightest.parts, key=lambda part: part.bytes)
    binds = f"binds: {plan.tightest.where}, {plan.tightest.when}; its largest part: {largest.name}"
    reasons = [Text(f"  {reason}") for reason in proposal.reasons]
    head = [Text("would be preferred, but leaves less than 5 % of a GPU free:"), *reasons] if reasons else []
    several = "on each machine (docs/launching.md): " if config.placement.machines > 1 else ""
    words = [*(["--config-dir", config_dir] if config_dir else []), *overrides, *proposal.words]
    command = f"{several}{launcher(plan)} {shlex.join(words)}"
    engine = config.generator.backend
    idle = f"{proposal.option.idle} GPUs of the other machines are idle; servers there: generator.{engine}.urls"
    return Group(
        *_facts(plan),
        Text(mesh),
        *(Text(), _moments(plan), Text(), Text(binds), *head, Text(), verdict(plan)),
        *([Text(f"→ {command}", style="cyan")] if plan.fits else []),
        *([Text(f"warning: {idle}", style="yellow")] if proposal.option.idle else []),
        *(Text(f"warning: {warning}", style="yellow") for warning in plan.warnings),
    )


def _facts(plan: Plan) -> Iterator[Text]:
    memory, layout, placement = plan.memory, plan.memory.layout, plan.memory.config.placement
    config = memory.config
    billions = f"{memory.model.parameters / 1e9:.2f} B parameters"
    what = (
        f"adapters of rank {config.model.lora_rank}, {memory.adapters / 1e6:,.1f} M of them" if memory.adapters else ""
    )
    yield Text(f"{plan.path}: {billions}; trained: {what or 'all of them'}")
    ranks = f"{layout.ranks} rank{'s' if layout.ranks > 1 else ''}"
    on_cpu = memory.device.kind == "cpu"
    if on_cpu:
        yield Text(f"this machine's CPU and its main memory, {ranks}; {_servers(plan)}")
    else:
        machines = f"{placement.machines} machine{'s' if placement.machines > 1 else ''} x {plan.gpus} GPUs"
        yield Text(f"{machines} of {placement.gpu_memory:g} GiB, {ranks}; {_servers(plan)}")
    shared = f", {memory.own_tokens:,} of them on each rank" if config.trainer.sequence_parallel > 1 else ""
    parts = {"matrices": config.trainer.tensor_parallel, "experts": config.trainer.expert_parallel}
    if divided := [f"{what} are divided among {ranks} ranks" for what, ranks in parts.items() if ranks > 1]:
        yield Text("; ".join(divided))
    yield Text(
        f"micro-batches of {memory.tokens:,} tokens{shared}, conversations of up to {memory.context:,}; "
        f"{_activations(plan)}"
    )
    if (held := memory.conversations()) is not None:
        yield Text(f"the servers hold {held:,} conversations of that length at once; others wait, or lose their cache")
    if on_cpu:
        return
    host = memory.host()
    yield Text(
        f"memory of the first machine: {gib(host['loading'])} GiB while models are loaded, "
        f"{gib(host['step'])} GiB in a step, {gib(host['export'])} GiB during the export"
    )


def _activations(plan: Plan) -> str:
    memory = plan.memory
    recomputed, layers = memory.recomputed_layers, memory.model.num_hidden_layers
    where = ", their inputs are in main memory" if memory.offloads_inputs else ""
    if 0 < recomputed < layers:
        return f"activations of {recomputed} of {layers} layers are recomputed{where}"
    return f"activations are {'recomputed' if recomputed else 'stored'}{where}"


def _servers(plan: Plan) -> str:
    layout, config = plan.memory.layout, plan.memory.config
    name = config.generator.backend
    if layout.servers is None:
        where = "in the process" if plan.memory.device.kind == "cpu" else "on the GPU"
        return f"the embedded engine samples {where} of rank 0"
    if not layout.servers_here:
        return f"{name} samples at generator.{name}.urls"
    size = layout.servers.tensor_parallel_size
    where = "on the ranks' GPUs" if layout.colocated else "on GPUs of their own"
    return f"{layout.servers.replicas} {name} server(s) of {size} GPU(s) each {where}"


def _moments(plan: Plan) -> Table:
    shown = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    shown.add_column("")
    shown.add_column("GiB of", no_wrap=True)
    shown.add_column("while", no_wrap=True)
    for name in ("needed", "there", "left"):
        shown.add_column(name, justify="right", no_wrap=True)
    for moment in plan.moments:
        word, style = ("fail", "bold red") if moment.over > 0 else ("pass", "green")
        sizes = (gib(moment.needed), gib(moment.room), gib(-moment.over))
        shown.add_row(Text(word, style=style), moment.where, moment.when, *sizes)
    return shown


def _parts(moment: Moment) -> Table:
    shown = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_header=False)
    shown.add_column(no_wrap=True)
    shown.add_column(justify="right", no_wrap=True)
    shown.add_row(Text(f"{moment.where}, {moment.when}:", style="dim"), "")
    for part in moment.parts:
        shown.add_row(f"  {part.name}", gib(part.bytes))
    return shown


def verdict(plan: Plan) -> Text:
    """Return the last lines: whether the run fits, by how much, and the change to make."""
    tight = plan.tightest
    if plan.fits:
        left = f"{gib(-tight.over)} GiB are left where it is tightest"
        verdict = f"fits, by this estimate: {left} ({tight.where}, {tight.when})"
        return Text(verdict, style="green")
    wrong = f"the {tight.where} is {gib(tight.over)} GiB short ({tight.when})" if tight.over > 0 else ""
    if plan.crowd:
        needed = plan.memory.layout.gpus_needed
        wrong = f"the first machine needs {needed} GPUs and has {plan.gpus}" + (f"; {wrong}" if wrong else "")
    if plan.change is None:
        more = "more memory" if plan.memory.device.kind == "cpu" else "more GPUs (placement=8_gpus, placement=16_gpus)"
        fix = f"no single setting helps: take a smaller model, or {more}"
    else:
        fix = as_words(plan.change)
    return Text(f"does not fit: {wrong}", style="bold red").append(f"\n→ {fix}", style="cyan")


def as_words(change: Change) -> str:
    """Return settings as they are typed on the command line."""
    return " ".join(f"{key}={typed(value)}" for key, value in change.items())
