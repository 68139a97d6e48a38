/* A library for LD_PRELOAD that sets a process's wall clock AHEAD seconds forward.
 *
 * A pretend host has the wall clock of its machine, because time namespaces shift only
 * the monotonic clock (time_namespaces(7)).
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
