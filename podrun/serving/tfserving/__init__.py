"""TensorFlow Serving's protocol over the same backend: predict, metadata and status over gRPC and REST.

`tensors` turns its tensors into arrays, `versions` loads the versions of models, `answers` answers requests by name,
`grpc_front` and `rest_front` speak the two protocols, `running` runs both. TensorFlow is not needed; its C++ server
cannot be had as a package.
"""
