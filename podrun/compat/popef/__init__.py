"""``import popef`` for scripts written for the SDK's library of compiled models: podrun's reader and writer.

import popef
reader = popef.Reader()
reader.parseFile("executable.popef")
[anchor.name for anchor in reader.metadata()[0].anchors]
"""

from operator import attrgetter

from podrun.popef.metadata import AnchorDirection as TensorType
from podrun.popef.metadata import ElementType as DataType
from podrun.popef.metadata import PopefAnchor as Anchor
from podrun.popef.metadata import PopefMetadata as Metadata
from podrun.popef.metadata import PopefTensor as TensorInfo
from podrun.popef.metadata import ProgramFlow
from podrun.popef.reader import AnyProgramReader as Reader
from podrun.popef.reader import StoredBlob as OpaqueReader
from podrun.popef.reader import StoredExecutable as ExecutableReader
from podrun.popef.reader import StoredTensor as TensorReader
from podrun.popef.writer import PopefWriter as Writer

popefTypeToNumpyDType = attrgetter("numpy_dtype")

__all__ = [
    "Anchor",
    "DataType",
    "ExecutableReader",
    "Metadata",
    "OpaqueReader",
    "ProgramFlow",
    "Reader",
    "TensorInfo",
    "TensorReader",
    "TensorType",
    "Writer",
    "popefTypeToNumpyDType",
]
