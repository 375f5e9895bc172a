/* Preloaded into a command under test: the FAULTY_N-th write, pwrite or fsync to a file whose path begins with
   FAULTY_PREFIX fails with EIO, as on a broken disk, and FAULTY_SAID then holds that path; with FAULTY_RANK only in the
   worker of that RANK. Where
   FAULTY_UNREADABLE begins a path, each read of such a file fails with EIO, or with FAULTY_ERRNO=13 each open with
   EACCES (root may open everything). With FAULTY_EXCHANGE names cannot be exchanged, as on NFS. Everything else goes
   through. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static int concerned(const char *prefix, const char *path) {
    const char *only = getenv("FAULTY_RANK"), *rank = getenv("RANK");
    if (only && (!rank || strcmp(only, rank))) return 0;
    return !strncmp(path, prefix, strlen(prefix));
}

static int path_of(int fd, char path[4096]) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, 4095);
    if (length < 0) return 0;
    path[length] = 0;
    return 1;
}

static int is_open_below(const char *prefix, int fd) {
    char path[4096];
    return path_of(fd, path) && concerned(prefix, path);
}

static void say(int fd) {
    char path[4096];
    const char *said = getenv("FAULTY_SAID");
    FILE *file = said && path_of(fd, path) ? fopen(said, "w") : NULL;
    if (!file) return;
    fputs(path, file);
    fclose(file);
}

static int fails(int fd) {
    static long calls;
    const char *prefix = getenv("FAULTY_PREFIX"), *nth = getenv("FAULTY_N");
    if (!prefix || !nth || !is_open_below(prefix, fd)) return 0;
    if (__atomic_add_fetch(&calls, 1, __ATOMIC_SEQ_CST) != atol(nth)) return 0;
    say(fd);
    return 1;
}

static int read_error(void) {
    const char *number = getenv("FAULTY_ERRNO");
    return number ? atoi(number) : EIO;
}

static int fails_to_read(int fd) {
    const char *prefix = getenv("FAULTY_UNREADABLE");
    return prefix && read_error() == EIO && is_open_below(prefix, fd);
}

static int fails_to_open(const char *path) {
    const char *prefix = getenv("FAULTY_UNREADABLE");
    return prefix && read_error() == EACCES && concerned(prefix, path);
}

#define FAULTY(type, name, parameters, ...)                                   \
    type name parameters {                                                    \
        static type(*real) parameters;                                        \
        if (!real) real = (type(*) parameters)dlsym(RTLD_NEXT, #name);        \
        if (fails(fd)) { errno = EIO; return -1; }                            \
        return real(__VA_ARGS__);                                             \
    }

FAULTY(ssize_t, write, (int fd, const void *data, size_t size), fd, data, size)
FAULTY(ssize_t, pwrite, (int fd, const void *data, size_t size, off_t at), fd, data, size, at)
FAULTY(ssize_t, pwrite64, (int fd, const void *data, size_t size, off_t at), fd, data, size, at)
FAULTY(int, fsync, (int fd), fd)

#define UNREADABLE(name, parameters, ...)                                     \
    ssize_t name parameters {                                                 \
        static ssize_t(*real) parameters;                                     \
        if (!real) real = (ssize_t(*) parameters)dlsym(RTLD_NEXT, #name);     \
        if (fails_to_read(fd)) { errno = EIO; return -1; }                    \
        return real(__VA_ARGS__);                                             \
    }

UNREADABLE(read, (int fd, void *data, size_t size), fd, data, size)
UNREADABLE(pread, (int fd, void *data, size_t size, off_t at), fd, data, size, at)
UNREADABLE(pread64, (int fd, void *data, size_t size, off_t at), fd, data, size, at)
UNREADABLE(preadv, (int fd, const struct iovec *pieces, int count, off_t at), fd, pieces, count, at)
UNREADABLE(preadv64, (int fd, const struct iovec *pieces, int count, off_t at), fd, pieces, count, at)
UNREADABLE(preadv2, (int fd, const struct iovec *pieces, int count, off_t at, int flags), fd, pieces, count, at, flags)
UNREADABLE(preadv64v2, (int fd, const struct iovec *pieces, int count, off_t at, int flags), fd, pieces, count, at, flags)

#define OPENS(name)                                                           \
    int name(const char *path, int flags, ...) {                              \
        static int (*real)(const char *, int, ...);                           \
        if (!real) real = (int (*)(const char *, int, ...))dlsym(RTLD_NEXT, #name); \
        va_list rest;                                                         \
        va_start(rest, flags);                                                \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0; \
        va_end(rest);                                                         \
        if (fails_to_open(path)) { errno = EACCES; return -1; }               \
        return real(path, flags, mode);                                       \
    }

OPENS(open)
OPENS(open64)

int renameat2(int from, const char *old, int to, const char *new, unsigned flags) {
    static int (*real)(int, const char *, int, const char *, unsigned);
    if (!real) real = (int (*)(int, const char *, int, const char *, unsigned))dlsym(RTLD_NEXT, "renameat2");
    if (flags && getenv("FAULTY_EXCHANGE")) { errno = EINVAL; return -1; }
    return real(from, old, to, new, flags);
}
