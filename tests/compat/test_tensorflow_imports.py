"""How the names of the SDK's TensorFlow are imported, checked without TensorFlow."""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest

from podrun.compat import _keras_names
from podrun.compat._keras_names import KerasFinder
from podrun.compat._tensorflow import SdkFinder, when_complete

Log = list[str]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Write the text of a package ``unfinished`` that can be imported."""
    monkeypatch.syspath_prepend(tmp_path)
    place = tmp_path / "unfinished"
    place.mkdir()

    def write(text: str) -> None:
        monkeypatch.delitem(sys.modules, "unfinished", raising=False)
        (place / "__init__.py").write_text(text, encoding="utf-8")
        importlib.invalidate_caches()

    return write


def test_an_action_waits_until_a_module_is_complete(package: Callable[[str], None]) -> None:
    log: Log = []
    when_complete("unfinished", lambda: log.append("absent"))
    assert log == ["absent"]
    hook = types.ModuleType("hook_of_unfinished")
    hook.log, hook.when_complete = log, when_complete  # type: ignore[attr-defined]
    sys.modules["hook_of_unfinished"] = hook
    try:
        package(
            "from hook_of_unfinished import log, when_complete\n"
            "when_complete(__name__, lambda: log.append(last))\nlog.append('body')\nlast = 'end'\n"
        )
        module = importlib.import_module("unfinished")
        assert log == ["absent", "body", "end"]
        assert type(module.__spec__) is importlib.machinery.ModuleSpec
        assert not module.__spec__._initializing  # type: ignore[attr-defined]
        when_complete("unfinished", lambda: log.append("later"))
        assert log[3:] == ["later"]
        del sys.modules["unfinished"]
        package(
            "from hook_of_unfinished import log, when_complete\n"
            "when_complete(__name__, lambda: log.append('never'))\nraise ValueError('broken')"
        )
        with pytest.raises(ValueError, match="broken"):
            importlib.import_module("unfinished")
        assert log[4:] == []
    finally:
        del sys.modules["hook_of_unfinished"]


@pytest.mark.parametrize("kind", [SdkFinder, KerasFinder])
def test_modules_keep_their_specs_where_imports_come_between(
    kind: type[SdkFinder | KerasFinder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two threads that import two names: the second module is made before the first is executed."""
    finder = kind()
    modules = {}
    for name in ("first", "second"):
        module = types.ModuleType(f"tensorflow.{name}")
        module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None)
        monkeypatch.setitem(sys.modules, module.__name__, module)
        modules[f"tensorflow_core.{name}"] = module
    monkeypatch.setattr(_keras_names, "own_module", lambda name: None)
    monkeypatch.setattr(_keras_names, "_keras_module", modules.get)
    specs = [importlib.machinery.ModuleSpec(name, finder) for name in modules]
    loaded = [importlib.util.module_from_spec(spec) for spec in specs]
    for module in loaded:
        finder.exec_module(module)
    for module in modules.values():
        assert module.__spec__ is not None
        assert module.__spec__.name == module.__name__


def test_a_module_that_lacks_another_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str) -> types.ModuleType:
        if name == "tf_keras.src.whole":
            return types.ModuleType(name)
        missing = "h5py" if name == "tf_keras.src.saving" else name.rpartition(".")[0]
        raise ModuleNotFoundError(f"No module named {missing!r}", name=missing)

    monkeypatch.setattr(_keras_names, "importlib", types.SimpleNamespace(import_module=load))
    monkeypatch.setattr(_keras_names, "_is_public", lambda key: key == "whole")
    whole = _keras_names._keras_module("keras.whole")
    assert whole is not None
    assert whole.__name__ == "tf_keras.src.whole"
    assert _keras_names._keras_module("keras.nothing") is None
    with pytest.raises(ModuleNotFoundError, match="h5py"):
        _keras_names._keras_module("keras.saving")
