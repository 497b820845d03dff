"""The names of ``tensorflow.python.ipu``: in which of our modules they are, and which are refused."""

from __future__ import annotations

MODULES: dict[str, tuple[str, ...]] = {
    "config": ("config",),
    "utils": ("utils",),
    "scopes": ("scopes",),
    "loops": ("loops",),
    "ipu_compiler": ("ipu_compiler",),
    "function": ("ipu_compiler",),
    "ipu_infeed_queue": ("ipu_infeed_queue",),
    "ipu_outfeed_queue": ("ipu_outfeed_queue",),
    "ipu_strategy": ("ipu_strategy",),
    "gradient_accumulation": ("gradient_accumulation",),
    "pipelining_ops": ("pipelining_ops",),
    "optimizers": ("wrapping_optimizers", "gradient_accumulation", "scaling_optimizer"),
    "automatic_loss_scaling_optimizer": ("scaling_optimizer",),
    "cross_replica_ops": ("replica_ops",),
    "replication_ops": ("replica_ops",),
    "control_flow_ops": ("replica_ops",),
    "functional_ops": ("replica_ops",),
    "internal_ops": ("replica_ops", "carried_state"),
    "grad_util_ops": ("carried_state",),
    "eager": ("carried_state",),
    "eager.backprop": ("carried_state",),
    "all_to_all_op": ("replica_ops",),
    "reduce_scatter_op": ("replica_ops",),
    "within_replica_ops": ("shard_ops",),
    "sharding": ("shard_ops",),
    "custom_ops": ("user_ops",),
    "slicing_ops": ("row_slices",),
    "statistics_ops": ("row_slices",),
    "serving": ("exported_models",),
    "dataset_benchmark": ("dataset_benchmark",),
    "test_utils": ("support_for_tests", "events_of_tests"),
    "xla_test": ("cases_of_tests",),
    "gradient_accumulation_optimizer": ("wrapping_optimizers", "gradient_accumulation"),
    "cross_replica_optimizer": ("wrapping_optimizers",),
    "map_gradient_optimizer": ("wrapping_optimizers",),
    "sharded_optimizer": ("wrapping_optimizers",),
    "ipu_optimizer": ("wrapping_optimizers",),
    "data": ("dataset_benchmark",),
    "data.ops": ("dataset_benchmark",),
    "data.ops.dataset_ops": ("dataset_benchmark",),
    "embedded_runtime": ("embedded_runtime",),
    "application_compile_op": ("embedded_runtime",),
    "ipu_estimator": ("ipu_estimator",),
    "ipu_pipeline_estimator": ("ipu_pipeline_estimator",),
    "ipu_run_config": ("ipu_run_config",),
    "ipu_session_run_hooks": ("ipu_session_run_hooks",),
    "distributed": ("host_collectives",),
    "distributed.host_collective_ops": ("host_collectives",),
    "distributed.popdist_strategy": ("popdist_strategy",),
    "ipu_multi_worker_strategy": ("popdist_strategy",),
    "horovod.popdist_strategy": ("popdist_strategy",),
    "horovod.ipu_horovod_strategy": ("popdist_strategy",),
    "horovod.ipu_multi_replica_strategy": ("popdist_strategy",),
    "horovod": ("host_collectives",),
    "nn_ops": ("layer_ops", "replica_ops", "sequence_losses"),
    "rand_ops": ("layer_ops",),
    "normalization_ops": ("layer_ops",),
    "embedding_ops": ("layer_ops", "host_embeddings"),
    "math_ops": ("layer_ops",),
    "image_ops": ("layer_ops",),
    "f8_ops": ("eight_bit_tensors",),
}
"""A module of the SDK -> our modules whose names it has."""
_COLLECTIVES = {
    "allreduce": "horovod_allreduce",
    "allgather": "tensor_allgather",
    "broadcast": "tensor_broadcast",
    "init": "init_instances",
    "shutdown": "end_instances",
    "size": "instance_count",
    "rank": "instance_rank",
    "local_size": "instances_on_host",
    "local_rank": "rank_on_host",
    "mpi_threads_supported": "no_mpi",
}
NAMES: dict[str, dict[str, str]] = {
    "loops": {"repeat": "repeat_loop"},
    "function": {"function": "ipu_function"},
    "f8_ops": {"Format": "EightBitFormat"},
    "test_utils": {
        "test_uses_ipus": "uses_ipus",
        "test_may_use_ipus_or_model": "may_use_ipus_or_model",
    },
    "pipelining_ops": {
        "pipeline": "run_pipeline",
        "recomputation_checkpoint": "ipu_recomputation_checkpoint",
    },
    "nn_ops": {
        "gelu": "approximate_gelu",
        "softmax": "stable_softmax",
        "swish": "ipu_swish",
        "hard_sigmoid": "ipu_hard_sigmoid",
        "multi_conv": "ipu_multi_conv",
        "sampled_softmax_loss": "ipu_sampled_softmax_loss",
        "nce_loss": "ipu_nce_loss",
        "_compute_sampled_logits": "compute_sampled_logits",
        "ctc_beam_search_decoder": "label_paths_of_logits",
        "ctc_beam_search_decoder_with_log_probs": "label_paths_of_log_probs",
    },
    "normalization_ops": {"group_norm": "ipu_group_norm", "layer_norm": "ipu_layer_norm"},
    "functional_ops": {"function": "outlined_function"},
    "ipu_multi_worker_strategy": {
        "IPUMultiWorkerStrategy": "RefusedMultiWorkerStrategy",
        "IPUMultiWorkerStrategyV1": "RefusedMultiWorkerStrategy",
    },
    "horovod.ipu_horovod_strategy": {
        "IPUHorovodStrategy": "HorovodStrategy",
        "IPUHorovodStrategyV1": "HorovodStrategy",
    },
    "horovod.ipu_multi_replica_strategy": {
        "IPUMultiReplicaStrategy": "PopDistStrategy",
        "IPUMultiReplicaStrategyV1": "PopDistStrategy",
    },
    "math_ops": {"serialized_matmul": "ipu_serialized_matmul"},
    "internal_ops": {"print_tensor": "printed_tensor", "remap_deduce": "remap"},
    "rand_ops": {"dropout": "seeded_dropout"},
    "all_to_all_op": {"all_to_all": "exchanged_between_replicas", "all_gather": "gathered_from_replicas"},
    "slicing_ops": {"sequence_slice": "copied_rows"},
    "statistics_ops": {"histogram": "counts_between_levels"},
    "reduce_scatter_op": {"reduce_scatter": "reduced_and_scattered"},
    "within_replica_ops": {
        "all_gather": "shards_all_gathered",
        "all_reduce": "shards_reduced",
        "reduce_scatter": "shards_reduce_scattered",
    },
    "distributed": _COLLECTIVES | {"allreduce": "distributed_allreduce"},
    "distributed.host_collective_ops": _COLLECTIVES | {"allreduce": "distributed_allreduce"},
    "horovod": _COLLECTIVES,
}
"""Names of the SDK that are others in our modules."""
MOVED = {
    "tensorflow.python.distribute.distribution_strategy_context": "tensorflow.python.distribute.distribute_lib",
    "tensorflow.python.training.distribution_strategy_context": "tensorflow.python.distribute.distribute_lib",
    "tensorflow.python.training.training_ops": "tensorflow.python.ops.gen_training_ops",
    "tensorflow.python.training.tracking": "tensorflow.python.trackable",
    "tensorflow.python.training.tracking.base": "tensorflow.python.trackable.base",
    "tensorflow.python.training.tracking.data_structures": "tensorflow.python.trackable.data_structures",
    "tensorflow.python.training.tracking.tracking": "tensorflow.python.trackable.autotrackable",
    "tensorflow.python.training.tracking.util": "tensorflow.python.checkpoint.checkpoint",
    "tensorflow.python.trackable.tracking": "tensorflow.python.trackable.autotrackable",
    "tensorflow.python.trackable.util": "tensorflow.python.checkpoint.checkpoint",
}
"""Modules of the SDK's TensorFlow -> where TensorFlow has them now. Python then imports a module in ``tracking`` by the
new name of its package, so ``trackable.tracking`` and ``trackable.util`` stand here too.
"""
_MODULES_OF_CELLS = {name: f"ops.{name}:" for name in ("clip_ops", "init_ops", "math_ops", "nn_ops")}
"""Modules that programs have by ``from tensorflow.python.ops.rnn_cell import *``."""
MOVED_NAMES = {
    "framework.ops": {
        "Tensor": "framework.tensor:Tensor",
        "IndexedSlices": "framework.indexed_slices:IndexedSlices",
        "convert_to_tensor_v2": "framework.tensor_conversion:convert_to_tensor_v2",
        "convert_to_tensor_v2_with_dispatch": "framework.tensor_conversion:convert_to_tensor_v2_with_dispatch",
        "convert_to_tensor_or_indexed_slices": "framework.indexed_slices:convert_to_tensor_or_indexed_slices",
        "register_tensor_conversion_function":
            "framework.tensor_conversion_registry:register_tensor_conversion_function",
    },
    "ops.variables": {"VariableV1": "ops.variable_v1:VariableV1", "RefVariable": "ops.ref_variable:RefVariable"},
    "ops.array_ops": {"stack": "ops.array_ops_stack:stack", "unstack": "ops.array_ops_stack:unstack"},
    "ops.nn": {
        "rnn_cell": "ops.rnn_cell:",
        "dynamic_rnn": "ops.rnn:dynamic_rnn",
        "static_rnn": "ops.rnn:static_rnn",
        "bidirectional_dynamic_rnn": "ops.rnn:bidirectional_dynamic_rnn",
        "raw_rnn": "ops.rnn:raw_rnn",
    },
    "eager.function": {"defun": "eager.polymorphic_function.polymorphic_function:function"},
    "util.nest": {"is_sequence": "util.nest:is_nested"},
    "ops.rnn_cell_impl": _MODULES_OF_CELLS,
    "ops.rnn_cell": _MODULES_OF_CELLS,
    "ops": {"device": "framework.ops:device", "Graph": "framework.ops:Graph"},
    "ops.functional_ops": {"map_fn": "ops.map_fn:map_fn"},
    "feature_column": {
        name: f"feature_column.feature_column_v2:{name}"
        for name in (
            "bucketized_column", "categorical_column_with_hash_bucket", "categorical_column_with_identity",
            "categorical_column_with_vocabulary_file", "categorical_column_with_vocabulary_list", "crossed_column",
            "embedding_column", "indicator_column", "numeric_column",
            "weighted_categorical_column",
        )
    },
    "framework.graph_util": {
        "convert_variables_to_constants": "framework.convert_to_constants:convert_variables_to_constants",
    },
    "ops.control_flow_ops": {
        "cond": "ops.cond:cond",
        "while_loop": "ops.while_loop:while_loop",
        "case": "ops.control_flow_case:case",
        "switch_case": "ops.control_flow_switch_case:switch_case",
        "Assert": "ops.control_flow_assert:Assert",
    },
}  # fmt: skip
"""Module of ``tensorflow.python`` -> names that the SDK's TensorFlow has there, and where they are now."""
REFUSED = {
    "vertex_edsl": "codelet expressions; write the expression with TensorFlow's operations",
    "popfloat_cast_to_gfloat": "popfloat; use float16 or float32",
    "autoshard": "automatic sharding; use scopes.ipu_shard",
    "sharding_utils": "automatic sharding; use scopes.ipu_shard",
    "dataset_extractor": "files for the Poplar executable runner; use tf.data",
    "variable_extractor": "files for the Poplar executable runner; use tf.train.Saver",
    "summary_ops": "summaries of compilations, which the SDK removed; use podrun profile",
}
OPTIMIZER_MODULES = (
    "cross_replica_optimizer", "gradient_accumulation_optimizer", "map_gradient_optimizer", "sharded_optimizer",
    "ipu_optimizer", "automatic_loss_scaling_optimizer",
)  # fmt: skip
REFUSED_MEMBERS = {
    "utils": dict.fromkeys(
        ("KeyId", "VerificationOptions"), "verified transfers, which the SDK removed; leave them out"
    ),
}
"""Module -> names in it that are refused, and what to use instead."""
