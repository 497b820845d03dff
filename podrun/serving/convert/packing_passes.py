"""Short samples packed into the rows of a batch: attention that keeps them apart.

The mask input numbers the samples (1, 2, ...; 0 is padding). With ``max_valid_num`` samples lie end to end, and cross
rows: an input ``unpack_info`` has their lengths, attention works on samples (Unpack before, Pack behind it), and what
takes the first place of a row takes that of each sample. Without, no sample crosses a row, and the mask alone tells.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, helper

from podrun.core.errors import UnsupportedError, UsageError
from podrun.core.quick_dataclass import dataclass
from podrun.serving.convert.attention_passes import scores_of
from podrun.serving.convert.graph_edit import GraphEditor, ModelEditor
from podrun.serving.convert.graph_walk import GRAPHCORE_DOMAIN, TensorKind, attribute, names_used
from podrun.serving.convert.pass_manager import Pass, register
from podrun.serving.convert.structure_passes import true_inputs
from podrun.serving.convert.type_inference import own_shape_rule

UNPACK_INFO = "unpack_info"


@dataclass(frozen=True, slots=True)
class _Attention:
    """``softmax(q k + mask) v``. ``splits``: the reshapes that make heads of q, k and v; ``join``: that which takes
    them together; ``add``: where the mask comes in, as input ``side``.
    """

    splits: tuple[NodeProto, ...]
    join: NodeProto
    add: NodeProto
    side: int


def _attentions(graph: GraphEditor) -> Iterator[_Attention]:
    for score in scores_of(graph):
        add = graph.sole_user(score.output[0])
        name = score.output[0]
        while add is not None and add.op_type in ("Mul", "Div"):
            name, add = add.output[0], graph.sole_user(add.output[0])
        softmax = graph.sole_user(add.output[0]) if add is not None else None
        product = graph.sole_user(softmax.output[0]) if softmax is not None else None
        if add is None or add.op_type != "Add" or product is None or product.op_type != "MatMul":
            continue
        splits = [_split_of(graph, one) for one in (*score.input, product.input[1])]
        join = _join_of(graph, product)
        if join is not None and None not in splits:
            side = 0 if add.input[1] == name else 1
            yield _Attention(tuple(one for one in splits if one is not None), join, add, side)


def _split_of(graph: GraphEditor, name: str) -> NodeProto | None:
    """The Reshape from ``[rows, places, width]`` that a tensor comes from."""
    for _ in range(4):
        node = graph.made_by(name, "Transpose", "Reshape", "Mul", "Div")
        if node is None:
            return None
        if node.op_type == "Reshape":
            sizes = graph.sizes(node.input[0])
            return node if sizes is not None and len(sizes) == 3 else None
        name = node.input[0]
    return None


def _join_of(graph: GraphEditor, product: NodeProto) -> NodeProto | None:
    node = graph.sole_user(product.output[0])
    node = graph.sole_user(node.output[0]) if node is not None and node.op_type == "Transpose" else node
    sizes = graph.sizes(node.output[0]) if node is not None and node.op_type == "Reshape" else None
    return node if sizes is not None and len(sizes) == 3 else None


def _mask_input(graph: GraphEditor, name: str) -> str:
    """The input that a mask is made of. UsageError if there are several, or none."""
    pending, seen, inputs = [name], set(), set()
    while pending:
        one = pending.pop()
        if one in seen:
            continue
        seen.add(one)
        node = graph.producer(one)
        if node is not None:
            pending += list(names_used(node))
        elif graph.is_input(one):
            inputs.add(one)
    if len(inputs) != 1:
        raise UsageError(
            f"packing: the attention mask comes from {len(inputs)} inputs ({', '.join(sorted(inputs))}); one is wanted"
        )
    return str(inputs.pop())


def _need_attention(attentions: list[_Attention]) -> None:
    if not attentions:
        raise UnsupportedError(
            "packing: no attention of the usual form is in the model",
            hint="softmax(q k + mask) v, with heads made by Reshape and Transpose.",
        )


def _replace_masks(graph: GraphEditor, attentions: list[_Attention], mask: str) -> None:
    """Let attentions add what AttentionMask makes of the numbers of samples in ``mask``."""
    element = graph.element(attentions[0].add.output[0])
    kind = "FLOAT16" if element == TensorProto.FLOAT16 else "FLOAT"
    whole = graph.node("AttentionMask", [mask], domain=GRAPHCORE_DOMAIN, dataType=kind)
    maker = graph.producer(mask)
    if maker is None:
        graph.nodes.insert(0, whole)
    else:
        graph.insert_after(maker, [whole])
    for one in attentions:
        one.add.input[one.side] = whole.output[0]
    graph.touch()
    graph.drop_dead()


@register("insert_attention_mask")
class InsertAttentionMask(Pass):
    """The mask of attention is made of samples' numbers, so that a row may hold several. UsageError where the mask
    comes from several inputs, or is no ``[rows, places]`` of integers.
    """

    def run(self, model: ModelProto) -> ModelProto:
        owner = ModelEditor(model)
        graph = owner.main
        attentions = list(_attentions(graph))
        if not attentions:
            return model
        mask = _mask_input(graph, attentions[0].add.input[attentions[0].side])
        _check_mask(graph, mask)
        _replace_masks(graph, attentions, mask)
        owner.commit()
        return model


def _check_mask(graph: GraphEditor, mask: str) -> tuple[int, int]:
    kind = graph.kind(mask)
    if (
        kind is None
        or kind.element not in (TensorProto.INT32, TensorProto.INT64)
        or len(kind.sizes or ()) != 2
    ):
        raise UsageError(f"packing: the mask {mask!r} is no [rows, places] of integers")
    rows, places = kind.sizes or (0, 0)
    return rows, places


@register("packed_transformer")
class PackedTransformer(Pass):
    """Samples are packed into rows. ``max_valid_num``: most samples of a batch, which then lie end to end;
    ``segment_max_size``: places of the longest sample (a row's).
    """

    def __init__(
        self,
        max_valid_num: int | None = None,
        segment_max_size: int | str | None = None,
        enable_double_batch_unpack: bool | str = False,
        head_pattern: str | None = None,
        dynamic_groups: str | None = None,
    ) -> None:
        for name, value in (("head_pattern", head_pattern), ("dynamic_groups", dynamic_groups)):
            if value:
                raise UnsupportedError(
                    f"pack_args: {name} is not there", hint="Attention is looked for by its form."
                )
        if isinstance(segment_max_size, str) and not segment_max_size.isdecimal():
            raise UnsupportedError(
                f"pack_args: several segments ({segment_max_size}) are not there", hint="segment_max_size=64"
            )
        if max_valid_num is not None and (not isinstance(max_valid_num, int) or max_valid_num < 1):
            raise UsageError(f"pack_args: max_valid_num is above 0, not {max_valid_num!r}")
        self.samples, self.longest = max_valid_num, int(segment_max_size or 0)

    def run(self, model: ModelProto) -> ModelProto:
        owner = ModelEditor(model)
        graph = owner.main
        attentions = list(_attentions(graph))
        _need_attention(attentions)
        mask = _mask_input(graph, attentions[0].add.input[attentions[0].side])
        rows, places = _check_mask(graph, mask)
        _refuse_fixed_positions(graph, rows, places)
        if self.samples is None:
            return InsertAttentionMask().run(model)
        if UNPACK_INFO in true_inputs(model):
            raise UsageError(f"pack_args: the model has an input {UNPACK_INFO!r} already")
        longest = self.longest or places
        model.graph.input.append(
            helper.make_tensor_value_info(UNPACK_INFO, TensorProto.INT32, [self.samples, 1])
        )
        owner.names.add(UNPACK_INFO)
        heads = [graph.sizes(one.output[0]) or () for a in attentions for one in (*a.splits, a.join)]
        firsts = list(_first_places(graph, rows, places))
        numbers = self._unpacked(graph, mask, longest)
        graph.nodes.insert(0, numbers)
        graph.touch()
        for one in attentions:
            sizes = [heads.pop(0) for _ in (*one.splits, one.join)]
            self._attention(graph, one, sizes, (rows, places, longest))
        for node in firsts:
            unpacked = self._unpacked(graph, node.input[0], longest)
            graph.insert_before(node, [unpacked])
            node.input[0] = unpacked.output[0]
        _replace_masks(graph, attentions, numbers.output[0])
        owner.commit()
        for value in model.graph.output:
            value.type.tensor_type.ClearField("shape")
        return model

    def _unpacked(self, graph: GraphEditor, name: str, longest: int) -> NodeProto:
        return graph.node("Unpack", [name, UNPACK_INFO], domain=GRAPHCORE_DOMAIN, maxSequenceLength=longest)

    def _attention(
        self,
        graph: GraphEditor,
        one: _Attention,
        sizes: list[tuple[int, ...]],
        form: tuple[int, int, int],
    ) -> None:
        rows, places, longest = form
        for split, heads in zip(one.splits, sizes, strict=False):
            unpacked = self._unpacked(graph, split.input[0], longest)
            graph.insert_before(split, [unpacked])
            target = np.asarray([self.samples, longest, *heads[2:]], np.int64)
            split.input[0], split.input[1] = unpacked.output[0], graph.add_constant(target, "heads")
        result = one.join.output[0]
        inner = graph.owner.new_name(f"{result}_samples")
        target = np.asarray([self.samples, longest, *sizes[-1][2:]], np.int64)
        one.join.input[1], one.join.output[0] = graph.add_constant(target, "joined"), inner
        packed = graph.node(
            "Pack", [inner, UNPACK_INFO], result, domain=GRAPHCORE_DOMAIN, rows=rows, rowLength=places
        )
        graph.insert_after(one.join, [packed])


def _first_places(graph: GraphEditor, rows: int, places: int) -> Iterator[NodeProto]:
    """Nodes that take the first place of each row."""
    for node in graph.nodes:
        if node.op_type == "Gather" and not node.domain and attribute(node, "axis", 0) == 1:
            sizes = graph.sizes(node.input[0])
            if sizes is not None and sizes[:2] == (rows, places) and graph.scalar(node.input[1]) == 0:
                yield node


def _refuse_fixed_positions(graph: GraphEditor, rows: int, places: int) -> None:
    """UnsupportedError for positions that are constants: a sample need not begin at the first place of a row."""
    for node in graph.nodes:
        sizes = graph.sizes(node.output[0]) if node.op_type == "Add" and not node.domain else None
        if sizes is None or len(sizes) != 3 or sizes[:2] != (rows, places):
            continue
        for name in node.input:
            held = graph.tensor(name)
            if held is not None and len(held.dims) >= 2 and held.dims[-2] == places and places > 1:
                raise UnsupportedError(
                    f"packing: node {node.name!r} adds positions that are constants",
                    hint="Give positions as an input of the model (position_ids).",
                )


def _unpacked_kind(node: NodeProto, kinds: list[TensorKind]) -> list[TensorKind]:
    x, lengths = kinds
    most = int(attribute(node, "maxSequenceLength"))
    return [TensorKind(x.element, ((lengths.shape or (None,))[0], most, *(x.shape or ())[2:]))]


def _packed_kind(node: NodeProto, kinds: list[TensorKind]) -> list[TensorKind]:
    rows, length = int(attribute(node, "rows")), int(attribute(node, "rowLength"))
    return [TensorKind(kinds[0].element, (rows, length, *(kinds[0].shape or ())[2:]))]


def _mask_kind(node: NodeProto, kinds: list[TensorKind]) -> list[TensorKind]:
    rows, places = kinds[0].shape or (None, None)
    half = attribute(node, "dataType", b"FLOAT") == b"FLOAT16"
    return [TensorKind(TensorProto.FLOAT16 if half else TensorProto.FLOAT, (rows, 1, places, places))]


for _operator, _rule in (("Unpack", _unpacked_kind), ("Pack", _packed_kind), ("AttentionMask", _mask_kind)):
    own_shape_rule(_operator, _rule)
