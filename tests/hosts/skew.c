// Moves the wall clock of a process that preloads this library ahead by the number of seconds in
// /scratch/skew.
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
int clock_gettime(clockid_t id, struct timespec *t) {
    int rc = syscall(SYS_clock_gettime, id, t);
    char text[32] = {0};
    int file = id == CLOCK_REALTIME ? syscall(SYS_openat, AT_FDCWD, "/scratch/skew", O_RDONLY | O_CLOEXEC) : -1;
    if (file >= 0) {
        if (syscall(SYS_read, file, text, 31) > 0) t->tv_sec += atol(text);
        syscall(SYS_close, file);
    }
    return rc;
}
