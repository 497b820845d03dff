/* The functions of oneDNN's C interface that are used here, found in a shared library when it is loaded. The numbers are
   those of version 3, whose interface does not change until version 4. */

#ifndef PODRUN_LIBRARY_H
#define PODRUN_LIBRARY_H

#include <stddef.h>
#include <stdint.h>

typedef struct dnnl_engine *Engine;
typedef struct dnnl_stream *Stream;
typedef struct dnnl_memory_desc *Layout;
typedef struct dnnl_memory *Memory;
typedef struct dnnl_primitive *Primitive;
typedef struct dnnl_primitive_desc *Description;
typedef struct dnnl_primitive_attr *Attributes;
typedef struct dnnl_post_ops *PostOps;
typedef int64_t Dims[12];
typedef struct {
    int which;
    Memory memory;
} Argument;
typedef struct {
    int major, minor, patch;
} Version; /* the first fields of a larger structure */

enum { CPU = 1, F32 = 3, ANY = 1, INFERENCE = 96, DIRECT = 1, RELU = 32, ADD = 0x1fff0, USER_SCRATCH = 1, IN_ORDER = 1 };
enum { AVX2 = 0x7, AVX512 = 0x27 }; /* bits of instruction sets */
enum { ASK_NAME = 8, ASK_SRC = 129, ASK_DIFF_SRC, ASK_WEIGHTS, ASK_DIFF_WEIGHTS, ASK_DST, ASK_DIFF_DST, ASK_SCRATCH = 136 };
enum { ARG_SRC = 1, ARG_DST = 17, ARG_WEIGHTS = 33, ARG_BIAS = 41, ARG_SCRATCH = 80, ARG_DIFF_SRC = 129, ARG_DIFF_DST = 145,
       ARG_DIFF_WEIGHTS = 161, ARG_POST_OP = 32768, ARG_SRC_1 = 2 };

#define LIBRARY(F)                                                                                                    \
    F(const Version *, dnnl_version, (void))                                                                           \
    F(int, dnnl_set_primitive_cache_capacity, (int))                                                                   \
    F(int, dnnl_get_effective_cpu_isa, (void))                                                                         \
    F(int, dnnl_engine_create, (Engine *, int, size_t))                                                                \
    F(int, dnnl_stream_create, (Stream *, Engine, unsigned))                                                           \
    F(int, dnnl_stream_destroy, (Stream))                                                                              \
    F(int, dnnl_memory_desc_create_with_strides, (Layout *, int, const int64_t *, int, const int64_t *))               \
    F(int, dnnl_memory_desc_create_with_tag, (Layout *, int, const int64_t *, int, int))                               \
    F(int, dnnl_memory_desc_clone, (Layout *, Layout))                                                                 \
    F(int, dnnl_memory_desc_destroy, (Layout))                                                                         \
    F(int, dnnl_memory_desc_equal, (Layout, Layout))                                                                   \
    F(size_t, dnnl_memory_desc_get_size, (Layout))                                                                     \
    F(int, dnnl_memory_create, (Memory *, Layout, Engine, void *))                                                     \
    F(int, dnnl_memory_set_data_handle, (Memory, void *))                                                              \
    F(int, dnnl_memory_destroy, (Memory))                                                                              \
    F(int, dnnl_primitive_attr_create, (Attributes *))                                                                 \
    F(int, dnnl_primitive_attr_destroy, (Attributes))                                                                  \
    F(int, dnnl_primitive_attr_set_scratchpad_mode, (Attributes, int))                                                 \
    F(int, dnnl_primitive_attr_set_post_ops, (Attributes, PostOps))                                                    \
    F(int, dnnl_post_ops_create, (PostOps *))                                                                          \
    F(int, dnnl_post_ops_destroy, (PostOps))                                                                           \
    F(int, dnnl_post_ops_append_binary, (PostOps, int, Layout))                                                        \
    F(int, dnnl_post_ops_append_eltwise, (PostOps, int, float, float))                                                 \
    F(int, dnnl_convolution_forward_primitive_desc_create,                                                             \
      (Description *, Engine, int, int, Layout, Layout, Layout, Layout, const int64_t *, const int64_t *,              \
       const int64_t *, const int64_t *, Attributes))                                                                  \
    F(int, dnnl_convolution_backward_data_primitive_desc_create,                                                       \
      (Description *, Engine, int, Layout, Layout, Layout, const int64_t *, const int64_t *, const int64_t *,          \
       const int64_t *, Description, Attributes))                                                                      \
    F(int, dnnl_convolution_backward_weights_primitive_desc_create,                                                    \
      (Description *, Engine, int, Layout, Layout, Layout, Layout, const int64_t *, const int64_t *, const int64_t *,  \
       const int64_t *, Description, Attributes))                                                                      \
    F(int, dnnl_reorder_primitive_desc_create, (Description *, Layout, Engine, Layout, Engine, Attributes))            \
    F(Layout, dnnl_primitive_desc_query_md, (Description, int, int))                                                   \
    F(int, dnnl_primitive_desc_query, (Description, int, int, void *))                                                 \
    F(int, dnnl_primitive_desc_destroy, (Description))                                                                 \
    F(int, dnnl_primitive_create, (Primitive *, Description))                                                          \
    F(int, dnnl_primitive_execute, (Primitive, Stream, int, const Argument *))                                         \
    F(int, dnnl_primitive_destroy, (Primitive))                                                                        \
    F(int, dnnl_sgemm, (char, char, int64_t, int64_t, int64_t, float, const float *, int64_t, const float *, int64_t,  \
                        float, float *, int64_t))                                                                      \
    F(void, omp_set_num_threads, (int))                                                                                \
    F(int, omp_get_max_threads, (void))

#define DECLARE(RESULT, NAME, PARAMETERS) RESULT (*NAME) PARAMETERS;
typedef struct {
    LIBRARY(DECLARE)
} Library;
#undef DECLARE

extern Library onednn;
extern Engine engine; /* its one CPU engine; NULL until the library is loaded */

/* Load a shared library; NULL, or what is wrong. Once in a process. */
const char *library_load(const char *path);

#endif
