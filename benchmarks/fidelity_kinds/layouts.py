"""How the published training runs lay their networks on IPUs, where a record does not say.

From the configuration files that the vendor published with the programs behind its performance tables
(graphcore/examples: ``nlp/bert/{popart,pytorch}/configs*``, ``vision/cnns/tensorflow1/training/configs.yml``)
and with its MLPerf submissions (mlcommons/training_results_v1.1, Graphcore). They are inputs of those runs;
nothing here was fitted to a rate.
"""

from __future__ import annotations

from dataclasses import dataclass

from fidelity_kinds.record import Record

DEFAULT_PROPORTION = 0.6
"""availableMemoryProportion where neither the record nor its layout says."""


@dataclass(frozen=True, slots=True)
class Layout:
    """``ipus`` of a replica, of which the ``first`` holds so many encoder layers (None: as many as balance).

    A micro-batch is of so many ``samples``, or, of text, of as many whole sequences (a power of two) as
    ``tokens`` hold. ``halves``: stages may end between attention and feed-forward. ``attention_dropout``:
    attention's shares are dropped too.
    """

    ipus: int = 1
    first: float | None = None
    samples: int = 1
    tokens: int = 1024
    proportion: float = DEFAULT_PROPORTION
    halves: bool = False
    attention_dropout: bool = False

    def sequences(self, length: int) -> int:
        """Sequences of ``length`` tokens in a micro-batch."""
        return 1 << max(0, (self.tokens // length).bit_length() - 1)


LAYOUTS = {
    ("resnet50", ""): Layout(samples=20, proportion=0.15),
    ("resnext101", ""): Layout(ipus=2, samples=6),
    ("efficientnet_b0", ""): Layout(samples=16),
    ("efficientnet_b4", ""): Layout(ipus=2, samples=3, proportion=0.4),
    ("bert_base", ""): Layout(ipus=4, first=0, tokens=4096, proportion=0.25),
    ("bert_base", "squad"): Layout(ipus=4, first=0, tokens=384, proportion=0.25, attention_dropout=True),
    ("bert_large", ""): Layout(ipus=4, first=3, proportion=0.25),
    ("bert_large", "mlperf"): Layout(ipus=4, first=4.5, proportion=0.23, halves=True),
    ("bert_large", "squad"): Layout(ipus=8, first=2, tokens=1536, proportion=0.33, attention_dropout=True),
    ("gpt_117m", ""): Layout(ipus=4, first=0, attention_dropout=True),
}
"""By network and task; for other tasks, the network's entry without one."""
ONE_IPU = Layout()


def layout_of(record: Record, network: str) -> Layout:
    """The layout of a training run on a system, or of the evaluation within it; inference by itself, and
    training on one chip, take `ONE_IPU`.
    """
    task = str(record.params.get("task") or "").partition("_")[0]
    within = record.params["mode"] == "train" or task == "mlperf"
    if not within or max(record.ipus, record.params["ipus"]) == 1:
        return ONE_IPU
    return LAYOUTS.get((network, task)) or LAYOUTS.get((network, "")) or ONE_IPU


def proportion(record: Record, layout: Layout) -> float:
    """availableMemoryProportion of a run."""
    return float(record.params.get("available_memory_proportion") or layout.proportion)
