/* Custom calls of compiled programs: loop.h for XLA, on the CPU.
 *
 *     multistage_begin  any inputs -> run, every;  folder, and the numbers of loop_options_t
 *     multistage_turn   numbers of runs, token -> run, every, token;  what begin has
 *     multistage_save   run, token, k, leaves of the state before block k -> token
 *     multistage_load   run, token, k, steps, every, leaves of state 0 -> token, j, leaves of the
 *                       state before block j <= k;  what begin has
 *
 * The calls have no side effects for XLA: a token, a number that each call takes and returns,
 * orders them, and the number of the run, whose operands the states follow from, ties them to one
 * execution.
 */
#include "core.h"
#include "stream.h"
#include "loop.h"
#include "xla.h"

#if defined(__linux__)
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LINE = 64, FEW = 64 };

EXPORT xla_error_t *ms_xla_begin(xla_call_t *call);
EXPORT xla_error_t *ms_xla_turn(xla_call_t *call);
EXPORT xla_error_t *ms_xla_save(xla_call_t *call);
EXPORT xla_error_t *ms_xla_load(xla_call_t *call);

/* XLA asks first which version of the interface a handler was made for. */
static int asks(const xla_call_t *call)
{
    for (xla_extension_t *e = call->extensions; e; e = e->next)
        if (e->kind == XLA_METADATA) {
            xla_metadata_t *metadata = ((xla_metadata_extension_t *)e)->metadata;
            metadata->version.major = XLA_MAJOR;
            metadata->version.minor = XLA_MINOR;
            metadata->traits = 0;
            return 1;
        }
    return 0;
}

static xla_error_t *fail(const xla_call_t *call, int code, const char *message)
{
    xla_error_args_t args = {offsetof(xla_error_args_t, code) + sizeof args.code, NULL, message, code};
    return call->api->error(&args);
}

static xla_error_t *told(const xla_call_t *call, int64_t answer)
{
    char text[160];
    switch (answer) {
    case 0:
        return NULL;
    case ECHILD:
        return fail(call, XLA_FAILED_PRECONDITION,
                    "multistage: a forked process cannot run loops of its parent; start it by spawn");
    default:
        snprintf(text, sizeof text,
                 "multistage: the tier of a loop, tiers= in its call, cannot be opened: %s",
                 strerror((int)answer));
        return fail(call, XLA_RESOURCE_EXHAUSTED, text);
    }
}

static int64_t width(int type) /* bytes of an element, by xla::PrimitiveType */
{
    switch (type) {
    case 18:
        return 16; /* C128 */
    case 5: case 9: case 12: case 15:
        return 8; /* S64, U64, F64, C64 */
    case 4: case 8: case 11:
        return 4; /* S32, U32, F32 */
    case 3: case 7: case 10: case 16:
        return 2; /* S16, U16, F16, BF16 */
    default:
        return 1; /* no others are given that are packed more tightly */
    }
}

static int64_t bytes_of(const xla_buffer_t *b)
{
    int64_t n = width(b->type);
    for (int64_t i = 0; i < b->rank; i++)
        n *= b->dims[i];
    return n;
}

/* The buffers from `first` on, one after the other at multiples of a line. */
static void pieces_of(const xla_buffers_t *given, int64_t first, piece_t *pieces)
{
    int64_t at = 0;
    for (int64_t i = first; i < given->count; i++) {
        const xla_buffer_t *b = given->buffers[i];
        *pieces++ = (piece_t){b->data, at, bytes_of(b)};
        at += (bytes_of(b) + LINE - 1) / LINE * LINE;
    }
}

static int64_t number(const xla_attributes_t *given, const char *name)
{
    for (int64_t i = 0; i < given->count; i++)
        if (given->names[i]->length == strlen(name) &&
            !memcmp(given->names[i]->text, name, strlen(name)))
            return *(int64_t *)((xla_scalar_t *)given->values[i])->value;
    return 0;
}

static xla_text_t site_of(const xla_attributes_t *given, loop_options_t *options)
{
    *options = (loop_options_t){
        .site = number(given, "site"),
        .steps = number(given, "steps"),
        .least_every = number(given, "least_every"),
        .most_every = number(given, "most_every"),
        .buffer_bytes = number(given, "buffer_bytes"),
        .capacity_bytes = number(given, "capacity_bytes"),
    };
    xla_text_t folder = {"", 0};
    for (int64_t i = 0; i < given->count; i++)
        if (given->kinds[i] == XLA_STRING)
            folder = *(xla_text_t *)given->values[i];
    return folder;
}

xla_error_t *ms_xla_begin(xla_call_t *call)
{
    if (asks(call))
        return NULL;
    loop_options_t options;
    xla_text_t folder = site_of(&call->attributes, &options);
    int64_t run = 0, every = 1;
    int64_t answer = ms_loop_begin(folder.text, (int64_t)folder.length, &options, &run, &every);
    *(uint32_t *)call->results.buffers[0]->data = (uint32_t)run;
    *(int32_t *)call->results.buffers[1]->data = (int32_t)every;
    return told(call, answer);
}

xla_error_t *ms_xla_turn(xla_call_t *call)
{
    if (asks(call))
        return NULL;
    loop_options_t options;
    xla_text_t folder = site_of(&call->attributes, &options);
    const xla_buffer_t *numbers = call->arguments.buffers[0];
    int64_t run = 0, every = 0, n = bytes_of(numbers) / (int64_t)sizeof(uint32_t);
    int64_t answer = ms_loop_turn(folder.text, (int64_t)folder.length, &options, numbers->data, n, &run, &every);
    *(uint32_t *)call->results.buffers[0]->data = (uint32_t)run;
    *(int32_t *)call->results.buffers[1]->data = (int32_t)every;
    *(uint32_t *)call->results.buffers[2]->data = 0;
    return told(call, answer);
}

static int64_t run_of(const xla_buffers_t *given) { return *(uint32_t *)given->buffers[0]->data; }
static uint32_t token(const xla_buffers_t *given) { return *(uint32_t *)given->buffers[1]->data; }
static int64_t integer(const xla_buffers_t *given, int i) { return *(int32_t *)given->buffers[i]->data; }

xla_error_t *ms_xla_save(xla_call_t *call)
{
    if (asks(call))
        return NULL;
    const xla_buffers_t *given = &call->arguments;
    int64_t n = given->count - 3, answer = ENOMEM;
    piece_t few[FEW], *pieces = n <= FEW ? few : malloc((size_t)n * sizeof *pieces);
    if (pieces) {
        pieces_of(given, 3, pieces);
        answer = ms_loop_save(run_of(given), integer(given, 2), pieces, n);
    }
    if (pieces != few)
        free(pieces);
    *(uint32_t *)call->results.buffers[0]->data = token(given) + 1;
    return told(call, answer);
}

xla_error_t *ms_xla_load(xla_call_t *call)
{
    if (asks(call))
        return NULL;
    const xla_buffers_t *given = &call->arguments, *made = &call->results;
    int64_t n = made->count - 2, answer = ENOMEM;
    piece_t few[2 * FEW], *pieces = n <= FEW ? few : malloc((size_t)n * 2 * sizeof *pieces);
    loop_load_t asked = {run_of(given), integer(given, 2), integer(given, 3), integer(given, 4), 0};
    if (pieces) {
        loop_options_t options;
        xla_text_t folder = site_of(&call->attributes, &options);
        pieces_of(made, 2, pieces);
        pieces_of(given, 5, pieces + n);
        answer = ms_loop_load(folder.text, (int64_t)folder.length, &options, &asked, pieces, n);
        if (!asked.found)
            for (int64_t i = 0; i < n; i++)
                memcpy((char *)pieces[i].data, pieces[n + i].data, (size_t)pieces[i].nbytes);
    }
    if (pieces != few)
        free(pieces);
    *(uint32_t *)made->buffers[0]->data = token(given) + 1;
    *(int32_t *)made->buffers[1]->data = (int32_t)asked.found;
    return told(call, answer);
}

#endif
