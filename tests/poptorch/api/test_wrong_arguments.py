"""Arguments of a wrong kind are refused by name, where they are given."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from podrun import poptorch  # noqa: E402
from podrun.compat._error_reports import lines  # noqa: E402

WEIGHTS = [torch.nn.Parameter(torch.ones(2))]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: poptorch.optim.SGD(WEIGHTS, lr="a"), "lr is a number, not 'a'"),
        (lambda: poptorch.optim.AdamW(WEIGHTS, lr=0.1, betas=3), "betas is a pair of numbers, not 3"),
        (lambda: poptorch.optim.LAMB(WEIGHTS, betas=(0.9,)), "betas is a pair of numbers"),
        (lambda: poptorch.optim.RMSprop(WEIGHTS, lr=0.1, eps="x"), "eps is a number, not 'x'"),
        (lambda: poptorch.optim.SGD(3, lr=0.1), "params is an iterable of tensors or of groups.* not 3"),
        (lambda: poptorch.optim.LAMB(WEIGHTS[0], lr=0.1), "params is an iterable of tensors or of groups"),
        (lambda: poptorch.optim.Adam([{"lr": 1}], lr=0.1), "groups with .params."),
        (lambda: poptorch.optim.Adam([3], lr=0.1), "params holds tensors, or groups with .params., not 3"),
        (
            lambda: poptorch.DataLoader(poptorch.Options(), [1, 2], num_workers="a"),
            "num_workers is a whole number, not 'a'",
        ),
        (lambda: poptorch.set_available_memory(WEIGHTS[0], "a"), "proportion is a number, not 'a'"),
        (lambda: poptorch.inferenceModel(3), "a model is a torch.nn.Module, not 3"),
        (
            lambda: poptorch.DataLoader(poptorch.Options(), [1, 2], batch_size="a"),
            "batch_size is a whole number, not 'a'",
        ),
        (
            lambda: poptorch.custom_op(3, "a", "b", 1, example_outputs=[]),
            "inputs is a list of tensors, not 3",
        ),
        (
            lambda: poptorch.custom_op([], "a", "b", 1, example_outputs=None),
            "example_outputs is a list of tensors, not None",
        ),
    ],
)
def test_a_wrong_argument_is_refused_by_name(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        call()


def test_whole_numbers_and_tensors_are_numbers() -> None:
    (group,) = poptorch.optim.SGD(WEIGHTS, lr=1, momentum=0).param_groups
    assert (group["lr"], group["momentum"]) == (1, 0)
    (group,) = poptorch.optim.AdamW(WEIGHTS, lr=torch.tensor(0.1), betas=[0.9, 0.99]).param_groups
    assert float(group["lr"]) == pytest.approx(0.1)
    assert tuple(group["betas"]) == (0.9, 0.99)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: poptorch.Options()._Popart.setPatterns("a"), "patterns is a dictionary, not 'a'"),
        (lambda: poptorch.Options()._Popart.set([], 1), "key is text, not"),
        (
            lambda: poptorch.SerialPhasedExecution(3),
            "a phase is a poptorch.Phase, stages or block ids, not 3",
        ),
    ],
)
def test_what_options_assert_is_named(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        call()


OPTIONS = poptorch.Options
ONE = torch.ones(1)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: OPTIONS().Distributed.setEnvVarNames(3, "RANK"), "var_num_processes is text, not 3"),
        (lambda: OPTIONS().Distributed.configureProcessId("a", 2), "process_id is a whole number, not 'a'"),
        (lambda: OPTIONS().Distributed.configureProcessId(1), "missing a required argument: 'num_processes'"),
        (lambda: OPTIONS().inputReplicaGrouping(1, "a"), "input_group_type is a poptorch.CommGroupType"),
        (lambda: OPTIONS().inputReplicaGrouping("a", poptorch.CommGroupType.Consecutive), "a whole number"),
        (lambda: OPTIONS().anchorTensor(3, "x"), "short_name is text, not 3"),
        (lambda: OPTIONS().anchorTensor("a", "x", "All"), "output_mode is a poptorch.OutputMode, not 'All'"),
        (lambda: OPTIONS().setAvailableMemoryProportion(0.1), "a dictionary of numbers by name, not 0.1"),
        (lambda: OPTIONS().setAvailableMemoryProportion({"IPU0": "a"}), "a dictionary of numbers by name"),
        (lambda: OPTIONS().loadFromFile(3), "filepath is text or a path, not 3"),
        (lambda: OPTIONS().sourceLocationExcludes("a"), "excludes is a list of texts, not 'a'"),
        (lambda: OPTIONS().deviceIterations(count=3), "deviceIterations: missing a required argument"),
        (lambda: poptorch.Phase("a").stage("b"), "idx is a whole number, not 'b'"),
        (lambda: poptorch.Phase("a").stage(1), "there is no stage 1"),
        (lambda: poptorch.load(3), "filename is text or a path, not 3"),
        (lambda: poptorch.load("a", 3), "edit_opts_fn is a function, not 3"),
        (lambda: poptorch.setLogLevel([]), r"level is text or a whole number, not \[\]"),
        (lambda: poptorch.optim.SGD(WEIGHTS, 0.1, nesterov=torch.ones(2)), "nesterov is True or False, not"),
        (lambda: poptorch.optim.AdamW(WEIGHTS, bias_correction=torch.ones(2)), "bias_correction is True"),
        (lambda: poptorch.DataLoader(3, []), "options is a poptorch.Options, not 3"),
        (lambda: poptorch.DataLoader(OPTIONS(), [1], mode="Async"), "mode is a poptorch.DataLoaderMode"),
        (lambda: poptorch.DataLoader(OPTIONS(), [1], async_options=[1]), "async_options is a dictionary"),
        (lambda: poptorch.DataLoader(OPTIONS(), [1], rebatched_worker_size="a"), "a whole number, not 'a'"),
        (lambda: poptorch.AsynchronousDataAccessor([1], buffer_size="a"), "buffer_size is a whole number"),
        (lambda: poptorch.MultiConv(3), "MultiConv: too many positional arguments"),
        (lambda: poptorch.MultiConv().planType("parallel"), "value is a poptorch.MultiConvPlanType"),
        (lambda: poptorch.MultiConv().perConvReservedTiles("a"), "a whole number, not 'a'"),
        (lambda: poptorch.Block("a", ipu_id="b"), "Block: ipu_id is a whole number, not 'b'"),
        (lambda: poptorch.Block.start("a", ipu_id=[1]), "start: ipu_id is a whole number"),
        (lambda: poptorch.BeginBlock(torch.nn.ReLU(), ipu_id="0"), "BeginBlock: ipu_id is a whole number"),
        (lambda: poptorch.removeBlocks(3), "module is a torch.nn.Module, not 3"),
        (lambda: poptorch.NameScope(), "NameScope: missing a required argument"),
        (lambda: poptorch.CPU(3, "a"), "layer_to_call is a function, not 3"),
        (lambda: poptorch.identity_loss(3, "sum"), "x is a tensor, not 3"),
        (lambda: poptorch.identity_loss(ONE), "identity_loss: missing a required argument: 'reduction'"),
        (lambda: poptorch.nop([ONE]), r"tensor is a tensor, not \["),
        (lambda: poptorch.set_available_memory(ONE, "a"), "available_memory_proportion is a number, not 'a'"),
        (lambda: poptorch.ipu_print_tensor(ONE, title=3), "title is text, not 3"),
        (lambda: poptorch.serializedMatMul(ONE, ONE, "Reduce"), "mode is a poptorch.MatMulSerializationMode"),
        (lambda: poptorch.dynamic_slice(ONE, 0, 0, 1, 1), "start is a tensor, not 0"),
        (lambda: poptorch.dynamic_update(ONE, ONE, "a", ONE, 1), "dim is a whole number, not 'a'"),
        (lambda: poptorch.for_loop("a", lambda x: x, [ONE]), "count is a whole number, not 'a'"),
        (lambda: poptorch.for_loop(2, 3, [ONE]), "body is a function, not 3"),
        (lambda: poptorch.cond(1, lambda: 1, [], lambda: 1, []), "condition is a tensor, not 1"),
        (lambda: poptorch.set_overlap_for_input(ONE, "a"), "mode is a poptorch.OverlapMode, not 'a'"),
        (lambda: poptorch.fps(ONE, 3), "fps"),
        (lambda: poptorch.nearest(ONE, 3), "y is a tensor, not 3"),
        (lambda: poptorch.optim.LAMB(WEIGHTS, accum_type="half"), "accum_type is a torch.dtype, not 'half'"),
    ],
)
def test_what_a_signature_does_not_take_is_an_error_of_both_kinds(
    call: Callable[[], Any], message: str
) -> None:
    with pytest.raises(AssertionError, match=message) as caught:
        call()
    assert isinstance(caught.value, poptorch.Error)


@pytest.mark.parametrize("value", [[], {}, "float", torch.int32])
def test_a_wrong_partials_type_is_an_error_of_values(value: Any) -> None:
    with pytest.raises(ValueError, match="takes torch"):
        poptorch.Options().Precision.setPartialsType(value)


def test_an_input_group_has_a_replica() -> None:
    with pytest.raises(ValueError, match="above 0"):
        poptorch.Options().inputReplicaGrouping(0, poptorch.CommGroupType.Consecutive)


def test_the_check_takes_what_means_the_same_type(tmp_path: Path) -> None:
    (tmp_path / "options").write_text("deviceIterations(2)\n")
    options = poptorch.Options()
    options.loadFromFile(tmp_path / "options")
    assert options.device_iterations == 2
    poptorch.optim.Adam(WEIGHTS, lr=np.float32(0.1), max_grad_norm=1)
    poptorch.SerialPhasedExecution([poptorch.Stage("a")], "b").phase(0).ipus(np.int64(0))


def test_what_options_assert_is_shown_as_the_programs_mistake() -> None:
    with pytest.raises(AssertionError) as caught:
        poptorch.Options().deviceIterations("a")  # type: ignore[arg-type]
    text = "".join(lines(caught.value, caught.tb))
    assert "Unexpected type str for option device_iterations: expected int" in text
    assert "inside podrun" not in text
