"""Reading and changing a StableHLO program: its operations at any depth, and calls replaced by what they call."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def inline(ir: Any, module: Any) -> None:
    """Put functions in the place of their calls, so that operations meet those that they take their operands from."""
    functions = {ir.StringAttr(f.attributes["sym_name"]).value: f for f in module.body.operations}
    queue = [op for op in nested(module.operation) if op.name == "func.call"]
    inlined = set()
    while queue:
        call = queue.pop()
        name = ir.FlatSymbolRefAttr(call.attributes["callee"]).value
        inlined.add(name)
        block = functions[name].operation.regions[0].blocks[0]
        values = dict(zip(block.arguments, call.operands, strict=True))
        for op in block:
            if op.operation.name == "func.return":
                for old, new in zip(call.results, op.operands, strict=True):
                    old.replace_all_uses_with(values[new])
                continue
            clone = op.operation.clone(ip=ir.InsertionPoint(call))
            rename(clone, values)
            values.update(zip(op.results, clone.results, strict=True))
            queue += [o for o in (clone, *nested(clone)) if o.name == "func.call"]
        call.erase()
    for name in sorted(inlined):
        functions[name].operation.erase()


def rename(op: Any, values: Any) -> None:
    """Let an operation and those inside it read the new values of old ones."""
    for inner in (op, *nested(op)):
        for place, operand in enumerate(inner.operands):
            if operand in values:
                inner.operands[place] = values[operand]


def nested(operation: Any) -> Iterator[Any]:
    """The operations inside of one, at any depth."""
    for region in operation.regions:
        for block in region:
            for op in block:
                yield op.operation
                yield from nested(op.operation)
