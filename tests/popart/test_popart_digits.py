"""The digits example as a user runs it: it learns, saves what others can run, and does not depend on how it
was cut.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import onnx
import pytest

from podrun.device.xla import clients
from tests.copies import COMPAT, run_copied
from tests.popart.popart_sessions import run_program

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "digits" / "train.py"


def train(*arguments: str) -> str:
    done = run_copied(COMPAT, [str(SCRIPT), *arguments], timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def accuracy(output: str) -> float:
    line = next(line for line in output.splitlines() if line.startswith("test accuracy"))
    return float(line.split()[2].rstrip("%")) / 100


@pytest.mark.system
@pytest.mark.parametrize(
    ("model", "replicas"),
    [
        pytest.param("cnn", 1, marks=pytest.mark.slow),
        pytest.param("cnn", 16, marks=pytest.mark.slow),
        # By default `tests/system/test_digits.py` trains it for an epoch.
        pytest.param("mlp", 16, marks=pytest.mark.slow),
    ],
)
def test_it_learns_and_saves_what_onnxruntime_runs_as_well(tmp_path, model, replicas):
    path = tmp_path / "digits.onnx"
    output = train("--model", model, "--replicas", str(replicas), "--save", str(path))
    assert accuracy(output) >= 0.97
    onnx.checker.check_model(onnx.load(path), full_check=True)
    runtime = pytest.importorskip("onnxruntime").InferenceSession(path, providers=["CPUExecutionProvider"])
    images, labels = held_out()
    guesses = runtime.run(None, {"images": images})[0].argmax(axis=1)
    assert (guesses == labels).mean() == pytest.approx(accuracy(output), abs=1e-4)


def held_out():
    from sklearn.datasets import load_digits

    data = load_digits()
    chosen = np.random.RandomState(0).permutation(len(data.target))[: round(0.2 * len(data.target))]
    return (data.images[chosen, None] / 16).astype(np.float32), data.target[chosen]


COMPUTED_BEFORE = """
import sys, threading
import jax, numpy
import jax.numpy as jnp
square = jnp.ones((512, 512))
(square.T @ square).sum(0).block_until_ready()
if sys.argv[1] == "all":
    import onnxruntime, sklearn.datasets
    threads = [threading.Thread(target=lambda: numpy.ones((512, 512)) @ numpy.ones((512, 512))) for _ in range(3)]
    [each.start() for each in threads], [each.join() for each in threads]
from podrun.compat.__main__ import main
main(sys.argv[2:])
"""


def train_after(before: str, environment: dict[str, str], *arguments: str) -> None:
    """The example in a process of its own that has computed with JAX, or with all other libraries."""
    words = [sys.executable, "-c", COMPUTED_BEFORE, before, str(SCRIPT), *arguments]
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=120, env={**os.environ, **environment}
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.system
def test_a_seed_fixes_every_byte(tmp_path, monkeypatch):
    """In a process where JAX has computed with three threads, and twice in this one, where other tests have run."""
    files = [tmp_path / name for name in "abc"]
    short = ["--epochs", "1", "--model", "mlp", "--replicas", "4"]
    train_after("jax", {"NPROC": "3"}, *short, "--seed", "1", "--save", str(files[0]))
    for path, seed in zip(files[1:], ("1", "2"), strict=True):
        run_program(monkeypatch, SCRIPT, *short, "--seed", seed, "--save", str(path))
    first, again, other = (path.read_bytes() for path in files)
    assert first == again
    assert first != other


@pytest.mark.slow
@pytest.mark.system
@pytest.mark.parametrize(
    ("model", "before", "environment"),
    [
        ("mlp", "jax", {"NPROC": "1"}),
        ("cnn", "jax", {"NPROC": "3", "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}),
        (
            "mlp",
            "all",
            {"NPROC": "8", "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=true --xla_cpu_enable_fast_math=true"},
        ),
    ],
    ids=["1 thread", "3 threads and 8 devices", "8 threads and other libraries"],
)
def test_bits_do_not_depend_on_what_the_process_computed_before(tmp_path, model, before, environment):
    """JAX's own client keeps the threads that it started with, so each number of them takes a process."""
    short = ["--epochs", "1", "--replicas", "4", "--seed", "1", "--model", model]
    clean, after = tmp_path / "clean", tmp_path / "after"
    train(*short, "--save", str(clean))
    train_after(before, environment, *short, "--save", str(after))
    assert after.read_bytes() == clean.read_bytes()


@pytest.mark.slow
def test_nothing_is_computed_by_the_client_that_jax_has_for_everyone(tmp_path, monkeypatch):
    own = {clients.one_thread_device().client, clients.two_thread_device().client}
    used = set()
    compile_or_get_cached = jax._src.compiler.compile_or_get_cached

    def recorded(backend, *arguments, **options):
        used.add(backend)
        return compile_or_get_cached(backend, *arguments, **options)

    monkeypatch.setattr(jax._src.compiler, "compile_or_get_cached", recorded)
    jax.clear_caches()
    short = ["--epochs", "1", "--model", "cnn", "--replicas", "2", "--save", str(tmp_path / "digits.onnx")]
    run_program(monkeypatch, SCRIPT, *short)
    assert used
    assert used <= own


@pytest.mark.system
def test_without_popart_it_says_how_to_start_it():
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, timeout=60, env={})
    assert done.returncode == 1
    assert "python" in done.stderr
    assert "-m podrun.compat" in done.stderr
    assert "Traceback" not in done.stderr
