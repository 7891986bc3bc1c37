// The clock on the wall of a process that loads this is ahead by as many seconds as /scratch/skew says.
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
