"""What front ends share: a model on a device, from options and weights to runs and reports.

A front end gives a model that can be traced, options, an optimizer and a data flow. They become a
`podrun.compiler.program.Program`, which the compiler turns into an executable and a device runs; anchors, weights and
reports go back to the front end. Names and messages are PopART's, because PopTorch sits on PopART in the SDK too.

In the order in which a program meets them: `device` and `device_manager`; `session_options` with `option_groups` and
`option_checks`, `patterns`; `optimizers/`; `dataflow` (anchors and inputs) and `stepio` (arrays and callbacks);
`session` with its `parts/`; `variables`; `virtual_graphs` and `pipelining` (IPUs, stages and phases of operators);
`program/` (for the compiler). `names`, `enums`, `exceptions`, `tensor_info` and `environment` serve all of them.
"""
