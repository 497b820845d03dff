"""More functions of TensorFlow for the comparison: linear algebra, segments, blocks, whole numbers."""

from __future__ import annotations

import numpy as np

from tests.tensorflow.cases import IMAGE, LABELS, Case, X, Y, tf

_random = np.random.RandomState(5)
SQUARE = (_random.rand(2, 4, 4) * 0.2 + np.eye(4)).astype(np.float32)
POSITIVE = (SQUARE @ SQUARE.transpose(0, 2, 1)).astype(np.float32)
RIGHT = _random.rand(2, 4, 3).astype(np.float32)
VOLUME = _random.rand(2, 4, 6, 6, 2).astype(np.float32)
KERNEL3 = (_random.rand(2, 3, 3, 2, 3) - 0.5).astype(np.float32)
COLOURS = (_random.rand(2, 5, 5, 3) * 0.8 + 0.1).astype(np.float32)
IDS = [0, 2, 0, 1]


def _whole(x: object) -> object:
    """Whole numbers from floats between 0 and 1."""
    return tf.cast(x * 100, tf.int32)


def _float(x: object) -> object:
    return tf.cast(x, tf.float32)


# fmt: off
MORE: dict[str, Case] = {
    "cholesky": (lambda x: tf.linalg.cholesky(x), (POSITIVE,)),
    "inverse": (lambda x: tf.linalg.inv(x), (SQUARE,)),
    "determinant": (lambda x: tf.linalg.det(x), (SQUARE,)),
    "log_determinant": (lambda x: tf.linalg.slogdet(x)[1], (SQUARE,)),
    "solve": (lambda a, b: tf.linalg.solve(a, b, adjoint=True), (SQUARE, RIGHT)),
    "triangular_solve": (lambda a, b: tf.linalg.triangular_solve(a, b, lower=True), (SQUARE, RIGHT)),
    "qr": (lambda x: tf.abs(tf.linalg.qr(x)[1]), (SQUARE,)),
    "singular_values": (lambda x: tf.linalg.svd(x, compute_uv=False), (SQUARE,)),
    "eigenvalues": (lambda x: tf.linalg.eigh(x + tf.linalg.matrix_transpose(x))[0], (POSITIVE,)),
    "diagonal": (lambda x: tf.linalg.diag(x), (X,)),
    "diagonal_part": (lambda x: tf.linalg.diag_part(x), (SQUARE,)),
    "set_diagonal": (lambda x, d: tf.linalg.set_diag(x, d[:2, :4]), (SQUARE, X)),
    "trace": (lambda x: tf.linalg.trace(x), (SQUARE,)),
    "tensor_diagonal": (lambda x: tf.linalg.tensor_diag(x[0]), (X,)),
    "tensor_diagonal_part": (lambda x: tf.linalg.tensor_diag_part(x[0]), (SQUARE,)),
    "cross": (lambda a, b: tf.linalg.cross(a[:, :3], b[:, 3:]), (X, Y)),
    "batch_matmul": (lambda a, b: tf.matmul(a, b, transpose_a=True), (SQUARE, RIGHT)),
    "convolution3": (lambda x, w: tf.nn.conv3d(x, w, [1, 1, 2, 2, 1], "SAME"), (VOLUME, KERNEL3)),
    "convolution3_transposed": (
        lambda x, w: tf.nn.conv3d_transpose(x, tf.transpose(w, [0, 1, 2, 4, 3])[..., :2], [2, 4, 6, 6, 3], 1),
        (VOLUME, KERNEL3)),
    "max_pool3": (lambda x: tf.nn.max_pool3d(x, 2, 2, "VALID"), (VOLUME,)),
    "average_pool3": (lambda x: tf.nn.avg_pool3d(x, 3, 2, "SAME"), (VOLUME,)),
    "segment_sum": (lambda x: tf.math.segment_sum(x, [0, 0, 1, 3]), (X,)),
    "segment_mean": (lambda x: tf.math.segment_mean(x, [0, 0, 1, 3]), (X,)),
    "segment_max": (lambda x: tf.math.segment_max(x, [0, 0, 1, 2]), (X,)),
    "segment_min": (lambda x: tf.math.segment_min(x, [0, 0, 1, 2]), (X,)),
    "segment_prod": (lambda x: tf.math.segment_prod(x, [0, 0, 1, 2]), (X,)),
    "unsorted_max": (lambda x: tf.math.unsorted_segment_max(x, IDS, 3), (X,)),
    "unsorted_min": (lambda x: tf.math.unsorted_segment_min(x, IDS, 3), (X,)),
    "unsorted_prod": (lambda x: tf.math.unsorted_segment_prod(x, IDS, 3), (X,)),
    "roll": (lambda x: tf.roll(x, [1, -2], [0, 1]), (X,)),
    "reverse_sequence": (lambda x: tf.reverse_sequence(x, [6, 2, 3, 1], seq_axis=1, batch_axis=0), (X,)),
    "linspace": (lambda x: x * tf.cast(tf.linspace(0.0, 1.0, 6), x.dtype), (X,)),
    "space_to_batch": (lambda x: tf.space_to_batch(x, [2, 2], [[0, 0], [2, 0]]), (IMAGE,)),
    "batch_to_space": (lambda x: tf.batch_to_space(tf.tile(x, [2, 1, 1, 1]), [2, 2], [[1, 0], [0, 1]]), (IMAGE,)),
    "dilated": (lambda x, w: tf.nn.conv2d(x, w, 1, "SAME", dilations=2), (VOLUME[:, 0], KERNEL3[0])),
    "patches": (lambda x: tf.image.extract_patches(x, [1, 3, 2, 1], [1, 2, 1, 1], [1, 1, 1, 1], "VALID"), (IMAGE,)),
    "log_cumulative": (lambda x: tf.math.cumulative_logsumexp(x, 1), (X,)),
    "cumprod": (lambda x: tf.math.cumprod(x, 1, exclusive=True), (X,)),
    "erfinv": (lambda x: tf.math.erfinv(x), (X,)),
    "ndtri": (lambda x: tf.math.ndtri(x), (X,)),
    "igamma": (lambda x: tf.math.igamma(tf.constant(2.0, x.dtype), x), (X,)),
    "igammac": (lambda x: tf.math.igammac(tf.constant(2.0, x.dtype), x), (X,)),
    "betainc": (lambda x: tf.math.betainc(tf.constant(2.0), tf.constant(1.5), _float(x)), (X,)),
    "zeta": (lambda x: tf.math.zeta(_float(tf.stop_gradient(x)) + 2.0, tf.constant(1.5)) * _float(x), (X,)),
    "polygamma": (lambda x: tf.math.polygamma(tf.constant(1.0), _float(x)), (X,)),
    "bessel_i0e": (lambda x: tf.math.bessel_i0e(x), (X,)),
    "bessel_i1e": (lambda x: tf.math.bessel_i1e(x), (X,)),
    "xlog1py": (lambda x, y: tf.math.xlog1py(x, y), (X, Y)),
    "acosh": (lambda x: tf.math.acosh(x + 1), (X,)),
    "to_hsv": (lambda x: tf.image.rgb_to_hsv(_float(x)) * _float(x), (COLOURS,)),
    "to_rgb": (lambda x: tf.image.hsv_to_rgb(_float(x)) + _float(x), (COLOURS,)),
    "contrast": (lambda x: tf.stop_gradient(tf.image.adjust_contrast(_float(x), 2.0)) * _float(x), (COLOURS,)),
    "saturation": (lambda x: tf.stop_gradient(tf.image.adjust_saturation(_float(x), 0.5)) * _float(x), (COLOURS,)),
    "hue": (lambda x: tf.stop_gradient(tf.image.adjust_hue(_float(x), 0.2)) * _float(x), (COLOURS,)),
    "fake_quant": (lambda x: tf.quantization.fake_quant_with_min_max_args(_float(x), -0.2, 0.7), (X,)),
    "add_n": (lambda a, b: tf.add_n([a, b, a]), (X, Y)),
    "argmin": (lambda x: x * tf.cast(tf.argmin(x, 1), x.dtype)[:, None], (X,)),
    "in_top": (lambda x: _float(tf.math.in_top_k(LABELS, _float(x), 2)) * tf.reduce_sum(_float(x)), (X,)),
    "inverse_permutation": (lambda x: tf.gather(x, tf.math.invert_permutation([2, 0, 3, 1])), (X,)),
    "scatter": (lambda x: tf.scatter_nd([[1], [3], [0], [1]], x, [5, 6]), (X,)),
    "scatter_add": (lambda x, y: tf.tensor_scatter_nd_add(x, [[1], [3]], y[:2]), (X, Y)),
    "scatter_sub": (lambda x, y: tf.tensor_scatter_nd_sub(x, [[1], [3]], y[:2]), (X, Y)),
    "scatter_update": (lambda x, y: tf.tensor_scatter_nd_update(x, [[1], [3]], y[:2]), (X, Y)),
    "scatter_max": (lambda x, y: tf.tensor_scatter_nd_max(x, [[1], [3]], y[:2]), (X, Y)),
    "scatter_min": (lambda x, y: tf.tensor_scatter_nd_min(x, [[1], [3]], y[:2]), (X, Y)),
    "sort": (lambda x: tf.sort(x, 1, "DESCENDING"), (X,)),
    "comparisons": (
        lambda a, b: sum(_float(f(a, b)) for f in (
            tf.less, tf.less_equal, tf.greater, tf.greater_equal, tf.equal, tf.not_equal)) * _float(a),
        (X, Y)),
    "logic": (
        lambda a, b: _float(tf.logical_or(tf.logical_and(a > 0.5, b > 0.5), tf.logical_not(a > b))) * _float(a), (X,
        Y)),
    "bits": (
        lambda a, b: _float(tf.bitwise.bitwise_xor(tf.bitwise.bitwise_and(_whole(a), 60), tf.bitwise.bitwise_or(
            tf.bitwise.left_shift(_whole(b), 2), tf.bitwise.right_shift(tf.bitwise.invert(_whole(a)), 1)))) * _float(a),
        (X, Y)),
    "whole_numbers": (
        lambda a, b: _float(_whole(a) // (_whole(b) + 1) + _whole(a) % 7 + tf.truncatediv(-_whole(a), 7)
                            + tf.raw_ops.TruncateMod(x=-_whole(a), y=7)) * _float(a), (X, Y)),
    "finite": (lambda x: _float(tf.math.is_finite(x)) * _float(x) + _float(tf.math.is_nan(x)) + _float(
        tf.math.is_inf(x)), (X,)),
    "every_and_any": (lambda x: _float(tf.reduce_all(x > 0.1, 1)) + _float(tf.reduce_any(x > 0.85, 1)) + tf.reduce_sum(
        _float(x), 1), (X,)),
    "shapes": (lambda x: _float(x) * tf.cast(tf.size(x) + tf.rank(x) + tf.shape(x)[1], tf.float32), (X,)),
    "range": (lambda x: x * tf.cast(tf.range(6), x.dtype), (X,)),
    "fill": (lambda x: x * tf.fill([4, 6], tf.constant(2.0, x.dtype)) + tf.ones_like(x) - tf.zeros_like(x), (X,)),
    "squeeze": (lambda x: tf.squeeze(tf.expand_dims(x, 1), 1), (X,)),
    "bitcast": (lambda x: _float(tf.bitcast(_float(x), tf.int32) % 3) * _float(x), (X,)),
    "typed_products": (lambda a: tf.raw_ops.BatchMatMulV3(x=a, y=a, Tout=a.dtype, adj_y=True), (SQUARE,)),
    "resize_nearest": (lambda x: tf.image.resize(x, [5, 11], "nearest"), (IMAGE,)),
}
# fmt: on
