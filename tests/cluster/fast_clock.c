/* Loaded before the C library, it makes a process's wall clock AHEAD seconds fast.
 *
 * A pretend host has the clock of its machine: namespaces of time shift the monotonic
 * clock only (time_namespaces(7)).
 */
#define _GNU_SOURCE
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

int clock_gettime(clockid_t clock, struct timespec *now)
{
    int failed = syscall(SYS_clock_gettime, clock, now);
    if (!failed && clock == CLOCK_REALTIME)
        now->tv_sec += AHEAD;
    return failed;
}
