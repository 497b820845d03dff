"""Compiled models in files and in a cache."""

from __future__ import annotations

import enum
import io
import json
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from podrun.popef import PopefReader
from podrun.popef.container import MappedFile, NewSection, write_sections

torch = pytest.importorskip("torch")

from podrun import poptorch  # noqa: E402
from podrun.poptorch.api import enums  # noqa: E402
from podrun.poptorch.executor.saved_models import read_metadata  # noqa: E402


class Net(torch.nn.Module):
    """A layer with dropout and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 3)
        self.drop = torch.nn.Dropout(0.5)

    def forward(self, x: Any, labels: Any = None) -> Any:
        y = self.drop(self.layer(x))
        return y if labels is None else (y, torch.nn.functional.cross_entropy(y, labels))


class Untrusted:
    """Would run a command when it is unpickled."""

    def __reduce__(self) -> Any:
        return os.getpid, ()


DATA = (torch.arange(8.0).reshape(2, 4), torch.tensor([0, 2]))


def trained() -> Any:
    torch.manual_seed(0)
    model = Net()
    options = poptorch.Options().randomSeed(3)
    optimizer = poptorch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)
    return poptorch.trainingModel(model, options, optimizer)


def compiled_here(executor: Any) -> bool:
    return bool(executor._compiled.session.parts.loader.compiler.compiled_here)


ENUMERATIONS = [k for k in vars(enums).values() if isinstance(k, type) and issubclass(k, enum.Enum)]


@pytest.mark.parametrize("kind", ENUMERATIONS, ids=lambda kind: kind.__name__)
def test_members_of_enumerations_are_saved_without_calling_getattr(kind: Any) -> None:
    for member in kind:
        assert b"getattr" not in pickle.dumps(member, protocol=2)
        made, values = member.__reduce_ex__(2)
        assert made(*values) is member


def test_a_training_model_goes_on_from_a_file(tmp_path: Path) -> None:
    training = trained()
    for _ in range(2):
        training(*DATA)
    training.save(str(tmp_path / "folder" / "net.poptorch"))
    expected = [float(training(*DATA)[1]) for _ in range(3)]
    training.destroy()
    seen: list[Any] = []
    again = poptorch.load(str(tmp_path / "folder" / "net.poptorch"), edit_opts_fn=seen.append)
    assert isinstance(seen[0], poptorch.Options)
    assert again.isCompiled()
    assert not compiled_here(again)
    assert isinstance(again._optimizer, poptorch.optim.AdamW)
    assert [float(again(*DATA)[1]) for _ in range(3)] == expected
    again.destroy()


def test_an_offline_program_runs_where_ipus_are(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Net().eval()
    poptorch.inferenceModel(model, poptorch.Options().useOfflineIpuTarget()).compileAndExport(
        str(tmp_path), DATA[0]
    )
    file = str(tmp_path / "model.poptorch")
    loaded = poptorch.load(file)
    assert not loaded.model.training
    torch.testing.assert_close(loaded(DATA[0]), model(DATA[0]))
    other = Net().eval()
    by_hand = poptorch.inferenceModel(other)
    by_hand.loadExecutable(file)
    assert not compiled_here(by_hand)
    torch.testing.assert_close(by_hand(DATA[0]), other(DATA[0]))
    with pytest.raises(poptorch.Error, match="before the model is compiled"):
        by_hand.loadExecutable(file)


def test_a_program_alone_needs_a_wrapper(tmp_path: Path) -> None:
    file = str(tmp_path / "alone.poptorch")
    poptorch.inferenceModel(Net().eval()).compileAndExport(file, DATA[0], export_model=False)
    with pytest.raises(AssertionError, match="export_model=False"):
        poptorch.load(file)
    poptorch.inferenceModel(Net().eval()).loadExecutable(file)
    training = trained()
    with pytest.raises(poptorch.Error, match="inference model"):
        training.loadExecutable(file)
    training.destroy()

    class Other(Net):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 5)

    with pytest.raises(poptorch.Error, match="not the program of this session"):
        poptorch.inferenceModel(Other().eval()).loadExecutable(file)
    assert json.loads(read_metadata(file))["exported_model"] is False


def rewritten(file: str, target: Path, name: str, data: bytes) -> str:
    """The file with another opaque blob, or with another executable."""
    source = MappedFile.open(file)
    parts = [
        NewSection(
            s.kind,
            s.name,
            [data if s.name == f"poptorch/{name}" or s.kind == name else source.data(s)],
            s.info,
        )
        for s in source.sections
    ]
    write_sections(target, parts)
    return str(target)


def test_files_that_are_absent_foreign_or_damaged_are_refused(tmp_path: Path) -> None:
    file = str(tmp_path / "net.poptorch")
    inference = poptorch.inferenceModel(Net().eval())
    with pytest.raises(poptorch.Error, match="Model has not been compiled"):
        inference.save(file)
    inference.compileAndExport(file, DATA[0])
    with pytest.raises(poptorch.Error, match="no file of a compiled model"):
        poptorch.load(str(tmp_path / "absent"))
    (tmp_path / "text").write_text("no archive")
    with pytest.raises(poptorch.Error, match="no file of a compiled model"):
        poptorch.load(str(tmp_path / "text"))
    old = rewritten(file, tmp_path / "old", "metadata.json", b'{"version": "0", "exported_model": true}')
    with pytest.raises(AssertionError, match="version '0'"):
        poptorch.load(old)
    with pytest.raises(poptorch.Error, match="version '0'"):
        poptorch.inferenceModel(Net()).loadExecutable(old)
    broken = rewritten(file, tmp_path / "broken", "executable", b"nothing")
    with pytest.raises(poptorch.Error):
        poptorch.load(broken)
    cut = Path(file).read_bytes()[:-1]
    (tmp_path / "cut").write_bytes(cut)
    with pytest.raises(poptorch.Error, match=r"cut is damaged: bytes|outside the file"):
        poptorch.load(str(tmp_path / "cut"))


def test_a_saved_model_is_a_file_for_servers(tmp_path: Path) -> None:
    file = str(tmp_path / "net.poptorch")
    torch.manual_seed(3)
    net = Net().eval()
    poptorch.inferenceModel(net).compileAndExport(file, DATA[0], export_model=False)
    reader = PopefReader().parseFile(file)
    (metadata,) = reader.metadata()
    assert metadata.isInference
    assert len(metadata.inputs()) == len(metadata.outputs()) == 1
    held = {tensor.name: tensor.data() for tensor in reader.tensors()}
    for name, value in net.named_parameters():
        np.testing.assert_array_equal(held[name], value.detach().numpy())


def test_a_file_calls_nothing_that_it_names(tmp_path: Path) -> None:
    file = str(tmp_path / "net.poptorch")
    poptorch.inferenceModel(Net().eval()).compileAndExport(file, DATA[0])
    data = io.BytesIO()
    torch.save({"args": (Untrusted(),), "kwargs": {}}, data)
    with pytest.raises(poptorch.Error, match=r"names .*getpid"):
        poptorch.load(rewritten(file, tmp_path / "evil", "model.pt", data.getvalue()))


def test_a_model_of_an_ipu_saves_nothing(tmp_path: Path) -> None:
    inference = poptorch.inferenceModel(Net().eval(), poptorch.Options().useIpuModel(True))
    inference(DATA[0])
    with pytest.raises(poptorch.Error, match="cannot be saved"):
        inference.save(str(tmp_path / "x"))
    counting = poptorch.inferenceModel(Net().eval(), poptorch.Options().useIpuModel(True).logCycleCount(True))
    counting(DATA[0])
    with pytest.raises(poptorch.Error, match="counts no cycles"):
        counting.cycleCount()


@pytest.mark.parametrize("by", ["option", "environment"])
def test_programs_are_compiled_once(tmp_path: Path, by: str, monkeypatch: Any) -> None:
    if by == "environment":
        monkeypatch.setenv("POPTORCH_CACHE_DIR", str(tmp_path))
    found = []
    for turn in range(3):
        options = poptorch.Options()
        if by == "option":
            options.enableExecutableCaching(str(tmp_path))
        if turn == 2:
            options.enableExecutableCaching(None)
        torch.manual_seed(turn)
        inference = poptorch.inferenceModel(Net().eval(), options)
        inference(DATA[0])
        found.append(compiled_here(inference))
    assert found == [True, False, True]
    assert len(list(tmp_path.iterdir())) == 1
