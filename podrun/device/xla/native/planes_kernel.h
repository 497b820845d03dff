/* The inner loops of planes.c for one kind of vector: included once for each. */

/* `P` pixels from column `x` on and `V` vectors of channels from `m` on. */
static inline __attribute__((always_inline, target(TARGET))) void
NAME(block)(const Rows *r, int64_t x, int64_t m, int64_t count, const int P, const int V)
{
    VECTOR sum[6][4];
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) {
        const VECTOR bias = LOAD(r->bias + m + v * LANES);
#pragma GCC unroll 6
        for (int p = 0; p < P; p++)
            sum[p][v] = bias;
    }
    for (int64_t k = 0; k < r->count; k++) {
        const float *from = r->rows[k] + x * r->stride, *weights = r->weights[k] + m;
        for (int64_t j = 0; j < r->kw; j++, weights += r->tap) {
            VECTOR w[4];
#pragma GCC unroll 4
            for (int v = 0; v < V; v++)
                w[v] = LOAD(weights + v * LANES);
#pragma GCC unroll 6
            for (int p = 0; p < P; p++) {
                const VECTOR value = SET(from[p * r->stride + j]);
#pragma GCC unroll 4
                for (int v = 0; v < V; v++)
                    sum[p][v] = FMA(value, w[v], sum[p][v]);
            }
        }
    }
#pragma GCC unroll 6
    for (int p = 0; p < P; p++) {
        float *to = r->dst + (x + p) * r->dst_row + m;
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) {
            const VECTOR value = r->cut ? MAX(sum[p][v], ZERO()) : sum[p][v];
            if (count >= (v + 1) * LANES) {
                STORE(to + v * LANES, value);
            } else {
                float whole[LANES];
                STORE(whole, value);
                memcpy(to + v * LANES, whole, (size_t)(count - v * LANES) * sizeof *whole);
            }
        }
    }
}

/* A row of the result. The last pixels are computed with some of those before them once more. */
static __attribute__((target(TARGET))) void
NAME(row)(const Rows *r, int64_t ow, int64_t channels)
{
    for (int64_t m = 0; m < channels; m += WIDEST * LANES) {
        const int64_t left = channels - m, count = left < WIDEST * LANES ? left : WIDEST * LANES;
        const int vectors = (int)((count + LANES - 1) / LANES);
        for (int64_t x = 0; x < ow; x += ow < 6 ? 1 : 6) {
            const int64_t at = ow >= 6 && x > ow - 6 ? ow - 6 : x;
            if (ow < 6)
                vectors == 1   ? NAME(block)(r, at, m, count, 1, 1)
                : vectors == 2 ? NAME(block)(r, at, m, count, 1, 2)
                : vectors == 3 ? NAME(block)(r, at, m, count, 1, WIDEST < 3 ? 1 : 3)
                               : NAME(block)(r, at, m, count, 1, WIDEST);
            else
                vectors == 1   ? NAME(block)(r, at, m, count, 6, 1)
                : vectors == 2 ? NAME(block)(r, at, m, count, 6, 2)
                : vectors == 3 ? NAME(block)(r, at, m, count, 6, WIDEST < 3 ? 1 : 3)
                               : NAME(block)(r, at, m, count, 6, WIDEST);
        }
    }
}

#undef NAME
#undef TARGET
#undef VECTOR
#undef LANES
#undef WIDEST
#undef LOAD
#undef STORE
#undef SET
#undef FMA
#undef MAX
#undef ZERO
