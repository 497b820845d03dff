"""From a converted model in float16 to one in 8-bit floats, by data: `quantize` and `FP8Quantizer`.

model = Converter(precision="fp8", quantize=True).convert(origin)       # float16, ready for 8 bits
poprt.quantizer.quantize(model, origin, "out", "data.npz", "fp8", "kld")
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from onnx import ModelProto

from podrun.core.errors import UnsupportedError, UsageError
from podrun.serving.convert.calibration import (
    LOSS_FUNCTIONS,
    LayerChoice,
    calibrate,
    compare_layers,
    write_quantize_log,
)
from podrun.serving.convert.converter import ConversionOptions, Converter
from podrun.serving.convert.float8_passes import FloatToFp8
from podrun.serving.convert.gptq import apply_gptq
from podrun.serving.convert.half_passes import listed_names
from podrun.serving.convert.report_passes import made_up_inputs

Data = Mapping[str, np.ndarray]


def read_calibration_data(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """Arrays of a ``.npz`` file by the names of inputs. Pickles are refused: reading one runs what is in it."""
    file = Path(path)
    if file.suffix.lower() in (".pkl", ".pickle", ".pk"):
        raise UnsupportedError(
            f"data_preprocess: {file.name} is a pickle; podrun does not open pickles, which run what is in them",
            hint='Save the arrays once: numpy.savez("data.npz", **pickle.load(open("data.pkl", "rb")))',
        )
    try:
        held = np.load(file, allow_pickle=False)
        if isinstance(held, np.ndarray):
            raise UsageError(f"data_preprocess: {file.name} holds one array; a .npz names one for each input")
        with held:
            return {name: held[name] for name in held.files}
    except FileNotFoundError as error:
        raise UsageError(f"data_preprocess: there is no file {str(file)!r}") from error
    except (ValueError, OSError, EOFError, KeyError) as error:
        raise UsageError(
            f"data_preprocess: {file.name} is no .npz of plain arrays: {error}",
            hint='numpy.savez("data.npz", x=array) writes one; pickles are not opened.',
        ) from error


class FP8Quantizer:
    """Chooses formats and scales by data and converts. ``loss_type``: kld, mse, mae, snr, cos_dist, or gptq with
    ``precision="fp8_weight"``; ``num_of_layers_keep_fp16``: so many products with the largest losses stay in float16.
    """

    def __init__(
        self,
        precision: str = "fp8",
        loss_type: str = "kld",
        *,
        num_of_layers_keep_fp16: int = 0,
        skip_op_names: str | Collection[str] | None = None,
    ) -> None:
        if precision not in ("fp8", "fp8_weight"):
            raise UsageError(f"calibration is for precision fp8 and fp8_weight, not {precision!r}")
        if loss_type not in (*LOSS_FUNCTIONS, "gptq"):
            raise UsageError(
                f"there is no loss type {loss_type!r}",
                hint=f"They are {', '.join((*LOSS_FUNCTIONS, 'gptq'))}.",
            )
        if loss_type == "gptq" and precision != "fp8_weight":
            raise UsageError("loss type gptq is for precision fp8_weight: it is about weights alone")
        if isinstance(num_of_layers_keep_fp16, bool) or not isinstance(num_of_layers_keep_fp16, int):
            raise UsageError(f"num_of_layers_keep_fp16 is a number, not {num_of_layers_keep_fp16!r}")
        if num_of_layers_keep_fp16 < 0:
            raise UsageError("num_of_layers_keep_fp16 is not below 0")
        self.precision, self.loss_type = precision, loss_type
        self.keep = num_of_layers_keep_fp16
        self.skipped = listed_names(skip_op_names, "fp8_skip_op_names")
        self.choices: list[LayerChoice] = []
        self.kept: list[str] = []

    def quantize(
        self, onnx_model: ModelProto, origin: ModelProto, data: Data, output_dir: str | os.PathLike[str]
    ) -> ModelProto:
        """``onnx_model`` (in float16) in 8 bits; ``origin``: the same model in float32, on which the data run."""
        self.choices = calibrate(
            origin, data, precision=self.precision, loss_type=self.loss_type, skipped=self.skipped
        )
        ranked = sorted(self.choices, key=lambda choice: choice.loss, reverse=True)
        self.kept = [choice.name for choice in ranked[: self.keep]]
        write_quantize_log(self.choices, self.kept, self.loss_type, output_dir)
        used = [choice for choice in self.choices if choice.name not in self.kept]
        weights = {choice.name: choice.weights.chosen for choice in used if choice.weights is not None}
        inputs = {choice.name: choice.inputs.chosen for choice in used if choice.inputs is not None}
        result = ModelProto()
        result.CopyFrom(onnx_model)
        if self.loss_type == "gptq":
            from podrun.serving.convert.structure_passes import adapted

            result = apply_gptq(result, adapted(dict(data), result), weights)
        present = {node.name for node in result.graph.node}
        skip = [name for name in (*self.skipped, *self.kept) if name in present]
        convert = FloatToFp8(
            skip_op_names=skip,
            convert_model=self.precision,
            fp8_input_dict=inputs,
            fp8_weight_dict=weights,
        )
        return convert.run(result)


def quantize(
    onnx_model: ModelProto,
    input_model: ModelProto,
    output_dir: str | os.PathLike[str],
    data_preprocess: str | os.PathLike[str] | Data | None = None,
    precision: str = "fp8",
    quantize_loss_type: str = "kld",
    num_of_layers_keep_fp16: int = 0,
    options: Mapping[str, Any] | None = None,
) -> ModelProto:
    """``onnx_model``, converted to float16, in 8 bits. ``input_model``: the model that it was converted from;
    ``data_preprocess``: a ``.npz`` file or arrays by input (None: made-up data); ``options``: those of the conversion,
    so that names of nodes agree.
    """
    told = dict(options or {})
    told |= {"precision": "fp32", "quantize": False, "check": False, "fp8_skip_op_names": None}
    told["fp16_skip_op_types"] = None
    known = set(ConversionOptions.__dataclass_fields__)
    origin = Converter(**{key: value for key, value in told.items() if key in known}).convert(input_model)
    if data_preprocess is None:
        data: Data = made_up_inputs(origin)
    elif isinstance(data_preprocess, (str, os.PathLike)):
        data = read_calibration_data(data_preprocess)
    else:
        data = data_preprocess
    quantizer = FP8Quantizer(
        precision,
        quantize_loss_type,
        num_of_layers_keep_fp16=num_of_layers_keep_fp16,
        skip_op_names=(options or {}).get("fp8_skip_op_names"),
    )
    result = quantizer.quantize(onnx_model, origin, data, output_dir)
    if (options or {}).get("precision_compare"):
        compare_layers(origin, result, data, output_dir)
    return result
