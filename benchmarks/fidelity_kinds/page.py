"""docs/fidelity.md from the rows of a comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

TARGETS = {
    "amp_tile": ("all", 0.02, 0.05),
    "memory_bandwidth": ("all", 0.10, 0.30),
    "exchange": ("all", 0.10, 0.30),
    "sync": ("all", 0.10, 0.30),
    "host_stream": ("all", 0.20, 0.50),
    "session_call": ("all", 0.20, 0.50),
    "vertex": ("60 %", 0.15, None),
    "all_reduce": ("all with bytes", 0.15, 0.40),
    "ipu_link": ("all with bytes", 0.15, 0.40),
    "gemm": ("all", 0.15, 0.40),
    "stencil": ("60 %", 0.20, None),
    "memory": ("80 %", 0.15, 0.50),
    "network": ("80 %", 0.15, 0.40),
    "scaling_ratio": ("all", 0.07, None),
}
"""What the model aims at: coverage, median and worst error on high and medium confidence."""

INTRODUCTION = """# Fidelity

How far podrun's modelled time and memory can be trusted: every published measurement in
`benchmarks/data/measurements.json` that describes something podrun models, predicted from its kind, target and
parameters alone, and held against the published figure. This page is generated:

    python benchmarks/fidelity_holdout.py --json holdout.json
    python benchmarks/fidelity.py --json fidelity.json --held-out holdout.json --markdown docs/fidelity.md

Errors are predicted over published, less one. The table takes one vote per row of the source (records of one row
are one piece of evidence): a row's vote is the median of its records; *worst* is the worst single record.

*reached* counts predictions whose formulas a program of a user reaches too; the other predictions rest on a formula
that stands in the benchmark alone (`benchmarks/fidelity_kinds/`), which the tables of records name. Their errors say
nothing about a program of yours.

Constants fitted to measurements are few; each stands beside its name in the code with what it was derived from:
`podrun/costmodel/target.py`, `podrun/costmodel/*.py`, and for what belongs to a benchmark's set-up (layouts,
library version) `benchmarks/fidelity_kinds/`. Networks are those of `podrun/models/`, written with the front end and
lowered as a session lowers them. They were derived with the open records in view, so the errors below
are those of a fit as much as of a prediction. Of the terms nothing is published about, GW-Link latency matters
most: see *Sensitivity*.
"""

SENSITIVITY = """## Sensitivity

Terms beyond what is published, and what they move:

* **Waiting between IPU-Link domains** (`batch.DOMAIN_SECONDS`, 2.5 ms per batch and doubling of domains, taken from
  two ResNet-50 rows): with 0 instead, ResNet-50 is predicted 20 % faster on POD256 and 13 % on Bow Pod128,
  EfficientNet-B4 11 % and BERT-Large 1 % on Bow Pod256. Systems of at most 64 IPUs do not depend on it.
* **Streaming memory** (`batch.STREAMING_BYTES_PER_SECOND`, 20 GB/s per machine, recalled): with 38.4 GB/s (the DDR
  peak) BERT-Large pretraining with off-chip optimizer state is predicted 1 % (2,048 micro-batches per batch) to 19
  % (36 micro-batches) faster.
* **Statistics of two replicas** (`norm_span` in `benchmarks/fidelity_kinds/layouts.py`): ResNet-50's published
  configurations normalise by the statistics of two replicas together. What the all-reduces of two IPUs take, latency
  nearly all of it, is a tenth of training: without them it is predicted 8 to 13 % faster.
* **The library of 2018 on GC2** (`LIBRARY_2018` in `benchmarks/fidelity_kinds/applications.py`): scales every network
  row of GC2, none of the others. The phases of a step that are published say what it is: tiles waiting for the
  slowest.
* **A proportion that leaves no room** (`splits.serial_turns`): a split takes its output channels in turns, each
  of which gathers the inputs again; where the inputs alone have no room, the vector unit works. ResNet-18 on GC2 is
  predicted at 4.4, 4.4 and 10.5 million cycles at availableMemoryProportion 0.3, 0.2 and 0.1: at 0.1 its first layer
  leaves the AMP unit.
* **Live variables of the library of 2018** (`footprints.VARIABLES_2018`): what profiles of July 2018 hold above the
  most that is live at a time; profiles of December hold nothing above it.
"""

BESIDE = """## Beside the records

What the records leave open of a training run (IPUs per replica, layers on the first of them, micro-batch,
availableMemoryProportion, dropout of attention) is taken from the vendor's configuration files:
`graphcore/examples` (`nlp/bert/popart/configs`, `nlp/bert/pytorch/configs_pretraining.yml` and `configs_squad.yml`,
`nlp/bert/tensorflow2/configs`, `vision/cnns/tensorflow1/training/configs.yml`) and
`mlcommons/training_results_v1.1` (Graphcore, `bert/implementations/popart/configs/mk2`). See
`benchmarks/fidelity_kinds/layouts.py`. So is how ResNet-50, ResNeXt-101 and EfficientNet-B4 normalise (batch
statistics of two replicas; groups), and, of networks served on a C600, proportion and sequence length
(`bytedance/ByteMLPerf`).

What a normalisation takes is the library's own sequence of programs (`lib/poplin/Norms.cpp` and its callers in PopART
and TensorFlow): every vector that is added or multiplied is a pass over all values, and the gradient whitens its input
again. What a pass takes of memory beside its values (`PASS_VERTICES`, `PASS_FRAGMENTS`) was read from one memory
profile each, and `CONTROL_CODE` from one profile and one published size: they come close to fits of single rows, and
the held-out figures above do not move them. `LIBRARY_2018` and `VERTEX_DATA_2018` were derived again as before. The
records and the rows beside them were in view when this form was chosen, so for it they are no independent evidence.
Nothing public decides the three: the library's class of such a pass declares a pointer with a length, a pointer and a
packed count, 10 to 14 bytes where the profile gives 8.4; with ten, one profile's errors fall by 2 points and another's
rise by as much.

Element-wise work and reductions last as long as the tile with most of their operand: what follows a product works where
the product left its outputs. This has no constant. It was chosen with the records and the rows below in view; before
it, the four rows of other sources than the vendor's page, which had just been found, were predicted to +15.5, +6.8,
+5.1 and -2.2 %.

PyTorch's batch of packed text waits for its program on the host (`PACKED_TOKEN_SECONDS` in `applications.py`), a term
taken from the vendor's rates alone: what PyTorch's BERT-Large loses to PopART's on 64 IPUs beyond what it loses on 16.
Else the front end is not modelled: TensorFlow and PyTorch runs are 3 to 15 % slower than PopART's of the same network
and batch.

Sources of others describe what four kinds of rows measured; the rows were in view. The benchmark behind the library's
triad on GC2 copies one array and adds the other in place: two passes of the library's own rates, no constant. The N x 1
vertex's supervisor takes the loops of its code, and the published trace says which of their cycles are instructions. A
serial split's outputs stay as the matrix unit leaves them until the last turn, its slices are padded to the unit's
groups. ByteMLPerf's CLIP is the text encoder of Stable Diffusion (768 wide, 77 tokens), and its harness names how many
clients send (`interact_infos`), which is how many batches a latency holds.

Two terms rest on figures of other kinds than the ones they improve. Exchange delivers 0.82 of its nominal rate (a
simulation of ResNet-50's inference, a low-confidence record that is not scored). A dot product of the vector unit
joins its partial sum in six cycles (the blur in FP16 with a proportion that leaves the AMP no room); the same blur in
FP32 and ResNet-18 at 0.1, which were not used, follow to -12 % and +11 %.
"""

CONSIDERED = """## Considered, and left

Errors above 25 % that no general mechanism was found for; nothing was fitted to one of them alone:

* **B31** (ResNet's first layer, a planner's estimate of 2017): the planner counts neither the gaps of an exchange's
  schedule nor its start, and splits the input channels in two. With every number of row parts tried, not 28 of them,
  the total comes to +6 % instead of +15 %; but single convolutions of ResNet-50 become up to 10 % faster, whose
  training is predicted -8 to +5 % as it is.
* **M04, O17** (EfficientNet-B4 on 16 IPUs, +13 %; not above 25 %), +11 % on 64 IPUs and +3 % on 256, where waiting
  between domains counts: whatever is missed is part of each micro-batch. `PIPELINE_IMBALANCE` (1.25) hides more of it.
  The vendor's configurations cut EfficientNet-B4 before block4a and ResNeXt-101 after the fourth block of its third
  stage, TensorFlow makes no activation of the last stage again, and layers of one IPU then add up to 0.88 of the mean,
  not to 1.25 of it: with 0.88 they are predicted 58 and 25 % too fast. What such a pipeline of two IPUs waits for is
  not published. Without I/O tiles, which these configurations do not set, images come while nothing is computed: that
  would explain a tenth.
* **Operands from elsewhere**: where both operands of an element-wise operation were left by different products, one has
  to come by exchange. Priced so, EfficientNet-B4 improves by 4 points, ResNet-50 becomes 2 to 3 points too slow, and
  the median does not change: left out. With it and every number of parts tried, mean errors are those
  of now for networks (6.5 %), 6.4 instead of 8.2 % for vertices and 10.3 instead of 9.4 % for products.
* **H36.qk_matmul** (exchange code, -42 %): keys arrive transposed; the profile does not say whether the transposition's
  exchange is in the row.
* **H04, H05, H07, K05.batch_1** (GC2, 2018): exchange code of ResNet-50 fell from 56 to 35 MB between the libraries of
  July and December 2018; one factor stands for all of them.
* **L15** (Swin-L on C600, +25 %): every product, window and shift of the model is planned, its published proportion
  (0.2) changes no plan, and BERT's products of the same size are predicted to 5 %. It runs without I/O tiles: its
  input in single precision would take 0.4 ms of the 1.3 that are missing. How the serving tool's own converter changes
  the graph is not published.
* **Sizes between batches**: whole networks over batch sizes never get cheaper with more samples and never jump by more
  than 10 % (`tests/estimate/test_sweeps.py`), but a single product of more rows may be up to 5 % cheaper (BERT's layer
  of 105 tokens 2 % below that of 104): a planner tries 28 numbers of parts of a dimension, those of neighbouring sizes
  differ. One ladder of numbers for all sizes does not remove it, and costs BERT's training 2 %.
* **M40** (GPT on one POD4, +20 %): neither sequence length nor micro-batch is stated. The same program on a Bow Pod16,
  where both are (below the records, above), is predicted to +13 %: PyTorch's share of that is not known.
* **I01, I03** (small images on several GC2): how a chip's tiles share its part of 150 points is not stated.
* **G05** (6 MiB over 16 GC2, -15 %): the row does not name its algorithm. Two rings in opposite directions come to
  -5 %; at this size the library takes meeting in the middle. No other all-reduce of a stated size was found in public.
* **Where the library changes its method** (its own thresholds), an all-reduce of more bytes is predicted up to 9 %
  shorter (four ranks, 2.4 MiB), an all-gather 17 %: it changes later than the modelled steps would.
"""

TERMS = """## The matrix-vector tutorial, term by term

10,000 x 1,000 in FP32 with one hand-written vertex per output, tile cycles measured on hardware
(`tests/costmodel/test_kernels.py` holds each term):

| term | predicted | published | error | where it comes from |
|---|---|---|---|---|
"""
TERM_CAUSES = {
    "compute": "two loads, a co-issued multiply-add and a third of a branch for each element, six workers",
    "exchange": "a linearly mapped matrix moves to row-wise vertices: every word once",
    "sync": "three barriers, and the waits for the host at both ends of the program",
    "host": "40 MB over the IPU's own PCIe link",
}
"""Terms of the tutorial's product and their causes."""


def page(
    rows: Sequence[Mapping[str, Any]],
    by_kind: Mapping[str, Any],
    defaults: Mapping[str, Any],
    held: Mapping[str, Any] | None = None,
) -> str:
    """The whole page; ``held``: results of ``fidelity_holdout.py``."""
    parts = [INTRODUCTION, "## By kind (high and medium confidence)\n", _summary(by_kind)]
    if held:
        parts += ["## Held out\n", _held_out(held["seeds"]), _left_out(held["left_out"])]
        parts += ["## What constants rest on\n", _support(held["support"])]
    terms = _terms(rows)
    parts += ["## Low confidence\n", _low(by_kind), *([terms] if terms else [])]
    parts += [
        BESIDE,
        *([_beside(held["beside"])] if held and held.get("beside") else []),
        CONSIDERED,
        SENSITIVITY,
        "## Defaults for what a record leaves open\n",
    ]
    parts += [_defaults(defaults), "## Every record\n"]
    for kind in sorted({str(row["kind"]) for row in rows}):
        parts += [f"### {kind}\n", _records([row for row in rows if row["kind"] == kind])]
    parts += ["## Not predicted, and why\n", _missing(rows)]
    return "\n".join(parts)


def _percent(value: float | None, *, sign: bool = False) -> str:
    if value is None:
        return "-"
    return f"{value:+.1%}" if sign else f"{value:.1%}"


def _summary(by_kind: Mapping[str, Any]) -> str:
    lines = [
        "| kind | records | rows | predicted | reached | median error | aim | worst | aim |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for kind, groups in by_kind.items():
        found = groups.get("high+medium")
        if not found:
            continue
        _, middle, worst = TARGETS.get(kind, ("", None, None))
        lines.append(
            f"| {kind} | {found['records']} | {found['rows']} | {found['coverage']:.0%} | {found['reached']} "
            f"| {_percent(found['median_error'])} | {_percent(middle)} "
            f"| {_percent(found['worst_error'])} | {_percent(worst)} |"
        )
    return "\n".join(lines) + "\n"


def _held_out(results: Sequence[Mapping[str, Any]]) -> str:
    lines = [
        "For each seed a random third of the rows is held out, the fitted constants are fitted again on the "
        "rest from",
        "values half as large again, and both parts are predicted (`python benchmarks/fidelity_holdout.py`).",
        "Medians of the errors, fitted / held out:",
        "",
        "| kind | " + " | ".join(f"seed {result['seed']}" for result in results) + " |",
        "|---|" + "---|" * len(results),
    ]
    kinds = sorted({kind for result in results for part in ("fitted", "held_out") for kind in result[part]})
    for kind in kinds:
        cells = (f"{_percent(r['fitted'].get(kind))} / {_percent(r['held_out'].get(kind))}" for r in results)
        lines.append(f"| {kind} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _left_out(by_kind: Mapping[str, Any]) -> str:
    lines = [
        "The same to first order for every row by itself: all constants are fitted without it, and it is "
        "predicted.",
        "",
        "| kind | rows | median error | of rows left out |",
        "|---|---|---|---|",
    ]
    for kind, found in by_kind.items():
        lines.append(
            f"| {kind} | {found['rows']} | {_percent(found['as_is'])} | {_percent(found['left_out'])} |"
        )
    return "\n".join(lines) + "\n"


def _support(entries: Sequence[Mapping[str, Any]]) -> str:
    lines = [
        "Rows whose prediction follows a constant by a tenth of its change or more. What rests on one or two "
        "rows is",
        "known no better than they are; constants that shape plans (`exchange.DELIVERED`, `exchange.PHASE_CYCLES`,",
        "`amp.JOIN_PARTIAL`) are felt by every product and are not moved here.",
        "",
        "| constant | rows | strongest |",
        "|---|---|---|",
    ]
    lines += [f"| `{e['constant']}` | {e['rows']} | {', '.join(e['strongest'])} |" for e in entries]
    return "\n".join(lines) + "\n"


def _low(by_kind: Mapping[str, Any]) -> str:
    lines = ["| kind | records | predicted | median error |", "|---|---|---|---|"]
    for kind, groups in by_kind.items():
        found = groups.get("low")
        if found:
            lines.append(
                f"| {kind} | {found['records']} | {found['coverage']:.0%} | "
                f"{_percent(found['median_error'])} |"
            )
    return "\n".join(lines) + "\n"


def _beside(rows: Sequence[Mapping[str, Any]]) -> str:
    """Published rows that are not among the records, by source."""
    lines = [
        "Published rows that are not among the records (`benchmarks/data/beside.json`), predicted the same way. No",
        "constant was fitted to their predictions. They were looked at; rows of the vendor's page may be among records",
        "kept apart, the others are of sources that no record comes from.",
    ]
    for source in dict.fromkeys(row["source"] for row in rows):
        found = [row for row in rows if row["source"] == source and row["predicted"] is not None]
        lines += ["", f"{source}:", "", "| row | predicted | published | error |", "|---|---|---|---|"]
        for row in found:
            error = _percent(row["error"], sign=True)
            lines.append(f"| {row['what']} | {row['predicted']:.6g} | {row['published']:.6g} | {error} |")
    errors = sorted(abs(row["error"]) for row in rows if row["error"] is not None)
    middle = (errors[(len(errors) - 1) // 2] + errors[len(errors) // 2]) / 2.0
    lines += ["", f"Median {_percent(middle)}, worst {_percent(errors[-1])}."]
    return "\n".join(lines) + "\n"


def _terms(rows: Sequence[Mapping[str, Any]]) -> str:
    """The tutorial's terms, from the row that splits a matrix-vector product by phase."""
    by_id = {str(row["id"]): row for row in rows}
    base = next(
        (i.rsplit(".", 1)[0] for i in by_id if i.endswith(".host") and by_id[i]["kind"] == "gemm"), None
    )
    lines = []
    for term, cause in TERM_CAUSES.items() if base else ():
        row = by_id.get(f"{base}.{term}")
        if row is not None and row["predicted"] is not None:
            lines.append(
                f"| {term} | {row['predicted']:,.0f} | {row['published']:,.0f} "
                f"| {_percent(row['error'], sign=True)} | {cause} |"
            )
    return TERMS + "\n".join(lines) + "\n" if lines else ""


def _defaults(defaults: Mapping[str, Any]) -> str:
    lines = []
    for kind, values in defaults.items():
        listed = ", ".join(f"{name} = {value}" for name, value in values.items())
        lines.append(f"* **{kind}**: {listed}")
    lines.append(
        "* **target** `mk2`: GC200, and Bow for the rates of whole matrix products; `c600-or-bow`: C600. "
        "Layouts, sequence lengths "
        "and micro-batches by network: `benchmarks/fidelity_kinds/layouts.py` and `applications.py`."
    )
    return "\n".join(lines) + "\n"


def _reached(row: Mapping[str, Any]) -> str:
    """Whether a program of a user reaches the formulas of a prediction, or those that only the benchmark uses."""
    own = ", ".join(f"`{name}`" for name in row["benchmark_only"])
    return f"no: {own}" if own else "yes"


def _records(rows: Sequence[Mapping[str, Any]]) -> str:
    lines = ["| record | confidence | predicted | published | error | reached |", "|---|---|---|---|---|---|"]
    lines += [
        f"| {row['id']} | {row['confidence']} | {row['predicted']:.6g} | {row['published']:.6g} "
        f"| {_percent(row['error'], sign=True)} | {_reached(row)} |"
        for row in rows
        if row["predicted"] is not None
    ]
    return ("\n".join(lines) if len(lines) > 2 else "None is predicted.") + "\n"


def _missing(rows: Sequence[Mapping[str, Any]]) -> str:
    reasons: dict[str, list[str]] = {}
    for row in rows:
        if row["reason"]:
            reasons.setdefault(str(row["reason"]), []).append(str(row["id"]))
    lines = [f"* {reason}: {', '.join(ids)}" for reason, ids in sorted(reasons.items())]
    return "\n".join(lines) + "\n"
