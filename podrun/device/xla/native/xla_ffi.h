/* What of XLA's foreign function interface this module uses: the C structures of version 0, as jaxlib's `c_api.h` lays
   them out. Declared here so that installing podrun needs no jaxlib to compile against. XLA asks each handler which
   version it was written for and refuses another major one or a greater minor one; structures only grow at their ends. */

#ifndef PODRUN_XLA_FFI_H
#define PODRUN_XLA_FFI_H

#include <stddef.h>
#include <stdint.h>

enum { FFI_MAJOR = 0, FFI_MINOR = 1 };
enum { FFI_METADATA = 1 };                  /* extension types */
enum { FFI_INVALID = 3, FFI_INTERNAL = 13 }; /* error codes */
enum { FFI_F16 = 10, FFI_F32 = 11, FFI_S64 = 5, FFI_S32 = 4, FFI_U32 = 8 }; /* data types */
enum { FFI_BUFFER = 1, FFI_ARRAY = 1 };     /* kinds of arguments and results, of attributes */
enum { FFI_EXECUTE = 3 };                   /* stages */

typedef struct FfiError FfiError;

typedef struct FfiExtension {
    size_t size;
    int type;
    struct FfiExtension *next;
} FfiExtension;

typedef struct {
    size_t size;
    FfiExtension *extension;
    int major, minor;
} FfiVersion;

typedef struct {
    size_t size;
    FfiVersion version;
    uint32_t traits;
} FfiMetadata;

typedef struct {
    FfiExtension base;
    FfiMetadata *metadata;
} FfiMetadataExtension;

typedef struct {
    size_t size;
    FfiExtension *extension;
    const char *message;
    int code;
} FfiErrorArguments;

typedef struct {
    size_t size;
    FfiExtension *extension;
    FfiVersion version;
    const void *internal;
    FfiError *(*error)(FfiErrorArguments *);
} FfiApi;

typedef struct {
    size_t size;
    FfiExtension *extension;
    int type;
    void *data;
    int64_t rank;
    int64_t *dims;
} FfiBuffer;

typedef struct {
    const char *text;
    size_t length;
} FfiSpan;

typedef struct {
    int type;
    size_t length;
    void *data;
} FfiArray;

typedef struct { /* of arguments, and of results */
    size_t size;
    FfiExtension *extension;
    int64_t count;
    int *kinds;
    void **values;
} FfiValues;

typedef struct {
    size_t size;
    FfiExtension *extension;
    int64_t count;
    int *kinds;
    FfiSpan **names;
    void **values;
} FfiAttributes;

typedef struct {
    size_t size;
    FfiExtension *extension;
    const FfiApi *api;
    void *context;
    int stage;
    FfiValues arguments, results;
    FfiAttributes attributes;
} FfiCall;

/* What all handlers do: give an error, answer XLA's question for their version, find the numbers that say what a call computes
   (NULL without them), count a buffer's elements of float32 (-1 and less: it has others). */
static inline FfiError *
failed(const FfiCall *call, int code, const char *message)
{
    FfiErrorArguments arguments = {sizeof arguments, NULL, message, code};
    return call->api->error(&arguments);
}

static inline FfiError *
described(const FfiCall *call)
{
    FfiExtension *extension = call->extension;
    if (!extension || extension->type != FFI_METADATA)
        return NULL;
    FfiMetadata *metadata = ((FfiMetadataExtension *)extension)->metadata;
    metadata->version.major = FFI_MAJOR;
    metadata->version.minor = FFI_MINOR;
    return NULL;
}

static inline const FfiArray *
numbers_of(const FfiCall *call)
{
    const FfiAttributes *attributes = &call->attributes;
    const FfiArray *numbers = attributes->count == 1 && attributes->kinds[0] == FFI_ARRAY ? attributes->values[0] : NULL;
    return numbers && numbers->type == FFI_S64 ? numbers : NULL;
}

static inline int64_t
elements_of(const FfiBuffer *buffer, int type)
{
    int64_t count = buffer->type == type ? 1 : -1;
    for (int64_t i = 0; i < buffer->rank; i++)
        count *= buffer->dims[i];
    return count;
}

static inline int64_t
elements(const FfiBuffer *buffer)
{
    return elements_of(buffer, FFI_F32);
}

#endif
