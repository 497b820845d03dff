"""Every operation of the table against TensorFlow on the CPU: results, gradients, and which inputs have one.

Cases are data (`raw_pointwise`, `raw_reductions`, `raw_forming`, `raw_contractions`, `raw_updates`, `raw_functions`);
`comparing` says how both sides are computed. An operation without a case fails `test_every_operation_has_a_case`.
Random operations are compared with the distributions that they draw from.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.tensorflow.comparing import RawCase, case, check_agreement, computed
from tests.tensorflow.raw_contractions import CONTRACTIONS
from tests.tensorflow.raw_forming import FORMING
from tests.tensorflow.raw_functions import FUNCTIONS
from tests.tensorflow.raw_pointwise import POINTWISE
from tests.tensorflow.raw_reductions import REDUCED
from tests.tensorflow.raw_updates import UPDATES

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed"
)
TESTS = Path(__file__).resolve().parents[1]
CASES: list[RawCase] = [*POINTWISE, *REDUCED, *FORMING, *CONTRACTIONS, *UPDATES, *FUNCTIONS]
BY_NAME = {one.name: one for one in CASES}
_HERE, _SDK = "tensorflow/test_every_operation.py::", "tensorflow/test_sdk_operations.py::"
ELSEWHERE = {
    "Const": _HERE + "test_it_computes_what_tensorflow_does",
    "Differentiate": _HERE + "test_it_computes_what_tensorflow_does",
    "Result": _HERE + "test_it_computes_what_tensorflow_does",
    "Store": _HERE + "test_it_computes_what_tensorflow_does",
    "CTCLossV2": _SDK + "test_connectionist_losses_are_tensorflows",
    "Where": _HERE + "test_results_of_unknown_size_are_refused",
    "Podrun:all_gather": _SDK + "test_collectives_between_replicas",
    "Podrun:all_to_all": _SDK + "test_collectives_between_replicas",
    "Podrun:cross_replica_mean": _SDK + "test_collectives_between_replicas",
    "Podrun:cross_replica_sum": "tensorflow/test_version_1_training.py::test_groups_of_replicas",
    "Podrun:replication_index": _SDK + "test_collectives_between_replicas",
    "Podrun:reduce_scatter": _SDK + "test_collectives_between_replicas",
    "Podrun:ctc_loss": _SDK + "test_connectionist_losses_are_tensorflows",
    "Podrun:ctc_decode": _HERE + "test_the_best_labels_are_tensorflows",
    "UniformCandidateSampler": _HERE + "test_candidates_are_expected_as_often_as_in_tensorflow",
    "LogUniformCandidateSampler": _HERE + "test_candidates_are_expected_as_often_as_in_tensorflow",
    "Podrun:replica_sum_over_count": _SDK + "test_collectives_between_replicas",
    "TensorListFromTensor": _HERE + "test_it_computes_what_tensorflow_does",
    "TensorListReserve": _HERE + "test_it_computes_what_tensorflow_does",
    "TensorListSetItem": _HERE + "test_it_computes_what_tensorflow_does",
    "StatelessRandomGetAlg": _HERE + "test_stateless_operations_draw_what_their_seed_says",
    "StatelessRandomGetKeyCounter": _HERE + "test_stateless_operations_draw_what_their_seed_says",
    "Podrun:to_eight_bits": "tensorflow/test_eight_bits.py::test_numbers_are_rounded_to_the_nearest",
    "Podrun:from_eight_bits": "tensorflow/test_eight_bits.py::test_numbers_are_rounded_to_the_nearest",
    "Podrun:group_norm": "tensorflow/test_addons.py::test_norms_of_channels",
    "Podrun:dropout": "tensorflow/test_addons.py::test_dropout_and_hints",
    "Podrun:recurrence": "tensorflow/test_addons.py::test_recurrent_layers_are_those_of_keras",
    "Podrun:user_op": _SDK + "test_user_operators_are_functions_of_python",
    "IpuGelu": "tensorflow/test_saved_model_conversion.py::test_gelu_becomes_one_operation",
    "Podrun:watched": _SDK + "test_gradients_are_captured_on_their_way",
}
"""Operations that are compared by a test of their own: file and function."""


@pytest.fixture(scope="module", autouse=True)
def cut() -> Iterator[None]:
    """Gradients of programs are cut, and TensorFlow is as it was afterwards."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TF_USE_LEGACY_KERAS", "1")
        patch.setenv("TF_CPP_MIN_LOG_LEVEL", "3")
        import tensorflow as tf

        from podrun.private_apis.tensorflow import private_module
        from podrun.tensorflow.capture.gradient_cuts import install_cuts

        helper = private_module("ops.gradients_util")
        patch.setattr(helper, "_GradientsHelper", helper._GradientsHelper)
        patch.setattr(tf.GradientTape, "gradient", tf.GradientTape.gradient)
        install_cuts(lambda targets, sources: False)
        yield


@pytest.mark.sample(61)  # Odd: of the types, which change from case to case, both run by default.
@pytest.mark.parametrize("half", [False, True], ids=["float32", "float16"])
@pytest.mark.parametrize("name", BY_NAME)
def test_it_computes_what_tensorflow_does(name: str, half: bool) -> None:
    one = BY_NAME[name]
    if half and one.skip_half:
        pytest.skip(one.skip_half)
    with np.errstate(all="ignore"):
        check_agreement(one, half)


def test_every_operation_has_a_case() -> None:
    from podrun.tensorflow.graph.importer import UPDATES as OPERATIONS_THAT_UPDATE
    from podrun.tensorflow.operators.table import HANDLERS, TensorFlowOperators

    TensorFlowOperators()
    covered = {one.op for one in CASES} | set(RANDOM) | set(STATELESS) | ELSEWHERE.keys()
    assert sorted((HANDLERS.keys() | OPERATIONS_THAT_UPDATE.keys()) - covered) == []
    for operation, place in ELSEWHERE.items():
        file, _, function = place.partition("::")
        assert f"def {function}(" in (TESTS / file).read_text(), operation


def test_names_of_cases_stand_for_one_case() -> None:
    names = [one.name for one in CASES]
    assert sorted({n for n in names if names.count(n) > 1}) == []


def test_results_of_unknown_size_are_refused() -> None:
    from podrun.core.errors import UnsupportedError

    with pytest.raises(UnsupportedError, match="static shapes"):
        computed(case("Where", condition=np.array([True, False])), False)


@pytest.mark.slow
def test_the_best_labels_are_tensorflows() -> None:
    import tensorflow as tf

    from podrun.tensorflow.sdk.sequence_losses import label_paths_of_logits

    logits = (np.random.RandomState(2).randn(6, 3, 4) * 2).astype(np.float32)
    times = np.array([6, 4, 5], np.int32)

    def decode(scores: Any, lengths: Any) -> Any:
        return label_paths_of_logits(scores, lengths, beam_width=20, top_paths=2, blank_index=3)

    values, lengths, labels = computed(
        RawCase("decode", "", {"scores": logits, "times": times}, function=decode, gradient=False), False
    )
    paths, want = tf.nn.ctc_beam_search_decoder(logits, times, beam_width=20, top_paths=2)
    assert lengths is not None
    assert labels is not None
    np.testing.assert_allclose(values, want, rtol=1e-4, atol=1e-4)
    for place, path in enumerate(paths):
        rows = tf.sparse.to_dense(path, default_value=-1).numpy()
        for sample, row in enumerate(rows):
            np.testing.assert_array_equal(labels[sample, place, : lengths[sample, place]], row[row >= 0])


@pytest.mark.parametrize(("seeds", "theirs"), [(2, 50), pytest.param(30, 200, marks=pytest.mark.slow)])
def test_candidates_are_expected_as_often_as_in_tensorflow(seeds: int, theirs: int) -> None:
    import tensorflow as tf

    true, ops = np.arange(40, dtype=np.int32)[None], ["UniformCandidateSampler", "LogUniformCandidateSampler"]

    def draw(op: str, x: Any, unique: bool, count: int, seed: int) -> Any:
        return getattr(tf.raw_ops, op)(
            true_classes=tf.cast(x, tf.int64),
            num_true=40,
            num_sampled=count,
            unique=unique,
            range_max=40,
            seed=87654321,
            seed2=seed,
        )

    def drawn(x: Any) -> list[Any]:
        ways = [(False, COUNT, 3), *((True, 20, k) for k in range(seeds)), (True, 20, 1)]
        return [draw(op, x, *way) for op in ops for way in ways]

    program = RawCase(ops[0], "", {"x": true}, function=drawn, gradient=False)
    values = [np.asarray(v) for v in computed(program, False)]
    draws = list(zip(values[::3], values[1::3], values[2::3], strict=True))
    assert len(draws) == 2 * (seeds + 2)
    for op, own in zip(ops, (draws[: seeds + 2], draws[seeds + 2 :]), strict=True):
        _check_candidates(op, true, own, theirs)


def _check_candidates(op: str, true: np.ndarray, draws: list[tuple[np.ndarray, ...]], theirs: int) -> None:
    """Of an operation: a draw of `COUNT` classes, draws of 20 different ones, and one of these once more."""
    import tensorflow as tf

    (classes, of_true, of_sampled), *every, again = draws
    seeds = len(every)
    uniform = op.startswith("Uniform")
    shares = np.full(40, 1 / 40) if uniform else np.log((true[0] + 2) / (true[0] + 1)) / np.log(41)
    np.testing.assert_allclose(of_true[0], shares * COUNT, rtol=1e-4)
    np.testing.assert_allclose(of_sampled, shares[classes] * COUNT, rtol=1e-4)
    np.testing.assert_allclose(np.bincount(classes, minlength=40) / COUNT, shares, atol=0.015)
    np.testing.assert_array_equal(again[0], every[1][0])
    assert len({tuple(classes) for classes, _, _ in every}) == seeds
    ours = [_tries(shares, of_true[0]) for _, of_true, _ in every]
    for (classes, of_true, of_sampled), tries in zip(every, ours, strict=True):
        assert len(set(classes)) == 20
        assert tries >= 20
        np.testing.assert_allclose(of_true[0], 1 - (1 - shares) ** tries, rtol=1e-4)
        np.testing.assert_array_equal(of_sampled, of_true[0][classes])
    options = {"num_true": 40, "num_sampled": 20, "unique": True, "range_max": 40, "seed": 7}
    tries_of_theirs = [
        _tries(shares, getattr(tf.raw_ops, op)(true_classes=true.astype(np.int64), seed2=k, **options)[1][0])
        for k in range(theirs)
    ]
    assert abs(np.mean(ours) - np.mean(tries_of_theirs)) < 3 * np.std(tries_of_theirs) / np.sqrt(seeds)


def _tries(shares: np.ndarray, expected: Any) -> int:
    """How many draws it took until the classes were unique, by how often the first class is expected in them."""
    return round(float(np.log1p(-np.float64(expected[0])) / np.log1p(-shares[0])))


# --- Random numbers ---------------------------------------------------------------------------------------------

COUNT = 20_000
FAR = 0.02
"""A distance of Kolmogorov and Smirnov that so many numbers stay below: 1.95 / sqrt(n) is exceeded once in a thousand,
and seeds are fixed.
"""


def _normal(x: np.ndarray) -> np.ndarray:
    from scipy import stats

    return np.asarray(stats.norm.cdf(x))


def _truncated(x: np.ndarray) -> np.ndarray:
    from scipy import stats

    return np.asarray(stats.truncnorm.cdf(x, -2, 2))


def _uniform(x: np.ndarray) -> np.ndarray:
    return np.clip(x, 0, 1)


def _gamma(x: np.ndarray) -> np.ndarray:
    from scipy import stats

    return np.asarray(stats.gamma.cdf(x, 2.5))


def distance(values: np.ndarray, cumulative: Callable[[np.ndarray], np.ndarray]) -> float:
    """The largest distance between the values' distribution and another."""
    ordered = np.sort(values.reshape(-1).astype(np.float64))
    steps = np.arange(len(ordered) + 1) / len(ordered)
    want = cumulative(ordered)
    return float(max(np.abs(want - steps[1:]).max(), np.abs(want - steps[:-1]).max()))


SHAPE = [COUNT // 4, 4]
RANDOM: dict[str, tuple[dict[str, Any], Callable[[np.ndarray], np.ndarray]]] = {
    "RandomStandardNormal": ({"shape": SHAPE, "dtype": "float32"}, _normal),
    "TruncatedNormal": ({"shape": SHAPE, "dtype": "float32"}, _truncated),
    "RandomUniform": ({"shape": SHAPE, "dtype": "float32"}, _uniform),
    "RandomGamma": ({"shape": [COUNT // 4], "alpha": np.full(4, 2.5, np.float32)}, _gamma),
    "RandomUniformInt": (
        {"shape": SHAPE, "minval": -3, "maxval": 5},
        lambda x: np.clip((np.floor(x) + 4) / 8, 0, 1),
    ),
    "Multinomial": (
        {"logits": np.log(np.array([[1, 2, 1]], np.float32)), "num_samples": COUNT},
        lambda x: np.array([0.25, 0.75, 1])[np.clip(x.astype(int), 0, 2)],
    ),
    "RandomShuffle": ({"value": np.arange(COUNT, dtype=np.float32)}, lambda x: (x + 1) / COUNT),
}
_WORDS: tuple[dict[str, Any], Callable[[np.ndarray], np.ndarray]] = (
    {"shape": SHAPE, "dtype": "int32"},
    lambda x: (x.astype(np.float64) + 2**31) / 2**32,
)
_KEYED = {"alg": 1, "dtype": "float32", "shape": SHAPE}
STATELESS: dict[str, tuple[dict[str, Any], Callable[[np.ndarray], np.ndarray]]] = {
    "StatelessRandomNormal": ({"shape": SHAPE}, _normal),
    "StatelessTruncatedNormal": ({"shape": SHAPE}, _truncated),
    "StatelessRandomUniform": ({"shape": SHAPE}, _uniform),
    "StatelessRandomUniformInt": ({"shape": SHAPE, "minval": -3, "maxval": 5}, RANDOM["RandomUniformInt"][1]),
    "StatelessRandomUniformFullInt": _WORDS,
    "StatelessRandomUniformFullIntV2": _WORDS,
    "StatelessRandomNormalV2": (_KEYED, _normal),
    "StatelessTruncatedNormalV2": (_KEYED, _truncated),
    "StatelessRandomUniformV2": (_KEYED, _uniform),
    "StatelessRandomUniformIntV2": (
        {"alg": 1, "shape": SHAPE, "minval": -3, "maxval": 5},
        RANDOM["RandomUniformInt"][1],
    ),
}
WHOLE = {"RandomUniformInt", "Multinomial", "StatelessRandomUniformInt", "StatelessRandomUniformIntV2"}


def whole_distance(values: np.ndarray, cumulative: Callable[[np.ndarray], np.ndarray]) -> float:
    """The largest distance at the values that occur."""
    seen = np.unique(values)
    own = np.array([(values <= v).mean() for v in seen])
    return float(np.abs(own - cumulative(seen)).max())


def _distance(op: str, values: np.ndarray, cumulative: Callable[[np.ndarray], np.ndarray]) -> float:
    return (whole_distance if op in WHOLE else distance)(values, cumulative)


@pytest.mark.slow
@pytest.mark.parametrize("op", RANDOM)
def test_random_operations_draw_from_their_distribution(op: str) -> None:
    arguments, cumulative = RANDOM[op]
    (values,) = computed(case(op, **arguments, _gradient=False), False)
    assert values is not None
    assert values.size == COUNT
    assert _distance(op, values, cumulative) < FAR
    assert (
        op == "RandomShuffle"
        or abs(np.corrcoef(values.reshape(-1)[:-1], values.reshape(-1)[1:])[0, 1]) < 0.05
    )


def _stateless(op: str, seed: Any) -> RawCase:
    """With the seed itself, or the key and counter that TensorFlow derives from it."""
    arguments, _ = STATELESS[op]
    if not op.endswith("V2"):
        return case(op, **arguments, seed=seed, _gradient=False)

    def draw(seed: Any) -> Any:
        import tensorflow as tf

        key, counter = tf.raw_ops.StatelessRandomGetKeyCounter(seed=seed)
        algorithm = tf.raw_ops.StatelessRandomGetAlg()
        return getattr(tf.raw_ops, op)(key=key, counter=counter, **(arguments | {"alg": algorithm}))

    return RawCase(op, "", {"seed": seed}, function=draw, gradient=False)


@pytest.mark.slow
@pytest.mark.parametrize("op", STATELESS)
def test_stateless_operations_draw_what_their_seed_says(op: str) -> None:
    first, again, other = (
        computed(_stateless(op, np.array([5, last], np.int32)), False)[0] for last in (7, 7, 8)
    )
    np.testing.assert_array_equal(first, again)
    assert first is not None
    assert other is not None
    assert (first != other).mean() > 0.5
    assert _distance(op, first, STATELESS[op][1]) < FAR
