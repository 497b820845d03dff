"""DataFlow and AnchorReturnType: how many batches a step has and which tensors come back to the host, in what shape.

Source: graphcore/popart, willow/src/dataflow.cpp. A *step* is one ``session.run``: ``batchesPerStep`` batches of
``accumulationFactor`` micro-batches on every replica.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, overload

import numpy as np

from podrun.compiler.program import Beside
from podrun.core.executable import Retrieval
from podrun.popart.values.enums import AnchorReturnTypeId, ExchangeStrategy, ReplicatedStreamMode, TileSet
from podrun.popart.values.exceptions import incompatible, popart_exception
from podrun.popart.values.tensor_info import integer
from podrun.runtime.settings import Returned

_NAMES = {"all": "All", "final": "Final", "sum": "Sum", "everyn": "EveryN"}

_RETRIEVALS = {
    AnchorReturnTypeId.All: Retrieval.ALL,
    AnchorReturnTypeId.Final: Retrieval.FINAL,
    AnchorReturnTypeId.Sum: Retrieval.SUM,
    AnchorReturnTypeId.EveryN: Retrieval.EVERY_N,
}

BESIDE = {
    ExchangeStrategy.JustInTime: Beside.NOTHING,
    ExchangeStrategy.OverlapInnerLoop: Beside.MICRO_BATCHES,
    ExchangeStrategy.OverlapLoops: Beside.BATCHES,
    ExchangeStrategy.OverlapStep: Beside.BATCHES,
}
"""What runs while a tensor with an exchange strategy crosses."""


class AnchorReturnType:
    """Which values of an anchor come back: ``AnchorReturnType("All")``, ``"Final"``, ``"Sum"`` or ``("EveryN", 2)``.

    The name's case does not matter. popart_exception for an unknown name, EveryN without a period, a period
    that is not positive, or a period with another kind.
    """

    @overload
    def __init__(
        self,
        anchorReturnTypeString: str,
        tileSet: TileSet = ...,
        exchangeStrategy: ExchangeStrategy = ...,
    ) -> None: ...

    @overload
    def __init__(
        self,
        anchorReturnTypeString: str,
        returnPeriod: int,
        tileSet: TileSet = ...,
        exchangeStrategy: ExchangeStrategy = ...,
    ) -> None: ...

    def __init__(self, anchorReturnTypeString: str, *args: Any, **kwargs: Any) -> None:
        period = kwargs.pop("returnPeriod", None)
        rest = list(args)
        if rest and isinstance(rest[0], (int, np.integer)) and not isinstance(rest[0], (bool, TileSet)):
            period = rest.pop(0)
        settings = dict(zip(("tileSet", "exchangeStrategy"), rest, strict=False)) | kwargs
        if len(rest) > 2 or set(settings) - {"tileSet", "exchangeStrategy"}:
            raise incompatible(
                "__init__",
                "AnchorReturnType takes a name, a return period for "
                f"EveryN, tileSet and exchangeStrategy; got {args!r}, {kwargs!r}.",
            )
        name = str(anchorReturnTypeString).lower()
        if name not in _NAMES:
            raise popart_exception(
                f"Invalid anchor return type ID supplied: {anchorReturnTypeString}",
                hint=f"One of {', '.join(_NAMES.values())}.",
            )
        self._id = AnchorReturnTypeId[_NAMES[name]]
        self._tile_set: TileSet = settings.get("tileSet", TileSet.Compute)
        self._exchange_strategy: ExchangeStrategy = settings.get(
            "exchangeStrategy", ExchangeStrategy.JustInTime
        )
        self._period = self._check_period(period)

    def _check_period(self, period: int | None) -> int:
        every_n = self._id is AnchorReturnTypeId.EveryN
        if every_n and period is None:
            raise popart_exception(
                "Must specify return period with option 'EVERYN'", hint='AnchorReturnType("EveryN", 2)'
            )
        if not every_n and period is not None:
            raise popart_exception("A return period should not be supplied for this anchor return type")
        if period is not None and period <= 0:
            raise popart_exception("Anchor return period must be greater than zero")
        return 1 if period is None else period

    def id(self) -> AnchorReturnTypeId:
        """Which values come back."""
        return self._id

    def rp(self) -> int:
        """The return period. popart_exception unless the kind is EveryN."""
        if self._id is not AnchorReturnTypeId.EveryN:
            raise popart_exception(f'A return period exists for "EveryN" only, not for "{self._id.name}".')
        return self._period

    def tileSet(self) -> TileSet:
        """Tiles the anchor is copied from."""
        return self._tile_set

    def exchangeStrategy(self) -> ExchangeStrategy:
        """When the anchor is copied."""
        return self._exchange_strategy

    def returned(self) -> Returned:
        """The return type in the form that the runtime takes."""
        return Returned(_RETRIEVALS[self._id], self._period, BESIDE[self._exchange_strategy])

    def leading_dims(self, batches: int, accumulation: int, replicas: int) -> tuple[int, ...]:
        """Dimensions in front of the tensor's own in a host buffer, those of size 1 left out
        (Session.initAnchorArrays of PopART's Python wrapper).
        """
        per_batch = {
            AnchorReturnTypeId.All: (batches, accumulation, replicas),
            AnchorReturnTypeId.EveryN: (batches // self._period, accumulation, replicas),
        }
        return tuple(dim for dim in per_batch.get(self._id, (replicas,)) if dim != 1)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AnchorReturnType) and (self._id, self._period) == (other._id, other._period)

    def __hash__(self) -> int:
        return hash((self._id, self._period))

    def __repr__(self) -> str:
        period = f", {self._period}" if self._id is AnchorReturnTypeId.EveryN else ""
        return f'AnchorReturnType("{self._id.name}"{period})'


class DataFlow:
    """``DataFlow(batchesPerStep, {tensor: AnchorReturnType})`` or ``DataFlow(batchesPerStep, [tensors], type)``.

    popart_exception if batchesPerStep is not positive or an EveryN period does not divide it.
    """

    def __init__(
        self,
        batchesPerStep: int,
        anchorTensors: Mapping[str, AnchorReturnType] | Sequence[str] | None = None,
        anchorReturnType: AnchorReturnType | None = None,
        *,
        anchorIds: Sequence[str] | None = None,
    ) -> None:
        try:
            batches = integer(batchesPerStep)
        except TypeError as error:
            raise incompatible("__init__", f"batchesPerStep is an int, not {batchesPerStep!r}.") from error
        anchors = anchorIds if anchorTensors is None else anchorTensors
        self._anchors = self._collect(anchors if anchors is not None else {}, anchorReturnType)
        self._batches = 0
        self.setBatchesPerStep(batches)

    @staticmethod
    def _collect(
        anchors: Mapping[str, AnchorReturnType] | Iterable[str], kind: AnchorReturnType | None
    ) -> dict[str, AnchorReturnType]:
        if isinstance(anchors, Mapping):
            pairs = dict(anchors)
        elif isinstance(anchors, str):
            raise incompatible(
                "__init__",
                "Anchors are a dict from tensor to AnchorReturnType, or a "
                f"list of tensors; got the string {anchors!r}.",
            )
        else:
            pairs = dict.fromkeys(anchors, kind or AnchorReturnType("All"))
        wrong = [name for name, value in pairs.items() if not isinstance(value, AnchorReturnType)]
        if wrong:
            raise incompatible(
                "__init__", f"Anchor {wrong[0]!r} has {pairs[wrong[0]]!r} where an AnchorReturnType belongs."
            )
        return dict(sorted(pairs.items()))

    @property
    def batches(self) -> int:
        """Batches in one run (`podrun.runtime.settings.RunPlan`)."""
        return self._batches

    @property
    def returned(self) -> dict[str, Returned]:
        """The anchors as the runtime takes them."""
        return {name: kind.returned() for name, kind in self._anchors.items()}

    def setBatchesPerStep(self, batchesPerStep: int) -> None:
        """Change the number of batches; has an effect only before a session is made."""
        if batchesPerStep <= 0:
            raise popart_exception(f"batchesPerStep must be positive, not {batchesPerStep}.")
        for name, kind in self._anchors.items():
            if kind.id() is not AnchorReturnTypeId.EveryN:
                continue
            if kind.rp() > batchesPerStep or batchesPerStep % kind.rp():
                raise popart_exception(
                    f"Anchor {name!r} returns every {kind.rp()} batches, which does not divide the {batchesPerStep} "
                    "batches per step."
                )
        self._batches = batchesPerStep

    def batchesPerStep(self) -> int:
        """Batches in one ``session.run``."""
        return self._batches

    def anchors(self) -> list[str]:
        """The anchored tensors in lexicographic order."""
        return list(self._anchors)

    def nAnchors(self) -> int:
        """Number of anchors."""
        return len(self._anchors)

    def isAnchored(self, tensorId: str) -> bool:
        """True iff ``tensorId`` comes back."""
        return tensorId in self._anchors

    def art(self, anchorId: str) -> AnchorReturnType:
        """The return type of an anchor. popart_exception if the tensor is not an anchor."""
        if anchorId not in self._anchors:
            raise popart_exception(f"Tensor {anchorId!r} is not an anchor; the anchors are {self.anchors()}.")
        return self._anchors[anchorId]

    def __repr__(self) -> str:
        return f"DataFlow({self._batches}, {self._anchors!r})"


class InputSettings:
    """How a model input reaches the IPUs: tiles, exchange, and whether each replica gets its own data or all get the
    same.
    """

    def __init__(self, *args: object, **kwargs: object) -> None:
        self._tile_set = TileSet.Compute
        self._strategy = ExchangeStrategy.JustInTime
        self._mode = ReplicatedStreamMode.Replicate
        # `relicatedStreamMode` is PopART's own spelling of the keyword.
        for value in (*args, *kwargs.values()):
            if isinstance(value, TileSet):
                self._tile_set = value
            elif isinstance(value, ExchangeStrategy):
                self._strategy = value
            elif isinstance(value, ReplicatedStreamMode):
                self._mode = value
            else:
                raise incompatible(
                    "__init__",
                    f"InputSettings takes a TileSet, an ExchangeStrategy or a ReplicatedStreamMode, not {value!r}.",
                )
        unknown = set(kwargs) - {"tileSet", "exchangeStrategy", "relicatedStreamMode", "replicatedStreamMode"}
        if unknown:
            raise TypeError(f"__init__(): incompatible function arguments: {sorted(unknown)}.")

    def tileSet(self) -> TileSet:
        """Tiles the input is copied to."""
        return self._tile_set

    def exchangeStrategy(self) -> ExchangeStrategy:
        """When the input is copied."""
        return self._strategy

    def replicatedStreamMode(self) -> ReplicatedStreamMode:
        """Whether each replica gets its own data."""
        return self._mode
