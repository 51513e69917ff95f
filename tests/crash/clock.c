/* Lets the wall clock of a process be ahead by as many seconds as the file CLOCK_OFFSET says, at any moment. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>

static volatile int64_t *offset;

__attribute__((constructor)) static void begin(void) {
    int file = open(getenv("CLOCK_OFFSET"), O_RDONLY);
    void *found = mmap(0, sizeof(int64_t), PROT_READ, MAP_SHARED, file, 0);
    if (found == MAP_FAILED) abort();
    offset = found;
}

int clock_gettime(clockid_t clock, struct timespec *told) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int code = real(clock, told);
    if (!code && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) told->tv_sec += *offset;
    return code;
}

int gettimeofday(struct timeval *told, void *zone) {
    static int (*real)(struct timeval *, void *);
    if (!real) real = dlsym(RTLD_NEXT, "gettimeofday");
    int code = real(told, zone);
    if (!code) told->tv_sec += *offset;
    return code;
}

time_t time(time_t *told) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (told) *told = now.tv_sec;
    return now.tv_sec;
}
