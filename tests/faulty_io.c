/* Preloaded into a command under test: the FAULTY_N-th write, pwrite or fsync to a file whose path begins with
   FAULTY_PREFIX fails with EIO, as on a broken disk; with FAULTY_RANK only in the worker of that RANK. Everything
   else goes through. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

static int fails(int fd) {
    static long calls;
    const char *prefix = getenv("FAULTY_PREFIX"), *nth = getenv("FAULTY_N");
    const char *only = getenv("FAULTY_RANK"), *rank = getenv("RANK");
    char link[64], path[4096];
    if (!prefix || !nth) return 0;
    if (only && (!rank || strcmp(only, rank))) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return 0;
    path[length] = 0;
    if (strncmp(path, prefix, strlen(prefix))) return 0;
    return __atomic_add_fetch(&calls, 1, __ATOMIC_SEQ_CST) == atol(nth);
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
