/* The checksum of what passes through the engine, by AVX2 where the processor has it: all else of
 * the core runs on any x86-64.  A state of XXH3 is the same for both. */
#define _GNU_SOURCE
#include "io_bytes.h"

#if defined(__linux__) && defined(__x86_64__)
#include <immintrin.h>
#include <stdlib.h>
#include <string.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2")
#endif
#define XXH_VECTOR XXH_AVX2
#define XXH_INLINE_ALL
#define XXH_NO_STDLIB
#include "xxhash/xxhash.h"

static void add_by_avx2(void *sum, const char *data, int64_t nbytes)
{
    XXH3_64bits_update(sum, data, (size_t)nbytes);
}

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

sum_t *io_faster_sum(sum_t *plain)
{
    return __builtin_cpu_supports("avx2") ? add_by_avx2 : plain;
}

#else

sum_t *io_faster_sum(sum_t *plain) { return plain; }
#endif
