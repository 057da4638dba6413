/* Preloaded by tests/backends/test_real_faults.py: makes the system's reads and
 * writes of our files short, interrupted or failing, at chosen calls.
 *
 * Only descriptors of nameless files are touched, wherever the
 * call comes from: the interpreter, its io module, or the C core. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

enum { OFF, FAIL, SHORT, NOTHING };

static atomic_int mode, code, first, lasting, writes, reads;
static atomic_int calls[2], hits;

void shim_set(int what, int error, int at, int from_there_on, int on_writes, int on_reads)
{
  mode = OFF;
  code = error;
  first = at;
  lasting = from_there_on;
  writes = on_writes;
  reads = on_reads;
  calls[0] = calls[1] = hits = 0;
  mode = what;
}

int shim_hits(void) { return hits; }

static int ours(int fd)
{
  char link[64], name[4096];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t n = readlink(link, name, sizeof name - 1);
  if (n < 0)
    return 0;
  name[n] = 0;
  return strstr(name, "/#") && strstr(name, " (deleted)");
}

/* Whether this call is hit: returns the mode, OFF if it is not. */
static int hit(int fd, int is_write)
{
  int saved = errno, found = mode;
  if (found == OFF || !(is_write ? writes : reads) || !ours(fd)) {
    errno = saved;
    return OFF;
  }
  int number = atomic_fetch_add(&calls[is_write], 1);
  errno = saved;
  if (lasting ? number < first : number != first)
    return OFF;
  atomic_fetch_add(&hits, 1);
  return found;
}

#define REAL(name)                                      \
  static __typeof__(name) *real;                        \
  if (!real)                                            \
  real = (__typeof__(name) *)dlsym(RTLD_NEXT, #name)

/* Some half of it, in whole pages as direct transfers want them. */
static size_t less(size_t n) { return n > 8192 ? n / 2 & ~(size_t)4095 : n > 4096 ? 4096 : (n + 1) / 2; }

#define PLAIN(name, is_write, pointer, position_parameter, position)                           \
  ssize_t name(int fd, pointer data, size_t n position_parameter)                              \
  {                                                                                            \
    REAL(name);                                                                                \
    switch (hit(fd, is_write)) {                                                               \
    case FAIL: errno = code; return -1;                                                        \
    case NOTHING: return 0;                                                                    \
    case SHORT: return real(fd, data, less(n) position);                                       \
    default: return real(fd, data, n position);                                                \
    }                                                                                          \
  }

#define VECTOR(name, is_write, parameters, arguments)                                          \
  ssize_t name(int fd, const struct iovec *parts, int count parameters)                        \
  {                                                                                            \
    REAL(name);                                                                                \
    struct iovec one;                                                                          \
    switch (hit(fd, is_write)) {                                                               \
    case FAIL: errno = code; return -1;                                                        \
    case NOTHING: return 0;                                                                    \
    case SHORT:                                                                                \
      one.iov_base = parts[0].iov_base;                                                        \
      one.iov_len = less(parts[0].iov_len);                                                    \
      return real(fd, &one, 1 arguments);                                                      \
    default: return real(fd, parts, count arguments);                                          \
    }                                                                                          \
  }

#define COMMA ,
PLAIN(write, 1, const void *, , )
PLAIN(read, 0, void *, , )
PLAIN(pwrite, 1, const void *, COMMA off_t at, COMMA at)
PLAIN(pread, 0, void *, COMMA off_t at, COMMA at)
PLAIN(pwrite64, 1, const void *, COMMA off64_t at, COMMA at)
PLAIN(pread64, 0, void *, COMMA off64_t at, COMMA at)
VECTOR(writev, 1, , )
VECTOR(readv, 0, , )
VECTOR(pwritev, 1, COMMA off_t at, COMMA at)
VECTOR(preadv, 0, COMMA off_t at, COMMA at)
VECTOR(pwritev64, 1, COMMA off64_t at, COMMA at)
VECTOR(preadv64, 0, COMMA off64_t at, COMMA at)
VECTOR(pwritev2, 1, COMMA off_t at COMMA int flags, COMMA at COMMA flags)
VECTOR(preadv2, 0, COMMA off_t at COMMA int flags, COMMA at COMMA flags)
VECTOR(pwritev64v2, 1, COMMA off64_t at COMMA int flags, COMMA at COMMA flags)
VECTOR(preadv64v2, 0, COMMA off64_t at COMMA int flags, COMMA at COMMA flags)

/* Returns its error, and takes room: counted as a write, refused as one. */
#define ALLOCATE(name, off)                                                                    \
  int name(int fd, off at, off n)                                                              \
  {                                                                                            \
    REAL(name);                                                                                \
    return hit(fd, 1) == FAIL ? code : real(fd, at, n);                                        \
  }
ALLOCATE(posix_fallocate, off_t)
ALLOCATE(posix_fallocate64, off64_t)
