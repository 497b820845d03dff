/* Loops of dense_kernels.c for one kind of processor: NAME and TARGET are defined before. Nothing is contracted, and sums have
   the order that the code says, so all kinds give the same bits. */

#define LOOP _Pragma("GCC ivdep") for (int64_t i = 0; i < n; i++)
#define EACH(EXPRESSION)                                                                                               \
    LOOP out[i] = (EXPRESSION);                                                                                        \
    break
#define TRUTH(EXPRESSION)                                                                                              \
    LOOP of[i] = (EXPRESSION) ? 1 : 0;                                                                                 \
    break

TARGET static void
NAME(map)(int64_t operation, const float *a, const float *b, const float *c, float *out, int64_t n)
{
    const int32_t *p = (const int32_t *)a, *q = (const int32_t *)b;
    int32_t *of = (int32_t *)out;
    switch (operation) {
    case D_COPY: memmove(out, a, (size_t)n * sizeof *out); break;
    case D_ADD: EACH(a[i] + b[i]);
    case D_SUBTRACT: EACH(a[i] - b[i]);
    case D_MULTIPLY: EACH(a[i] * b[i]);
    case D_DIVIDE: EACH(a[i] / b[i]);
    case D_MAXIMUM: EACH(larger(a[i], b[i]));
    case D_MINIMUM: EACH(smaller(a[i], b[i]));
    case D_NEGATE: LOOP of[i] = p[i] ^ INT32_MIN; break;
    case D_EXPONENTIAL: EACH((float)exponential(a[i]));
    case D_LOG: EACH((float)logarithm(a[i]));
    case D_SQRT: EACH(__builtin_sqrtf(a[i]));
    case D_TANH: EACH((float)tangent(a[i]));
    case D_LOGISTIC: EACH((float)(1.0 / (1.0 + exponential(-(double)a[i]))));
    case D_SELECT: EACH(p[i] ? b[i] : c[i]);
    case D_FLOAT: EACH((float)p[i]);
    case D_EQ: TRUTH(a[i] == b[i]);
    case D_NE: TRUTH(a[i] != b[i]);
    case D_LT: TRUTH(a[i] < b[i]);
    case D_LE: TRUTH(a[i] <= b[i]);
    case D_GT: TRUTH(a[i] > b[i]);
    case D_GE: TRUTH(a[i] >= b[i]);
    case D_INT_EQ: TRUTH(p[i] == q[i]);
    case D_INT_NE: TRUTH(p[i] != q[i]);
    case D_INT_LT: TRUTH(p[i] < q[i]);
    case D_INT_LE: TRUTH(p[i] <= q[i]);
    case D_INT_GT: TRUTH(p[i] > q[i]);
    case D_INT_GE: TRUTH(p[i] >= q[i]);
    case D_INT_ADD: LOOP of[i] = (int32_t)((uint32_t)p[i] + (uint32_t)q[i]); break;
    case D_AND: LOOP of[i] = p[i] & q[i]; break;
    case D_OR: LOOP of[i] = p[i] | q[i]; break;
    case D_NOT: LOOP of[i] = p[i] ^ 1; break;
    }
}

/* Sums of columns of a matrix, w at most WIDE: rows are added up in runs of RUN, then the runs, which rounds less. */
TARGET static void
NAME(sums)(const float *src, int64_t count, int64_t inner, int64_t w, float *dst)
{
    float total[WIDE] = {0};
    for (int64_t begin = 0; begin < count; begin += RUN) {
        const int64_t end = begin + RUN < count ? begin + RUN : count;
        float run[WIDE] = {0};
        if (w == WIDE) {
            Vector sum[WIDE / 16] = {{0}}, x;
            for (int64_t k = begin; k < end; k++)
                for (int j = 0; j < WIDE / 16; j++)
                    memcpy(&x, src + k * inner + 16 * j, sizeof x), sum[j] += x;
            memcpy(run, sum, sizeof run);
        } else
            for (int64_t k = begin; k < end; k++)
                for (int64_t j = 0; j < w; j++)
                    run[j] += src[k * inner + j];
        for (int j = 0; j < WIDE; j++)
            total[j] += run[j];
    }
    memcpy(dst, total, (size_t)w * sizeof *dst);
}

/* The sum of a row: of 16 sums, of every sixteenth element each, in pairs. */
TARGET static float
NAME(row_sum)(const float *src, int64_t count)
{
    Vector sum = {0}, x;
    float lane[16] = {0};
    int64_t i = 0;
    for (; i + 16 <= count; i += 16)
        memcpy(&x, src + i, sizeof x), sum += x;
    if (i)
        memcpy(lane, &sum, sizeof lane);
    for (int64_t j = 0; i + j < count; j++)
        lane[j] += src[i + j];
    for (int width = 8; width; width /= 2)
        for (int j = 0; j < width; j++)
            lane[j] += lane[j + width];
    return lane[0];
}

TARGET static void
NAME(reduce)(int64_t operation, const float *src, int64_t outer, int64_t count, int64_t inner, float *dst)
{
    for (int64_t o = 0; o < outer; o++, src += count * inner, dst += inner) {
        if (operation == SUM && inner == 1) {
            dst[0] = NAME(row_sum)(src, count);
            continue;
        }
        for (int64_t at = 0; operation == SUM && at < inner; at += WIDE)
            NAME(sums)(src + at, count, inner, inner - at < WIDE ? inner - at : WIDE, dst + at);
        if (operation == SUM)
            continue;
        memcpy(dst, src, (size_t)inner * sizeof *dst);
        for (int64_t k = 1; operation == LARGEST && inner == 1 && k < count; k++)
            dst[0] = larger(src[k], dst[0]);
        for (int64_t k = operation == LARGEST && inner == 1 ? count : 1; k < count; k++)
            NAME(map)(operation == LARGEST ? D_MAXIMUM : operation == ALL ? D_AND : D_OR, src + k * inner, dst, NULL, dst, inner);
    }
}

#undef LOOP
#undef EACH
#undef TRUTH
#undef NAME
#undef TARGET
