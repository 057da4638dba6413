/* What the core needs of XLA's stable binary interface for custom calls, version 0.1 and later.
 *
 * These are layouts, as XLA documents them in xla/ffi/api/c_api.h; a test compares them with that
 * file.  It is not needed to compile the core.
 */
#ifndef MULTISTAGE_XLA_H
#define MULTISTAGE_XLA_H
#include <stddef.h>
#include <stdint.h>

enum { XLA_MAJOR = 0, XLA_MINOR = 1 };
enum { XLA_METADATA = 1, XLA_STRING = 4 }; /* kinds of extensions; of attributes */
enum { XLA_RESOURCE_EXHAUSTED = 8, XLA_FAILED_PRECONDITION = 9, XLA_INTERNAL = 13 };

typedef struct xla_extension {
    size_t size;
    int kind;
    struct xla_extension *next;
} xla_extension_t;

typedef struct {
    size_t size;
    xla_extension_t *extensions;
    int major, minor;
} xla_version_t;

typedef struct {
    size_t size;
    xla_version_t version;
    uint32_t traits;
} xla_metadata_t;

typedef struct {
    xla_extension_t base;
    xla_metadata_t *metadata;
} xla_metadata_extension_t;

typedef struct xla_error xla_error_t;

typedef struct {
    size_t size;
    xla_extension_t *extensions;
    const char *message;
    int code;
} xla_error_args_t;

typedef struct {
    size_t size;
    xla_extension_t *extensions;
    xla_version_t version;
    const void *internal;
    xla_error_t *(*error)(xla_error_args_t *);
} xla_api_t; /* more functions follow */

typedef struct {
    size_t size;
    xla_extension_t *extensions;
    int type;
    void *data;
    int64_t rank;
    int64_t *dims;
} xla_buffer_t;

typedef struct {
    size_t size;
    xla_extension_t *extensions;
    int64_t count;
    int *kinds;
    xla_buffer_t **buffers;
} xla_buffers_t;

typedef struct {
    const char *text;
    size_t length;
} xla_text_t;

typedef struct {
    int type;
    void *value;
} xla_scalar_t;

typedef struct {
    size_t size;
    xla_extension_t *extensions;
    int64_t count;
    int *kinds;
    xla_text_t **names; /* sorted */
    void **values;
} xla_attributes_t;

typedef struct {
    size_t size;
    xla_extension_t *extensions;
    const xla_api_t *api;
    void *context;
    int stage;
    xla_buffers_t arguments, results;
    xla_attributes_t attributes;
} xla_call_t;

#endif
