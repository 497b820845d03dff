"""The names of ``ipu_tensorflow_addons``: its modules, and in which of ours each name is."""

from __future__ import annotations

_ADDONS = "podrun.tensorflow.addons."
ADDON_LAYERS = {
    name: f"{_ADDONS}layers:{name}"
    for name in (
        "Embedding", "Dropout", "LayerNormalization", "GroupNormalization", "InstanceNormalization", "SerialDense",
        "RecomputationCheckpoint", "AssumeEqualAcrossReplicas", "ConvertToF8", "ConvertFromF8",
    )
}  # fmt: skip
ADDON_LAYERS |= {
    name: f"{_ADDONS}ctc_layers:{name}" for name in ("CTCLoss", "CTCInferenceLayer", "CTCPredictionsLayer")
}
ADDON_LAYERS |= {
    "EffectiveTransformer": f"{_ADDONS}attention_layers:EffectiveTransformer",
    "PopnnLSTM": f"{_ADDONS}recurrent_layers:PopnnLSTM",
    "PopnnGRU": f"{_ADDONS}recurrent_layers:PopnnGRU",
    "LSTM": f"{_ADDONS}recurrent_layers:PopnnLSTM",
    "GRU": f"{_ADDONS}recurrent_layers:PopnnGRU",
    "LayerNorm": f"{_ADDONS}layers:LayerNormalization",
    "GroupNorm": f"{_ADDONS}layers:GroupNormalization",
    "InstanceNorm": f"{_ADDONS}layers:InstanceNormalization",
}
_OPTIMIZERS = {
    "IpuOptimizerBase": f"{_ADDONS}state_optimizers:IpuOptimizerBase",
    "AdamIpuOptimizer": f"{_ADDONS}state_optimizers:AdamIpuOptimizer",
    "LAMBIpuOptimizer": f"{_ADDONS}state_optimizers:LAMBIpuOptimizer",
    "SGDIpuOptimizer": f"{_ADDONS}state_optimizers:SGDIpuOptimizer",
}
_TESTS = {
    name: f"podrun.tensorflow.sdk.support_for_tests:{own or name}"
    for name, own in {
        "ReportHelper": "", "add_hw_ci_connection_options": "", "get_ci_num_ipus": "", "has_ci_ipus": "",
        "skip_if_not_enough_ipus": "", "skip_on_hw": "", "test_may_use_ipus_or_model": "may_use_ipus_or_model",
        "test_uses_ipus": "uses_ipus",
    }.items()
}  # fmt: skip
_SDK = "podrun.tensorflow.sdk."
_CONVERTERS = {
    "Converter": f"{_SDK}graph_converters:GraphChange",
    "ManualSharding": f"{_SDK}graph_converters:GraphSharding",
    **{
        name: f"{_SDK}graph_converters:{name}"
        for name in (
            "IPUPlacement", "Int64Conversion", "PrecisionConversion", "GeluReplacement",
            "IPUCompilerWrapper", "LoopRepeatWrapper", "ConverterPipeline",
        )
    },
}  # fmt: skip
_GRAPHS = {
    "tensor_name_to_placehoder_name": f"{_SDK}graph_converters:placeholder_of_tensor",
    "input_name_to_node_name": f"{_SDK}graph_converters:node_name_from_tensor_name",
    **{
        name: f"{_SDK}graph_converters:{name}"
        for name in (
            "str_to_dtype", "add_ipu_scope", "input_name_to_tensor_name", "node_name_from_tensor_name",
            "split_graph_by_device_placement", "get_edge_tensor",
        )
    },
}  # fmt: skip
_CONVERSION = {
    "IpuConversionParams": f"{_SDK}conversion_params:IpuConversionParams",
    "IpuGraphConverter": f"{_SDK}saved_model_conversion:IpuGraphConverter",
    "create_inference_graph": f"{_SDK}saved_model_conversion:create_inference_graph",
}
_SAVED_MODELS: dict[str, dict[str, str]] = {
    "saved_model_tool": _CONVERSION,
    "saved_model_tool.ipu_convert": _CONVERSION,
    "saved_model_tool.saved_model_cli": {
        name: f"{_SDK}saved_model_conversion:{own}"
        for name, own in (
            ("create_parser", "create_parser"), ("convert_with_ipu", "convert_with_ipu"), ("run", "run_signature"),
            ("main", "saved_model_command"),
        )
    },
    "saved_model_tool.saved_model_test_utils": {
        name: f"{_SDK}models_for_tests:{name}" for name in ("ModelForTest", "declare_signature")
    },
    "saved_model_tool.converter": _CONVERTERS,
    **{
        f"saved_model_tool.converter.{module}": _CONVERTERS
        for module in (
            "converter", "converter_pipeline", "ipu_placement", "int64_to_int32_conversion", "precision_conversion",
            "gelu_replacement", "manual_shard", "ipu_compiler_wrapper", "loop_repeat_wrapper",
        )
    },
    "saved_model_tool.converter.utils": _GRAPHS,
}  # fmt: skip
RECURRENT_LAYERS = {
    "PopnnLSTM": f"{_ADDONS}time_major_layers:TimeMajorLstm",
    "PopnnDynamicLSTM": f"{_ADDONS}time_major_layers:TimeMajorDynamicLstm",
    "PopnnGRU": f"{_ADDONS}time_major_layers:TimeMajorGru",
    "PopnnDynamicGRU": f"{_ADDONS}time_major_layers:TimeMajorDynamicGru",
    "PopnnAUGRU": f"{_ADDONS}time_major_layers:TimeMajorAttentionGru",
}
_PARTITION = "podrun.tensorflow.keras.stage_partition:"
_PROFILES = {
    "get_empty_layer_info": f"{_PARTITION}empty_layer_profile",
    "get_empty_range_info": f"{_PARTITION}empty_range_profile",
    "copy_layer_info": f"{_PARTITION}copied_profile",
    "transfer_cycle": f"{_PARTITION}stage_transfer_cycles",
    "aggregate_info_inplace": f"{_PARTITION}add_layer_to_range",
    "compare_pipelined_model_profile": f"{_PARTITION}print_profile_differences",
}
_AUTO_PIPELINE: dict[str, dict[str, str]] = {
    "keras.experimental": {},
    "keras.experimental.auto_pipeline": {},
    "keras.experimental.auto_pipeline.utils": {},
    "keras.experimental.auto_pipeline.utils.types_utils": _PROFILES,
    "keras.experimental.auto_pipeline.utils.keras_utils": {
        "parse_model_intermediate": f"{_PARTITION}parse_model_intermediate",
        "get_assignment_layer_type": f"{_PARTITION}layer_call_type",
        "prepend_batchsize": f"{_PARTITION}with_batch_size",
        "tf_tensor_size": f"{_PARTITION}tensor_bytes",
    },
    "keras.experimental.auto_pipeline.prediction": {},
    "keras.experimental.auto_pipeline.prediction.partition": {
        "get_model_cost_matrix": f"{_PARTITION}range_cost_matrix",
        "get_transfer_cost_matrix": f"{_PARTITION}transfer_cost_matrix",
        "get_auto_pipeline_partition_by_cycle_and_transfer": f"{_PARTITION}partition_by_cycles",
    },
}
ADDON_MODULES: dict[str, dict[str, str]] = {
    "": {},
    "keras": {},
    "keras.layers": ADDON_LAYERS,
    **{
        f"keras.layers.{module}": ADDON_LAYERS
        for module in (
            "assume_equal_across_replicas",
            "ctc",
            "dense",
            "dropout",
            "effective_transformer",
            "embedding_lookup",
            "f8_convert",
            "normalization",
            "recomputation",
            "rnn",
        )
    },
    "keras.optimizers": _OPTIMIZERS,
    **{
        f"keras.optimizers.{module}": {
            name: _OPTIMIZERS[name],
            "IpuOptimizerBase": _OPTIMIZERS["IpuOptimizerBase"],
        }
        for module, name in (
            ("adam_optimizer", "AdamIpuOptimizer"),
            ("adam_ipu_optimizer", "AdamIpuOptimizer"),
            ("lamb_optimizer", "LAMBIpuOptimizer"),
            ("lamb_ipu_optimizer", "LAMBIpuOptimizer"),
            ("sgd_optimizer", "SGDIpuOptimizer"),
            ("sgd_ipu_optimizer", "SGDIpuOptimizer"),
            ("ipu_optimizer_base", "IpuOptimizerBase"),
        )
    },
    **dict.fromkeys(
        (
            "test_utils",
            "test_utils.hardware_test_utils",
            "test_utils.report_helper",
            "test_utils.test_case_extensions",
        ),
        _TESTS,
    ),
    **_SAVED_MODELS,
    **_AUTO_PIPELINE,
    "keras.optimizers.test_util": {"OptimizerTest": "podrun.tensorflow.sdk.cases_of_tests:OptimizerTest"},
    "optimizers": {},
    "v1": {},
    "v1.layers": RECURRENT_LAYERS,
    "v1.layers.rnn_ops": RECURRENT_LAYERS,
    "v1.optimizers": {},
    "layers": RECURRENT_LAYERS,
    "layers.rnn_ops": RECURRENT_LAYERS,
}
