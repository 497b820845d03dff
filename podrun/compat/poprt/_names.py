"""Names of metadata that programs written for PopRT look up."""

from podrun.onnx_models.annotations import HOST_CONCAT_KEY

sHostConcatRunnerConfig = HOST_CONCAT_KEY  # The value that PopRT has is not published.

__all__ = ["sHostConcatRunnerConfig"]
