"""``poprt_exec auto_sharding.py``: puts the nodes of a model on several IPUs so that it fits.

PopRT publishes a script of that name; options and their defaults are its. The nodes are taken in the order in which
they run and cut into as many stretches as there are IPUs, so that the stretch with most weights has as few as can be.
Each answer is compiled: what fits is told by the tile model, and so is which answer is fastest (``--optimal_perf``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import click
from onnx import ModelProto, numpy_helper

from podrun.core.command_line import HELP_OPTIONS
from podrun.core.errors import GraphMemoryAllocationError, NotFoundError, UsageError, present
from podrun.core.quick_dataclass import dataclass
from podrun.costmodel.splitting import cut_chain
from podrun.onnx_models.annotations import AVAILABLE_MEMORY, VIRTUAL_GRAPH
from podrun.serving.compiler import Compiler, CompilerOptions, model_proto
from podrun.serving.convert.frontends import write_model
from podrun.serving.convert.graph_walk import names_used, set_attribute
from podrun.serving.convert.pass_manager import Pass
from podrun.serving.convert.tools import OperationCounter, topological_sort
from podrun.serving.convert.type_inference import infer_types

PROPORTIONS = (0.6, 0.3, 0.1)
"""Memory proportions of products, tried in this order: with less of it products need less memory and more time."""
_PRODUCTS = ("MatMul", "Conv", "Gemm", "ConvTranspose")


@dataclass(frozen=True, slots=True)
class NodeLoad:
    """What a node brings to its IPU: bytes of the weights that it is the first to use, and operations."""

    weight_bytes: int
    operations: int


@dataclass(frozen=True, slots=True)
class ShardedModel:
    """A model with an IPU on each node. ``seconds`` of a run, modelled; ``places``: the IPU of each node."""

    model: ModelProto
    places: tuple[int, ...]
    seconds: float
    proportion: float


def node_loads(model: ModelProto) -> list[NodeLoad]:
    """The loads of the main graph's nodes, in their order. Operations are 0 where a shape is not known."""
    types = infer_types(model)
    weights = {tensor.name: tensor for tensor in model.graph.initializer}
    loads = []
    for node in model.graph.node:
        held = [weights.pop(name) for name in sorted(names_used(node)) if name in weights]
        kinds = [[types.get(name) for name in names if name] for names in (node.input, node.output)]
        shapes = [[k.sizes for k in end if k is not None and k.sizes is not None] for end in kinds]
        known = all(len(shape) == len(end) for shape, end in zip(shapes, kinds, strict=True))
        count = OperationCounter().get_profiler(node.op_type)(node, *shapes) if known else 0
        loads.append(NodeLoad(sum(numpy_helper.to_array(tensor).nbytes for tensor in held), count))
    return loads


def evenly_cut_places(costs: Sequence[int], ipus: int) -> tuple[int, ...]:
    """The IPU of each node: consecutive nodes, at least one on each IPU, and the highest cost of an IPU as low as can
    be. Nodes without cost are spread by their number. There are at least as many nodes as IPUs.
    """
    cut = cut_chain([cost * len(costs) + 1 for cost in costs], ipus)
    ends = present(cut, "a chain without limits has a cut")
    return tuple(ipu for ipu, (first, end) in enumerate(pairwise((0, *ends))) for _ in range(first, end))


def candidate_places(loads: Sequence[NodeLoad], ipus: int, *, optimal: bool) -> Iterator[tuple[int, ...]]:
    """Places to try: weights even; for the fastest answer also operations even, and both."""
    yield evenly_cut_places([load.weight_bytes for load in loads], ipus)
    if optimal:
        yield evenly_cut_places([load.operations for load in loads], ipus)
        weights = sum(load.weight_bytes for load in loads) or 1
        work = sum(load.operations for load in loads) or 1
        yield evenly_cut_places(
            [round((one.weight_bytes / weights + one.operations / work) * 1e6) for one in loads], ipus
        )


def auto_sharded(
    model: ModelProto, ipus: int, *, optimal: bool = False, say: Callable[[str], None] = lambda line: None
) -> ShardedModel:
    """The model on ``ipus`` IPUs: the first answer that fits, with ``optimal`` the fastest one that does. UsageError
    for a model with fewer nodes than IPUs, GraphMemoryAllocationError if no answer fits.
    """
    prepared = Pass.get_pass("unique_name_for_nodes")(model_proto(model))
    topological_sort(prepared.graph)
    if len(prepared.graph.node) < ipus:
        raise UsageError(
            f"the model has {len(prepared.graph.node)} nodes, less than the {ipus} IPUs",
            hint="Ask for fewer: --num_ipus 2",
        )
    loads = node_loads(prepared)
    refusal: GraphMemoryAllocationError | None = None
    for proportion in PROPORTIONS:
        fitting = []
        for places in dict.fromkeys(candidate_places(loads, ipus, optimal=optimal)):
            try:
                fitting.append(_compiled(prepared, places, ipus, proportion))
            except GraphMemoryAllocationError as error:
                refusal = refusal or error
                say(f"[Failed] memory proportion {proportion}: {error.message}")
                continue
            say(
                f"[Success] memory proportion {proportion}: {fitting[-1].seconds * 1e3:.3g} ms a run, modelled"
            )
        if fitting:
            return min(fitting, key=lambda one: one.seconds)
    raise GraphMemoryAllocationError(
        f"the model does not fit {ipus} IPUs: {refusal.message if refusal else 'nothing was tried'}",
        hint=f"Take more IPUs: --num_ipus {2 * ipus}",
    )


def _compiled(model: ModelProto, places: tuple[int, ...], ipus: int, proportion: float) -> ShardedModel:
    placed = model_proto(model)
    for node, place in zip(placed.graph.node, places, strict=True):
        set_attribute(node, VIRTUAL_GRAPH, place)
        if node.op_type in _PRODUCTS and proportion != PROPORTIONS[0]:
            set_attribute(node, AVAILABLE_MEMORY, proportion)
    options = CompilerOptions(
        num_ipus=ipus, virtual_graph_mode="manual", available_memory_proportion=proportion
    )
    report = Compiler.compile(placed, None, options).program().tile_report
    return ShardedModel(placed, places, float(report.get("step", {}).get("seconds") or 0.0), proportion)


def sharding_lines(sharded: ShardedModel) -> list[str]:
    """What is on each IPU, as lines."""
    loads, lines = node_loads(sharded.model), []
    nodes = sharded.model.graph.node
    for ipu in range(max(sharded.places) + 1):
        own = [index for index, place in enumerate(sharded.places) if place == ipu]
        held = sum(loads[index].weight_bytes for index in own)
        work = sum(loads[index].operations for index in own)
        lines.append(
            f"IPU {ipu}: {len(own)} nodes, {nodes[own[0]].name} to {nodes[own[-1]].name}, "
            f"{held / 1e6:.3g} MB of weights, {work / 1e6:.3g} MFLOP"
        )
    latency = sharded.seconds
    rate = f", {1 / latency:.4g} runs/s" if latency else ""
    return [*lines, f"latency {latency * 1e3:.3g} ms{rate}, modelled"]


@click.command("auto_sharding.py", context_settings=HELP_OPTIONS)
@click.option("--input_model", required=True, type=click.Path(path_type=Path), help="The ONNX model.")
@click.option("--num_ipus", "ipus", required=True, type=click.IntRange(2), help="IPUs, 2 or more.")
@click.option("--output_model", type=click.Path(path_type=Path), help="[<input>.auto_sharded.onnx]")
@click.option("--optimal_perf", "optimal", is_flag=True, help="Look for the fastest answer, not the first.")
@click.option(
    "--num_processes",
    type=click.IntRange(1),
    default=2,
    show_default=True,
    help="Accepted: answers are compiled one after the other.",
)
def auto_sharding_command(
    input_model: Path, ipus: int, output_model: Path | None, optimal: bool, num_processes: int
) -> int:
    """Put the nodes of a model on several IPUs so that it fits, and write the model with their places."""
    if not input_model.is_file():
        raise NotFoundError(
            f"there is no file {str(input_model)!r}", hint=f"Look for one: ls {input_model.parent}"
        )
    sharded = auto_sharded(model_proto(input_model), ipus, optimal=optimal, say=click.echo)
    target = output_model or input_model.with_name(f"{input_model.name}.auto_sharded.onnx")
    write_model(sharded.model, target)
    click.echo("\n".join(sharding_lines(sharded)))
    click.echo(f"[Success] Save the sharded model to {target}")
    return 0
