#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>
#include <stdio.h>

struct control { int64_t seconds; int32_t error, left, hits, spare; char folder[1024]; };
static struct control *control;

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("MEGATRON_LLAMA_CHAOS_CONTROL");
    int file = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
    if (file < 0) return;
    void *found = mmap(0, sizeof *control, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (found != MAP_FAILED) control = found;
    close(file);
}
#define REAL(name) static __typeof__(&name) real; if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

/* Return whether an operation on this path fails, and set errno. After a countdown, all operations fail. */
static int fails(const char *path) {
    if (!control || !control->error || !path || strncmp(path, control->folder, strlen(control->folder))) return 0;
    if (__atomic_fetch_sub(&control->left, 1, __ATOMIC_SEQ_CST) > 0) return 0;
    __atomic_fetch_add(&control->hits, 1, __ATOMIC_SEQ_CST);
    errno = control->error;
    return 1;
}
static int fails_fd(int file) {
    char link[32], path[4096];
    if (!control || !control->error) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t n = readlink(link, path, sizeof path - 1);
    if (n < 0) return 0;
    path[n] = 0;
    return fails(path);
}
/* A full disk rejects new files, but allows rename and removal. */
static int full(void) { return control && control->error == ENOSPC; }

ssize_t write(int file, const void *data, size_t size) {
    REAL(write); return fails_fd(file) ? -1 : real(file, data, size);
}
ssize_t writev(int file, const struct iovec *v, int n) { REAL(writev); return fails_fd(file) ? -1 : real(file, v, n); }
ssize_t pwrite(int file, const void *data, size_t size, off_t at) {
    REAL(pwrite); return fails_fd(file) ? -1 : real(file, data, size, at);
}
ssize_t pwrite64(int file, const void *data, size_t size, off64_t at) {
    REAL(pwrite64); return fails_fd(file) ? -1 : real(file, data, size, at);
}
int mkdir(const char *path, mode_t mode) { REAL(mkdir); return fails(path) ? -1 : real(path, mode); }
int rename(const char *from, const char *to) { REAL(rename); return !full() && fails(to) ? -1 : real(from, to); }
int unlink(const char *path) { REAL(unlink); return !full() && fails(path) ? -1 : real(path); }
int rmdir(const char *path) { REAL(rmdir); return !full() && fails(path) ? -1 : real(path); }
int fsync(int file) { REAL(fsync); return !full() && fails_fd(file) ? -1 : real(file); }

#define WRITES(flags) ((flags) & (O_WRONLY | O_RDWR | O_CREAT | O_TRUNC))
#define OPEN(name) int name(const char *path, int flags, ...) { \
    REAL(name); va_list more; va_start(more, flags); mode_t mode = va_arg(more, int); va_end(more); \
    return WRITES(flags) && fails(path) ? -1 : real(path, flags, mode); }
OPEN(open) OPEN(open64)
#define OPENAT(name) int name(int folder, const char *path, int flags, ...) { \
    REAL(name); va_list more; va_start(more, flags); mode_t mode = va_arg(more, int); va_end(more); \
    return WRITES(flags) && fails(path) ? -1 : real(folder, path, flags, mode); }
OPENAT(openat) OPENAT(openat64)

static int64_t jump(void) { return control ? control->seconds : 0; }
int clock_gettime(clockid_t clock, struct timespec *now) {
    REAL(clock_gettime); int status = real(clock, now);
    if (!status && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += jump();
    return status;
}
int gettimeofday(struct timeval *now, void *zone) {
    REAL(gettimeofday); int status = real(now, zone); if (!status) now->tv_sec += jump(); return status;
}
time_t time(time_t *now) {
    struct timespec found;
    clock_gettime(CLOCK_REALTIME, &found);
    return now ? (*now = found.tv_sec) : found.tv_sec;
}
