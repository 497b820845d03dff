"""8-bit floats of IPUs against their definition: a table of the values of all bytes, in float64."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed"
)
EXPONENT_BITS = {"F143": 4, "F152": 5}


def values_of_bytes(form: str) -> np.ndarray:
    """The value of each byte: sign, exponent with the bias 2^(bits - 1), significand. Minus zero is NaN."""
    bits = EXPONENT_BITS[form]
    least = 7 - bits
    codes = np.arange(256)
    exponent, significand = codes >> least & (1 << bits) - 1, codes & (1 << least) - 1
    bias = 1 << bits - 1
    normal = (1 + significand / 2.0**least) * 2.0 ** (exponent - bias)
    small = significand / 2.0**least * 2.0 ** (1 - bias)
    values = np.where(exponent > 0, normal, small) * np.where(codes > 127, -1.0, 1.0)
    values[128] = np.nan
    return values


def nearest(form: str, x: np.ndarray) -> np.ndarray:
    """The nearest values, of two equally near ones that with an even byte; too large ones become the greatest."""
    table = values_of_bytes(form)[:128]
    scaled = np.abs(x.astype(np.float64))
    distance = np.abs(scaled[:, None] - table[None])
    best = distance.min(axis=1, keepdims=True)
    tied = np.where(distance == best, np.arange(128) % 2, 2)
    return table[tied.argmin(axis=1)] * np.sign(x)


NUMBERS = np.float16(
    [0.0, 1.0, -1.0, 0.3, -0.75, 17.0, 18.0, 19.0, 21.0, 239.0, 250.0, -60000.0, 0.001, -0.0004, 2.5]
)


@pytest.mark.sample(2)
@pytest.mark.parametrize("form", EXPONENT_BITS)
@pytest.mark.parametrize("scale", [-3, 0, 2])
def test_numbers_are_rounded_to_the_nearest(ipu: Any, form: str, scale: int) -> None:
    import tensorflow.compat.v1 as tf

    f8 = ipu.f8_ops
    with tf.Graph().as_default(), tf.Session() as session:
        x, said = tf.placeholder(tf.float16, NUMBERS.shape), tf.placeholder(tf.uint8, [])
        with ipu.scopes.ipu_scope("/device:IPU:0"):
            results = ipu.ipu_compiler.compile(
                lambda x, said: f8.convert_from_f8(f8.convert_to_f8(x, said), tf.float32), [x, said]
            )
        fed = {x: NUMBERS, said: f8.create_metadata(f8.Format[form], scale)}
        own = session.run(results, fed)[0]
    expected = nearest(form, NUMBERS / np.float64(2.0**scale)) * 2.0**scale
    np.testing.assert_array_equal(own, np.clip(expected, -65504, 65504).astype(np.float16).astype(np.float32))


def test_all_bytes_have_their_values_in_eager_mode(ipu: Any) -> None:
    import tensorflow as tf

    codes = np.arange(256, dtype=np.uint8)
    for form in EXPONENT_BITS:
        said = ipu.f8_ops.create_metadata(ipu.f8_ops.Format[form], 0)
        own = ipu.f8_ops.convert_from_f8(ipu.f8_ops.QuarterTensor(tf.constant(codes), said), tf.float32)
        np.testing.assert_array_equal(own.numpy(), values_of_bytes(form).astype(np.float32))
        exact = np.delete(codes, 128)
        back = ipu.f8_ops.convert_to_f8(tf.constant(values_of_bytes(form)[exact], tf.float16), said)
        np.testing.assert_array_equal(back.data.numpy(), exact)


def test_products_and_convolutions_give_halves(ipu: Any) -> None:
    import tensorflow.compat.v1 as tf

    f8 = ipu.f8_ops
    said = f8.create_metadata(f8.Format.F143, 1)
    with tf.Graph().as_default(), tf.Session() as session:
        a, image = tf.placeholder(tf.float16, [2, 2]), tf.placeholder(tf.float16, [1, 5, 5, 1])

        def net(a: Any, image: Any) -> Any:
            kernel = tf.fill([3, 3, 1, 1], tf.constant(2.0, tf.float16))
            x, w = f8.convert_to_f8(image, said), f8.convert_to_f8(kernel, said)
            line = f8.f8_conv_1d(image[:, 0], kernel[0], 1, "SAME")
            volume = f8.f8_conv_3d(image[:, None], kernel[None], [1] * 5, "SAME")
            quarter = f8.convert_to_f8(a, said)
            return f8.f8_matmul(quarter, quarter), f8.f8_conv_2d(x, w, 1, "SAME"), line, volume

        with ipu.scopes.ipu_scope("/device:IPU:0"):
            results = ipu.ipu_compiler.compile(net, [a, image])
        product, plane, line, volume = session.run(
            results, {a: [[0, 2], [2, 1]], image: np.ones([1, 5, 5, 1])}
        )
    assert product.dtype == np.float16
    assert product.tolist() == [[4, 2], [2, 5]]
    assert plane[0, :, :, 0].tolist() == [[8, 12, 12, 12, 8], *[[12, 18, 18, 18, 12]] * 3, [8, 12, 12, 12, 8]]
    assert line[0, :, 0].tolist() == [4, 6, 6, 6, 4]
    np.testing.assert_array_equal(volume[:, 0], plane)


def test_data_must_be_bytes(ipu: Any) -> None:
    import tensorflow as tf

    with pytest.raises(TypeError, match="only uint8 are supported"):
        ipu.f8_ops.QuarterTensor(tf.constant([1.0]), 0)


@pytest.mark.parametrize("scale", [-33, 32, 40])
def test_a_scale_has_six_bits(ipu: Any, scale: int) -> None:
    with pytest.raises(ValueError, match=f"from -32 to 31.*scale={scale}"):
        ipu.f8_ops.create_metadata(ipu.f8_ops.Format.F143, scale)


def test_eager_mode_clips_as_a_program_does(ipu: Any) -> None:
    """The greatest half is 65504; the nearest 8-bit float of this format and scale is 65536."""
    import tensorflow as tf

    f8 = ipu.f8_ops
    packed = f8.convert_to_f8(
        tf.constant([1e6, -65504.0, 3.0, np.nan]), f8.create_metadata(f8.Format.F152, 2)
    )
    values = f8.convert_from_f8(packed, tf.float32).numpy()
    np.testing.assert_array_equal(values, np.float32([65504, -65504, 3, np.nan]))
    product = f8.f8_matmul(tf.constant([[60000.0]]), tf.constant([[-2.0]]))
    assert (product.dtype, float(product[0, 0])) == (tf.float16, -65504)


def test_a_program_of_version_1_converts_too_large_numbers(ipu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """There `tf.where` is that of version 1, which takes no single number beside a vector."""
    import tensorflow as tf

    from podrun.tensorflow.sdk import eight_bit_tensors

    f8 = ipu.f8_ops
    packed = f8.convert_to_f8(tf.constant([1e6, 3.0]), f8.create_metadata(f8.Format.F152, 2))
    monkeypatch.setattr(tf, "where", tf.compat.v1.where)
    monkeypatch.setattr(eight_bit_tensors, "DEVICES", SimpleNamespace(nan_on_overflow=True))
    values = f8.convert_from_f8(packed, tf.float32).numpy()
    np.testing.assert_array_equal(values, np.float32([np.nan, 3]))


def test_layers_of_version_1_have_no_8_bit_floats() -> None:
    from podrun.compat._keras_names import own_module

    assert hasattr(own_module("ipu_tensorflow_addons.keras.layers"), "ConvertToF8")
    for name in ("ConvertToF8", "ConvertFromF8"):
        assert not hasattr(own_module("ipu_tensorflow_addons.v1.layers"), name)


def test_the_host_converts_where_no_ipu_is(ipu: Any) -> None:
    import tensorflow as tf

    f8, behaviour = ipu.f8_ops, ipu.config.IPUConfig()
    metadata = f8.create_metadata(f8.Format.F152, 0)

    def there_and_back(x: Any) -> Any:
        return f8.convert_from_f8(f8.convert_to_f8(x, metadata), tf.float32)

    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        x = tf.compat.v1.placeholder(tf.float16, NUMBERS.shape)
        own = session.run(there_and_back(x), {x: NUMBERS})
    np.testing.assert_array_equal(own, nearest("F152", NUMBERS))
    large = tf.constant([1e6, -1e6, 1.0])
    np.testing.assert_array_equal(there_and_back(large), [57344, -57344, 1])
    behaviour.floating_point_behaviour.nanoo = True
    behaviour.configure_ipu_system()
    try:
        np.testing.assert_array_equal(there_and_back(large), [np.nan, np.nan, 1])
    finally:
        ipu.config.IPUConfig().configure_ipu_system()


def test_a_dense_layer_multiplies_8_bit_floats(ipu: Any) -> None:
    """As the same product of the nearest 8-bit floats in float64; other tensors go through Keras' own layer."""
    import tensorflow as tf
    from tensorflow import keras

    from podrun.compat._keras_names import own_module

    f8, dense = ipu.f8_ops, own_module("keras.ipu.layers").Dense  # type: ignore[union-attr]
    inputs, kernel = (
        np.float32([[1.1, 2, -3], [0.3, -1, 17.5]]),
        np.float32([[0.3, 1.7], [-2.1, 9], [0.011, 5]]),
    )
    bias = np.float32([0.5, -2])
    layer = dense(2, activation="relu", name="product")
    metadata = f8.create_metadata(f8.Format.F152, 1)
    packed = f8.convert_to_f8(tf.constant(inputs), metadata)
    layer(packed)
    layer.set_weights([kernel, bias])
    left = 2 * nearest("F152", inputs.astype(np.float16).ravel() / 2).reshape(inputs.shape)
    right = nearest("F143", kernel.astype(np.float16).ravel()).reshape(kernel.shape)
    expected = np.maximum(left @ right + bias, 0)
    result = layer(packed)
    assert result.dtype == tf.float16
    np.testing.assert_allclose(result, expected, rtol=2e-3)
    plain = keras.layers.Dense.from_config(layer.get_config())
    plain.build([2, 3])
    plain.set_weights([kernel, bias])
    np.testing.assert_array_equal(layer(inputs), plain(inputs))
    assert np.abs(plain(inputs) - expected).max() > 0.01

    @tf.function(autograph=False)
    def step(x: Any) -> Any:
        return layer(f8.convert_to_f8(x, metadata))

    on_device = ipu.ipu_strategy.IPUStrategyV1().run(step, [tf.constant(inputs)])
    np.testing.assert_array_equal(on_device, result)
    with pytest.raises(ValueError, match="two dimensions, but its input has the shape"):
        layer(f8.convert_to_f8(tf.zeros([2, 2, 3]), metadata))
