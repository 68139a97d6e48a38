/* A library for LD_PRELOAD that lets calls of the C library fail when a test says so.
 *
 * After failing_arm(call, code, after, lasting, folder), call number `after` (from 0) of
 * this kind on files in the folder fails with errno `code`, and with `lasting` all later
 * calls, too. failing_calls() returns the number of calls; failing_disarm() stops this.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static char armed_call[32], armed_folder[4096];
static int armed_code, armed_lasting;
static long armed_after;
static atomic_long calls;
static atomic_int armed;

void failing_arm(const char *call, int code, long after, int lasting,
                 const char *folder)
{
    atomic_store(&armed, 0);
    snprintf(armed_call, sizeof armed_call, "%s", call);
    snprintf(armed_folder, sizeof armed_folder, "%s/", folder);
    armed_code = code;
    armed_after = after;
    armed_lasting = lasting;
    atomic_store(&calls, 0);
    atomic_store(&armed, 1);
}

void failing_disarm(void) { atomic_store(&armed, 0); }

long failing_calls(void) { return atomic_load(&calls); }

static int fails_path(const char *call, const char *path)
{
    char name[4096];
    if (!atomic_load(&armed) || strcmp(call, armed_call))
        return 0;
    /* Add the slash, because calls on the folder itself count, too. */
    snprintf(name, sizeof name, "%s/", path);
    if (strncmp(name, armed_folder, strlen(armed_folder)))
        return 0;
    long number = atomic_fetch_add(&calls, 1);
    if (number != armed_after && !(armed_lasting && number > armed_after))
        return 0;
    errno = armed_code;
    return 1;
}

static int fails(const char *call, int file)
{
    char link[64], path[4000];
    if (!atomic_load(&armed) || strcmp(call, armed_call))
        return 0;
    int before = errno;
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, path, sizeof path - 1);
    errno = before;
    if (length < 0)
        return 0;
    path[length] = 0;
    return fails_path(call, path);
}

/* Define a function that fails if armed, and otherwise calls the original function. */
#define DEFINE(type, name, parameters, arguments, question)             \
    type name parameters                                                \
    {                                                                   \
        static type(*next) parameters;                                  \
        if (!next)                                                      \
            next = (type(*) parameters)dlsym(RTLD_NEXT, #name);         \
        if (question)                                                   \
            return -1;                                                  \
        return next arguments;                                          \
    }

DEFINE(ssize_t, pwrite, (int file, const void *data, size_t count, off_t place),
       (file, data, count, place), fails("pwrite", file))
DEFINE(ssize_t, pwrite64, (int file, const void *data, size_t count, off64_t place),
       (file, data, count, place), fails("pwrite", file))
DEFINE(ssize_t, preadv, (int file, const struct iovec *parts, int count, off_t place),
       (file, parts, count, place), fails("preadv", file))
DEFINE(ssize_t, preadv64,
       (int file, const struct iovec *parts, int count, off64_t place),
       (file, parts, count, place), fails("preadv", file))
DEFINE(ssize_t, preadv2,
       (int file, const struct iovec *parts, int count, off_t place, int flags),
       (file, parts, count, place, flags), fails("preadv", file))
DEFINE(ssize_t, preadv64v2,
       (int file, const struct iovec *parts, int count, off64_t place, int flags),
       (file, parts, count, place, flags), fails("preadv", file))
DEFINE(int, fsync, (int file), (file), fails("fsync", file))
DEFINE(int, ftruncate, (int file, off_t size), (file, size), fails("ftruncate", file))
DEFINE(int, ftruncate64, (int file, off64_t size), (file, size),
       fails("ftruncate", file))
DEFINE(int, fallocate, (int file, int mode, off_t place, off_t size),
       (file, mode, place, size), fails("fallocate", file))
DEFINE(int, fallocate64, (int file, int mode, off64_t place, off64_t size),
       (file, mode, place, size), fails("fallocate", file))
DEFINE(int, link, (const char *path, const char *name), (path, name),
       fails_path("link", name))
DEFINE(int, linkat,
       (int where, const char *path, int folder, const char *name, int flags),
       (where, path, folder, name, flags), fails_path("link", name))
DEFINE(int, rename, (const char *path, const char *name), (path, name),
       fails_path("rename", name))
DEFINE(int, renameat,
       (int where, const char *path, int folder, const char *name),
       (where, path, folder, name), fails_path("rename", name))
