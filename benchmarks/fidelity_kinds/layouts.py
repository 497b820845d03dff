"""How the published training runs lay their networks on IPUs, where a record does not say.

From the configuration files that the vendor published with the programs behind its performance tables
(graphcore/examples: ``nlp/bert/{popart,pytorch,tensorflow2}/configs*``, and for images
``vision/cnns/tensorflow1/training/configs.yml``) and with its MLPerf submissions
(mlcommons/training_results_v1.1, Graphcore). Networks served on a C600 are those of bytedance/ByteMLPerf
(``byte_mlperf/backends/IPU/interact_infos`` and ``byte_mlperf/model_zoo``). They are inputs of those runs; nothing here
was fitted to a rate.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from fidelity_kinds.record import Record

DEFAULT_PROPORTION = 0.6
"""availableMemoryProportion where neither the record nor its layout says."""


@dataclass(frozen=True, slots=True)
class Layout:
    """``ipus``: IPUs of a replica; ``first``: encoder layers on the first of them (None: as many as balance).

    ``samples``: samples of a micro-batch, or, for text, as many whole sequences (a power of two) as
    ``tokens`` hold. ``halves``: stages may end between attention and feed-forward. ``attention_dropout``:
    attention's shares are dropped too. ``norm``: how channels are normalised; batch statistics are those of
    ``norm_span`` replicas together. ``length``: tokens of a served sequence (0: as the task says), which are
    ``packed`` or not. ``in_flight``: batches in flight where latency is measured: one for each client, and of packed
    text, which one client sends, the pack that runs and the one that is filled.
    """

    ipus: int = 1
    first: float | None = None
    samples: int = 1
    tokens: int = 1024
    proportion: float = DEFAULT_PROPORTION
    halves: bool = False
    attention_dropout: bool = False
    norm: str = "batch"
    norm_span: int = 1
    length: int = 0
    packed: bool = False
    in_flight: int = 4

    def sequences(self, length: int) -> int:
        """Sequences of ``length`` tokens in a micro-batch."""
        return 1 << max(0, (self.tokens // length).bit_length() - 1)


PRETRAINING = Layout(ipus=4, first=3, proportion=0.25)
"""BERT-Large on four IPUs: three layers beside the embedding, seven on each other."""
LAYOUTS = {
    "resnet50": Layout(samples=20, proportion=0.15, norm_span=2),
    "resnext101": Layout(ipus=2, samples=6, norm="group"),
    "efficientnet_b0": Layout(samples=16),
    "efficientnet_b4": Layout(ipus=2, samples=3, proportion=0.4, norm="group"),
    "bert_base": Layout(ipus=4, first=0, tokens=4096, proportion=0.25),
    "bert_base squad": Layout(ipus=4, first=0, tokens=384, proportion=0.25, attention_dropout=True),
    "bert_large": PRETRAINING,
    "bert_large pretrain_phase_2 popart": replace(PRETRAINING, proportion=0.21),
    "bert_large pretrain_phase_1 pytorch rack": replace(PRETRAINING, proportion=0.19),
    "bert_large pretrain_phase_2 pytorch": replace(PRETRAINING, proportion=0.15),
    "bert_large pretrain_phase_2 pytorch rack": replace(PRETRAINING, proportion=0.19),
    "bert_large pretrain_phase_1 tf2 rack": replace(PRETRAINING, tokens=512, proportion=0.18),
    "bert_large mlperf": Layout(ipus=4, first=4.5, proportion=0.23, halves=True),
    "bert_large squad": Layout(ipus=8, first=2, tokens=1536, proportion=0.33, attention_dropout=True),
    "gpt_117m": Layout(ipus=4, first=0, attention_dropout=True),
}
"""By network; where there is one for it, by task or its first word, front end, and systems of 64 IPUs or more."""
SERVED = {
    "bert_base": Layout(proportion=0.4, in_flight=2),
    "albert": Layout(proportion=0.5, length=384, packed=True, in_flight=2),
    "roberta": Layout(proportion=0.4, length=384, packed=True, in_flight=2),
    "clip_text_large": Layout(proportion=0.8, length=77, in_flight=3),
    "swin_l": Layout(proportion=0.2),
}
"""Networks served on a C600."""
RACK_IPUS = 64
ONE_IPU = Layout()


def layout_of(record: Record, network: str) -> Layout:
    """The layout of a training run on a system, or of the evaluation within it, or of a served network; other
    inference, and training on one chip, take `ONE_IPU`.
    """
    task = str(record.params.get("task") or "")
    kind = task.partition("_")[0]
    ipus = max(record.ipus, record.params["ipus"])
    if record.target == "c600" and record.params["mode"] != "train":
        return SERVED.get(network, ONE_IPU)
    if not (record.params["mode"] == "train" or kind == "mlperf") or ipus == 1:
        return ONE_IPU
    framework = str(record.params.get("framework") or "")
    for asked in (task, kind, ""):
        for front_end in (framework, ""):
            for size in ("rack",) * (ipus >= RACK_IPUS) + ("",):
                found = LAYOUTS.get(" ".join(word for word in (network, asked, front_end, size) if word))
                if found:
                    return found
    return ONE_IPU


def proportion(record: Record, layout: Layout) -> float:
    """availableMemoryProportion of a run."""
    return float(record.params.get("available_memory_proportion") or layout.proportion)
