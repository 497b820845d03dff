"""A package that is imported without modules that it names is as if they had been imported, once they are asked for."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import pytest

from podrun.private_apis.lean_imports import import_lean, import_onnx

active_count = threading.active_count
FILES = {
    "orchard/__init__.py": "import ladder\nfrom orchard import apples, pears\n"
    "def climb():\n    return ladder.STEPS\n",
    "orchard/apples.py": "COUNT = 7\n",
    "orchard/pears.py": "import orchard.apples\n\ndef both():\n    return orchard.apples.COUNT + 1\n",
    "orchard/cherries.py": "COUNT = 9\n",
    "ladder.py": "STEPS = 12\n",
    "shed/__init__.py": "",
    "shed/rake.py": "TEETH = 14\n",
    "gardener.py": "import shed.rake\n\ndef teeth():\n    return shed.rake.TEETH\n",
    "hasty.py": "import ladder\n\nSTEPS = ladder.STEPS\n",
    "slow.py": "import meeting\nFIRST = 1\nmeeting.meet()\nLAST = 2\n",
    "leisurely.py": "import slow\n",
    "barn/__init__.py": "from barn import hay, oats\n"
    "class Scale:\n    def weigh(self):\n        return [hay.BALES for _ in range(2)]\n",
    "barn/hay.py": "BALES = 3\n",
    "barn/oats.py": "",
    "silo/__init__.py": "from silo import rye\n",
    "silo/rye.py": "import gone_for_ever\n",
    "fence/__init__.py": "try:\n    from fence import gate\nexcept ImportError:\n    gate = None\n",
    "eager/__init__.py": "import eager.user\n",
    "eager/user.py": "import eager.tool\n\nSIZE = eager.tool.SIZE\n",
    "eager/tool.py": "SIZE = 5\n",
    "looker.py": "import importlib.util\n\nLADDER = importlib.util.find_spec('ladder')\n",
    "onnx/__init__.py": "import importlib.metadata\n\n__version__ = importlib.metadata.version('onnx')\n",
    "broken.py": "import ladder\nraise ImportError('no ladder is long enough')\n",
}


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The packages of `FILES` can be imported, and are forgotten afterwards. Threads of other tests do not count."""
    monkeypatch.setattr(threading, "active_count", lambda: 1)
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        del sys.modules[name]


def load(name: str) -> ModuleType:
    return importlib.import_module(name)


@pytest.mark.usefixtures("packages")
class TestOrchard:
    def test_modules_that_nobody_asks_for_are_not_imported(self) -> None:
        import_lean("orchard", "ladder", "orchard.apples")
        assert {"orchard", "orchard.pears"} <= sys.modules.keys()
        assert not {"ladder", "orchard.apples"} & sys.modules.keys()
        assert "apples" not in vars(load("orchard"))

    def test_an_attribute_is_the_module_itself(self) -> None:
        import_lean("orchard", "orchard.apples")
        apples = load("orchard").apples
        assert apples is sys.modules["orchard.apples"]
        assert apples is load("orchard").apples is vars(load("orchard"))["apples"]
        assert type(apples) is ModuleType

    def test_an_import_gives_the_module_itself(self) -> None:
        import_lean("orchard", "ladder", "orchard.apples")
        assert type(load("ladder")) is ModuleType
        assert load("orchard.apples").COUNT == 7
        assert type(load("orchard").apples) is ModuleType

    def test_the_package_uses_what_it_named(self) -> None:
        import_lean("orchard", "ladder", "orchard.apples")
        assert load("orchard").climb() == 12
        assert type(sys.modules["ladder"]) is ModuleType
        load("ladder").STEPS = 13
        assert load("orchard").climb() == 13
        assert load("orchard").pears.both() == 8

    def test_several_modules_of_one_package(self) -> None:
        import_lean("orchard", "orchard.apples", "orchard.pears")
        orchard = load("orchard")
        assert (orchard.pears.both(), orchard.apples.COUNT) == (8, 7)
        with pytest.raises(AttributeError, match="module 'orchard' has no attribute 'plums'"):
            _ = orchard.plums
        assert not hasattr(orchard, "cherries")  # Only who imports it has it, as ever.

    def test_a_module_that_the_package_needs_is_imported_at_once(self) -> None:
        import_lean("hasty", "ladder")
        assert load("hasty").STEPS == 12
        assert type(sys.modules["ladder"]) is ModuleType

    @pytest.mark.parametrize("before", ["shed", "sys"], ids=["package there", "package not there"])
    def test_a_module_of_another_package(self, before: str) -> None:
        load(before)
        import_lean("gardener", "shed.rake")
        assert "shed.rake" not in sys.modules
        assert "rake" in dir(load("shed"))
        assert load("gardener").teeth() == 14
        assert type(load("shed").rake) is ModuleType

    def test_what_is_there_stays(self) -> None:
        ladder = load("ladder")
        import_lean("orchard", "ladder")
        assert sys.modules["ladder"] is ladder
        apples = load("orchard").apples
        import_lean("orchard", "orchard.apples")
        assert sys.modules["orchard.apples"] is load("orchard").apples is apples

    def test_threads_wait_for_a_module_that_one_of_them_imports(self) -> None:
        begun, asks = threading.Event(), threading.Event()

        def meet() -> None:
            begun.set()
            assert asks.wait(60)

        sys.modules["meeting"] = meeting = ModuleType("meeting")
        vars(meeting)["meet"] = meet
        import_lean("leisurely", "slow")
        slow = load("leisurely").slow
        with ThreadPoolExecutor(1) as thread:
            first = thread.submit(lambda: slow.FIRST)
            assert begun.wait(60)
            asks.set()
            assert slow.LAST == 2
            assert first.result() == 1

    def test_a_module_that_functions_of_the_package_read_is_imported_at_once(self) -> None:
        import_lean("barn", "barn.hay", "barn.oats")
        assert load("barn").Scale().weigh() == [3, 3]
        assert "barn.oats" not in sys.modules

    def test_a_package_without_code_may_read_every_module(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        attic = ModuleType("attic")
        attic.__path__ = [str(tmp_path / "shed")]
        monkeypatch.setitem(sys.modules, "attic", attic)
        (tmp_path / "climber.py").write_text("import attic.rake\n", encoding="utf-8")
        import_lean("climber", "attic.rake")
        assert vars(attic)["rake"] is sys.modules["attic.rake"]

    def test_an_attribute_whose_module_is_not_there(self) -> None:
        import_lean("fence", "fence.gate")
        fence = load("fence")
        assert getattr(fence, "gate", None) is None
        with pytest.raises(AttributeError, match=r"No module named 'fence\.gate'") as raised:
            _ = fence.gate
        assert (raised.value.name, raised.value.obj) == ("gate", fence)
        with pytest.raises(AttributeError) as raised:
            _ = fence.post
        assert (raised.value.name, raised.value.obj) == ("post", fence)

    def test_a_module_that_misses_another_says_which(self) -> None:
        import_lean("silo", "silo.rye")
        with pytest.raises(ModuleNotFoundError, match="gone_for_ever"):
            _ = load("silo").rye

    def test_a_module_that_the_package_does_not_name_is_no_attribute(self) -> None:
        load("shed")
        import_lean("orchard", "orchard.cherries", "shed.rake")
        assert not hasattr(load("orchard"), "cherries")
        assert not hasattr(load("shed"), "rake")

    def test_a_module_is_an_attribute_of_its_package_while_that_is_imported(self) -> None:
        import_lean("eager", "eager.tool")
        assert load("eager").user.SIZE == 5
        assert type(load("eager").tool) is ModuleType

    def test_a_package_may_look_whether_a_module_is_there(self) -> None:
        import_lean("looker", "ladder")
        assert load("looker").LADDER.name == "ladder"
        assert "ladder" not in sys.modules

    @pytest.mark.parametrize("beside_threads", [False, True])
    def test_other_threads_see_no_stand_in_unless_they_import_none(
        self, monkeypatch: pytest.MonkeyPatch, beside_threads: bool
    ) -> None:
        monkeypatch.setattr(threading, "active_count", active_count)
        end = threading.Event()
        other = threading.Thread(target=end.wait)
        other.start()
        try:
            import_lean("orchard", "ladder", "orchard.apples", beside_threads=beside_threads)
        finally:
            end.set()
            other.join()
        whole = [name for name in ("ladder", "orchard.apples") if type(sys.modules.get(name)) is ModuleType]
        assert whole == ([] if beside_threads else ["ladder", "orchard.apples"])

    @pytest.mark.parametrize(("version", "shown"), [("", None), ("1.2.3", "1.2.3")])
    def test_onnx_reads_its_version_itself_where_nobody_knows_it(
        self, monkeypatch: pytest.MonkeyPatch, version: str, shown: str | None
    ) -> None:
        for name in [name for name in sys.modules if name.split(".")[0] == "onnx"]:
            monkeypatch.delitem(sys.modules, name)
        installed = importlib.metadata.version("onnx")
        monkeypatch.delitem(sys.modules, "importlib.metadata")
        monkeypatch.delattr(importlib, "metadata")
        import_onnx(version)
        assert load("onnx").__version__ == (shown or installed)
        assert ("importlib.metadata" in sys.modules) == (not version)

    def test_an_import_that_fails_leaves_no_stand_in(self) -> None:
        with pytest.raises(ImportError, match="long enough"):
            import_lean("broken", "ladder")
        assert not {"broken", "ladder"} & sys.modules.keys()


GRPC = """
import sys
from podrun.private_apis.lean_imports import import_grpc

import_grpc()
import grpc

early = {name for name in sys.modules if name.split(".")[0] == "asyncio" or name.startswith("grpc.aio")}
assert not early, f"gRPC asks for {early} while it is imported"

import asyncio
import types

assert type(asyncio) is type(grpc.aio) is types.ModuleType
assert grpc.aio is sys.modules["grpc.aio"]


async def echoed():
    def handler(details):
        async def reply(request, context):
            return request + b"!"

        return grpc.unary_unary_rpc_method_handler(reply)

    class Handlers(grpc.GenericRpcHandler):
        def service(self, details):
            return handler(details)

    server = grpc.aio.server()
    server.add_generic_rpc_handlers((Handlers(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        answer = await channel.unary_unary("/a/b")(b"hello", timeout=60, wait_for_ready=True)
    await server.stop(None)
    return answer


print(asyncio.run(echoed()).decode())
"""


ONNX = """
import importlib
import sys
from podrun.core.kept_files import library_version, version_beside
from podrun.private_apis.lean_imports import _WITH_ONNX, import_grpc, import_onnx

import_grpc()
import podrun.protos.vipu_pb2
import_onnx(version_beside("onnx"))
import onnx

early = {*_WITH_ONNX, "importlib.metadata", "google.protobuf.internal.python_message"} & sys.modules.keys()
assert not early, f"ONNX asks for {early} while it is imported"

assert importlib.metadata.version("onnx") == onnx.__version__ == library_version("onnx")
assert importlib.metadata.version("numpy") == library_version("numpy")
nodes = [onnx.helper.make_node("Relu", ["x"], ["y"])]
x, y = (onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [2]) for name in "xy")
model = onnx.helper.make_model(onnx.helper.make_graph(nodes, "g", [x], [y]))
onnx.checker.check_model(model)
for form in ("protobuf", "textproto", "json", "onnxtxt"):
    text = onnx._get_serializer(form).serialize_proto(model)
    again = onnx.load_model_from_string(text, format=form)
    assert [node.op_type for node in again.graph.node] == ["Relu"], form
assert "Relu" in str(model) and "Relu" in onnx.printer.to_text(model)
newest = onnx.defs.onnx_opset_version()
assert onnx.version_converter.convert_version(model, newest).opset_import[0].version == newest
assert onnx.compose.add_prefix(model, "p/").graph.node[0].input[0] == "p/x"
import onnx.numpy_helper
import numpy
assert onnx.numpy_helper.to_array(onnx.numpy_helper.from_array(numpy.arange(3.0))).sum() == 3
names = [name for name in _WITH_ONNX if type(sys.modules.get(name, onnx)) is not type(sys)]
assert names == [], names
print("done")
"""


BUILT_BESIDE_A_CONNECTION = """
import sys
import threading
from podrun.core.layout import IpuRange
from podrun.popart.building.builder import Builder
from podrun.popart.devices.device_manager import DeviceManager
from podrun.popart.values.enums import DeviceConnectionType
from podrun.private_apis.lean_imports import _WITH_ONNX, import_grpc

manager = DeviceManager({})
assert len(manager.enumerateDevices()) == manager.total_ipus
assert "onnx" not in sys.modules, "a program that looks at devices needs no models"
manager.FUNCTION(WHICH, connectionType=DeviceConnectionType.OnDemand)  # Attaching here would import JAX, and that much.
assert "onnx" in sys.modules
import_grpc()
over = threading.Event()
thread = threading.Thread(target=over.wait)
thread.start()
Builder()
over.set()
thread.join()
print(*{*_WITH_ONNX, "importlib.metadata", "google.protobuf.internal.python_message"} & sys.modules.keys(), "done")
"""


@pytest.mark.system
@pytest.mark.parametrize(
    ("function", "which"),
    [("acquireAvailableDevice", "1"), ("acquireDeviceById", "0"), ("acquireRange", "IpuRange(0, 1)")],
)
def test_a_builder_beside_the_threads_of_a_connection_does_without_parts_of_onnx(
    function: str, which: str
) -> None:
    """Programs take their device first, as `popdist.popart.getDevice` gives it, and build their model then."""
    program = BUILT_BESIDE_A_CONNECTION.replace("FUNCTION", function).replace("WHICH", which)
    words = [sys.executable, "-c", program]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.returncode) == ("done\n", 0), done.stderr


@pytest.mark.system
def test_onnx_has_its_parts_when_they_are_asked_for() -> None:
    done = subprocess.run([sys.executable, "-c", ONNX], capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.returncode) == ("done\n", 0), done.stderr


@pytest.mark.system
def test_grpc_has_its_coroutines_when_they_are_asked_for() -> None:
    done = subprocess.run([sys.executable, "-c", GRPC], capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.returncode) == ("hello!\n", 0), done.stderr


LAUNCH = """
import sys
from podrun import commands

sys.argv[1:] = ["--vipu-server-host=127.0.0.1", "--vipu-server-port=1", "--vipu-server-timeout=1", "true"]
commands.podrun()
names = {"grpc", "grpc.aio", "asyncio", "google.protobuf.internal.python_message"} & sys.modules.keys()
print("imported:", *names, file=sys.stderr)
"""


@pytest.mark.system
def test_a_launch_connects_without_coroutines() -> None:
    """It does so in a thread, beside which it would import all of gRPC."""
    done = subprocess.run([sys.executable, "-c", LAUNCH], capture_output=True, text=True, timeout=120)
    assert "no V-IPU server answers" in done.stderr
    assert done.stderr.splitlines()[-1] == "imported: grpc", done.stderr
