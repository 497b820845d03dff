"""Compiled models in files: a program, its weights, and what a server has to know of both, in one file.

    with PopefWriter("model.popef") as writer: ...
    reader = PopefReader().parseFile("model.popef")

`metadata` are the facts (anchors, programs, replicas, IPUs), `container` the sections of a file and the checks before
anything of it is used, `reader` and `writer` the interface, `dump` the command ``popef_dump``. The compiler's program
inside is an Executable (`podrun.core.executable_file`). Only what concerns the file may enter: front ends write such
files, servers read them.
"""

from podrun.popef.metadata import (
    AnchorDirection,
    ElementType,
    PopefAnchor,
    PopefMetadata,
    PopefTensor,
    ProgramFlow,
)
from podrun.popef.reader import PopefReader
from podrun.popef.writer import PopefWriter

__all__ = [
    "AnchorDirection",
    "ElementType",
    "PopefAnchor",
    "PopefMetadata",
    "PopefReader",
    "PopefTensor",
    "PopefWriter",
    "ProgramFlow",
]
